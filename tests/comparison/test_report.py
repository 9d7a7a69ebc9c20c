"""The report: its files, the table, the plots, and that the page needs nothing else."""

import csv
import errno
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import with_full
from matplotlib import rc_context
from scipy import stats

from tpsgd import rules
from tpsgd.common import figures, files
from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.comparison import report
from tpsgd.comparison.arms import ALL, arm
from tpsgd.comparison.compare import Comparison
from tpsgd.comparison.report import page, plots, published, table
from tpsgd.comparison.results import THROUGH_TIME, Result
from tpsgd.comparison.statistics import holm
from tpsgd.engine.confusion import Confusion
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.train import Epoch

RULES = (
    "backprop", rules.tpsgd_l2(), rules.tpsgd_l1(), rules.drtp(), rules.dfa(), rules.sdfa(),
    rules.readout(), rules.readout(learned=True), rules.frozen(),
)  # fmt: skip


def comparison(accuracies: dict[str, list[float]], **changes) -> Comparison:
    """A record with these accuracies per rule; all other figures are made up."""
    results = [Result(arm(rule)) for rule in RULES]
    for i, result in enumerate(results):
        for r, accuracy in enumerate(accuracies.get(result.arm.name, [])):
            result.accuracies.append(accuracy)
            result.runs.append(run(result.arm.rule, r, 1.0 + i / 10 + r / 100, 300_000 + 999 * i))
    data = {"name": "digits", "note": "", "train": 1438, "test": 359, "shape": [1, 8, 8]}
    settings = {"model": "mlp:8", "epochs": 2, "restarts": 3, "seed": 0}
    return Comparison(data, {**settings, **changes}, {"cpu": "some"}, results, "tpsgd compare")


def sequences() -> Comparison:
    """As `close`, on a recurrent net: with the random net and the reservoir."""
    record = close()
    record.results[0].arm = replace(record.results[0].arm, remark=THROUGH_TIME)
    nothing = Result(arm(rules.untrained()), [0.1, 0.1])
    nothing.runs = [Run("", r, {}, record.results[0].runs[0].blocks) for r in (0, 1)]
    solved = Result(arm("reservoir"), [0.9, 0.9])
    solved.runs = [run(rules.frozen(), r, 0.2, 200_000) for r in (0, 1)]
    for made in solved.runs:
        made.history = made.history[-1:]
    record.results += [solved, nothing]
    record.data |= {"shape": [15], "vocabulary": 1000, "lengths": [1, 15]}
    return record


def run(rule: rules.Rule | None, seed: int, seconds: float, peak: int) -> Run:
    blocks = [BlockInfo("1: Linear + ReLU", "", 72, ""), BlockInfo("3: Linear", "", 90, "")]
    last = 0 if rule is None else 2
    history = [Epoch(last, e, 1 / e, 0.5 + e / 10) for e in (1, 2)]
    if rule is not None and rule.objective is not None:
        known = 0.5 if rule.name.startswith("readout") else None
        history = [Epoch(1, e, -float(e), known) for e in (1, 2)] + history
    made = Run("", seed, {}, blocks, history, seconds, 0.0, 123_456, 0, peak)
    made.kept_bytes = 0 if rule is None else 1_500_000
    return made


def close(accuracy: float = 0.97) -> Comparison:
    names = [arm(rule).name for rule in RULES]
    return comparison({n: [accuracy + i / 1e4, accuracy] for i, n in enumerate(names)})


def test_the_folder_holds_the_page_the_record_and_the_plots(tmp_path):
    page = report.write(close(), tmp_path)
    assert page == tmp_path / "report.html"
    names = {"report.html", "results.json", "memory.png", "time.png", "curves.png"}
    assert {file.name for file in tmp_path.iterdir()} == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))


@pytest.mark.usefixtures("undrawn")
def test_the_page_needs_nothing_but_itself(tmp_path):
    html = report.write(close(), tmp_path).read_text(encoding="utf-8")
    sources = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"'\s>)]{1,30})""", html)
    assert len(sources) == 3 and all(s.startswith("data:image/png;base64,") for s in sources)
    assert not re.search(r"https?://|@import|<script|<link", html)
    assert "<title>digits, mlp:8" in html and "tpsgd compare" in html
    assert all(f"<td>{arm(rule).about}" in html for rule in RULES)


@pytest.mark.usefixtures("undrawn")
def test_the_page_shows_names_as_they_are(tmp_path):
    record = comparison({"backprop": [0.5]}, model='<b>"x"&.py:f')
    html = report.write(record, tmp_path).read_text(encoding="utf-8")
    assert "<b>" not in html and "&lt;b&gt;&quot;x&quot;&amp;.py:f" in html


