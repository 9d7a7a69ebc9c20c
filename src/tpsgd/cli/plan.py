"""`tpsgd plan`: the peak memory of a training run before it starts, with or without data."""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, RuleWord, option, setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import live_bar, write_then_show
from tpsgd.cli.train import arm_for
from tpsgd.common import figures
from tpsgd.common.errors import TpsgdError
from tpsgd.common.output import check_new

SEVERAL = 8  # labels that show what they are


@dataclass(frozen=True)
class DataOrShape(options.DataOptions):
    """A data set, or the shape of its samples."""

    data: str | None = setting(None, options.DATA, show_default="digits")  # type: ignore[assignment]
    shape: str | None = setting(None, "Instead of data: shape of a sample, 1x28x28 or 784.")
    classes: int | None = setting(None, "With --shape: number of classes.", min=1)
    samples: int | None = setting(None, "With --shape: number of samples.", min=1)

    def read_shape(self) -> tuple[tuple[int, ...], int]:
        """The shape of a sample and the number of classes."""
        named = set(options.changed(self)) - {"--shape", "--classes", "--samples"}
        if named or self.classes is None:
            leave = f" without {', '.join(sorted(named))}" if named else ""
            raise TpsgdError(f"--shape is for a plan without data: it goes with --classes{leave}")
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", str(self.shape).lower()):
            raise TpsgdError(f"{self.shape!r} is no shape of a sample: write 1x28x28 or 784")
        return tuple(map(int, str(self.shape).lower().split("x"))), self.classes


@options.grouped
def plan(
    data: DataOrShape,
    model: options.Model,
    training: options.FromScratch,
    memory: options.MemoryOptions,
    machine: options.Machine,
    rule: RuleWord = DEFAULT,
    ranks: Annotated[
        int | None, option("Also plan a pipeline over this many processes.", min=1)
    ] = None,
    plot: Annotated[Path | None, option("Draw it: FILE.png or FILE.svg.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Estimate the peak memory of a training run, compared with backprop."""
    from tpsgd.comparison.arms import entry
    from tpsgd.engine.lengths import batch_size_for

    entry(rule)
    if rule.startswith("backprop"):
        raise TpsgdError(
            "every plan includes backprop in its forms: choose a rule to compare with it"
        )
    options.keep_apart(data.data, model.model, plot=plot)
    if plot is not None:
        figures.check_file(plot, "plan")
        check_new(plot, overwrite)
    settings = options.settings_of(training, memory, model) | {"device": machine.device}
    padded, targets = False, ()
    if data.shape is not None:
        (shape, classes), count = data.read_shape(), data.samples or 0
        factory, head = model.factory(shape, classes)
    elif (data.classes, data.samples) != (None, None):
        raise TpsgdError("--classes and --samples go with --shape: a data set has its own")
    else:
        samples = data.load()
        (x, y), shape = samples.train, samples.shape
        factory, head = model.factory_for(samples)
        count, padded = len(y), isinstance(x, tpsgd.Padded)
        settings["dtype"], targets = None if padded else x.dtype, samples.targets
        if targets or y.dim() > 1:
            settings["y"] = y[:SEVERAL]
    if padded and memory.memory is not None:
        raise TpsgdError("sequences of different lengths cannot be planned within a memory budget")
    arm = arm_for(rule, model, training, memory, factory, head)
    if arm.method is not None:
        raise TpsgdError(f"{rule} cannot be planned: it is not trained by fit")
    settings = training.complete(settings, shape, targets)
    settings.setdefault("batch_size", batch_size_for(count))
    settings |= {"rule": arm.rule, "order": arm.order, "samples": count, "ranks": ranks}
    if arm.epochs is not None:
        settings["epochs"] = arm.epochs
    if arm.optimizer is not None:
        settings |= {"optimizer": arm.optimizer, "lr": arm.lr}
    with live_bar() as advance, arm.in_a_sentence():
        progress = partial(advance, "rehearsing")
        plan = tpsgd.plan((arm.factory or factory)(), shape, progress=progress, **settings)
    if padded:
        longest = f"sequences differ in length: all are planned as {shape[0]} steps long"
        plan = replace(plan, remarks=(*plan.remarks, longest))

    def show(figure: Path | None) -> None:
        if not as_json:
            print(plan)
            print("" if figure is None else f"figure: {figure}\n", end="", flush=True)
            return
        record: dict[str, Any] = {"command": options.command_line(), "model": model.model}
        record |= {"rule": rule, "head": head, "batch_size": settings["batch_size"]}
        record |= {"memory_budget": memory.memory, "shape": list(shape), "samples": count}
        record |= {"plot": figure and str(figure)}
        print(json.dumps(record | plan.as_dict()), flush=True)

    write_then_show(lambda: plot and plan.plot(plot), show)
