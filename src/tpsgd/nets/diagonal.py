"""A diagonal linear recurrence, which remembers for hundreds of steps, as a plain module.

    h_t = lambda * h_{t-1} + gamma * (B x_t)                 complex, |lambda| < 1, each by itself
    u_t = Re(C h_t) + D x_t,     y_t = norm(gate(gelu(u_t)))

It is the linear recurrent unit (LRU) of Orvieto et al., "Resurrecting recurrent neural networks for
long sequences" (2023): lambda = exp(-exp(nu_log) + i exp(theta_log)) begins in a ring of the unit
disc, gamma = exp(gamma_log) as sqrt(1 - |lambda|^2), so that states begin with inputs' size. The
gate is the paper's GLU, (W v + w) * sigmoid(V v + v_0), and the norm a layer norm, here at the end:
what the next layer reads has a known size. D is a matrix, because inputs and units may differ. All
numbers are real: a complex number is a pair. `unrolled` trains the layer without a graph.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.kernels.scan import Scan
from tpsgd.nets.padded import (
    Padded,
    SequenceLayer,
    Sequences,
    aligned_at_end,
    aligned_at_start,
    as_sequences,
    steps_inside,
)

EPS = 1e-5  # of the layer norm
PARAMETERS = (
    *("nu_log", "theta_log", "gamma_log", "weight_b", "weight_c", "weight_d"),
    *("gate", "gate_bias", "norm", "norm_bias"),
)
READ_TOGETHER = 64  # steps that are computed together where no graph keeps them all


class LossAt(Enum):
    """Where in time the local loss of a diagonal layer looks."""

    LAST = "last"
    MEAN = "mean"
    EVERY = "every"


class DiagonalWeights(NamedTuple):
    """A layer's weights as they are used; all may have a leading dimension of restarts."""

    nu: Tensor  # lambda = exp(-nu + i theta)
    theta: Tensor
    gamma: Tensor
    drive: Tensor  # gamma * B, `(2 states, inputs)`: a row for a real, one for an imaginary part
    c: Tensor  # `(units, 2 states)`
    d: Tensor
    gate: Tensor
    gate_bias: Tensor
    norm: Tensor
    norm_bias: Tensor

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> "DiagonalWeights":
        gamma = params["gamma_log"].exp()
        return cls(
            params["nu_log"].exp(),
            params["theta_log"].exp(),
            gamma,
            drive=(gamma[..., None, None] * params["weight_b"]).flatten(-3, -2),
            c=params["weight_c"].flatten(-2),
            d=params["weight_d"],
            gate=params["gate"],
            gate_bias=params["gate_bias"].unsqueeze(-2),
            norm=params["norm"].unsqueeze(-2),
            norm_bias=params["norm_bias"].unsqueeze(-2),
        )


class DiagonalWindow(NamedTuple):
    """Some steps of a batch in a layer."""

    x: Tensor  # `(..., steps, rows, inputs)`, or tokens `(..., steps, rows)`
    samples: Tensor  # the same, each step of a sequence a sample
    b: Tensor  # gamma B x `(..., states, 2, steps, rows)`
    inside: Tensor | None  # `(steps, rows)`: which steps belong to the sequences

    @classmethod
    def of(cls, W: DiagonalWeights, x: Tensor, inside: Tensor | None) -> "DiagonalWindow":
        """Inputs driven into the states; those before a sequence leave them at zero."""
        tokens = not x.is_floating_point()
        if inside is not None and not tokens:
            x = x * inside.unsqueeze(-1)
        steps = int(x.shape[-2 if tokens else -3])
        samples = x.flatten(-2) if tokens else x.flatten(-3, -2)
        b = _columns(W.drive, samples) if tokens else W.drive @ _turned(samples)
        b = b.unflatten(-1, (steps, -1)).unflatten(-3, (-1, 2))
        b = b * inside if tokens and inside is not None else b
        return cls(x, samples, b, inside)


Features = dict[str, Tensor]