def test_rows_are_ranked_and_relative_to_backprop():
    record = comparison({"backprop": [0.9, 0.94], "drtp": [0.5], "dfa": [0.8, 0.8], "frozen": [1]})
    record.results = [r for r in record.results if r.runs]
    names, accuracies, counts, *_ = zip(*table.rows(record), strict=True)
    assert names == ("backprop", "dfa", "drtp", "frozen")
    assert accuracies == ("92.0 ± 2.8", "80.0 ± 0.0", "50.0", "100.0")
    assert counts == ("2", "2", "1", "1")
    assert table.rows(record)[0][4] == "×1.00" and table.rows(record)[2][-1] == "123k"


@pytest.mark.usefixtures("undrawn")
def test_a_failure_and_an_interrupt_are_said(tmp_path):
    record = comparison({"backprop": [0.9], "frozen": [0.8]})
    record.results[3].error, record.interrupted = "the loss became nan", True
    assert ("drtp", "failed") in [row[:2] for row in table.rows(record)]
    said = ["drtp failed: the loss became nan", "interrupted: 2 of 27 training runs finished"]
    assert table.failures(record) == said and table.remarks(record) == []
    html = report.write(record, tmp_path).read_text(encoding="utf-8")
    assert all(f'<p class="bad">{line}</p>' in html for line in said)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("left_out", [[], ["dladmm"]])
def test_harmless_remarks_do_not_look_like_failures(tmp_path, left_out):
    record = comparison({"backprop": [0.9], "frozen": [0.8]})
    record.settings["left_out"] = left_out
    html = report.write(record, tmp_path).read_text(encoding="utf-8")
    assert 'class="bad"' not in html
    assert ("<td>left out</td>" in html) == bool(left_out)
    assert ('<p class="quiet">not trained: dladmm' in html) == bool(left_out)


def test_a_record_without_backprop_has_no_ratios():
    record = comparison({"frozen": [0.8]})
    assert table.rows(record)[-1][4] == table.rows(record)[-1][6] == table.NONE


@pytest.mark.parametrize(("test", "text"), [(359, "97.0 ± 0.1"), (10_000, "97.05 ± 0.07")])
def test_digits_follow_the_number_of_test_samples(test, text):
    result = Result(arm("backprop"), [0.97, 0.971], [run(None, r, 1.0, 1) for r in (0, 1)])
    assert table.accuracy(result, test) == text


@pytest.mark.parametrize("count", [0, 999, 1000, 43_140, 99_950, 999_999, 5_000_000, 10**11])
def test_short_counts_are_short(count):
    assert len(table._short(count)) <= 5


def test_every_arm_has_its_own_look():
    looks = [plots.style(arm(rule).name) for rule in RULES]
    assert len({s.colour for s in looks}) == len({s.marker for s in looks}) + 1 == len(RULES)


@pytest.mark.parametrize("behind", [0.97, 0.1])
def test_the_scatter_names_every_arm(behind):
    record = close()
    record.results[5].accuracies = [behind, behind]  # far behind: the accuracy axis is stretched
    with rc_context(figures.LOOK):
        figure = plots.scatter(record, "time", lambda r: [x.seconds for x in r.runs])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [result.arm.name for result in record.ranked]


@pytest.mark.parametrize("accuracies", with_full([[1.0, 1.0], [0.0], [1.0, 0.0, 0.3]], [[0.0]]))
def test_extreme_accuracies_are_drawn(accuracies):
    record = comparison({"backprop": [1.0], "sdfa": accuracies})
    assert set(plots.draw(record)) == {"memory", "time", "curves"}


def test_curves_show_accuracy_where_known_and_the_loss_elsewhere():
    panels = plots._panels(close())
    first, last, loss = panels.values()
    assert [t.splitlines()[1] for t in panels] == [
        "training accuracy (%)", "training accuracy (%)", "local loss, scaled",
    ]  # fmt: skip
    assert set(first) == {"readout", "readout-learned"}
    assert set(last) == {arm(rule).name for rule in RULES}
    assert set(loss) == {"tpsgd-l2", "tpsgd-l1", "drtp"}
    assert loss["drtp"] == [(1.0, 1.0, 1.0), (0.0, 0.0, 0.0)]


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = files.write_whole(tmp_path / "results.json", b"old")

    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: .*results\.json"):
        files.write_whole(file, b"new")
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_a_folder_is_made_or_refused(tmp_path):
    assert files.writable_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(TpsgdError, match=r"cannot write to .*file"):
        files.writable_folder(tmp_path / "file" / "x")


