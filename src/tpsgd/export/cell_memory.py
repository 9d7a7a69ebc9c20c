"""Where the numbers of a recurrent net lie while it reads sequences: weights, sums, states.

The program holds two arrays. `net_state` has what lasts: weights that learn, the optimizer's
moments, measured gains. `net_arena` has what belongs to one sequence: the sums of gradients, the
states, and scratch. Neither depends on the length of the sequences.
"""

from dataclasses import dataclass, field
from typing import Any

from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import BlockRecipe, Cell, Dense, Diagonal, Recipe

MOMENTS = {"sgd": 0, "momentum": 1, "adam": 2}  # numbers of the optimizer for a parameter
STATE_WORDS = 1  # of net_state besides its numbers: classes
PROGRESS_WORDS = 6  # of tps_progress in kernels/cells.h


@dataclass(frozen=True)
class Places:
    """Where a block's numbers lie: weights among those that learn or in flash, others in the arena.

    `arena` has places by name; `count` has how many numbers lie there.
    """

    block: BlockRecipe
    weight: int
    slot: int | None  # of a measured gain
    arena: dict[str, int] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)

    @property
    def layer(self) -> Any:
        """The layer's numbers."""
        return self.block.layer


@dataclass(frozen=True)
class CellMemory:
    """The memory of a recurrent net, in numbers of four bytes."""

    blocks: tuple[Places, ...]
    weights: int  # that learn
    fixed: int  # that lie in flash
    moments: int
    ticks: int
    gains: int
    arena: int
    scratch: int
    logits: int
    dz: int

    @property
    def numbers(self) -> int:
        """What lasts between sequences: weights, moments, ticks and gains."""
        return self.weights + self.moments + self.ticks + self.gains

    @property
    def state_bytes(self) -> int:
        """Bytes of `net_state`."""
        return 4 * (self.numbers + STATE_WORDS)

    @property
    def arena_bytes(self) -> int:
        """Bytes of `net_arena`."""
        return 4 * (self.arena + len(self.blocks) + PROGRESS_WORDS)

    @property
    def ram(self) -> int:
        """Bytes of both."""
        return self.state_bytes + self.arena_bytes

    @property
    def record_bytes(self) -> int:
        """Bytes of a saved record: three words, the numbers, a checksum."""
        return 4 * (3 + self.numbers + 1)


def cell_memory(recipe: Recipe) -> CellMemory:
    """The memory of a recurrent net; what cannot be read step by step is refused."""
    _check(recipe)
    blocks: list[Places] = []
    weights = fixed = slots = arena = 0
    for block in recipe.blocks:
        counts = _counts(block, _feeds(recipe, block.number))
        places = {}
        for name, count in counts.items():
            places[name], arena = arena, arena + count
        measured = block.local is not None and block.local.target > 0
        slot = slots if measured else None
        blocks.append(Places(block, weights if block.learns else fixed, slot, places, counts))
        slots += measured
        weights, fixed = weights + block.learns * block.weights, fixed + (
            not block.learns
        ) * block.weights
    scratch = max(_scratch(block) for block in recipe.blocks)
    return CellMemory(
        tuple(blocks), weights, fixed, MOMENTS[recipe.optimizer] * weights,
        2 * len(blocks) if recipe.optimizer == "adam" else 0, slots,
        arena + scratch + recipe.outputs + 1, arena, arena + scratch,
        arena + scratch + recipe.outputs,
    )  # fmt: skip


def _feeds(recipe: Recipe, number: int) -> bool:
    """Whether the next layer reads a block's output at every time step."""
    after = recipe.blocks[number + 1 :]
    return bool(after) and after[0].recurrent


def _counts(block: BlockRecipe, feeds: bool) -> dict[str, int]:
    """How many numbers of the arena a block needs for itself."""
    layer: Any = block.layer
    if isinstance(layer, Dense):
        return {"output": layer.outputs}
    if isinstance(layer, Cell):
        summed = block.weights - layer.outputs * ("cells.0.bias_h" in block.parameters)
        return {"output": layer.outputs} | ({"sums": summed} if block.learns else {})
    counts = {"output": layer.outputs, "x": layer.inputs, "h": 2 * layer.states}
    counts["lambda"] = 3 * layer.states
    if layer.loss_at == "mean" and not feeds:
        counts["mean"] = layer.outputs
    if block.learns:
        counts |= {"traces": 2 * layer.states * (1 + layer.inputs), "sums": block.weights}
    return counts


def _scratch(block: BlockRecipe) -> int:
    """Numbers that a block needs only while it computes a time step."""
    layer: Any = block.layer
    if isinstance(layer, Dense):
        return 0
    if isinstance(layer, Cell):
        return 2 * layer.outputs
    forward = 1 + 5 * layer.outputs
    return forward + (2 * layer.outputs + 2 * layer.states) * block.learns


def _check(recipe: Recipe) -> None:
    """Refuse what cannot be learned one time step at a time."""
    for block in recipe.blocks:
        who = f"block {block.number + 1} ({block.name})"
        feeds = _feeds(recipe, block.number)
        if isinstance(block.layer, Diagonal) and block.learns and block.layer.loss_at == "mean":
            raise TpsgdError(
                f'{who}: a loss at the "mean" over time is known only after the last step, and the '
                'steps before it are gone; choose loss_at="every" or "last"'
            )
        if not block.recurrent and not isinstance(block.layer, Dense):
            raise TpsgdError(f"{who} after a recurrent layer is not exported; nn.Linear is")
        if block.recurrent and feeds != (len(block.shape) == 2):
            raise TpsgdError(
                f"{who}: a recurrent layer gives the next one all its states (sequence=True), and "
                "only the last one gives one vector"
            )
        if block.local is not None and block.local.name == "readout" and block.local.codes.per_step:
            raise TpsgdError(f"{who}: a readout has the same codes at every time step")
