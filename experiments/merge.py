"""Join result files of runs that went on side by side: the later file wins where both have a value.

python -m experiments.merge part1/deep.json part2/deep.json --out results/deep.json
"""

import argparse
import json
from pathlib import Path
from typing import Any


def merged(first: Any, second: Any) -> Any:
    """Both records; dictionaries are joined key by key."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return first | {k: merged(first[k], v) if k in first else v for k, v in second.items()}


def main() -> None:
    """Read the files in order and write what they have together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", type=Path, help="the files to join, in this order")
    parser.add_argument("--out", type=Path, required=True, help="the file, read first if it exists")
    args = parser.parse_args()
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    for part in args.parts:
        record = merged(record, json.loads(part.read_text()))
    args.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
