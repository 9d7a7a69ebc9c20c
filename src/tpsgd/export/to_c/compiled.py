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

from tpsgd.errors import TpsgdError

COMPILERS = ("cc", "gcc", "clang")
ERRORS = (
    *("", "BAD_INPUT", "BAD_RATE", "BAD_LABEL", "DIVERGED", "NO_SPACE", "BAD_RECORD"),
    *("MEASURED", "BAD_ORDER"),
)
DIVERGED = ERRORS.index("DIVERGED")
TOO_LARGE = ", outputs too large for float32: scale the weights or the inputs down"
MEASURED = ERRORS.index("MEASURED")
FLAGS = ("-std=c99", "-O2", "-ffp-contract=off")
LONGEST_TRIAL = 600  # seconds
PROBE = """
#include "net.h"
const unsigned long probe_sizes[] = {sizeof(net_state), sizeof(net_arena), NET_PARAMS,
    NET_CLASSES, NET_BATCH, NET_BLOCKS, NET_RECORD_BYTES, NET_RAM_BYTES, NET_INPUT};
"""


def compiler() -> list[str] | None:
    """The command of a C compiler on this machine, if there is one."""
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    return [sys.executable, "-m", "ziglang", "cc"] if find_spec("ziglang") else None


def compiled_library(
    folder: Path, command: Sequence[str] | None = None, flags: Sequence[str] = FLAGS
) -> ctypes.CDLL:
    """`net.c` and `probe.c` of a folder, compiled and loaded."""
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
        for name, text in {**texts, "probe.c": main}.items():
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
        if status >= len(ERRORS):
            raise _died(f"ended with status {status}")
        _raise(status)
        return target.read_bytes()


def _died(how: str) -> TpsgdError:
    return TpsgdError(
        f"the exported program {how} in its trial run, and nothing was written: please report it, "
        "with the model"
    )


def _compile(
    folder: Path, target: Path, flags: Sequence[str], command: Sequence[str] | None = None
) -> None:
    """Compile `net.c` and `probe.c` of a folder."""
    command = command or compiler()
    if command is None:
        raise TpsgdError("there is no C compiler here: install gcc or clang, or pip's ziglang")
    sources = [str(folder / name) for name in ("net.c", "probe.c")]
    done = subprocess.run(
        [*command, *flags, *sources, "-o", str(target)], capture_output=True, text=True
    )
    if done.returncode:
        raise TpsgdError(f"the C compiler refused the net: {done.stderr.strip()[:500]}")


