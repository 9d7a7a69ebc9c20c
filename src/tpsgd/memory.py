"""How many bytes training holds at its peak, measured while it runs.

On a GPU the allocator knows. On the CPU a dispatch mode follows every storage that training makes
until it dies; that costs time, so it watches the first steps of each block, which is where
optimizer state, projections and activations all live at once, and leaves the rest alone.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages made while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in _tensors((*args, *kwargs.values()))}
        for tensor in _tensors((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._known:
                self._meet(storage)
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        """A storage that was made just now: count it until it dies."""
        key, size = storage._cdata, storage.nbytes()

        def forget(_: Any) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, forget)
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments or results, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            if value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


class Meter:
    """The peak of a training run: the model's own bytes and all that training adds to them.

    The data set is not counted; inputs kept for reuse are counted apart, in `kept`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kept = 0  # at most, at one time
        self._held = 0
        self._live = LiveBytes()
        self._start = 0

    def begin(self) -> None:
        """Count from here: the model and the data are in place (on the CPU nothing counts yet)."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._start = torch.cuda.memory_allocated(self.device)

    @contextmanager
    def watch(self, active: bool = True) -> Iterator[None]:
        """Follow what is allocated in here (on the CPU; a GPU is always watched)."""
        if active and self.device.type == "cpu":
            with self._live:
                yield
        else:
            yield

    def unseen(self, size: int) -> None:
        """Note bytes that a library takes for a moment (a GPU's allocator sees them)."""
        self._live.peak = max(self._live.peak, self._live.live + size)

    def keep(self, size: int, instead_of: int = 0) -> None:
        """Note inputs of this many bytes, kept for reuse, and those that are dropped for them."""
        self._held += size
        self.kept = max(self.kept, self._held)
        self._held -= instead_of

    def peak(self, model_bytes: int) -> int:
        """The most bytes held at once, the model included, kept inputs left out."""
        if self.device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self.device) - self._start - self.kept
            return model_bytes + max(0, grown)
        return model_bytes + self._live.peak


def tensor_bytes(module: nn.Module) -> int:
    """The bytes of a module's parameters and buffers."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def available(device: torch.device) -> int:
    """Bytes that can still be had on a device; on the CPU as the kernel estimates it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        free = 4 << 30
    return min(free, _container_limit(free))


def _container_limit(otherwise: int) -> int:
    """What a container may still use, where it has a limit."""
    try:
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text())
            for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no such files, or no limit ("max")
        return otherwise
    return max(0, limit - used)
