"""The memory of backprop as a line that training stays under, counted from shapes alone.

Backprop holds the gradients, the optimizer's state and the outputs of all layers. A block that
learns by itself holds its own, and its class codes. Where one layer has nearly all weights, that is
about the same: then codes learn before the weight's gradient is computed, or the gradient comes in
slices. Where it is less, inputs of the block are kept in the room that is left. `tpsgd.plan` counts
both exactly, by a rehearsal, which takes longer than this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn, optim

from tpsgd.engine.anatomy import Anatomy
from tpsgd.engine.optimizers import make_optimizer
from tpsgd.nets.blocks import Block
from tpsgd.rules import Place
from tpsgd.solvers import SOLVERS

SLICES = 2, 4, 8, 16  # of a weight's gradient
WORTH_SLICING = 64 << 10  # bytes of weights; more than two slices of fewer take too much time
WORTH_HALVING = 8 << 10
TEMPORARY = 2  # outputs of a block, beyond one, that may be alive together
INPUT = nn.GELU, nn.SiLU, nn.Softplus  # whose derivative needs their input
BOTH = nn.LeakyReLU, *INPUT  # of which autograd stores input and output
CELLS = 16  # that a classifier averages feature maps over
FEW = 8  # numbers of a parameter to try an optimizer on
ADAM = 2  # numbers that it stores for each that learns


@dataclass(frozen=True)
class Need:
    """The bytes of a block while it learns, without the model's."""

    weights: int
    codes: int
    learned: int  # bytes of the codes that learn
    moments: int  # bytes of the optimizer's state for each byte that learns
    activations: int
    temporary: float  # activations that may be alive with those for a moment; inf: unknown

    def peak(self, slices: int = 1, codes_first: bool = False) -> int:
        """The most at one time; gradients of codes that learn first are not there with others."""
        both = self.weights // slices, self.learned
        gradients = max(both) if codes_first else sum(both)
        states = self.moments * (self.weights + self.learned)
        return self.codes + states + gradients + self.activations


@dataclass(frozen=True)
class BackpropLine:
    """The bytes that backprop takes at least, without the model's, and what the blocks need."""

    backprop: int
    needs: Sequence[Need | None]  # None: unknown

    def slices(self, block: int) -> tuple[int, bool]:
        """How many slices keep a block under the line, and whether its codes must learn first."""
        need = self.needs[block]
        if need is None or need.peak() <= self.backprop:
            return 1, False
        most = 16 if need.weights >= WORTH_SLICING else 2 if need.weights >= WORTH_HALVING else 1
        counts = [s for s in (1, *SLICES) if s <= most and need.temporary < inf] or [1]
        peaks = {s: need.peak(s, codes_first=True) for s in counts}
        fitting = (s for s in counts if peaks[s] <= self.backprop)
        return next(fitting, min(peaks, key=lambda s: peaks[s])), True

    def room(self) -> int:
        """Bytes of inputs that may be kept for a block.

        `Run.total_bytes` adds them to the highest peak of all blocks, so what is left by that one.
        """
        most = (inf if need is None else need.peak() + need.temporary for need in self.needs)
        return int(max(0, self.backprop - max(most)))


@dataclass(frozen=True)
class Layer:
    """A block as the line sees it: the bytes of a batch in it, and of its weights and codes."""

    block: Block
    input: int
    before: int  # the layer's output, before the activation
    output: int
    widest: int
    weights: int
    codes: int
    learned: int
    moments: int | None  # None: unknown, or solved
    closed_form: bool

    @property
    def learning(self) -> int:
        """Activations that are alive while it learns."""
        stored = 1 + isinstance(self.block.activation, INPUT) + len(self.block.between)
        return self.input + self.widest * stored

    @property
    def stored(self) -> int:
        """Activations that autograd stores for it, at least."""
        return self.output + self.widest * isinstance(self.block.activation, BOTH)

    def need(self, activations: int) -> Need | None:
        """What it needs, with activations of blocks before it."""
        if self.moments is None:
            return None
        temporary = TEMPORARY * self.widest if self.closed_form else inf  # autograd: unknown
        sizes = self.weights, self.codes, self.learned
        return Need(*sizes, self.moments, activations, temporary)


