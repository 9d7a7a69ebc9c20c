"""Places in the arena of nets whose blocks are more than a layer: numbers that live at the same
time do not overlap.

The clock ticks once for each row on the way forward, and in a block that learns once more for each
on the way back, the last one first. The output of a row lives until the last row has read it; in a
block that learns, until the weights that read it have moved, and until the derivative of its own
activation was taken. The derivatives of an output live from the first of them that a later row adds
until the row itself has used them. A sum lies where what is added lay, if nothing needs that later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from tpsgd_export.recipe import BlockRecipe, StepRecipe

SAMPLE = "TPS_SAMPLE"  # the place of what the net reads, in C
ORDERS = 64  # at random
OUTPUT, POOLED, ERROR = "output", "pooled", "error"


@dataclass
class Life:
    """Numbers of the arena, and the ticks in which they live.

    Of an output that pools write over, `pooled` numbers are left after the tick `full`.
    """

    count: int
    first: int
    last: int
    pooled: int
    full: int
    place: int = 0

    def until(self, tick: int) -> None:
        """They live in this tick, too."""
        self.first, self.last = min(self.first, tick), max(self.last, tick)

    def at(self, tick: int) -> int:
        """How many there are in a tick, of those that come later none."""
        return self.count if tick <= self.full else self.pooled

    def meets(self, other: "Life") -> bool:
        """Whether they would overlap where they are."""
        tick = max(self.first, other.first)
        if tick > min(self.last, other.last):
            return False
        above = self.place >= other.place + other.at(tick)
        return not above and other.place < self.place + self.at(tick)

    def leave(self, other: "Life") -> None:
        """Move behind the other numbers, as far as these last."""
        self.place = other.place + other.at(max(self.first, other.first))


Lives = list[dict[str, Life]]  # of every row, by name


def lives_of(recipe: StepRecipe) -> Lives:
    """What the rows of a net need in the arena, and when."""
    lives: Lives = []
    sums: list[tuple[int, int, int, int]] = []  # a row, what it reads and adds, and when
    tick, before = 0, -1  # the row whose output a block reads
    for block in recipe.blocks:
        start, rows = len(lives), block.rows
        number = {i: start + i for i in range(len(rows))} | {-1: before}
        reads = [_reads(row, number) for row in rows]
        for row, numbers in zip(rows, reads, strict=True):
            lives.append(_outputs(recipe, row, tick))
            for i in (i for i in numbers if i >= 0):
                _read_from(lives[i]).until(tick)
            sums.append((len(lives) - 1, *numbers, tick))
            tick += 1
        if block.learns:
            for k in reversed(range(len(rows))):
                _back(recipe, lives, rows[k], reads[k], (start, start + k), tick)
                tick += 1
            lives[-1][OUTPUT].until(tick - 1)
            lives[-1][OUTPUT].full = tick - 1
        before = len(lives) - 1
    for own, source, added, when in sums:
        if added >= 0 and source != added:
            _in_place(lives[own], _read_from(lives[added]), when)
    return lives


def _in_place(row: dict[str, Life], added: Life, tick: int) -> None:
    """Let a sum take the place of what is added, if that is not needed after this tick."""
    own = row[OUTPUT]
    if added.last == tick and added.count == added.pooled == own.count:
        added.last, added.full, added.pooled = own.last, own.full, own.pooled
        row[OUTPUT] = added


def _reads(row: BlockRecipe, number: dict[int, int]) -> tuple[int, int]:
    """The rows of the net that a row reads and adds; below 0, none."""
    return number[row.source], -1 if row.added is None else number[row.added]


def _read_from(row: dict[str, Life]) -> Life:
    """What later rows read of a row."""
    return row.get(POOLED, row[OUTPUT])


def _outputs(recipe: StepRecipe, row: BlockRecipe, tick: int) -> dict[str, Life]:
    """The outputs of a row. Pools write over them, unless their derivative needs both."""
    size, pooled = recipe.batch * row.size, recipe.batch * row.pooled
    if has_own_pool(recipe, row):
        return {OUTPUT: _life(size, tick), POOLED: _life(pooled, tick)}
    return {OUTPUT: Life(size, tick, tick, pooled, tick)}


def _life(count: int, tick: int) -> Life:
    return Life(count, tick, tick, count, tick)


def has_own_pool(recipe: StepRecipe, row: BlockRecipe) -> bool:
    """Whether a derivative passes the pools of a row: it is inside a block that learns."""
    return bool(row.pools) and row.learns and row is not recipe.blocks[row.number]


def _back(
    recipe: StepRecipe,
    lives: Lives,
    row: BlockRecipe,
    reads: tuple[int, int],
    rows: tuple[int, int],
    tick: int,
) -> None:
    """What lives while a row learns; `rows` are the first of its block, and itself."""
    start, own = rows
    source, added = reads
    if source >= 0:
        _read_from(lives[source]).until(tick)
    if row.activation != "none" or row.pools or row is recipe.blocks[row.number]:
        lives[own][OUTPUT].until(tick)
    if ERROR in lives[own]:
        lives[own][ERROR].until(tick)
    for i in (i for i in (source, added) if i >= start):
        count = _read_from(lives[i]).count
        lives[i].setdefault(ERROR, _life(count, tick)).until(tick)


def placed(lives: Lives) -> int:
    """Give all numbers their places; where they end. The first order without a gap is taken."""
    every, least = _all(lives), lowest(lives)
    best: tuple[int, list[Life]] | None = None
    for order in _orders(every):
        end = _place(order)
        if best is None or end < best[0]:
            best = end, order
        if end == least:
            return end
    assert best is not None
    return _place(best[1])


def _orders(lives: list[Life]) -> Iterator[list[Life]]:
    """Orders in which numbers may get their places: large ones, long-lived ones, early ones first.

    Then some at random, always the same.
    """
    yield sorted(lives, key=lambda life: (-life.count, life.first))
    yield sorted(lives, key=lambda life: (life.first - life.last, -life.count))
    yield sorted(lives, key=lambda life: life.first)
    chance = Random(0)
    for _ in range(ORDERS):
        yield chance.sample(lives, len(lives))


def _all(lives: Lives) -> list[Life]:
    """All lives, those that rows share once."""
    return list({id(life): life for row in lives for life in row.values()}.values())


def _place(lives: list[Life]) -> int:
    """One after another at the lowest place where nothing lives at the same time."""
    done: list[Life] = []
    for life in lives:
        life.place = 0
        while other := next(filter(life.meets, done), None):
            life.leave(other)
        done.append(life)
    return max(life.place + life.count for life in lives)


def lowest(lives: Lives) -> int:
    """The numbers that live at once, at most: no plan has a smaller arena."""
    every = _all(lives)
    ticks = range(1 + max(life.last for life in every))
    return max(sum(e.at(t) for e in every if e.first <= t <= e.last) for t in ticks)


@dataclass(frozen=True)
class RowPlaces:
    """What a row reads and writes in the arena, as C has it: `tps_row`."""

    x: Any
    added: Any
    pooled: int
    error: Any
    error_of_x: Any
    error_of_added: Any
    clears: int  # 1: it is the first to add to the derivatives of x, 2: of what is added


def places_of_rows(recipe: StepRecipe, places: Sequence[dict[str, int]]) -> list[RowPlaces]:
    """What each row of a net reads and writes."""
    rows: list[RowPlaces] = []
    before, nowhere = -1, "TPS_NOWHERE"
    for block in recipe.blocks:
        start = len(rows)
        number = {i: start + i for i in range(len(block.rows))} | {-1: before}
        reads = [_reads(row, number) for row in block.rows]
        for k, (row, (source, added)) in enumerate(zip(block.rows, reads, strict=True)):
            later = {i for pair in reads[k + 1 :] for i in pair}
            own = places[start + k]
            x, other = (
                places[i].get(POOLED, places[i][OUTPUT]) if i >= 0 else SAMPLE
                for i in (source, added)
            )
            errors = [
                places[i].get(ERROR, nowhere) if i >= start else nowhere for i in (source, added)
            ]
            clears = [
                2**bit
                for bit, i in enumerate((source, added))
                if errors[bit] != nowhere and i not in later
            ]
            twice = source == added and len(clears) == 2
            rows.append(
                RowPlaces(
                    x, nowhere if row.added is None else other, own.get(POOLED, own[OUTPUT]),
                    own.get(ERROR, nowhere), errors[0], errors[1], sum(clears) - 2 * twice,
                )
            )  # fmt: skip
        before = len(rows) - 1
    return rows
