"""`split`: from a model to the blocks that learn by themselves, and the words that choose where."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.units import columns, size
from tpsgd.nets.blocks import Block, footprints, shapes
from tpsgd.nets.cuts.balance import Blocks, Footprint, layers_per_block
from tpsgd.nets.cuts.leaves import blocks_of, is_chain, is_incomplete, is_tap, leaves_of_model
from tpsgd.nets.model_inputs import Called, ModelInputs, data_of
from tpsgd.nets.modes import attributes_restored, modes_restored
from tpsgd.nets.padded import Padded
from tpsgd.objectives import Place

AUTO, LAYERS = "auto", "layers"  # words for `blocks`
FEW = 8  # layers that are a block each under "auto"
AUTO_BLOCKS = 4  # of a net with more layers: see results/nets.json


@dataclass(frozen=True)
class Where:
    """The words that choose where a model is cut; see `split`."""

    blocks: Blocks | str | None = None
    split_points: Sequence[str] = ()
    no_split: Sequence[Any] = ()

    @property
    def chosen(self) -> bool:
        """Whether something else was asked for than a block for each layer."""
        return self.blocks is not None or bool(self.split_points)


class Cut(list[Block]):
    """The blocks of a model; printed, a table. With samples, it has their outputs and bytes."""

    outputs: Sequence[tuple[int, ...]] = ()  # the shape of one sample's output of each block
    stored: Sequence[int] = ()  # bytes for one sample's gradients in each block

    def __str__(self) -> str:
        head = ["block", "layers", "parameters", *(["output", "stored"] if self.outputs else [])]
        rows: list[Sequence[str]] = [head]
        for i, block in enumerate(self):
            count = sum(p.numel() for p in block.named_parameters().values())
            row = [str(i + 1), str(block), f"{count:,}"]
            if self.outputs:
                row += [" x ".join(map(str, self.outputs[i])), size(self.stored[i])]
            rows.append(row)
        note = "stored: what the gradients of one sample need in a block"
        return "\n".join([columns(rows), *([note] if self.outputs else [])])

    def measure(self, samples: Any) -> "Cut":
        """Fill in shapes and bytes, from a few samples."""
        prints = footprints(self, samples)
        with modes_restored(*(m for block in self for m in block.modules)):
            sizes = shapes(self, samples.clone())
        self.outputs = [size[Place.END] for size in sizes]
        self.stored = [sum(p.stored.values()) // len(samples) for p in prints]
        return self


def split(
    model: nn.Module,
    shape: Any = None,
    *,
    blocks: Blocks | str | None = None,
    split_points: Sequence[str] = (),
    no_split: Sequence[Any] = (),
) -> Cut:
    """Cut a model into blocks, which learn by themselves: gradients stop between them.

    An `nn.Sequential`, nested ones included, is cut between its layers. A model of any other class
    is traced by torch.fx and cut wherever one activation crosses; its inputs may be read by every
    block. A skip connection stays inside its block, and so does a module whose `forward` cannot be
    traced. If the model itself cannot be traced, it is cut along its longest list of layers. A
    depthwise convolution learns together with the layer after it.

    Args:
        model: any module; its parameters stay its own.
        shape: of one sample, or a few samples; for several inputs a dict or a tuple of them. The
            printed table then has the output and the bytes of each block, and a number of blocks is
            cut so that the memory of the largest one is smallest.
        blocks: how many blocks there shall be, from 1 (the whole net: backprop) to the number of
            layers; a list of the numbers of layers in each; "layers": a block per layer, depthwise
            convolutions too; or "auto": a block per layer up to 8 layers, else 4. Default: "auto"
            for classes, a block per layer for an `nn.Sequential`, depthwise convolutions joined.
        split_points: the names of modules that begin a block, in place of `blocks`.
        no_split: modules that stay inside one block: classes, their names, or names of modules.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [str(block) for block in split(model)]
        ['1: Linear + ReLU', '3: Linear']
        >>> print(split(model, (3, 3)))
        block  layers            parameters  output  stored
        1      1: Linear + ReLU  40          4       52 B
        2      3: Linear         10          2       16 B
        stored: what the gradients of one sample need in a block
        >>> [str(block) for block in split(model, blocks=1)]
        ['1-3: 2 x Linear']
    """
    samples = None if shape is None else samples_of(model, shape)
    layers = layers_of(model, samples, no_split)
    cut = Cut(joined(layers, counts_of(layers, Where(blocks, split_points, no_split), samples)))
    return cut if samples is None else cut.measure(samples)


def layers_of(model: nn.Module, samples: Any = None, no_split: Sequence[Any] = ()) -> list[Block]:
    """A model's layers with what is around them: of several layers where none can be cut off."""
    inputs: list[str | int] = [] if samples is None else [0]
    if isinstance(samples, ModelInputs):
        inputs = list(samples.tensors)
    of_class = not is_chain(model)
    layers = blocks_of(leaves_of_model(model, inputs, samples), of_class)
    if not layers:
        raise TpsgdError(f"{type(model).__name__} has no layer with parameters: nothing can learn")
    together = _sharing(layers, of_class) | _unsplit(model, layers, no_split)
    ends = [i for i in range(len(layers)) if i not in together]
    counts = [b - a for a, b in pairwise([-1, *ends])]
    return joined(layers, counts)