def features(W: DiagonalWeights, h: Tensor, x: Tensor, learns: bool = True) -> Features:
    """y = norm(gate(gelu(Re(C h) + D x))) of states `(..., 2 states, samples)`, a row per sample.

    And what lies between, unless it `learns` nothing: u, v = gelu(u), the gate's input z and output
    m, n = m with mean 0 and variance 1.
    """
    f: Features = {}

    def last(name: str) -> Tensor:
        return f[name] if learns else f.pop(name)

    direct = x @ _turned(W.d) if x.is_floating_point() else _turned(_columns(W.d, x))
    f["u"] = add_product(direct, _turned(h), _turned(W.c))
    del direct
    f["v"] = F.gelu(last("u"))
    f["z"] = add_product(W.gate_bias, last("v"), _turned(W.gate))
    f["m"] = F.glu(last("z"), -1)
    units = (int(f["m"].shape[-1]),)  # a number in a trace too, which ONNX needs
    f["n"], f["mean"], f["rstd"] = torch.native_layer_norm(last("m"), units, None, None, EPS)
    f["y"] = torch.addcmul(W.norm_bias, last("n"), W.norm)
    return f


def _turned(a: Tensor) -> Tensor:
    """Matrices with rows and columns exchanged; `mT` has no counterpart in ONNX."""
    return a.transpose(-2, -1)


