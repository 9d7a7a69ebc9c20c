"""Training within a budget of bytes: which of the ways to hold less, and when to give up."""

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tpsgd.engine.batches import RAGGED_UNCUT, count_samples, first_samples, is_stream
from tpsgd.engine.reuse import default_folder
from tpsgd.engine.settings import Settings
from tpsgd.errors import TpsgdError
from tpsgd.memory.rehearse import Inputs, Rehearsal, rehearse
from tpsgd.nets.padded import Padded
from tpsgd.train import sequential
from tpsgd.units import as_bytes, size

FINE = 16  # slices of a weight's gradient
SPARE = 16 << 10  # bytes for what a rehearsal cannot know, such as where a shuffled part ends


def within_budget(model: nn.Module, data: Any, rule: Any, settings: Settings) -> Settings:
    """The settings that keep within the budget on this data."""
    x, batch_size = _peek(data, settings.batch_size)
    if isinstance(x, Padded):
        raise TpsgdError(RAGGED_UNCUT)
    sets = [data] if settings.validation is None else [data, settings.validation]
    samples = sum(map(count_samples, sets))
    inputs, reserved = Inputs(tuple(x.shape[1:]), x.dtype, samples), 0
    if is_stream(data):  # a loader's batches, this one and the next, and the labels of all samples
        reserved = 2 * batch_size * x[0].nbytes + 3 * 8 * samples
    return within(model, inputs, rule, replace(settings, batch_size=batch_size), reserved)


def _peek(data: Any, batch_size: int) -> tuple[Any, int]:
    """A few samples and the size of a batch; the state of random generators does not change."""
    generator = data.generator if isinstance(data, DataLoader) else None
    state = None if generator is None else generator.get_state()
    try:
        with torch.random.fork_rng():
            if not isinstance(data, DataLoader):
                return first_samples(data), batch_size
            x = first_samples(data, count=1 << 30)
            return x[:2], len(x)
    finally:
        if generator is not None and state is not None:
            generator.set_state(state)


def within(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings, reserved: int = 0
) -> Settings:
    """The settings that hold a budget at the least cost of time.

    Whole batches are tried first, then gradients in fine slices, then micro-batches, then class
    codes made again for every batch. Inputs are reused from memory if they fit, else from a file if
    that fits, else computed again. `reserved` bytes are held by others, a loader for example.
    """
    assert settings.memory.budget is not None
    given, least = as_bytes(settings.memory.budget), Least()
    spare = reserved + max(SPARE, given // 20 if _on_gpu(model, settings) else 0)
    budget, plain = given - spare, settings.within(budget=None)
    for coarse, *finer in _ladders(plain, least):
        found = _holds(model, inputs, rule, coarse, budget, least)
        if found is None and finer:
            found = _bisect(model, inputs, rule, finer, budget, least)
        if found is not None:
            _warn(found, least)
            return found
    need = (least.bytes + spare) * (21 if _on_gpu(model, settings) else 20) // 20
    raise TpsgdError(
        f"a memory budget of {size(given)} cannot be held: this training needs "
        f"{size(need)} ({need} bytes) at least, of which "
        f"{size(least.weights)} are the model itself"
        + (f" and {size(least.optimizer)} the optimizer's state" if least.optimizer else "")
        + _advice(settings, least)
    )


def _advice(settings: Settings, least: "Least") -> str:
    """What would lower the least, if anything is left to the caller."""
    ways = ["a smaller batch_size"] if settings.batch_size > 1 else []
    if least.optimizer > least.weights // 10:
        ways.append("an optimizer without state, optimizer=tpsgd.sgd")
    return f"; less may do with {' or '.join(ways)}" if ways else ""


def _on_gpu(model: nn.Module, settings: Settings) -> bool:
    """Whether an allocator rounds, and keeps, more than a rehearsal can know."""
    device = settings.device if settings.device is not None else next(model.parameters()).device
    return torch.device(device).type == "cuda"


def _warn(chosen: Settings, least: "Least") -> None:
    if chosen.memory.micro_batch is not None and least.varies:
        warnings.warn(
            f"within this budget batches come in pieces, which changes what is learned: "
            f"{', '.join(least.varies)} in this model",
            stacklevel=6,
        )


class Least:
    """The smallest peak that was seen, and what makes pieces of a batch differ from all of it."""

    def __init__(self) -> None:
        self.bytes, self.weights, self.optimizer = 1 << 62, 0, 0
        self.varies: tuple[str, ...] = ()

    def see(self, found: Rehearsal) -> None:
        """Note a rehearsal."""
        self.varies = found.varies
        if found.peak < self.bytes:
            top = max(found.stages, key=lambda stage: stage.peak)
            self.bytes, self.weights = found.peak, found.weights
            self.optimizer = top.parts.get("optimizer", 0)


def _ladders(settings: Settings, least: Least) -> Iterator[list[Settings]]:
    """Ways to hold less, each from coarse to fine: within one, every step down holds less.

    Pieces of a batch come last where they change what is learned.
    """
    whole = settings.within(slices=FINE)
    sizes, pieces = [], settings.batch_size
    while pieces > 1:
        pieces = -(-pieces // 2)
        sizes.append(pieces)
    yield [settings]
    yield [whole, settings.within(slices=4 * FINE)]
    if sizes and not least.varies:
        yield [whole.within(micro_batch=m) for m in sizes]
    yield [whole.within(redraw=True)]
    if sizes and least.varies:
        yield [whole.within(micro_batch=m) for m in sizes]
    if sizes:
        yield [whole.within(micro_batch=m, redraw=True) for m in sizes]


def _bisect(
    model: nn.Module,
    inputs: Inputs,
    rule: Any,
    finer: list[Settings],
    budget: int,
    least: Least,
) -> Settings | None:
    """The coarsest of these that holds, if the finest does."""
    best = _holds(model, inputs, rule, finer[-1], budget, least)
    low, high = 0, len(finer) - 1
    while best is not None and low < high:
        middle = (low + high) // 2
        found = _holds(model, inputs, rule, finer[middle], budget, least)
        low, high = (low, middle) if found is not None else (middle + 1, high)
        best = found or best
    return best


def _holds(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings, budget: int, least: Least
) -> Settings | None:
    """These settings, with a way to reuse inputs that keeps within the budget, or None."""
    if settings.schedule is not sequential:
        found = rehearse(model, inputs, rule, settings)
        least.see(found)
        return settings if found.peak <= budget else None
    found = rehearse(model, inputs, rule, settings.within(reuse=True))
    least.varies = found.varies
    if found.peak <= budget and inputs.samples:
        if found.peak + found.kept <= budget:
            return settings.within(reuse=True)
        if _fits_on_disk(found.kept, folder := default_folder()):
            return settings.within(reuse=folder)
    least.see(found)
    again = rehearse(model, inputs, rule, settings.within(reuse=False))
    least.see(again)
    return settings.within(reuse=False) if again.peak <= budget else None


def _fits_on_disk(need: int, folder: Path) -> bool:
    try:
        return 2 * need < shutil.disk_usage(folder).free
    except OSError:
        return False
