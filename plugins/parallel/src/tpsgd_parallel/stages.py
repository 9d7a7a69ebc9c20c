"""Which blocks each rank of a pipeline trains, chosen from what the blocks cost.

All ranks work at the same time, so the slowest sets the pace: the cut makes the multiplications of
the busiest rank fewest. Among the cuts that are about equal in this, it makes the bytes of the rank
that needs most memory fewest; among those that are about equal in both, it spreads the
multiplications most evenly.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.settings import Settings, listed
from tpsgd.engine.solvers import Ridge
from tpsgd.engine.spec import completed, rules_for
from tpsgd.memory.plan import short
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.cuts.balance import TIE, cheapest_cut
from tpsgd.nets.cuts.split import counts_of, joined, layers_of
from tpsgd.train import sequential, simultaneous

IN_FLIGHT = 2  # batches that a rank has sent and the next one has not received
AHEAD = 1  # batches that a rank receives while it learns from another


@dataclass(frozen=True)
class BlockCost:
    """What a block takes when it learns from a batch."""

    multiplications: int  # of a step
    lasting: int  # bytes between two steps: the optimizer's state, class codes
    passing: int  # bytes during its step: activations, gradients
    outputs: int  # bytes of what it passes on


@dataclass(frozen=True)
class RankCost:
    """What a rank takes for its blocks; `peak_bytes` includes the weights of the whole model."""

    blocks: int
    multiplications: int
    peak_bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """The costs of every rank, and the share of time that ranks are expected to be busy."""

    ranks: tuple[RankCost, ...]
    utilisation: float

    @property
    def stages(self) -> list[int]:
        """The number of blocks on each rank, for `tpsgd.pipeline(stages=...)`."""
        return [rank.blocks for rank in self.ranks]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {"ranks": [asdict(rank) for rank in self.ranks], "utilisation": self.utilisation}

    def cells(self) -> list[list[str]]:
        """The plan as a table: the head, a row for each rank, and the utilisation."""
        rows = [["pipeline: rank", "block", "multiplications", "total"]]
        for number, (start, end) in enumerate(pairwise(accumulate(self.stages, initial=0))):
            span = f"{end}" if end - start == 1 else f"{start + 1} to {end}"
            rank = self.ranks[number]
            rows.append([f"{number}", span, f"{rank.multiplications:,}", short(rank.peak_bytes)])
        return [*rows, ["expected to be busy", "", "", f"{self.utilisation:.0%}"]]


def balanced_stages(costs: Sequence[BlockCost], ranks: int) -> list[int]:
    """How many consecutive blocks each rank has.

    Examples:
        >>> balanced_stages([BlockCost(n, 0, 0, 0) for n in (9, 3, 3, 3)], 2)
        [1, 3]
    """

    def products(start: int, end: int) -> float:
        return sum(cost.multiplications for cost in costs[start:end])

    fewest, _ = cheapest_cut(len(costs), ranks, products, max)

    def memory(start: int, end: int) -> float:
        return rank_bytes(costs, start, end) if products(start, end) <= TIE * fewest else math.inf

    lowest, _ = cheapest_cut(len(costs), ranks, memory, max)

    def unevenness(start: int, end: int) -> float:
        return products(start, end) ** 2 if memory(start, end) <= TIE * lowest else math.inf

    return list(cheapest_cut(len(costs), ranks, unevenness, lambda a, b: a + b)[1])


def checked_stages(stages: Any, blocks: int, ranks: int) -> list[int]:
    """Stages that were set by hand: the numbers of blocks on each rank."""
    counts = list(stages) if isinstance(stages, (list, tuple)) else []
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts)
    if not counts or not whole or len(counts) != ranks or sum(counts) != blocks:
        raise TpsgdError(
            f"stages={stages!r} must be the numbers of blocks on each rank, 1 or more: {ranks} "
            f"numbers, one for each rank, that add up to the model's {blocks} blocks"
        )
    return counts


def refuse_unsuited(
    blocks: Sequence[Any], rules: Sequence[Any], optimizers: Sequence[Any], ranks: int
) -> None:
    """Refuse what no pipeline can train: forward is the only way that a batch flows."""
    if ranks > len(blocks):
        raise TpsgdError(
            f"a pipeline of {ranks} ranks needs a block for each of them, and this model has "
            f"{len(blocks)}: start fewer processes"
        )
    if any(isinstance(optimizer, Ridge) for optimizer in optimizers):
        raise TpsgdError(
            "ridge() cannot solve a block in a pipeline, where its inputs change until the end: "
            "take an optimizer, or tpsgd.data_parallel() with order=tpsgd.sequential"
        )
    for rule in rules[:-1]:
        if rule.needs_net:
            raise TpsgdError(
                f"{rule.name} cannot learn in a pipeline: its signal comes from the whole net, "
                "which no rank has; choose a rule that needs labels alone"
            )
    for block in blocks:
        if block.recurrent:
            raise TpsgdError(
                f"block {block.index + 1} ({block}) cannot be part of a pipeline: recurrent layers "
                "read the one before step by step, in one process; take tpsgd.data_parallel()"
            )


def rank_bytes(costs: Sequence[BlockCost], start: int, end: int) -> int:
    """The bytes of a rank with the blocks from `start` to `end`, beyond the model's weights."""
    blocks = costs[start:end]
    received = AHEAD * costs[start - 1].outputs if start else 0
    sent = IN_FLIGHT * blocks[-1].outputs if end < len(costs) else 0
    lasting = sum(cost.lasting for cost in blocks)
    return lasting + max(cost.passing for cost in blocks) + received + sent


