"""What the labels of samples are: classes or numbers, one a sample, or one a step or pixel.

    y (n,)            whole numbers: a class for each sample; real numbers: a number
    y (n, k)          real numbers: k numbers, or the probabilities of classes
    y (n, steps)      a class for each step, or a number
    y (n, h, w)       a class for each pixel, or a number

The shape of the model's output tells numbers per sample from numbers per step. A position without a
label has the class `losses.IGNORED`. For a block whose output has other positions, classes are
reduced by majority and numbers by their mean.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.losses import IGNORED, Loss

_POOL = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)


@dataclass(frozen=True)
class Target:
    """What labels are.

    Args:
        numbers: real numbers, not classes or their probabilities.
        shape: of one sample's labels.
        rows: of real numbers, so that a label may be several of them.
        positions: of the shape, the steps or pixels that have a label each: known with the output.
        channels_first: the outputs of a position are in the dimension after the samples.
        ignores: some positions have no label.
    """

    numbers: bool = False
    shape: tuple[int, ...] = ()
    rows: bool = False
    positions: tuple[int, ...] = ()
    channels_first: bool = False
    ignores: bool = False

    @classmethod
    def of(cls, y: Tensor, loss: Loss | None, all_of_them: bool = True) -> "Target":
        """What labels are for a loss, or for the one that suits them."""
        if not y.is_floating_point():
            shape = tuple(n for n in y.shape[1:] if n > 1 or y.dim() == 2)
            unlabelled = not all_of_them or bool((y == IGNORED).any())
            return cls(shape=shape, ignores=y.dim() > 1 and unlabelled)
        shape = tuple(y.shape[1:])
        if (loss is not None and not loss.of_numbers) or (
            y.dim() == 2 and y.shape[1] > 1 and are_probabilities(y)
        ):
            numbers = False
        elif loss is None:  # yes and no, or probabilities that do not add up: say which loss
            single = y.dim() == 1 or shape == (1,)
            inside = (y == 0) | (y == 1) if single else (y >= 0) & (y <= 1)
            numbers = not bool(inside.all())
        else:
            numbers = True
        return cls(numbers, shape, rows=True)

    def at(self, output: tuple[int, ...], maps: bool) -> "Target":
        """The same for the shape of one sample's output, which tells the positions."""
        if len(output) < 2:
            return self
        for channels_first in (maps, not maps):
            k = output[0] if channels_first else output[-1]
            positions = output[1:] if channels_first else output[:-1]
            alone = self.shape == positions and (not self.rows or k == 1)
            if alone or (self.rows and self.shape == output):
                return replace(self, positions=positions, channels_first=channels_first)
        raise TpsgdError(_misfit(self, output, maps))

    def is_ambiguous(self, output: tuple[int, ...]) -> bool:
        """Whether outputs may be (steps, classes) or (classes, steps), for all that sizes tell."""
        return not self.rows and self.shape == output[1:] == output[:-1]

    def outputs(self, output: tuple[int, ...]) -> int:
        """The number of classes, or of numbers, in one sample's output at a position."""
        return output[-1] if self.positions and not self.channels_first else output[0]

    def outputs_last(self, out: Tensor) -> Tensor:
        """The outputs of a model with classes, or numbers, in the last dimension."""
        return out.movedim(1, -1) if self.channels_first else out

    def canonical(self, y: Tensor) -> Tensor:
        """Labels with the positions after the samples, and the numbers of a position last."""
        if not self.positions and not self.numbers:
            return y
        if not self.rows and not self.numbers:
            return y.reshape(len(y), *self.positions)
        y = y if y.is_floating_point() else y.float()
        if y.dim() == 1 + len(self.positions):
            return y.unsqueeze(-1)
        return y.movedim(1, -1) if self.channels_first else y


CLASSES = Target()  # one for each sample


def are_probabilities(y: Tensor) -> bool:
    """Whether rows are the probabilities of classes: they sum to 1.

    Examples:
        >>> are_probabilities(torch.tensor([[0.2, 0.8]])), are_probabilities(torch.ones(1, 2))
        (True, False)
    """
    sums = y.sum(1)
    return bool((y >= 0).all()) and torch.allclose(sums, torch.ones(()).to(y), atol=1e-3)


