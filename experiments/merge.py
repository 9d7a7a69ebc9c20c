"""Join result files of runs that went on side by side: the later file wins where both have a value.

python -m experiments.merge results/deep.json part1/deep.json part2/deep.json
"""

import json
import sys
from pathlib import Path
from typing import Any


def merged(first: Any, second: Any) -> Any:
    """Both records; dictionaries are joined key by key."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return second
    return first | {k: merged(first[k], v) if k in first else v for k, v in second.items()}


def main() -> None:
    """Read the files in order and write the first."""
    target, *parts = map(Path, sys.argv[1:])
    record = json.loads(target.read_text()) if target.exists() else {}
    for part in parts:
        record = merged(record, json.loads(part.read_text()))
    target.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
