"""Memory settings by a budget: the fastest ones within it, or an error; and low memory."""

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, size
from tpsgd.engine.settings import LOW, Memory, Settings, listed
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.loaders import RAGGED_UNCUT, count_samples, first_samples, is_stream
from tpsgd.maths.random import SORTED
from tpsgd.memory.rehearse import Inputs, MemoryProfile, rehearse, two_lengths
from tpsgd.nets.padded import Padded
from tpsgd.targets import Target
from tpsgd.train import sequential

SLICES = 2, 4, 8  # of a weight's gradient
FINE = 16
DEEP = 4  # blocks; a deeper net keeps inputs even at the cost of micro-batches
SMALLEST = 8  # samples of a micro-batch in low memory: fewer save little and take much time
SPARE = 16 << 10  # bytes of a GPU that a rehearsal may miss


def within_budget(
    model: nn.Module, data: Any, rule: Any, settings: Settings, target: Target
) -> Settings:
    """The settings that keep within the budget on this data."""
    x, batch_size = _peek(data, settings.batch_size)
    if isinstance(x, Padded):
        if settings.memory.budget == LOW:
            return settings.within(budget=None, reuse=False)
        raise TpsgdError(RAGGED_UNCUT)
    data_sets = [data] if settings.validation is None else [data, settings.validation]
    samples = sum(map(count_samples, data_sets))
    inputs, reserved = Inputs.of(x, samples, target), 0
    if is_stream(data):  # a loader's batches, this one and the next, and the labels of all samples
        reserved = 2 * batch_size * x[0].nbytes + 3 * 8 * samples
    return within(model, inputs, rule, replace(settings, batch_size=batch_size), reserved)


def _peek(data: Any, batch_size: int) -> tuple[Any, int]:
    """Two samples and the size of a batch; the state of random generators does not change."""
    loader = isinstance(data, DataLoader)
    generator = data.generator if loader else None
    state = None if generator is None else generator.get_state()
    try:
        with torch.random.fork_rng():
            x = first_samples(data, 1 << 30 if loader else 2)  # of a loader, the first batch
    finally:
        if generator is not None:
            generator.set_state(state)
    return x[:2], len(x) if loader else batch_size


