"""Exported C, compiled for this machine: as a program of its own, or called from Python."""

import ctypes
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd_export.to_c.names import name_in, renamed
from tpsgd_export.to_c.source import SEQUENCE_ERRORS

COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c99", "-O2", "-ffp-contract=off")
LONGEST_TRIAL = 600  # seconds
ANSWERS = (*SEQUENCE_ERRORS, "BAD_FLASH", "MORE")
TOO_LARGE = ", outputs too large for float32: scale the weights or the inputs down"
MEASURED = SEQUENCE_ERRORS.index("MEASURED")
PROBE = """
#include "net.h"
#ifdef NET_NUMBERS
#define OUTPUTS NET_NUMBERS
#else
#define OUTPUTS NET_CLASSES
#endif
const unsigned long probe_sizes[] = {sizeof(net_state), sizeof(net_arena), NET_PARAMS,
    OUTPUTS, NET_BATCH, NET_BLOCKS, NET_RECORD_BYTES, NET_RAM_BYTES, NET_INPUT};
"""
_P, _LABEL, _RATE, _MASK = ctypes.c_void_p, ctypes.c_uint16, ctypes.c_float, ctypes.c_uint32
SIGNATURES = {
    "net_scale": [_P],
    "net_forward": [_P, _P, _P, _P],
    "net_step": [_P, _P, _P, _P, _RATE, _MASK, _P],
    "net_look": [_P, _P, _P],
    "net_logits": [_P, _P, _P],
    "net_read": [_P, _P, _P, _LABEL, _MASK],
    "net_finish": [_P, _P, _LABEL, _RATE, _MASK, _P],
}


def compiler() -> list[str] | None:
    """The command of a C compiler on this machine, if there is one."""
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def compiled_library(
    folder: Path, command: Sequence[str] | None = None, flags: Sequence[str] = FLAGS
) -> ctypes.CDLL:
    """The programs of a folder, compiled and loaded."""
    with tempfile.TemporaryDirectory() as place:  # a system loads one library of a name only
        library = Path(place, "net.so")
        _compile(folder, library, [*flags, "-shared", "-fPIC"], command)
        return ctypes.CDLL(str(library))  # which stays in memory


def run_program(
    texts: Mapping[str, str], main: str, content: bytes, flags: Sequence[str] = FLAGS
) -> bytes:
    """Compile the files of a net with a `main`, and run them in a process of their own.

    The process reads `content` from the file that is its first argument, and writes what is
    returned into its second; its exit status is an error of the net. A process that dies is an
    error here, and nothing more.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        program, source, target = (folder / name for name in ("trial", "input", "output"))
        for name, text in {**texts, "probe.c": renamed(main, name_in(texts))}.items():
            (folder / name).write_text(text, encoding="utf-8")
        _compile(folder, program, flags)
        source.write_bytes(content)
        command = list(map(str, (program, source, target)))
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST_TRIAL
            ).returncode
        except subprocess.TimeoutExpired:
            raise _died(f"took more than {LONGEST_TRIAL} seconds") from None
        if status < 0:
            raise _died(f"was ended by {signal.Signals(-status).name}")
        if status >= len(ANSWERS):
            raise _died(f"ended with status {status}")
        _raise(status)
        return target.read_bytes()


def _died(end: str) -> TpsgdError:
    return TpsgdError(
        f"the exported program {end} in its trial run, and nothing was written: please report it, "
        "with the model"
    )


def _compile(
    folder: Path, target: Path, flags: Sequence[str], command: Sequence[str] | None = None
) -> None:
    """Compile the programs of a folder."""
    command = command or compiler()
    if command is None:
        raise TpsgdError("there is no C compiler here: install gcc or clang, or pip's ziglang")
    sources = map(str, sorted(folder.glob("*.c")))
    done = subprocess.run(
        [*command, *flags, *sources, "-o", str(target)], capture_output=True, text=True
    )
    if done.returncode:
        raise TpsgdError(f"the C compiler refused the net: {done.stderr.strip()[:500]}")


class _Functions:
    """The functions of a net, called as those of a net called `net` are."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __getattr__(self, function: str) -> Any:
        return getattr(self._library, renamed(function, self._name))


