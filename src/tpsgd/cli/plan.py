"""`tpsgd plan`: the peak memory of a training run before it starts, with or without data."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tpsgd import figures
from tpsgd.cli.options import (
    DATA,
    AsJson,
    DataOptions,
    MachineOptions,
    MemoryOptions,
    ModelOptions,
    RuleWord,
    TrainingOptions,
    command_line,
    grouped,
    option,
    setting,
    settings_of,
)
from tpsgd.cli.terminal import show_plan, waiting
from tpsgd.cli.train import arm_for
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.memory.plan import Plan
    from tpsgd.training.arm import Arm
    from tpsgd.zoo.words import Factory


@dataclass(frozen=True)
class SampleOptions(DataOptions):
    """A data set, or the shape of its samples."""

    data: str | None = setting(None, DATA)  # type: ignore[assignment]
    shape: str | None = setting(None, "Instead of data: shape of a sample, 1x28x28 or 784.")
    classes: int | None = setting(None, "With --shape: classes.", min=1)
    samples: int | None = setting(None, "With --shape: samples.", min=1)


@dataclass(frozen=True)
class Subject:
    """A model, and the samples that it is to be trained on."""

    factory: "Factory"
    recurrent: bool
    shape: tuple[int, ...]
    samples: int
    dtype: Any = None
    padded: bool = False


@grouped
def plan(
    data: SampleOptions,
    model: ModelOptions,
    training: TrainingOptions,
    memory: MemoryOptions,
    machine: MachineOptions,
    rule: RuleWord = "readout",
    plot: Annotated[Path | None, option("Draw it: FILE.png or FILE.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the peak memory of a training run, compared with backprop."""
    from tpsgd.comparison.arms import entry

    entry(rule)
    if rule == "backprop":
        raise TpsgdError("every plan includes backprop: choose a rule to compare with it")
    subject = _subject(data, model)
    head = model.head_of(subject.recurrent)
    if plot is not None:
        figures.check_file(plot, "plan")
    with waiting("rehearsing the training run"):
        arm = arm_for(rule, training, memory, subject.factory, head)
        if arm.method is not None:
            raise TpsgdError(f"{rule} cannot be planned: it is not trained by fit")
        settings = settings_of(training, memory, model) | {"device": machine.device}
        plan = _plan(subject, arm, settings, training.schedule is not None)
    if plot is not None:
        plan.plot(plot)
    if as_json:
        record = {"command": command_line(), "model": model.model, "rule": rule, "head": head}
        record |= {"batch_size": training.batch_size, "memory_budget": memory.memory}
        record |= {"shape": list(subject.shape), "samples": subject.samples}
        print(json.dumps(record | {"plot": plot and str(plot)} | plan.as_dict()))
        return
    show_plan(plan)
    if plot is not None:
        print(f"figure: {plot}")


def _subject(data: SampleOptions, model: ModelOptions) -> Subject:
    if data.shape is not None:
        if (data.data, data.max_train, data.on_disk) != (None, None, None):
            raise TpsgdError("--shape is for a plan without data: leave --data and its options out")
        return _of_shape(data.shape, data.classes, data.samples or 0, model)
    if (data.classes, data.samples) != (None, None):
        raise TpsgdError("--classes and --samples go with --shape: a data set has its own")

    from tpsgd.nets.padded import Padded

    samples = replace(data, data=data.data or "digits").load()
    factory, recurrent = model.factory_for(samples)
    x, y = samples.train
    padded = isinstance(x, Padded)
    dtype = None if padded else x.dtype
    return Subject(factory, recurrent, samples.shape, len(y), dtype, padded)


def _of_shape(text: str, classes: int | None, samples: int, model: ModelOptions) -> Subject:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.lower()):
        raise TpsgdError(f"{text!r} is no shape of a sample: write 1x28x28 or 784")
    if classes is None:
        raise TpsgdError("--shape needs --classes too: how many there are, such as 10")
    shape = tuple(map(int, text.lower().split("x")))
    return Subject(*model.factory(shape, classes), shape, samples)


def _plan(subject: Subject, arm: "Arm", settings: dict[str, Any], one_schedule: bool) -> "Plan":
    from tpsgd.memory.plan import plan

    if subject.padded and settings["memory"].budget is not None:
        raise TpsgdError("sequences of different lengths cannot be planned within a memory budget")
    if arm.epochs is not None:
        settings["epochs"] = arm.epochs
    if arm.optimizer is not None:
        settings |= {"optimizer": arm.optimizer, "lr": None}
    if one_schedule or arm.optimizer is not None or arm.epochs is not None:
        settings["schedule"] = arm.schedule  # else both schedules are planned
    try:
        plan_of_rule = plan(
            (arm.factory or subject.factory)(), subject.shape, rule=arm.rule,
            samples=subject.samples, dtype=subject.dtype, **settings,
        )  # fmt: skip
    except RuntimeError as error:
        if settings["device"] is None:
            raise
        reason = str(error).splitlines()[0]
        raise TpsgdError(f"device {settings['device']} cannot be planned here: {reason}") from None
    if not subject.padded:
        return plan_of_rule
    longest = f"sequences differ in length: all are planned as {subject.shape[0]} steps long"
    return replace(plan_of_rule, remarks=(*plan_of_rule.remarks, longest))