class CompiledNet:
    """A net in C with its state and its arena.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> import tpsgd.export
        >>> folder = tempfile.mkdtemp()
        >>> _ = tpsgd.export.c(nn.Linear(4, 2), folder, shape=(4,))
        >>> CompiledNet(folder).forward(torch.zeros(4)).shape
        torch.Size([2])
    """

    def __init__(
        self, folder: str | Path, command: Sequence[str] | None = None, flags: Sequence[str] = FLAGS
    ) -> None:
        with tempfile.TemporaryDirectory() as copy:
            for name in ("net.h", "net.c", "tpsgd.h"):
                shutil.copy(Path(folder, name), copy)
            if "net_quantise" in Path(copy, "net.h").read_text():
                raise TpsgdError(f"{folder} has a net of integers: CompiledNet runs floats only")
            Path(copy, "probe.c").write_text(PROBE)
            self.net: Any = compiled_library(Path(copy), command, flags)
        sizes = list((ctypes.c_ulong * 9).in_dll(self.net, "probe_sizes"))
        state, arena, self.params, self.capacity, self.batch, self.blocks, *sizes = sizes
        record, self.ram, self.inputs = sizes
        self._declare()
        self.state, self.arena = (ctypes.create_string_buffer(n) for n in (state, arena))
        self.record_bytes = record
        self.net.net_begin(self.state)

    def _declare(self) -> None:
        """Tell ctypes of arguments that are not whole numbers or pointers."""
        pointer = ctypes.c_void_p
        self.net.net_step.argtypes = [*[pointer] * 4, ctypes.c_float, ctypes.c_uint32, pointer]

    @property
    def weights(self) -> Tensor:
        """A copy of the weights that learn."""
        return torch.frombuffer(self.state, dtype=torch.float32)[: self.params].clone()

    @property
    def classes(self) -> int:
        """How many classes there are now."""
        return self.net.net_classes(self.state)

    def add_class(self) -> None:
        """Make room for a new class."""
        _raise(self.net.net_add_class(self.state))

    def scale(self, x: Any) -> Tensor:
        """A sample, or a time step, as it was measured, in the form that the model takes."""
        if not hasattr(self.net, "net_scale"):
            raise TpsgdError("the net was exported without a scaling of its inputs")
        x = self._numbers(x, self.inputs).clone()
        self.net.net_scale(_pointer(x))
        return x

    def forward(self, x: Any) -> Tensor:
        """The logits of one sample."""
        x, logits = self._numbers(x, self.inputs), _zeros(self.classes)
        _raise(self.net.net_forward(self.state, self.arena, _pointer(x), _pointer(logits)))
        return logits

    def step(self, x: Any, labels: Any, lr: float, blocks: int = -1) -> Tensor:
        """Learn from a batch; the losses of the blocks come back."""
        x, loss = self._numbers(x, self.batch * self.inputs), _zeros(self.blocks)
        labels = self._labels(labels).to(torch.uint16).contiguous()
        mask = (1 << self.blocks) - 1 if blocks < 0 else blocks
        arguments = _pointer(x), _pointer(labels), lr, mask, _pointer(loss)
        _raise(self.net.net_step(self.state, self.arena, *arguments))
        return loss

    def _numbers(self, x: Any, count: int) -> Tensor:
        """Numbers as the C reads them; another count of them is refused."""
        numbers = _as_tensor(x, torch.float32, "x")
        if numbers.numel() != count:
            raise TpsgdError(f"x must have {count:,} numbers, got {numbers.numel():,}")
        return numbers.contiguous()

    def _labels(self, labels: Any) -> Tensor:
        """A label for each sample of a batch."""
        values = _as_tensor(labels, torch.int64, "labels").flatten()
        if len(values) != self.batch or not ((values >= 0) & (values < 1 << 16)).all():
            raise TpsgdError(
                f"labels must have {self.batch} whole numbers from 0 on, got {values.tolist()[:8]}"
            )
        return values.to(torch.int32)

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

    def _declare(self) -> None:
        pointer, blocks = ctypes.c_void_p, ctypes.c_uint32
        self.net.net_finish.argtypes = [
            pointer, pointer, ctypes.c_uint16, ctypes.c_float, blocks, pointer,
        ]  # fmt: skip
        self.net.net_read.argtypes = [pointer, pointer, pointer, ctypes.c_uint16, blocks]
        self.net.net_look.argtypes = [pointer] * 3

    def forward(self, x: Any) -> Tensor:
        """The logits after a sequence."""
        x, logits = self._sequence(x), _zeros(self.classes)
        state, arena, look = self.state, self.arena, self.net.net_look
        self.net.net_start(arena)
        for at in _steps(x):
            _raise(look(state, arena, at))
        _raise(self.net.net_logits(state, arena, _pointer(logits)))
        return logits

    def step(self, x: Any, labels: Any, lr: float, blocks: int = -1) -> Tensor:
        """Learn from one sequence; the losses of the blocks come back.

        A sequence that was measured is read again, so that the weights become those of `fit`.
        """
        x, loss = self._sequence(x), _zeros(self.blocks)
        label, mask = int(self._labels(labels)), (1 << self.blocks) - 1 if blocks < 0 else blocks
        state, arena, read = self.state, self.arena, self.net.net_read
        answer = MEASURED
        while answer == MEASURED:
            self.net.net_start(arena)
            for at in _steps(x):
                _raise(read(state, arena, at, label, mask))
            answer = self.net.net_finish(state, arena, label, lr, mask, _pointer(loss))
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
        return numbers.reshape(-1, self.inputs).contiguous()


def _as_tensor(values: Any, dtype: torch.dtype, name: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu().to(dtype)
    except (TypeError, ValueError, RuntimeError):
        raise TpsgdError(f"{name} must be a tensor or an array of numbers") from None


def _zeros(count: int) -> Tensor:
    """Numbers for the C to write."""
    return torch.zeros(count, dtype=torch.float32)


def _steps(x: Tensor) -> range:
    """The addresses of the time steps of a sequence."""
    first, size = x.data_ptr(), x.element_size() * x.shape[-1]
    return range(first, first + size * len(x), size)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _raise(code: int) -> None:
    if code:
        reason = TOO_LARGE if code == DIVERGED else ""
        raise TpsgdError(f"the exported net refused: NET_{ERRORS[code]}{reason}")