@pytest.mark.usefixtures("undrawn")
def test_a_net_that_nothing_was_trained_of(tmp_path):
    record = sequences()
    rows = {row[0]: row for row in table.rows(record)}
    assert rows["random"][3:5] == ("0.00", "×0.00") and rows["random"][-2:] == (table.NONE, "0")
    assert list(rows)[-3:] == ["frozen", "reservoir", "random"]  # controls, by accuracy
    html = report.write(record, tmp_path).read_text(encoding="utf-8")
    assert THROUGH_TIME in html and "of shape 15, tokens out of 1,000, 1 to 15 steps long" in html
    assert "random" not in plots._panels(record)["block 2 (Linear)\ntraining accuracy (%)"]


def test_the_legend_names_backprop_through_time():
    assert table.legend(close()).startswith("× is relative to backprop\n")
    assert table.legend(sequences()).startswith("× is relative to backprop through time\n")
    assert max(map(len, table.legend(sequences()).splitlines())) <= 80


def test_controls_look_different():
    controls = [plots.style(name) for name in ("frozen", "reservoir", "random")]
    assert len({s.marker for s in controls}) == len({s.dash for s in controls}) == 3


def test_a_curve_of_one_epoch_is_a_point():
    with rc_context(figures.LOOK):
        figure = plots.curves(sequences())
    lines = [line for axes in figure.axes for line in axes.lines]
    assert all(
        (line.get_marker() not in ("", "None")) == (len(line.get_xdata()) == 1) for line in lines
    )
    assert any(len(line.get_xdata()) == 1 for line in lines)


def test_no_two_words_look_alike():
    looks = [plots.style(word) for word in ALL]
    assert len(ALL) == len(set(looks)) == len({s.colour for s in looks})


def test_an_arm_without_a_word_has_another_colour_than_all_words():
    looks = {plots.style(name) for name in ("my rule", "another", "a third")}
    assert not {s.colour for s in looks} & {entry.colour for entry in ALL.values()}
    assert len(looks) == 3 and plots.style("my rule") == plots.style("my rule")


def matrix(right: int, wrong: int, classes: int = 3) -> Confusion:
    """Of each class some samples are right, and the others are taken for the next class."""
    rows = [[0] * classes for _ in range(classes)]
    for i, row in enumerate(rows):
        row[i], row[(i + 1) % classes] = right, wrong
    return Confusion(tuple(map(tuple, rows)), tuple(f"<{i}>" for i in range(classes)))


def with_matrices(classes: int = 3) -> Comparison:
    record = close()
    for i, result in enumerate(record.results):
        result.confusions = [matrix(9 - i % 5, 1 + i, classes) for _ in result.runs]
    return record


def test_the_report_shows_classes(tmp_path):
    record = with_matrices()
    page = report.write(record, tmp_path).read_text()
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert "<h2>Classes</h2>" in page and page.count("Most confused by ") == 3
    assert "Most confused by backprop: &lt;0&gt; as &lt;1&gt; (10.0% of &lt;0&gt;)" in page
    assert "<0>" not in page  # names of classes are escaped


@pytest.mark.usefixtures("undrawn")
def test_a_record_without_matrices_has_no_classes(tmp_path):
    assert "<h2>Classes</h2>" not in report.write(close(), tmp_path).read_text()
    assert plots.confusions(close()) is None


@pytest.mark.usefixtures("undrawn")
def test_of_many_classes_the_report_has_the_pairs_that_are_confused_most(tmp_path):
    record = with_matrices(classes=60)
    page = report.write(record, tmp_path).read_text()
    assert plots.confusions(record) is None and "Most confused by" in page


def test_exemplars_are_backprop_the_best_rule_and_the_best_control():
    record = with_matrices()
    best = next(r.arm.name for r in record.ranked if not r.arm.backprop)
    assert [r.arm.name for r in record.exemplars] == ["backprop", best, "frozen"]


def test_the_record_has_the_matrix_of_all_restarts():
    result = with_matrices().results[0]
    summary = result.as_dict()["summary"]
    assert summary["confusion"]["<0>"] == {"<0>": 9 * len(result.runs), "<1>": len(result.runs)}


def test_memory_is_the_peak_and_the_kept_inputs():
    record = close()
    backprop, readout = (next(r for r in record.results if r.arm.name == name)
                         for name in ("backprop", "readout"))  # fmt: skip
    rows = {row[0]: row for row in table.rows(record)}
    total = readout.runs[0].peak_bytes + 1_500_000
    assert rows["readout"][5] == size(total) and rows["readout"][7] == size(1_500_000)
    assert rows["readout"][6] == f"×{total / backprop.runs[0].peak_bytes:.2f}"
    summary = readout.as_dict()["summary"]
    assert summary["total_bytes"] == total == summary["peak_bytes"] + summary["kept_bytes"]


