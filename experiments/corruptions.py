"""Artificial changes of domain: what a camera, the light or a sensor may do to images.

    SHIFTS["blur"](images)               # a shift with its usual setting
    noise(std=0.3, seed=1)(images)       # or with another

Images are (n, c, h, w) with c = 1 or 3, uint8 or floats in [0, 1]: shift them before they are
normalised. The result has the same shape, type and range. Every shift is a pure function of the
image (noise: and of its index), so the batches in which a data set comes do not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, prod

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.projections import normal

CHUNK = 1 << 22  # numbers that are processed together, as floats
LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
NOISE = -2  # the block of the noise's key: no block of a net has it
FLAT = 1 / 255  # smaller gradients, less than one grey level, are not stretched


@dataclass(frozen=True)
class Shift:
    """A change of domain: call it with images.

    `function` takes floats in [0, 1] and the index of the first image, and gives new floats.
    """

    name: str
    function: Callable[[Tensor, int], Tensor]

    @torch.no_grad()
    def __call__(self, images: Tensor, first: int = 0) -> Tensor:
        """The images after the shift; `first` is the index of the first one in its data set.

        Examples:
            >>> invert()(torch.tensor([0, 5, 255], dtype=torch.uint8).view(1, 1, 1, 3)).flatten()
            tensor([255, 250,   0], dtype=torch.uint8)
        """
        _check_images(images)
        shifted = torch.empty_like(images)
        step = max(1, CHUNK // prod(images.shape[1:]))
        for start in range(0, len(images), step):
            chunk = self.function(_floats(images[start : start + step]), first + start)
            if images.dtype == torch.uint8:
                chunk = chunk.mul(255).round_()
            shifted[start : start + step] = chunk
        return shifted


def grey() -> Shift:
    """No colour: the luminance 0.299 R + 0.587 G + 0.114 B in every channel."""
    return Shift("grey", _grey)


def edges(sigma: float = 1 / 160) -> Shift:
    """Outlines, somewhat like a depth image: gradients of the luminance, brightest where steep.

    sqrt((S_x g)^2 + (S_y g)^2) / its largest value, S Sobel's filters, g the luminance after a
    Gaussian blur of `sigma`, a fraction of the shorter side.
    """
    return Shift("edges", partial(_edges, _positive(sigma)))


def blur(sigma: float = 1 / 80) -> Shift:
    """A Gaussian blur; `sigma` is a fraction of the shorter side: 1/80 is 2 pixels of 160."""
    return Shift("blur", partial(_blurred, _positive(sigma)))


def noise(std: float = 0.2, seed: int = 0) -> Shift:
    """Normal noise of deviation `std`, clipped; a function of (seed, image index, place) alone.

    Examples:
        >>> images = torch.rand(4, 3, 8, 8)
        >>> whole = noise()(images)
        >>> bool((noise()(images[2:], first=2) == whole[2:]).all())
        True
    """
    return Shift("noise", partial(_noisy, _positive(std), seed))


def invert() -> Shift:
    """A negative: 1 - x."""
    return Shift("invert", _inverted)


def dim(scale: float = 0.5, gamma: float = 2.0) -> Shift:
    """Little light: scale x^gamma, with 0 < scale <= 1."""
    if not 0 < scale <= 1:
        raise TpsgdError(f"dim's scale must be above 0 and at most 1, got {scale}")
    return Shift("dim", partial(_dim, scale, _positive(gamma)))


def _grey(x: Tensor, first: int = 0) -> Tensor:
    return _luminance(x).expand_as(x)


def _edges(sigma: float, x: Tensor, first: int) -> Tensor:
    smooth = _blurred(sigma, _luminance(x))
    steepness = torch.zeros_like(smooth)
    for along, across in ((2, 3), (3, 2)):
        gradient = _filtered(_filtered(smooth, along, [-1, 0, 1]), across, [1, 2, 1])
        steepness.addcmul_(gradient, gradient)
    steepness.sqrt_()
    return steepness.div_(steepness.amax((1, 2, 3), keepdim=True).clamp(min=FLAT)).expand_as(x)


def _blurred(sigma: float, x: Tensor, first: int = 0) -> Tensor:
    pixels = sigma * min(x.shape[2:])
    radius = int(4 * pixels + 0.5)
    weights = [exp(-0.5 * (at / pixels) ** 2) for at in range(-radius, radius + 1)]
    weights = [w / sum(weights) for w in weights]
    return _filtered(_filtered(x, 2, weights), 3, weights).clamp_(0, 1)


def _filtered(x: Tensor, along: int, weights: Sequence[float]) -> Tensor:
    """A one-dimensional filter; border pixels are repeated outside the image.

    Plain sums, because convolutions on a GPU round to TF32.
    """
    radius, size = len(weights) // 2, x.shape[along]
    at = torch.arange(-radius, size + radius, device=x.device).clamp_(0, size - 1)
    padded = x.index_select(along, at)
    filtered = torch.zeros_like(x)
    for k, weight in enumerate(weights):
        filtered.add_(padded.narrow(along, k, size), alpha=weight)
    return filtered


def _noisy(std: float, seed: int, x: Tensor, first: int) -> Tensor:
    indices = range(first, first + len(x))
    return (x + normal(std)(x.shape[1:], indices, Key(seed, NOISE), x.device)).clamp_(0, 1)


def _inverted(x: Tensor, first: int) -> Tensor:
    return 1 - x


def _dim(scale: float, gamma: float, x: Tensor, first: int) -> Tensor:
    return x.pow(gamma).mul_(scale)


def _luminance(x: Tensor) -> Tensor:
    """One channel: (n, 1, h, w)."""
    if x.shape[1] == 1:
        return x
    weights = torch.tensor(LUMINANCE, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)
    return (x * weights).sum(1, keepdim=True).clamp_(0, 1)


def _floats(images: Tensor) -> Tensor:
    """Images as floats in [0, 1]."""
    if images.dtype == torch.uint8:
        return images.float().mul_(1 / 255)  # a division is not rounded alike on CPUs and GPUs
    least, most = images.aminmax()
    if not (least >= 0 and most <= 1):
        raise TpsgdError(
            f"a shift takes floats in [0, 1], got {least:.3g} to {most:.3g}: shift images before "
            "they are normalised, and give bytes as uint8"
        )
    return images if images.dtype == torch.float64 else images.float()


def _check_images(images: Tensor) -> None:
    shape = tuple(images.shape) if isinstance(images, Tensor) else ()
    if len(shape) != 4 or shape[1] not in (1, 3) or not prod(shape[1:]):
        kind = shape or type(images).__name__
        raise TpsgdError(f"a shift takes images with pixels, (n, 3 or 1, h, w), got {kind}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TpsgdError(f"a shift takes uint8 or floats in [0, 1], got {images.dtype}")


def _positive(number: float) -> float:
    if not 0 < number < float("inf"):
        raise TpsgdError(f"a shift's setting must be a number above 0, got {number}")
    return number


SHIFTS: dict[str, Shift] = {s.name: s for s in (grey(), edges(), blur(), noise(), invert(), dim())}
