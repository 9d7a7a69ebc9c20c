"""Layers that do not learn, with weights of a byte: whole numbers and a scale for each row."""

from dataclasses import replace

import torch

from tpsgd.common.errors import TpsgdError
from tpsgd_export.recipe import BlockRecipe, StepRecipe

LARGEST = 127  # of a weight


def with_small_weights(recipe: StepRecipe) -> StepRecipe:
    """The recipe with the weights of layers that do not learn rounded to bytes, and their scales.

    A row of weights, those of a unit or of a filter, is its scale times numbers from -127 to 127.
    """
    if recipe.recurrent:
        raise TpsgdError("frozen='int8' is for nets that are not recurrent: leave it out")
    if all(block.learns for block in recipe.blocks):
        raise TpsgdError(
            "frozen='int8' is for layers that do not learn, and all of these do: freeze some with "
            "requires_grad_(False) or rules.frozen(), or leave it out"
        )
    first = next(block.number for block in recipe.blocks if block.learns)
    behind = [b for b in recipe.blocks if b.number > first and not b.learns]
    if recipe.backprop and behind:
        raise TpsgdError(
            f"frozen='int8' is for layers that no error goes back through, and that of backprop "
            f"goes through block {behind[0].number + 1} ({behind[0].name}): leave it out, or "
            "freeze the layers before it, too"
        )
    blocks = [
        block if block.learns else replace(_rounded(block), inner=tuple(map(_rounded, block.inner)))
        for block in recipe.blocks
    ]
    return replace(recipe, blocks=tuple(blocks))


def _rounded(block: BlockRecipe) -> BlockRecipe:
    weight = block.parameters["weight"]
    largest = weight.flatten(1).abs().amax(1)
    scales = torch.where(largest > 0, largest / LARGEST, torch.ones_like(largest))
    each = scales.view(-1, *[1] * (weight.dim() - 1))
    parameters = {**block.parameters, "weight": (weight / each).round() * each}
    return replace(block, parameters=parameters, scales=scales)
