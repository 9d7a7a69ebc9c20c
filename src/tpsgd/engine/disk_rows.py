"""Samples in a file instead of in memory, read a batch at a time."""

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.maths.memory_format import channels_last, like
from tpsgd.units import size


def default_folder() -> Path:
    """Where temporary files go: a disk, which the usual place may not be."""
    place = Path("/var/tmp")
    if "TMPDIR" in os.environ or not os.access(place, os.W_OK):
        return Path(tempfile.gettempdir())
    return place


class Stored:
    """Rows of one shape in a nameless temporary file, which is gone when nobody needs it.

    They are read, not mapped, so that they do not count as the process's memory.
    """

    def __init__(self, sample: Any, samples: int, folder: Path | str) -> None:
        self.sample, self.samples = sample[:1].cpu(), samples
        self.device, self.dtype = torch.device("cpu"), sample.dtype
        self.maps = channels_last(self.sample)
        folder = Path(folder).expanduser()
        try:
            free = shutil.disk_usage(folder).free
            if self.nbytes > free:
                raise TpsgdError(self._no_room(folder, f"{size(free)} are free"))
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or str(error)
            raise TpsgdError(f"inputs cannot be kept in {folder}: {reason}") from None
        self.folder = folder
        weakref.finalize(self, self.file.close)

    def _no_room(self, folder: Path, why: str) -> str:
        return (
            f"a block's inputs need {size(self.nbytes)} in {folder}, and {why}; name another "
            "folder with reuse=FOLDER, or compute them again with reuse=False"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were a tensor."""
        return (self.samples, *self.sample.shape[1:])

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.samples * self.sample.nbytes

    def __len__(self) -> int:
        return self.samples

    def first(self, samples: int) -> "Stored":
        """Itself, with the rows that were written."""
        self.samples = samples
        return self

    def write(self, start: int, rows: Tensor) -> None:
        """Put rows at their place."""
        try:
            self.file.seek(start * self.sample.nbytes)
            left = memoryview(_bytes(rows.cpu(), self.maps)).cast("B")
            while left:
                left = left[self.file.write(left) :]
        except OSError as error:
            raise TpsgdError(self._no_room(self.folder, error.strerror or str(error))) from None

    def rows(self, index: Tensor) -> Tensor:
        """The rows at these indices."""
        found = like(self.sample, len(index))
        each = memoryview(_bytes(found, self.maps)).cast("B")
        step = self.sample.nbytes
        for i, row in enumerate(index.tolist()):
            self.file.seek(row * step)
            self.file.readinto(each[i * step : (i + 1) * step])  # type: ignore[attr-defined]
        return found


def _bytes(rows: Tensor, maps: bool) -> bytes:
    """The numbers of rows as bytes, feature maps with their channels last."""
    flat = rows.permute(0, 2, 3, 1) if maps else rows
    return flat.contiguous().view(-1).view(torch.uint8).numpy()  # type: ignore[return-value]
