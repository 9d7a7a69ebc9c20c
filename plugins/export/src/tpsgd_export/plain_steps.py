"""The scale of readouts that learn by plain SGD, one sample at a time.

A calibrated readout is made for Adam: its logits are so large that the loss of a sample is steep,
and steps of plain SGD that suit it are too small for the other blocks. Here the scale is 4, and
less where features are large: the logits that a net begins with have a deviation of 1 at most.
Chosen on held-out samples of digits, an IMU and EEG: `benchmarks/edge_passes.py`.
"""

from collections.abc import Sequence
from typing import Any

from tpsgd.rules import Rule, has_default_scale, with_scale
from tpsgd_export.recipe import BlockRecipe, StepRecipe

SCALE = 4.0
LARGEST = 1 / SCALE  # root mean square of features up to which that is the scale


def with_plain_scales(rule: Rule | Sequence[Rule], recipe: StepRecipe) -> Any:
    """The rules of a net's blocks; readouts that would be calibrated have a constant scale.

    With the features that `recipe` has measured; without samples it has none, and the scale is 4.
    """
    rules = [rule] * len(recipe.blocks) if isinstance(rule, Rule) else list(rule)
    if recipe.optimizer == "adam" or recipe.targets or not any(map(has_default_scale, rules)):
        return rule
    scales = [SCALE * min(1.0, LARGEST / _size(block)) for block in recipe.blocks]
    return [
        with_scale(r, scale, False) if has_default_scale(r) else r
        for r, scale in zip(rules, scales, strict=True)
    ]


def _size(block: BlockRecipe) -> float:
    """The root mean square of a block's features, if it was measured."""
    local = block.local
    return local.target / local.gain if local and local.target and local.gain else LARGEST
