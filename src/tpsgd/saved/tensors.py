"""Tensors by name as the bytes of a .safetensors file, and back; no code is ever run."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tpsgd.errors import TpsgdError


def library() -> Any:
    """The package safetensors, which is not always installed."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise TpsgdError("for .safetensors files, run: pip install safetensors") from error
    return safetensors


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of a .safetensors file; tensors that share memory are written separately."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        shares = tensor.numel() and tensor.untyped_storage().data_ptr() in addresses
        addresses.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor.clone() if shares else tensor
    try:
        return library().torch.save(separate)
    except (KeyError, RuntimeError, ValueError) as error:
        kinds = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}))
        raise TpsgdError(
            f"safetensors cannot hold these tensors, of type {kinds} ({error}): make them plain "
            "dense numbers"
        ) from error


def from_bytes(content: bytes, source: Any) -> dict[str, Tensor]:
    """The tensors of a .safetensors file; `source` is named in errors."""
    load = library().torch.load
    try:
        return load(content)
    except Exception as error:  # a damaged file makes its reader raise anything
        raise TpsgdError(f"{source} is no whole .safetensors file: save it again") from error
