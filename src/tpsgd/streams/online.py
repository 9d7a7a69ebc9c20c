"""A net whose learners live on: optimizers, class codes and sums go from batch to batch.

`fit` makes learners, trains them and lets go of them. Here they are made of the first batch, by the
same functions, and stay; a batch is one `train.step`. Where they must be made again, for a new
class or in another process, `state` has all that they have learned besides the weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.anatomy import Anatomy, dissect
from tpsgd.engine.assemble import check_optimizers, make_learners
from tpsgd.engine.batches import Arrays, Batch, as_source, check_values
from tpsgd.engine.device import limit_threads
from tpsgd.engine.record import LOWER_RATE, SCALE_INPUTS
from tpsgd.engine.settings import Settings
from tpsgd.errors import TpsgdError
from tpsgd.fast.wrapper import quicken
from tpsgd.losses import bce
from tpsgd.nets.padded import Padded
from tpsgd.rules import Rule, Signal
from tpsgd.saved.expected import check_number, check_tensor, checked_state
from tpsgd.solvers import SOLVERS, Recursive, Ridge
from tpsgd.solvers.least_squares import MomentSums
from tpsgd.streams.new_classes import enlarged, overlay, with_targets
from tpsgd.train import calibrate, step, step_on_error
from tpsgd.training.fit import training_context

State = dict[str, Any]


class OnlineNet:
    """The learners of a model, which learn from one batch after another."""

    def __init__(self, model: nn.Module, rule: Rule | Sequence[Rule], settings: Settings) -> None:
        self.model, self.rule, self.settings = model, rule, settings
        self.learners: list[Any] = []  # none before the first batch
        self.state: State | None = None  # of earlier learners, to go on with
        self.random: tuple[Tensor, ...] | None = None  # generators after the latest batch

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers of the model."""
        return [*self.model.parameters(), *self.model.buffers()]

    def check(self, x: Any) -> None:
        """Refuse samples that no learners can be made for, if there are none yet."""
        if not self.learners and self.state is None:
            with self._training() as device:
                self._assemble(x, device)

    def check_new_class(self) -> None:
        """Refuse a new class that the sums of `rls()` have no room for."""
        state = self.current_state()
        sums = state["blocks"][-1].get("sums") if state else None
        if sums is not None and not sums["bias"] and self.settings.loss is bce:
            raise TpsgdError(
                "rls() with tpsgd.bce needs a bias in the last layer to get a new class"
            )

    def learn(self, x: Any, labels: Tensor) -> str:
        """One step of every block; what is wrong with a loss, in words, or "".

        The loss is that of the weights before the step.
        """
        with self._training() as device:
            if not self.learners:
                self._make_learners(x, labels, device)
            limit_threads(device, self.anatomy.largest_product * len(x))
            for learner in self.learners:
                learner.resume()
            take_step = step_on_error if self.waits_for_output else step
            with torch.no_grad():
                take_step(self.learners, self._batch(x, labels))
            return self._broken_loss(len(x))

    def check_state(self, x: Any) -> None:
        """Refuse a state, out of a file, that learners of samples like x cannot go on from."""
        state, random = self.state, self.random
        if state is None:
            return
        try:
            with self._training() as device:
                learners = self._assemble(x, device)
                for learner, of_block in zip(learners, state["blocks"], strict=True):
                    learner.start()
                    _check_block(learner, of_block)
                    _restore(learner, of_block)
        finally:
            self.state, self.random = state, random

    def release(self) -> None:
        """Let go of the learners, but for their state: the next batch makes new ones."""
        if self.learners:
            self.state = self.current_state()
            self.learners = []

    def current_state(self) -> State | None:
        """What goes on from batch to batch besides the weights; tensors are not copied."""
        if not self.learners:
            return self.state
        return {"blocks": [_state_of(x) for x in self.learners], "random": self.random}

    @property
    def waits_for_output(self) -> bool:
        """Whether a block learns from the error of the net's output."""
        return any(x.learning and x.signal is not Signal.LABEL for x in self.learners)

    @contextmanager
    def _training(self) -> Iterator[torch.device]:
        """As in `fit`, with the random numbers going on from the batch before."""
        random = self.random if self.learners else (self.state or {}).get("random")
        with training_context([self.model], self.settings, seeded=random is None) as device:
            if random is not None:
                _set_random(device, random)
            yield device
            self.random = _get_random(device)

    def _make_learners(self, x: Any, labels: Tensor, device: torch.device) -> None:
        """Learners for a batch like this one, calibrated to it or with the state of earlier ones.

        Later batches may have sequences of other lengths.
        """
        learners = self._assemble(x, device)
        for learner in learners:
            learner.start()
        if self.state is None:
            calibrate(learners, self._arrays(x, labels))
        else:
            for learner, state in zip(learners, self.state["blocks"], strict=True):
                _restore(learner, state)
        self.learners, self.state = learners, None

    def _assemble(self, x: Any, device: torch.device) -> list[Any]:
        """Learners that have not started."""
        model, ragged = self.model, isinstance(x, Padded)
        self.anatomy = dissect(
            [model], x[:2], ragged, self.rule, self.settings, device, check_values
        )
        _check_solvers(self.anatomy)
        learners = make_learners(self.anatomy, self.rule, self.settings, samples=0)
        check_optimizers(learners)
        quicken(learners)
        return learners

    def _arrays(self, x: Any, labels: Tensor) -> Arrays:
        anatomy = self.anatomy
        expected = anatomy.form, anatomy.loss, anatomy.classes, False, anatomy.classifier
        source = as_source((x, labels), *expected)
        assert isinstance(source, Arrays)
        return source

    def _batch(self, x: Any, labels: Tensor) -> Batch:
        """All of these samples as one batch."""
        arrays = self._arrays(x, labels)
        return Batch(arrays.take, torch.arange(len(x), device=arrays.x.device), len(x))

    def _broken_loss(self, samples: int) -> str:
        """Which loss is not a number, and why; "" if all are finite."""
        for learner in self.learners:
            if not learner.learning:
                continue
            learner.keep_figures()
            loss = learner.figures.collect(samples)[0][0]
            if not math.isfinite(loss):
                solved = isinstance(learner.settings.optimizer, SOLVERS)
                return (
                    f"the loss of block {learner.block.index + 1} ({learner.block}) became {loss}: "
                    f"{SCALE_INPUTS if solved else LOWER_RATE}"
                )
        return ""


