"""The gradients of one recurrent cell on one batch of sequences, a window of time steps at a time.

The states are treated as fixed inputs. So each time step is a linear layer, and its
pseudo-gradients can be summed while the cell reads the sequence:

    D_t  = dL_t/dH_{t+1} * a sigma'(Z_t)
    dW_H = mean_t D_t^T H_t,   dW_X = mean_t D_t^T X_t,   db_H = db_X = mean_t D_t

The gradient of W_H does not contain X and that of W_X does not contain H, so the two groups learn
separately; the weights change only after the end of the sequence. Every tensor may have a leading
dimension of restarts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tpsgd.nets.activations import Activation
from tpsgd.objectives import LossAndGrads


class CellWeights(NamedTuple):
    """One cell's weights; `bias` is b_X + b_H."""

    x: Tensor
    h: Tensor
    bias: Tensor | None
    leak: float
    act: Activation


class StepWindow(NamedTuple):
    """Some steps of a batch: `(..., steps, rows, features)`, or tokens `(..., steps, rows)`."""

    start: int
    values: Tensor


class SummedLoss:
    """The loss of a batch and its derivatives for the objective's tensors, summed over windows."""

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.dtensors: list[Tensor] = []
        self.logits: Tensor | None = None  # of the last step
        self.labels: Tensor | None = None  # steps that have their own: those of the last window

    def add_loss(self, local: LossAndGrads, share: float, rows: int) -> None:
        """Add the loss of a window of so many rows, times its share of the batch's mean."""
        if self.loss is None:
            self.loss = local.loss * share
            self.dtensors = [t * share for t in local.dtensors]
        else:
            self.loss.add_(local.loss, alpha=share)
            for total, t in zip(self.dtensors, local.dtensors, strict=True):
                total.add_(t, alpha=share)
        self.logits, self.labels = local.logits, local.labels
        if local.logits is not None and local.labels is None:
            self.logits = local.logits[..., -rows:, :]


