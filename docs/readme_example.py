"""Run the first program of README.md and keep the record of its run in results/readme.json.

python docs/readme_example.py && python docs/fill_numbers.py
"""

import json
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch

from tpsgd.comparison import provenance

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def main() -> None:
    """Run the program, which has a `run` and prints it and a last line, and write the record."""
    program = PROGRAM.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert program is not None, "README.md has no program"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names: dict = {}
    with redirect_stdout(StringIO()) as printed:
        exec(compile(program[1], "README.md", "exec"), names)
    record = {
        "command": "python docs/readme_example.py",
        "machine": provenance.machine(None),
        "versions": provenance.versions(),
        "run": names["run"].as_dict(),
        "last_line": printed.getvalue().splitlines()[-1],
    }
    text = json.dumps(record, indent=1)
    (ROOT / "results" / "readme.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
