"""Augmentation: random changes of every batch of images that is learned from.

A batch is changed as a whole, on the training device; the data set is never copied. With
`fit(augment=chain(flip(), crop(4)))`, validation sees the samples unchanged.

    x = flip()(x)                          # outside `fit`: numbers from torch's generator

In `fit` the random numbers are a function of its seed, the block, the epoch, the batch and the
place in the batch, so they are the same on every device and with any `micro_batch`. Any other
function `x -> x` works too; if it uses torch's generator, which `fit` seeds, it repeats on the same
kind of device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_real, is_whole
from tpsgd.engine.sources.batches import DerivedSource
from tpsgd.maths.kernels.memory_format import channels_last
from tpsgd.maths.random import Key, splitmix64, streams_of
from tpsgd.nets.model_inputs import ModelInputs

BITS = 24  # of a random number: the precision of a float32
AT_A_TIME = 1 << 16  # random numbers that are computed in one call


@dataclass(frozen=True)
class Augmentation:
    """A named random change of images (n, channels, height, width), different for each image.

    `change` gets the images and their random numbers in [0, 1), (numbers, n). `library_only`: no
    function of the user's takes part, which may wait for the device or use torch's generator.
    """

    name: str
    change: Callable[[Tensor, Tensor], Tensor]
    numbers: int  # random numbers for each image
    library_only: bool = True

    def __call__(self, x: Tensor, u: Tensor | None = None) -> Tensor:
        """Changed images of the same shape, type and memory format; x stays as it is."""
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            raise TpsgdError(
                f"{self.name} is for images, real numbers of shape (samples, channels, height, "
                f"width), got {_described(x)}"
            )
        u = torch.rand(self.numbers, len(x)).to(x.device) if u is None else u
        layout = torch.channels_last if channels_last(x) else torch.contiguous_format
        return self.change(x, u).to(x.dtype).contiguous(memory_format=layout)

    def __str__(self) -> str:
        return self.name


def flip(p: float = 0.5) -> Augmentation:
    """Mirror left and right with probability p.

    Examples:
        >>> flip(1.0)(torch.tensor([[[[1.0, 2.0]]]])).tolist()
        [[[[2.0, 1.0]]]]
    """
    _require(is_real(p) and 0 <= p <= 1, "flip's p must be a probability from 0 to 1", p)

    def change(x: Tensor, u: Tensor) -> Tensor:
        return torch.where((u[0] < p)[:, None, None, None], x.flip(-1), x)

    return Augmentation(f"flip({p:g})", change, 1)


def crop(padding: int = 4, reflect: bool = False) -> Augmentation:
    """Shift by up to `padding` pixels each way; new pixels are zero, or mirrored with `reflect`."""
    _require(is_whole(padding), "crop's padding must be pixels, 0 or more", padding)

    def change(x: Tensor, u: Tensor) -> Tensor:
        height, width = x.shape[2:]
        if padding > (min(height, width) - 1 if reflect else max(height, width)):
            change = "mirror" if reflect else "shift by"
            raise TpsgdError(
                f"crop cannot {change} {padding} pixels of {height} x {width}: take fewer"
            )
        top, left = (u * (2 * padding + 1)).long()
        if reflect and channels_last(x):  # where torch's padding is slow
            return _mirrored(x, top - padding, left - padding)
        padded = F.pad(x, [padding] * 4, "reflect" if reflect else "constant")
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(len(x), device=x.device), :, top, left]

    return Augmentation(f"crop({padding}{', reflect' if reflect else ''})", change, 2)


def _mirrored(x: Tensor, top: Tensor, left: Tensor) -> Tensor:
    """Images in channels-last format, shifted and mirrored at the edges: one gather of pixels."""
    pixels = x.permute(0, 2, 3, 1)
    n, height, width, channels = pixels.shape
    row, column, first = (
        torch.arange(0, stop, step, device=x.device)
        for stop, step in ((height, 1), (width, 1), (n * height, height))
    )
    rows, columns = (top[:, None] + row).abs(), (left[:, None] + column).abs()
    rows = torch.minimum(rows, 2 * (height - 1) - rows) + first[:, None]
    columns = torch.minimum(columns, 2 * (width - 1) - columns)
    index = (rows * width)[:, :, None] + columns[:, None, :]
    gathered = pixels.reshape(-1, channels).index_select(0, index.flatten())
    return gathered.view(pixels.shape).permute(0, 3, 1, 2)


def cutout(size: int) -> Augmentation:
    """Set a square of `size` pixels, which lies inside the image, to zero."""
    _require(is_whole(size, 1), "cutout's size must be pixels, 1 or more", size)

    def change(x: Tensor, u: Tensor) -> Tensor:
        if size > min(x.shape[2:]):
            raise TpsgdError(
                f"a cutout of {size} pixels does not fit into {x.shape[2]} x {x.shape[3]}"
            )
        covered = []
        for i, side in enumerate(x.shape[2:]):
            start = (u[i] * (side - size + 1)).long()[:, None]
            place = torch.arange(side, device=x.device)
            covered.append((place >= start) & (place < start + size))
        return x.masked_fill(covered[0][:, None, :, None] & covered[1][:, None, None, :], 0.0)

    return Augmentation(f"cutout({size})", change, 2)


def resized_crop(
    scale: tuple[float, float] = (0.35, 1.0), ratio: tuple[float, float] = (1.0, 1.0)
) -> Augmentation:
    """Enlarge a part of the image, a share `scale` of its area, to the whole size; bilinear.

    `ratio` is the range of width to height (torchvision: 3/4 to 4/3), as far as the image allows.
    """
    rising = [_are_rising(pair) for pair in (scale, ratio)]
    shares = rising[0] and scale[1] <= 1
    _require(shares, "resized_crop's scale must be two shares, 0 < low <= high <= 1", scale)
    _require(rising[1], "resized_crop's ratio must be two numbers, 0 < low <= high", ratio)
    (small, large), (narrow, wide) = scale, ratio

    def change(x: Tensor, u: Tensor) -> Tensor:
        side = (small + (large - small) * u[0]).sqrt()
        stretch = (narrow * (wide / narrow) ** u[1]).sqrt()
        width, height = (side * stretch).clamp(max=1), (side / stretch).clamp(max=1)
        theta = torch.zeros(len(x), 2, 3, device=x.device)
        theta[:, 0, 0], theta[:, 1, 1] = width, height
        theta[:, 0, 2], theta[:, 1, 2] = (2 * u[2] - 1) * (1 - width), (2 * u[3] - 1) * (1 - height)
        real = x if x.dtype is torch.float64 else x.float()
        grid = F.affine_grid(theta.to(real.dtype), list(x.shape), align_corners=False)
        return F.grid_sample(real, grid, padding_mode="border", align_corners=False)

    shape = "" if (narrow, wide) == (1, 1) else f", ratio {narrow:g} to {wide:g}"
    return Augmentation(f"resized_crop({small:g} to {large:g}{shape})", change, 4)


def jitter(contrast: float = 0.2, brightness: float = 0.2) -> Augmentation:
    """Scale an image about its mean by 1 ± `contrast`; add ± `brightness` standard deviations.

    Mean and deviation are the image's, so that it does not matter how the data is scaled.
    """
    for name, value in (("contrast", contrast), ("brightness", brightness)):
        positive = is_real(value) and value >= 0
        _require(positive, f"jitter's {name} must be a number, 0 or more", value)

    def change(x: Tensor, u: Tensor) -> Tensor:
        u = (2 * u - 1)[..., None, None, None]
        mean = x.mean((1, 2, 3), keepdim=True)
        deviation = x.std((1, 2, 3), correction=0, keepdim=True)
        gain = (1 + contrast * u[0]).to(x.dtype)
        return x * gain + (mean * (1 - gain) + deviation * (brightness * u[1]).to(x.dtype))

    return Augmentation(f"jitter({contrast:g}, {brightness:g})", change, 2)


def chain(*functions: Callable[[Tensor], Tensor]) -> Augmentation:
    """Apply augmentations, or other functions, one after another.

    Examples:
        >>> print(chain(flip(), crop(4), cutout(8)))
        chain(flip(0.5), crop(4), cutout(8))
    """
    for function in functions:
        _require(callable(function), "chain takes functions, such as flip()", function)
    counts = [_numbers(function) for function in functions]

    def change(x: Tensor, u: Tensor) -> Tensor:
        for function, numbers in zip(functions, u.split(counts), strict=True):
            x = _applied(function, x, numbers)
        return x

    name = f"chain({', '.join(map(_name, functions))})"
    return Augmentation(name, change, sum(counts), all(map(_is_library_only, functions)))


def _applied(function: Callable[..., Any], x: Tensor, u: Tensor) -> Tensor:
    """A batch changed by an augmentation or by any other function."""
    out = function(x, u) if isinstance(function, Augmentation) else function(x)
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise TpsgdError(
            f"augment must give a tensor of the batch's shape {tuple(x.shape)}, but "
            f"{_name(function)} gave {_described(out)}"
        )
    return out


def _numbers(function: Any) -> int:
    return function.numbers if isinstance(function, Augmentation) else 0


def _is_library_only(function: Any) -> bool:
    return isinstance(function, Augmentation) and function.library_only


def _name(function: Any) -> str:
    if isinstance(function, Augmentation):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def _are_rising(pair: Any) -> bool:
    """Whether a value is two numbers above 0, the second one not smaller."""
    return (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(map(is_real, pair))
        and 0 < pair[0] <= pair[1]
    )


def _require(holds: bool, sentence: str, value: Any) -> None:
    if not holds:
        raise TpsgdError(f"{sentence}, got {_described(value)}")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}".removeprefix("torch.")
    return repr(value) if isinstance(value, (int, float, tuple)) else f"a {type(value).__name__}"


@dataclass
class Augmented(DerivedSource):
    """A source whose training batches are augmented; without an epoch they are unchanged.

    A batch has the pair (sample indices, random numbers) as its index.
    """

    function: Callable[[Tensor], Tensor]

    @property
    def library_only(self) -> bool:
        return _is_library_only(self.function)

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]:
        """The source's batches, augmented with the random numbers of (block, epoch)."""
        if epoch is None:
            yield from self.source.batches(block)
            return
        key = Key(self.form.seeds[0], block, -1 - epoch)  # projections and orders are not negative
        count, form = _numbers(self.function), self.form
        numbers = RandomNumbers(key, count, form.batch_size, form.device)
        number = start = 0
        for batch in self.source.batches(block, epoch):
            index = batch.index, numbers(number, start, batch.size)
            yield replace(batch, gather=partial(self._gather, batch.gather), index=index)
            number, start = (number + 1, 0) if batch.last else (number, start + batch.size)

    def _gather(
        self, gather: Callable[[Any], tuple[Any, Tensor]], index: tuple[Any, Tensor]
    ) -> tuple[Any, Tensor]:
        samples, u = index
        x, labels = gather(samples)
        if isinstance(x, ModelInputs):  # the first of several inputs
            first = next(iter(x.tensors))
            changed = {first: _applied(self.function, x.tensors[first], u)}
            return ModelInputs(x.tensors | changed), labels
        if not isinstance(x, Tensor):
            raise TpsgdError(
                "augment cannot change sequences that differ in length, or that are read in "
                "windows: leave it out"
            )
        return _applied(self.function, x, u), labels