def _check_solvers(anatomy: Anatomy) -> None:
    """Refuse blocks that cannot be solved while a stream goes on."""
    learned = False
    for block, rule, settings in zip(
        anatomy.blocks, anatomy.rules, anatomy.block_settings, strict=True
    ):
        if isinstance(settings.optimizer, Ridge):
            raise TpsgdError("ridge() needs all samples at once: in a stream, take tpsgd.rls()")
        if isinstance(settings.optimizer, Recursive) and learned:
            raise TpsgdError(
                f"rls() cannot solve block {block.index + 1} ({block}) while the blocks before it "
                "learn: freeze them with rule=tpsgd.rules.frozen(), or take an optimizer"
            )
        learned = learned or (rule.objective is not None and bool(block.named_parameters()))


def _state_of(learner: Any) -> State:
    """What a learner has learned besides the weights of its block."""
    if not learner.learning:
        return {}
    state: State = {"codes": learner.tensors, "mean_square": learner.mean_square}
    if learner.optimizer is not None:
        each = learner.optimizer.state
        state["shapes"] = {name: tuple(p.shape) for name, p in learner.params.items()}
        state["optimizer"] = {name: dict(each[p]) for name, p in learner.params.items()}
    if getattr(learner, "sums", None) is not None:
        state["sums"] = dict(vars(learner.sums))
    return state


@torch.no_grad()
def _restore(learner: Any, state: State) -> None:
    """Let a new learner go on from a state, which may be that of fewer classes."""
    if not state:
        return
    if state["mean_square"] is not None:
        learner.mean_square = state["mean_square"]
        learner.calibrate()  # the rows of new classes
    for new, old in zip(learner.tensors, state["codes"], strict=True):
        overlay(new, old)
    if "optimizer" in state:
        for name in state["optimizer"]:
            learner.optimizer.state[learner.params[name]] = _optimizer_state(learner, name, state)
    if "sums" in state:
        sums = MomentSums.__new__(MomentSums)
        vars(sums).update(state["sums"])
        equations = learner.make_equations()
        targets = equations.classes if equations.single else sums.y.shape[-1]
        learner.sums = with_targets(sums, targets, -1.0 if equations.signed else 0.0)


def _check_block(learner: Any, state: State) -> None:
    """Refuse shapes that a learner cannot go on from, before it has them: kernels trust them."""
    if "optimizer" in state:
        states = {i: _optimizer_state(learner, n, state) for i, n in enumerate(learner.params)}
        groups = learner.optimizer.state_dict()["param_groups"]
        checked_state(learner.optimizer, {"state": states, "param_groups": groups})
    if "sums" in state:
        sums = state["sums"]
        (_, d), (_, k) = sums["x"].shape, sums["y"].shape
        shapes = {"x": (1, d), "y": (1, k), "xx": (d, d), "xy": (d, k), "yy": (k, k)}
        for name, shape in shapes.items():
            check_tensor(name, sums[name], torch.empty(shape, dtype=torch.float64, device="meta"))
        if sums.keys() != {*shapes, "count", "bias"} or type(sums["bias"]) is not bool:
            raise ValueError(f"sums have {list(sums)}")
        check_number("count", sums["count"], least=0, whole=True)


def _optimizer_state(learner: Any, name: str, state: State) -> State:
    """What an optimizer has for a parameter, with zeros for rows that it has got since."""
    values, before = state["optimizer"][name], state["shapes"][name]
    return {k: enlarged(v, learner.params[name], before) for k, v in values.items()}


def _get_random(device: torch.device) -> tuple[Tensor, ...]:
    states = (torch.get_rng_state(),)
    return (*states, torch.cuda.get_rng_state(device)) if device.type == "cuda" else states


def _set_random(device: torch.device, states: tuple[Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
