"""How many bytes training holds at its peak, measured while it runs.

On a GPU the allocator knows. On the CPU a dispatch mode follows every storage that training makes
until it dies; that costs time, so it watches the first steps of each block, which is where
optimizer state, projections and activations all live at once, and leaves the rest alone.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

CUDA_BLOCK = 512  # a GPU's allocator gives whole blocks of so many bytes


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active, until they are freed.

    `block` rounds each storage up, as an allocator may. `beyond(func, args)` says what an operation
    takes for a moment beside its results. With `detail`, `at_peak` holds the storages that were
    alive at the peak, by number, and `labels` what `label` called them, then or later.
    """

    def __init__(
        self,
        block: int = 1,
        beyond: Callable[[Any, Any], int] | None = None,
        detail: bool = False,
    ) -> None:
        super().__init__()
        self.block, self.beyond, self.detail = block, beyond, detail
        self.live = 0
        self.peak = 0
        self.extra_at_peak = 0
        self.at_peak: dict[int, int] = {}
        self.labels: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._known: dict[int, tuple[int, Any]] = {}
        self._met = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._meet(storage)
        if self.beyond is not None and (extra := self.beyond(func, args)):
            self.note(extra)
        return result

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Call what these tensors hold by a name."""
        for tensor in _tensors(tensors):
            known = self._known.get(tensor.untyped_storage()._cdata)
            if known is not None:
                self.labels[known[0]] = name

    def note(self, extra: int = 0) -> None:
        """What is alive now, and `extra` bytes that nobody sees, may be the peak."""
        if self.live + extra > self.peak:
            self.peak = self.live + extra
            if self.detail:
                self.at_peak, self.extra_at_peak = dict(self._sizes), extra

    def begin(self) -> None:
        """Look for a new peak from here on."""
        self.peak, self.at_peak, self.extra_at_peak = 0, {}, 0
        self.note()

    def parts(self) -> dict[str, int]:
        """The peak's bytes by their labels; what has none is under "", unseen ones "workspace"."""
        found: dict[str, int] = {"workspace": self.extra_at_peak}
        for number, size in self.at_peak.items():
            name = self.labels.get(number, "")
            found[name] = found.get(name, 0) + size
        return found

    def _meet(self, storage: torch.UntypedStorage) -> None:
        """A storage that was made just now: count it until it dies."""
        key, size = storage._cdata, -(-storage.nbytes() // self.block) * self.block
        number = self._met = self._met + 1

        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self._sizes.pop(number, None)
            self.live -= size

        self._known[key] = number, weakref.ref(storage, forget)
        self._sizes[number] = size
        self.live += size
        self.note()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass
class Stage:
    """A part of a run: blocks learning, or handing their outputs on. Kept inputs are left out."""

    blocks: tuple[int, ...]
    learning: bool = True
    peak: int = 0  # beyond the model
    parts: dict[str, int] = field(default_factory=dict)  # where they were asked for


class Meter:
    """The peak of a training run: the model's own bytes and all that training adds to them.

    The data set is not counted; inputs kept for reuse are counted apart, in `kept`.
    """

    def __init__(self, device: torch.device, live: LiveBytes | None = None) -> None:
        self.device = device
        self.rehearsal = live is not None
        self.on_gpu = device.type == "cuda" and not self.rehearsal
        self.kept = 0  # at most, at one time
        self.stages: list[Stage] = []
        self._held = self._leaving = self._start = 0
        self._live = live or LiveBytes()

    def begin(self) -> None:
        """Count from here: the model and the data are in place."""
        self.stages.append(Stage(()))
        if self.on_gpu:
            warm(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)

    def stage(self, blocks: Iterable[int], learning: bool = True) -> None:
        """Another part of the run begins."""
        self._close()
        self._held, self._leaving = self._held - self._leaving, 0
        self.stages.append(Stage(tuple(blocks), learning))
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self._live.begin()

    def _close(self) -> None:
        """Write down the peak so far."""
        if not self.stages:
            return
        now = self.stages[-1]
        if self.on_gpu:
            grown = torch.cuda.max_memory_allocated(self.device) - self._start - self._held
            now.peak = max(now.peak, grown)
        else:
            now.peak, now.parts = self._live.peak, self._live.parts()

    @contextmanager
    def watch(self, active: bool = True) -> Iterator[None]:
        """Follow what is allocated in here (on the CPU; a GPU is always watched)."""
        if active and not self.on_gpu:
            with self._live:
                yield
        else:
            yield

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Say what these tensors are for."""
        if self.rehearsal:
            self._live.label(name, tensors)

    def unseen(self, size: int) -> None:
        """Note bytes that a library takes for a moment (a GPU's allocator sees them)."""
        self._live.note(size)

    def keep(self, size: int, instead_of: int = 0) -> None:
        """Note inputs of this many bytes, kept for reuse, and those that are dropped after this."""
        self._held += size
        self.kept = max(self.kept, self._held)
        self._leaving += instead_of

    def peak(self, model_bytes: int) -> int:
        """The most bytes held at once, the model included, kept inputs left out."""
        self._close()
        return model_bytes + max((s.peak for s in self.stages), default=self._live.peak)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps are captured."""
    return torch.cuda.Stream(device)


def _twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w, w[0]), w, w[0])


def warm(device: torch.device) -> int:
    """Let cuBLAS take its workspaces, which it never gives back: the bytes they take, if any."""
    before = torch.cuda.memory_allocated(device)
    ones = torch.ones(64, 64, device=device)
    w = torch.ones(64, 64, device=device, requires_grad=True)
    for stream in (torch.cuda.current_stream(device), side_stream(device)):
        with torch.cuda.stream(stream), torch.enable_grad():  # autograd has threads of its own
            y = checkpoint(_twice, torch.mm(ones, w), w, use_reentrant=False)
            torch.autograd.grad(y, w, ones)
            del y
    torch.cuda.synchronize(device)
    del ones, w
    return torch.cuda.memory_allocated(device) - before


def tensor_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters and buffers."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
