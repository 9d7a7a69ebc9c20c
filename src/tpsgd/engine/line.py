"""The memory of backprop as a line that training stays under, counted from shapes alone.

Backprop holds the gradients, the optimizer's state and the outputs of all layers. A block that
learns by itself holds only its gradients, state and outputs, and its class codes. Where one layer
has nearly all weights, that is about the same: then codes learn before the weight's gradient is
computed, or the gradient comes in slices. Where it is less, inputs of the block are kept in the
rest. `tpsgd.plan` counts both exactly, by a rehearsal, which takes longer than this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, nn, optim

from tpsgd.engine.learners.optimizers import make_optimizer
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.spec import RunSpec
from tpsgd.objectives import Place

SLICES = 2, 4, 8, 16  # of a weight's gradient
WORTH_SLICING = 64 << 10  # bytes of weights; more than two slices of fewer take too much time
WORTH_HALVING = 8 << 10
TEMPORARY = 2  # outputs of a block, beyond one, that may be alive together
NEED_INPUT = nn.GELU, nn.SiLU, nn.Softplus  # activations whose derivative needs their input
STORE_BOTH = nn.LeakyReLU, *NEED_INPUT  # activations whose input and output autograd stores
CELLS = 16  # that a classifier averages feature maps over
TRIAL = 8  # numbers of a parameter to try an optimizer on
ADAM = 2  # numbers that it stores for each number that learns


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
        """The most at one time; codes that learn first free their gradients before the weights'."""
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


def line_of(
    spec: RunSpec, params: Sequence[dict[str, Tensor]], sample: Any, samples: int
) -> BackpropLine | None:
    """The line for a net whose blocks learn one after another; None if it cannot be counted.

    `params` are the parameters of each block that may learn, `samples` is a number (0: unknown).
    """
    form, shape = spec.form, tuple(sample.shape[1:])
    if form.stacked or any(block.recurrent for block in spec.blocks):
        return None
    most = form.micro_batch or form.batch_size
    batch = min(most, samples or most) * form.numbers.itemsize
    needs, weights, stored, activations, before_first = [], 0, 0, 0, 0
    for i, block in enumerate(spec.blocks):
        size, act, last = spec.sizes[i], block.activation, block is spec.blocks[-1]
        widest, received = batch * max(map(prod, size.values())), batch * prod(shape)
        held = widest * (1 + isinstance(act, NEED_INPUT) + len(block.between))
        activations = max(activations, received + held)
        of_block = sum(p.nbytes for p in params[i].values())
        codes, learned = (0, 0) if last else _codes(spec, i)
        moments = _moments(spec.block_settings[i].optimizer, params[i])
        temporary = TEMPORARY * widest if block.closed_form(spec.rules[i].at) else inf
        need = of_block, codes, learned, moments, activations, temporary
        needs.append(None if moments is None else Need(*need))  # type: ignore[arg-type]
        if of_block and not weights:  # autograd stores nothing before the first that learns
            before_first, stored = batch * prod(size[Place.BEFORE]), 0
        if not last:
            stored += batch * prod(size[Place.END]) + widest * isinstance(act, STORE_BOTH)
        weights, shape = weights + of_block, size[Place.END]
    if not weights:
        before_first = batch * prod(spec.sizes[0][Place.BEFORE])
    peak = max(weights + before_first, stored)
    inputs = batch * prod(sample.shape[1:])
    return BackpropLine(weights * _moments_of_net(spec, needs) + inputs + peak, needs)


def _codes(spec: RunSpec, i: int) -> tuple[int, int]:
    """Bytes of a block's class codes, at most, and of those that learn."""
    block, rule = spec.blocks[i], spec.rules[i]
    filters, *pixels = spec.sizes[i][rule.at]
    cells = min(prod(pixels), CELLS) if block.maps and rule.classifies else prod(pixels)
    numbers = filters * cells * spec.classes if rule.objective is not None else 0
    learn = getattr(rule.objective, "learned", rule.classifies)
    nbytes = numbers * spec.form.dtype.itemsize
    return nbytes, nbytes * learn


def _moments_of_net(spec: RunSpec, needs: Sequence[Need | None]) -> int:
    """What one optimizer for the whole net stores, from the first block without a solver."""
    for settings, need in zip(spec.block_settings, needs, strict=True):
        if not isinstance(settings.optimizer, SOLVERS):
            return need.moments if need else 0
    return ADAM


def _moments(factory: Any, params: dict[str, Tensor]) -> int | None:
    """The numbers that an optimizer stores for each that learns; None if that is unknown.

    An optimizer that is not Adam or SGD takes a step on one small parameter.
    """
    if isinstance(factory, SOLVERS):
        return None
    if not params:
        return 0
    optimizer = make_optimizer(factory, params, None)
    if isinstance(optimizer, (optim.Adam, optim.AdamW)):
        return ADAM + any(group["amsgrad"] for group in optimizer.param_groups)
    if isinstance(optimizer, optim.SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    p = torch.zeros(TRIAL, requires_grad=True)
    p.grad = torch.ones_like(p)
    try:
        trial: Any = type(optimizer)([p], **optimizer.defaults)
        trial.step()
    except (TypeError, ValueError, RuntimeError):  # a user's own, or one of matrices alone
        return None
    return sum(t.numel() // TRIAL for t in trial.state[p].values() if isinstance(t, Tensor))
