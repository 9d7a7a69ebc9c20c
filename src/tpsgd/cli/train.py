"""`tpsgd train`: one model with one rule."""

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, RuleWord, option
from tpsgd.cli.terminal import live_bar, peak_within
from tpsgd.errors import TpsgdError
from tpsgd.files import is_function, writable_folder, write_whole

if TYPE_CHECKING:
    from tpsgd.training.arm import Arm
    from tpsgd.zoo.words import Factory


@options.grouped
def train(
    data: options.Data,
    model: options.Model,
    training: options.FromScratch,
    memory: options.Memory,
    machine: options.Machine,
    rule: RuleWord = "readout",
    out: Annotated[Path | None, option("Folder for model.pt (a state dict) and run.json.")] = None,
    save: Annotated[Path | None, option("Folder for the trained model: see tpsgd predict.")] = None,
    overwrite: Annotated[
        bool, option("Replace the model that the folder of --save holds.", "--overwrite")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train one model with one rule and test it."""
    from tpsgd.comparison.arms import entry
    from tpsgd.saved.trained import check_free

    entry(rule)
    settings = options.settings_of(training, memory, machine, model)
    samples = data.load(training.seed)
    options.warn_of_loss(training, samples)
    factory, head = model.factory_for(samples)
    model.check_head(training.chosen_schedule)
    arm = arm_for(rule, training, memory, factory, head)
    settings = training.complete(settings, samples.shape)
    folder = None if out is None else writable_folder(out)
    if save is not None:
        writable_folder(check_free(save, overwrite))
    with live_bar() as advance:
        trained = arm.train(factory, samples.train, progress=partial(advance, rule), **settings)
    net, run = trained.models[0], trained.runs[0]
    accuracy = tpsgd.evaluate(net, samples.test)
    run.settings = {**model.record(head), **run.settings}
    record = {"accuracy": accuracy, **run.as_dict()}
    record |= options.provenance_of(samples, machine.device)
    if as_json:
        print(json.dumps(record))
    else:
        print(run)
        if memory.memory:
            print(peak_within(run, memory.memory))
        if samples.note:
            print(f"data: {samples.note}")
        print(f"test accuracy {accuracy:.2%} of {len(samples.test[1]):,} samples ({data.data})")
    saved = []
    if folder is not None:
        saved += _save(folder, net, record)
    if save is not None:
        word = model.model if is_function(model.model) and arm.factory is None else None
        description = {"classes": samples.classes, "inputs": samples.inputs}
        saved.append(run.save(save, **description, factory=word, overwrite=overwrite))
    if saved and not as_json:
        print(f"saved {' and '.join(map(str, saved))}")


def arm_for(
    rule: str, training: options.Training, memory: options.Memory, factory: "Factory", head: str
) -> "Arm":
    """The arm to train or to plan, with the schedule and the head that were chosen."""
    from tpsgd.comparison import arms
    from tpsgd.peers.arms import ALL as PEERS

    schedule = training.chosen_schedule
    arm = arms.arm(rule, schedule, factory)
    refused = options.chosen(training) if rule in PEERS else []
    if arm.method:
        refused += options.chosen(memory)
    elif memory.memory and not arm.budgeted:
        refused.append("--memory")
    if refused:
        raise TpsgdError(f"{rule} takes no {', '.join(refused)}: leave them out")
    if schedule and arm.rule and arm.rule.head:
        arm = replace(arm, schedule=schedule)  # `fit` refuses a schedule that the rule cannot have
    return arms.with_ridge(arm, factory, training.settings()) if head == "ridge" else arm


def _save(folder: Path, model: Any, record: dict[str, Any]) -> list[Path]:
    import torch

    file = io.BytesIO()
    torch.save(model.cpu().state_dict(), file)
    description = json.dumps(record, indent=1).encode()
    return [
        write_whole(folder / "model.pt", file.getvalue()),
        write_whole(folder / "run.json", description),
    ]
