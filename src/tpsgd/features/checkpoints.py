"""A training run that can be interrupted: its state after epochs, and how a later run goes on.

`CheckpointedEpochs` replaces the epochs of a net (`train.Net.epochs`), unknown to the loop.
A stage is one call of `train`: a block in `sequential` order, or all blocks together. In a run that
is resumed, stages that had ended are skipped, so that the loop computes the inputs of the next
block again; the stage that was interrupted goes on with its next epoch. A run that had finished is
extended by the epochs that it is now asked for: all blocks learn again, from the weights, class
codes and optimizers that they had. So a checkpoint has those of blocks that have stopped, too.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.extension import Extension
from tpsgd.engine.record import Patience, Progress, Run
from tpsgd.features import learner_state
from tpsgd.features.run_identity import check_same_run, identity
from tpsgd.memory.meter import Meter, Stage
from tpsgd.saved.checkpoint import Checkpoint, readable
from tpsgd.saved.expected import check_count, check_number
from tpsgd.train import Net

FINISHED = "finished"
State = dict[str, Any]


class Checkpoints(Extension):
    """The state of a run in a folder, from which a later run goes on.

    `keeps_ended`: with the state of blocks that have learned already.
    """

    def __init__(self, keeps_ended: bool) -> None:
        self.keeps_ended = keeps_ended

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        with net.spec.settings.checkpoint.claimed():
            net.epochs = CheckpointedEpochs(net, self.keeps_ended)
            yield


class CheckpointedEpochs:
    """The epochs of a net's stages, with a checkpoint between them."""

    def __init__(self, net: Net, keeps_ended: bool) -> None:
        self.net, self.keeps_ended, model = net, keeps_ended, net.models[0]
        self.checkpoint: Checkpoint = net.spec.settings.checkpoint
        self.meter = net.measured if isinstance(net.measured, Meter) else None
        self.recorder, self.run = net.recorder, net.recorder.runs[0]
        self.device = net.source.form.device
        self.generators = list(learner_state.loader_generators(net))
        self.tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.stages: list[State] = []  # states of the stages that have begun
        self.first = 0  # epochs of every stage before the run was extended
        self.before: list[State] = []  # its stages then; those that go on are empty
        self.moved = False  # whether a stage has learned since then
        self.ended: dict[Any, State] = {}  # states of learners that have stopped
        self.epoch = 0  # that is being trained
        self.written = time.monotonic()
        self.state = self.checkpoint.open()  # to go on from
        self.identity = identity(net, model, self.run.settings)
        if self.state is None:
            self.checkpoint.begin(self.identity)
            return
        with readable(self.checkpoint.folder):
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

    def _go_on(self, state: State) -> None:
        folder, before, now = self.checkpoint.folder, state["identity"], self.identity
        extended = _is_extended(state, now)
        with_epochs = before | {"epochs": now["epochs"]}
        if not extended and before != now == with_epochs:
            epochs = f"{before['epochs']} epochs, not {now['epochs']}"
            raise TpsgdError(
                f"the run in {folder} began with {epochs}: go on with --epochs {before['epochs']}; "
                "once it has finished it takes more, unless it has an lr_schedule"
            )
        check_same_run(folder, with_epochs if extended else before, now)
        self.first = check_count("first epoch", state.get("first", 0))
        self.before = list(state.get("before", ()))
        if not state["stages"]:  # it was interrupted before it had a checkpoint
            self.state = None
            self._tell_callbacks()
            return
        weights = state.pop("model")
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(weights[name].view(tensor.shape))
        if self.meter is not None:
            self.meter.stages.append(Stage((), peak=check_count("peak", state["peak"])))
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
        for learner, saved in pairs:  # before another learner stops
            if saved["batches"] is not None:
                learner.updater.batch_rates.step = check_count("batches", saved["batches"])
        for learner, saved in pairs:
            learner_state.restore(learner, saved, stage["epoch"])
            self._restore_patience(learner, saved)
            if saved["learning"] is not True:
                self.ended[learner] = saved
        learner_state.set_random(self.device, stage["random"], self.generators)
        over = not any(learner.learning for learner in learners)
        self.stages[number] = stage if over else {}  # of one that goes on, a later state is kept
        if number == len(state["stages"]) - 1:
            self._restore_record(state)
            self.state = None
        return stage["epoch"]

    def _extend(self, learners: Sequence[Any], states: list[State]) -> None:
        """Let the learners of a run that had finished go on with the state that they ended with.

        One that had stopped before its last epoch stays as it is, unless its inputs change.
        """
        if len(self.stages) == 1:
            learner_state.set_random(self.device, self.before[-1]["random"], self.generators)
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

    def _restore_patience(self, learner: Any, saved: State) -> None:
        if saved["patience"] is not None:
            patience = Patience(learner.settings.early_stopping)
            best, waited = saved["patience"]
            patience.best = best if best == math.inf else check_number("best loss", best)
            patience.waited = check_count("patience", waited)
            self.recorder.patience[learner] = patience

    def _restore_record(self, state: State) -> None:
        """The record so far; inputs that were computed again are not counted twice."""
        before, run = Run.of(state["record"]), self.run
        check_record(before)
        run.history[:] = before.history
        run.sample_passes, run.forward_passes = before.sample_passes, before.forward_passes
        self.recorder.began -= check_number("seconds", state["seconds"], least=0)
        for observer in self.net.observers:
            if isinstance(observer, Progress):
                observer.done = run.sample_passes
        self._tell_callbacks()

    def _tell_callbacks(self) -> None:
        """Tell callbacks that have a method `resumed` which epochs the run has had."""
        for callback in self.net.spec.settings.callbacks:
            if callable(resumed := getattr(callback, "resumed", None)):
                resumed(list(self.run.history))

    def _keep(self, learner: Any) -> None:
        """Keep the state of a learner before it stops: a later run may ask for more epochs.

        Not within a memory budget, which has no room for it.
        """
        if self.keeps_ended and (state := learner_state.ended_state(learner)) is not None:
            patience = self.recorder.patience.get(learner)
            spent = patience is not None and patience.waited >= patience.rule.patience
            early = spent or self.epoch + 1 < learner.epochs
            self.ended[learner] = state | {"patience": self._patience(learner), "early": early}

    def _patience(self, learner: Any) -> list[float] | None:
        patience = self.recorder.patience.get(learner)
        return None if patience is None else [patience.best, patience.waited]

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
        random = learner_state.random_state(self.device, self.generators)
        self.stages[-1] = {"epoch": epoch, "random": random, "learners": states}
        if due:
            self._write(FINISHED if finished else f"after epoch {epoch} of {_names(learners)}")
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


def _is_extended(state: State, now: State) -> bool:
    """Whether a run that had finished is asked for more epochs, at rates that need no total."""
    before, epochs = state["identity"].get("epochs"), now["epochs"]
    counts = type(before) is int and type(epochs) is int and 0 < before < epochs
    return counts and state["position"] == FINISHED and now.get("lr_schedule") is None


def check_record(run: Run) -> None:
    for name in ("sample_passes", "forward_passes"):
        check_count(name, getattr(run, name))
    for epoch in run.history:
        for name, value in vars(epoch).items():
            if name in ("block", "epoch"):
                check_count(name, value)
            elif name == "loss" or value is not None:
                check_number(name, value)


def _names(learners: Sequence[Any]) -> str:
    if learners[0].whole_net:
        return "the net"
    return f"block {learners[0].block.index + 1}" if len(learners) == 1 else "all blocks"
