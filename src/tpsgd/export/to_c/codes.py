"""Where an exported net has its class codes: computed by a hash, or in a table in flash."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from tpsgd import projections
from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import Codes, Recipe
from tpsgd.export.to_c.memory import FEW_CODES
from tpsgd.maths.random import Key
from tpsgd.objectives import Objective, Site
from tpsgd.projections import Projection, Redrawn, binary
from tpsgd.rules import Rule

KINDS = ("auto", "hash", "flash", "binary")


def with_codes(recipe: Recipe, kind: str) -> Recipe:
    """The recipe with its class codes computed by a hash, in flash, or in flash if they are few."""
    each = [block.local.codes for block in recipe.blocks if block.local]
    few = sum(4 * recipe.outputs * codes.size for codes in each) <= FEW_CODES
    if kind not in ("flash", "auto") or (kind == "auto" and not few):
        return recipe
    blocks = [
        replace(
            block, local=replace(block.local, codes=_in_table(block.local.codes, recipe.outputs))
        )
        if block.local and not block.local.codes.per_step
        else block
        for block in recipe.blocks
    ]
    return replace(recipe, blocks=tuple(blocks))


def _in_table(codes: Codes, classes: int) -> Codes:
    if codes.table is not None:
        return codes
    return Codes(codes.size, "table", table=drawn(codes, classes))


def drawn(codes: Codes, classes: int, step: int = 0) -> Tensor:
    """The numbers of class codes, a row for each class; of a time step, if each has its own."""
    if codes.table is not None:
        return codes.table
    shape = (codes.filters, codes.size // codes.filters) if codes.filters else (codes.size,)
    name = "per_filter" if codes.filters else codes.distribution
    projection: Projection = getattr(projections, name)(codes.std)
    return projection(shape, classes, Key(codes.seed, codes.block, step)).flatten(1)


def with_binary_codes(rule: Rule | Sequence[Rule]) -> Rule | list[Rule]:
    """The same rule with codes of -1 and +1, which a device computes without a table."""
    if not isinstance(rule, Rule):
        return [_binary(r) for r in rule]
    return _binary(rule)


def _binary(rule: Rule) -> Rule:
    objective = rule.objective
    if objective is None:
        return rule

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


def check_kind(kind: str) -> None:
    """Refuse another word for where the codes are."""
    check_word("codes", kind, KINDS)


def check_word(name: str, word: str, words: Sequence[str]) -> None:
    """Refuse a word that is none of these."""
    if word not in words:
        raise TpsgdError(f"{name} must be one of {', '.join(words)}, got {word!r}")
