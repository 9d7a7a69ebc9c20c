"""`tpsgd train`: one model with one rule."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tpsgd.cli.options import (
    AsJson,
    DataOptions,
    MachineOptions,
    MemoryOptions,
    ModelOptions,
    RuleWord,
    TrainingOptions,
    grouped,
    option,
    provenance_of,
    settings_of,
)
from tpsgd.cli.terminal import live_bar, peak_within
from tpsgd.errors import TpsgdError
from tpsgd.files import writable_folder, write_whole

if TYPE_CHECKING:
    from tpsgd.training.arm import Arm
    from tpsgd.zoo.words import Factory


@grouped
def train(
    data: DataOptions,
    model: ModelOptions,
    training: TrainingOptions,
    memory: MemoryOptions,
    machine: MachineOptions,
    rule: RuleWord = "readout",
    out: Annotated[Path | None, option("Folder for model.pt (a state dict) and run.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with one rule and test it."""
    from tpsgd.comparison.arms import entry
    from tpsgd.training.evaluate import evaluate

    entry(rule)
    settings = settings_of(training, memory, machine, model)
    samples = data.load(training.seed)
    factory, recurrent = model.factory_for(samples)
    head = model.head_of(recurrent)
    arm = arm_for(rule, training, memory, factory, head)
    folder = None if out is None else writable_folder(out)
    with live_bar() as advance:
        settings["progress"] = advance and (lambda done, total: advance(rule, done / total))
        trained = arm.train(factory, samples.train, **settings)
    net, run = trained.models[0], trained.runs[0]
    accuracy = evaluate(net, samples.test)
    record = {"accuracy": accuracy, **run.as_dict(), **provenance_of(samples, machine.device)}
    record["settings"] = {**model.record(head), **run.settings}
    if folder is not None:
        _save(folder, net, record)
    if as_json:
        print(json.dumps(record))
        return
    print(run)
    if memory.memory:
        print(peak_within(run, memory.memory))
    print(f"test accuracy {accuracy:.2%} of {len(samples.test[1]):,} samples ({data.data})")
    if folder is not None:
        print(f"saved {folder / 'model.pt'} and {folder / 'run.json'}")


def arm_for(
    rule: str, training: TrainingOptions, memory: MemoryOptions, factory: "Factory", head: str
) -> "Arm":
    """The arm to train or to plan, with the schedule and the head that were chosen."""
    from dataclasses import replace

    from tpsgd.comparison.arms import arm, with_ridge
    from tpsgd.engine.optimizers import adam
    from tpsgd.peers.arms import ALL as PEERS
    from tpsgd.train import sequential

    schedule, settings = training.schedule_of(), training.settings()
    way = arm(rule, schedule or sequential, factory)
    if rule in PEERS and (options := training.chosen()):
        raise TpsgdError(f"{rule} takes no {', '.join(options)}: leave them out")
    if memory.memory and not way.budgeted:
        raise TpsgdError(f"--memory is for rules, which train block by block, not for {rule}")
    if way.method and (options := memory.chosen()):
        raise TpsgdError(f"{rule} takes no {', '.join(options)}: leave them out")
    if schedule and way.rule and way.rule.head:
        way = replace(way, schedule=schedule)  # `fit` refuses a schedule that the rule cannot have
    if head == "adam":
        return way
    return with_ridge(way, factory, training.lr, settings.get("optimizer", adam))


def _save(folder: Path, model: Any, record: dict[str, Any]) -> None:
    import torch

    file = io.BytesIO()
    torch.save(model.cpu().state_dict(), file)
    write_whole(folder / "model.pt", file.getvalue())
    write_whole(folder / "run.json", json.dumps(record, indent=1).encode())