def add_product(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """c + a b, also of stacked matrices."""
    return (torch.addmm if a.dim() == 2 else torch.baddbmm)(c, a, b)


def _columns(weight: Tensor, tokens: Tensor) -> Tensor:
    """The columns of a matrix that tokens choose."""
    if weight.dim() == 2:
        return weight.index_select(-1, tokens)
    return weight.gather(-1, tokens.unsqueeze(-2).expand(-1, weight.shape[-2], -1))


class Diagonal(SequenceLayer):
    """A diagonal linear recurrence (LRU, Orvieto et al. 2023): `Recurrent.diagonal`.

    It learns by its exact gradient within the layer, carried forward in time.

    Reads sequences as `Recurrent` does. Returns the mean of its outputs over time `(batch, units)`;
    with another `loss_at` the last output; with `sequence` all outputs `(batch, steps, units)`.

    Args:
        inputs: features of a step, or the number of tokens.
        units: outputs of a step.
        states: complex numbers that it remembers; by default as many as units.
        loss_at: where its local loss looks: at the "mean" over time; at the "last" output, which
            takes the least time; or at "every" output, whose losses are averaged.
        r_min: |lambda| begins between `r_min` and `r_max`. A state keeps |lambda|^n after n steps.
        r_max: see `r_min`; less than 1.
        phase: the angle of lambda begins between 0 and this.
        sequence: return the outputs of all steps, for another layer that reads sequences.

    Examples:
        >>> layer = Diagonal(1, 64)
        >>> layer(torch.zeros(2, 49, 1)).shape
        torch.Size([2, 64])
        >>> first, state = layer.read(torch.zeros(2, 20, 1))  # online: the state goes on
        >>> second, state = layer.read(torch.zeros(2, 29, 1), state)
        >>> second.shape, state.shape
        (torch.Size([2, 29, 64]), torch.Size([2, 64, 2]))
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        *,
        states: int | None = None,
        loss_at: LossAt | str = LossAt.MEAN,
        r_min: float = 0.9,
        r_max: float = 0.999,
        phase: float = 2 * math.pi,
        sequence: bool = False,
    ) -> None:
        super().__init__()
        states = units if states is None else states
        _check(inputs, units, states, loss_at, r_min, r_max, phase)
        self.loss_at, self.sequence = LossAt(loss_at), sequence
        share = torch.rand(states)
        nu = -0.5 * torch.log(share * (r_max**2 - r_min**2) + r_min**2)
        theta = (torch.rand(states) * phase).clamp(min=1e-6)
        self.nu_log, self.theta_log = nn.Parameter(nu.log()), nn.Parameter(theta.log())
        self.gamma_log = nn.Parameter(0.5 * torch.log(-torch.expm1(-2 * nu)))
        self.weight_b = nn.Parameter(torch.randn(states, 2, inputs) / math.sqrt(2 * inputs))
        self.weight_c = nn.Parameter(torch.randn(units, states, 2) / math.sqrt(states))
        self.weight_d = nn.Parameter(torch.randn(units, inputs) / math.sqrt(inputs))
        self.gate = nn.Parameter(torch.randn(2 * units, units) / math.sqrt(units))
        self.gate_bias = nn.Parameter(torch.zeros(2 * units))
        self.norm = nn.Parameter(torch.ones(units))
        self.norm_bias = nn.Parameter(torch.zeros(units))

    @property
    def inputs(self) -> int:
        return self.weight_b.shape[-1]

    @property
    def hidden(self) -> int:
        return self.weight_c.shape[0]

    @property
    def states(self) -> int:
        return self.weight_b.shape[0]

    def extra_repr(self) -> str:
        states = "" if self.states == self.hidden else f", states={self.states}"
        sequence = ", sequence=True" if self.sequence else ""
        loss_at = f", loss_at={self.loss_at.value!r}"
        return f"{self.inputs}, {self.hidden}{states}{loss_at}{sequence}"

    def forward(self, x: Sequences | PackedSequence) -> Sequences:
        """The last output, the mean over time, or all outputs."""
        x = as_sequences(x, self)
        if not isinstance(x, Padded):
            return self._read(x, None, None, keep=self.sequence)[0]
        outputs, _ = self._read(aligned_at_end(x), None, x.lengths, keep=self.sequence)
        if not self.sequence:
            return outputs
        return Padded(aligned_at_start(outputs, x.lengths, x.shape[1]), x.lengths)

    def read(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All outputs of some steps, and the state `(batch, states, 2)` after them.

        For online use: give the state back with the next steps, or with the next one.
        """
        data = as_sequences(x, self)
        if not isinstance(data, Tensor):
            raise TpsgdError(
                "sequences of different lengths end at different steps: call the layer"
            )
        return self._read(data, state, None, keep=True)

    def _read(
        self, x: Tensor, state: Tensor | None, lengths: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor]:
        """All outputs, or what is made of them, and the state after them."""
        W, steps = DiagonalWeights.of({k: getattr(self, k) for k in PARAMETERS}), int(x.shape[1])
        span = steps if torch.is_grad_enabled() else min(steps, READ_TOGETHER)
        h = None if state is None else state.permute(1, 2, 0)
        outputs, scan = [], Scan(W.nu, W.theta, span)
        all_steps = keep or self.loss_at is LossAt.MEAN
        for start in range(0, steps, span):
            stop = min(start + span, steps)
            steps_read = x[:, start:stop].transpose(0, 1)
            inside = None if lengths is None else steps_inside(lengths, start, stop, x.device)
            scan = scan if stop - start == scan.steps else Scan(W.nu, W.theta, stop - start)
            window = DiagonalWindow.of(W, steps_read, inside)
            states = scan.states(window.b, h)
            h = states[..., -1, :]
            if all_steps:
                y = features(W, states.flatten(0, 1).flatten(1), window.samples, False)["y"]
                y = y.unflatten(0, (stop - start, -1))
                y = y if keep or inside is None else y * inside.unsqueeze(-1)
                outputs.append(y if keep else y.sum(0))
            elif stop == steps:
                outputs.append(features(W, h.flatten(0, 1), window.x[-1], False)["y"])
        assert h is not None
        state = h.permute(2, 0, 1).contiguous()  # without the states before it
        if keep:
            return torch.cat(outputs).transpose(0, 1), state
        if not all_steps:
            return outputs[0], state
        count = steps if lengths is None else lengths.to(x.device).unsqueeze(1)
        return torch.stack(outputs).sum(0) / count, state


def _check(
    inputs: int, units: int, states: int, loss_at: Any, r_min: float, r_max: float, phase: float
) -> None:
    if inputs < 1 or units < 1 or states < 1:
        raise TpsgdError(
            f"Recurrent.diagonal needs inputs, units and states, got {inputs}, {units} and {states}"
        )
    if loss_at not in (*LossAt, *(place.value for place in LossAt)):
        raise TpsgdError(f'loss_at must be "last", "mean" or "every", got {loss_at!r}')
    if not 0 <= r_min < r_max < 1:
        raise TpsgdError(f"r_min and r_max must be 0 <= r_min < r_max < 1, got {r_min}, {r_max}")
    if not 0 < phase <= 2 * math.pi:
        raise TpsgdError(f"phase must be over 0 and at most 2 pi, got {phase}")