def counts_of(layers: list[Block], where: Where, samples: Any = None) -> list[int]:
    """How many of these smallest blocks to join into each block."""
    if where.split_points:
        if where.blocks is not None:
            raise TpsgdError("split_points say where blocks begin: leave blocks out")
        return _at_points(layers, where.split_points)
    if where.blocks == LAYERS:
        return [1] * len(layers)
    incomplete = [b.index for b in layers[:-1] if is_incomplete(b)]
    most, blocks = len(layers) - len(incomplete), where.blocks
    if blocks is None and layers[0].of_class:
        blocks = AUTO
    if blocks == AUTO:
        blocks = most if len(layers) <= FEW else min(AUTO_BLOCKS, most)
    if blocks in (None, most):
        ends = [i for i in range(len(layers)) if i not in incomplete]
        return [b - a for a, b in pairwise([-1, *ends])]
    alone = [b.index for b in layers if b.recurrent or is_tap(b.layer)]
    sizes: list[Footprint] = []
    known = isinstance(samples, (Tensor, ModelInputs))
    if known and isinstance(blocks, int) and 1 < blocks < most:
        sizes = footprints(layers, samples)
    return layers_per_block(blocks, len(layers), alone, sizes, incomplete)


def joined(layers: list[Block], counts: list[int]) -> list[Block]:
    """Blocks of these numbers of layers, from blocks of one layer each."""
    blocks: list[Block] = []
    remaining = iter(layers)
    backbone = next((i for i, block in enumerate(layers) if not is_tap(block.layer)), 0)
    for i, count in enumerate(counts):
        *earlier, last = (next(remaining) for _ in range(count))
        ends = (earlier[0] if earlier else last).ends[0], last.ends[1]
        name = last.name if ends[0] == ends[1] else "-".join(ends)
        prologue = [m for block in earlier for m in block.modules] + last.prologue
        inside = [layer for block in earlier for layer in block.layers] + last.earlier
        paths = tuple(path for block in (*earlier, last) for path in block.paths)
        changes = {"index": i, "name": name, "prologue": prologue, "earlier": inside}
        blocks.append(replace(last, **changes, key=max(0, i - backbone), paths=paths, ends=ends))
    return blocks


def _sharing(layers: list[Block], of_class: bool) -> set[int]:
    """Blocks after which there is no cut, because a later one has the same parameter."""
    owners: dict[int, Block] = {}
    together: set[int] = set()
    for block in layers:
        for name, p in block.named_parameters().items():
            owner = owners.setdefault(id(p), block)
            if owner is block:
                continue
            if not of_class:
                raise TpsgdError(
                    f"blocks {owner.index + 1} ({owner}) and {block.index + 1} ({block}) share a "
                    f"parameter ({name.partition('.')[2]}): it cannot belong to two blocks; give "
                    "each its own"
                )
            together |= set(range(owner.index, block.index))
    return together


