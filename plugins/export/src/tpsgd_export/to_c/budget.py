"""A budget of RAM: a net that needs more is refused, with what would make it smaller."""

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, size
from tpsgd_export.recipe import Convolution, StepRecipe
from tpsgd_export.to_c.memory import CODES, MemoryMap


def check_budget(ram: str | int | None, memory: MemoryMap, recipe: StepRecipe) -> None:
    """Refuse a net that needs more RAM than a budget such as "16KB"."""
    if ram is None or memory.ram_bytes <= as_bytes(ram):
        return
    amounts = ", ".join(f"{name} {count:,} B" for name, count in memory.ram.items())
    *others, last = advice(memory, recipe)
    ways = f"{', '.join(others)} or {last}" if others else last
    raise TpsgdError(
        f"the net needs {memory.ram_bytes:,} B of RAM ({amounts}), and ram={size(as_bytes(ram))} "
        f"is {as_bytes(ram):,} B: take {ways}"
    )


def advice(memory: MemoryMap, recipe: StepRecipe) -> list[str]:
    """What would make this net smaller in RAM; the last applies to every net."""
    arena = sum(count for name, count in memory.ram.items() if name.startswith("arena"))
    maps = any(isinstance(row.layer, Convolution) for row in recipe.rows)
    ways = ["a smaller batch"] * (recipe.batch > 1)
    ways += ["optimizer='sgd'"] * (recipe.optimizer != "sgd")
    ways += ["rule='readout' (its class codes are fixed)"] * (CODES in memory.ram)
    if maps and 2 * arena > memory.ram_bytes:
        return [*ways, "smaller inputs", "an earlier stride", "fewer filters"]
    return [*ways, "fewer filters or units" if maps else "fewer units"]
