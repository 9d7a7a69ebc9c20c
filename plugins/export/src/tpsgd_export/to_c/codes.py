"""Where an exported net has its class codes: computed by a hash, or in a table in flash."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tpsgd import projections
from tpsgd.maths.random import Key
from tpsgd.objectives import Objective, Site
from tpsgd.projections import Projection, Redrawn, binary
from tpsgd.rules import Rule, scale_of, with_projection
from tpsgd_export.recipe import Codes, StepRecipe
from tpsgd_export.to_c.memory import FEW_CODES


def with_codes(recipe: StepRecipe, kind: str) -> StepRecipe:
    """The recipe with its class codes computed by a hash, in flash, or in flash if they are few.

    Binary codes that are not asked for as numbers, or by hash, are bits in flash.
    """
    local = [block.local for block in recipe.blocks if block.local]
    few = sum(4 * recipe.outputs * each.codes.size for each in local) <= FEW_CODES
    in_flash = kind == "flash" or (kind == "auto" and few)
    blocks = []
    for block in recipe.blocks:
        codes = block.local.codes if block.local else None
        as_bits = codes is not None and codes.distribution == "binary" and kind != "hash"
        if block.local and codes and not codes.per_step and (in_flash or as_bits):
            table = drawn(codes, recipe.outputs)
            codes = Codes(codes.size, "table" if in_flash else "bits", std=codes.std, table=table)
            block = replace(block, local=replace(block.local, codes=codes))
        blocks.append(block)
    return replace(recipe, blocks=tuple(blocks))


def drawn(codes: Codes, classes: int, step: int = 0) -> Tensor:
    """The numbers of class codes, a row for each class; of a time step, if each has its own."""
    if codes.table is not None:
        return codes.table
    shape = (codes.filters, codes.size // codes.filters) if codes.filters else (codes.size,)
    name = "per_filter" if codes.filters else codes.distribution
    projection: Projection = getattr(projections, name)(codes.std)
    return projection(shape, classes, Key(codes.seed, codes.block, step)).flatten(1)


def with_binary_codes(rule: Rule | Sequence[Rule]) -> Any:
    """The same rule, or rules, with codes of -1 and +1, which a device computes without a table.

    A readout stays one, with its scale, or without one that somebody has chosen.
    """
    if not isinstance(rule, Rule):
        return [with_binary_codes(each) for each in rule]
    objective = rule.objective
    if objective is None:
        return rule
    if scale_of(rule) is not None:
        return with_projection(rule, binary)

    def of_binary_codes(site: Site) -> Objective:
        return objective(_BinarySite(**vars(site)))

    return replace(rule, objective=of_binary_codes)


class _BinarySite(Site):
    """A site whose codes are binary, whatever projection is asked for."""

    def draw(self, projection: Projection, shape: tuple[int, ...] | None = None) -> Tensor:
        return super().draw(binary(projection.std), shape)

    def codes(
        self, projection: Projection, shape: tuple[int, ...] | None = None
    ) -> "Tensor | Redrawn":
        return super().codes(binary(projection.std), shape)

    def drawing(self, projection: Projection, shape: tuple[int, ...]) -> Redrawn:
        return super().drawing(binary(projection.std), shape)
