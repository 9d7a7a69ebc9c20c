"""What an export has written, and how it was checked."""

from dataclasses import dataclass
from pathlib import Path

from tpsgd.common.units import size
from tpsgd_export.to_c.memory import MemoryMap


@dataclass(frozen=True)
class Exported:
    """The files of an export.

    Args:
        paths: of the files, the main one first.
        checked: in one sentence, how what was written was compared with `tpsgd.fit`.
        nodes: of an ONNX graph, those of inner graphs included.
        memory: of a C program, in bytes.
        note: what a caller has to do with inputs, if anything.
    """

    paths: tuple[Path, ...]
    checked: str
    nodes: int = 0
    memory: MemoryMap | None = None
    note: str = ""

    @property
    def bytes(self) -> int:
        """The size of the main file."""
        return self.paths[0].stat().st_size

    def __str__(self) -> str:
        lines = [f"{path}  {size(path.stat().st_size)}" for path in self.paths]
        table = [str(self.memory), ""] if self.memory else []
        notes = [self.note] if self.note else []
        return "\n".join([*table, *lines, *notes, self.checked])
