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

from tpsgd.maths.memory_format import sum_of_rows
from tpsgd.nets.activations import Activation
from tpsgd.objectives import LossAndGrads


class Weights(NamedTuple):
    """One cell's weights; `bias` is b_X + b_H."""

    x: Tensor
    h: Tensor
    bias: Tensor | None
    leak: float
    act: Activation


class Window(NamedTuple):
    """Some steps of a batch: `(..., steps, rows, features)`, or tokens `(..., steps, rows)`."""

    start: int
    values: Tensor


class WindowLoss(NamedTuple):
    """The objective's loss and derivative on a window, and their share of the batch's mean."""

    local: LossAndGrads
    share: float


class CellGradients:
    """A cell that reads a batch: its state, and the sums of its gradients while it learns.

    `objective(window, y)` is the objective of the states (with `before`, of the inputs of sigma).
    """

    def __init__(
        self,
        weights: Weights,
        rows: tuple[int, ...],
        objective: Callable[[Window, Tensor], WindowLoss] | None = None,
        learns: bool = False,
        before: bool = False,
    ) -> None:
        self.weights, self.objective, self.learns = weights, objective, learns
        self.before = before and objective is not None
        self.h = weights.h.new_zeros(*rows, weights.h.shape[-1])
        self.table: Tensor | None = None  # tokens: a row per token
        self.sums: dict[str, Tensor] = {}
        self.loss: Tensor | None = None
        self.dtensors: list[Tensor] = []
        self.logits: Tensor | None = None  # of the last step

    def read(self, window: Window) -> Tensor:
        """The states after each step of a window."""
        z = self._drive(window.values)
        c, trail = self._unroll(z)
        states = trail[..., 1:, :, :]
        if self.objective is not None:
            loss = self.objective(window, z if self.before else states)
            self._add_loss(loss, states.shape[-3])
            if self.learns:
                dz, share = self._through_activation(loss, z, c)
                self._add_gradients(window.values, trail[..., :-1, :, :], dz, share)
        return states

    def _drive(self, x: Tensor) -> Tensor:
        """X_t W_X + b of every step in the window, in new memory."""
        W = self.weights
        bias = None if W.bias is None else W.bias.unsqueeze(-2)
        if x.is_floating_point():
            z = x.flatten(-3, -2) @ W.x.mT
            return (z if bias is None else z.add_(bias)).unflatten(-2, x.shape[-3:-1])
        if self.table is None:
            self.table = W.x.mT.clone(memory_format=torch.contiguous_format)
            if bias is not None:
                self.table += bias
        return _look_up(self.table, x.flatten(-2)).unflatten(-2, x.shape[-2:])

    def _unroll(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """sigma of every step, and the states, first to last; in place where possible.

        z becomes the input of sigma, unless sigma's output is enough for the derivative.
        """
        W, rows = self.weights, z.shape[-2]
        trail = z.new_empty(*z.shape[:-3], z.shape[-3] + 1, *z.shape[-2:])
        trail[..., 0, :, :] = self.h[..., :rows, :]
        in_place = W.act.forward_ if W.act.from_output and not self.before else None
        c = torch.empty_like(z) if in_place is None else z if W.leak < 1 else trail[..., 1:, :, :]
        add_product = torch.addmm if z.dim() == 3 else torch.baddbmm
        for i in range(z.shape[-3]):
            h, new, now = trail[..., i, :, :], trail[..., i + 1, :, :], c[..., i, :, :]
            at = now if in_place else z[..., i, :, :]
            add_product(z[..., i, :, :], h, W.h.mT, out=at)
            if in_place:
                in_place(at)
            else:
                now.copy_(W.act.forward(at))
            if W.leak < 1:
                torch.lerp(h, now, W.leak, out=new)
            elif in_place is None:
                new.copy_(now)
        self.h[..., :rows, :] = trail[..., -1, :, :]
        return c, trail

    def _through_activation(self, loss: WindowLoss, z: Tensor, c: Tensor) -> tuple[Tensor, float]:
        dy, W = loss.local.dy.reshape(z.shape), self.weights
        if self.before:
            return dy, loss.share
        value, into = c if W.act.from_output else z, dy if dy.is_contiguous() else None
        return W.act.backward(dy, value, into), loss.share * W.leak

    def _add_loss(self, loss: WindowLoss, steps: int) -> None:
        local, share = loss
        value = local.loss * share
        self.loss = value if self.loss is None else self.loss.add_(value)
        dtensors = [t * share for t in local.dtensors]
        if self.dtensors:
            dtensors = [a.add_(b) for a, b in zip(self.dtensors, dtensors, strict=True)]
        self.dtensors = dtensors
        if local.logits is not None:
            self.logits = local.logits.unflatten(-2, (steps, -1))[..., -1, :, :]

    def _add_gradients(self, x: Tensor, h: Tensor, dz: Tensor, share: float) -> None:
        """Add a window's gradients to the sums; h: the states before each step."""
        sums, dz = self.sums, dz.flatten(-3, -2)
        _add_product(sums, "weight_h", dz.mT, h.flatten(-3, -2), share)
        if x.is_floating_point():
            _add_product(sums, "weight_x", dz.mT, x.flatten(-3, -2), share)
        else:
            assert self.table is not None
            if "table" not in sums:
                sums["table"] = torch.zeros_like(self.table)
            _scatter(sums["table"], x.flatten(-2), dz, share)
        if self.weights.bias is not None:
            bias = sum_of_rows(dz).mul_(share)
            sums["bias"] = bias if "bias" not in sums else sums["bias"].add_(bias)

    def gradients(self) -> dict[str, Tensor]:
        """The sums by their parameters' names."""
        sums = self.sums
        grads = {"weight_h": sums["weight_h"]}
        grads["weight_x"] = sums["table"].mT if "table" in sums else sums["weight_x"]
        if "bias" in sums:
            grads |= {"bias_x": sums["bias"], "bias_h": sums["bias"]}
        return grads


def _add_product(sums: dict[str, Tensor], name: str, a: Tensor, b: Tensor, share: float) -> None:
    """sums[name] += share * a b."""
    product = torch.addmm if a.dim() == 2 else torch.baddbmm
    if name in sums:
        product(sums[name], a, b, alpha=share, out=sums[name])
    else:
        sums[name] = (a @ b).mul_(share)


def _look_up(table: Tensor, tokens: Tensor) -> Tensor:
    """The tokens' rows of the table."""
    if table.dim() == 2:
        return table.index_select(0, tokens)
    return table.gather(1, tokens.unsqueeze(-1).expand(*tokens.shape, table.shape[-1]))


def _scatter(table: Tensor, tokens: Tensor, dz: Tensor, share: float) -> None:
    """table[token] += share * dz, for every token."""
    if table.dim() == 3:
        restart = torch.arange(len(table), device=table.device).unsqueeze(-1) * table.shape[1]
        tokens, dz = (tokens + restart).flatten(), dz.flatten(0, 1)
        table = table.view(-1, table.shape[-1])
    table.index_add_(0, tokens, dz, alpha=share)