class RandomNumbers:
    """Random numbers in [0, 1) for the samples of an epoch, `count` for each.

    A number is a function of the key, the batch, the place in the batch and its place among the
    `count`, at most 256. Those of several batches are computed in one call.
    """

    def __init__(self, key: Key, count: int, batch_size: int, device: torch.device) -> None:
        self.key, self.count, self.device = key, count, device
        self.first, self.table = 0, torch.empty(0, count, batch_size)

    def __call__(self, batch: int, start: int, size: int) -> Tensor:
        """The numbers for samples of a batch, from the sample at `start` on: (count, size)."""
        stop, (batches, _, samples) = start + size, self.table.shape
        if batch >= self.first + batches or stop > samples:
            samples = max(stop, samples)  # a loader's batches may have any size
            batches = max(1, AT_A_TIME // max(1, self.count * samples))
            self.first, self.table = batch, self._computed(batch, batches, samples)
        return self.table[batch - self.first, :, start:stop]

    def _computed(self, first: int, batches: int, samples: int) -> Tensor:
        """The numbers of some batches: (batches, count, samples)."""
        batch, number, place = (
            torch.arange(start, start + count, device=self.device)
            for start, count in ((first, batches), (0, self.count), (0, samples))
        )
        members = (batch[:, None] << 8) + number
        bits = splitmix64(place, streams_of(self.key, members)[..., None])
        return (bits >> (64 - BITS)).bitwise_and_((1 << BITS) - 1).float().mul_(2.0**-BITS)
