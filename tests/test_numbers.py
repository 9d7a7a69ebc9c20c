"""No figure in the README or the docs is typed: all come from results/*.json, and are in step."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "docs" / "fill_numbers.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"^(```+).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
FIGURE = re.compile(r"(?<![\w.])(\d+(\.\d+)? ?%|\d\d\.\d{1,2}(?![\d.]))")


def script():
    spec = importlib.util.spec_from_file_location("fill_numbers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


numbers = script()


def test_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", numbers.FILES)
def test_results_say_where_they_come_from(name):
    path = ROOT / "results" / f"{name}.json"
    assert path.is_file(), f"{path.name} is missing; make it with: {numbers.FILES[name]}"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert {"cpu", "threads", "gpu"} <= set(record["machine"])
    assert {"python", "torch", "tpsgd"} <= set(record["versions"])
    assert record["command"].startswith(("tpsgd ", "python "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_figure_is_typed_by_hand(page):
    prose = CODE.sub("", numbers.MARK.sub("", page.read_text(encoding="utf-8")))
    assert [match.group() for match in FIGURE.finditer(prose)] == []


def test_what_is_not_measured_says_so(tmp_path):
    page = "a <!-- numbers: accuracy/mnist-mlp/frozen --><!-- end --> b\n"
    page += "<!-- numbers: speed -->\n<!-- end -->\n"
    filled = numbers.fill(page, numbers.Results(tmp_path))
    assert "--> b" in filled and "(not measured yet)" in filled
    assert "Not measured yet: `python benchmarks/speed.py --out results`" in filled
    assert numbers.fill(filled, numbers.Results(tmp_path)) == filled


def test_a_changed_result_changes_the_page(tmp_path):
    page = "it was <!-- numbers: accuracy/mnist-mlp/frozen -->old<!-- end --> at first"
    arms = {"frozen": {"accuracies": [0.9, 0.92]}}
    record = {"tables": {"mnist-mlp": {"arms": arms}}}
    (tmp_path / "shallow.json").write_text(json.dumps(record))
    filled = numbers.fill(page, numbers.Results(tmp_path))
    assert "-->91.00 ± 1.41 %<!--" in filled


@pytest.mark.parametrize(
    "mark", ["<!-- numbers: nonsense -->x<!-- end -->", "<!-- numbers: run -->"]
)
def test_a_wrong_mark_is_an_error(mark, tmp_path):
    with pytest.raises(SystemExit):
        numbers.fill(mark, numbers.Results(tmp_path))
