"""`tpsgd demo`: three nets on the digits under backprop, local rules and controls; a page each."""

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
from tpsgd.common.output import output_folder

if TYPE_CHECKING:
    from torch import nn

    from tpsgd.comparison.results import Results
    from tpsgd.zoo.words import Factory

RULE = "readout-learned"
HEADING = f"{RULE} at a searched rate: accuracy in per cent, memory and time over backprop's"
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
    names = tuple(f"{net}/{file}" for net in NETS for file in report.FILES)
    lines, failed = [HEADING], False
    with output_folder(out, names, overwrite) as folder:
        for name, net in NETS.items():
            make = _factory(net, data)
            words = (*ARMS, *(arms.all_words(make)[0] if rules == "all" else further))
            record = report_on(
                folder / name, overwrite, show_table, data, make, list(dict.fromkeys(words)),
                **machine, epochs=net.epochs, batch_size=BATCH_SIZE, restarts=RESTARTS,
                lr="search", command=options.command_line(),
                notes={"model": net.model, "activation": net.activation},
            )  # fmt: skip
            lines += summary(net.title, record, _micro_batch_bytes(make(), data))
            failed = failed or any(result.error for result in record.results)
    lines.append(f"reports: {', '.join(str(folder / net / 'report.html') for net in NETS)}")
    print()
    for line in lines:
        print(fill(line, Console().width, subsequent_indent="  ", break_on_hyphens=False))
    if failed:
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


def _micro_batch_bytes(model: "nn.Module", data: "tpsgd.data.Data") -> int:
    """The memory that the rule is planned to need in the micro-batches of `backprop-micro`."""
    from tpsgd.comparison import arms

    memory = tpsgd.Memory(micro_batch=arms.backprop_micro().micro_batch)
    settings: dict[str, Any] = {"batch_size": BATCH_SIZE, "memory": memory, "others": False}
    settings |= {"rule": arms.arm(RULE).rule, "samples": len(data.train[1])}
    return tpsgd.plan(model, data.shape, **settings).peak_bytes


def summary(title: str, record: "Results", micro_batch_bytes: int) -> list[str]:
    """A line that compares the rule with backprop on one net; none if one of them failed."""
    results = {result.arm.name: result for result in record.ranked if result.counts}
    if RULE not in results or "backprop" not in results:
        return []
    rule, backprop, micro = results[RULE], results["backprop"], results.get("backprop-micro")
    random = next((result for result in results.values() if result.arm.control), None)
    control = f", random layers at best {100 * random.accuracy[0]:.1f}" if random else ""
    accuracy = f"{100 * rule.accuracy[0]:.1f} (backprop {100 * backprop.accuracy[0]:.1f}{control})"
    memory = f"×{rule.largest.total_bytes / backprop.largest.total_bytes:.2f}"
    if micro is not None:
        memory += f" (both in micro-batches ×{micro_batch_bytes / micro.largest.total_bytes:.2f})"
    time = f"×{rule.seconds / backprop.seconds:.2f}"
    return [f"{title}: accuracy {accuracy}, memory {memory}, time {time}"]
