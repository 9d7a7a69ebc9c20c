"""docs/verdicts.md is what docs/verdicts.py writes, and every verdict follows from its numbers."""

import importlib
import re
import tomllib
import warnings
from pathlib import Path

import pytest
from scipy.stats import ttest_ind

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CLAIMS = tomllib.loads((DOCS / "claims.toml").read_text(encoding="utf-8"))["claim"]
FIGURE = re.compile(r"(?<![\w.])(\d+(\.\d+)? ?%|\d\d\.\d{1,2}(?![\d.]))")


@pytest.fixture(scope="module")
def verdicts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        yield importlib.import_module("verdicts")


def test_the_page_is_what_the_program_writes(verdicts):
    page = (DOCS / "verdicts.md").read_text(encoding="utf-8")
    written = page.split("<!-- numbers: verdicts -->\n\n")[1].split("\n\n<!-- end -->")[0]
    assert written == verdicts.block(), "run python docs/fill_numbers.py"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim["title"])
def test_a_verdict_follows_from_its_numbers(claim, verdicts):
    """Oracle: the criterion once more, on the restarts themselves where the files have them."""
    outcomes = [again(verdicts, *row[:3]) for row in claim["compare"]]
    ran = [each for each in outcomes if each is not None]
    enough = claim.get("need", len(ran))
    expected = "not run"
    if ran:
        expected = "reproduced" if sum(each != "no" for each in ran) >= enough else "not reproduced"
        if all(each == "more" for each in ran):
            expected = "exceeded"
    if "ours" in claim and ran:
        expected = "does not hold" if expected == "not reproduced" else "holds"
    if 0 < len(ran) < len(outcomes):
        expected += f", on {len(ran)} of {len(outcomes)} rows"
    assert verdicts.verdict(claim) == expected


def again(verdicts, left, sign, right):
    """no, yes or more; None where a number is missing."""
    a, b = restarts(verdicts, left), restarts(verdicts, right)
    if not a or not b:
        return None
    word, margin = sign.split()[0], float([*sign.split(), "0"][1])
    gap = sum(a) / len(a) - sum(b) / len(b)
    sure, tested = True, len(a) > 1 and len(b) > 1
    if len(a) > 1 and len(b) > 1:
        with warnings.catch_warnings(action="ignore"):  # restarts at chance are nearly alike
            sure = ttest_ind(a, b, equal_var=False).pvalue < 0.05
    elif "paper/" in right and verdicts.read(right).n > 1 and len(a) > 1:
        sure = verdicts.welch(verdicts.read(left), verdicts.read(right)) < 0.05
    if word == "~":
        return "yes" if abs(gap) <= margin else "no"
    if word in (">", "<"):
        return "yes" if sure and gap * (1 if word == ">" else -1) > 0 else "no"
    if sure and gap > margin and word == "=":
        return "more"
    if sure and tested and gap > 0 and word == ">~":
        return "more"
    return "yes" if gap >= -margin or (word == "=" and not sure) else "no"


def restarts(verdicts, side):
    """The restarts of a row in per cent, or the numbers at a path."""
    if re.fullmatch(r"[\d.e-]+", side):
        return [float(side)]
    try:
        value = verdicts.look_up(side)
    except (LookupError, OSError):
        return None
    if isinstance(value, str):
        return [float(re.match(r"[\d.]+", value)[0])]
    if isinstance(value, dict):
        return [100 * share for share in value["accuracies"]]
    many = value if isinstance(value, list) else [value]
    return [100 * v for v in many] if "held_out" in side or side.endswith("zeros") else many


