"""Training within a budget of bytes: which of the ways to hold less, and when to give up."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from .errors import TpsgdError
from .rehearsal import Inputs, Rehearsal, rehearse
from .run import as_bytes, size
from .schedules import sequential
from .settings import Settings
from .stored import default_folder

FINE = 16  # slices of a weight's gradient
SPARE = 16 << 10  # bytes for what a rehearsal cannot know, such as where a shuffled part ends


def within(model: nn.Module, inputs: Inputs, rule: Any, settings: Settings) -> Settings:
    """The settings that hold a budget at the least cost of time.

    Whole batches are tried first, then gradients in fine slices, then micro-batches, then class
    codes made again for every batch. Inputs are reused from memory if they fit, else from a file if
    that fits, else computed again.
    """
    assert settings.memory_budget is not None
    budget, least = as_bytes(settings.memory_budget) - SPARE, Least()
    plain = replace(settings, memory_budget=None)
    for coarse, *finer in _ladders(plain):
        found = _holds(model, inputs, rule, coarse, budget, least)
        if found is None and finer:
            found = _bisect(model, inputs, rule, finer, budget, least)
        if found is not None:
            return found
    raise TpsgdError(
        f"a memory_budget of {size(budget + SPARE)} cannot be held: this training needs "
        f"{size(least.bytes + SPARE)} ({least.bytes + SPARE} bytes) at least, of which "
        f"{size(least.weights)} are the model itself"
        + (f" and {size(least.optimizer)} the optimizer's state" if least.optimizer else "")
        + "; lower batch_size, or take an optimizer without state, optimizer=tpsgd.sgd"
    )


class Least:
    """The smallest peak that was seen."""

    def __init__(self) -> None:
        self.bytes, self.weights, self.optimizer = 1 << 62, 0, 0

    def see(self, found: Rehearsal) -> None:
        """Note a rehearsal."""
        if found.peak < self.bytes:
            top = max(found.stages, key=lambda stage: stage.peak)
            self.bytes, self.weights = found.peak, found.weights
            self.optimizer = top.parts.get("optimizer", 0)


def _ladders(settings: Settings) -> Iterator[list[Settings]]:
    """Ways to hold less, each from coarse to fine: within one, every step down holds less."""
    whole = replace(settings, slices=FINE)
    sizes, pieces = [], settings.batch_size
    while _one_pass(settings) and pieces > 1:
        pieces = -(-pieces // 2)
        sizes.append(pieces)
    yield [settings]
    yield [whole, replace(settings, slices=4 * FINE)]
    if sizes:
        yield [replace(whole, micro_batch=m) for m in sizes]
    yield [replace(whole, redraw=True)]
    if sizes:
        yield [replace(whole, micro_batch=m, redraw=True) for m in sizes]


def _one_pass(settings: Settings) -> bool:
    """Whether batches may be cut: every block takes one step a batch."""
    passes = settings.passes if isinstance(settings.passes, (list, tuple)) else [settings.passes]
    return all(p == 1 for p in passes)


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
    found = rehearse(model, inputs, rule, replace(settings, reuse=True))
    if found.peak <= budget and inputs.samples:
        if found.peak + found.kept <= budget:
            return replace(settings, reuse=True)
        if _fits_on_disk(found.kept, folder := default_folder()):
            return replace(settings, reuse=folder)
    least.see(found)
    again = rehearse(model, inputs, rule, replace(settings, reuse=False))
    least.see(again)
    return replace(settings, reuse=False) if again.peak <= budget else None


def _fits_on_disk(need: int, folder: Path) -> bool:
    try:
        return 2 * need < shutil.disk_usage(folder).free
    except OSError:
        return False
