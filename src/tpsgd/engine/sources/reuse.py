"""The inputs of the next block: kept in memory or in a file, or recomputed for every epoch."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.engine.device import available
from tpsgd.engine.line import BackpropLine
from tpsgd.engine.sources.batches import (
    WORTH_CUTTING,
    ArraySource,
    BatchForm,
    LoaderSource,
    ThroughBlocks,
    depth,
    in_parts,
    stored_samples,
)
from tpsgd.maths.kernels.memory_format import channels_last, like
from tpsgd.maths.random import permutation
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
    through: Callable[..., ThroughBlocks] = ThroughBlocks

    @torch.no_grad()
    def __call__(self, net: Net, learner: Any, source: Source) -> Source:
        """The outputs of a block that has been trained, as a source."""

        def function(x: Any) -> Any:
            return learner.output(learner.forward(x))

        learner.block.train(False)
        for observer in net.observers:
            observer.stage([learner], learning=False)
        at_a_time = _samples_at_a_time(learner, source.form)
        sample = _first_output(source, function)
        later = net.learners[net.learners.index(learner) + 1 :]
        keep = self._keep(net, sample, source, later)
        if keep is False:
            return self._through(source, function, at_a_time)
        again = keep is True and _same_rows(net, source, sample)
        for observer in net.observers:
            observer.computed(source.samples, 1 + depth(source))
            if keep is True and not again:
                observer.kept(sample.nbytes * source.samples, _kept_by(net, source))
        if again:
            rows: Any = source.x  # type: ignore[attr-defined]  # inputs make room for outputs
        elif keep is True:
            rows = _allocate(sample, source)
        else:
            rows = DiskRows(sample, source.samples, keep)

        def outputs(x: Any) -> Any:
            return in_parts((lambda x: computed(function(x)),), x, at_a_time)

        return _collect(source, outputs, rows, net.observers)

    def _keep(self, net: Net, sample: Any, source: Source, later: list[Any]) -> bool | str | Path:
        """Where to keep the outputs: True for memory, a folder, or False to recompute them."""
        below = stored_samples(source)
        any_length = isinstance(below, LoaderSource) and any(x.block.recurrent for x in later)
        if not source.samples or any_length:
            return False
        keep = self.reuse
        if keep is None:
            # no point in keeping inputs that are read only once
            once = len(later) == 1 and later[0].settings.epochs <= 1
            keep = not once and self._fits(net, sample, source)
        if isinstance(sample, Padded) and keep is not True:  # a file has rows of one size
            return False
        return keep

    def _through(self, source: Source, function: Any, at_a_time: int | None) -> Source:
        """A source whose batches go through one more frozen block."""
        if isinstance(source, ThroughBlocks):
            at_a_time = min(filter(None, (source.at_a_time, at_a_time)), default=None)
            return self.through(source.source, (*source.functions, function), at_a_time)
        return self.through(source, (function,), at_a_time)

    def _fits(self, net: Net, sample: Any, source: Source) -> bool:
        """Whether there is room for the inputs of a block: under the line, or in the machine."""
        if self.fast or source.form.stacked:
            return sample.nbytes * source.samples < self.free_bytes(source.form.device) / 2
        if self.line is None:
            return False
        others = 0 if net.validation is None else net.validation.samples
        samples = net.source.samples + others if self.samples is None else self.samples
        before = 0 if _same_rows(net, source, sample) else _kept_by(net, source) / source.samples
        return samples > 0 and (before + sample.nbytes) * samples <= self.line.room()


def _kept_by(net: Net, source: Source) -> int:
    """Bytes of kept inputs that a source reads."""
    users = [stored_samples(s) for s in (net.source, net.validation) if s is not None]
    below = stored_samples(source)
    from_user = any(below is samples for samples in users)
    return below.x.nbytes if isinstance(below, ArraySource) and not from_user else 0


def _same_rows(net: Net, source: Source, sample: Any) -> bool:
    """Whether outputs can be written over the kept inputs that they are computed from."""
    if (
        not isinstance(source, ArraySource)
        or type(source.x) is not Tensor
        or not _kept_by(net, source)
    ):
        return False
    lead = int(source.form.stacked)
    shapes = (t.shape[lead + 1 :] for t in (source.x, sample))
    return len(set(shapes)) == 1 and source.x.dtype == sample.dtype


def _samples_at_a_time(learner: Any, form: BatchForm) -> int | None:
    """How many samples to compute together: a part of a batch, where that saves much memory."""
    if form.stacked or form.batch_size * learner.widest < WORTH_CUTTING:
        return None
    return max(1, min(AT_A_TIME // learner.widest, form.batch_size // 4))


def _first_output(source: Source, function: Callable[[Any], Any]) -> Any:
    """The output of one sample."""
    for batch in source.batches():
        x, _ = batch.load()
        if isinstance(x, UnrolledBatch):
            return source.form.first(computed(function(x)))
        return computed(function(source.form.first(x)))
    raise TpsgdError("the data is empty: the loader gives no batch")


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
    rows: "Tensor | DiskRows",
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
    x: Any = rows.first(start) if isinstance(rows, DiskRows) else rows.narrow(lead, 0, start)
    below = source.source if isinstance(source, ThroughBlocks) else source
    if isinstance(source, ArraySource) and not isinstance(source.x, Padded):
        labels = source.y
    else:
        labels = torch.cat(ys)  # a loader's, or sorted by length
    form = replace(form, batch_size=largest, in_chunks=False)  # a loader has its batch size
    x = Padded(x, torch.cat(lengths)) if lengths else x
    order = below.order if isinstance(below, ArraySource) else permutation
    return ArraySource(x, labels, form, per_restart=form.stacked, order=order)


class DiskRows:
    """Rows of the same shape in a nameless temporary file, which is deleted with this object.

    They are read, not mapped, so that they do not count as memory of the process.
    """

    def __init__(self, sample: Any, samples: int, folder: Path | str) -> None:
        self.sample, self.samples = sample[:1].cpu(), samples
        self.device, self.dtype = torch.device("cpu"), sample.dtype
        self.maps = channels_last(self.sample)
        folder = Path(folder).expanduser()
        try:
            free = shutil.disk_usage(folder).free
            if self.nbytes > free:
                raise TpsgdError(self._no_room(folder, f"{size(free)} are free"))
            self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or str(error)
            raise TpsgdError(f"inputs cannot be kept in {folder}: {reason}") from None
        self.folder = folder
        weakref.finalize(self, self.file.close)

    def _no_room(self, folder: Path, why: str) -> str:
        return (
            f"a block's inputs need {size(self.nbytes)} in {folder}, and {why}; name another "
            "folder with memory=tpsgd.Memory(reuse=FOLDER), or recompute them with reuse=False"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """As if it were a tensor."""
        return (self.samples, *self.sample.shape[1:])

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.samples * self.sample.nbytes

    def __len__(self) -> int:
        return self.samples

    def first(self, samples: int) -> "DiskRows":
        """Itself, cut to the rows that were written."""
        self.samples = samples
        return self

    def write(self, start: int, rows: Tensor) -> None:
        """Put rows at their place."""
        try:
            self.file.seek(start * self.sample.nbytes)
            remaining = memoryview(_bytes(rows.cpu(), self.maps)).cast("B")
            while remaining:
                remaining = remaining[self.file.write(remaining) :]
        except OSError as error:
            raise TpsgdError(self._no_room(self.folder, error.strerror or str(error))) from None

    def rows(self, index: Tensor) -> Tensor:
        """The rows at these indices."""
        rows = like(self.sample, len(index))
        content, step = memoryview(_bytes(rows, self.maps)).cast("B"), self.sample.nbytes
        for i, number in enumerate(index.tolist()):
            self.file.seek(number * step)
            self.file.readinto(content[i * step : (i + 1) * step])  # type: ignore[attr-defined]
        return rows


def _bytes(rows: Tensor, maps: bool) -> bytes:
    """The numbers of rows as bytes, feature maps with their channels last."""
    flat = rows.permute(0, 2, 3, 1) if maps else rows
    return flat.contiguous().view(-1).view(torch.uint8).numpy()  # type: ignore[return-value]
