"""Weights out of a file, without running code that the file contains, and into a model."""

import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError

State = dict[str, Tensor]

WRAPPERS = ("state_dict", "model")  # where training scripts keep the weights
MOST_PACKED, LEAST_UNPACKED = 100, 1 << 27  # times the file's size; 128 MB are always allowed
UNCOUNTED = "num_batches_tracked"  # BatchNorm's counter, which older files lack


def load(file: str | Path) -> State:
    """The tensors of a .pth, .pt, .safetensors or .npz file, by name, on the CPU.

    A file with more than tensors and plain values is refused, because loading it could run code. A
    checkpoint's `state_dict` or `model` is taken out of it, and the prefix `module.` of
    DataParallel is dropped. The result is never empty.
    """
    path = Path(file)
    read = READERS.get(path.suffix.lower())
    if read is None:
        expected = f"expected one of {', '.join(READERS)}"
        raise TpsgdError(f"{path} is no file of weights by its name: {expected}")
    if not path.is_file():
        raise TpsgdError(f"{path} does not exist, or is a folder: give a file of weights")
    try:
        if zipfile.is_zipfile(path):
            _check_archive(path)
        content = read(path)
    except (TpsgdError, PermissionError):
        raise
    except Exception as error:  # a damaged file makes its reader raise anything
        raise TpsgdError(
            f"{path} is empty, damaged, or holds Python objects, which could run any code and are "
            "refused: download it again, or save model.state_dict() alone"
        ) from error
    return _tensors(path, content)


def put(
    model: nn.Module, state: Mapping[str, Tensor], needed: str | tuple[str, ...] | None = None
) -> None:
    """Copy weights into a model; if they do not fit, raise and leave the model as it is.

    Numbers take the model's type. Pruned weights (`weight_orig` and `weight_mask`) are multiplied,
    sparse ones become dense. BatchNorm's counter of batches may be missing.

    Args:
        model: what to fill.
        state: tensors by name, as from `load`.
        needed: names of submodules that must be complete; nothing else is copied, and the file may
            hold more. None: all names must be the same in both.

    Examples:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 5))
        >>> put(net, {"0.weight": torch.ones(1, 1), "0.bias": torch.zeros(1)}, needed="0")
        >>> net[0].weight.item()
        1.0
    """
    target = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    source = _unpruned(state, target)
    names = list(target) if needed is None else _below(target, needed)
    if missing := [k for k in names if k not in source and not k.endswith(UNCOUNTED)]:
        raise TpsgdError(f"the weights lack {_some(missing)}, which the model has")
    if needed is None and (extra := [k for k in source if k not in target]):
        hint = "name what must fit, such as needed='features'"
        raise TpsgdError(f"the model lacks {_some(extra)}, which the weights hold; {hint}")
    converted = {k: _converted(k, source[k], target[k]) for k in names if k in source}
    with torch.no_grad():
        for name, value in converted.items():
            target[name].copy_(value)


def _check_archive(file: Path) -> None:
    """Refuse a small file that would fill the memory, since weights are hardly compressible.

    And compare the checksums, which torch.load ignores; 0 means that there is none.
    """
    packed = file.stat().st_size
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > max(LEAST_UNPACKED, MOST_PACKED * packed):
            raise TpsgdError(
                f"{file} of {packed:,} bytes would unpack to {unpacked:,}, and is refused"
            )
        for info in archive.infolist():
            with archive.open(info) as content:
                while info.CRC and content.read(2**20):
                    pass


def _torch(file: Path) -> Any:
    """A file of torch.save, by torch's reader of plain values."""
    with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True)


def _safetensors(file: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(file)


def _npz(file: Path) -> Any:
    """The arrays of an .npz file, in this machine's byte order."""
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        arrays = [(k, archive[k]) for k in archive.files]
    return {k: torch.from_numpy(np.asarray(v, v.dtype.newbyteorder("="))) for k, v in arrays}


READERS: dict[str, Callable[[Path], Any]] = {
    ".pth": _torch,
    ".pt": _torch,
    ".safetensors": _safetensors,
    ".npz": _npz,
}


def _tensors(file: Path, content: Any) -> State:
    """The dictionary of tensors inside a file's content."""
    for key in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    problem = "" if content else "nothing"
    problem = problem if isinstance(content, Mapping) else f"one {type(content).__name__}"
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            problem = f"{key!r}, of type {type(value).__name__}"
    if problem:
        raise TpsgdError(f"{file} holds {problem}: expected tensors by name, as of a state_dict()")
    prefix = "module." if all(k.startswith("module.") for k in content) else ""
    return {k.removeprefix(prefix): v.detach() for k, v in content.items()}


def _below(target: State, needed: str | tuple[str, ...]) -> list[str]:
    """The model's names below these prefixes."""
    chosen: dict[str, None] = {}
    for prefix in (needed,) if isinstance(needed, str) else needed:
        names = [k for k in target if not prefix or k == prefix or k.startswith(f"{prefix}.")]
        if not names:
            modules = ", ".join(sorted({k.partition(".")[0] for k in target}))
            raise TpsgdError(f"the model has no weights below {prefix!r}, only below {modules}")
        chosen |= dict.fromkeys(names)
    return list(chosen)


def _unpruned(state: Mapping[str, Tensor], target: State) -> State:
    """Weights of torch.nn.utils.prune as products, unless the model is pruned itself."""
    merged = dict(state)
    for key in state:
        name = key.removesuffix("_orig")
        if name != key and f"{name}_mask" in state and key not in target:
            weight, mask = merged.pop(key), merged.pop(f"{name}_mask")
            if weight.shape != mask.shape:
                raise _misfit(f"{name}_mask", tuple(mask.shape), tuple(weight.shape))
            merged[name] = weight.to_dense() * mask.to_dense().to(weight.dtype)
    return merged


def _converted(key: str, value: Tensor, target: Tensor) -> Tensor:
    """A tensor in the model's type, or the reason why it does not fit."""
    if value.shape != target.shape:
        raise _misfit(key, tuple(value.shape), tuple(target.shape))
    if value.is_floating_point() != target.is_floating_point():
        raise _misfit(key, value.dtype, target.dtype)
    value = value.to_dense().to(target.dtype)
    if value.is_floating_point() and not value.isfinite().all():
        raise TpsgdError(f"{key!r} of the weights is not finite as {target.dtype}: use others")
    return value


def _misfit(key: str, actual: Any, expected: Any) -> TpsgdError:
    return TpsgdError(f"{key!r} is {actual} in the weights, expected {expected}: use others")


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
