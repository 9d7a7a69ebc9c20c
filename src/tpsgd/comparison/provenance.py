"""Where a record comes from: data, machine and versions, as plain values."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from tpsgd import __version__
from tpsgd.data import Data
from tpsgd.nets.padded import Padded


def describe(data: Data) -> dict[str, Any]:
    """A data set in a few plain values."""
    sizes = {"train": len(data.train[1]), "test": len(data.test[1]), "classes": len(data.classes)}
    plain = {"name": data.name, "note": data.note, **sizes, "shape": list(data.shape)}
    if data.vocabulary is not None:
        plain["vocabulary"] = data.vocabulary
    if isinstance(data.train[0], Padded):
        plain["lengths"] = [int(f(data.train[0].lengths)) for f in (torch.min, torch.max)]
    return plain


def machine(device: torch.device | str | None = None) -> dict[str, Any]:
    """The machine: processor, cores, threads, and the GPU if it is used."""
    gpu = device is not None and torch.device(device).type == "cuda" and torch.cuda.is_available()
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """The versions of Python, torch and this library."""
    return {"python": platform.python_version(), "torch": torch.__version__, "tpsgd": __version__}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(s.partition(":")[2].strip() for s in lines if s.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
