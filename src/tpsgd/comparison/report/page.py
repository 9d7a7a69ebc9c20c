"""The report as an HTML page without any other files."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from tpsgd.common.names import printable
from tpsgd.comparison.report import table
from tpsgd.comparison.report.plots import style
from tpsgd.comparison.results import Results
from tpsgd.comparison.scores import in_words

HEAD = (
    "rule", "test accuracy (%)", "restarts", "seconds", "over backprop", "memory", "over backprop",
    "of it kept inputs", "sample passes",
)  # fmt: skip
CAPTIONS = {
    "memory": "Test accuracy against the memory of one training run: model, optimizer, "
    "activations, class codes and the inputs kept for reuse, without the data set.",
    "time": "Test accuracy against training time: median and range over the restarts; vertical "
    "bars are standard deviations, the dotted line is backprop.",
    "curves": "Learning curves per block: training accuracy if the block predicts the labels, "
    "else its local loss, scaled to 0..1 because the losses of different rules have different "
    "units. Lines are means, bands the range over the restarts. Backprop and dlADMM train all "
    "blocks at once and are shown with the last block; iterations of dlADMM are shown up to the "
    "number of epochs of the other rules. DFA, sDFA and solved blocks have no local loss to show.",
    "confusion": "How test samples of each class (rows) are predicted (columns), in per cent of "
    "the class, over all restarts: backprop, the best rule and the best control.",
}
NOTES = (
    "Accuracy (mean ± standard deviation), time (median) and memory (peak) of a row come from the "
    "same training runs. A sample pass is one sample that one block learns from: every rule has "
    "the same number at equal epochs; solved blocks, which read each sample once, and controls, "
    "which train the head only, or nothing, have fewer. Kept inputs are the inputs of each block, "
    "computed once and kept in memory for all of its epochs; memory includes them. Without them "
    "training takes longer: --memory low, or --reuse no."
)
STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 62rem; padding: 1rem 1.25rem 3rem }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 1rem 0 .25rem }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem }
p { margin: .5rem 0 } .quiet { color: #666 } .bad { color: #a33300 }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid #e4e4e4 }
th { font-weight: 600; font-size: .85rem; color: #555; vertical-align: bottom; white-space: normal }
th:first-child, td:first-child { text-align: left }
.plain td { white-space: normal; text-align: left; overflow-wrap: anywhere }
.plain td:first-child { color: #666; width: 9rem }
.dot { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .5em }
.pair { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fit, minmax(19rem, 1fr)) }
figure { margin: 0 } img { width: 100%; height: auto } .curves img { min-width: 42rem }
figcaption { font-size: .85rem; color: #666 }
pre { background: #f5f5f5; padding: .8rem 1rem; white-space: pre-wrap; border-radius: 4px }
"""


def render(comparison: Results, images: Mapping[str, bytes]) -> str:
    """The page, with the plots inside."""
    data = comparison.data
    numbers = comparison.numbers
    figures = {k: _figure(image, in_words(CAPTIONS[k], numbers)) for k, image in images.items()}
    columns = table.head(comparison, HEAD, "learning rate")
    lines = [("bad", line) for line in table.failures(comparison)]
    lines += [("quiet", line) for line in table.remarks(comparison)]
    notes = "".join(f'<p class="{look}">{_text(line)}</p>' for look, line in lines)
    heading = _text(f"{table.title(comparison)}: learning without backpropagation")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{heading}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{heading}</h1>
<p class="quiet">{table.effort(comparison)}; {data["train"]:,} training and
{data["test"]:,} test samples.</p>
{notes}<div class="wide">{_table(columns, _cells(comparison))}</div>
<p class="quiet">{in_words(NOTES, numbers)}</p>
{_differences(comparison)}<h2>{in_words("Accuracy", numbers)} against cost</h2>
<div class="pair">{figures["memory"]}{figures["time"]}</div>
<h2>Learning curves</h2>
<div class="wide curves">{figures["curves"]}</div>
{_classes(comparison, figures)}<h2>The rules</h2>
{_plain((r.arm.name, r.arm.about) for r in comparison.ranked)}
<h2>Settings</h2>
{_plain(_settings(comparison))}
<h2>Reproduce</h2>
<pre>{_text(comparison.command or "results.json holds every setting")}</pre>
<p class="quiet">Made {_text(comparison.date)}. All numbers are in results.json.</p>
</body>
</html>
"""


def _classes(comparison: Results, figures: Mapping[str, str]) -> str:
    """Heat maps, and the pairs of classes that are confused most."""
    lines = [_text(line) for r in comparison.exemplars if (line := table.mistakes(r))]
    if not lines:
        return ""
    pairs = "".join(f"<p>{line[0].upper()}{line[1:]}.</p>\n" for line in lines)
    return f"""<h2>Classes</h2>
<div class="wide curves">{figures.get("confusion", "")}</div>
{pairs}"""


def _differences(comparison: Results) -> str:
    """The differences to backprop and to the frozen control, with their tests."""
    if not (lines := table.differences(comparison)):
        return ""
    head, *rows = ([_text(cell) for cell in line] for line in lines)
    return f"""<h2>Differences</h2>
<div class="wide">{_table(head, rows)}</div>
<p class="quiet">{_text(table.tested(comparison))}</p>
"""


def _cells(comparison: Results) -> list[list[str]]:
    rows = [[_text(cell) for cell in row] for row in table.rows(comparison)]
    for row, result in zip(rows, comparison.ranked, strict=True):
        colour = style(result.arm.name).colour
        row[0] = f'<span class="dot" style="background:{colour}"></span>{row[0]}'
        if result.counts:
            row[-1] = f"{result.runs[-1].sample_passes:,}"
    return rows


def _settings(comparison: Results) -> list[tuple[str, str]]:
    data, machine = comparison.data, comparison.machine
    shape = " x ".join(map(str, data["shape"]))
    samples = f"{data['train']:,} for training, {data['test']:,} for testing, of shape {shape}"
    if "vocabulary" in data:
        samples += f", tokens out of {data['vocabulary']:,}"
    if "lengths" in data:
        samples += ", {} to {} steps long".format(*data["lengths"])
    rows = {"data": data["name"], "samples": samples, "preparation": data["note"]}
    rows |= {**comparison.settings, **machine, **comparison.versions}
    return [(k.replace("_", " "), str(v)) for k, v in rows.items() if v not in (None, "", [])]


def _table(head: Iterable[str], body: Iterable[Sequence[str]]) -> str:
    first = "".join(f"<th>{cell}</th>" for cell in head)
    rest = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>\n" for row in body)
    return f"<table><thead><tr>{first}</tr></thead>\n<tbody>{rest}</tbody></table>"


def _plain(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{_text(a)}</td><td>{_text(b)}</td></tr>\n" for a, b in pairs)
    return f'<table class="plain"><tbody>{rows}</tbody></table>'


def _text(line: str) -> str:
    """A line of the page. All names get into it through here: nothing in them is a tag."""
    return escape(printable(line))


def _figure(image: bytes, caption: str) -> str:
    source = f"data:image/png;base64,{b64encode(image).decode()}"
    return (
        f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    )
