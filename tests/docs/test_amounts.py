"""docs/equal.md is what docs/amounts.py writes, and every cell follows from the restarts."""

import importlib
import json
import tomllib
from pathlib import Path

import pytest
from scipy.stats import ttest_rel

from tpsgd.comparison.statistics import Difference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROWS = json.loads((ROOT / "results" / "equal.json").read_text(encoding="utf-8"))["rows"]
CLAIMS = tomllib.loads((DOCS / "claims.toml").read_text(encoding="utf-8"))["equal"]


@pytest.fixture(scope="module")
def amounts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("amounts")


def test_the_page_is_what_the_program_writes(amounts):
    page = (DOCS / "equal.md").read_text(encoding="utf-8")
    written = page.split("<!-- numbers: amounts -->\n\n")[1].split("\n\n<!-- end -->")[0]
    assert written == amounts.block(), "run python docs/fill_numbers.py"


def test_every_cell_follows_from_the_restarts(amounts):
    """Oracle: scipy's paired test, and Holm's correction written out."""
    rows = [tuple(row) for claim in CLAIMS for row in claim["rows"]]
    for way in amounts.WAYS:
        tests = {}
        for i, (net, arm, _, other) in enumerate(rows):
            arms = ROWS.get(f"{net}, {way}", {"arms": {}})["arms"]
            if arm in arms and other in arms:
                assert arms[arm]["seeds"] == arms[other]["seeds"]
                tests[i] = ttest_rel(arms[arm]["accuracies"], arms[other]["accuracies"])
        largest = 0.0
        for rank, i in enumerate(sorted(tests, key=lambda i: tests[i].pvalue)):
            largest = max(largest, min(1.0, (len(tests) - rank) * tests[i].pvalue))
            gap = tests[i].statistic
            low, high = tests[i].confidence_interval(0.95)
            expected = "undecided" if largest >= 0.05 else "holds" if gap > 0 else "fails"
            word, _, margin = rows[i][2].partition(" ")
            if word == ">~":
                points = float(margin) / 100
                expected = "fails" if high < -points else "undecided"
                expected = "holds" if low >= -points else expected
            found = amounts.rows_of({"rows": ROWS}, way, rows)[i]
            assert amounts.outcome(found, rows[i][2]) == expected, (way, rows[i])


@pytest.mark.parametrize(
    ("values", "sign", "expected"),
    [
        ((0.02, 0.01, 0.03, 0.01, 0.02), ">", "holds"),
        ((-0.02, -0.03, -0.01, 0.01, 0.02), ">", "fails"),
        ((0.02, 0.01, 0.03, 0.01, 0.2), ">", "undecided"),
        ((-0.005, -0.009, -0.001, 0.01, 0.02), ">~ 1", "holds"),
        ((-0.03, -0.04, -0.02, 0.01, 0.02), ">~ 1", "fails"),
        ((-0.005, -0.03, 0.02, 0.6, 1.0), ">~ 1", "undecided"),
        ((0.02,), ">", "undecided"),
        ((None,), ">", "not run"),
    ],
)
def test_outcomes_on_numbers_worked_by_hand(values, sign, expected, amounts):
    assert amounts.outcome(Difference(*values), sign) == expected
    assert amounts.outcome(None, sign) == "not run"


def test_every_row_names_arms_that_were_compared(amounts):
    arms = {arm for row in ROWS.values() for arm in row["arms"]}
    for claim in CLAIMS:
        assert claim["uses"] in amounts.WAYS.values(), claim["title"]
        for net, arm, _, other in claim["rows"]:
            assert net in amounts.NETS and {arm, other} <= arms
