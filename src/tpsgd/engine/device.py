"""The device to train on, its free memory, the memory of the process, and its CPU threads."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from tpsgd.common.errors import TpsgdError

# Multiply-adds of a batch in a net's largest layer from which two threads are faster than one. Two
# threads took 1.2 - 2.1 times as long as one in MLPs of 0.5 and 6 million, 0.7 - 0.8 in an MLP of
# 26 million, and 0.9 - 1.1 in a CNN of 10 million. A thread whose core has other work makes the
# others wait, so the bound is on the high side.
WORTH_SHARING = 16_000_000


def resolve_device(device: torch.device | str) -> torch.device:
    """A device that tensors can be made on, with its number ("cuda" becomes "cuda:0")."""
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise TpsgdError(f"unknown device {str(device)!r}: write cpu, cuda or cuda:1") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise TpsgdError(f"device {resolved} was asked for, but torch sees no GPU here")
    if resolved.type == "meta":
        raise TpsgdError("device meta holds no numbers: nothing can be trained on it")
    try:
        return torch.empty(0, device=resolved).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TpsgdError(f"device {resolved} cannot be used here: {reason}") from None


def available(device: torch.device) -> int:
    """Free bytes of a device; on the CPU as the kernel estimates it, within a container's limit."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return 1 << 50  # a plan for a GPU of another machine
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    (free,) = _kernel_bytes("/proc/meminfo", "MemAvailable") or [4 << 30]
    try:
        files = [Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current")]
        limit, used = (int(file.read_text()) for file in files)
    except (OSError, ValueError):  # no such files, or no limit ("max")
        return free
    return min(free, max(0, limit - used))


def _kernel_bytes(file: str, *names: str) -> list[int]:
    """Numbers that the kernel gives in kilobytes, as bytes; [] where it does not give them."""
    try:
        lines = Path(file).read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return [int(fields[name].split()[0]) << 10 for name in names]
    except (OSError, KeyError, ValueError):
        return []


def resident() -> tuple[int, int]:
    """The process's resident bytes, now and at their peak, as the kernel counts them; or 0, 0.

    They include the interpreter, torch, the data set and mapped files.
    """
    now, peak = _kernel_bytes("/proc/self/status", "VmRSS", "VmHWM") or (0, 0)
    return now, peak


def forget_resident_peak() -> None:
    """Let the kernel measure the peak of resident bytes from here on, where it can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def limit_threads(device: torch.device, multiply_adds: int) -> int:
    """Compute with one thread where layers are small; returns the number of threads before.

    `multiply_adds` are those of a batch in the largest layer.
    """
    threads = torch.get_num_threads()
    if device.type == "cpu" and multiply_adds < WORTH_SHARING:
        torch.set_num_threads(1)
    return threads


@contextmanager
def threads_restored(threads: int | None = None) -> Iterator[None]:
    """A context, or decorator, with this number of threads, after which it is as before."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        torch.set_num_threads(before)


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps are captured."""
    return torch.cuda.Stream(device)


@cache
def update_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of updates that run beside later blocks' forward passes."""
    return torch.cuda.Stream(device)
