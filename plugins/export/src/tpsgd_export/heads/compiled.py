"""The C of a head, compiled for this machine and called from Python."""

import ctypes
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd_export.heads.source import encoder_name
from tpsgd_export.to_c.compiled import FLAGS, compiler

ERRORS = ("OK", "BAD_INPUT", "BAD_LABEL", "BAD_WEIGHT", "NO_SPACE")
PROBE = """
#include "{n}.h"
const unsigned long probe_sizes[] = {{sizeof({n}_state), sizeof({n}_arena), {N}_INPUT, {N}_CLASSES,
    {N}_UNITS, {N}_RAM_BYTES}};
"""
_P, _LABEL, _WEIGHT = ctypes.c_void_p, ctypes.c_uint16, ctypes.c_float
SIGNATURES = {
    "begin": [_P], "learn": [_P, _P, _P, _LABEL, _WEIGHT], "scores": [_P, _P, _P, _P],
    "classes": [_P], "add_class": [_P], "seal": [_P], "check": [_P],
}  # fmt: skip
Array = np.ndarray[Any, Any]


class CompiledHead:
    """A head in C with its state and its arena.

    Args:
        files: the folder of the head, or its files' texts by name.
        name: what the names of the C begin with.
        flags: of the compiler.

    Examples:
        >>> import tempfile
        >>> import tpsgd
        >>> folder = tempfile.mkdtemp()
        >>> _ = tpsgd.export.one_pass(folder, shape=(4,), classes=2, features=8)
        >>> head = CompiledHead(folder)
        >>> head.learn([1.0, 0.0, 0.5, 0.2], 1)
        >>> head.samples
        1
    """

    def __init__(
        self, files: str | Path | Mapping[str, str], name: str = "head",
        flags: Sequence[str] = FLAGS,
    ) -> None:  # fmt: skip
        texts = files if isinstance(files, Mapping) else _texts(Path(files), name)
        self._c = _compiled(tuple(texts.items()), name, tuple(flags))
        sizes = list((ctypes.c_ulong * 6).in_dll(self._c, "probe_sizes"))
        state, arena, self.inputs, self.capacity, self.units, self.ram = sizes
        for function, types in SIGNATURES.items():
            getattr(self._c, f"{name}_{function}").argtypes = types
        self._name = name
        self._state, self._arena = map(ctypes.create_string_buffer, (state, arena))
        self._call("begin", self._state)

    def _call(self, function: str, *arguments: Any) -> int:
        return getattr(self._c, f"{self._name}_{function}")(*arguments)

    def _done(self, error: int) -> None:
        if error:
            raise TpsgdError(f"the exported head refused: {self._name.upper()}_{ERRORS[error]}")

    @property
    def numbers(self) -> Array:
        """The numbers of the state, triangle and weights, as they lie in memory."""
        count = self.units * (self.units + 1) // 2 + self.capacity * self.units
        return np.frombuffer(memoryview(self._state), np.float32)[:count]

    @property
    def weights(self) -> Array:
        """A copy of the weights, (classes that may come, units)."""
        return self.numbers[-self.capacity * self.units :].reshape(-1, self.units).copy()

    @property
    def samples(self) -> int:
        """How many samples it has learned from."""
        return int(np.frombuffer(memoryview(self._state), np.uint32)[-2])

    @property
    def classes(self) -> int:
        """How many classes there are now."""
        return self._call("classes", self._state)

    def add_class(self) -> None:
        """Make room for a new class."""
        self._done(self._call("add_class", self._state))

    def scale(self, x: Any) -> Array:
        """A sample as it was measured, in the form that the head reads."""
        if not hasattr(self._c, f"{self._name}_scale"):
            raise TpsgdError("the head was exported without a scaling of its inputs")
        x = self._sample(x).copy()
        self._c[f"{self._name}_scale"](ctypes.c_void_p(x.ctypes.data))
        return x

    def learn(self, x: Any, label: int, weight: float = 1.0) -> None:
        """Learn from one sample, which counts as `weight` samples."""
        x = self._sample(x)
        if not 0 <= label < 1 << 16:
            raise TpsgdError(f"a label must be a whole number from 0 on, got {label}")
        self._done(self._call("learn", self._state, self._arena, x.ctypes.data, int(label), weight))

    def learn_all(self, x: Any, labels: Any, weight: float = 1.0) -> None:
        """Learn from samples in their order, each once."""
        for sample, label in zip(x, labels, strict=True):
            self.learn(sample, int(label), weight)

    def scores(self, x: Any) -> Array:
        """The scores of one sample, a number for each class."""
        x, scores = self._sample(x), np.zeros(self.classes, np.float32)
        places = x.ctypes.data, scores.ctypes.data
        self._done(self._call("scores", self._state, self._arena, *places))
        return scores

    def accuracy(self, x: Any, labels: Any) -> float:
        """The share of samples whose class has the largest score."""
        right = [self.scores(s).argmax() == int(y) for s, y in zip(x, labels, strict=True)]
        return sum(map(bool, right)) / len(right)

    def save(self) -> bytes:
        """The state, sealed."""
        self._call("seal", self._state)
        return self._state.raw

    def load(self, state: bytes) -> None:
        """A state that was sealed; another head's or a damaged one is refused."""
        if len(state) != len(self._state):
            raise TpsgdError(
                f"a state of this head has {len(self._state):,} bytes, got {len(state):,}"
            )
        if not self._call("check", state):
            raise TpsgdError("the state belongs to another head, or is damaged")
        ctypes.memmove(self._state, state, len(state))

    def _sample(self, x: Any) -> Array:
        try:
            numbers = np.ascontiguousarray(x, np.float32).ravel()
        except (TypeError, ValueError):
            raise TpsgdError("x must be a sample: a tensor or an array of numbers") from None
        if len(numbers) != self.inputs:
            raise TpsgdError(f"x must have {self.inputs:,} numbers, got {len(numbers):,}")
        return numbers


def _texts(folder: Path, name: str) -> dict[str, str]:
    """The files of an exported head."""
    own = [folder / f"{name}.{end}" for end in ("h", "c")]
    if not all(path.is_file() for path in own):
        raise TpsgdError(
            f"{folder} has no {name}.h and {name}.c: tpsgd.export.one_pass writes them"
        )
    net = encoder_name(name)
    encoder = [folder / f"{net}{end}" for end in (".h", ".c", "_tpsgd.h")]
    needed = own + encoder * (f'#include "{net}.h"' in own[0].read_text(encoding="utf-8"))
    return {path.name: path.read_text(encoding="utf-8") for path in needed}


@lru_cache(maxsize=32)
def _compiled(files: tuple[tuple[str, str], ...], name: str, flags: tuple[str, ...]) -> Any:
    """A library of the files; heads of the same files share it, since their state is their own."""
    command = compiler()
    if command is None:
        raise TpsgdError("there is no C compiler here: install gcc or clang, or pip's ziglang")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        probe = {"probe.c": PROBE.format(n=name, N=name.upper())}
        texts = dict(files) | probe
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
        programs = [str(folder / file) for file in texts if file.endswith(".c")]
        library = str(folder / "head.so")
        done = subprocess.run(
            [*command, *flags, "-shared", "-fPIC", *programs, "-o", library],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise TpsgdError(f"the C compiler refused the head: {done.stderr.strip()[:500]}")
        return ctypes.CDLL(library)
