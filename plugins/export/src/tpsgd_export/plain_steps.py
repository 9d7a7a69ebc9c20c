"""The scale of readouts that learn by plain SGD, one sample at a time.

A calibrated readout is made for Adam: its logits are so large that the loss of a sample is steep,
and steps of plain SGD that suit it are too small for the other blocks. Here the scale of fixed
codes is 4, that of learned ones 2, and less where features are large: the logits that a net begins
with have a deviation of 1 at most.

Learned codes have the gain 2. With that of `readout`, the scale over the root of the number of
features d, plain SGD would move the readout's weights, gain times code, by gain^2 = scale^2 / d
times the rate: by a sixteenth of it with 256 features and the scale 4. Hidden units would follow a
classifier that is neither constant nor good. With the gain 1 a readout learns as fast as an output
layer, and with 2 four times as fast. In recurrent blocks, whose gradient is a sum over time steps,
that was no better, and learned codes have the scale 4 as fixed ones have. Chosen on held-out
samples of digits, an IMU and EEG, beside other scales and gains: `benchmarks/edge_passes.py`.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from tpsgd.rules import Rule, has_default_scale, learns_codes, with_scale
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import BlockRecipe, StepRecipe

SCALE = 4.0  # of fixed codes
LEARNED_SCALE, LEARNED_GAIN = 2.0, 2.0  # of codes that learn, but for recurrent blocks


def read_with_plain_scales(
    model: nn.Module, rule: Rule | Sequence[Rule], shape: Sequence[int], **settings: Any
) -> tuple[Any, StepRecipe]:
    """The rules that the net learns by, `with_plain_scales`, and its step by them.

    Args:
        model, rule, shape, settings: as for `read_model`.
    """
    recipe = read_model(model, rule, shape, **settings)
    plain = with_plain_scales(rule, recipe)
    return (rule, recipe) if plain is rule else (plain, read_model(model, plain, shape, **settings))


def with_plain_scales(rule: Rule | Sequence[Rule], recipe: StepRecipe) -> Any:
    """The rules of a net's blocks; readouts that would be calibrated have a constant scale.

    With the features that `recipe` has measured; without samples it has none, and the scale is 4,
    or 2 of codes that learn.
    """
    rules = [rule] * len(recipe.blocks) if isinstance(rule, Rule) else list(rule)
    if recipe.optimizer == "adam" or recipe.targets or not any(map(has_default_scale, rules)):
        return rule
    return [
        _with_plain_scale(r, block) if has_default_scale(r) else r
        for r, block in zip(rules, recipe.blocks, strict=True)
    ]


def _with_plain_scale(rule: Rule, block: BlockRecipe) -> Rule:
    """The readout of a block: its first logits have the deviation scale x size of the features."""
    size, fast = _size(block), learns_codes(rule) and not block.recurrent
    scale = LEARNED_SCALE if fast else SCALE
    scale = min(scale, 1 / size) if size else scale
    return with_scale(rule, scale, False, LEARNED_GAIN if fast else None)


def _size(block: BlockRecipe) -> float:
    """The root mean square of a block's features; 0 if it was not measured."""
    local = block.local
    return local.target / local.gain if local and local.target and local.gain else 0.0
