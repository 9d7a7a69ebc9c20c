"""The memory of an exported net, to the byte: what lies in RAM, what in flash, and where.

The outputs of a block and of the next lie at the two ends of one arena. Behind them are the
derivatives of one unit, or of one feature map, for every sample of a batch, and the logits of a
readout. Nothing stores a gradient. Class codes that learn lie behind the weights, measured gains
behind them.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tpsgd.export.recipe import BlockRecipe, Convolution, Recipe
from tpsgd.units import columns

FLOAT = 4
QUANTILES = 2049 * 4  # bytes of the table of normal quantiles
MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}
FEW_CODES = QUANTILES  # bytes of codes up to which a table is smaller than computing them


@dataclass(frozen=True)
class Layout:
    """Places in the arena, in numbers, and bytes of everything."""

    outputs: tuple[int, ...]  # where each block's output begins
    dz: int
    logits: int
    arena: int
    ram: dict[str, int]  # bytes by what they hold
    flash: dict[str, int]
    operations: int  # multiplications and additions of a step, in pairs
    unit: str = "step"  # of which these are

    @property
    def ram_bytes(self) -> int:
        """All RAM but the stack and the caller's samples."""
        return sum(self.ram.values())

    @property
    def flash_bytes(self) -> int:
        """All constants; code comes on top."""
        return sum(self.flash.values())

    def __str__(self) -> str:
        rows = [("RAM", f"{self.ram_bytes:,} B")]
        rows += [(f"  {name}", f"{count:,} B") for name, count in self.ram.items()]
        rows += [("flash, without code", f"{self.flash_bytes:,} B")]
        rows += [(f"  {name}", f"{count:,} B") for name, count in self.flash.items()]
        rows += [(f"multiply-adds a {self.unit}", f"{self.operations:,}")]
        width = max(len(number) for _, number in rows)
        return columns([(name, number.rjust(width)) for name, number in rows])


def layout(recipe: Recipe) -> Layout:
    """Where the numbers of a feed-forward net lie."""
    blocks, batch = recipe.blocks, recipe.batch
    both = batch * max([blocks[0].size, *(_together(*pair) for pair in pairwise(blocks))])
    outputs = tuple(0 if block.number % 2 == 0 else both - batch * block.size for block in blocks)
    dz = batch * max(pixels(block) for block in blocks if block.learns)
    readouts = any(block.local and block.local.name == "readout" for block in blocks)
    logits = batch * recipe.outputs if readouts else 0
    arena = both + dz + logits
    ram = lasting_ram(recipe) | {"arena: outputs of two blocks, dz, logits": FLOAT * arena}
    return Layout(outputs, both, both + dz, arena, ram, flash(recipe), _operations(recipe))


def _together(block: BlockRecipe, following: BlockRecipe) -> int:
    """Numbers of a sample in the outputs of two blocks.

    The output of an odd block ends at the end of the space for both; its pools leave a gap behind
    it, which cannot be used.
    """
    first = block.pooled if block.number % 2 == 0 else block.size
    return first + following.size


def pixels(block: BlockRecipe) -> int:
    """Numbers of one unit of a sample: those of a feature map, or one."""
    return prod(block.layer.out) if isinstance(block.layer, Convolution) else 1


def fan_in(block: BlockRecipe) -> int:
    """Weights of one unit."""
    layer = block.layer
    if isinstance(layer, Convolution):
        return layer.channels // layer.groups * prod(layer.kernel)
    return layer.inputs


def gains(recipe: Recipe) -> int:
    """How many readouts measure the size of their features."""
    return sum(bool(block.local and block.local.target) for block in recipe.blocks)


def lasting_ram(recipe: Recipe) -> dict[str, int]:
    """Bytes of what lasts between steps."""
    ram = {"weights": FLOAT * recipe.parameters}
    if codes := recipe.learned - recipe.parameters:
        ram["class codes that learn"] = FLOAT * codes
    if moments := MOMENTS[recipe.optimizer]:
        ram["moments of the optimizer"] = FLOAT * moments * recipe.learned
    small = gains(recipe) + (2 * len(recipe.blocks) if recipe.optimizer == "adam" else 0)
    small += bool(recipe.spare)
    if small:
        ram["scales and counters"] = FLOAT * small
    return ram


def flash(recipe: Recipe) -> dict[str, int]:
    """Bytes of constants."""
    tables = {"initial weights": FLOAT * recipe.all_weights}
    codes = [block.local.codes for block in recipe.blocks if block.local]
    numbers = sum(c.table.numel() for c in codes if c.table is not None)
    if numbers:
        tables["class codes"] = FLOAT * numbers
    if any(c.distribution != "table" for c in codes):
        tables["hashes of classes"] = 8 * sum(len(c.streams) for c in codes)
    if any(c.distribution == "normal" for c in codes):
        tables["normal quantiles"] = QUANTILES
    return tables


def _operations(recipe: Recipe) -> int:
    """Multiply-adds of a step: forward, update, readouts there and back, and their update."""
    total = 0
    for block in recipe.blocks:
        products = block.size * fan_in(block)
        total += products * (1 + block.learns)
        if block.local and block.local.name == "readout":
            total += (2 + block.local.learned) * recipe.outputs * block.local.codes.size
    return total * recipe.batch
