"""Weights out of a file, without running what the file holds, and into a model."""

import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tpsgd.errors import TpsgdError

State = dict[str, Tensor]

WRAPPERS = ("state_dict", "model")  # where training scripts keep the weights
MOST_PACKED, LEAST_UNPACKED = 100, 1 << 27  # times its size; up to 128 MB nobody minds
UNCOUNTED = "num_batches_tracked"  # BatchNorm's counter, which older files lack


def load(file: str | Path) -> State:
    """The tensors of a .pth, .pt, .safetensors or .npz file, by name, on the CPU.

    Nothing in the file is run: one that holds more than tensors and plain values is refused. A
    checkpoint's `state_dict` or `model` is taken out of it, and the `module.` that DataParallel
    puts before every name is dropped.

    Args:
        file: where the weights are; its suffix says how they are written.

    Returns:
        A new dictionary, never empty.
    """
    path = Path(file)
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise TpsgdError(
            f"{path} is no file of weights by its name: expected one of {', '.join(READERS)}; save "
            "others with torch.save(model.state_dict(), 'weights.pth')"
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise TpsgdError(f"{path} {what}: give a file of weights")
    if not path.stat().st_size:
        raise TpsgdError(f"{path} is empty: download or save it again")
    try:
        _check_size(path)
        found = read(path)
    except TpsgdError:
        raise
    except PermissionError as error:
        raise TpsgdError(f"{path} may not be read: change its permissions") from error
    except Exception as error:  # a damaged file makes its reader raise anything
        raise TpsgdError(
            f"{path} holds no weights that can be read (it is damaged, incomplete or of another "
            "kind): download or save it again"
        ) from error
    return _tensors(path, found)


def put(
    model: nn.Module, state: Mapping[str, Tensor], needed: str | tuple[str, ...] | None = None
) -> None:
    """Copy weights into a model; where they do not fit, raise and leave the model as it is.

    Numbers take the model's type. Pruned weights (`weight_orig` and `weight_mask`) go in as their
    product, sparse ones dense. BatchNorm's counter of batches may be missing.

    Args:
        model: what to fill.
        state: tensors by name, as from `load`.
        needed: a submodule's name, or several: they must be complete, nothing else is copied, and
            the file may hold more. None: all names must be the same in both.

    Examples:
        >>> net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 5))
        >>> put(net, {"0.weight": torch.ones(1, 1), "0.bias": torch.zeros(1)}, needed="0")
        >>> net[0].weight.item()
        1.0
    """
    own = {k: v for k, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    merged = _unpruned(state, own)
    names = list(own) if needed is None else _under(own, needed)
    missing = [k for k in names if k not in merged and not k.endswith(UNCOUNTED)]
    if missing:
        raise TpsgdError(f"the weights lack {_some(missing)}, which the model has")
    if needed is None and (extra := [k for k in merged if k not in own]):
        raise TpsgdError(
            f"the model lacks {_some(extra)}, which the weights hold; name what must fit, such as "
            "needed='features', to leave the rest out"
        )
    ready = [(own[k], _fitting(k, merged[k], own[k])) for k in names if k in merged]
    with torch.no_grad():
        for mine, new in ready:
            mine.copy_(new)


# ---- reading -------------------------------------------------------------------------------------


def _check_size(file: Path) -> None:
    """Refuse a small file that would fill the memory: weights hardly get smaller by packing."""
    if not zipfile.is_zipfile(file):
        return
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > max(LEAST_UNPACKED, MOST_PACKED * file.stat().st_size):
        raise TpsgdError(
            f"{file} has {file.stat().st_size:,} bytes and would unpack to {unpacked:,}: no "
            "file of trained weights does; it is refused"
        )


def _torch(file: Path) -> Any:
    """What torch.save wrote, by torch's reader of plain values."""
    if zipfile.is_zipfile(file):
        _check_sums(file)
    with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():
        warnings.simplefilter("ignore")
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            refused = isinstance(error, pickle.UnpicklingError) and _is_pickle(file)
            if refused or "TorchScript" in str(error):
                raise _refusal(file) from error
            raise


def _is_pickle(file: Path) -> bool:
    """Whether a file begins as torch's or Python's pickles do."""
    with file.open("rb") as stream:
        return stream.read(2) in (b"PK", *(bytes((0x80, protocol)) for protocol in range(2, 6)))


def _check_sums(file: Path) -> None:
    """Compare the checksums that torch.load ignores; 0 stands for one that was not made."""
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.CRC:
                with archive.open(info) as content:
                    while content.read(2**20):
                        pass


def _safetensors(file: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise TpsgdError(f"{file} needs safetensors; run: pip install safetensors") from error
    return load_file(file)


def _npz(file: Path) -> Any:
    """The arrays of an .npz file, in this machine's byte order."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
            arrays = {k: archive[k] for k in archive.files}
    except ValueError as error:
        if "Object arrays" in str(error):
            raise _refusal(file) from error
        raise
    native = {k: np.asarray(v, v.dtype.newbyteorder("=")) for k, v in arrays.items()}
    return {k: torch.from_numpy(v) for k, v in native.items()}


READERS: dict[str, Callable[[Path], Any]] = {
    ".pth": _torch,
    ".pt": _torch,
    ".safetensors": _safetensors,
    ".npz": _npz,
}


def _refusal(file: Path) -> TpsgdError:
    return TpsgdError(
        f"{file} holds Python objects, which can run any code when they are loaded, so it is "
        "refused: save the tensors alone with torch.save(model.state_dict(), 'weights.pth')"
    )


def _tensors(file: Path, found: Any) -> State:
    """The dictionary of tensors inside what was read."""
    for key in WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        what = "nothing" if isinstance(found, Mapping) else f"one {type(found).__name__}"
        raise TpsgdError(f"{file} holds {what}: expected tensors by name, as of model.state_dict()")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise TpsgdError(
                f"{file} holds {key!r}, of type {type(value).__name__}: expected tensors by name, "
                f"or a checkpoint with them under {' or '.join(map(repr, WRAPPERS))}"
            )
    prefix = "module." if all(k.startswith("module.") for k in found) else ""
    return {k.removeprefix(prefix): v.detach() for k, v in found.items()}


# ---- fitting -------------------------------------------------------------------------------------


def _under(own: State, needed: str | tuple[str, ...]) -> list[str]:
    """The model's names below the prefixes."""
    wanted = (needed,) if isinstance(needed, str) else needed
    found = {p: [k for k in own if not p or k == p or k.startswith(f"{p}.")] for p in wanted}
    if empty := [p for p, names in found.items() if not names]:
        parts = sorted({k.partition(".")[0] for k in own})
        raise TpsgdError(
            f"the model has no weights below {empty[0]!r}: its parts are {', '.join(parts)}"
        )
    return list(dict.fromkeys(k for names in found.values() for k in names))


def _unpruned(state: Mapping[str, Tensor], own: State) -> State:
    """The weights, those of torch.nn.utils.prune as products unless the model is pruned itself."""
    merged = dict(state)
    for key in state:
        name = key.removesuffix("_orig")
        mask = f"{name}_mask"
        if name != key and mask in state and key not in own:
            weight, kept = merged.pop(key), merged.pop(mask)
            if weight.shape != kept.shape:
                raise _misfit(mask, tuple(kept.shape), tuple(weight.shape))
            merged[name] = _dense(weight) * _dense(kept).to(weight.dtype)
    return merged


def _fitting(key: str, found: Tensor, own: Tensor) -> Tensor:
    """A tensor as the model wants it, or why it does not fit."""
    if is_lazy(own) or own.is_meta:
        raise TpsgdError(f"{key!r} of the model has no memory yet: run the model once, then load")
    if found.shape != own.shape:
        raise _misfit(key, tuple(found.shape), tuple(own.shape))
    if _kind(found) != _kind(own):
        raise _misfit(key, found.dtype, own.dtype)
    made = _dense(found).to(own.dtype)
    if made.is_floating_point() and not made.isfinite().all():
        raise TpsgdError(
            f"{key!r} of the weights holds values that are not finite as {own.dtype}: the training "
            "that made them failed, or the file is damaged; take another"
        )
    return made


def _kind(x: Tensor) -> str:
    return "real" if x.is_floating_point() else "complex" if x.is_complex() else "whole"


def _dense(x: Tensor) -> Tensor:
    return x if x.layout is torch.strided else x.to_dense()


def _misfit(key: str, found: Any, expected: Any) -> TpsgdError:
    return TpsgdError(f"{key!r} is {found} in the weights, expected {expected}: use others")


def _some(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more
