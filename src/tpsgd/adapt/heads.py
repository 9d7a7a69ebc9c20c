"""What an adaptor is made of: a few layers for one tap, as a plain `nn.Sequential`."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from tpsgd.errors import TpsgdError

Build = Callable[[tuple[int, ...], int], nn.Sequential]  # (shape of the tap, classes) -> layers


@dataclass(frozen=True)
class Layers:
    """Convolutions, then dense layers, each with a LeakyReLU; one of each is the paper's adaptor.

        Conv2d(64, 5) - LeakyReLU - Linear(256) - LeakyReLU - Linear(classes)

    Convolutions keep the size of the maps. A tap of tokens (tokens, features) is convolved over its
    tokens; one of plain vectors has nothing to convolve.

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
        least = {"convs": 0, "dense": 0, "filters": 1, "kernel": 1, "width": 1}
        for name, value in asdict(self).items():
            if not isinstance(value, int) or value < least[name]:
                raise TpsgdError(f"{name} must be a whole number, {least[name]} or more: {value!r}")
        if self.convs and self.kernel % 2 == 0:
            raise TpsgdError(f"kernel must be odd, or maps would change their size: {self.kernel}")

    def __call__(self, shape: tuple[int, ...], classes: int) -> nn.Sequential:
        """The layers for a tap of this shape, with torch's initial weights."""
        layers: list[nn.Module] = []
        if self.convs and len(shape) > 1:
            if len(shape) == 2:
                layers.append(Turned())
                shape = (shape[1], shape[0])
            conv = {2: nn.Conv1d, 3: nn.Conv2d}.get(len(shape))
            if conv is None:
                raise TpsgdError(f"there is no convolution for a tap of shape {shape}")
            for _ in range(self.convs):
                same = self.kernel // 2
                layers += [conv(shape[0], self.filters, self.kernel, padding=same), nn.LeakyReLU()]
                shape = (self.filters, *shape[1:])
        inputs = 1
        for n in shape:
            inputs *= n
        layers += [nn.Flatten()] if len(shape) > 1 else []
        for _ in range(self.dense):
            layers += [nn.Linear(inputs, self.width), nn.LeakyReLU()]
            inputs = self.width
        return nn.Sequential(*layers, nn.Linear(inputs, classes))

    def __str__(self) -> str:
        kinds = [(self.convs, f"conv {self.filters} x {self.kernel}"), (self.dense, self.width)]
        shown = [f"{n} x {what}" if n > 1 else f"{what}" for n, what in kinds if n]
        return ", ".join(shown) or "linear"


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
            return nn.Sequential(nn.Linear(shape[0], classes))
        if len(shape) == 2:
            return nn.Sequential(Turned(), Averaged(), nn.Linear(shape[1], classes))
        return nn.Sequential(Averaged(), nn.Linear(shape[0], classes))

    def __str__(self) -> str:
        return "linear probe"


class Averaged(nn.Module):
    """The mean over everything but the first dimension of a sample."""

    def forward(self, x: Tensor) -> Tensor:
        """(samples, channels, ...) to (samples, channels)."""
        return x.flatten(2).mean(2)


class Turned(nn.Module):
    """Features first: (samples, tokens, features) to (samples, features, tokens)."""

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        return x.transpose(1, 2)


def recipe(build: Any) -> dict[str, Any] | None:
    """How layers of ours are made, as plain values; None of a caller's own."""
    kinds = {Layers: "layers", Probe: "probe"}
    return {"kind": kinds[type(build)], **asdict(build)} if type(build) in kinds else None


def from_recipe(made: dict[str, Any]) -> Build:
    """What `recipe` wrote down."""
    values = dict(made)
    kind = {"layers": Layers, "probe": Probe}.get(values.pop("kind", ""))
    if kind is None:
        raise TypeError("no such kind of layers")
    return kind(**values)
