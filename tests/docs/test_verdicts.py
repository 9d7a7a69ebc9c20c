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
        yes, open_ = (sum(each in words for each in ran) for words in (("yes", "more"), ("open",)))
        expected = "not reproduced" if yes + open_ < enough else "undecided"
        expected = "reproduced" if yes >= enough else expected
        if all(each == "more" for each in ran):
            expected = "exceeded"
    if "ours" in claim and ran and expected != "undecided":
        expected = "does not hold" if expected == "not reproduced" else "holds"
    if 0 < len(ran) < len(outcomes):
        expected += f", on {len(ran)} of {len(outcomes)} rows"
    assert verdicts.verdict(claim) == expected


def again(verdicts, left, sign, right):
    """no, open, yes or more; None where a number is missing."""
    a, b = restarts(verdicts, left), restarts(verdicts, right)
    if not a or not b:
        return None
    if not verdicts.same_preparation(left, right):
        return "no"
    word, margin = sign.split()[0], float([*sign.split(), "0"][1])
    gap = sum(a) / len(a) - sum(b) / len(b)
    sure, low, high = gap != 0, gap, gap
    if len(a) > 1 and len(b) > 1:
        with warnings.catch_warnings(action="ignore"):  # restarts at chance are nearly alike
            test = ttest_ind(a, b, equal_var=False)
            low, high = test.confidence_interval(0.9)
        sure = test.pvalue < 0.05
        low, high = (low, high) if low == low else (gap, gap)
    elif "paper/" in right and verdicts.read(right).n > 1 and len(a) > 1:
        sides = verdicts.read(left), verdicts.read(right)
        half = verdicts.half_interval(*sides)
        sure, low, high = verdicts.welch(*sides) < 0.05, gap - half, gap + half
    if word in (">", "<"):
        return "yes" if sure and gap * (1 if word == ">" else -1) > 0 else "no"
    if word == ">~" and len(a) > 1 and len(b) > 1 and sure and gap > 0:
        return "more"
    if low >= -margin and (word == ">~" or high <= margin):
        return "yes"
    if high < -margin:
        return "no"
    if word != ">~" and low > margin:
        return "more" if word == "=" else "no"
    return "open"


def restarts(verdicts, side):
    """The restarts of a row in per cent, or the numbers at a path."""
    if re.fullmatch(r"[\d.e-]+", side):
        return [float(side)]
    try:
        value = verdicts.measured(side)
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
        ((85, 20, 5), "= 1", (90, 20, 25), "undecided"),  # a wide spread shows nothing
        ((90, 0.1, 5), "= 1", (90.95, 0.1, 25), "undecided"),  # the interval crosses the margin
        ((92, 0.1, 5), ">~ 5", (95, 0.1, 5), "holds"),
        ((92, 0.1, 5), ">~ 2", (95, 0.1, 5), "fails"),
        ((96, 0.1, 5), ">~ 2", (95, 0.1, 5), "exceeds"),
        ((96, 5, 5), ">~ 2", (95, 5, 5), "undecided"),
        ((94, 5, 50), ">~ 9", (95, 5, 50), "holds"),
        ((80, 5, 50), ">~ 9", (95, 5, 50), "fails"),
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
        (["holds", "undecided"], None, "undecided"),
        (["holds", "undecided"], 1, "holds"),
        (["undecided", "fails"], None, "fails"),
        (["holds", "not comparable"], None, "fails"),
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


def test_the_interval_is_scipys_on_the_samples(verdicts):
    a, b = [0.91, 0.93, 0.92, 0.95], [0.90, 0.89, 0.93]
    sides = [
        verdicts.Value(verdicts.fmean(side), verdicts.stdev(side), len(side)) for side in (a, b)
    ]
    interval = ttest_ind(a, b, equal_var=False).confidence_interval(0.9)
    half = (interval.high - interval.low) / 2
    assert verdicts.half_interval(*sides) == pytest.approx(half)
    assert verdicts.half_interval(sides[0], verdicts.Value(0.9)) == 0


def test_kept_inputs_are_memory(verdicts, monkeypatch):
    rows = {
        "a/x": {"peak_bytes": 5, "kept_bytes": 7},
        "a/y": {"peak_bytes": 5, "settings": {"order": "simultaneous"}},
        "a/z": {"peak_bytes": 5, "settings": {"order": "sequential"}},
        "a/total": {"total_bytes": 3},
    }
    monkeypatch.setattr(verdicts, "look_up", lambda path: rows.get(path) or 3)
    values = [verdicts.read(f"{row}/total_bytes") for row in rows]
    assert [value and value.mean for value in values] == [12, 5, None, 3]


def test_other_preparation_holds_nothing(verdicts, monkeypatch):
    known = {"f/one": {"data": "d", "note": "scaled"}, "f/two": {"data": "d", "note": "raw"}}
    known["g/one"] = known["f/one"]
    monkeypatch.setattr(verdicts, "prepared", lambda side: known.get(side.rpartition("/")[0], {}))
    assert verdicts.same_preparation("f/one/a", "g/one/b")
    assert not verdicts.same_preparation("f/one/a", "f/two/a")
    assert not verdicts.same_preparation("f/one/a", "h/one/a")  # a file that says nothing
    assert verdicts.same_preparation("h/one/a", "h/one/b")  # of one table
    assert verdicts.same_preparation("f/one/a", "paper/one/a")
    monkeypatch.setattr(
        verdicts, "read", lambda side: verdicts.Value(9.0 if "two" in side else 1.0)
    )
    assert verdicts.compared("f/two/a", ">", "f/one/a") == "not comparable"
    assert verdicts.compared("g/one/a", "<", "f/two/a") == "not comparable"


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
            row = verdicts.look_up(side.removesuffix("/total_bytes"))
            row = row if isinstance(row, dict) else verdicts.look_up(side.rpartition("/")[0])
            note = row.get("note", "") if isinstance(row, dict) else ""
            assert "earlier run" not in note, (claim["title"], side)


def test_every_claim_is_complete():
    titles = [claim["title"] for claim in CLAIMS]
    assert len(set(titles)) == len(titles)
    for claim in CLAIMS:
        assert ("ours" in claim) != ("paper" in claim and "source" in claim), claim["title"]
        assert "absent" in claim or ("why" in claim and "control" in claim), claim["title"]
        if any(side.endswith("backprop") for row in claim["compare"] for side in row[:3]):
            assert "equal" in claim or "absent" in claim, claim["title"]
