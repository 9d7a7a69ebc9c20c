"""The device to train on: which one, how much memory it has left, what the process holds."""

from contextlib import suppress
from pathlib import Path

import torch

from tpsgd.errors import TpsgdError


def resolve_device(device: torch.device | str) -> torch.device:
    """A device that tensors can be made on, with its number ("cuda" becomes "cuda:0")."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise TpsgdError(f"unknown device {str(device)!r}: write cpu, cuda or cuda:1") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise TpsgdError(f"device {wanted} was asked for, but torch sees no GPU here")
    if wanted.type == "meta":
        raise TpsgdError("device meta holds no numbers: nothing can be trained on it")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TpsgdError(f"device {wanted} cannot be used here: {reason}") from None


def available(device: torch.device) -> int:
    """Bytes that can still be had on a device; on the CPU as the kernel estimates it."""
    if device.type == "cuda" and not torch.cuda.is_available():
        return 1 << 50  # of a GPU that is elsewhere
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


def resident() -> tuple[int, int]:
    """The process's resident bytes, now and at their highest, as the kernel counts them; or 0, 0.

    They hold the interpreter, torch, the data set and mapped files too.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        now, most = (int(fields[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError):
        return 0, 0
    return now, most


def forget_resident_peak() -> None:
    """Let the kernel look for the highest resident bytes anew, where it can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
