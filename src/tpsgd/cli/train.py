"""`tpsgd train`: one model with one rule."""

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, option, setting
from tpsgd.cli.resuming import Resuming, terminable
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.samples import CalibrationData, RuleWord, samples_for
from tpsgd.cli.terminal import live_bar, peak_within, write_then_show
from tpsgd.cli.torchrun import under_torchrun
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import is_function, write_whole
from tpsgd.common.output import output_file, output_folder, write_or_rescue

if TYPE_CHECKING:
    from tpsgd.engine.arm import Arm
    from tpsgd.engine.record import Run
    from tpsgd.zoo.words import Factory

FIXED = ("--activation", "--init", "--leak")  # of a model that is new


@dataclass(frozen=True)
class Begun(options.Model):
    """A new model, or a saved one to go on from."""

    model: str = setting("mlp:256", options.MODELS + " Or a folder of: tpsgd train --save.")

    def saved(self) -> "tpsgd.Trained | None":
        """The model to go on from; None if there is no such folder."""
        if not Path(self.model).expanduser().is_dir():
            return None
        if refused := [word for word in options.changed(self) if word in FIXED]:
            raise TpsgdError(f"the model in {self.model} is made: leave {', '.join(refused)} out")
        return tpsgd.load(self.model)

    def samples_of(self, trained: "tpsgd.Trained", data: options.DataOptions) -> "tpsgd.data.Data":
        """Samples with the columns, scaling and classes of a saved model."""
        if data.drop or data.impute:
            raise TpsgdError(f"{self.model} has its own columns: leave --drop and --impute out")
        if data.label is not None:
            trained = replace(trained, inputs=trained.inputs | {"label": data.label})
        choices = CalibrationData(data.data, data.max_train, data.on_disk, data.scale)
        return samples_for(trained, choices, self.model, split=True)[0]

    def copies_of(self, trained: "tpsgd.Trained") -> "tuple[Factory, str]":
        """A factory of models with the weights of a saved one, and how their last layer learns."""
        from tpsgd.zoo.words import is_recurrent

        head = self.head or ("ridge" if is_recurrent(trained.model) else "adam")
        return partial(deepcopy, trained.model), head


