"""Sequences of different lengths in one tensor, padded at their ends."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence, pad_sequence

from tpsgd.errors import TpsgdError


class Padded:
    """Sequences `(samples, longest, ...)` and their lengths.

    Steps after the end of a sequence are padding: no state, loss or gradient depends on them (they
    must still be finite numbers, or valid tokens, such as zeros). `fit`, `evaluate` and `Recurrent`
    take it instead of a tensor of sequences. The lengths stay on the CPU, where the loop over time
    reads them.

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

    def __repr__(self) -> str:
        return f"Padded({tuple(self.shape)}, {self.dtype})"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> "Padded":
        lengths = self.lengths[index.cpu() if isinstance(index, Tensor) else index]
        return Padded(self.data[index], lengths)

    @property
    def shape(self) -> torch.Size:
        """Of the padded tensor."""
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the padded tensor."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Of the padded tensor."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Of the padded tensor and the lengths."""
        return self.data.nbytes + self.lengths.nbytes

    def dim(self) -> int:
        """The padded tensor's dimensions."""
        return self.data.dim()

    def is_floating_point(self) -> bool:
        """Whether the padded tensor holds real numbers."""
        return self.data.is_floating_point()

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> "Padded":
        """On another device, in another number format."""
        return Padded(self.data.to(device, dtype), self.lengths)

    def detach(self) -> "Padded":
        """Without a graph behind it."""
        return Padded(self.data.detach(), self.lengths)

    def longest_first(self) -> Tensor:
        """The order in which no sequence is longer than the one before it."""
        return self.lengths.argsort(descending=True, stable=True)


def through(module: Any, x: Any) -> Any:
    """A function applied to x; to every step of padded sequences, unless it reads sequences."""
    if not isinstance(x, Padded):
        return module(x)
    modules = module.modules() if isinstance(module, nn.Module) else ()
    if any(hasattr(m, "reads_sequences") for m in modules):
        return module(x)
    return Padded(module(x.data), x.lengths)
