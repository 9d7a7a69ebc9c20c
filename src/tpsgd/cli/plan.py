"""`tpsgd plan`: the peak memory of a training run before it starts, with or without data."""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, RuleWord, option, setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import live_bar, show_plan, write_then_show
from tpsgd.cli.train import arm_for
from tpsgd.common import figures
from tpsgd.common.errors import TpsgdError
from tpsgd.common.output import check_new

if TYPE_CHECKING:
    from tpsgd.engine.arm import Arm
    from tpsgd.memory.plan import Plan
    from tpsgd.zoo.words import Factory


@dataclass(frozen=True)
class PlannedData(options.DataOptions):
    """A data set, or the shape of its samples."""

    data: str | None = setting(None, options.DATA)  # type: ignore[assignment]
    shape: str | None = setting(None, "Instead of data: shape of a sample, 1x28x28 or 784.")
    classes: int | None = setting(None, "With --shape: number of classes.", min=1)
    samples: int | None = setting(None, "With --shape: number of samples.", min=1)


@dataclass(frozen=True)
class Subject:
    """A model, and the samples that it is to be trained on."""

    factory: "Factory"
    head: str
    shape: tuple[int, ...]
    samples: int
    dtype: Any = None
    padded: bool = False


@options.grouped
def plan(
    data: PlannedData,
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
    subject = _subject(data, model)
    if plot is not None:
        figures.check_file(plot, "plan")
        check_new(plot, overwrite)
    with live_bar() as advance:
        model.check_head(training.chosen_order)
        arm = arm_for(rule, training, memory, subject.factory, subject.head)
        settings = options.settings_of(training, memory, model) | {"device": machine.device}
        settings = training.complete(settings, subject.shape)
        settings.setdefault("batch_size", batch_size_for(subject.samples))
        settings["progress"] = partial(advance, "rehearsing")
        settings["ranks"] = ranks
        plan = _plan(subject, arm, settings | {"order": arm.order})

    def show(figure: Path | None) -> None:
        if not as_json:
            show_plan(plan)
            print("" if figure is None else f"figure: {figure}\n", end="", flush=True)
            return
        record = {"command": options.command_line(), "model": model.model, "rule": rule}
        record |= {"head": subject.head, "batch_size": settings["batch_size"]}
        record |= {"memory_budget": memory.memory, "shape": list(subject.shape)}
        record |= {"samples": subject.samples, "plot": figure and str(figure)}
        print(json.dumps(record | plan.as_dict()), flush=True)

    write_then_show(lambda: plot and plan.plot(plot), show)


def _subject(data: PlannedData, model: options.Model) -> Subject:
    if data.shape is None:
        if (data.classes, data.samples) != (None, None):
            raise TpsgdError("--classes and --samples go with --shape: a data set has its own")
        samples = replace(data, data=data.data or "digits").load()
        x, y = samples.train
        padded = isinstance(x, tpsgd.Padded)
        dtype = None if padded else x.dtype
        return Subject(*model.factory_for(samples), samples.shape, len(y), dtype, padded)
    if (data.data, data.max_train, data.on_disk, data.scale) != (None,) * 4:
        raise TpsgdError("--shape is for a plan without data: leave --data and its options out")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", data.shape.lower()):
        raise TpsgdError(f"{data.shape!r} is no shape of a sample: write 1x28x28 or 784")
    if data.classes is None:
        raise TpsgdError("--shape needs --classes too: how many there are, such as 10")
    shape = tuple(map(int, data.shape.lower().split("x")))
    return Subject(*model.factory(shape, data.classes), shape, data.samples or 0)


def _plan(subject: Subject, arm: "Arm", settings: dict[str, Any]) -> "Plan":
    if arm.method is not None:
        raise TpsgdError(f"{arm.name} cannot be planned: it is not trained by fit")
    if subject.padded and settings["memory"].budget is not None:
        raise TpsgdError("sequences of different lengths cannot be planned within a memory budget")
    if arm.epochs is not None:
        settings["epochs"] = arm.epochs
    if arm.optimizer is not None:
        settings |= {"optimizer": arm.optimizer, "lr": arm.lr}
    model = (arm.factory or subject.factory)()
    settings |= {"rule": arm.rule, "samples": subject.samples, "dtype": subject.dtype}
    plan = tpsgd.plan(model, subject.shape, **settings)
    if not subject.padded:
        return plan
    longest = f"sequences differ in length: all are planned as {subject.shape[0]} steps long"
    return replace(plan, remarks=(*plan.remarks, longest))