def _unsplit(model: nn.Module, layers: list[Block], no_split: Sequence[Any]) -> set[int]:
    """Blocks after which there is no cut, because it would be inside a module that stays whole."""
    together: set[int] = set()
    if isinstance(no_split, str) or not isinstance(no_split, Iterable):
        raise TpsgdError("no_split must be a list of classes or names of modules")
    for what in no_split:
        paths = [path for path, m in model.named_modules() if path and _is_called(what, path, m)]
        if not paths:
            raise TpsgdError(f"no_split: {what!r} is no module of the model, nor a class of one")
        for path in paths:
            inside = [i for i, block in enumerate(layers) if _has(block, path)]
            together |= set(range(inside[0], inside[-1])) if inside else set()
    return together


def _is_called(what: Any, path: str, module: nn.Module) -> bool:
    kind = isinstance(what, type) and isinstance(module, what)
    return kind or what in (path, type(module).__name__)


def _has(block: Block, path: str) -> bool:
    return any(p == path or p.startswith(f"{path}.") for p in block.paths)


def _at_points(layers: list[Block], points: Sequence[str]) -> list[int]:
    """The numbers of layers of blocks that begin at these modules."""
    if not isinstance(points, Iterable):
        raise TpsgdError(f"split_points must be a list of names of modules, got {points!r}")
    starts = {0}
    names = [path for block in layers for path in block.paths]
    for point in [points] if isinstance(points, str) else points:
        block = next((b for b in layers if _has(b, point)), None)
        around = next((b for b in layers for p in b.paths if f"{point}.".startswith(f"{p}.")), None)
        if block is None and around is not None:
            raise TpsgdError(
                f"split_points: {point!r} lies inside block {around}, where more than one "
                "activation crosses, so that it cannot be cut"
            )
        if block is None:
            raise TpsgdError(f"split_points: no module {point!r}: {suggestion(point, names)}")
        place = next(k for k, p in enumerate(block.paths) if f"{p}.".startswith(f"{point}."))
        if place > block.paths.index(block.ends[0]):
            raise TpsgdError(
                f"split_points: a block begins with a layer, and {point!r} is no layer, or one "
                f"that learns together with those before it: {block}"
            )
        starts.add(block.index)
    ends = [*sorted(starts), len(layers)]
    return [b - a for a, b in pairwise(ends)]


def samples_of(model: nn.Module, shape: Any) -> Any:
    """A few samples of a shape, or those that were given."""
    shape = torch.from_numpy(shape) if isinstance(shape, np.ndarray) else shape
    if isinstance(shape, (Tensor, Padded, ModelInputs)):
        return shape
    if isinstance(shape, Mapping) or (isinstance(shape, tuple) and not _is_shape(shape)):
        values = shape.values() if isinstance(shape, Mapping) else shape
        names = shape if isinstance(shape, Mapping) else range(len(shape))
        each = (samples_of(model, value) for value in values)
        return ModelInputs.of(dict(zip(names, each, strict=True)))
    if not isinstance(shape, (tuple, list)) or not _is_shape(shape):
        raise TpsgdError(f"shape must be one sample's sizes, such as (1, 28, 28), got {shape!r}")
    tokens = len(shape) == 1 and any(isinstance(m, nn.Embedding) for m in model.modules())
    first = next(model.parameters(), torch.empty(0))
    dtype = torch.long if tokens else first.dtype
    return torch.zeros(2, *shape, dtype=dtype, device=first.device)


def _is_shape(values: Any) -> bool:
    return all(type(n) is int and n > 0 for n in values)


def verify(model: nn.Module, blocks: list[Block], samples: Any) -> None:
    """Refuse blocks that do not compute what the model computes; of a few samples."""
    modes = modes_restored(*(m for b in blocks for m in b.modules))
    with torch.no_grad(), attributes_restored(model), modes:
        model.eval()
        x: Any = samples.clone()
        plain = samples.contiguous() if isinstance(samples, Tensor) else samples
        devices = [samples.device] if samples.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # the model may draw random numbers
            torch.manual_seed(0)
            for block in blocks:
                block.train(False)
                x = block(x)
            Called(model)(plain.clone())  # another call shows what depends on the first
            torch.manual_seed(0)
            expected = Called(model)(plain.clone())
    if not torch.allclose(data_of(x).float(), expected.float(), rtol=1e-3, atol=1e-4):
        raise TpsgdError(
            f"the blocks of {type(model).__name__} do not compute what its forward does: name the "
            "module whose calls depend on anything but its inputs in no_split, or train the model "
            "whole with tpsgd.fit_backprop"
        )