def test_the_scatter_plot_shows_memory_with_kept_inputs(monkeypatch):
    figures = []
    monkeypatch.setattr(plots.figures, "as_bytes", lambda figure: figures.append(figure) or b"")
    record = close()
    plots.draw(record)
    (axes,) = figures[0].axes
    result = next(r for r in record.results if r.arm.name == "readout")
    total = result.largest.total_bytes / 2**20
    assert axes.get_xlabel() == "memory (MB)" and axes.get_xlim()[1] > total
    assert total in [x for line in axes.lines for x in line.get_xdata()]


# ---- differences ---------------------------------------------------------------------------------


def test_differences_are_printed_with_interval_and_test():
    scores = {"backprop": [0.90, 0.92, 0.95], "drtp": [0.80, 0.83, 0.84], "frozen": [0.5, 0.5, 0.5]}
    record = comparison(scores)
    record.results = [r for r in record.results if r.runs]
    head, *rows = table.differences(record)
    assert head == ("rule", "to backprop", "95 %", "p", "to frozen", "95 %", "p")
    assert [row[0] for row in rows] == ["backprop", "drtp", "frozen"]
    gap, to_frozen = (stats.ttest_rel(scores["drtp"], scores[k]) for k in ("backprop", "frozen"))
    low, high = (f"{100 * end:+.1f}" for end in gap.confidence_interval())
    ps = [gap.pvalue, stats.ttest_rel(scores["frozen"], scores["backprop"]).pvalue]
    p = f"{holm(ps)[0]:.3f}"
    assert rows[1][:4] == ("drtp", "-10.0", f"{low} to {high}", p)
    assert rows[1][4] == "+32.3" and rows[0][1:4] == rows[2][4:] == (table.NONE,) * 3
    assert to_frozen.pvalue < 0.05 and "paired t test, Holm's correction for 2 arms" in str(record)
    assert f"{low} to {high}" in str(record)
    assert f"<td>{low} to {high}</td>" in page.render(record, dict.fromkeys(page.CAPTIONS, b""))


def test_one_restart_has_no_test():
    record = comparison({"backprop": [0.9], "drtp": [0.8], "frozen": [0.5]})
    assert table.differences(record) == [] and table.tested(record) == ""
    assert "to backprop" not in str(record)


# ---- tables to publish --------------------------------------------------------------------------


def test_a_row_has_the_number_of_restarts_and_both_differences():
    record = close()
    rows = {row["rule"]: row for row in published.records(record)}
    arm = next(r for r in record.results if r.counts and r.arm.name == "tpsgd-l2")
    row, base = rows["tpsgd-l2"], next(r for r in record.results if r.arm.reference)
    assert row["n"] == len(arm.runs) and row["mean"] == pytest.approx(arm.accuracy[0])
    assert row["mean_to_backprop"] == pytest.approx(arm.accuracy[0] - base.accuracy[0])
    assert row["time_ratio"] == pytest.approx(arm.seconds / base.seconds)
    assert rows["backprop"]["mean_to_backprop"] is None
    plain = {each["name"]: each for each in record.as_dict()["arms"]}["tpsgd-l2"]
    assert plain["n"] == row["n"]
    assert plain["differences"]["backprop"]["mean"] == row["mean_to_backprop"]


def test_csv_and_frame_have_the_same_values():
    pandas = pytest.importorskip("pandas")
    record = close()
    lines = list(csv.DictReader(io.StringIO(record.to_csv())))
    frame = record.to_frame()
    assert isinstance(frame, pandas.DataFrame) and list(frame.index) == [x["rule"] for x in lines]
    for line in lines:
        if line["mean"]:
            assert float(line["mean"]) == frame.loc[line["rule"], "mean"]


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TpsgdError, match="pip install pandas"):
        close().to_frame()


def test_latex_has_a_line_for_each_arm_and_escapes_names():
    record = close()
    record.results[1].arm = replace(record.results[1].arm, name="50% of_a")
    record.results[2].error, record.results[2].runs = "it diverged", []
    text = record.to_latex()
    assert r"50\% of\_a & " in text and text.count(r"\\") == 1 + len(record.results)
    assert r"tpsgd-l1 & 0 & \multicolumn{5}{l}{failed: it diverged} " in text
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0]
    assert {line.count(" & ") for line in body.strip().splitlines()} == {2, 6}


def test_latex_says_when_there_is_no_test():
    record = close()
    for result in record.results:
        result.accuracies, result.runs = result.accuracies[:1], result.runs[:1]
    footer = record.to_latex().splitlines()[-1]
    assert footer == "% Differences: mean."
    assert {row["std"] for row in published.records(record)} == {None}
