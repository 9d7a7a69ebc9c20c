"""The exact gradients of a diagonal recurrence on one batch, a window of time steps at a time.

Inside a window the derivatives of its losses run backwards, d_t = conj(lambda) d_{t+1} + dl_t/dh_t.
What reaches the state before the window is multiplied by *traces*, the derivatives of that state
with respect to the parameters, which are carried forward: because lambda is diagonal, a trace has
one number for each number that it is the derivative of (Zucchet et al., "Online learning of
long-range dependencies", 2023). With s the steps of a window of W, log lambda = -nu + i theta:

    dh/dB           gamma E,   E <- lambda^W E + sum_s lambda^(W-1-s) x_s       the filtered input
    dh/dlog lambda  F <- lambda^W (F + W h) + sum_s (W-1-s) lambda^(W-1-s) gamma B x_s
    dh/dlog gamma   h itself

So nothing before the window is stored, and the gradient is that of backpropagation through time
within the layer. If the whole sequence is one window there are no traces. The loss is in one of
three places:

    every   each window's losses are known when it has been read
    last    one loss at the end: its derivative meets the traces, or the only window
    mean    one loss at the end, but it depends on every step: sequences are read twice, first for
            the mean over time, then with the derivative, which is the same at each step

Sequences of different lengths are aligned at their ends, with zeros before them: zeros leave the
state at zero. Tensors have the shapes of `maths.kernels.scan`, and may have a leading dimension of
restarts.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.maths.kernels.scan import Scan, as_matrix, powers
from tpsgd.nets.cell_gradients import StepWindow, SummedLoss
from tpsgd.nets.diagonal import (
    DiagonalWeights,
    DiagonalWindow,
    Features,
    LossAt,
    features,
)
from tpsgd.nets.padded import steps_inside
from tpsgd.objectives import LossAndGrads

aten = torch.ops.aten


class Onward(NamedTuple):
    """How the state and the traces move over a window of some steps."""

    turn: Tensor  # lambda^W, as a matrix of pairs
    filters: Tensor  # `(2 states, steps)`: lambda^(W-1-s)
    sums: Tensor  # of inputs: into the state, and below it into the trace F

    @classmethod
    def over(cls, W: DiagonalWeights, steps: int) -> "Onward":
        re, im = powers(W.nu, W.theta, steps + 1)
        turn = as_matrix(re[..., -1:, None], im[..., -1:, None])
        re, im = re[..., :-1].flip(-1), im[..., :-1].flip(-1)
        into_state = as_matrix(re.unsqueeze(-2), im.unsqueeze(-2))
        later = torch.arange(steps - 1, -1, -1, dtype=re.dtype, device=re.device).repeat(2)
        sums = torch.cat((into_state, into_state * later), -2)
        return cls(turn, torch.stack((re, im), -2).flatten(-3, -2), sums)


class DiagonalGradients(SummedLoss):
    """A diagonal layer that reads a batch: its state, traces, and the sums of its gradients.

    `traces`: it learns from more than one window.
    """

    def __init__(self, W: DiagonalWeights, traces: bool = False) -> None:
        super().__init__()
        self.W, self.traces = W, traces
        self.state: Tensor | None = None  # before the next window
        self.trace_of_log: Tensor | None = None  # F
        self.trace_of_drive: Tensor | None = None  # E, `(..., states, 2, rows * inputs)`
        self.sums: dict[str, Tensor] = {}
        self._scan = cache(partial(Scan, W.nu, W.theta))  # by the steps of a window
        self._onward = cache(partial(Onward.over, W))

    def at_end(self, window: DiagonalWindow) -> Features:
        """The outputs after the last window, once the state has gone on."""
        assert self.state is not None
        return features(self.W, self.state.flatten(-3, -2), _last(window))

    def go_on(self, window: DiagonalWindow) -> None:
        """Carry the state, and the traces, to the end of a window."""
        steps = window.b.shape[-2]
        onward = self._onward(steps)
        sums = onward.sums @ window.b.flatten(-3, -2)
        state, trace = sums[..., :2, :], sums[..., 2:, :]
        if self.state is not None:
            before = self.state * steps
            before = before if self.trace_of_log is None else before.add_(self.trace_of_log)
            state, trace = state + onward.turn @ self.state, trace + onward.turn @ before
        self.state, self.trace_of_log = state.contiguous(), trace.contiguous()
        if self.traces:
            self._filter(onward, window)

    def _filter(self, onward: Onward, window: DiagonalWindow) -> None:
        """Carry the trace E of the input's weights to the end of a window."""
        x = window.x
        if not x.is_floating_point():  # tokens, whose padding is a token, too
            x = F.one_hot(x, self.W.drive.shape[-1]).to(onward.filters.dtype)
            x = x if window.inside is None else x * window.inside.unsqueeze(-1)
        new = (onward.filters @ x.flatten(-2)).unflatten(-2, (-1, 2))
        if self.trace_of_drive is not None:
            matrices = (t.flatten(0, -3) for t in (onward.turn, self.trace_of_drive))
            new.flatten(0, -3).baddbmm_(*matrices)
        self.trace_of_drive = new

    def learn(self, window: DiagonalWindow, h: Tensor, f: Features, dy: Tensor) -> None:
        """Add the gradients of a window's losses, whose derivatives are dy, before it goes on.

        It takes the memory of h, f and dy.
        """
        g = self._through_features(f, h.flatten(-4, -3).flatten(-2), window.samples, dy)
        d, start = self._scan(h.shape[-2]).adjoints(g.view(h.shape))
        d = d if window.inside is None else d * window.inside
        self._add_product("log", d.flatten(-2), h.sub_(window.b).flatten(-2).mT)
        self._add_input_product("drive", d.flatten(-4, -3).flatten(-2), window.samples)
        if self.state is not None and self.trace_of_log is not None:
            self._through_traces(start)

    def learn_at_end(self, window: DiagonalWindow, f: Features, dy: Tensor) -> None:
        """Add the gradients of a loss of the last outputs alone."""
        assert self.state is not None and self.trace_of_log is not None
        shape = self.state.shape
        g = self._through_features(f, self.state.flatten(-3, -2), _last(window), dy).view(shape)
        if self.traces:
            return self._through_traces(g)
        self._add_product("log", g, self.trace_of_log.mT)
        into_state = self._onward(window.b.shape[-2]).sums[..., :2, :]
        d = (into_state.mT @ g).view(window.b.shape)
        d = d if window.inside is None else d * window.inside
        self._add_input_product("drive", d.flatten(-4, -3).flatten(-2), window.samples)

    def _through_traces(self, d: Tensor) -> None:
        """Add what a derivative with respect to a state says about all inputs before it."""
        assert self.trace_of_log is not None and self.trace_of_drive is not None
        self._add_product("log", d, self.trace_of_log.mT)
        re, im = d.unbind(-2)
        rows = torch.stack((torch.cat((re, im), -1), torch.cat((im, -re), -1)), -2)
        filtered = self.trace_of_drive.unflatten(-1, (d.shape[-1], -1)).flatten(-3, -2)
        product = (rows @ filtered).flatten(-3, -2)
        self._add("drive", product)

    def _through_features(self, f: Features, h: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        """Sum the gradients of what follows the states; the derivative with respect to them."""
        W = self.W
        self._add("norm", f.pop("n").mul_(dy).sum(-2))
        self._add("norm_bias", dy.sum(-2))
        m, mean, rstd, mask = f.pop("m"), f.pop("mean"), f.pop("rstd"), [True, False, False]
        dm = aten.native_layer_norm_backward(
            dy.mul_(W.norm), m, m.shape[-1:], mean, rstd, None, None, mask
        )[0]
        del m, dy
        dz = aten.glu_backward(dm, f.pop("z"), -1)
        del dm
        self._add_product("gate", dz.mT, f.pop("v"))
        self._add("gate_bias", dz.sum(-2))
        dv = dz @ W.gate
        del dz
        du = aten.gelu_backward(dv, f.pop("u"))
        del dv
        self._add_product("c", du.mT, h.mT)
        self._add_input_product("d", du.mT, x)
        return W.c.mT @ du.mT

    def _add(self, name: str, value: Tensor) -> None:
        if name in self.sums:
            self.sums[name] += value
        else:
            self.sums[name] = value

    def _add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """sums[name] += a b."""
        if name not in self.sums:
            self.sums[name] = a @ b
        elif a.dim() == 2:
            self.sums[name].addmm_(a, b)
        elif a.dim() == 3:
            self.sums[name].baddbmm_(a, b)
        else:
            self.sums[name] += a @ b

    def _add_input_product(self, name: str, a: Tensor, x: Tensor) -> None:
        """sums[name] += a x, of inputs or of tokens, which add columns of a to theirs."""
        if x.is_floating_point():
            return self._add_product(name, a, x)
        if name not in self.sums:
            self.sums[name] = a.new_zeros(*a.shape[:-1], self.W.d.shape[-1])
        if x.dim() == 1:
            self.sums[name].index_add_(-1, x, a)
        else:
            self.sums[name].scatter_add_(-1, x.unsqueeze(-2).expand(a.shape), a)

    def gradients(self) -> dict[str, Tensor]:
        W, log = self.W, self.sums["log"]
        filtered = self.sums["drive"].unflatten(-2, (-1, 2))
        drive = W.drive.view(filtered.shape)
        shrinks = log[..., 0, 0] + log[..., 1, 1]  # the derivative for the real part of log lambda
        turns = log[..., 1, 0] - log[..., 0, 1]
        return {
            "nu_log": -W.nu * shrinks,
            "theta_log": W.theta * turns,
            "gamma_log": (filtered * drive).sum((-2, -1)),
            "weight_b": filtered * W.gamma[..., None, None],
            "weight_c": self.sums["c"].unflatten(-1, (-1, 2)),
            "weight_d": self.sums["d"],
            **{name: self.sums[name] for name in ("gate", "gate_bias", "norm", "norm_bias")},
        }


def _last(window: DiagonalWindow) -> Tensor:
    """The last inputs of a window."""
    tokens = not window.x.is_floating_point()
    return window.x.select(-2 if tokens else -3, -1)


class DiagonalCell(DiagonalGradients):
    """A diagonal layer that reads a batch window by window and learns from the loss where it is.

    Args:
        at: where the loss is.
        sequence: all outputs are asked for.
        W: its weights.
        steps: of the longest sequence; `span` of them are a window.
        lengths: of the sequences, if they differ.
        objective: the loss of the outputs of some samples, from these and their signals.
        signals: `(start, steps, rows) -> ` those of so many steps; None: no loss is computed.
        learns: sum the gradients of the loss.
    """

    def __init__(
        self,
        at: LossAt,
        sequence: bool,
        W: DiagonalWeights,
        steps: int,
        span: int,
        lengths: Tensor | None,
        objective: Callable[[Tensor, Tensor], LossAndGrads],
        signals: Callable[[int, int, int], Tensor] | None,
        learns: bool,
    ) -> None:
        self.learns = learns and signals is not None
        super().__init__(W, traces=self.learns and span < steps)
        self.at, self.sequence = at, sequence
        self.steps, self.span, self.lengths = steps, span, lengths
        self.objective, self.signals = objective, signals
        self.total: Tensor | None = None  # of outputs over time
        self.dy: Tensor | None = None  # the derivative with respect to the mean, once it is known
        self.last: Tensor | None = None  # what a layer without `sequence` returns
        self.end: DiagonalWindow | None = None

    @property
    def reads_twice(self) -> bool:
        """Whether the loss of several windows is known at the end alone, but not by traces."""
        return self.learns and self.at is LossAt.MEAN and self.span < self.steps

    def begin_again(self, first: "DiagonalCell") -> None:
        """Take the mean over time and its loss from a first reading."""
        self.last, self.dy = first.last, first.dy
        self.loss, self.dtensors, self.logits = first.loss, first.dtensors, first.logits

    def read(self, steps: StepWindow) -> Tensor | None:
        """The outputs of a window, if the layer returns all; learn from it."""
        (start, x), inside, y = steps, None, None
        final, stop = start + self.span >= self.steps, min(start + self.span, self.steps)
        if self.lengths is not None:
            inside = steps_inside(self.lengths, start, stop, x.device)
        window = DiagonalWindow.of(self.W, x, inside)
        measured = self.at is LossAt.EVERY and self.signals is not None
        if self.sequence or measured or self.at is LossAt.MEAN:
            h = self._scan(window.b.shape[-2]).states(window.b, self.state)
            learns = self.learns and self.at is not LossAt.LAST
            f = features(self.W, h.flatten(-4, -3).flatten(-2), window.samples, learns)
            y = f.pop("y")
            if self.at is LossAt.MEAN and self.last is None:
                self._add_to_mean(y, window, final)
            if measured:
                dy = self._of_every_step(y, window, start)
            else:
                dy = self._share_of_mean(y, window)
            if self.learns and dy is not None:
                self.learn(window, h, f, dy)
        if not final or self.at is not LossAt.MEAN:
            self.go_on(window)
        self.end = window if final else None
        return y.unflatten(-2, window.b.shape[-2:]) if y is not None and self.sequence else None

    def finish(self) -> None:
        """After the last window: the output, and the loss of the last step."""
        if self.at is LossAt.MEAN:
            return
        assert self.end is not None
        f = self.at_end(self.end)
        self.last = f.pop("y")
        dy = self._loss_at_end(self.last) if self.at is LossAt.LAST else None
        if dy is not None and self.learns:
            self.learn_at_end(self.end, f, dy)

    def _of_every_step(self, y: Tensor, window: DiagonalWindow, start: int) -> Tensor | None:
        """Add the loss of a window's steps, each a sample; its derivative, to learn from."""
        assert self.signals is not None
        (steps, rows), inside = window.b.shape[-2:], window.inside
        s = self.signals(start, steps, rows)
        if inside is None:
            local, share = self.objective(y, s), steps * rows / (self.steps * rows)
            self.add_loss(local, share, rows)
            return local.dy.reshape(y.shape).contiguous().mul_(share) if self.learns else None
        assert self.lengths is not None
        chosen = inside.flatten().nonzero().squeeze(1)
        local, share = self.objective(y[chosen], s[chosen]), len(chosen) / int(self.lengths.sum())
        self.add_loss(local, share, rows)
        if not self.learns:
            return None
        return torch.zeros_like(y).index_copy_(0, chosen, local.dy.reshape(len(chosen), -1) * share)

    def _add_to_mean(self, y: Tensor, window: DiagonalWindow, final: bool) -> None:
        """Sum outputs over time; at the end take their mean, and the derivative of its loss."""
        y = y.unflatten(-2, window.b.shape[-2:])
        y = y if window.inside is None else y * window.inside.unsqueeze(-1)
        total = y.sum(-3)
        self.total = total if self.total is None else self.total.add_(total)
        if final:
            self.last = self.total / self._counts(total.device)
            self.dy = self._loss_at_end(self.last)

    def _share_of_mean(self, y: Tensor, window: DiagonalWindow) -> Tensor | None:
        """The derivative of the mean's loss for the outputs of a window, once it is known."""
        if self.dy is None or not self.learns:
            return None
        share = (self.dy / self._counts(y.device)).unsqueeze(-3)
        if window.inside is not None:
            return (window.inside.unsqueeze(-1) * share).flatten(-3, -2)
        each = share.expand(*share.shape[:-3], window.b.shape[-2], *share.shape[-2:])
        return each.flatten(-3, -2).contiguous()  # of one sample it would be a view

    def _counts(self, device: torch.device) -> int | Tensor:
        return self.steps if self.lengths is None else self.lengths.to(device).unsqueeze(-1)

    def _loss_at_end(self, y: Tensor) -> Tensor | None:
        """Note a loss that is taken once for a sequence; its derivative."""
        if self.signals is None:
            return None
        local = self.objective(y, self.signals(0, 1, y.shape[-2]))
        self.add_loss(local, 1.0, y.shape[-2])
        return local.dy.reshape(y.shape).contiguous()
