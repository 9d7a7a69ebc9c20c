"""Rows of numbers in a temporary file: inputs of a block that are kept outside of memory."""

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.maths.kernels.memory_format import channels_last, like


class DiskRows:
    """Rows of the same shape in a nameless temporary file, which is deleted with this object.

    They are read, not mapped, so that they do not count as memory of the process. `samples` may be
    lowered to the number of rows that were written.
    """

    def __init__(self, sample: Any, samples: int, folder: Path | str) -> None:
        self.sample, self.samples = sample[:1].cpu(), samples
        self.device, self.dtype = torch.device("cpu"), sample.dtype
        self.folder = Path(folder).expanduser()
        try:
            free = shutil.disk_usage(self.folder).free
            if self.nbytes > free:
                raise self._no_room(f"{size(free)} are free")
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or str(error)
            raise TpsgdError(f"inputs cannot be kept in {self.folder}: {reason}") from None
        weakref.finalize(self, self.file.close)

    def _no_room(self, reason: str) -> TpsgdError:
        return TpsgdError(
            f"a block's inputs need {size(self.nbytes)} in {self.folder}, and {reason}; name "
            "another folder with memory=tpsgd.Memory(reuse=FOLDER), or recompute them with "
            "reuse=False"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.samples, *self.sample.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.samples * self.sample.nbytes

    def __len__(self) -> int:
        return self.samples

    def write(self, start: int, rows: Tensor) -> None:
        try:
            self.file.seek(start * self.sample.nbytes)
            remaining = self._bytes(rows.cpu())
            while remaining:
                remaining = remaining[self.file.write(remaining) :]
        except OSError as error:
            raise self._no_room(error.strerror or str(error)) from None

    def __getitem__(self, index: Tensor) -> Tensor:
        rows = like(self.sample, len(index))
        content, step = self._bytes(rows), self.sample.nbytes
        for i, number in enumerate(index.tolist()):
            self.file.seek(number * step)
            self.file.readinto(content[i * step : (i + 1) * step])  # type: ignore[attr-defined]
        return rows

    def _bytes(self, rows: Tensor) -> memoryview:
        """The memory of rows, feature maps with their channels last; of a copy, if need be."""
        flat = rows.permute(0, 2, 3, 1) if channels_last(self.sample) else rows
        numbers: Any = flat.contiguous().view(-1).view(torch.uint8).numpy()
        return memoryview(numbers)