class Steps(NamedTuple):
    """The memory of a window of steps, and views of it; the next window overwrites it.

    Steps have the shape `(..., steps, rows, units)`, samples `(..., steps * rows, units)`: there,
    each step of a sequence counts as a sample.
    """

    z: Tensor  # inputs of sigma; its outputs, if they are enough for the derivative and a < 1
    states: Tensor  # the state after each step
    z_of_samples: Tensor
    states_of_samples: Tensor
    old_states_of_samples: Tensor  # before each step
    first: Tensor  # the state before the window
    last: Tensor  # the state at its end
    each: tuple[tuple[Tensor, Tensor, Tensor], ...]  # of every step: z, the old and the new state
    ones: Tensor  # `(..., 1, steps * rows)`: a product with it sums over samples

    @classmethod
    def empty(cls, like: Tensor, steps: int, rows: int) -> "Steps":
        """Memory for a window of states like these, `(..., all rows, units)`."""
        *lead, _, units = like.shape
        z = like.new_empty(*lead, steps, rows, units)
        trail = like.new_empty(*lead, steps + 1, rows, units)
        old, new = trail[..., :-1, :, :], trail[..., 1:, :, :]
        return cls(
            z,
            new,
            z_of_samples=z.flatten(-3, -2),
            states_of_samples=new.flatten(-3, -2),
            old_states_of_samples=old.flatten(-3, -2),
            first=trail[..., 0, :, :],
            last=trail[..., -1, :, :],
            each=tuple(zip(z.unbind(-3), old.unbind(-3), new.unbind(-3), strict=True)),
            ones=like.new_ones(*lead, 1, steps * rows),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and rows."""
        return self.z.shape[-3], self.z.shape[-2]


class CellGradients(SummedLoss):
    """A cell that reads a batch: its state, and the sums of its gradients while it learns.

    `rows` is the shape of a batch, `(..., rows)`. `objective(start, steps)` is the loss of a window
    of states and its share of the batch's mean; with `before`, of the inputs of sigma.
    """

    def __init__(
        self,
        weights: CellWeights,
        rows: tuple[int, ...],
        objective: Callable[[int, Steps], tuple[LossAndGrads, float]] | None = None,
        learns: bool = False,
        before: bool = False,
    ) -> None:
        super().__init__()
        self.weights, self.objective, self.learns = weights, objective, learns
        self.before = before and objective is not None
        self.in_place = weights.act.from_output and not self.before
        self.last = weights.h.new_zeros(*rows, weights.h.shape[-1])  # once all windows are read
        self.steps: Steps | None = None
        self.table: Tensor | None = None  # tokens: a row per token
        self.sums: dict[str, Tensor] = {}

    def read(self, window: StepWindow) -> Tensor:
        """The states after each step of a window, until the next window is read."""
        x = window.values
        tokens = not x.is_floating_point()
        steps = self._memory(*(x.shape[-2:] if tokens else x.shape[-3:-1]))
        x = x.flatten(-2) if tokens else x.flatten(-3, -2)
        self._drive(x, steps.z_of_samples)
        self._unroll(steps)
        if self.objective is not None:
            local, share = self.objective(window.start, steps)
            self.add_loss(local, share, steps.shape[1])
            if self.learns:
                self._add_gradients(x, steps, *self._through_activation(local.dy, share, steps))
        return steps.states

    def finish(self) -> None:
        """Copy the last states out of the memory of a window, and free it."""
        if self.steps is not None:
            self.last[..., : self.steps.shape[1], :] = self.steps.last
        self.steps = None

    def _memory(self, count: int, rows: int) -> Steps:
        """The memory of a window of this many steps and rows, the state before it filled in."""
        if self.steps is not None and self.steps.shape == (count, rows):
            self.steps.first.copy_(self.steps.last)
            return self.steps
        self.finish()
        self.steps = Steps.empty(self.last, count, rows)
        self.steps.first.copy_(self.last[..., :rows, :])
        return self.steps

    def _drive(self, x: Tensor, z: Tensor) -> None:
        """Write X_t W_X + b of every step in the window into z."""
        W = self.weights
        bias = None if W.bias is None else W.bias.unsqueeze(-2)
        if x.is_floating_point():
            if bias is None:
                torch.matmul(x, W.x.mT, out=z)
            else:
                _add_product(bias, x, W.x.mT, out=z)
            return
        if self.table is None:
            self.table = W.x.mT.clone(memory_format=torch.contiguous_format)
            if bias is not None:
                self.table += bias
        _look_up(self.table, x, out=z)

    def _unroll(self, steps: Steps) -> None:
        """The states of a window, first to last, with at most three operators a step."""
        act, leak, recur = self.weights.act, self.weights.leak, self.weights.h.mT
        add_product = torch.addmm if recur.dim() == 2 else torch.baddbmm
        if not self.in_place or act.forward_ is None:  # z is needed later
            for z, h, new in steps.each:
                c = act.forward(add_product(z, h, recur, out=z))
                torch.lerp(h, c, leak, out=new) if leak < 1 else new.copy_(c)
        elif leak < 1:
            for z, h, new in steps.each:
                torch.lerp(h, act.forward_(add_product(z, h, recur, out=z)), leak, out=new)
        else:
            for z, h, new in steps.each:
                act.forward_(add_product(z, h, recur, out=new))

    def _through_activation(self, dy: Tensor, share: float, steps: Steps) -> tuple[Tensor, float]:
        """The derivative of the window's loss with respect to z, but for a factor."""
        dy, W = dy.reshape(steps.z_of_samples.shape), self.weights
        if self.before:
            return dy, share
        from_states = self.in_place and W.leak == 1
        value = steps.states_of_samples if from_states else steps.z_of_samples
        into = dy if dy.is_contiguous() else None
        return W.act.backward(dy, value, into), share * W.leak

    def _add_gradients(self, x: Tensor, steps: Steps, dz: Tensor, share: float) -> None:
        self._add("weight_h", dz.mT, steps.old_states_of_samples, share)
        if x.is_floating_point():
            self._add("weight_x", dz.mT, x, share)
        else:
            assert self.table is not None
            if "table" not in self.sums:
                self.sums["table"] = torch.zeros_like(self.table)
            _scatter(self.sums["table"], x, dz, share)
        if self.weights.bias is not None:
            self._add("bias", steps.ones, dz, share)

    def _add(self, name: str, a: Tensor, b: Tensor, share: float) -> None:
        """sums[name] += share * a b."""
        first = name not in self.sums
        if first:
            self.sums[name] = a.new_empty(*a.shape[:-1], b.shape[-1])
        total = self.sums[name]
        _add_product(total, a, b, beta=0 if first else 1, alpha=share, out=total)

    def gradients(self) -> dict[str, Tensor]:
        sums = self.sums
        grads = {"weight_h": sums["weight_h"]}
        grads["weight_x"] = sums["table"].mT if "table" in sums else sums["weight_x"]
        if "bias" in sums:
            bias = sums["bias"].squeeze(-2)
            grads |= {"bias_x": bias, "bias_h": bias}
        return grads


def _add_product(c: Tensor, a: Tensor, b: Tensor, out: Tensor, **factors: float) -> Tensor:
    """beta c + alpha a b, also of stacked matrices."""
    product = torch.addmm if a.dim() == 2 else torch.baddbmm
    return product(c, a, b, out=out, **factors)


def _look_up(table: Tensor, tokens: Tensor, out: Tensor) -> Tensor:
    if table.dim() == 2:
        return torch.index_select(table, 0, tokens, out=out)
    index = tokens.unsqueeze(-1).expand(*tokens.shape, table.shape[-1])
    return torch.gather(table, 1, index, out=out)


def _scatter(table: Tensor, tokens: Tensor, dz: Tensor, share: float) -> None:
    """table[token] += share * dz, for every token."""
    if table.dim() == 3:
        restart = torch.arange(len(table), device=table.device).unsqueeze(-1) * table.shape[1]
        tokens, dz = (tokens + restart).flatten(), dz.flatten(0, 1)
        table = table.view(-1, table.shape[-1])
    table.index_add_(0, tokens, dz, alpha=share)
