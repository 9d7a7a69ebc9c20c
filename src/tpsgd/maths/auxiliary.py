"""The objective of `rules.auxiliary`: a block's output read by a small net of its own.

Belilovsky, Eickenberg & Oyallon, "Decoupled Greedy Learning of CNNs" (2020):

    J = CE(R pool(h_m), y*),   h_i = relu(norm(K_i * h_(i-1))),   h_0 = pool(y)

With a share a of the similarity loss of `predsim` (without its convolution) it is

    a MSE(S(v), S(y*)) + (1 - a) J,   v: the deviations of pool(y) over space; for vectors y itself

Feature maps are averaged over a coarse grid of cells, which makes both parts cheap, and over a grid
of 2 x 2 cells after the convolutions K_i; for vectors the K_i are matrices. All K_i, the
norms' scales and shifts, and R learn with the block. `norm` is batch normalisation with the
statistics of the batch alone, so the loss is no mean over samples.

The derivative is the chain rule from the logits back to y, written out layer by layer: no graph.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.maths.kernels.memory_format import full
from tpsgd.maths.pooling import averages, back_to_pixels, cells, wide
from tpsgd.maths.predsim import (
    convolved,
    dissimilarity,
    dissimilarity_and_grad,
    initial_weights,
    labels_alike,
    through_convolution,
)
from tpsgd.objectives import NOT_COMPUTED, LossAndGrads, Objective, Site

_EPS = 1e-5  # added to variances, as torch's batch normalisation does
_LAST = 2  # cells a side before the linear layer


def auxiliary(
    site: Site, channels: int, kernels: tuple[int, ...], side: int, share: float
) -> Objective:
    """Readable by a small net, on maps of at most `side` cells a side, and similar in a class."""
    if site.numbers:  # which are not alike or different
        share = 0.0
    space = site.shape[1:] if site.maps else ()
    grid = tuple(cells_a_side(n, side) for n in space)
    last = tuple(min(n, _LAST) for n in grid)
    local = site.loss if site.numbers or site.loss is bce else cross_entropy
    net = _Net(grid, last, local, site.classes, share)
    return Objective(
        net.loss,
        tensors=_drawn_tensors(site, channels, kernels, last),
        learned=True,
        closed_form_of_batch=net.closed_form,
        of_logits=None if share else local,
    )


class _Net(NamedTuple):
    """The small net's loss and its derivatives."""

    grid: tuple[int, ...]  # of the maps that the net reads; empty for vectors
    last: tuple[int, ...]  # of the maps that its linear layer reads
    local: Loss
    classes: int
    share: float

    def loss(self, y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        h = pooled = averages(y, self.grid) if self.grid else y.flatten(1)
        for K, scale, shift in _layers(tensors):
            z, norm = convolved(h, K), (wide(scale), wide(shift))
            h = F.batch_norm(z, None, None, *norm, training=True, eps=_EPS).relu()
        f = cells(h, self.last) if self.grid else h
        readable = self.local.value(wide(f @ tensors[-1].T), s)
        if not self.share:
            return readable
        alike = dissimilarity(pooled, s, self.classes, prod(self.grid))
        return self.share * alike + (1 - self.share) * readable

    def closed_form(self, y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        pooled, R, passes = averages(y, self.grid) if self.grid else y.flatten(1), tensors[-1], []
        h = pooled
        for layer in _layers(tensors):
            passes.append(_Pass.forward(h, *layer))
            h = passes[-1].output
        f = cells(h, self.last) if self.grid else h
        logits = wide(f @ R.T)
        e = self.local.grad(logits, s).mul_((1 - self.share) / len(y)).to(y.dtype)
        dh, dtensors = e @ R, [e.T @ f]
        dh = full(back_to_pixels(dh, h, self.last), h) if self.grid else dh
        for forward in reversed(passes):
            dh, *dlayer = forward.backward(dh)
            dtensors = [*dlayer, *dtensors]
        value = NOT_COMPUTED
        if self.share:
            T = labels_alike(s, self.classes, logits.dtype)
            alike, dh = dissimilarity_and_grad(pooled, T, self.share, prod(self.grid), dh)
            value = alike.add_(self.local.value(logits, s), alpha=1 - self.share)
        dy = back_to_pixels(dh, y, self.grid) if self.grid else dh.view(y.shape)
        return LossAndGrads(value, dy, tuple(dtensors), logits)


class _Pass(NamedTuple):
    """A hidden layer's forward pass: what its backward pass needs."""

    x: Tensor
    K: Tensor
    scale: Tensor
    z: Tensor
    mean: Tensor
    inverse_std: Tensor
    output: Tensor

    @classmethod
    def forward(cls, x: Tensor, K: Tensor, scale: Tensor, shift: Tensor) -> "_Pass":
        """relu(norm(K * x)), the norm over the batch and space."""
        z, scale, shift = convolved(x, K), wide(scale), wide(shift)
        h, mean, inverse_std = torch.native_batch_norm(z, scale, shift, None, None, True, 0.0, _EPS)
        return cls(x, K, scale, z, mean, inverse_std, h.relu_())

    def backward(self, dh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The derivatives with respect to x, K, scale and shift."""
        dh = torch.ops.aten.threshold_backward(dh, self.output, 0)
        dz, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
            dh, self.z, self.scale, None, None, self.mean, self.inverse_std, True, _EPS,
            (True, True, True),
        )  # fmt: skip
        dx, dK = through_convolution(dz, self.x, self.K)
        return dx, dK, dscale, dshift


def cells_a_side(pixels: int, most: int) -> int:
    """How many cells a side of feature maps is cut into.

    Equal cells are faster than others, so the number divides `pixels` where one above half of
    `most` does.

    Examples:
        >>> [cells_a_side(n, 10) for n in (160, 32, 14, 13, 5)]
        [10, 8, 7, 10, 5]
    """
    if pixels <= most:
        return pixels
    return next((n for n in range(most, most // 2, -1) if pixels % n == 0), most)


def _layers(tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """The hidden layers: weights, and the norm's scale and shift."""
    return list(zip(*(tensors[i:-1:3] for i in range(3)), strict=True))


def _drawn_tensors(
    site: Site, channels: int, kernels: tuple[int, ...], last: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """The initial weights: each layer's, its norm's scale 1 and shift 0, and R."""
    inputs, space = (site.shape[0], len(site.shape) - 1) if site.maps else (prod(site.shape), 0)
    scale = torch.ones(channels, device=site.device, dtype=site.dtype)
    tensors = []
    for i, kernel in enumerate(kernels, 1):
        key = replace(site.key, step=site.key.step + i)
        tensors.append(initial_weights(site, (inputs, *[kernel] * space), channels, key))
        tensors += [scale.clone(), torch.zeros_like(scale)]
        inputs = channels
    return *tensors, initial_weights(site, (inputs * prod(last),), site.classes, site.key)
