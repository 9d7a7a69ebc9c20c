"""Random features: what a head that is solved sees of a sample.

    h = relu(W f),   W[i, j] = +1 or -1, over the square root of the inputs

f is the sample itself or what a frozen encoder makes of it, averaged over space or tokens. Random
features in front of least squares are an extreme learning machine (Huang, Zhu & Siew 2006); with
direct links, f stands next to h (random vector functional-link nets, Pao, Park & Sobajic 1994); on
the features of a pretrained encoder they are RanPAC (McDonnell et al., NeurIPS 2023). Row i of W is
a pure function of the seed and i, by the library's hash, so every device can compute it again.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_whole
from tpsgd.maths.random import Key
from tpsgd.nets.modes import evaluating
from tpsgd.projections import binary

AT_A_TIME = 1024  # samples whose features are in memory
MOST = 1 << 20  # features, of whose products there is a matrix of 8 TB
LARGEST = 1e30  # whose products over many samples are no infinity


def random_layer(inputs: int, width: int, seed: int = 0) -> nn.Linear:
    """A linear layer of random signs, without a bias, which does not learn.

    Examples:
        >>> random_layer(4, 2).weight.abs()
        tensor([[0.5000, 0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000, 0.5000]])
        >>> bool((random_layer(4, 3).weight[:2] == random_layer(4, 2).weight).all())
        True
    """
    layer = nn.Linear(inputs, width, bias=False).requires_grad_(False)
    layer.weight.copy_(binary(inputs**-0.5)((inputs,), width, Key(seed)))
    return layer


class RandomFeatures:
    """Samples as rows of features in float64, so that they do not depend on the batch.

    Args:
        width: how many random features; 0 leaves them out.
        seed: of the random layer.
        encoder: a frozen encoder, or None.
        direct: whether a row has the inputs of the random layer, too.
    """

    def __init__(
        self, width: int, seed: int, encoder: Callable[[Any], Any] | None, direct: bool = False
    ) -> None:
        if not is_whole(width) or width > MOST:
            raise TpsgdError(f"features must be a whole number from 0 to {MOST:,}, got {width!r}")
        if not isinstance(seed, int):
            raise TpsgdError(f"seed must be a whole number, got {seed!r}")
        if encoder is not None and not callable(encoder):
            kind = type(encoder).__name__
            raise TpsgdError(f"encoder must be a module or a function of samples, got {kind}")
        self.width, self.seed, self.encoder = width, seed, encoder
        self.direct = bool(direct or not width)
        self.shape: tuple[int, ...] | None = None  # of the first sample
        self.layer: nn.Linear | None = None

    @property
    def columns(self) -> int:
        """How many features a row has, once there was a sample."""
        return 0 if self.layer is None else self.width + self.direct * self.layer.in_features

    def start(self, shape: tuple[int, ...], inputs: int) -> None:
        """Settle the form of samples."""
        self.shape, self.layer = shape, random_layer(inputs, self.width or 1, self.seed).double()

    def check(self, x: Tensor) -> None:
        """Refuse samples of another shape than the first ones."""
        if self.shape is not None and tuple(x.shape[1:]) != self.shape:
            now = tuple(x.shape[1:])
            raise TpsgdError(f"samples have shape {now}; the first ones had {self.shape}")

    @torch.no_grad()
    def rows(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """A few samples at a time: which they are, and their features."""
        self.check(x)
        for start in range(0, len(x), AT_A_TIME):
            few = slice(start, start + AT_A_TIME)
            f = self.encoded(x[few])
            if len(f) != len(x[few]) or not f.numel():
                what = "the encoder gives no row" if self.encoder else "there are no numbers"
                raise TpsgdError(f"{what} for each sample, got {tuple(f.shape)} of {len(x[few])}")
            if not (f.abs() < LARGEST).all():
                whose = "the samples have" if self.encoder is None else "the encoder gives"
                raise TpsgdError(f"{whose} numbers that are NaN, or {LARGEST:g} or larger")
            if self.layer is None:
                self.start(tuple(x.shape[1:]), f.shape[1])
            assert self.layer is not None
            h = self.layer(f).relu_() if self.width else f[:, :0]
            yield few, torch.cat([f, h], 1) if self.direct else h

    def plain(self, weight: Tensor, bias: Tensor) -> nn.Sequential:
        """The random layer and a head, with weights (features, classes), as layers in float32.

        Direct links are units of their own, f = relu(f) - relu(-f).
        """
        assert self.layer is not None
        d, units = self.layer.in_features, [self.layer.weight] if self.width else []
        rows = [weight[d * self.direct :]]
        if self.direct:
            units = [torch.eye(d), -torch.eye(d), *units]
            rows = [weight[:d], -weight[:d], *rows]
        hidden = nn.Linear(d, sum(map(len, units)), bias=False)
        head = nn.Linear(hidden.out_features, len(bias))
        with torch.no_grad():
            hidden.weight.copy_(torch.cat(units))
            head.weight.copy_(torch.cat(rows).mT)
            head.bias.copy_(bias)
        return nn.Sequential(nn.Flatten(), hidden.requires_grad_(False), nn.ReLU(), head)

    def encoded(self, x: Tensor) -> Tensor:
        """What the encoder makes of samples, or the samples themselves, as rows."""
        if self.encoder is None:
            return x.flatten(1).double().cpu()
        if isinstance(self.encoder, nn.Module):
            with evaluating(self.encoder):
                f = self.encoder(x)
        else:
            f = self.encoder(x)
        taps = list(f.values()) if isinstance(f, dict) else [f]
        return torch.cat([_average(tap) for tap in taps], 1).double().cpu()


def _average(f: Any) -> Tensor:
    """The features of a tap: their mean over tokens (n, tokens, d) or space (n, c, h, w)."""
    if not isinstance(f, Tensor) or f.dim() < 2:
        kind = tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__
        raise TpsgdError(f"an encoder gives a row, maps or tokens for each sample, not {kind}")
    return f if f.dim() == 2 else f.mean(1 if f.dim() == 3 else tuple(range(2, f.dim())))