def line_of(
    anatomy: Anatomy, params: Sequence[dict[str, Tensor]], sample: Any, samples: int
) -> BackpropLine | None:
    """The line for a net whose blocks learn one after another; None where it is not counted.

    `params` are those of each block that may learn, `sample` is one of `samples` (0: unknown).
    """
    if anatomy.form.stacked or any(block.recurrent for block in anatomy.blocks):
        return None
    layers = _layers(anatomy, params, sample, samples)
    activations = accumulate((layer.learning for layer in layers), max)
    needs = [layer.need(a) for layer, a in zip(layers, activations, strict=True)]
    weights = sum(layer.weights for layer in layers)
    first = next((i for i, layer in enumerate(layers) if layer.weights), 0)
    # autograd stores nothing before the first layer that learns
    stored = sum(layer.stored for layer in layers[first:-1])
    peak = max(weights + layers[first].before, stored)
    return BackpropLine(weights * _moments_of_net(anatomy, layers) + layers[0].input + peak, needs)


def _layers(
    anatomy: Anatomy, params: Sequence[dict[str, Tensor]], sample: Any, samples: int
) -> list[Layer]:
    form, shape = anatomy.form, tuple(sample.shape[1:])
    most = form.micro_batch or form.batch_size
    batch = min(most, samples or most) * form.numbers.itemsize
    layers = []
    for i, block in enumerate(anatomy.blocks):
        size, rule = anatomy.sizes[i], anatomy.rules[i]
        codes, learn = (0, False) if block is anatomy.blocks[-1] else _codes(anatomy, i)
        layers.append(
            Layer(
                block,
                input=batch * prod(shape),
                before=batch * prod(size[Place.BEFORE]),
                output=batch * prod(size[Place.END]),
                widest=batch * max(map(prod, size.values())),
                weights=sum(p.nbytes for p in params[i].values()),
                codes=codes,
                learned=codes * learn,
                moments=_moments(anatomy.block_settings[i].optimizer, params[i]),
                closed_form=block.closed_form(rule.at),
            )
        )
        shape = size[Place.END]
    return layers


def _codes(anatomy: Anatomy, i: int) -> tuple[int, bool]:
    """Bytes of a block's class codes, at most, and whether they learn."""
    block, rule = anatomy.blocks[i], anatomy.rules[i]
    filters, *pixels = anatomy.sizes[i][rule.at]
    cells = min(prod(pixels), CELLS) if block.maps and rule.classifies else prod(pixels)
    numbers = filters * cells * anatomy.classes if rule.objective is not None else 0
    learn = getattr(rule.objective, "learned", rule.classifies)
    return numbers * anatomy.form.dtype.itemsize, learn


def _moments_of_net(anatomy: Anatomy, layers: list[Layer]) -> int:
    """What one optimizer for the whole net stores: that of the first block without a solver."""
    for settings, layer in zip(anatomy.block_settings, layers, strict=True):
        if not isinstance(settings.optimizer, SOLVERS):
            return layer.moments or 0
    return ADAM


def _moments(factory: Any, params: dict[str, Tensor]) -> int | None:
    """How many numbers an optimizer stores for each that learns; None if that is unknown."""
    if isinstance(factory, SOLVERS):
        return None
    if not params:
        return 0
    optimizer = make_optimizer(factory, params, None)
    if isinstance(optimizer, (optim.Adam, optim.AdamW)):
        return ADAM + any(group["amsgrad"] for group in optimizer.param_groups)
    if isinstance(optimizer, optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return _stored(optimizer)


def _stored(optimizer: optim.Optimizer) -> int | None:
    """As `_moments`, for an optimizer of another kind: it takes a step on one small parameter."""
    p = torch.zeros(FEW, requires_grad=True)
    p.grad = torch.ones_like(p)
    try:
        trial: Any = type(optimizer)([p], **optimizer.defaults)
        trial.step()
    except (TypeError, ValueError, RuntimeError):  # a user's own, or one of matrices alone
        return None
    sizes = [t.numel() for t in trial.state[p].values() if isinstance(t, Tensor)]
    return sum(n // FEW for n in sizes)
