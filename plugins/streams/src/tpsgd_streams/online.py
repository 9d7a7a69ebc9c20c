"""A net whose learners stay: optimizers, class codes and sums go on from batch to batch.

`fit` makes learners, trains them and drops them. Here they are made for the first batch, by the
same functions, and stay; a batch is one `train.step`. Where they must be made again, for a new
class or in another process, `state` has all that they have learned besides the weights.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.assemble import batches_for, check_optimizers, make_learners
from tpsgd.engine.device import limit_threads
from tpsgd.engine.fast.wrapper import quicken
from tpsgd.engine.learners.learner import calibrate, step_on_error, with_pending_updates
from tpsgd.engine.record import broken_loss
from tpsgd.engine.run import training_context
from tpsgd.engine.settings import Settings
from tpsgd.engine.solvers import Recursive, Ridge
from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd.engine.sources.batches import ArraySource, SampleBatch
from tpsgd.engine.sources.inputs import check_values
from tpsgd.engine.sources.loaders import as_source
from tpsgd.engine.spec import RunSpec, request, specify
from tpsgd.features.learner_state import random_state, restore_optimizer, set_random
from tpsgd.features.target_scaling import Outputs
from tpsgd.losses import bce
from tpsgd.nets.blocks import overwriting
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.new_classes import add_output, check_new_output, enlarged, overlay
from tpsgd.nets.padded import Padded
from tpsgd.rules import Rule
from tpsgd.saved.expected import check_number, check_tensor
from tpsgd.targets import CLASSES, Target
from tpsgd_streams.other_labels import LabelStatistics, gives_units

State = dict[str, Any]
OF_TARGET = ("numbers", "shape", "rows", "ignores")  # what a state has of labels


class OnlineNet:
    """The learners of a model, which learn from one batch after another."""

    def __init__(self, model: nn.Module, rule: Rule | Sequence[Rule], settings: Settings) -> None:
        self.model, self.rule, self.settings = model, rule, settings
        self.learners: list[Any] = []  # none before the first batch
        self.target = CLASSES  # what labels are
        self.labels: LabelStatistics | None = None  # of all so far, if they are numbers
        self.state: State | None = None  # of earlier learners, to go on with
        self.random: tuple[Tensor, ...] | None = None  # generators after the latest batch

    def check(self, x: Any) -> None:
        """Refuse samples that no learners can be made for, if there are none yet."""
        if not self.learners and self.state is None:
            with self._training() as device:
                self._assemble(x, device)

    def check_new_class(self) -> None:
        """Refuse a new class that the last layer, or the sums of `rls()`, have no room for."""
        check_new_output(self.model)
        state = self.current_state()
        sums = state["blocks"][-1].get("sums") if state else None
        if sums is not None and not sums["bias"] and self.settings.loss is bce:
            raise TpsgdError("for a new class, rls() with tpsgd.bce needs a bias in the last layer")

    def add_class(self) -> None:
        """One more output; the next batch makes new learners, which go on from the state."""
        self.state, self.learners = self.current_state(), []
        add_output(self.model)

    def learn(self, x: Any, labels: Tensor) -> str:
        """One step of every block; a sentence if a loss (before the step) is not finite, or ""."""
        with self._training() as device:
            first = not self.learners and self._make_learners(x, labels, device)
            limit_threads(device, self.spec.largest_product * len(x))
            with self._standardised(x, labels) as scaling:
                arrays = self._arrays(x, labels, scaling)
                if first:
                    calibrate(self.learners, arrays, batches_for)
                for learner in self.learners:
                    learner.set_mode()
                take_step, index = with_pending_updates(step_on_error), torch.arange(len(x))
                batch = SampleBatch(arrays.take, index.to(arrays.x.device), len(x))
                with torch.no_grad():
                    take_step(self.learners, batch)
            return self._broken_loss(len(x))

    def check_state(self, x: Any) -> None:
        """Refuse a state, out of a file, that learners of samples like x cannot go on from."""
        state, random = self.state, self.random
        if state is None:
            return
        try:
            with self._training() as device:
                self._go_on(self._assemble(x, device), state)
                if self.labels is not None:
                    self.labels.checked(self.spec.classes)
        finally:
            self.state, self.random = state, random

    def resume(self, state: State | None) -> None:
        """Go on with the state of earlier learners."""
        self.learners, self.state = [], state
        if state is not None and "target" in state:
            target = state["target"]
            self.target = Target(**(target | {"shape": tuple(target["shape"])}))

    def dim_of_classes(self, out: Tensor) -> int:
        """The dimension of an output that has the classes, or the numbers, of a position."""
        first = ends_in_maps(self.model)
        if self.target.shape and out.dim() > 2:
            first = self.target.at(tuple(out.shape[1:]), first).channels_first
        return 1 if first or out.dim() == 2 else out.dim() - 1

    def current_state(self) -> State | None:
        """What goes on from batch to batch besides the weights; tensors are not copied."""
        if not self.learners:
            return self.state
        state: State = {"blocks": [_state_of(x) for x in self.learners], "random": self.random}
        if self.spec.target.numbers or self.spec.target.positions:
            state["target"] = {name: getattr(self.target, name) for name in OF_TARGET}
        if self.labels is not None:
            state["labels"] = dict(vars(self.labels))
        return state

    @property
    def numbers(self) -> bool:
        """Whether it has learned labels that are numbers."""
        return self.labels is not None if self.learners else "labels" in (self.state or {})

    @contextmanager
    def _training(self) -> Iterator[torch.device]:
        """As in `fit`, with the random numbers going on from the batch before."""
        random = self.random if self.learners else (self.state or {}).get("random")
        layers = self.spec.layers if self.learners else layers_of(self.model)
        writers = overwriting(self.model, layers)
        seeded = random is None
        with training_context([self.model], self.settings, writers, seeded) as device:
            if random is not None:
                set_random(device, dict(zip(("torch", "cuda"), random, strict=False)))
            yield device
            self.random = tuple(random_state(device).values())

    def _make_learners(self, x: Any, labels: Tensor, device: torch.device) -> bool:
        """Learners for such batches, with the state of earlier ones; whether there were none."""
        self.target, self.labels = Target.of(labels, self.settings.loss, all_of_them=False), None
        learners, first = self._assemble(x, device), self.state is None
        if self.state is not None:
            self._go_on(learners, self.state)
        else:
            for learner in learners:
                learner.start()
        self.learners, self.state = learners, None
        return first

    def _assemble(self, x: Any, device: torch.device) -> list[Any]:
        """Learners that have not started."""
        ragged = isinstance(x, Padded)
        asked = request([self.model], None, self.rule, self.settings, x[:2], self.target)
        self.spec = specify(asked, x[:2], ragged, device, check_values)
        _check_solvers(self.spec)
        learners = make_learners(self.spec, self.rule, self.settings, samples=0)
        check_optimizers(learners)
        quicken(learners)
        solved = isinstance(learners[-1].settings.optimizer, Recursive)
        scaled = self.spec.target.numbers and not solved
        self.last: Any = Outputs(self.model, asked).layer if scaled else None
        return learners

    @contextmanager
    def _standardised(self, x: Any, labels: Tensor) -> Iterator[Any]:
        """A context in which the model gives standardised numbers, if labels are numbers."""
        target, before = self.spec.target, self.labels
        if not target.numbers:
            yield None
            return
        rows = target.canonical(labels).double().flatten(0, -2)
        new = LabelStatistics.of(rows)
        self.labels = new if before is None else before + new
        if self.last is None:
            yield None
            return
        in_units = before is not None or gives_units(self.model, x, rows, target)
        with self.labels.standardised(self.last, in_units) as scaling:
            yield scaling

    def _go_on(self, learners: list[Any], state: State) -> None:
        self.labels = LabelStatistics(**state["labels"]) if "labels" in state else None
        for learner, of_block in zip(learners, state["blocks"], strict=True):
            learner.start()
            _restore(learner, of_block)

    def _arrays(self, x: Any, labels: Tensor, scaling: Any) -> ArraySource:
        spec = self.spec
        expected = spec.form, spec.loss, spec.classes, False, spec.target
        source = as_source((x, labels), *expected, scaling)
        assert isinstance(source, ArraySource)
        return source

    def _broken_loss(self, samples: int) -> str:
        for learner in self.learners:
            if not learner.learning:
                continue
            learner.figures.keep()
            loss = learner.figures.collect(samples).losses[0]
            if not math.isfinite(loss):
                return f"the {broken_loss(learner, loss)}"
        return ""


def _check_solvers(spec: RunSpec) -> None:
    """Refuse blocks that cannot be solved while a stream goes on."""
    learned = False
    for block, rule, settings in zip(spec.blocks, spec.rules, spec.block_settings, strict=True):
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
    if (optimizer := learner.updater.optimizer) is not None:
        each = optimizer.state
        state["shapes"] = {name: tuple(p.shape) for name, p in learner.params.items()}
        state["optimizer"] = {name: dict(each[p]) for name, p in learner.params.items()}
    if getattr(learner.updater, "sums", None) is not None:
        state["sums"] = dict(vars(learner.updater.sums))
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
        states = {}
        for number, (name, parameter) in enumerate(learner.params.items()):
            values, before = state["optimizer"][name], state["shapes"][name]
            states[number] = {k: enlarged(v, parameter, before) for k, v in values.items()}
        optimizer = learner.updater.optimizer
        restore_optimizer(optimizer, optimizer.state_dict() | {"state": states})
    if "sums" in state:
        learner.updater.sums = _sums(learner.updater.make_equations(), state["sums"])


def _sums(equations: Any, values: State) -> MomentSums:
    """Sums over samples; classes that are new were absent from all samples so far.

    To be absent is -1 for yes-or-no outputs, which need sums with a bias, about the running means.
    """
    (_, d), (_, k) = values["x"].shape, values["y"].shape
    shapes = {"x": (1, d), "y": (1, k), "xx": (d, d), "xy": (d, k), "yy": (k, k)}
    for name, shape in shapes.items():
        check_tensor(name, values[name], torch.empty(shape, dtype=torch.float64, device="meta"))
    if values.keys() != {*shapes, "count", "bias"} or type(values["bias"]) is not bool:
        raise ValueError(f"sums have {list(values)}")
    check_number("count", values["count"], least=0, whole=True)
    sums = MomentSums.__new__(MomentSums)
    vars(sums).update(values)
    if more := equations.classes - k if equations.single else 0:
        absent, pad = -1.0 if equations.signed else 0.0, nn.functional.pad
        sums.y, sums.xy = pad(sums.y, (0, more), value=absent), pad(sums.xy, (0, more))
        sums.yy = pad(sums.yy, (0, more, 0, more))
    return sums