def within(
    model: nn.Module, inputs: Inputs, rule: Any, settings: Settings, reserved: int = 0
) -> Settings:
    """The settings that keep within the budget at the least cost of time.

    Whole batches are tried first, then the gradients of large matrices in slices, then the largest
    micro-batches that fit, then all gradients in slices, then class codes regenerated for every
    batch. Inputs are kept in memory if there is room, otherwise recomputed; where nothing fits,
    they go to files, if the settings name a folder for them. A loader needs the `reserved` bytes.
    """
    assert settings.memory.budget is not None
    if settings.memory.budget == LOW:
        return in_low_memory(model, inputs, rule, settings)
    budget = as_bytes(settings.memory.budget)
    device = settings.device if settings.device is not None else next(model.parameters()).device
    on_gpu = torch.device(device).type == "cuda"
    exact = settings.validation is None and settings.augment is None and not reserved
    exact &= 0 < inputs.samples <= SORTED and two_lengths(model, inputs, rule, settings) is None
    spare = max(SPARE, budget // 20) if on_gpu else 0 if exact else budget // 50
    search = Search(model, inputs, rule, budget - reserved - spare, settings.memory.reuse)
    free = settings.within(budget=None, reuse=None)
    chosen = search.first_fitting(free)
    if chosen is not None:
        if chosen.memory.micro_batch is not None and search.varies:
            warnings.warn(
                "within this budget batches are cut into micro-batches, which changes what is "
                f"learned: {', '.join(search.varies)} in this model",
                stacklevel=5,
            )
        return chosen
    smallest, on_disk = search.smallest, search.on_disk
    assert smallest is not None
    least = search.least(free) + reserved
    need = (least + spare) * 21 // 20 if on_gpu else -(-least * 50 // 49) if spare else least
    optimizer = max(smallest.stages, key=lambda stage: stage.peak).parts.get("optimizer", 0)
    advice = []
    # micro-batches add up whole gradients, a small batch applies theirs in slices
    two = replace(free, batch_size=2).within(slices=4 * FINE, redraw=True, reuse=False)
    if settings.batch_size > 2 and rehearse(model, inputs, rule, two).peak < search.total(smallest):
        advice = ["a smaller batch_size"]
    if on_disk is not None:
        named = "in a folder that you name, tpsgd.Memory(..., reuse=FOLDER) (--reuse FOLDER)"
        advice.insert(0, f"inputs in files on disk, {named},")
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
    """Settings that take little memory: no inputs kept, gradients in slices, micro-batches.

    Slices must save a tenth of the peak; micro-batches are halved until the smallest would save no
    more than that. Batches stay whole where micro-batches would change what is learned. If the
    default settings take no more, they stay.
    """
    default, best = settings.within(budget=None), settings.within(budget=None, reuse=False)
    free, first = (rehearse(model, inputs, rule, way) for way in (default, best))
    peak, samples = first.peak, settings.batch_size
    if _matrix_bytes(model) > 0.05 * peak:
        sliced = rehearse(model, inputs, rule, best.within(slices=FINE))
        if sliced.peak < 0.9 * peak:
            best, peak = best.within(slices=FINE), sliced.peak
    if not first.varies and samples >= 2 * SMALLEST:
        smallest = _even(samples, SMALLEST)
        cut = rehearse(model, inputs, rule, best.within(micro_batch=smallest)).peak
        each = (peak - cut) / (samples - smallest)  # bytes per sample
        while samples > smallest and cut < 0.9 * (cut + each * (samples - smallest)):
            samples = _even(settings.batch_size, max(smallest, samples // 2))
            best = best.within(micro_batch=samples)
        peak = cut if samples == smallest else rehearse(model, inputs, rule, best).peak
    return best if peak <= free.peak + free.kept else default


@dataclass
class Search:
    """Rehearsals with different settings; it remembers the one with the smallest peak."""

    model: nn.Module
    inputs: Inputs
    rule: Any
    budget: int
    folder: Any = None  # for files
    smallest: MemoryProfile | None = None
    on_disk: Settings | None = None  # the first that would fit with inputs in files
    varies: tuple[str, ...] = ()  # why micro-batches would change what is learned
    known: dict[Memory, MemoryProfile] = field(default_factory=dict)

    def first_fitting(self, settings: Settings) -> Settings | None:
        """The settings that fit at the least cost of time; inputs in files are the last resort."""
        in_turn = settings.order is sequential
        recomputing = settings.within(reuse=False) if in_turn else settings
        for cut in self._cuts(recomputing):
            if self.rehearse(cut).peak <= self.budget:
                return self._keeping(self._larger(cut)) if in_turn else self._larger(cut)
        for cut in [s.within(reuse=True) for s in self._cuts(recomputing)] if in_turn else []:
            rehearsal = self.rehearse(cut)
            if self._keeps(rehearsal):
                return cut
            if rehearsal.peak <= self.budget and _fits_on_disk(rehearsal.kept, self.folder):
                self.on_disk = cut.within(reuse=self.folder)
                return self.on_disk if self.folder else None
        return None

    def least(self, settings: Settings) -> int:
        """The smallest budget that some settings fit, after `first_fitting` has found none."""
        assert self.smallest is not None
        self.budget = self.total(self.smallest)
        while self.first_fitting(settings) is None:  # it tries other settings for other budgets
            self.budget += self.budget // 50 + 1
        return self.budget

    def _cuts(self, whole: Settings) -> Iterator[Settings]:
        """Settings that take less memory and more time each; the caller stops when one fits.

        Slices of a convolution's gradient take as long as all of it, those of a matrix do not.
        Micro-batches come last where they change what is learned.
        """
        sliced = whole.within(slices=FINE)
        yield whole
        need, gradient = self.rehearse(whole).peak - self.budget, _matrix_bytes(self.model)
        if need < 2 * gradient:  # there may be a second copy
            slices = (n for n in SLICES if need < gradient - gradient // n)
            yield whole.within(slices=next(slices, FINE))
            yield sliced
        if not self.varies:
            yield from self._micro_batches(whole)
        yield sliced
        yield whole.within(slices=4 * FINE)
        if not self.varies:
            yield from self._micro_batches(sliced)
        yield sliced.within(redraw=True)
        if self.varies:
            yield from self._micro_batches(whole)
            yield from self._micro_batches(sliced)
        yield from self._micro_batches(sliced.within(redraw=True))

    def _micro_batches(self, whole: Settings, kept: int = 0) -> Iterator[Settings]:
        """Smaller and smaller micro-batches, each of the size that is expected to fit."""
        samples, cut = whole.batch_size, whole
        while samples > 1:
            samples = _even(whole.batch_size, min(self._expected(cut, kept), samples - 1))
            cut = whole.within(micro_batch=samples)
            yield cut

    def _expected(self, settings: Settings, kept: int = 0) -> int:
        """The number of samples in a micro-batch that fits, if activations grow linearly."""
        rehearsal = self.rehearse(settings)
        activations = max(rehearsal.stages, key=lambda stage: stage.peak).parts.get("", 0)
        room = self.budget - kept - (rehearsal.peak - activations)
        samples = settings.memory.micro_batch or settings.batch_size
        return max(1, samples * room // max(1, activations))

    def _larger(self, cut: Settings) -> Settings:
        """The same with larger micro-batches, if those fit too."""
        samples = cut.memory.micro_batch
        if samples is None:
            return cut
        parts = -(-cut.batch_size // samples)
        for count in (self._expected(cut), -(-cut.batch_size // max(1, parts - 1))):
            larger = cut.within(micro_batch=_even(cut.batch_size, count))
            grows = samples * 1.1 < (larger.memory.micro_batch or 0) < cut.batch_size
            if grows and self.rehearse(larger).peak <= self.budget:
                return larger
        return cut

    def _keeping(self, cut: Settings) -> Settings:
        """The same with inputs kept in memory, if they fit and are read more than once.

        A deep net takes longer to recompute them than to learn from micro-batches.
        """
        rehearsal = self.rehearse(cut)
        blocks = len(rehearsal.names)
        if blocks == 2 and cut.per_block(blocks)[-1].epochs <= 1:
            return cut
        least = max(rehearsal.outputs[:-1], default=0) * self.inputs.samples
        cuttable = blocks > DEEP and cut.memory.micro_batch is None and not self.varies
        if not self.inputs.samples or (0 if cuttable else rehearsal.peak) + least > self.budget:
            return cut
        keeping = cut.within(reuse=True)
        rehearsal = self.rehearse(keeping)
        fits = cuttable and rehearsal.kept < self.budget
        smaller = self._micro_batches(keeping, rehearsal.kept) if fits else ()
        for candidate in chain([keeping], islice(smaller, 2)):
            if self._keeps(self.rehearse(candidate)):
                return candidate
        return cut

    def _keeps(self, rehearsal: MemoryProfile) -> bool:
        return self.inputs.samples > 0 and rehearsal.peak + rehearsal.kept <= self.budget

    def total(self, rehearsal: MemoryProfile) -> int:
        """The bytes of a run, without kept inputs if there is a folder for them."""
        return rehearsal.peak + (0 if self.folder else rehearsal.kept)

    def rehearse(self, settings: Settings) -> MemoryProfile:
        if settings.memory not in self.known:
            rehearsal = rehearse(self.model, self.inputs, self.rule, settings)
            self.known[settings.memory], self.varies = rehearsal, rehearsal.varies
            if self.smallest is None or self.total(rehearsal) < self.total(self.smallest):
                self.smallest = rehearsal
        return self.known[settings.memory]


def _even(batch_size: int, samples: int) -> int:
    """The size of micro-batches of at most `samples`, when a batch is cut evenly."""
    return -(-batch_size // -(-batch_size // samples))


def _matrix_bytes(model: nn.Module) -> int:
    """The bytes of the largest matrix, whose gradient may come in slices."""
    return max((p.nbytes for p in model.parameters() if p.dim() == 2), default=0)


def _fits_on_disk(nbytes: int, folder: Any) -> bool:
    """Whether a folder has room for twice the bytes; True without a folder."""
    if folder is None:
        return True
    try:
        return 2 * nbytes < shutil.disk_usage(folder).free
    except OSError:
        return False
