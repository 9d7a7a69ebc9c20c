"""The layers of an adaptor for one tap, as a plain `nn.Sequential`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError

Build = Callable[[tuple[int, ...], int], nn.Sequential]  # (shape of the tap, classes) -> layers
Shapes = dict[str, tuple[int, ...]]  # of a sample at each tap


@dataclass(frozen=True)
class Layers:
    """Convolutions, then dense layers, each with a LeakyReLU; one of each is the paper's adaptor.

        Conv2d(64, 5) - LeakyReLU - Linear(256) - LeakyReLU - Linear(classes)

    Convolutions keep the size of the maps. A tap of tokens (tokens, features) is convolved over its
    tokens. A tap of plain vectors has no convolutions.

    Examples:
        >>> sum(p.numel() for p in Layers()((512, 7, 7), 10).parameters())
        1624906
    """

    convs: int = 1
    dense: int = 1
    filters: int = 64
    kernel: int = 5
    width: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name in ("convs", "dense") else 1
            if not isinstance(value, int) or value < least:
                raise TpsgdError(f"{name} must be a whole number, {least} or more: {value!r}")
        if self.convs and self.kernel % 2 == 0:
            raise TpsgdError(f"kernel must be odd, so that maps keep their size: {self.kernel}")

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Sequential:
        """The layers for a tap of this shape, with torch's initial weights."""
        layers: list[nn.Module] = []
        if self.convs and len(shape) == 2:
            layers.append(FeaturesFirst())
            shape = (shape[1], shape[0])
        if self.convs and len(shape) > 1:
            channels, *size = shape
            conv = {1: nn.Conv1d, 2: nn.Conv2d}.get(len(size))
            if conv is None:
                raise TpsgdError(f"there is no convolution for a tap of shape {shape}")
            for _ in range(self.convs):
                layers.append(conv(channels, self.filters, self.kernel, padding=self.kernel // 2))
                layers.append(nn.LeakyReLU())
                channels = self.filters
            shape = (channels, *size)
        inputs = prod(shape)
        layers += [nn.Flatten()] if len(shape) > 1 else []
        for _ in range(self.dense):
            layers += [nn.Linear(inputs, self.width), nn.LeakyReLU()]
            inputs = self.width
        return nn.Sequential(*layers, nn.Linear(inputs, classes))


@dataclass(frozen=True)
class Probe:
    """The control: a linear classifier on the tap's average over space (or tokens).

    Examples:
        >>> Probe()((512, 7, 7), 10)[-1]
        Linear(in_features=512, out_features=10, bias=True)
    """

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Sequential:
        """The classifier for a tap of this shape."""
        if len(shape) == 1:
            return nn.Sequential(nn.Linear(*shape, classes))
        if len(shape) == 2:
            return nn.Sequential(FeaturesFirst(), Average(), nn.Linear(shape[1], classes))
        return nn.Sequential(Average(), nn.Linear(shape[0], classes))


class Average(nn.Module):
    """The mean over space or tokens: (samples, channels, ...) to (samples, channels)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)


class FeaturesFirst(nn.Module):
    """(samples, tokens, features) to (samples, features, tokens), as convolutions need them."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


KINDS: dict[str, type[Layers] | type[Probe]] = {"layers": Layers, "probe": Probe}


def recipe(build: Any) -> dict[str, Any] | None:
    """`Layers` or a `Probe` as plain values; None for a function of the user."""
    kind = next((kind for kind, cls in KINDS.items() if type(build) is cls), None)
    return None if kind is None else {"kind": kind, **asdict(build)}


def from_recipe(values: dict[str, Any]) -> Build:
    """The `Layers` or `Probe` that `recipe` described."""
    return KINDS[values["kind"]](**{k: v for k, v in values.items() if k != "kind"})
