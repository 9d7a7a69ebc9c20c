"""The round that solves a ridge head: every client sends moments, and the server adds them up."""

# pyright: reportMissingImports=false

from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy.strategy_utils import sample_nodes
from torch import nn

from tpsgd.fleet import moments, screening
from tpsgd.fleet.shared_model import arrays_of, grow_and_load
from tpsgd.fleet.strategy import LocalLearning, log

METRICS = {screening.WEIGHT}


def solve_head(
    grid: Grid, model: nn.Module, strategy: LocalLearning, alpha: float | None, timeout: float
) -> None:
    """Ask all connected clients for their moments and solve the last layer of the model."""
    messages = moment_messages(grid, model, strategy)
    before, width = list(strategy.classes), moments.head_inputs(model)
    replies = grid.send_and_receive(messages, timeout=timeout)
    usable = strategy.screened(
        replies,
        screening.has_metrics(METRICS),
        screening.announces_well,
        lambda content: why_no_moments(content, width, before),
    )
    names = {name for message in usable for name in screening.announced(message.content)}
    if new := sorted(names):
        grow_and_load(model, strategy.with_classes(arrays_of(model), new), len(before) + len(new))
        strategy.rounds[-1].new_classes = new
    if not usable:
        log.warning("no client sent moments that can be used: the head stays as it is")
        return
    bias = moments.solvable_layer(model).bias is not None
    each = (
        moments.from_arrays(arrays, width, [*before, *new], strategy.classes, bias)
        for arrays, new in map(_contents, usable)
    )
    penalty = moments.set_head(model, moments.merged(each), alpha)
    log.info("ridge head solved from %s clients, alpha %.3g", len(usable), penalty)


def moment_messages(grid: Grid, model: nn.Module, strategy: LocalLearning) -> list[Message]:
    """A message to every client that is connected, once enough are for the strategy."""
    least = getattr(strategy.strategy, "min_available_nodes", 1)
    _, nodes = sample_nodes(grid, least, 0)
    arrays, number = arrays_of(model), len(strategy.rounds) + 1
    config = ConfigRecord(strategy.shared() | {"server-round": number})
    content = RecordDict({"arrays": arrays, "config": config})
    messages = [Message(content, node, "train.moments") for node in nodes]
    strategy.open_round(number, arrays, messages)
    return messages


def why_no_moments(content: RecordDict, width: int, classes: list[str]) -> str | None:
    """Why a reply has no sums over samples of these classes and the new ones, or None."""
    new = screening.announced(content)
    if again := set(new) & set(classes):
        return f"it announces {sorted(again)[0]!r}, which is no new class"
    shapes = moments.shapes_of(width, len(classes) + len(new))
    if problem := screening.has_arrays(shapes)(content):
        return problem
    metrics: Any
    (arrays,), (metrics,) = content.array_records.values(), content.metric_records.values()
    return moments.why_impossible(arrays, metrics[screening.WEIGHT])


def _contents(message: Message) -> tuple[ArrayRecord, list[str]]:
    (arrays,) = message.content.array_records.values()
    return arrays, screening.announced(message.content)