class CompiledNet:
    """A net in C with its state and its arena.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> import tpsgd
        >>> folder = tempfile.mkdtemp()
        >>> _ = tpsgd.export.c(nn.Linear(4, 2), folder, shape=(4,))
        >>> CompiledNet(folder).forward(torch.zeros(4)).shape
        torch.Size([2])
    """

    def __init__(
        self, folder: str | Path, command: Sequence[str] | None = None, flags: Sequence[str] = FLAGS
    ) -> None:
        if not Path(folder).is_dir():
            raise TpsgdError(f"there is no folder {folder}: export a net into it first")
        prefix = name_in(path.name for path in Path(folder).glob("*tpsgd.h"))
        with tempfile.TemporaryDirectory() as copy:
            for file in ("net.h", "net.c", "tpsgd.h"):
                shutil.copy(Path(folder, renamed(file, prefix)), copy)
            if f"{prefix}_quantise" in Path(copy, f"{prefix}.h").read_text():
                raise TpsgdError(f"{folder} has a net of integers: CompiledNet runs floats only")
            Path(copy, "probe.c").write_text(renamed(PROBE, prefix))
            library = compiled_library(Path(copy), command, flags)
        self.net: Any = _Functions(library, prefix)
        sizes = list((ctypes.c_ulong * 9).in_dll(library, "probe_sizes"))
        state, arena, self.params, self.capacity, self.batch, self.blocks, *sizes = sizes
        self.record_bytes, self.ram, self.inputs = sizes
        for name, types in SIGNATURES.items():
            if hasattr(self.net, name):
                getattr(self.net, name).argtypes = types
        self.of_numbers = not hasattr(self.net, "net_classes")
        self.state, self.arena = (ctypes.create_string_buffer(n) for n in (state, arena))
        self.net.net_begin(self.state)

    @property
    def weights(self) -> Tensor:
        """A copy of the weights that learn."""
        return torch.frombuffer(self.state, dtype=torch.float32)[: self.params].clone()

    @property
    def classes(self) -> int:
        """How many classes there are now; of a net that learns numbers, how many of these."""
        return self.capacity if self.of_numbers else self.net.net_classes(self.state)

    def add_class(self) -> None:
        """Make room for a new class."""
        _raise(self.net.net_add_class(self.state))

    def scale(self, x: Any) -> Tensor:
        """A sample, or a time step, as it was measured, in the form that the model takes."""
        if not hasattr(self.net, "net_scale"):
            raise TpsgdError("the net was exported without a scaling of its inputs")
        x = self._numbers(x, self.inputs).clone()
        self.net.net_scale(x.data_ptr())
        return x

    def forward(self, x: Any) -> Tensor:
        """The logits, or the numbers, of one sample."""
        x, logits = self._numbers(x, self.inputs), torch.zeros(self.classes, dtype=torch.float32)
        _raise(self.net.net_forward(self.state, self.arena, x.data_ptr(), logits.data_ptr()))
        return logits

    def step(self, x: Any, labels: Any, lr: float, blocks: int = -1) -> Tensor:
        """Learn from a batch; the losses of the blocks come back."""
        x, labels = self._numbers(x, self.batch * self.inputs), self._labels(labels)
        loss = torch.zeros(self.blocks, dtype=torch.float32)
        arguments = x.data_ptr(), labels.data_ptr(), lr, self._mask(blocks), loss.data_ptr()
        _raise(self.net.net_step(self.state, self.arena, *arguments))
        return loss

    def _numbers(self, x: Any, count: int) -> Tensor:
        """Numbers as the C reads them; another count of them is refused."""
        numbers = _as_tensor(x, torch.float32, "x")
        if numbers.numel() != count:
            raise TpsgdError(f"x must have {count:,} numbers, got {numbers.numel():,}")
        return numbers

    def _labels(self, labels: Any) -> Tensor:
        """A label for each sample of a batch: a class, or numbers in their order."""
        if self.of_numbers:
            numbers = _as_tensor(labels, torch.float32, "labels").flatten()
            if len(numbers) != self.batch * self.capacity:
                raise TpsgdError(
                    f"labels must have {self.capacity} numbers for each of {self.batch} samples, "
                    f"got {len(numbers)}"
                )
            return numbers
        values = _as_tensor(labels, torch.int64, "labels").flatten()
        if len(values) != self.batch or not ((values >= 0) & (values < 1 << 16)).all():
            raise TpsgdError(
                f"labels must have {self.batch} whole numbers from 0 on, got {values.tolist()[:8]}"
            )
        return values.to(torch.uint16)

    def _mask(self, blocks: int) -> int:
        """The blocks that learn, a bit each; below 0, all of them."""
        return (1 << self.blocks) - 1 if blocks < 0 else blocks

    def save(self) -> bytes:
        """The weights as a record."""
        record = ctypes.create_string_buffer(self.record_bytes)
        self.net.net_save(self.state, record)
        return record.raw

    def load(self, record: bytes) -> None:
        """The weights of a record."""
        if len(record) != self.record_bytes:
            raise TpsgdError(
                f"a record of this net has {self.record_bytes:,} bytes, got {len(record):,}"
            )
        _raise(self.net.net_load(self.state, bytes(record)))


