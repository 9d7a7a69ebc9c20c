"""Ridge heads: the sums of all clients are the sums over all samples, so one round solves them.

A client sends the moments of the last layer's inputs and of the one-hot labels, in float64: counts,
means, and the centred products xx, xy and yy (of symmetric ones the upper triangle). The server
adds them up exactly (`MomentSums.merge`) and solves once, as `tpsgd.ridge()` does on data in one
place. Moments say more about a client's samples than averaged weights do: see docs/fleet.md.
"""

# pyright: reportMissingImports=false

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import form_for
from tpsgd.engine.learners.solved import unsolvable
from tpsgd.engine.solvers.equations import Equations, inputs_of
from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd.engine.sources.loaders import as_source
from tpsgd.losses import Loss, bce
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.new_classes import last_block
from tpsgd.nets.recurrent import connect
from tpsgd.rules import frozen
from tpsgd_fleet import screening
from tpsgd_fleet.screening import announced, arrays_in
from tpsgd_fleet.shared_model import arrays_of, load_arrays
from tpsgd_fleet.strategy import LocalLearning, log

BATCH = 1024


def solvable_layer(model: nn.Module) -> Any:
    """The last layer, if least squares can solve it."""
    block = last_block(model)
    if reason := unsolvable(block, frozen(), last=True):
        raise TpsgdError(f"ridge() cannot solve the last block ({block}): {reason}")
    return block.layer


@torch.no_grad()
def moments_of(model: nn.Module, data: Any, classes: int, loss: Loss | None = None) -> ArrayRecord:
    """On a client: the sums over its samples, as the arrays of a message."""
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
    count, x, y = torch.tensor([sums.count]), sums.x[0], sums.y[0]
    xx, yy = (matrix[np.triu_indices(len(matrix))] for matrix in (sums.xx, sums.yy))
    return ArrayRecord({"count": count, "x": x, "y": y, "xx": xx, "xy": sums.xy, "yy": yy})


def solve_head(
    grid: Grid, model: nn.Module, strategy: LocalLearning, alpha: float | None, timeout: float
) -> None:
    """On the server: ask all connected clients for their moments, and solve the last layer."""
    messages = _questions(grid, model, strategy)
    before, width = list(strategy.classes), inputs_of(solvable_layer(model))
    usable = strategy.screened(
        grid.send_and_receive(messages, timeout=timeout),
        screening.has_metrics(),
        screening.announces_well,
        lambda content: _problem(content, width, before),
    )
    contents = [message.content for message in usable]
    if new := sorted({name for content in contents for name in announced(content)}):
        arrays = strategy.with_classes(arrays_of(model), new)
        load_arrays(model, arrays, len(strategy.classes))
        strategy.rounds[-1].new_classes = new
    if not contents:
        log.warning("no client sent moments that can be used: the head stays as it is")
        return
    layer = solvable_layer(model)
    total = _no_sums(layer)
    for content in contents:
        columns = [strategy.classes.index(name) for name in (*before, *announced(content))]
        total.merge(_sums(arrays_in(content), columns, layer))
    solution = total.solve(alpha)
    with torch.no_grad():
        layer.weight.copy_(solution.weight.reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(solution.bias)
    log.info("ridge head solved from %s clients, alpha %.3g", len(usable), solution.alpha)


def _questions(grid: Grid, model: nn.Module, strategy: LocalLearning) -> list[Message]:
    """A message to every client that is connected, once enough are for the strategy."""
    _, nodes = sample_nodes(grid, getattr(strategy.strategy, "min_available_nodes", 1), 0)
    arrays, number = arrays_of(model), len(strategy.rounds) + 1
    config = ConfigRecord(strategy.shared() | {"server-round": number})
    content = RecordDict({"arrays": arrays, "config": config})
    messages = [Message(content, node, "train.moments") for node in nodes]
    strategy.open_round(number, arrays, messages)
    return messages


def _problem(content: RecordDict, inputs: int, classes: list[str]) -> str | None:
    """Why a reply has no sums over samples of these classes and the new ones, or None."""
    new = announced(content)
    if again := set(new) & set(classes):
        return f"it announces {sorted(again)[0]!r}, which is no new class"
    k = len(classes) + len(new)
    sides = {"xx": inputs, "yy": k}
    triangles = {name: (n * (n + 1) // 2,) for name, n in sides.items()}
    shapes = {"count": (1,), "x": (inputs,), "y": (k,), "xy": (inputs, k), **triangles}
    if problem := screening.has_arrays(shapes)(content):
        return problem
    arrays, samples = arrays_in(content), screening.metrics_of(content)[screening.WEIGHT]
    count = int(arrays["count"].numpy()[0])
    if count < samples or samples < 1:
        return f"its sums are over {count} rows, but it says that it has {samples} samples"
    for name, side in sides.items():
        rows, columns = np.triu_indices(side)
        if (arrays[name].numpy()[rows == columns] < 0).any():
            return f"the diagonal of {name} has sums of squares below 0"
    return None


def _no_sums(layer: Any) -> MomentSums:
    x, y = (torch.empty(0, n) for n in (inputs_of(layer), len(layer.weight)))
    return MomentSums(x, y, layer.bias is not None)


def _sums(arrays: ArrayRecord, columns: list[int], layer: Any) -> MomentSums:
    """The sums of a message, whose targets are these columns of the fleet's targets.

    A class that the client does not have was 0 in all its one-hot labels, which is exact.
    """
    values, sums = arrays.to_torch_state_dict(), _no_sums(layer)
    sums.count = int(values["count"])
    sums.x[0], sums.y[0, columns] = values["x"], values["y"]
    sums.xx = _symmetric(values["xx"], len(sums.xx))
    sums.xy[:, columns] = values["xy"]
    sums.yy[np.ix_(columns, columns)] = _symmetric(values["yy"], len(columns))
    return sums


def _symmetric(triangle: Tensor, side: int) -> Tensor:
    matrix = torch.zeros(side, side, dtype=torch.float64)
    rows, columns = np.triu_indices(side)
    matrix[rows, columns] = matrix[columns, rows] = triangle.double()
    return matrix
