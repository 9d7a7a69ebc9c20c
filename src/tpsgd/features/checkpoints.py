"""A training run that can be interrupted: its state after epochs, and how a later run goes on.

`keep_checkpoints` wraps the epochs of a net (`train.Net.epochs`); the loop itself does not know of
it. A stage is one call of `train`: a block in `sequential` order, or all blocks together. In a
run that is resumed, stages that had ended are skipped, so that the loop computes the inputs of
the next block again; the stage that was interrupted goes on with its next epoch. A run that had
finished is extended by the epochs that it is now asked for: all blocks learn again, from the
weights, class codes and optimizers that they had. So a checkpoint has those of blocks that have
stopped, too.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.record import Patience, Progress, Recorder, Run
from tpsgd.features import learner_state
from tpsgd.features.run_identity import check_same_run, identity
from tpsgd.memory.meter import Meter, Stage
from tpsgd.saved.checkpoint import Checkpoint, readable
from tpsgd.saved.expected import check_number
from tpsgd.train import Net


@contextmanager
def keep_checkpoints(
    checkpoint: Checkpoint,
    net: Net,
    models: Sequence[nn.Module],
    recorder: Recorder,
    meter: Meter | None,
    callbacks: Sequence[Callable[..., Any]] = (),
    keeps_ended: bool = True,
) -> Iterator[None]:
    """A context in which a net writes checkpoints after its epochs, the folder its own.

    It goes on from the checkpoint in the folder if that is asked for. Callbacks with a method
    `resumed` are then told of the epochs that the record has, before the next epoch.
    """
    if len(models) > 1:
        raise TpsgdError("a checkpoint holds one model: leave stacked=None")
    with checkpoint.claimed():
        epochs = CheckpointedEpochs(checkpoint, net, models[0], recorder, meter, callbacks)
        epochs.keeps_ended = keeps_ended
        net.epochs = epochs
        yield


class CheckpointedEpochs:
    """The epochs of a net's stages, with a checkpoint between them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        net: Net,
        model: nn.Module,
        recorder: Recorder,
        meter: Meter | None,
        callbacks: Sequence[Callable[..., Any]],
    ) -> None:
        self.checkpoint, self.net, self.meter = checkpoint, net, meter
        self.device = net.source.form.device
        self.recorder, self.run, self.callbacks = recorder, recorder.runs[0], callbacks
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.stages: list[dict[str, Any]] = []  # states of the stages that have begun
        self.first = 0  # epochs of every stage before the run was extended
        self.before: list[dict[str, Any]] = []  # its stages then; those that go on are empty
        self.moved = False  # whether a stage has learned since then
        self.ended: dict[Any, dict[str, Any]] = {}  # states of learners that have stopped
        self.epoch = 0  # that is being trained
        self.keeps_ended = True  # whether states of learners that have stopped are kept
        self.written = time.monotonic()
        self.state = checkpoint.open()  # what to go on from
        self.identity = identity(net, model, self.run.settings)
        if self.state is None:
            checkpoint.begin(self.identity)
            return
        with readable(checkpoint.folder):
            self._go_on(self.state)

    def __call__(self, learners: Sequence[Any]) -> Iterator[int]:
        """The numbers of a stage's epochs; a checkpoint may follow each."""
        self.stages.append({})
        with readable(self.checkpoint.folder):
            epoch = self._restore(learners)
        for learner in learners:
            learner.before_stopping = self._keep
        while any(learner.learning for learner in learners):
            self.epoch = epoch
            yield epoch
            epoch += 1
            self._end_epoch(learners, epoch)
        if not self.stages[-1]:  # nothing learns in it
            self._end_epoch(learners, epoch)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Compare the checkpoint with this run, then give the model its weights."""
        before = state["identity"]
        extended = _is_extended(state, self.identity)
        same_epochs = {"epochs": self.identity["epochs"]}
        if not extended and before != self.identity == before | same_epochs:
            raise _other_epochs(self.checkpoint.folder, state, self.identity)
        check_same_run(
            self.checkpoint.folder, before | (same_epochs if extended else {}), self.identity
        )
        self.first = check_number("first epoch", state.get("first", 0), least=0, whole=True)
        self.before = list(state.get("before", ()))
        if not state["stages"]:  # it was interrupted before it had a checkpoint
            self.state = None
            self._tell()
            return
        weights = state.pop("model")
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(weights[name].view(tensor.shape))
        if self.meter is not None:
            peak = check_number("peak", state["peak"], least=0, whole=True)
            self.meter.stages.append(Stage((), peak=peak))
        if extended:
            self.first, self.before, self.state = before["epochs"], state["stages"], None
            self._restore_record(state)

    def _restore(self, learners: Sequence[Any]) -> int:
        """Bring a stage to where it was; the number of epochs that it has had."""
        state, number = self.state, len(self.stages) - 1
        if state is None:
            if number < len(self.before):
                self._extend(learners, self.before[number]["learners"])
                self.before[number] = {}
            return self.first
        stage = state["stages"][number]
        self.moved |= bool(self.before) and stage["epoch"] > self.first
        pairs = list(zip(learners, stage["learners"], strict=True))
        for learner, saved in pairs:
            learner_state.set_batches(learner, saved)  # before another learner stops
        for learner, saved in pairs:
            learner_state.restore(learner, saved, stage["epoch"])
            self._restore_patience(learner, saved)
            if saved["learning"] is not True:
                self.ended[learner] = saved
        self._set_random(stage["random"])
        over = not any(learner.learning for learner in learners)
        self.stages[number] = stage if over else {}  # of one that goes on, a later state is kept
        if number == len(state["stages"]) - 1:
            self._restore_record(state)
            self.state = None
        return stage["epoch"]

    def _extend(self, learners: Sequence[Any], states: list[dict[str, Any]]) -> None:
        """Let the learners of a run that had finished go on with the state that they ended with.

        One that had stopped before its last epoch stays as it is, unless its inputs change.
        """
        if len(self.stages) == 1:
            self._set_random(self.before[-1]["random"])
        for learner, saved in zip(learners, states, strict=True):
            if learner.updater.optimizer is None or saved["optimizer"] is None:
                continue  # it is solved again, or was trained by a version that kept nothing
            stays = saved["early"] is True and not self.moved
            learner_state.restore(learner, saved | {"learning": not stays}, self.first)
            if stays:
                self.ended[learner] = saved
            elif saved["early"] is False:
                self._restore_patience(learner, saved)
        self.moved |= any(learner.learning for learner in learners)

    def _patience(self, learner: Any) -> list[float] | None:
        patience = self.recorder.patience.get(learner)
        return None if patience is None else [patience.best, patience.waited]

    def _set_random(self, states: dict[str, Any]) -> None:
        generators = learner_state.loader_generators(self.net)
        learner_state.set_random(self.device, states, generators)

    def _restore_patience(self, learner: Any, saved: dict[str, Any]) -> None:
        if saved["patience"] is not None:
            patience = Patience(learner.settings.early_stopping)
            best, waited = saved["patience"]
            patience.best = best if best == math.inf else check_number("best loss", best)
            patience.waited = check_number("patience", waited, least=0, whole=True)
            self.recorder.patience[learner] = patience

    def _keep(self, learner: Any) -> None:
        """Keep what a learner has before it stops: a later run may ask for more epochs.

        Not within a memory budget, which has no room for it.
        """
        if not self.keeps_ended:
            return
        if (state := learner_state.ended_state(learner)) is not None:
            patience = self.recorder.patience.get(learner)
            spent = patience is not None and patience.waited >= patience.rule.patience
            early = spent or self.epoch + 1 < learner.epochs
            self.ended[learner] = state | {"patience": self._patience(learner), "early": early}

    def _restore_record(self, state: dict[str, Any]) -> None:
        """The record so far; inputs that were computed again are not counted twice."""
        before, run = Run.of(state["record"]), self.run
        check_record(before)
        run.history[:] = before.history
        run.sample_passes, run.forward_passes = before.sample_passes, before.forward_passes
        self.recorder.began -= check_number("seconds", state["seconds"], least=0)
        for observer in self.net.observers:
            if isinstance(observer, Progress):
                observer.done = run.sample_passes
        self._tell()

    def _tell(self) -> None:
        """Let callbacks know which epochs the run has had; those that follow are trained anew."""
        for callback in self.callbacks:
            if callable(resumed := getattr(callback, "resumed", None)):
                resumed(list(self.run.history))

    def _end_epoch(self, learners: Sequence[Any], epoch: int) -> None:
        """Note the state of a stage that has ended; write a checkpoint if it is time for one."""
        over = not any(learner.learning for learner in learners)
        finished = over and learners[-1] is self.net.learners[-1]
        due = finished or time.monotonic() - self.written >= self.checkpoint.every
        if not (over or due):
            return
        states = [
            self.ended.get(x)
            or learner_state.state_of(x) | {"patience": self._patience(x) if x.learning else None}
            for x in learners
        ]
        generators = learner_state.loader_generators(self.net)
        random = learner_state.random_state(self.device, generators)
        self.stages[-1] = {"epoch": epoch, "random": random, "learners": states}
        if due:
            self._write("finished" if finished else f"after epoch {epoch} of {_names(learners)}")
            self.written = time.monotonic()

    def _write(self, position: str) -> None:
        peak = 0 if self.meter is None else self.meter.pause()
        state = {
            "position": position,
            "identity": self.identity,
            "model": self.tensors,
            "stages": self.stages,
            "first": self.first,
            "before": self.before,
            "record": self.run.as_dict(),
            "seconds": time.perf_counter() - self.recorder.began,
            "peak": peak,
        }
        self.checkpoint.write(state)
        if self.meter is not None:
            self.meter.resume()


def _is_extended(state: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run that had finished is asked for more epochs, at rates that need no total."""
    before, epochs = state["identity"].get("epochs"), now["epochs"]
    counts = type(before) is int and type(epochs) is int and 0 < before < epochs
    return counts and state["position"] == "finished" and now.get("lr_schedule") is None


