"""`tpsgd plan`: the bytes of a training from words, before it starts, with or without data."""

import json
import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpsgd.cli.options import (
    OWN_DATA,
    ActivationWord,
    AsJson,
    BatchSize,
    Budget,
    Device,
    Epochs,
    Head,
    MaxTrain,
    ModelWord,
    OnDisk,
    OptimizerWord,
    ScheduleWord,
    Window,
    check,
    head_of,
    load,
    model_for,
    model_of,
    optimizer_of,
    schedule_of,
    through_time,
)
from tpsgd.cli.terminal import show_plan, waiting
from tpsgd.comparison.arms import refuse_options, single
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.memory.plan import Plan
    from tpsgd.zoo.words import Factory

WITHOUT = ("zorb", "dladmm")  # methods of their own, which no rehearsal knows


def plan(
    data: Annotated[str | None, typer.Option(help=f"{OWN_DATA} of images.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="Without data: of one sample, 1x28x28 or 784.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="With --shape.", min=1)] = None,
    samples: Annotated[int | None, typer.Option(help="With --shape: how many.", min=1)] = None,
    model: ModelWord = "mlp:256",
    rule: Annotated[str, typer.Option(help="See: tpsgd rules.")] = "readout",
    schedule: ScheduleWord = None,
    epochs: Epochs = 10,
    batch_size: BatchSize = 128,
    optimizer: OptimizerWord = None,
    activation: ActivationWord = "leaky-relu",
    window: Window = None,
    head: Head = None,
    device: Device = None,
    memory_budget: Budget = None,
    max_train: MaxTrain = None,
    on_disk: OnDisk = None,
    plot: Annotated[Path | None, typer.Option(help="A picture: FILE.png or FILE.svg.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a training will hold in memory, beside backprop, before it starts."""
    check([rule], schedule, optimizer, memory_budget)
    _refuse(rule, schedule, optimizer)
    given = {"--shape": shape, "--classes": classes, "--samples": samples}
    if shape is None:
        _alone(given, "--classes and --samples go with --shape: a data set brings its own")
        subject = _of_data(data or "digits", max_train, on_disk, model, activation)
    else:
        clash = {"--data": data, "--max-train": max_train, "--on-disk": on_disk}
        _alone(clash, "--shape is for a plan without data: leave --data and its options out")
        subject = _of_shape(shape, classes, samples or 0, model, activation)
    options = through_time(window, model, subject.recurrent)
    options |= {"epochs": epochs, "memory_budget": memory_budget, "device": _device(device)}
    kind = head_of(head, subject.recurrent)
    if plot is not None:
        _check_plot(plot)
    with waiting("rehearsing the training"):
        found = _found(subject, rule, schedule, kind, optimizer, batch_size, options)
    if plot is not None:
        found.plot(plot)
    if as_json:
        named = {"model": model, "rule": rule, "head": kind, "batch_size": batch_size}
        named |= {"memory_budget": memory_budget, "plot": plot and str(plot)}
        named |= {"shape": list(subject.shape), "samples": subject.samples}
        command = shlex.join(["tpsgd", *sys.argv[1:]])
        print(json.dumps({"command": command, **named, **found.as_dict()}))
        return
    show_plan(found, memory_budget)
    if plot is not None:
        print(f"picture: {plot}")


@dataclass(frozen=True)
class Subject:
    """What is to be trained, and on samples of which kind."""

    factory: "Factory"
    recurrent: bool
    shape: tuple[int, ...]
    samples: int
    dtype: Any = None
    padded: bool = False


def _refuse(rule: str, schedule: str | None, optimizer: str | None) -> None:
    """Words that name no plan of their own."""
    if rule == "backprop":
        raise TpsgdError("every plan has backprop's lines beside the rule's: leave --rule out")
    if rule in WITHOUT:
        raise TpsgdError(f"{rule} cannot be planned: it is a method of its own, not a rule of fit")
    refuse_options(rule, optimizer, schedule)


def _alone(options: dict[str, Any], why: str) -> None:
    if any(value is not None for value in options.values()):
        raise TpsgdError(why)


def _of_data(
    word: str, max_train: int | None, on_disk: Path | None, model: str, activation: str
) -> Subject:
    """The subject that a data set makes."""
    data = load(word, 0, max_train, on_disk)
    factory, recurrent = model_for(data, model, activation, None, None)

    from tpsgd.nets.padded import Padded

    x, y = data.train
    padded = isinstance(x, Padded)
    dtype = None if padded else x.dtype
    return Subject(factory, recurrent, data.shape, len(y), dtype, padded)


def _of_shape(text: str, classes: int | None, samples: int, model: str, activation: str) -> Subject:
    """The subject that a shape makes, without data."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text.lower()):
        raise TpsgdError(f"{text!r} is no shape of a sample: write 1x28x28 or 784")
    if classes is None:
        raise TpsgdError("--shape needs --classes too: how many there are, such as 10")
    shape = tuple(map(int, text.lower().split("x")))
    return Subject(*model_of(model, shape, classes, activation), shape, samples)


def _check_plot(file: Path) -> None:
    """Before the rehearsal, which may take a while."""
    from tpsgd.comparison.report.memory import check

    check(file)


def _device(word: str | None) -> str | None:
    """A device that torch knows; it need not be here."""
    import torch

    try:
        if word is not None and torch.device(word).type == "meta":
            raise TpsgdError("device meta holds no numbers: nothing can be trained on it")
    except RuntimeError:
        raise TpsgdError(f"unknown device {word!r}: write cpu, cuda or cuda:1") from None
    return word


def _found(
    subject: Subject,
    rule: str,
    schedule: str | None,
    head: str,
    optimizer: str | None,
    batch_size: int,
    options: dict[str, Any],
) -> "Plan":
    """The plan itself."""
    from tpsgd.engine.batches import UNCUT
    from tpsgd.memory import plan as planning

    if subject.padded and options["memory_budget"] is not None:
        raise TpsgdError(UNCUT)
    wanted, factory = schedule and schedule_of(schedule), subject.factory
    arm = single(rule, wanted, factory, head, None, optimizer_of(optimizer))
    if arm.epochs is not None:
        options = options | {"epochs": arm.epochs}
    bound = wanted or arm.optimizer is not None or arm.epochs is not None
    try:
        found = planning.plan(
            (arm.factory or factory)(), subject.shape, batch_size, arm.rule,
            arm.optimizer or optimizer_of(optimizer), arm.schedule if bound else None,
            samples=subject.samples, dtype=subject.dtype, **options,
        )  # fmt: skip
    except RuntimeError as error:
        if options["device"] is None:
            raise
        reason = str(error).splitlines()[0]
        raise TpsgdError(f"device {options['device']} cannot be planned here: {reason}") from None
    if not subject.padded:
        return found
    longest = f"sequences differ in length: all are planned as {subject.shape[0]} steps long"
    return replace(found, remarks=(*found.remarks, longest))