def refuse_all_but_classes(name: str, target: Target) -> None:
    """Refuse labels that are not one class for each sample, or its probability."""
    if target.numbers or (target.shape and not target.rows):
        labels = "numbers" if target.numbers else "classes of every position"
        raise TpsgdError(
            f"{name} needs one class for each sample, and the labels are {labels}: take tpsgd.fit"
        )


def _misfit(target: Target, output: tuple[int, ...], maps: bool) -> str:
    gives = f"(batch, {', '.join(map(str, output))})"
    for k, positions in ((output[0], output[1:]), (output[-1], output[:-1])):
        if target.rows and target.shape == positions:
            return (
                f"y has a number for each position, and the model gives {k} for each, {gives}: let "
                "its last layer have 1 output; class labels must be whole numbers (an integer type)"
            )
    if len(target.shape) < 1 + target.rows:
        return (
            "the last block must give one number per class, shape (batch, classes), but gives "
            f"{gives}; end the model with pooling or nn.Flatten() and an nn.Linear"
        )
    if target.shape == output:
        return (
            f"y has shape (samples, {', '.join(map(str, output))}), as the model's outputs: leave "
            "out the squeeze, or the index, at its end, which takes the outputs of a position away"
        )
    k, positions = (output[0], output[1:]) if maps else (output[-1], output[:-1])
    expected = output if target.rows and k > 1 else positions  # several numbers, or a label
    labels, expected = (", ".join(map(str, shape)) for shape in (target.shape, expected))
    return (
        f"y has shape (samples, {labels}), but the model gives {gives}: it needs a label for each "
        f"position, shape (samples, {expected})"
    )


def reduced(y: Tensor, grid: tuple[int, ...], target: Target, outputs: int) -> Tensor:
    """Labels for a block whose output has these positions: majority or mean of those in a cell.

    Examples:
        >>> y = torch.tensor([[1, 1, 2, 0, 0, 3]])
        >>> reduced(y, (2,), Target(positions=(6,)), 4)
        tensor([[1, 0]])
        >>> reduced(torch.tensor([[[1.0], [3.0]]]), (), Target(True, positions=(2,)), 1)
        tensor([[2.]])
    """
    positions = target.positions
    if positions == grid:
        return y
    if not grid:
        return reduced(y, (1,) * len(positions), target, outputs).flatten(1, len(positions))[:, 0]
    finer = tuple(max(n, g) for n, g in zip(positions, grid, strict=True))
    for dim, (n, g) in enumerate(zip(positions, finer, strict=True), 1):
        if g > n:  # the block has more positions: the nearest label
            y = y.index_select(dim, torch.arange(g, device=y.device) * n // g)
    if finer == grid:
        return y
    if y.is_floating_point():
        pool: Callable[..., Tensor] = _POOL[len(grid) - 1]
        return pool(y.movedim(-1, 1), grid).movedim(1, -1)
    cells = torch.zeros((), dtype=torch.long, device=y.device)
    for n, g in zip(finer, grid, strict=True):  # the number of the cell that a position is in
        cells = cells.unsqueeze(-1) * g + torch.arange(n, device=y.device) * g // n
    index = cells.flatten() * (outputs + 1) + (y.flatten(1) + 1).clamp(min=0)  # 0: no label
    counts = torch.zeros(len(y), prod(grid) * (outputs + 1), device=y.device)
    counts.scatter_add_(1, index, torch.ones((), device=y.device).expand(index.shape))
    counts = counts.view(len(y), prod(grid), outputs + 1)[..., 1:]
    winner = counts.max(-1).indices
    return torch.where(counts.sum(-1) > 0, winner, IGNORED).view(len(y), *grid)


def grid_of(shape: tuple[int, ...], maps: bool, target: Target, block: str) -> tuple[int, ...]:
    """The positions of a block's output that get labels; none if it has no positions."""
    if len(shape) < 2:
        return ()
    grid = shape[1:] if maps else shape[:-1]
    if len(grid) == len(target.positions):
        return grid
    if len(grid) == 1 and len(target.positions) == 2:  # tokens of a picture, row by row
        height, width = target.positions
        rows = round((grid[0] * height / width) ** 0.5)
        if rows and grid[0] % rows == 0 and rows * width == grid[0] // rows * height:
            return rows, grid[0] // rows
    sizes = (" x ".join(map(str, each)) for each in (grid, target.positions))
    raise TpsgdError(
        "{} gives {} positions, and there are labels for {}: they cannot be brought together: join "
        "the block with the next one, or end the model without a squeeze".format(block, *sizes)
    )
