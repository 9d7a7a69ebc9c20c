"""Augmentation: random changes of every batch of images that is learned from.

A batch is changed as a whole, on the training device; the data set is never copied. With
`fit(augment=chain(flip(), crop(4)))`, validation sees the samples unchanged.

    x = flip()(x)                          # outside `fit`: numbers from torch's generator

In `fit` the random numbers are a function of its seed, the block, the epoch, the batch and the
place in the batch, so they are the same on every device and with any `micro_batch`. Any other
function `x -> x` works too; if it uses torch's generator, which `fit` seeds, it repeats on the same
kind of device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.batches import BatchForm, DerivedSource
from tpsgd.maths.kernels.memory_format import channels_last
from tpsgd.maths.random import Key, splitmix64, streams_of

BITS = 24  # of each random number, as many as a float32 can represent
AT_A_TIME = 1 << 16  # random numbers that are computed together


def uniform_numbers(
    key: Key, batches: range, streams: range, places: range, device: torch.device
) -> Tensor:
    """Numbers in [0, 1), a function of the key, the batch, the stream and the place in the batch.

    A batch has 256 streams. The result has the shape (batches, streams, places).
    """
    first, place = (torch.arange(r.start, r.stop, device=device) for r in (batches, places))
    members = (first[:, None] << 8) + torch.arange(streams.start, streams.stop, device=device)
    bits = splitmix64(place, streams_of(key, members)[..., None])
    return (bits >> (64 - BITS)).bitwise_and_((1 << BITS) - 1).float().mul_(2.0**-BITS)


class Draws:
    """Random numbers for the samples of a batch, from the sample at `start` on.

    They are computed when they are asked for, or `ahead`: (numbers, samples).
    """

    def __init__(
        self, key: Key, batch: int = 0, start: int = 0, ahead: Tensor | None = None
    ) -> None:
        self.key, self.batch, self.start, self.ahead = key, batch, start, ahead
        self.next = 0  # the stream that comes next

    def __call__(self, x: Tensor, count: int) -> Tensor:
        """`count` numbers in [0, 1) for each sample of x: (count, n)."""
        streams = range(self.next, self.next + count)
        self.next = streams.stop
        if self.ahead is not None:
            return self.ahead[streams.start : streams.stop]
        batches, places = range(self.batch, self.batch + 1), range(self.start, self.start + len(x))
        return uniform_numbers(self.key, batches, streams, places, x.device)[0]


@dataclass(frozen=True)
class Augmentation:
    """A named random change of images (n, channels, height, width), different for each image.

    `numbers`: how many random numbers it draws for an image. None: that is not known beforehand, or
    it may wait for the device.
    """

    name: str
    change: Callable[[Tensor, Draws], Tensor]
    numbers: int | None = None

    def __call__(self, x: Tensor, draws: Draws | None = None) -> Tensor:
        """Changed images of the same shape, type and memory format; x stays as it is."""
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            raise TpsgdError(
                f"{self.name} is for images, real numbers of shape (samples, channels, height, "
                f"width), got {_described(x)}"
            )
        if draws is None:
            draws = Draws(Key(int(torch.randint(1 << 62, ()))))
        layout = torch.channels_last if channels_last(x) else torch.contiguous_format
        return self.change(x, draws).to(x.dtype).contiguous(memory_format=layout)

    def __str__(self) -> str:
        return self.name


def flip(p: float = 0.5) -> Augmentation:
    """Mirror left and right with probability p.

    Examples:
        >>> flip(1.0)(torch.tensor([[[[1.0, 2.0]]]])).tolist()
        [[[[2.0, 1.0]]]]
    """
    if not _is_number(p) or not 0 <= p <= 1:
        raise TpsgdError(f"flip's p must be a probability from 0 to 1, got {_described(p)}")

    def change(x: Tensor, draws: Draws) -> Tensor:
        return torch.where((draws(x, 1)[0] < p)[:, None, None, None], x.flip(-1), x)

    return Augmentation(f"flip({p:g})", change, 1)


def crop(padding: int = 4, reflect: bool = False) -> Augmentation:
    """Shift by up to `padding` pixels each way; new pixels are zero, or mirrored with `reflect`."""
    if not isinstance(padding, int) or padding < 0:
        raise TpsgdError(f"crop's padding must be pixels, 0 or more, got {_described(padding)}")

    def change(x: Tensor, draws: Draws) -> Tensor:
        if reflect and padding >= min(x.shape[2:]):
            raise TpsgdError(
                f"crop cannot mirror {padding} pixels of {x.shape[2]} x {x.shape[3]}: take fewer"
            )
        shifts = (draws(x, 2) * (2 * padding + 1)).int() - padding
        rows, columns = (
            shift[:, None] + torch.arange(size, device=x.device, dtype=torch.int32)
            for shift, size in zip(shifts, x.shape[2:], strict=True)
        )
        return _mirrored(x, rows, columns) if reflect else _or_zero(x, rows, columns)

    return Augmentation(f"crop({padding}{', reflect' if reflect else ''})", change, 2)


def _mirrored(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at these rows and columns, mirrored at the edges."""
    rows, columns = rows.abs(), columns.abs()  # at the first pixel, then at the last
    rows = torch.minimum(rows, 2 * (x.shape[2] - 1) - rows)
    return _pixels(x, rows, torch.minimum(columns, 2 * (x.shape[3] - 1) - columns))


