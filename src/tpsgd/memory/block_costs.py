"""What each block takes when it learns from a batch: the costs that a pipeline is balanced by."""

from dataclasses import replace
from typing import Any

from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.settings import Settings, listed
from tpsgd.engine.spec import completed, rules_for
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.memory.stages import (
    BlockCost,
    PipelinePlan,
    balanced_stages,
    plan_of,
    refuse_unsuited,
)
from tpsgd.nets.blocks import split
from tpsgd.train import sequential, simultaneous

Method = Any  # a rule, or a list with one per block


def plan_pipeline(
    model: nn.Module,
    inputs: Inputs,
    rule: Method,
    settings: Settings,
    ranks: int,
) -> PipelinePlan:
    """The blocks of every rank, and what they take."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise TpsgdError(f"ranks must be a whole number, 1 or more, got {ranks!r}")
    blocks = split(model, settings.blocks)
    refuse_unsuited(blocks, rules_for(rule, blocks, None), listed(settings.optimizer), ranks)
    settings = completed(rule, split(model), replace(settings, order=simultaneous))
    costs, weights = block_costs(model, inputs, rule, settings)
    batches = -(-inputs.samples // settings.batch_size) * max(listed(settings.epochs))
    return plan_of(costs, balanced_stages(costs, ranks), weights, batches or None)


def block_costs(
    model: nn.Module, inputs: Inputs, rule: Method, settings: Settings
) -> tuple[list[BlockCost], int]:
    """The costs of every block, and the bytes of the model's weights.

    Each block is rehearsed by itself. Where gradients are summed over micro-batches, or the steps
    of all optimizers are taken in one kernel, they last until the end of the batch.
    """
    memory = replace(settings.memory, budget=None, reuse=True)
    alone = replace(settings, order=sequential, memory=memory, augment=None, validation=None)
    rehearsal = rehearse(model, inputs, rule, alone)
    in_the_end = settings.memory.micro_batch or str(settings.device).startswith("cuda")
    samples, costs = settings.memory.micro_batch or settings.batch_size, []
    for i, outputs in enumerate(rehearsal.outputs):
        stages = [s for s in rehearsal.stages if s.blocks == (i,)]
        stage = max(stages, key=lambda stage: stage.peak)  # of a frozen block, its forward pass
        lasting = ["optimizer", "projections", *["gradients"] * bool(in_the_end)]
        between = sum(stage.parts.get(name, 0) for name in lasting)
        products = round(stage.multiplications * settings.batch_size)
        costs.append(BlockCost(products, between, stage.peak - between, samples * outputs))
    return costs, rehearsal.weights
