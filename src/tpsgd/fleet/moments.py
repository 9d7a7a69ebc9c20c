"""Ridge heads: the sums of all clients are the sums over all samples, so one round solves them.

A client sends the moments of the last layer's inputs and of the one-hot labels, in float64: counts,
means, and the centred products xx, xy and yy (of symmetric ones the upper triangle). The server
adds them up exactly (`MomentSums.merge`) and solves once, as `tpsgd.ridge()` does on data in one
place. Moments say more about a client's samples than averaged weights do: see docs/fleet.md.
"""

# pyright: reportMissingImports=false

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor, nn

from tpsgd.engine.batches import as_source
from tpsgd.engine.solved import unsolvable
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.recurrent import connect
from tpsgd.rules import frozen
from tpsgd.solvers.equations import Equations, inputs_of
from tpsgd.solvers.least_squares import MomentSums
from tpsgd.streams.new_classes import last_block
from tpsgd.training.evaluate import form_for

BATCH = 1024


def solvable_layer(model: nn.Module) -> Any:
    """The last layer, if least squares can solve it."""
    block = last_block(model)
    if reason := unsolvable(block, frozen(), last=True):
        raise TpsgdError(f"ridge() cannot solve the last block ({block}): {reason}")
    return block.layer


@torch.no_grad()
def moments_of(model: nn.Module, data: Any, classes: int, loss: Loss | None = None) -> MomentSums:
    """The sums over some samples, of the last layer's inputs and the labels."""
    layer, inputs = solvable_layer(model), list[Tensor]()
    equations = Equations(layer, classes, signed=loss is bce)
    sums: MomentSums | None = None
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with modes_restored(model):
            net = connect(model).eval()
            for batch in as_source(data, form_for(model, BATCH), None, None).batches():
                x, labels = batch.load()
                net(x)
                for rows in equations.parts(inputs.pop(), labels):
                    sums = sums or MomentSums(*rows, layer.bias is not None)
                    sums.add(*rows)
    finally:
        handle.remove()
    if sums is None:
        raise TpsgdError("the data is empty: there is nothing to sum")
    return sums


def shapes_of(inputs: int, classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays that a client sends."""
    triangle = {n: (n * (n + 1) // 2,) for n in (inputs, classes)}
    return {
        "count": (1,), "x": (inputs,), "y": (classes,),
        "xx": triangle[inputs], "xy": (inputs, classes), "yy": triangle[classes],
    }  # fmt: skip


def as_arrays(sums: MomentSums) -> ArrayRecord:
    """Sums as the arrays of a message."""
    values = {
        "count": np.array([sums.count]),
        "x": sums.x.squeeze(0).numpy(),
        "y": sums.y.squeeze(0).numpy(),
        "xx": _upper(sums.xx),
        "xy": sums.xy.numpy(),
        "yy": _upper(sums.yy),
    }
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def from_arrays(
    arrays: ArrayRecord, inputs: int, names: list[str], classes: list[str], bias: bool
) -> MomentSums:
    """The sums of a message, with a column for each class of the fleet.

    `names` are the columns of the message. A class that the client does not have was 0 in all its
    one-hot labels, which needs no approximation.
    """
    values = {name: torch.from_numpy(np.array(array.numpy())) for name, array in arrays.items()}
    columns, k = torch.tensor([classes.index(name) for name in names]), len(classes)
    sums = MomentSums(torch.empty(0, inputs), torch.empty(0, k), bias)
    sums.count = int(values["count"])
    sums.x[0], sums.y[0, columns] = values["x"], values["y"]
    sums.xx = _symmetric(values["xx"], inputs)
    sums.xy[:, columns] = values["xy"]
    sums.yy[columns.unsqueeze(1), columns] = _symmetric(values["yy"], len(names))
    return sums


def why_impossible(arrays: ArrayRecord, samples: int) -> str | None:
    """Why arrays of the right shape are no sums over samples, or None."""
    count = int(arrays["count"].numpy()[0])
    if count < samples or samples < 1:
        return f"its sums are over {count} rows, but it says that it has {samples} samples"
    for name in ("xx", "yy"):
        triangle = arrays[name].numpy()
        side = int((2 * len(triangle) + 0.25) ** 0.5)
        diagonal = triangle[np.cumsum([0, *range(side, 1, -1)])]
        if (diagonal < 0).any():
            return f"the diagonal of {name} has sums of squares below 0"
    return None


def merged(sums: Iterable[MomentSums]) -> MomentSums:
    """The sums over the samples of all clients."""
    total, *others = sums
    for each in others:
        total.merge(each)
    return total


@torch.no_grad()
def set_head(model: nn.Module, sums: MomentSums, alpha: float | None) -> float:
    """Solve for the last layer's weights, and write them into the model: the penalty."""
    layer = solvable_layer(model)
    solution = sums.solve(alpha)
    layer.weight.copy_(solution.weight.reshape(layer.weight.shape))
    if layer.bias is not None:
        layer.bias.copy_(solution.bias)
    return float(solution.alpha)


def head_inputs(model: nn.Module) -> int:
    """How many inputs the last layer reads."""
    return inputs_of(solvable_layer(model))


def _upper(matrix: Tensor) -> np.ndarray:
    return matrix[tuple(torch.triu_indices(len(matrix), len(matrix)))].numpy()


def _symmetric(triangle: Tensor, side: int) -> Tensor:
    matrix = torch.zeros(side, side, dtype=torch.float64)
    rows, columns = torch.triu_indices(side, side)
    matrix[rows, columns] = matrix[columns, rows] = triangle.double()
    return matrix
