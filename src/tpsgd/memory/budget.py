"""Training within a memory budget: the fastest settings that keep to it, or an error.

And training in low memory: settings that take little, whatever that is.
"""

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
from tpsgd.engine.settings import LOW, Settings, listed
from tpsgd.errors import TpsgdError
from tpsgd.memory.rehearse import Inputs, Rehearsal, rehearse
from tpsgd.nets.padded import Padded
from tpsgd.solvers import SOLVERS
from tpsgd.train import sequential
from tpsgd.units import as_bytes, size

FINE = 16  # slices of a weight's gradient
SMALLEST = 8  # samples of a micro-batch in low memory: fewer save little and take much time
SPARE = 16 << 10  # bytes for what a rehearsal cannot know, such as where a shuffled part ends


def within_budget(model: nn.Module, data: Any, rule: Any, settings: Settings) -> Settings:
    """The settings that keep within the budget on this data."""
    x, batch_size = _peek(data, settings.batch_size)
    if isinstance(x, Padded):
        if settings.memory.budget == LOW:
            return settings.within(budget=None, reuse=False)
        raise TpsgdError(RAGGED_UNCUT)
    data_sets = [data] if settings.validation is None else [data, settings.validation]
    samples = sum(map(count_samples, data_sets))
    inputs, reserved = Inputs(tuple(x.shape[1:]), x.dtype, samples), 0
    if is_stream(data):  # a loader's batches, this one and the next, and the labels of all samples
        reserved = 2 * batch_size * x[0].nbytes + 3 * 8 * samples
    return within(model, inputs, rule, replace(settings, batch_size=batch_size), reserved)


def _peek(data: Any, batch_size: int) -> tuple[Any, int]:
    """A few samples and the size of a batch; the state of random generators does not change."""
    if not isinstance(data, DataLoader):
        with torch.random.fork_rng():
            return first_samples(data), batch_size
    state = None if data.generator is None else data.generator.get_state()
    try:
        with torch.random.fork_rng():
            x = first_samples(data, count=1 << 30)
        return x[:2], len(x)
    finally:
        if state is not None:
            data.generator.set_state(state)  # type: ignore[union-attr]


