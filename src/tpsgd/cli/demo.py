"""`tpsgd demo`: three nets on the digits under backprop, local rules and controls; a page each.

The summary is computed from the comparisons, and says so where the rule is behind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.compare import report_on
from tpsgd.cli.options import Overwrite, option
from tpsgd.cli.terminal import show_table
from tpsgd.common.files import write_whole
from tpsgd.common.output import output_folder

if TYPE_CHECKING:
    from torch import nn

    from tpsgd.comparison.compare import Comparison
    from tpsgd.comparison.results import Result, Results
    from tpsgd.zoo.words import Factory

RULE = "readout-learned"
NOISE = 0.2  # of the seconds of such short runs, as a share
LEVEL = 1.0  # points of accuracy within which two arms are level, unless their restarts differ more
ARMS = ("backprop", "backprop-checkpointed", "backprop-micro", RULE, "tpsgd-l2", "frozen", "elm")
BATCH_SIZE, RESTARTS = 32, 3


class DemoNet(NamedTuple):
    """A net, by its word or its description, and the epochs that all rules train it for."""

    title: str
    model: str
    activation: str
    epochs: int


DEEP = "8-layer CNN, 16x3 each"
NETS = {  # by the folder of the report
    "mlp": DemoNet("MLP", "mlp:128,128", "tanh", 10),
    "cnn": DemoNet("CNN", "cnn:16x3,32x3", "leaky-relu", 6),
    "deep": DemoNet("deep CNN", DEEP, "leaky-relu", 4),
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


def _factory(net: DemoNet, data: "tpsgd.data.Data") -> "Factory":
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
    from tpsgd.comparison.report.page import document

    plots = "".join(
        f'<figure><h2><a href="{name}/report.html">{net.title}</a></h2>'
        f'<img alt="Test accuracy against memory" src="{name}/memory.png">'
        f"<figcaption>{escape(net.model)}</figcaption></figure>\n"
        for name, net in NETS.items()
    )
    paragraphs = "".join(f"<p>{escape(line)}</p>\n" for line in lines)
    body = f"""{paragraphs}<div class="pair">
{plots}</div>
<p class="quiet">Each point is the mean of {RESTARTS} restarts; the dotted line is
backprop's memory. The links lead to tables, learning curves and settings.</p>
"""
    return document("tpsgd demo", "Three nets on the digits, without backpropagation", body)


@dataclass(frozen=True)
class Versus:
    """The rule, backprop and the most accurate control on one net, which all were trained."""

    ours: "Result"
    backprop: "Result"
    control: "Result | None"
    in_micro_batches: float | None = None  # memory over backprop's, both in equal micro-batches

    def points(self, result: "Result") -> float:
        """How many points of accuracy a result is ahead of backprop."""
        return 100 * (result.accuracy[0] - self.backprop.accuracy[0])

    @property
    def verdict(self) -> str:
        """`level`, `ahead` or `behind`."""
        spread = 100 * max(self.ours.accuracy[1], self.backprop.accuracy[1])
        gap = self.points(self.ours)
        return "level" if abs(gap) <= max(LEVEL, spread) else "ahead" if gap > 0 else "behind"


def versus(record: "Results", micro_batch_bytes: int) -> Versus | None:
    """The rule and backprop in a comparison; None if one of them failed.

    `micro_batch_bytes` is the memory of the rule in the micro-batches of `backprop-micro`.
    """
    done = {result.arm.name: result for result in record.ranked if result.counts}
    if RULE not in done or "backprop" not in done:
        return None
    control = next((result for result in done.values() if result.arm.control), None)
    micro = done.get("backprop-micro")
    ratio = micro and micro_batch_bytes / micro.largest.total_bytes
    return Versus(done[RULE], done["backprop"], control, ratio)


def summary(nets: Mapping[str, Versus]) -> list[str]:
    """A title and three lines about nets, by their names; nothing if there are none."""
    if not nets:
        return []
    micro = {name: v.in_micro_batches for name, v in nets.items() if v.in_micro_batches}
    equal = f"; both in micro-batches: {_listed(micro)}" if micro else ""
    return [
        f"{RULE} against backprop, at rates searched on held-out samples:",
        f"accuracy: {_accuracy(nets)}",
        f"memory: {_less(nets, lambda result: result.largest.total_bytes)}{equal}",
        f"time: {_less(nets, lambda result: result.seconds, NOISE)}",
    ]


def _accuracy(nets: Mapping[str, Versus]) -> str:
    """On how many nets the rule is level with backprop, ahead or behind, and by how many points."""
    verdicts = [v.verdict for v in nets.values()]
    level, ahead, behind = (verdicts.count(word) for word in ("level", "ahead", "behind"))
    points = ", ".join(f"{name} {v.points(v.ours):+.1f}" for name, v in nets.items())
    controls = ", ".join(f"{v.points(v.control):+.1f}" for v in nets.values() if v.control)
    random = f"; random layers at best {controls}" if controls else ""
    counts = f"level with backprop on {level} of {len(nets)} nets, ahead on {ahead}, behind on"
    return f"{counts} {behind} ({points} points{random})".replace("-", "\N{MINUS SIGN}")


def _less(nets: Mapping[str, Versus], cost: "Callable[[Result], float]", noise: float = 0.0) -> str:
    """On how many nets the rule takes less than backprop, and its costs over backprop's.

    Costs that differ by no more than `noise`, as a share, are level.
    """
    ratios = {name: cost(v.ours) / cost(v.backprop) for name, v in nets.items()}
    less = sum(round(ratio, 2) < 1 - noise for ratio in ratios.values())
    level = sum(abs(round(ratio, 2) - 1) <= noise for ratio in ratios.values())
    counts = f"less than backprop's on {less} of {len(nets)} nets"
    counts += f", level (within {noise:.0%}) on {level}" if noise else ""
    return f"{counts} ({_listed(ratios)})"


def _listed(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} ×{ratio:.2f}" for name, ratio in ratios.items())
