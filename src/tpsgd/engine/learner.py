"""A block that learns: its objective, its gradients, its optimizer or its equations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tpsgd.engine.optimizers import ELEMENTWISE, OptimizerFactory, hooked, make_optimizer
from tpsgd.errors import TpsgdError
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm, Saved, sliced
from tpsgd.nets.stacked import Stacked
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, LossAndGrads, Objective
from tpsgd.projections import Redrawn
from tpsgd.rules import Signal
from tpsgd.solvers import Recursive
from tpsgd.solvers.equations import Equations, keeps_samples
from tpsgd.solvers.least_squares import MomentSums, SampleSums

Engine = ClosedForm | Autograd | Stacked | Unrolled  # where gradients come from


class Learner:
    """A block with what it needs to learn.

    `draw` makes its objective when it begins to learn; the projection is dropped when it stops.
    `width` is how many layers learn in it (more than one for backprop's whole model), `several`
    says that labels are rows of yes-or-no answers, and `stack` counts stacked restarts. The
    gradient of its weight is made in so many `slices`, and `widest` is the most bytes that one
    sample takes anywhere in the block. Backprop's `accumulates` leaves adding gradients to
    autograd.
    """

    def __init__(
        self,
        block: Block,
        engine: Engine,
        draw: Callable[[], Objective],
        signal: Signal = Signal.LABEL,
        params: dict[str, Tensor] | None = None,
        several: bool = False,
        stack: int | None = None,
        width: int = 1,
        trains: bool = True,
        slices: int = 1,
        widest: int = 0,
        accumulates: bool = False,
    ):
        self.block, self.engine, self.signal, self.several = block, engine, signal, several
        self.stack, self.width, self.slices, self.widest = stack, width, slices, widest
        self.accumulates = accumulates
        self.draw = draw
        self.tensors: tuple[Tensor, ...] = ()
        self.known = False  # whether its objective's derivative is written out, once drawn
        self.mean_over_samples = True  # whether its loss is a mean over samples, as far as is known
        self.params: dict[str, Tensor] = dict(params or {})
        self.trains = trains
        self.optimizer: Optimizer | None = None
        self.sums: MomentSums | SampleSums | None = None  # of a block that is solved
        self.equations: Equations | None = None
        self.penalty: Tensor | None = None  # of a solved block, for each restart
        self.gamma: float | None = None  # solved after every batch, with this penalty
        self.pending: tuple[Any, ...] | None = None  # to be learned once it has run
        self.moving: dict[str, Tensor] = {}  # what the optimizer has: parameters, or slices of them
        some = next(iter(self.params.values()), torch.empty(0))
        self.loss = torch.zeros(stack or (), device=some.device, dtype=torch.float32)
        self.correct = torch.zeros(stack or (), device=some.device, dtype=torch.long)
        self.classifies = False

    def start(self, factory: OptimizerFactory | None, lr: float | None) -> None:
        """Draw the objective and make the optimizer; both live only while the block learns."""
        objective = self.draw()
        self.engine.set_objective(objective)
        self.tensors, self.known = objective.tensors, objective.written_out
        self.mean_over_samples = objective.closed_form is not None
        if objective.learned:
            self.params |= {f"objective.{i}": t for i, t in enumerate(self.tensors)}
        if isinstance(factory, Recursive):
            self.gamma = factory.gamma
        elif factory is not None:
            self._give(factory, lr)
        self.wake()

    def _give(self, factory: OptimizerFactory, lr: float | None) -> None:
        """An optimizer; of slices of the weight where it treats each number by itself."""
        for p in self.params.values():
            p.grad = None  # whatever the caller left there
        self.moving = self.params
        name = f"{len(self.block.prologue)}.weight"
        if isinstance(self.engine, ClosedForm) and self.slices > 1 and name in self.params:
            weight = self.params[name].detach()
            parts = sliced(name, len(weight), self.slices)
            own = {k: p for k, p in self.params.items() if k != name}
            self.moving = own | {k: weight if rows is None else weight[rows] for k, rows in parts}
        self.optimizer = make_optimizer(factory, self.moving, lr)
        whole = type(self.optimizer) not in ELEMENTWISE or getattr(factory, "by_name", False)
        whole = whole or hooked(self.optimizer)  # a hook may want the whole gradient
        if self.moving is not self.params and whole:
            self.moving, self.optimizer = self.params, make_optimizer(factory, self.params, lr)
        if isinstance(self.engine, ClosedForm):
            self.engine.slices = 1 if self.moving is self.params else self.slices

    def wake(self) -> None:
        """Back to training mode; a block that is solved has none."""
        self.block.train(self.optimizer is not None)

    def add_up(self, x: Any, labels: Tensor, expected: int) -> None:
        """A batch more of what `solve` needs; `expected`: how many samples there are, if known."""
        for module in self.block.prologue:
            x = torch.vmap(module)(x) if self.stack else module(x)
        equations = self.equations = self.equations or self._equations()
        for rows in equations.parts(x, labels):
            if self.sums is None:
                keeps = keeps_samples(equations.layer, equations.single, expected)
                self.sums = (SampleSums if keeps else MomentSums)(*rows, self._bias is not None)
            self.sums.add(*rows)

    def solve(self, alpha: float | None, samples: int) -> None:
        """The block's weight and bias in closed form, from what was added up."""
        if self.sums is None or self.equations is None:
            raise TpsgdError("the data is empty: an epoch gave no batch")
        try:
            found = self.sums.solve(alpha, self.equations.mixing)
        except RuntimeError:  # of the eigenvectors
            raise TpsgdError(
                f"block {self.block.index + 1} ({self.block}) has inputs too large or too unlike "
                "one another for its equations to be solved: scale them to about 1"
            ) from None
        self._set(found.weight, found.bias)
        self.penalty = found.alpha
        self.loss = found.loss * self.sums.count  # rows: one or more for each sample

    def _equations(self) -> Equations:
        """What the layer's weights must solve, now that the objective is drawn."""
        layer: Any = self.block.layer
        codes: Any = self.tensors[0] if self.tensors else None
        codes = codes.whole() if isinstance(codes, Redrawn) else codes
        classes = layer.weight.shape[0] if codes is None else codes.shape[1 if self.stack else 0]
        signed = self.several and codes is None
        return Equations(layer, classes, codes, signed, bool(self.stack))

    @property
    def alphas(self) -> list[float]:
        """The penalty of a solved block, for each restart."""
        return [] if self.penalty is None else self.penalty.reshape(-1).tolist()

    @property
    def _bias(self) -> Tensor | None:
        return self.params.get(f"{len(self.block.prologue)}.bias")

    def _set(self, weight: Tensor, bias: Tensor) -> None:
        """Give the layer these."""
        own = self.params[f"{len(self.block.prologue)}.weight"]
        own.copy_(weight.reshape(own.shape))
        if self._bias is not None:
            self._bias.copy_(bias)

    def stop(self) -> None:
        """Freeze: drop the optimizer's state and the projection."""
        self.optimizer = self.sums = self.equations = self.gamma = None
        self.moving = {}
        self.loss = self.loss.float()
        if self.tensors or isinstance(self.engine, Unrolled):
            self.engine.set_objective(IDLE)
        self.tensors = ()
        self.params = {k: p for k, p in self.params.items() if not k.startswith("objective.")}
        self.block.train(False)

    def forward(self, x: Tensor) -> Any:
        """The block's values for a batch."""
        return self.engine.forward(self.params, x)

    def output(self, saved: Any) -> Tensor:
        """What the next block gets."""
        return self.engine.output(saved)

    def error(self, saved: Any, labels: Tensor) -> Tensor:
        """Minus the derivative of each sample's loss with respect to this block's output."""
        return self.engine.error(saved, labels)

    def improve(
        self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False, share: float = 1.0
    ) -> None:
        """One step downhill on the local loss. `output_unused`: nobody needs it after.

        A block whose output is pulled by the next one learns while that happens; `settle` ends it.
        Of a share of a batch the gradient is added to the others', and `move` takes the step.
        """
        if isinstance(self.engine, Unrolled) and self.engine.lazy:
            self.engine.prepare_gradients(saved, s, self.tensors)
            self.pending = saved, s, labels, False, share
        else:
            self._step(saved, s, labels, output_unused, share)

    def settle(self) -> None:
        """Take the step that `improve` put off."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self._step(*pending)

    def _step(
        self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool, share: float
    ) -> None:
        if self.gamma is not None:
            return self._recur(saved, labels, self.gamma)
        if self.accumulates:
            return self._add_up(saved, s, labels, share)
        local, parts = self.engine.gradients(self.params, saved, s, self.tensors, output_unused)
        own = {f"objective.{i}": grad for i, grad in enumerate(local.dtensors)}
        for grads in parts:
            grads |= own
            own = {}
            while grads:
                name, grad = grads.popitem()
                if name in self.moving:  # not one that stays as it is
                    _add(self.moving[name], grad, share)
                del grad
            if share == 1.0:
                self.move()
        self._note(local, labels)

    def _add_up(self, saved: Any, s: Tensor, labels: Tensor, share: float) -> None:
        """A step whose gradients autograd adds up itself."""
        assert isinstance(self.engine, Autograd)
        local = self.engine.backward(self.params, saved, s, share)
        if share == 1.0:
            self.move()
        self._note(local, labels)

    def move(self) -> None:
        """Take the optimizer's step with the gradients that are there, and drop them."""
        if self.optimizer is None:
            return
        self.optimizer.step()
        for p in self.moving.values():
            p.grad = None

    def _recur(self, saved: Saved, labels: Tensor, gamma: float) -> None:
        """See how the batch does, then learn from it."""
        self.measure(saved, labels)
        equations = self.equations = self.equations or self._equations()
        for rows in equations.parts(saved.x, labels):
            self.sums = self.sums or MomentSums(*rows, self._bias is not None)
            self.sums.add(*rows)
        assert isinstance(self.sums, MomentSums)
        self._set(*self.sums.so_far(gamma, equations.mixing))

    def measure(self, saved: Any, labels: Tensor) -> None:
        """Note the local loss of a batch without learning from it (label signals only)."""
        self._note(self.engine.measure(self.params, saved, labels, self.tensors), labels)

    def _note(self, local: LossAndGrads, labels: Tensor) -> None:
        """Add a batch to the epoch's figures, without waiting for the device."""
        self.loss.add_(local.loss, alpha=labels.shape[1 if self.stack else 0])
        if local.logits is not None:
            self.classifies = True
            self.correct.add_(hits(local.logits, labels, self.several))

    def collect(self, samples: int) -> tuple[list[float], list[float] | None]:
        """Mean loss and accuracy since the last call, per restart; waits for the device."""
        losses = (self.loss.double() / samples).reshape(-1).tolist()
        shares = (self.correct.double() / samples).reshape(-1).tolist() if self.classifies else None
        self.loss.zero_()
        self.correct.zero_()
        return losses, shares


def hits(logits: Tensor, labels: Tensor, several: bool) -> Tensor:
    """How many samples are right, over the last dimension but one (the batch).

    `several`: rows of yes-or-no labels, all of which must be right.
    """
    if not labels.is_floating_point():
        right = logits.argmax(-1) == labels
    elif several:
        right = ((logits > 0) == (labels > 0.5)).all(-1)
    else:
        right = logits.argmax(-1) == labels.argmax(-1)
    return right.sum(-1)


def _add(p: Tensor, grad: Tensor, share: float) -> None:
    """Give a parameter its gradient, or a share of a batch's to be added to the other shares.

    It gets its parameter's number format and strides: fused optimizers walk both side by side.
    """
    grad = grad.to(p.dtype)
    if share < 1.0:
        p.grad = grad * share if p.grad is None else p.grad.add_(grad, alpha=share)
    else:
        p.grad = grad
    if p.grad.stride() != p.stride():
        p.grad = torch.empty_like(p).copy_(p.grad)
