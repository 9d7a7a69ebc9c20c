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
from tpsgd.cli.samples import RuleWord, data_for
from tpsgd.cli.terminal import live_bar, write_then_show
from tpsgd.cli.torchrun import under_torchrun
from tpsgd.common.errors import TpsgdError, reason
from tpsgd.common.files import is_function, write_whole
from tpsgd.common.output import output_file, output_folder, write_or_rescue
from tpsgd.common.units import size

if TYPE_CHECKING:
    from tpsgd.engine.arm import Arm
    from tpsgd.engine.record import Run
    from tpsgd.zoo.words import Factory

OF_NEW_MODELS = (
    "--activation", "--init", "--leak", "--loss-at", "--scale", "--drop", "--impute", "--task",
)  # fmt: skip
OF_ALL_ARMS = ("--epochs", "--batch-size", "--seed")


@dataclass(frozen=True)
class NewOrSaved(options.Model):
    """A new model, or a saved one to go on from."""

    model: str = setting("mlp:256", options.MODELS + " Or a folder of: tpsgd train --save.")
    factory_file: str | None = setting(
        None, "--model FOLDER: the FILE.py:FUNCTION that made it, if it was your own.", "--factory"
    )

    def saved(self, data: options.DataOptions) -> "tpsgd.Trained | None":
        """The model to go on from; None if there is no such folder."""
        if not Path(self.model).expanduser().is_dir():
            if self.factory_file is not None:
                raise TpsgdError("--factory is for a saved model: add --model FOLDER")
            return None
        chosen = [*options.changed(self), *options.changed(data)]
        if refused := [word for word in chosen if word in OF_NEW_MODELS]:
            raise TpsgdError(
                f"the model in {self.model} has its own columns, scaling and layers: leave "
                f"{', '.join(refused)} out"
            )
        trained = tpsgd.load(self.model, factory=self.factory_file)
        label = {} if data.label is None else {"label": data.label}
        return replace(trained, inputs=trained.inputs | label)


