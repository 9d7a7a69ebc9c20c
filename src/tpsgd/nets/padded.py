"""Sequences, also of different lengths in one padded tensor, and layers that read them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence, pad_sequence

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.model_inputs import ModelInputs


class Padded:
    """Sequences `(samples, longest, ...)` and their lengths.

    Steps after the end of a sequence are padding: no state, loss or gradient depends on them
    (tokens there must still be valid ones, such as zeros). `fit`, `evaluate` and `Recurrent` take
    it instead of a tensor of sequences. The lengths stay on the CPU, where the loop over time reads
    them.

    Examples:
        >>> x = Padded.of([torch.ones(2, 3), torch.ones(5, 3)])
        >>> x.data.shape, x.lengths.tolist()
        (torch.Size([2, 5, 3]), [2, 5])
    """

    def __init__(self, data: Tensor, lengths: Any) -> None:
        lengths = torch.as_tensor(lengths)
        if data.dim() < 2 or lengths.shape != data.shape[:1]:
            raise TpsgdError(
                "Padded takes sequences (samples, longest, ...) and one length per sample, got "
                f"shapes {tuple(data.shape)} and {tuple(lengths.shape)}"
            )
        if lengths.is_floating_point() or lengths.dtype is torch.bool:
            raise TpsgdError(f"lengths must be whole numbers, got {lengths.dtype}")
        self.data, self.lengths = data, lengths.cpu()

    @classmethod
    def of(cls, sequences: "PackedSequence | Sequence[Any]") -> "Padded":
        """From torch's packed sequences, or a list of arrays `(length, ...)`."""
        if isinstance(sequences, PackedSequence):
            return cls(*pad_packed_sequence(sequences, batch_first=True)).checked()
        arrays = [torch.as_tensor(s) for s in sequences]
        if not arrays or any(not a.dim() or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
            raise TpsgdError("sequences must be arrays (length, ...) with the same features each")
        lengths = torch.tensor([len(a) for a in arrays])
        return cls(pad_sequence(arrays, batch_first=True), lengths).checked()

    @classmethod
    def masked(cls, data: Any, mask: Any) -> "Padded":
        """From a mask `(samples, longest)` that is true up to the end of each sequence."""
        data, mask = torch.as_tensor(data), torch.as_tensor(mask)
        if mask.shape != data.shape[:2]:
            raise TpsgdError(
                f"the mask's shape must be {tuple(data.shape[:2])}, got {tuple(mask.shape)}"
            )
        mask = mask.bool()
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise TpsgdError("a mask must be true up to a sequence's end and false after it")
        return cls(data, mask.sum(1)).checked()

    def checked(self) -> "Padded":
        """Itself, or an error if a length is out of range."""
        if not len(self):
            return self
        low, high = int(self.lengths.min()), int(self.lengths.max())
        if low < 1 or high > self.data.shape[1]:
            raise TpsgdError(
                f"a sequence's length must be from 1 to {self.data.shape[1]}, got "
                f"{low if low < 1 else high}"
            )
        return self

    def with_finite_padding(self) -> "Padded":
        """Itself, or with zeros as padding where the padding has NaN or infinity."""
        if not self.is_floating_point() or bool(torch.isfinite(self.data.sum())):
            return self
        steps = torch.arange(self.data.shape[1], device=self.device)
        is_padding = steps >= self.lengths.to(self.device).unsqueeze(1)
        is_padding = is_padding.view(*is_padding.shape, *[1] * (self.dim() - 2))
        return Padded(self.data.masked_fill(is_padding, 0), self.lengths)

    def __repr__(self) -> str:
        return f"Padded({tuple(self.shape)}, {self.dtype})"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> "Padded":
        lengths = self.lengths[index.cpu() if isinstance(index, Tensor) else index]
        return Padded(self.data[index], lengths)

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.lengths.nbytes

    def dim(self) -> int:
        return self.data.dim()

    def is_floating_point(self) -> bool:
        return self.data.is_floating_point()

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Padded":
        return Padded(self.data.to(device, dtype), self.lengths)

    def detach(self) -> "Padded":
        return Padded(self.data.detach(), self.lengths)

    def longest_first(self) -> Tensor:
        """The order in which no sequence is longer than the one before it."""
        return self.lengths.argsort(descending=True, stable=True)


def as_pixels(x: Tensor | Padded, numbers: Any) -> Any:
    """`numbers`, a copy of x in another number format: if x is of bytes, divided by 255.

    Bytes that are no tokens are pixels, wherever samples are read.
    """
    if x.dtype is torch.uint8:
        (numbers.data if isinstance(numbers, Padded) else numbers).div_(255)
    return numbers


def through(module: Any, x: Any) -> Any:
    """A function applied to x; to every step of padded sequences, unless it reads sequences."""
    if isinstance(x, ModelInputs):
        return x.through(module)
    if not isinstance(x, Padded):
        return module(x)
    modules = module.modules() if isinstance(module, nn.Module) else ()
    if any(hasattr(m, "reads_sequences") for m in modules):
        return module(x)
    return Padded(module(x.data), x.lengths)


Sequences = Tensor | Padded


class SequenceLayer(nn.Module):
    """A layer that reads sequences `(batch, steps, inputs)`, or tokens `(batch, steps)`.

    With `sequence` it returns `(batch, steps, units)`, otherwise `(batch, units)`. `inputs` are the
    features of a step, or the number of tokens; `hidden` are the units of one direction.
    """

    reads_sequences = True
    sequence: bool = False

    @property
    def inputs(self) -> int:
        raise NotImplementedError

    @property
    def hidden(self) -> int:
        raise NotImplementedError

    @property
    def bidirectional(self) -> bool:
        return False


def as_sequences(x: Any, layer: SequenceLayer) -> Sequences:
    """The input of a recurrent layer as `(batch, steps, inputs)` or tokens `(batch, steps)`."""
    if isinstance(x, (PackedSequence, list)):
        x = Padded.of(x)
    if isinstance(x, Padded):
        return Padded(as_sequences(x.data, layer), x.lengths)  # type: ignore[arg-type]
    x = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    integers = not x.is_floating_point()
    if x.dim() == 2 and integers and layer.inputs > 1 and x.shape[1]:
        return x.long()
    if x.dim() == 2 and layer.inputs == 1:
        x = x.unsqueeze(-1)
    if x.dim() != 3 or x.shape[-1] != layer.inputs or not x.shape[1]:
        raise TpsgdError(
            f"Recurrent({layer.inputs}, {layer.hidden}) takes (batch, steps, {layer.inputs})"
            + (" or whole numbers (batch, steps)" if layer.inputs > 1 else "")
            + f", got {tuple(x.shape)}"
            + (_HINT if x.dim() == 2 and not integers else "")
        )
    return as_pixels(x, x.to(next(layer.parameters()).dtype)) if integers else x


_HINT = "; the layer before it needs sequence=True, or, if this is one sequence, give x[None]"


def aligned_at_end(x: Padded) -> Tensor:
    """The sequences of a padded batch with their padding, zeros, before them.

    Examples:
        >>> aligned_at_end(Padded(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1]))
        tensor([[1, 2, 3],
                [0, 0, 4]])
    """
    longest = int(x.lengths.max())
    data = x.data.narrow(1, 0, longest)
    return _moved(data, torch.arange(longest) - (longest - x.lengths).unsqueeze(1))


def aligned_at_start(data: Tensor, lengths: Tensor, steps: int) -> Tensor:
    """The reverse of `aligned_at_end`: sequences, and zeros after them up to `steps`."""
    source = torch.arange(steps) + (data.shape[1] - lengths).unsqueeze(1)
    return _moved(data, source.where(torch.arange(steps) < lengths.unsqueeze(1), -1))


def _moved(data: Tensor, source: Tensor) -> Tensor:
    """Step `source[row, t]` of each row at t; zeros where it is negative."""
    source = source.to(data.device)
    rows = torch.arange(len(data), device=data.device).unsqueeze(1)
    moved = data[rows, source.clamp(min=0)]
    return moved.masked_fill(source.view(*source.shape, *[1] * (data.dim() - 2)) < 0, 0)


def steps_inside(lengths: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    """Which steps `(stop - start, rows)` belong to sequences that end together."""
    steps = torch.arange(start, stop).unsqueeze(1)
    return (steps >= lengths.max() - lengths).to(device)