@options.grouped
def train(
    data: options.DataOptions,
    model: Begun,
    training: options.FromScratch,
    memory: options.MemoryOptions,
    machine: options.Machine,
    resuming: Resuming,
    rule: RuleWord = None,
    out: Annotated[Path | None, option("Folder for model.pt (a state dict) and run.json.")] = None,
    save: Annotated[Path | None, option("Folder for the trained model: see tpsgd predict.")] = None,
    log: Annotated[Path | None, option("FILE.csv or FILE.jsonl: a line per epoch.")] = None,
    pipeline: Annotated[
        bool,
        option("With torchrun: blocks, not samples, are shared among processes.", "--pipeline"),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train one model with one rule and test it; --model FOLDER goes on from a saved model.

    It has the columns, scaling and classes that it was saved with and, unless you choose others,
    its rule and its seed, by which class codes are drawn.
    """
    from tpsgd.comparison.arms import ALL, entry

    if (saved := model.saved()) is not None:
        training = replace(training, seed=training.seed or saved.run.seed)
        rule = rule or (saved.run.rule if saved.run.rule in ALL else None)
    rule = rule or DEFAULT
    entry(rule)
    outputs = {"out": out, "save": save, "log": log, "checkpoint": resuming.checkpoint}
    options.keep_apart(data.data, model.model, **outputs)
    settings = options.settings_of(training, memory, machine, model, resuming)
    with _job(pipeline) as (first, parallel):
        samples = data.load(training.seed) if saved is None else model.samples_of(saved, data)
        options.warn_of_loss(training, samples)
        factory, head = model.factory_for(samples) if saved is None else model.copies_of(saved)
        model.check_head(training.chosen_order)
        arm = arm_for(rule, training, memory, factory, head)
        if arm.method:
            resuming.refuse(rule)
            _refuse_ranks(rule, parallel)
        settings = training.complete(settings, samples.shape) | parallel
        if not first:
            arm.train(factory, samples.train, progress=False, **settings)
            return
        again = overwrite or resuming.goes_on
        claimed = _claimed(out, save, again, factory, samples.classes)
        with claimed, _logged(log, overwrite, resuming.goes_on) as callbacks:
            settings |= {"callbacks": callbacks} if callbacks else {}
            with resuming.interruptible(), live_bar() as advance:
                follow = partial(advance, rule)
                trained = arm.train(factory, samples.train, progress=follow, **settings)
                run = trained.runs[0]
                accuracy = tpsgd.evaluate(trained.models[0], samples.test)
            begun = model.record(head) if saved is None else {"model": model.model}
            run.settings = {**begun, **run.settings}
            record = {"accuracy": accuracy, **run.as_dict()}
            record |= options.provenance_of(samples, machine.device)
            word = model.model if is_function(model.model) and arm.factory is None else None
            description = {"classes": samples.classes, "inputs": samples.inputs, "factory": word}
            save_all = partial(_save, run, record, out, save, **description, overwrite=again)
            as_text = partial(_show, run, accuracy, samples, data.data)
            write_then_show(save_all, partial(_show_json, record) if as_json else as_text)


@contextmanager
def _job(pipeline: bool) -> Iterator[tuple[bool, dict[str, Any]]]:
    """The job of the ranks that torchrun has started: whether this one writes and shows results.

    And the setting of `fit` by which the ranks share the work; a process alone has none.
    """
    if not under_torchrun():
        if pipeline:
            raise TpsgdError(
                "--pipeline needs the processes that torchrun starts: torchrun --nproc-per-node 2 "
                "-m tpsgd train --pipeline"
            )
        yield True, {}
        return
    parallel = (tpsgd.pipeline if pipeline else tpsgd.data_parallel)()
    with terminable(), parallel.process_group() as ranks:
        yield ranks.first, {"parallel": parallel}


def _refuse_ranks(rule: str, parallel: dict[str, Any]) -> None:
    """Refuse to train by a method that knows nothing of ranks."""
    if parallel:
        raise TpsgdError(f"{rule} trains in one process: start it without torchrun")


def _show_json(record: dict[str, Any], _: list[Path] | None) -> None:
    print(json.dumps(record), flush=True)


def _show(
    run: "Run",
    accuracy: float,
    samples: "tpsgd.data.Data",
    name: str,
    files: list[Path] | None,
) -> None:
    """Print the record, what was done to the samples, the accuracy, and what was saved."""
    print(run)
    if run.settings["memory_budget"] is not None:
        print(peak_within(run))
    if samples.note:
        print(f"data: {samples.note}")
    print(f"test accuracy {accuracy:.2%} of {len(samples.test[1]):,} samples ({name})", flush=True)
    if files:
        print(f"saved {' and '.join(map(str, files))}", flush=True)


def _save(
    run: "Run", record: dict[str, Any], out: Path | None, save: Path | None, **description: Any
) -> list[Path]:
    """Write the files of --out and of --save; those that were written."""
    files: list[Path] = []
    if out is not None:
        files += write_or_rescue(partial(_write, run.model, record), out)
    if save is not None:
        files.append(write_or_rescue(partial(run.save, **description), save))
    return files


@contextmanager
def _claimed(
    out: Path | None,
    save: Path | None,
    overwrite: bool,
    factory: "Factory",
    classes: tuple[str, ...],
) -> Iterator[None]:
    """The folders of both options for this process alone, with room for the model.

    A model with other classes, which could not be saved, is refused before it is trained.
    """
    from tpsgd.memory.meter import tensor_bytes
    from tpsgd.saved.trained import check_classes, check_free

    with ExitStack() as stack:
        nbytes = 0
        if out is not None or save is not None:
            nbytes = tensor_bytes(model := factory())
            check_classes(model, classes if save is not None else ())
        if out is not None:
            stack.enter_context(output_folder(out, ("model.pt", "run.json"), overwrite, nbytes))
        if save is not None:
            stack.enter_context(output_folder(check_free(save, overwrite), nbytes=nbytes))
        yield


@contextmanager
def _logged(file: Path | None, overwrite: bool, append: bool) -> Iterator[list[Any]]:
    """The callbacks that write a log; an error of the disk is raised when all else is done."""
    if file is None:
        yield []
        return
    from tpsgd import logs

    with output_file(file):
        log = logs.file(file, overwrite=overwrite, append=append)
        yield [log]
    if log.error is not None:
        raise log.error


def arm_for(
    rule: str,
    training: options.FromScratch,
    memory: options.MemoryOptions,
    factory: "Factory",
    head: str,
) -> "Arm":
    """The arm to train or to plan, with the order and the head that were chosen."""
    from tpsgd.comparison import arms

    order = training.chosen_order
    arm = arms.arm(rule, order, factory)
    refused = options.chosen(training) if arms.ALL[arm.name].suits else []
    if arm.method:
        refused += options.chosen(memory)
    elif memory.memory and not arm.budgeted:
        refused.append("--memory")
    if refused:
        raise TpsgdError(f"{rule} takes no {', '.join(refused)}: leave them out")
    if training.readout_scale is not None:
        arm = arms.scaled(arm, training.readout_scale)
    if order and arm.rule and arm.rule.head:
        arm = replace(arm, order=order)  # `fit` refuses an order that the rule cannot have
    return arms.with_ridge(arm, factory, training.settings()) if head == "ridge" else arm


def _write(model: Any, record: dict[str, Any], folder: Path) -> list[Path]:
    """Write the state dict and the record into a folder."""
    import torch

    file = io.BytesIO()
    torch.save(model.cpu().state_dict(), file)
    description = json.dumps(record, indent=1).encode()
    return [
        write_whole(folder / "model.pt", file.getvalue()),
        write_whole(folder / "run.json", description),
    ]