@options.grouped
def train(
    data: options.DataOptions,
    model: NewOrSaved,
    training: options.FromScratch,
    memory: options.MemoryOptions,
    machine: options.Machine,
    resuming: Resuming,
    rule: RuleWord = None,
    fields: Annotated[
        str | None, option("Fields of the rule, in quotes: 'features=64'; see: tpsgd search.")
    ] = None,
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
    from tpsgd.engine.arm import defined_at

    if (saved := model.saved(data)) is not None:
        training = replace(training, seed=training.seed or saved.run.seed)
        rule = rule or (saved.run.rule if saved.run.rule in ALL else None)
    rule = rule or DEFAULT
    entry(rule)
    places = {"out": out, "save": save, "log": log, "checkpoint": resuming.checkpoint}
    options.keep_apart(data.data, model.model, **places)
    settings = options.settings_of(training, memory, machine, model, resuming)
    with _job(pipeline) as (first, parallel):
        if saved is None:
            samples = data.load(training.seed)
            factory, head = model.factory_for(samples)
            notes = model.record(head)
        else:
            samples = data_for(saved, data, model.model)
            factory, head = partial(deepcopy, saved.model), model.head_of(saved.model)
            notes = {"model": model.model}
        arm = arm_for(rule, model, training, memory, factory, head, fields)
        if arm.method and (parallel or resuming.checkpoint):
            raise TpsgdError(
                f"{rule} has no checkpoints and trains in one process: leave --checkpoint and "
                "torchrun out"
            )
        settings = training.complete(settings, samples.shape, samples.targets) | parallel
        if not first:
            arm.train(factory, samples.train, progress=False, **settings)
            return
        goes_on = resuming.goes_on
        outputs = _outputs(out, save, log, overwrite, goes_on, factory, samples.classes)
        with outputs as callbacks:
            settings |= {"callbacks": callbacks} if callbacks else {}
            with resuming.interruptible(), live_bar() as advance:
                follow = partial(advance, rule)
                try:
                    trained = arm.train(factory, samples.train, progress=follow, **settings)
                    run = trained.runs[0]
                    score = tpsgd.Trained(trained.models[0], run).evaluate(samples.test)
                except Exception as error:
                    if isinstance(error, (TpsgdError, OSError)) or not is_function(rule):
                        raise
                    text = reason(error, defined_at(arm.rule))
                    raise TpsgdError(f"{rule} failed with {text}") from error
            run.settings = {**notes, **run.settings}
            record = {"r2" if samples.targets else "accuracy": score, **run.as_dict()}
            record |= options.provenance_of(samples, machine.device)
            file = model.factory_file or (model.model if is_function(model.model) else None)
            description = {"classes": samples.classes, "inputs": samples.inputs}
            description |= {"factory": file if arm.factory is None else None}

            def write() -> list[Path]:
                files: list[Path] = []
                if out is not None:
                    files += write_or_rescue(partial(_write, run.model, record), out)
                if save is not None:
                    save_run = partial(run.save, **description, overwrite=overwrite or goes_on)
                    files.append(write_or_rescue(save_run, save))
                return files

            def show(files: list[Path] | None) -> None:
                if as_json:
                    print(json.dumps(record), flush=True)
                    return
                _show(run, samples)
                tested = f"{len(samples.test[1]):,} samples ({data.data})"
                shown = f"R² {score:.3f}" if samples.targets else f"accuracy {score:.2%}"
                print(f"test {shown} of {tested}", flush=True)
                if files:
                    print(f"saved {' and '.join(map(str, files))}", flush=True)

            write_then_show(write, show)


@contextmanager
def _job(pipeline: bool) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Whether this process writes and shows results, and the setting of `fit` for several ranks.

    Ranks are the processes that torchrun has started; a process alone has no such setting.
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


@contextmanager
def _outputs(
    out: Path | None,
    save: Path | None,
    log: Path | None,
    overwrite: bool,
    goes_on: bool,
    factory: "Factory",
    classes: tuple[str, ...],
) -> Iterator[list[Any]]:
    """The folders and the log for this process alone: the callbacks that write the log.

    A folder has room for the model, and a model that is saved the classes of the data. An error
    of the log's disk is raised when all else is done.
    """
    from tpsgd import logs
    from tpsgd.memory.meter import tensor_bytes
    from tpsgd.saved.trained import check_classes, check_free

    nbytes, again, callbacks = 0, overwrite or goes_on, []
    if out is not None or save is not None:
        nbytes = tensor_bytes(model := factory())
        check_classes(model, () if save is None else classes)
        del model
    with ExitStack() as stack:
        if out is not None:
            stack.enter_context(output_folder(out, ("model.pt", "run.json"), again, nbytes))
        if save is not None:
            stack.enter_context(output_folder(check_free(save, again), nbytes=nbytes))
        if log is not None:
            stack.enter_context(output_file(log))
            callbacks.append(logs.file(log, overwrite=overwrite, append=goes_on))
        yield callbacks
    if callbacks and callbacks[0].error is not None:
        raise callbacks[0].error


def arm_for(
    rule: str,
    model: options.Model,
    training: options.FromScratch,
    memory: options.MemoryOptions,
    factory: "Factory",
    head: str,
    fields: str | None = None,
) -> "Arm":
    """The arm to train or to plan, with the order and the head that were chosen."""
    from tpsgd.comparison import arms
    from tpsgd.comparison.fields import with_fields

    order = training.chosen_order
    if model.head == "ridge" and order is tpsgd.simultaneous:
        raise TpsgdError(
            "--head ridge solves the last layer once those before it have learned: choose --order "
            "sequential"
        )
    arm = arms.arm(rule, order, factory)
    if fields is not None:
        values = options.fields_of(fields)
        if many := [name for name, tried in values.items() if len(tried) > 1]:
            raise TpsgdError(f"--fields {many[0]} has several values: tpsgd search tries them")
        of_rule = {name: value for name, (value,) in values.items()}
        arm = with_fields(arm, of_rule, arms.entry(rule).make)
    refused = options.changed(training) if arms.entry(rule).suits else []
    refused = [word for word in refused if word not in OF_ALL_ARMS]
    if arm.method:
        refused += options.changed(memory)
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


def _show(run: "Run", samples: "tpsgd.data.Data") -> None:
    """Print the record, the memory compared with its budget, and what was done to the samples."""
    from tpsgd.engine.settings import Memory, memory_in_words

    print(run)
    if (budget := run.settings["memory_budget"]) is not None:
        inputs = f", {size(run.kept_bytes)} of it kept inputs" if run.kept_bytes else ""
        words = f"{size(run.total_bytes)}{inputs}; {memory_in_words(run.settings)}"
        print(f"{Memory(budget).budget_in_words}: {words}")
    if samples.note:
        print(f"data: {samples.note}")
