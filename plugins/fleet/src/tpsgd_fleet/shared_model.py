"""The model that the server and its clients share: which of its numbers travel, and how it grows.

Messages carry the parameters that may learn and the buffers. A parameter with `requires_grad=False`
does not travel: the function that makes the model is called with the same seed everywhere. A
fingerprint of these parameters is sent instead.
"""

# pyright: reportMissingImports=false

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from flwr.app import ArrayRecord, Context
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.new_classes import add_output, last_block, outputs_of

MakeModel = Callable[[Context], nn.Module]


def make_model(make: MakeModel, context: Context, seed: int, classes: int = 0) -> nn.Module:
    """The model with the initial weights of a seed, and at least as many outputs as classes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = make(context)
    if not isinstance(model, nn.Module):
        raise TpsgdError(f"the model's function must return a module, got {type(model).__name__}")
    grow(model, classes)
    return model


def grow(model: nn.Module, classes: int) -> None:
    """Add outputs that are 0 until the model has one for every class."""
    while outputs_of(model) < classes:
        add_output(model)


def _frozen(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.requires_grad}


def fingerprint(model: nn.Module) -> str:
    """A hash of the weights that do not travel; empty if all do."""
    frozen, digest = _frozen(model), hashlib.sha256()
    for name, p in sorted(frozen.items()):
        digest.update(name.encode() + p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16] if frozen else ""


def arrays_of(model: nn.Module) -> ArrayRecord:
    """The weights that travel, as the arrays of a message."""
    frozen = _frozen(model)
    tensors = {name: t for name, t in model.state_dict().items() if name not in frozen}
    if not tensors:
        raise TpsgdError("the model has no parameter that may learn: there is nothing to share")
    return ArrayRecord(tensors)


def load_arrays(model: nn.Module, arrays: ArrayRecord, classes: int = 0) -> None:
    """Write the arrays of a message into a model, which grows to as many outputs as classes."""
    grow(model, classes)
    try:
        model.load_state_dict(_frozen(model) | arrays.to_torch_state_dict())
    except RuntimeError as error:
        difference = " ".join(str(error).split())
        raise TpsgdError(f"server and clients must make the same model: {difference}") from None


def head_arrays(model: nn.Module) -> set[str]:
    """The names of the arrays with a row for each class: those of the last layer."""
    of_layer = {id(p) for p in last_block(model).layer.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if id(p) in of_layer}


def with_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """An array with zeros for the rows that it does not have yet.

    Examples:
        >>> with_rows(np.ones((1, 2)), 2).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    return np.pad(array, [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1))