class CompiledReader(CompiledNet):
    """A recurrent net in C, which reads sequences `(steps, inputs)` of any length."""

    def forward(self, x: Any) -> Tensor:
        """The logits after a sequence."""
        x, logits = self._sequence(x), torch.zeros(self.classes, dtype=torch.float32)
        self.net.net_start(self.arena)
        for time_step in _addresses(x):
            _raise(self.net.net_look(self.state, self.arena, time_step))
        _raise(self.net.net_logits(self.state, self.arena, logits.data_ptr()))
        return logits

    def step(self, x: Any, labels: Any, lr: float, blocks: int = -1) -> Tensor:
        """Learn from one sequence; the losses of the blocks come back.

        A sequence that was measured is read again, so that the weights become those of `fit`.
        """
        x, loss = self._sequence(x), torch.zeros(self.blocks, dtype=torch.float32)
        label, mask = int(self._labels(labels)), self._mask(blocks)
        state, arena = self.state, self.arena
        answer = MEASURED
        while answer == MEASURED:
            self.net.net_start(arena)
            for time_step in _addresses(x):
                _raise(self.net.net_read(state, arena, time_step, label, mask))
            answer = self.net.net_finish(state, arena, label, lr, mask, loss.data_ptr())
        _raise(answer)
        return loss

    def _sequence(self, x: Any) -> Tensor:
        """The time steps of a sequence as rows."""
        numbers = _as_tensor(x, torch.float32, "x")
        if not numbers.numel() or numbers.numel() % self.inputs:
            raise TpsgdError(
                f"x must have {self.inputs:,} numbers for each time step, got shape "
                f"{tuple(numbers.shape)}"
            )
        return numbers.reshape(-1, self.inputs)


def _addresses(rows: Tensor) -> range:
    return range(rows.data_ptr(), rows.data_ptr() + rows.nbytes, rows[0].nbytes)


def _as_tensor(values: Any, dtype: torch.dtype, name: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu().to(dtype).contiguous()
    except (TypeError, ValueError, RuntimeError):
        raise TpsgdError(f"{name} must be a tensor or an array of numbers") from None


def _raise(code: int) -> None:
    if code:
        name = ANSWERS[code]
        raise TpsgdError(
            f"the exported net refused: NET_{name}{TOO_LARGE if name == 'DIVERGED' else ''}"
        )
