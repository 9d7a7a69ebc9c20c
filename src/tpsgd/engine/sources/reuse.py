"""The inputs of the next block: kept in memory or in a file, or recomputed for every epoch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.device import available
from tpsgd.engine.line import BackpropLine
from tpsgd.engine.sources.batches import (
    WORTH_CUTTING,
    ArraySource,
    BatchForm,
    ThroughBlocks,
    depth,
    in_parts,
    stored_samples,
)
from tpsgd.engine.sources.disk_rows import DiskRows
from tpsgd.maths.random import permutation
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.nets.unrolled import UnrolledBatch, computed
from tpsgd.train import Net, Observer, Source

AT_A_TIME = 32 << 20  # bytes that samples may take inside a block whose outputs are computed


@dataclass(frozen=True)
class InputReuse:
    """How the next block gets its inputs; see `tpsgd.Memory.reuse`."""

    reuse: bool | str | Path | None = None
    fast: bool = False  # keep inputs where they fit into half of what is free
    line: BackpropLine | None = None  # under which inputs are kept otherwise
    free_bytes: Callable[[torch.device], float] = available
    samples: int | None = None  # how many there will be, if a source has fewer: in a rehearsal

    @torch.no_grad()
    def __call__(self, net: Net, learner: Any, source: Source) -> Source:
        """The outputs of a block that has been trained, as a source."""

        def function(x: Any) -> Any:
            return learner.output(learner.forward(x))

        def outputs(x: Any) -> Any:
            return in_parts((lambda x: computed(function(x)),), x, at_a_time)

        learner.block.train(False)
        for observer in net.observers:
            observer.stage([learner], learning=False)
        at_a_time = _samples_at_a_time(learner, source.form)
        sample = _first_output(source, function)
        keep = self._keep(net, sample, source, net.learners[net.learners.index(learner) + 1 :])
        if keep is False:
            return _through(source, function, at_a_time)
        overwrites = keep is True and _same_rows(net, source, sample)
        for observer in net.observers:
            observer.computed(source.samples, 1 + depth(source))
            if keep is True and not overwrites:
                observer.kept(sample.nbytes * source.samples, _kept_bytes(net, source))
        if overwrites:
            rows: Any = source.x  # type: ignore[attr-defined]
        elif keep is True:
            rows = _allocate(sample, source)
        else:
            rows = DiskRows(sample, source.samples, keep)
        return _collect(source, outputs, rows, net.observers)

    def _keep(self, net: Net, sample: Any, source: Source, later: list[Any]) -> bool | str | Path:
        """Where to keep the outputs: True for memory, a folder, or False to recompute them."""
        if isinstance(sample, ModelInputs):
            return False  # later blocks read the inputs of the model, which the source has
        from_loader = not isinstance(stored_samples(source), ArraySource)
        if not source.samples or (from_loader and any(x.block.recurrent for x in later)):
            return False  # so many samples, or steps of a sequence, that nobody knows
        keep = self.reuse
        if keep is None:  # no point in keeping inputs that are read only once
            once = len(later) == 1 and later[0].settings.epochs <= 1
            keep = not once and self._fits(net, sample, source)
        in_file = keep is not True  # with rows of one size
        return False if in_file and isinstance(sample, Padded) else keep

    def _fits(self, net: Net, sample: Any, source: Source) -> bool:
        """Whether there is room for the inputs of a block: under the line, or in the machine."""
        if self.fast or source.form.stacked:
            return sample.nbytes * source.samples < self.free_bytes(source.form.device) / 2
        if self.line is None:
            return False
        held_out = 0 if net.validation is None else net.validation.samples
        samples = net.source.samples + held_out if self.samples is None else self.samples
        replaced = 0 if _same_rows(net, source, sample) else _kept_bytes(net, source)
        nbytes = replaced / source.samples + sample.nbytes
        return samples > 0 and nbytes * samples <= self.line.room()


def _through(source: Source, function: Any, at_a_time: int | None) -> Source:
    """A source whose batches go through one more frozen block."""
    if isinstance(source, ThroughBlocks):
        at_a_time = min(filter(None, (source.at_a_time, at_a_time)), default=None)
        return ThroughBlocks(source.source, (*source.functions, function), at_a_time)
    return ThroughBlocks(source, (function,), at_a_time)


def _kept_bytes(net: Net, source: Source) -> int:
    """Bytes of kept inputs that a source reads, the user's samples left out."""
    stored = stored_samples(source)
    users = [stored_samples(s) for s in (net.source, net.validation) if s is not None]
    if not isinstance(stored, ArraySource) or any(stored is samples for samples in users):
        return 0
    return stored.x.nbytes


