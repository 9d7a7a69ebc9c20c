"""The peak memory of a training run, measured while it runs.

On a GPU the allocator knows it. On the CPU a dispatch mode follows every storage from creation to
release; that takes time, so it watches only the first steps of each block, in which optimizer
state, class codes and activations are all allocated, and the first windows of long sequences.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tpsgd.engine.device import side_stream, update_stream
from tpsgd.maths.kernels.torch_internals import internal
from tpsgd.nets.unrolled import Unrolled
from tpsgd.train import EpochEnd, Observer

CUDA_BLOCK = 512  # a GPU's allocator rounds up to a multiple of this many bytes
PARTS = {  # what bytes are for, in the head of a table's column and in a legend
    "weights": ("weights", "weights"),
    "gradients": ("grads", "gradients"),
    "optimizer": ("optim.", "optimizer state"),
    "activations": ("activ.", "activations"),
    "projections": ("codes", "class codes"),
    "workspace": ("cuDNN", "cuDNN workspace"),
}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are allocated while it is active, until they are freed.

    `block` rounds each storage up, as an allocator may. `workspace(func, args)` gives the bytes
    that an operation takes for a moment in addition to its results. With `detail`, `at_peak` holds
    the sizes of the storages that were alive at the peak, and `labels` the names from `label`.
    """

    products = 0  # multiplications, if they are counted

    def __init__(
        self,
        block: int = 1,
        workspace: Callable[[Any, Any], int] | None = None,
        detail: bool = False,
    ) -> None:
        super().__init__()
        self.block, self.workspace, self.detail = block, workspace, detail
        self.live = self.peak = self.extra_at_peak = 0
        self.at_peak: dict[int, int] = {}  # by number of the storage
        self.labels: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        self._storages: dict[int, tuple[int, Any]] = {}  # by address: number and weak reference
        self._count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` undecorated: the decorator loads torch.compile (a second)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs and storage._cdata not in self._storages:
                self._add(storage)
        if self.workspace is not None and (extra := self.workspace(func, args)):
            self.note(extra)
        return result

    def label(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Name the storages of tensors; other values are left out."""
        for tensor in _tensors(tensors):
            entry = self._storages.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self.labels[entry[0]] = name

    def note(self, extra: int = 0) -> None:
        """Compare the bytes that are alive now, and `extra` ones, with the peak."""
        if self.live + extra > self.peak:
            self.peak = self.live + extra
            if self.detail:
                self.at_peak, self.extra_at_peak = dict(self._sizes), extra

    def begin(self) -> None:
        """Look for a new peak from here on."""
        self.peak, self.at_peak, self.extra_at_peak = 0, {}, 0
        self.note()

    def parts(self) -> dict[str, int]:
        """The peak's bytes by label; without a label under "", extra bytes under "workspace"."""
        parts: dict[str, int] = {"workspace": self.extra_at_peak}
        for number, size in self.at_peak.items():
            name = self.labels.get(number, "")
            parts[name] = parts.get(name, 0) + size
        return parts

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self.block) * self.block
        number = self._count = self._count + 1

        def forget(_: Any) -> None:
            self._storages.pop(key, None)
            self._sizes.pop(number, None)
            self.live -= size

        self._storages[key] = number, weakref.ref(storage, forget)
        self._sizes[number] = size
        self.live += size
        self.note()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


@dataclass
class Stage:
    """A stage of a run: blocks learn, or compute outputs for the next. Kept inputs do not count."""

    blocks: tuple[int, ...]
    learning: bool = True
    peak: int = 0  # beyond the model
    parts: dict[str, int] = field(default_factory=dict)  # of the peak; "" are activations
    multiplications: float = 0.0  # of a step for a sample, if they were counted


class Meter(Observer):
    """The peak memory of a run: the model's bytes and all that training adds to them.

    The data set is not counted; inputs kept for reuse are counted apart, in `kept_bytes`. The meter
    is a context manager around the run, and the net's observers are `meter.around(observers)`:
    while the other observers and the caller's functions run, nothing is counted.
    """

    WATCHED = 2  # batches of a stage that are followed on a CPU

    def __init__(self, device: torch.device, live: LiveBytes | None = None) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda" and live is None
        self.kept_bytes = 0  # the most at one time
        self.stages: list[Stage] = []
        self._kept_now = self._released = self._start = 0
        self._steps = self._computed = 0  # batches of the stage, and since `computing(True)`
        self._grows = self._computing = self._watching = self._skipping = False
        self.live = live or LiveBytes()

    def around(self, observers: Sequence[Observer]) -> list[Observer]:
        """The observers between the meter's pause and its resumption."""
        return [self, *observers, _Resume(self)]

    def __enter__(self) -> "Meter":
        self.stages.append(Stage(()))
        if self.on_gpu:
            take_cublas_workspaces(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *_: Any) -> None:
        self._watch(False)
        self._close()

    def _watch(self, on: bool) -> None:
        """Follow every allocation on a CPU, which takes time, or stop doing so."""
        if on is self._watching or self.on_gpu:
            return
        self._watching = on
        if on:
            self.live.__enter__()
        else:
            self.live.__exit__(None, None, None)

    def stage(self, learners: Sequence[Any], learning: bool = True) -> None:
        self._close()
        self._kept_now, self._released = self._kept_now - self._released, 0
        self.stages.append(Stage(tuple(x.block.index for x in learners), learning))
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.live.begin()
        self._steps, self._grows, self._computing = 0, False, False
        self._watch(True)

    def started(self, learner: Any) -> None:
        learner.updater.before_solving = self._before_solving
        if isinstance(learner.gradient, Unrolled):
            learner.gradient.windows_repeat = self._skip

    def _skip(self, alike: bool) -> None:
        """Pause while the windows of a sequence take the same memory as the windows before them."""
        current = internal("utils._python_dispatch._get_current_dispatch_mode")
        innermost = current is not None and current() is self.live
        if (alike and self._watching and innermost) or (not alike and self._skipping):
            self._watch(not alike)
            self._skipping = alike

    def _before_solving(self, workspace: int) -> None:
        self._watch(True)
        self.live.note(workspace)

    def computing(self, active: bool) -> None:
        self._computing, self._computed = active, 0
        self._watch(active)

    def batch(self, learners: Sequence[Any], batch: Any) -> None:
        self._watch(False)
        if self._computing:
            self._computed += batch.last
        else:
            self._steps += batch.last
            self._grows = any(learner.updater.grows for learner in learners)

    def epoch(self, end: EpochEnd) -> set[Any]:
        self._watch(False)
        return set()

    def pause(self) -> int:
        """Count nothing until `resume`; the peak so far, without the model."""
        self._watch(False)
        self._close()
        return max(stage.peak for stage in self.stages)

    def resume(self) -> None:
        """Follow the first batches of a stage, and all batches if memory grows with them."""
        batches = self._computed if self._computing else self._steps
        self._watch(batches < self.WATCHED or self._grows)

    def kept(self, size: int, released: int) -> None:
        """Count inputs that are kept for reuse, and those that are released after this stage."""
        self._watch(False)
        self._kept_now += size
        self.kept_bytes = max(self.kept_bytes, self._kept_now)
        self._released += released

    def peak(self, model_bytes: int) -> int:
        """The most bytes at any time, with the model, without kept inputs."""
        return model_bytes + max(stage.peak for stage in self.stages)

    def _close(self) -> None:
        """Store the peak of the stage that ends."""
        stage = self.stages[-1]
        if self.on_gpu:
            grown = torch.cuda.max_memory_allocated(self.device) - self._start - self._kept_now
            stage.peak = max(stage.peak, grown)
        else:
            stage.peak, stage.parts = self.live.peak, self.live.parts()


class _Resume(Observer):
    """The last observer: the meter goes on after the other observers."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def batch(self, learners: Sequence[Any], batch: Any) -> None:
        self.meter.resume()

    def epoch(self, end: EpochEnd) -> set[Any]:
        self.meter.resume()
        return set()


def _twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w, w[0]), w, w[0])


def take_cublas_workspaces(device: torch.device) -> None:
    """Let cuBLAS allocate its workspaces, which it never frees, before anything is measured."""
    ones = torch.ones(64, 64, device=device)
    w = torch.ones(64, 64, device=device, requires_grad=True)
    streams = torch.cuda.current_stream(device), side_stream(device), update_stream(device)
    for stream in streams:
        with torch.cuda.stream(stream), torch.enable_grad():  # autograd uses other threads
            y = checkpoint(_twice, torch.mm(ones, w), w, use_reentrant=False)
            torch.autograd.grad(y, w, ones)
            del y
    torch.cuda.synchronize(device)


def tensor_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters and buffers."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