@pytest.mark.parametrize(
    ("a", "sign", "b", "expected"),
    [
        ((90, 1, 5), ">", (80, 1, 5), "holds"),
        ((80, 1, 5), ">", (90, 1, 5), "fails"),
        ((90, 9, 5), ">", (88, 9, 5), "fails"),  # by chance
        ((90, 0, 1), ">", (88, 9, 5), "holds"),  # without a spread there is no test
        ((2, 0.1, 5), "<", (3, 0.1, 5), "holds"),
        ((3, 0.1, 5), "<", (2, 0.1, 5), "fails"),
        ((90, 0.1, 5), "= 1", (90.5, 0.1, 25), "holds"),
        ((95, 0.1, 5), "= 1", (90, 0.1, 25), "exceeds"),
        ((85, 0.1, 5), "= 1", (90, 0.1, 25), "fails"),
        ((85, 20, 5), "= 1", (90, 20, 25), "holds"),
        ((92, 0.1, 5), ">~ 5", (95, 0.1, 5), "holds"),
        ((92, 0.1, 5), ">~ 2", (95, 0.1, 5), "fails"),
        ((96, 0.1, 5), ">~ 2", (95, 0.1, 5), "exceeds"),
        ((96, 5, 5), ">~ 2", (95, 5, 5), "holds"),
        ((96, 0, 1), ">~ 2", (95, 0.1, 5), "holds"),  # no test says that it is higher
        ((96, 0.1, 5), "~ 2", (95, 0.1, 5), "holds"),
        ((99, 0.1, 5), "~ 2", (95, 0.1, 5), "fails"),
    ],
)
def test_criteria_on_numbers_worked_by_hand(a, sign, b, expected, verdicts):
    assert verdicts.outcome(verdicts.Value(*a), sign, verdicts.Value(*b)) == expected


@pytest.mark.parametrize(
    ("outcomes", "need", "expected"),
    [
        ([None, None], None, None),
        (["holds", None], None, "holds"),
        (["holds", "fails"], None, "fails"),
        (["holds", "fails"], 1, "holds"),
        (["exceeds", "exceeds"], None, "exceeds"),
        (["exceeds", "holds"], None, "holds"),
        (["exceeds", "fails"], 2, "fails"),
    ],
)
def test_a_claim_is_judged_by_what_was_run(outcomes, need, expected, verdicts):
    assert verdicts.judge(outcomes, need) == expected


def test_welch_is_scipys_on_the_samples(verdicts):
    a, b = [0.91, 0.93, 0.92, 0.95], [0.90, 0.89, 0.93]
    sides = [
        verdicts.Value(verdicts.fmean(side), verdicts.stdev(side), len(side)) for side in (a, b)
    ]
    assert verdicts.welch(*sides) == pytest.approx(ttest_ind(a, b, equal_var=False).pvalue)
    assert verdicts.welch(verdicts.Value(1.0), sides[0]) is None
    still = [verdicts.Value(mean, 0.0, 3) for mean in (1.0, 2.0)]
    assert verdicts.welch(still[0], still[0]) == 1 and verdicts.welch(*still) == 0


def test_figures_of_the_paper_are_read_as_printed(verdicts):
    read = [verdicts.printed(text) for text in ("88.3 ± 0.25", "78 (1.4)", "9.58")]
    assert [(v.mean, v.std, v.n) for v in read] == [(88.3, 0.25, 25), (78, 1.4, 25), (9.58, 0, 1)]


def test_a_sign_that_is_none_is_refused(verdicts):
    with pytest.raises(ValueError, match="no sign"):
        verdicts.outcome(verdicts.Value(1.0), "!", verdicts.Value(2.0))


def test_no_figure_of_ours_is_typed_into_the_claims():
    for claim in CLAIMS:
        typed = re.sub(r"\{.+?\}", "", f"{claim.get('why')} {claim.get('control')}")
        assert not FIGURE.search(typed), claim["title"]


def test_no_verdict_rests_on_a_row_of_another_measurement(verdicts):
    """Rows of an earlier run, such as one whose test images were scaled otherwise, say so."""
    assert "earlier run" in verdicts.look_up("deep/vgg11/4 blocks, predsim")["note"]
    for claim in CLAIMS:
        for side in (side for left, _, right, *_ in claim["compare"] for side in (left, right)):
            if verdicts.read(side) is None or "/" not in side:
                continue
            row = verdicts.look_up(side)
            row = row if isinstance(row, dict) else verdicts.look_up(side.rpartition("/")[0])
            note = row.get("note", "") if isinstance(row, dict) else ""
            assert "earlier run" not in note, (claim["title"], side)


def test_every_claim_is_complete():
    titles = [claim["title"] for claim in CLAIMS]
    assert len(set(titles)) == len(titles)
    for claim in CLAIMS:
        assert ("ours" in claim) != ("paper" in claim and "source" in claim), claim["title"]
        assert "absent" in claim or ("why" in claim and "control" in claim), claim["title"]