def _or_zero(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at these rows and columns, zero outside of the image."""
    inside_rows, inside_columns = rows.clamp(0, x.shape[2] - 1), columns.clamp(0, x.shape[3] - 1)
    outside_rows, outside_columns = rows != inside_rows, columns != inside_columns
    outside = outside_rows[:, None, :, None] | outside_columns[:, None, None, :]
    return _pixels(x, inside_rows, inside_columns).masked_fill_(outside, 0.0)


def _pixels(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels at each sample's rows and columns, in x's memory format.

    One gather: of pixels if the channels are last, otherwise of the numbers of every channel.
    """
    n, channels, height, width = x.shape
    if channels_last(x):
        pixels = _gathered(x.permute(0, 2, 3, 1), rows, columns)
        return pixels.view(n, height, width, channels).permute(0, 3, 1, 2)
    rows, columns = (i[:, None].expand(-1, channels, -1).flatten(0, 1) for i in (rows, columns))
    return _gathered(x.reshape(n * channels, height, width, 1), rows, columns).view(x.shape)


def _gathered(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels of images (n, height, width, channels) as a table (pixels, channels)."""
    n, height, width, channels = images.shape
    first = torch.arange(0, n * height, height, device=images.device, dtype=rows.dtype)
    index = ((first[:, None] + rows) * width)[:, :, None] + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, index.flatten())


def cutout(size: int) -> Augmentation:
    """Set a square of `size` pixels, which lies inside the image, to zero."""
    if not isinstance(size, int) or size < 1:
        raise TpsgdError(f"cutout's size must be pixels, 1 or more, got {_described(size)}")

    def change(x: Tensor, draws: Draws) -> Tensor:
        if size > min(x.shape[2:]):
            raise TpsgdError(
                f"a cutout of {size} pixels does not fit into {x.shape[2]} x {x.shape[3]}"
            )
        u, covered = draws(x, 2), []
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
    (small, large), (narrow, wide) = scale, ratio
    if not 0 < small <= large <= 1:
        raise TpsgdError(f"resized_crop's scale must be shares with 0 < low <= high <= 1: {scale}")
    if not 0 < narrow <= wide:
        raise TpsgdError(f"resized_crop's ratio must be two numbers, 0 < low <= high: {ratio}")

    def change(x: Tensor, draws: Draws) -> Tensor:
        u = draws(x, 4)
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
    if not all(_is_number(v) and v >= 0 for v in (contrast, brightness)):
        raise TpsgdError(
            f"jitter's contrast and brightness must be numbers, 0 or more, got {contrast!r} and "
            f"{brightness!r}"
        )

    def change(x: Tensor, draws: Draws) -> Tensor:
        u = (2 * draws(x, 2) - 1)[..., None, None, None]
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
        if not callable(function):
            raise TpsgdError(f"chain takes functions, such as flip(), got {_described(function)}")

    def change(x: Tensor, draws: Draws) -> Tensor:
        for function in functions:
            x = applied(function, x, draws)
        return x

    numbers = [f.numbers if isinstance(f, Augmentation) else None for f in functions]
    total = None if None in numbers else sum(n or 0 for n in numbers)
    return Augmentation(f"chain({', '.join(map(_name, functions))})", change, total)


def applied(function: Callable[..., Any], x: Tensor, draws: Draws) -> Tensor:
    """A batch changed by an augmentation or by any other function."""
    out = function(x, draws) if isinstance(function, Augmentation) else function(x)
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise TpsgdError(
            f"augment must give a tensor of the batch's shape {tuple(x.shape)}, but "
            f"{_name(function)} gave {_described(out)}"
        )
    return out


def _name(function: Any) -> str:
    if isinstance(function, Augmentation):
        return function.name
    return getattr(function, "__name__", type(function).__name__)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}".removeprefix("torch.")
    return repr(value) if _is_number(value) else f"a {type(value).__name__}"


@dataclass
class Augmented(DerivedSource):
    """A source whose training batches are augmented; without an epoch they are unchanged.

    The random numbers of an augmentation that says how many it draws are computed for several
    batches at a time. A batch then has the pair (sample indices, random numbers) as its index.
    """

    function: Callable[[Tensor], Tensor]

    @property
    def numbers(self) -> int | None:
        """How many random numbers a sample needs, if that is known beforehand."""
        return self.function.numbers if isinstance(self.function, Augmentation) else None

    def batches(self, block: int = 0, epoch: int | None = None) -> Iterator[Any]:
        """The source's batches, augmented with the random numbers of (block, epoch)."""
        if epoch is None:
            yield from self.source.batches(block)
            return
        key = Key(self.form.seeds[0], block, -1 - epoch)  # projections and orders are not negative
        ahead = None if self.numbers is None else NumbersAhead(key, self.numbers, self.form)
        number = start = 0
        for batch in self.source.batches(block, epoch):
            if ahead is None:
                yield batch.through(partial(self._augment, draws=Draws(key, number, start)))
            else:
                index = batch.index, ahead(number, start, batch.size)
                gather = partial(self._gather, batch.gather, key)
                yield replace(batch, gather=gather, index=index)
            number, start = (number + 1, 0) if batch.last else (number, start + batch.size)

    def _gather(
        self, gather: Callable[[Any], tuple[Any, Tensor]], key: Key, index: tuple[Any, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Samples at an index, augmented with the random numbers that come with it."""
        samples, numbers = index
        x, labels = gather(samples)
        return self._augment(x, Draws(key, ahead=numbers)), labels

    def _augment(self, x: Any, draws: Draws) -> Tensor:
        if not isinstance(x, Tensor):
            raise TpsgdError(
                "augment cannot change sequences that differ in length, or that are read in "
                "windows: leave it out"
            )
        return applied(self.function, x, draws)


class NumbersAhead:
    """The random numbers of an epoch's batches, computed for several batches at a time."""

    def __init__(self, key: Key, count: int, form: BatchForm) -> None:
        self.key, self.count, self.form = key, count, form
        self.first, self.table = 0, torch.empty(0, count, form.batch_size)

    def __call__(self, batch: int, start: int, size: int) -> Tensor:
        """The numbers for samples of a batch, from the sample at `start` on: (numbers, size)."""
        stop, (batches, _, samples) = start + size, self.table.shape
        if batch >= self.first + batches or stop > samples:
            samples = max(stop, samples)  # a loader's batches may have any size
            together = max(1, AT_A_TIME // max(1, self.count * samples))
            ranges = range(batch, batch + together), range(self.count), range(samples)
            self.first = batch
            self.table = uniform_numbers(self.key, *ranges, self.form.device)
        return self.table[batch - self.first, :, start:stop]