def _other_epochs(folder: Path, state: dict[str, Any], now: dict[str, Any]) -> TpsgdError:
    """Why a run cannot go on with another number of epochs, the only thing that differs."""
    before, asked = (str(identity["epochs"]) for identity in (state["identity"], now))
    same = f"go on with epochs={before} (--epochs {before})"
    if state["position"] != "finished":
        why = f"began with {before} epochs, not {asked}: {same}; once finished, it takes more"
    elif now.get("lr_schedule") is not None:
        why = (
            f"had a learning rate for {before} epochs, not {asked}: {same}, or name another folder"
        )
    else:
        why = (
            f"has {before} epochs already: epochs (--epochs) must be {before} or more, not {asked}"
        )
    return TpsgdError(f"the run in {folder} {why}")


def check_record(run: Run) -> None:
    """Refuse a record whose numbers are none."""
    for name in ("sample_passes", "forward_passes"):
        check_number(name, getattr(run, name), least=0, whole=True)
    for epoch in run.history:
        for name, value in vars(epoch).items():
            if name in ("block", "epoch"):
                check_number(name, value, least=0, whole=True)
            elif name == "loss" or value is not None:
                check_number(name, value)


def _names(learners: Sequence[Any]) -> str:
    """Blocks that learn together, in words."""
    if learners[0].whole_net:
        return "the net"
    return f"block {learners[0].block.index + 1}" if len(learners) == 1 else "all blocks"
