"""`tpsgd demo`: three nets on the digits under backprop, local rules and controls; a page each."""

from collections.abc import Mapping
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.compare import report_on
from tpsgd.cli.demo_summary import RULE, summary, versus
from tpsgd.cli.options import Overwrite, option
from tpsgd.cli.terminal import show_table
from tpsgd.files import write_whole
from tpsgd.output import output_folder

if TYPE_CHECKING:
    from torch import nn

    from tpsgd.comparison.compare import Comparison
    from tpsgd.zoo.words import Factory

ARMS = ("backprop", "backprop-checkpointed", "backprop-micro", RULE, "tpsgd-l2", "frozen", "elm")
BATCH_SIZE, RESTARTS = 32, 3


class Net(NamedTuple):
    """A net, by its word or its description, and the epochs that all rules train it for."""

    title: str
    model: str
    activation: str
    epochs: int


DEEP = "8-layer CNN, 16x3 each"
NETS = {  # by the folder of the report
    "mlp": Net("MLP", "mlp:128,128", "tanh", 10),
    "cnn": Net("CNN", "cnn:16x3,32x3", "leaky-relu", 6),
    "deep": Net("deep CNN", DEEP, "leaky-relu", 4),
}


def demo(
    rules: Annotated[str, option("Further rules: all, or some: drtp,dfa. See: tpsgd rules.")] = "",
    out: Annotated[Path, option("Folder for the reports.")] = Path("demo"),
    overwrite: Overwrite = False,
) -> None:
    """Compare local rules with backprop on the digits, with three nets: about a minute.

    Backprop also with activation checkpointing and with micro-batches, random layers as controls.
    Learning rates are searched for each rule on held-out training samples.
    """
    from tpsgd.comparison import arms, report

    further = [] if rules == "all" else options.listed(rules)
    for word in further:
        arms.entry(word)
    machine = options.Machine(threads=1).settings()
    data = tpsgd.data.load("digits")
    names = ("index.html", *(f"{net}/{file}" for net in NETS for file in report.FILES))
    records: dict[str, Comparison] = {}
    with output_folder(out, names, overwrite) as folder:
        for name, net in NETS.items():
            make = _factory(net, data)
            words = (*ARMS, *(arms.all_words(make)[0] if rules == "all" else further))
            records[name] = report_on(
                folder / name, overwrite, show_table, data, make, list(dict.fromkeys(words)),
                **machine, epochs=net.epochs, batch_size=BATCH_SIZE, restarts=RESTARTS,
                lr="search", command=options.command_line(),
                notes={"model": net.model, "activation": net.activation},
            )  # fmt: skip
        lines = _summary(records, data)
        page = write_whole(folder / "index.html", _index(lines).encode())
    print()
    for line in (*lines, f"reports: {page}"):
        print(fill(line, Console().width, subsequent_indent="  ", break_on_hyphens=False))
    if any(result.error for record in records.values() for result in record.results):
        raise typer.Exit(1)


def deep_cnn() -> "nn.Module":
    """A plain CNN of eight layers, for the digits: backprop keeps the activations of all."""
    from torch import nn

    layers: list[nn.Module] = []
    for i in range(7):
        layers += [nn.Conv2d(16 if i else 1, 16, 3, padding=1), nn.LeakyReLU()]
        layers += [nn.MaxPool2d(2)] if i == 3 else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 4 * 4, 10))


def _factory(net: Net, data: "tpsgd.data.Data") -> "Factory":
    from tpsgd.zoo.words import factory

    if net.model == DEEP:
        return deep_cnn
    return factory(net.model, data.shape, len(data.classes), net.activation)


def _summary(records: "Mapping[str, Comparison]", data: "tpsgd.data.Data") -> list[str]:
    """Three lines, with the memory that the rule is planned to need in micro-batches."""
    from tpsgd.comparison import arms

    rule, size = arms.arm(RULE).rule, arms.backprop_micro().micro_batch
    memory = tpsgd.Memory(micro_batch=size)
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "memory": memory, "others": False}
    nets = {}
    for name, record in records.items():
        model = _factory(NETS[name], data)()
        plan = tpsgd.plan(model, data.shape, rule=rule, samples=len(data.train[1]), **settings)
        nets[NETS[name].title] = versus(record, plan.peak_bytes)
    return summary({title: v for title, v in nets.items() if v is not None})


def _index(lines: list[str]) -> str:
    """A page with the summary, the first plot of each net, and links to the reports."""
    from tpsgd.comparison.report.page import STYLE

    plots = "".join(
        f'<figure><h2><a href="{name}/report.html">{net.title}</a></h2>'
        f'<img alt="Test accuracy against memory" src="{name}/memory.png">'
        f"<figcaption>{escape(net.model)}</figcaption></figure>\n"
        for name, net in NETS.items()
    )
    paragraphs = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tpsgd demo</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Three nets on the digits, without backpropagation</h1>
{paragraphs}<div class="pair">
{plots}</div>
<p class="quiet">Each point is the mean of {RESTARTS} restarts; the dotted line is
backprop's memory. The links lead to tables, learning curves and settings.</p>
</body>
</html>
"""
