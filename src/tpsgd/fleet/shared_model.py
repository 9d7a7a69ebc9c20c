"""The model that the server and its clients share: which of its numbers travel, and how it grows.

The arrays of a message are the parameters that may learn and the buffers. A parameter whose
`requires_grad` is False stays at home: the function that makes the model is called with the same
seed everywhere, so that the weights of frozen layers need not be sent. Their fingerprint is.
"""

# pyright: reportMissingImports=false

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.streams.new_classes import add_output, last_block, outputs_of

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


def fingerprint(model: nn.Module) -> str:
    """A hash of the weights that do not travel; empty if all do."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    digest = hashlib.sha256()
    for name, p in sorted(frozen.items()):
        digest.update(name.encode() + p.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16] if frozen else ""


def travelling(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that messages carry, by their names in the model."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    state = model.state_dict()
    return {name: tensor for name, tensor in state.items() if name not in frozen}


def arrays_of(model: nn.Module) -> ArrayRecord:
    """The model's numbers as the arrays of a message."""
    tensors = travelling(model)
    if not tensors:
        raise TpsgdError("the model has no parameter that may learn: there is nothing to share")
    return ArrayRecord({name: Array(t.detach().cpu().numpy()) for name, t in tensors.items()})


@torch.no_grad()
def load_arrays(model: nn.Module, arrays: Mapping[str, Any]) -> None:
    """Write the arrays of a message into a model of the same shape."""
    tensors = travelling(model)
    if set(tensors) != set(arrays):
        raise TpsgdError(
            f"the message has the arrays {sorted(arrays)}, but the model has {sorted(tensors)}: "
            "server and clients must make the same model"
        )
    for name, tensor in tensors.items():
        values = torch.from_numpy(np.array(arrays[name].numpy()))
        if values.shape != tensor.shape:
            raise TpsgdError(
                f"{name} has the shape {tuple(values.shape)} in the message and "
                f"{tuple(tensor.shape)} in the model: server and clients must make the same model"
            )
        tensor.copy_(values)


def grow_and_load(model: nn.Module, arrays: Mapping[str, Any], classes: int) -> None:
    """Write arrays into a model that may not have outputs for all classes yet."""
    grow(model, classes)
    load_arrays(model, arrays)


def head_arrays(model: nn.Module) -> set[str]:
    """The names of the arrays with a row for each class: those of the last layer."""
    layer = last_block(model).layer
    ours = {id(p) for p in layer.parameters(recurse=False)}
    return {name for name, p in model.named_parameters() if id(p) in ours}


def with_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """An array with zeros for the rows that it does not have yet; old rows stay bit for bit.

    Examples:
        >>> with_rows(np.ones((1, 2)), 2).tolist()
        [[1.0, 1.0], [0.0, 0.0]]
    """
    missing = [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, missing)