def _same_rows(net: Net, source: Source, sample: Any) -> bool:
    """Whether outputs can be written over the kept inputs that they are computed from."""
    if not isinstance(source, ArraySource) or type(source.x) is not Tensor:
        return False
    lead = int(source.form.stacked)
    same_shape = source.x.shape[lead + 1 :] == sample.shape[lead + 1 :]
    return same_shape and source.x.dtype == sample.dtype and _kept_bytes(net, source) > 0


def _samples_at_a_time(learner: Any, form: BatchForm) -> int | None:
    """How many samples to compute together: a part of a batch, where that saves much memory."""
    if form.stacked or form.batch_size * learner.widest < WORTH_CUTTING:
        return None
    return max(1, min(AT_A_TIME // learner.widest, form.batch_size // 4))


def _first_output(source: Source, function: Callable[[Any], Any]) -> Any:
    """The output of one sample."""
    batch = next(iter(source.batches()), None)
    if batch is None:
        raise TpsgdError("the data is empty: the loader gives no batch")
    x, _ = batch.load()
    if isinstance(x, UnrolledBatch):
        return source.form.first(computed(function(x)))
    return computed(function(source.form.first(x)))


def _allocate(sample: Any, source: Source) -> Tensor:
    """Memory for the outputs of all samples."""
    form, lead = source.form, int(source.form.stacked)
    shape = (*sample.shape[:lead], source.samples, *sample.shape[lead + 1 :])
    maps = form.channels_last and len(shape) == 4 and not form.stacked
    layout = torch.channels_last if maps else torch.contiguous_format
    return torch.empty(shape, dtype=sample.dtype, device=form.device, memory_format=layout)


def _collect(
    source: Source,
    function: Callable[[Any], Any],
    rows: Tensor | DiskRows,
    observers: list[Observer],
) -> ArraySource:
    """The outputs of all samples, written into memory or into a file."""
    form, n, lead = source.form, source.samples, int(source.form.stacked)
    ys, lengths, start, largest, batch_size = [], [], 0, 1, 0
    for observer in observers:
        observer.computing(True)
    for batch in source.batches():
        stop, batch_size = start + batch.size, batch_size + batch.size
        largest, batch_size = max(largest, batch_size), 0 if batch.last else batch_size
        if stop > n:
            raise TpsgdError(f"the data has more samples than the {n:,} it says it has")
        x, y = batch.load()
        outputs = function(x)
        if isinstance(outputs, Padded):
            lengths.append(outputs.lengths)
            outputs = outputs.data
        if isinstance(rows, DiskRows):
            rows.write(start, outputs)
        else:
            rows.narrow(lead, start, stop - start).copy_(outputs)
        ys.append(y[0] if form.stacked else y)
        start = stop
        del x, y, outputs
        for observer in observers:
            observer.batch((), batch)
    for observer in observers:
        observer.computing(False)
    if isinstance(rows, DiskRows):
        rows.samples = start
        x: Any = rows
    else:
        x = rows.narrow(lead, 0, start)
    x = Padded(x, torch.cat(lengths)) if lengths else x
    in_order = isinstance(source, ArraySource) and not isinstance(source.x, Padded)
    labels = source.y if in_order else torch.cat(ys)  # type: ignore[attr-defined]
    stored = source.source if isinstance(source, ThroughBlocks) else source
    order = stored.order if isinstance(stored, ArraySource) else permutation
    form = replace(form, batch_size=largest, in_chunks=False)  # a loader has its batch size
    return ArraySource(x, labels, form, per_restart=form.stacked, order=order)