def plan_of(
    costs: Sequence[BlockCost], stages: Sequence[int], weights: int, batches: int | None = None
) -> PipelinePlan:
    """What every rank of these stages takes.

    Args:
        costs: of the model's blocks.
        stages: the number of blocks on each rank.
        weights: bytes of the model, which every rank holds.
        batches: how many go through the pipeline; None: so many that its filling does not count.
    """
    ranks = []
    for start, end in pairwise(accumulate(stages, initial=0)):
        products = sum(cost.multiplications for cost in costs[start:end])
        ranks.append(RankCost(end - start, products, weights + rank_bytes(costs, start, end)))
    busiest = max(rank.multiplications for rank in ranks)
    mean = sum(rank.multiplications for rank in ranks) / len(ranks)
    filling = 1.0 if batches is None else batches / (batches + len(ranks) - 1)
    return PipelinePlan(tuple(ranks), filling * mean / max(1, busiest))


def plan_pipeline(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings, ranks: int
) -> PipelinePlan:
    """The blocks of every rank, and what they cost; `rule` may be a list with one per block."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise TpsgdError(f"ranks must be a whole number, 1 or more, got {ranks!r}")
    layers = layers_of(model, None, settings.no_split)
    blocks = joined(layers, counts_of(layers, settings.where))
    refuse_unsuited(blocks, rules_for(rule, blocks, None), listed(settings.optimizer), ranks)
    settings = completed(rule, layers, replace(settings, order=simultaneous))
    costs, weights = block_costs(model, inputs, rule, settings)
    batches = -(-inputs.samples // settings.batch_size) * max(listed(settings.epochs))
    return plan_of(costs, balanced_stages(costs, ranks), weights, batches or None)


def block_costs(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings
) -> tuple[list[BlockCost], int]:
    """The costs of every block, and the bytes of the model's weights.

    Each block is rehearsed by itself. Gradients that are summed over micro-batches last until the
    end of the batch.
    """
    memory = replace(settings.memory, budget=None, reuse=True)
    alone = replace(settings, order=sequential, memory=memory, augment=None, validation=None)
    rehearsal = rehearse(model, inputs, rule, alone)
    samples, costs = settings.memory.micro_batch or settings.batch_size, []
    for i, outputs in enumerate(rehearsal.outputs):
        stages = [s for s in rehearsal.stages if s.blocks == (i,)]
        stage = max(stages, key=lambda stage: stage.peak)  # of a frozen block, its forward pass
        lasting = ["optimizer", "projections", *["gradients"] * bool(settings.memory.micro_batch)]
        between = sum(stage.parts.get(name, 0) for name in lasting)
        products = round(stage.multiplications * settings.batch_size)
        costs.append(BlockCost(products, between, stage.peak - between, samples * outputs))
    return costs, rehearsal.weights
