"""A training run that can be interrupted: its state after epochs, and how a later run goes on.

`keep_checkpoints` wraps the epochs of a net (`train.Net.epochs`); the loop itself does not know of
it. A stage is one call of `train`: a block of the paper's schedule, or all blocks together. In a
run that is resumed, stages that had ended are skipped, so that the schedule computes the inputs of
the next block again; the stage that was interrupted goes on with its next epoch. A run that had
finished is extended by the epochs that it is now asked for: all blocks learn again, from the
weights that they have.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tpsgd.engine.meter import Meter, Stage
from tpsgd.engine.record import Patience, Progress, Recorder, Run
from tpsgd.errors import TpsgdError
from tpsgd.saved import checkpoint as checkpoints
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.saved.expected import check_number
from tpsgd.train import Net
from tpsgd.training import learner_state
from tpsgd.training.run_identity import check_same_run, identity


@contextmanager
def keep_checkpoints(
    checkpoint: Checkpoint,
    net: Net,
    models: Sequence[nn.Module],
    recorder: Recorder,
    meter: Meter | None,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Iterator[None]:
    """A context in which a net writes checkpoints after its epochs, the folder its own.

    It goes on from the checkpoint in the folder if that is asked for. Callbacks with a method
    `resumed` are then told of the epochs that the record has, before the next epoch.
    """
    if len(models) > 1:
        raise TpsgdError("a checkpoint holds one model: leave stacked=None")
    told = [getattr(f, "resumed", None) for f in callbacks]
    with checkpoint.claimed():
        net.epochs = CheckpointedEpochs(
            checkpoint, net, models[0], recorder, meter, list(filter(callable, told))
        )
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
        told: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.checkpoint, self.folder = checkpoint, checkpoint.folder
        self.net, self.recorder, self.meter, self.told = net, recorder, meter, told
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.stages: list[dict[str, Any]] = []  # states of the stages that have begun
        self.first = 0  # epochs of every stage before the run was extended
        self.written = time.monotonic()
        self.state = checkpoint.open()  # what to go on from
        self.identity = identity(net, model, recorder.runs[0].settings)
        if self.state is None:
            checkpoint.begin(self.identity)
            return
        with checkpoints.readable(self.folder):
            self._go_on(self.state)

    def __call__(self, learners: Sequence[Any]) -> Iterator[int]:
        """The numbers of a stage's epochs; a checkpoint may follow each."""
        self.stages.append({})
        with checkpoints.readable(self.folder):
            epoch = self._restore(learners)
        while any(learner.learning for learner in learners):
            yield epoch
            epoch += 1
            self._end_epoch(learners, epoch)
        if not self.stages[-1]:  # nothing learns in it
            self._end_epoch(learners, epoch)

    def _go_on(self, state: dict[str, Any]) -> None:
        """Compare the checkpoint with this run, then give the model its weights."""
        before = state["identity"]
        extended = _is_extended(state, self.identity)
        same_epochs = {"epochs": self.identity["epochs"]} if extended else {}
        check_same_run(self.folder, before | same_epochs, self.identity)
        self.first = check_number("first epoch", state.get("first", 0), least=0, whole=True)
        if not state["stages"]:  # it was interrupted before it had a checkpoint
            self.state = None
            self._tell()
            return
        weights = [state["model"][name].view(t.shape) for name, t in self.tensors.items()]
        with torch.no_grad():
            for tensor, value in zip(self.tensors.values(), weights, strict=True):
                tensor.copy_(value)
        del state["model"]
        if self.meter is not None:
            peak = check_number("peak", state["peak"], least=0, whole=True)
            self.meter.stages.append(Stage((), peak=peak))
        if extended:
            self.first, self.state = before["epochs"], None
            self._restore_record(state)

    def _restore(self, learners: Sequence[Any]) -> int:
        """Bring a stage to where it was; the number of epochs that it has had."""
        state, number = self.state, len(self.stages) - 1
        if state is None:
            return self.first
        stage = state["stages"][number]
        pairs = list(zip(learners, stage["learners"], strict=True))
        for learner, saved in pairs:
            learner_state.set_batches(learner, saved)  # before another learner stops
        for learner, saved in pairs:
            learner_state.restore(learner, saved, stage["epoch"])
            if saved["patience"] is not None:
                patience = Patience(learner.settings.early_stopping)
                best, waited = saved["patience"]
                patience.best = best if best == math.inf else check_number("best loss", best)
                patience.waited = check_number("patience", waited, least=0, whole=True)
                self.recorder.patience[learner] = patience
        learner_state.set_random(self.net, stage["random"])
        over = not any(learner.learning for learner in learners)
        self.stages[number] = stage if over else {}  # of one that goes on, a later state is kept
        if number == len(state["stages"]) - 1:
            self._restore_record(state)
            self.state = None
        return stage["epoch"]

    def _restore_record(self, state: dict[str, Any]) -> None:
        """The record so far; inputs that were computed again are not counted twice."""
        before, run = Run.of(state["record"]), self.recorder.runs[0]
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
        for resumed in self.told:
            resumed(list(self.recorder.runs[0].history))

    def _end_epoch(self, learners: Sequence[Any], epoch: int) -> None:
        """Note the state of a stage that has ended; write a checkpoint if it is time for one."""
        over = not any(learner.learning for learner in learners)
        finished = over and learners[-1] is self.net.learners[-1]
        due = finished or time.monotonic() - self.written >= self.checkpoint.every
        if not (over or due):
            return
        states = [
            learner_state.state_of(x) | {"patience": self._patience(x) if x.learning else None}
            for x in learners
        ]
        random = learner_state.random_state(self.net)
        self.stages[-1] = {"epoch": epoch, "random": random, "learners": states}
        if due:
            self._write("finished" if finished else f"after epoch {epoch} of {_names(learners)}")
            self.written = time.monotonic()

    def _patience(self, learner: Any) -> list[Any] | None:
        patience = self.recorder.patience.get(learner)
        return None if patience is None else [patience.best, patience.waited]

    def _write(self, position: str) -> None:
        state = {
            "position": position,
            "identity": self.identity,
            "model": self.tensors,
            "stages": self.stages,
            "first": self.first,
            "record": self.recorder.runs[0].as_dict(),
            "seconds": time.perf_counter() - self.recorder.began,
            "peak": 0,
        }
        if self.meter is None:
            self.checkpoint.write(state)
            return
        state["peak"] = self.meter.pause()
        self.checkpoint.write(state)
        self.meter.resume()


def _is_extended(state: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether a run that had finished is asked for more epochs, at rates that need no total."""
    before, epochs = state["identity"].get("epochs"), now["epochs"]
    counts = type(before) is int and type(epochs) is int and 0 < before < epochs
    return counts and state["position"] == "finished" and now.get("lr_schedule") is None


def check_record(run: Run) -> None:
    """Refuse a record whose numbers are none."""
    for name in ("sample_passes", "forward_passes"):
        check_number(name, getattr(run, name), least=0, whole=True)
    for epoch in run.history:
        for name in ("block", "epoch"):
            check_number(name, getattr(epoch, name), least=0, whole=True)
        check_number("loss", epoch.loss)
        for name in ("accuracy", "val_loss", "val_accuracy", "seconds"):
            if (value := getattr(epoch, name)) is not None:
                check_number(name, value)


def _names(learners: Sequence[Any]) -> str:
    """Blocks that learn together, in words."""
    if learners[0].whole_net:
        return "the net"
    return f"block {learners[0].block.index + 1}" if len(learners) == 1 else "all blocks"