def within(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings, reserved: int = 0
) -> Settings:
    """The settings that keep within the budget at the least cost of time.

    Whole batches are tried first, then gradients in fine slices, then micro-batches, then class
    codes regenerated for every batch. Inputs are reused from memory if they fit, otherwise from a
    file if that fits, otherwise recomputed. `reserved` bytes are used by others, such as a loader.
    """
    assert settings.memory.budget is not None
    if settings.memory.budget == LOW:
        return in_low_memory(model, inputs, rule, settings)
    budget = as_bytes(settings.memory.budget)
    device = settings.device if settings.device is not None else next(model.parameters()).device
    on_gpu = torch.device(device).type == "cuda"  # whose allocator rounds, and keeps, unseen bytes
    spare = reserved + max(SPARE, budget // 20 if on_gpu else 0)
    search = Search(model, inputs, rule, budget - spare)
    for coarse, *finer in _ladders(settings.within(budget=None), search):
        chosen = search.fitting(coarse)
        if chosen is None and finer:
            chosen = search.coarsest_fitting(finer)
        if chosen is not None:
            if chosen.memory.micro_batch is not None and search.varies:
                warnings.warn(
                    "within this budget batches are cut into micro-batches, which changes what is "
                    f"learned: {', '.join(search.varies)} in this model",
                    stacklevel=5,
                )
            return chosen
    smallest = search.smallest
    assert smallest is not None
    need = (smallest.peak + spare) * (21 if on_gpu else 20) // 20
    optimizer = max(smallest.stages, key=lambda stage: stage.peak).parts.get("optimizer", 0)
    advice = ["a smaller batch_size"] if settings.batch_size > 1 else []
    if optimizer > smallest.weights // 10:
        advice.append("an optimizer without state, optimizer=tpsgd.sgd")
    if any(isinstance(o, SOLVERS) for o in listed(settings.optimizer)):
        advice.append("an optimizer in place of a solver, optimizer=tpsgd.sgd")
    raise TpsgdError(
        f"a memory budget of {size(budget)} is too small: this run needs at least {size(need)} "
        f"({need} bytes), of which {size(smallest.weights)} are the model itself"
        + (f" and {size(optimizer)} the optimizer's state" if optimizer else "")
        + (f"; less may do with {' or '.join(advice)}" if advice else "")
    )


def in_low_memory(model: nn.Module, inputs: Inputs, rule: Any, settings: Settings) -> Settings:
    """Settings that take little memory: no inputs kept, and the cut of a batch that saves most.

    A finer cut, which takes more time, must save a tenth. Batches stay whole where micro-batches
    would change what is learned.
    """
    best = settings.within(budget=None, reuse=False)
    first = rehearse(model, inputs, rule, best)
    finer, samples, peak = [best.within(slices=FINE)], settings.batch_size, first.peak
    while samples >= 2 * SMALLEST and not first.varies:
        samples = -(-samples // 2)
        finer += [best.within(micro_batch=samples), best.within(micro_batch=samples, slices=FINE)]
    for candidate in finer:
        rehearsal = rehearse(model, inputs, rule, candidate)
        if rehearsal.peak < 0.9 * peak:
            best, peak = candidate, rehearsal.peak
    return best


class Search:
    """Rehearsals with different settings; it remembers the one with the smallest peak."""

    def __init__(self, model: nn.Module, inputs: Inputs, rule: Any, budget: int) -> None:
        self.model, self.inputs, self.rule, self.budget = model, inputs, rule, budget
        self.smallest: Rehearsal | None = None
        self.varies: tuple[str, ...] = ()  # why micro-batches would change what is learned

    def coarsest_fitting(self, finer: list[Settings]) -> Settings | None:
        """The coarsest of these settings that fits, if the finest does; by bisection."""
        best = self.fitting(finer[-1])
        low, high = 0, len(finer) - 1
        while best is not None and low < high:
            middle = (low + high) // 2
            chosen = self.fitting(finer[middle])
            low, high = (low, middle) if chosen is not None else (middle + 1, high)
            best = chosen or best
        return best

    def fitting(self, settings: Settings) -> Settings | None:
        """These settings, with a way to reuse inputs that keeps within the budget, or None."""
        if settings.schedule is not sequential:
            return settings if self._rehearse(settings).peak <= self.budget else None
        reusing = settings.within(reuse=True)
        rehearsal = self._rehearse(reusing)
        if rehearsal.peak <= self.budget and self.inputs.samples:
            if rehearsal.peak + rehearsal.kept <= self.budget:
                return reusing
            if _fits_on_disk(rehearsal.kept, folder := default_folder()):
                return settings.within(reuse=folder)
        recomputing = settings.within(reuse=False)
        return recomputing if self._rehearse(recomputing).peak <= self.budget else None

    def _rehearse(self, settings: Settings) -> Rehearsal:
        rehearsal = rehearse(self.model, self.inputs, self.rule, settings)
        self.varies = rehearsal.varies
        if self.smallest is None or rehearsal.peak < self.smallest.peak:
            self.smallest = rehearsal
        return rehearsal


def _ladders(settings: Settings, search: Search) -> Iterator[list[Settings]]:
    """Ways to save memory, each from coarse to fine: within one, every step saves more.

    Micro-batches come last where they change what is learned.
    """
    sliced = settings.within(slices=FINE)
    sizes, samples = [], settings.batch_size
    while samples > 1:
        samples = -(-samples // 2)
        sizes.append(samples)
    micro_batches = [sliced.within(micro_batch=m) for m in sizes]
    yield [settings]
    yield [sliced, settings.within(slices=4 * FINE)]
    if sizes and not search.varies:
        yield micro_batches
    yield [sliced.within(redraw=True)]
    if sizes and search.varies:
        yield micro_batches
    if sizes:
        yield [s.within(redraw=True) for s in micro_batches]


def _fits_on_disk(nbytes: int, folder: Path) -> bool:
    try:
        return 2 * nbytes < shutil.disk_usage(folder).free
    except OSError:
        return False
