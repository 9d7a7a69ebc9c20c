"""How a recurrent block learns: it reads a batch to its end while its cells sum their gradients.

The cells are those of `cell_gradients` or of `diagonal_gradients`. Only one window of a few steps
and the sums are in memory, however long the sequences are; a diagonal layer reads tokens, and
sequences that are short, as one window. If the next block is recurrent, too, it pulls the states
window by window: the unrolled batch of the first block is the input of the second. A sequence has
one label, which every step learns, or a label for each step.

The nearest relative is OSTTP (Ortner, Pes, Gentinetta, Frenkel & Pantazi, "Online spatio-temporal
learning with target projection", 2023). It has eligibility traces where the paper, and this module,
have the inputs of the time step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.losses import IGNORED
from tpsgd.nets.activations import activation
from tpsgd.nets.blocks import Block
from tpsgd.nets.cell_gradients import CellGradients, CellWeights, Steps, StepWindow
from tpsgd.nets.closed_form import Params
from tpsgd.nets.diagonal import Diagonal, DiagonalWeights, LossAt
from tpsgd.nets.diagonal_gradients import DiagonalCell
from tpsgd.nets.padded import (
    Padded,
    Sequences,
    aligned_at_end,
    aligned_at_start,
    as_sequences,
    through,
)
from tpsgd.objectives import IDLE, LossAndGrads, Objective, Place, over_dimension
from tpsgd.targets import CLASSES, Target, reduced

FIRST_FEW = 4  # windows; a longest and a shorter one are among them, whichever way they are read
WINDOW = 32  # steps of a diagonal layer, unless the whole sequence takes less memory
Codes = Callable[[int, int], tuple[Tensor, ...]]  # (direction, step) -> the objective's tensors


@dataclass(eq=False)
class UnrolledBatch:
    """A batch in a recurrent block. Nothing is computed before it is needed.

    It can be the input of the next recurrent block, which then pulls one window after another.
    """

    source: "Unrolled"
    params: Params
    x: "Sequences | UnrolledBatch"
    s: Tensor | None = None  # the signal, if the loss is to be computed
    learns: bool = False  # compute the gradients, too
    tensors: tuple[Tensor, ...] = ()
    cells: list[Any] = field(default_factory=list)  # of each direction, once it runs
    last: Tensor | None = None  # the last states, once it has run
    states: Tensor | None = None  # all states, if the next block needs them together

    @property
    def lengths(self) -> Tensor | None:
        return self.x.lengths if isinstance(self.x, (Padded, UnrolledBatch)) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sequences and time steps; if stacked, after the number of restarts."""
        if isinstance(self.x, UnrolledBatch):
            return self.x.shape
        return tuple(self.x.shape[: self.source.lead + 2])

    def windows(self) -> Iterator[StepWindow]:
        """Its states, window by window; with `learns`, gradients are summed on the way.

        All windows are in the same memory: read one before the next comes.
        """
        return self.source.run(self)


class Signals:
    """The signals of a window: of each sequence one for all its steps, or one for each step.

    Args:
        s: `(..., rows)`, or `(..., rows, steps)`, and the numbers of a signal after them.
        lead: dimensions before the rows.
        of_steps: each step has its own.
        backwards: windows are read from their last step to the first.
    """

    def __init__(self, s: Tensor, lead: int, of_steps: bool, backwards: bool) -> None:
        self.s, self.lead, self.of_steps, self.backwards = s, lead, of_steps, backwards
        self.latest: tuple[tuple[int, int], Tensor] | None = None  # windows are often alike

    def window(self, start: int, steps: int, rows: int) -> Tensor:
        """`(..., steps, rows)`; of sequences `(..., rows)`."""
        s, dim = self.s.narrow(self.lead, 0, rows), self.lead
        if not self.of_steps:
            return s
        s = s.narrow(dim + 1, start, steps).transpose(dim, dim + 1)
        return s.flip(dim) if self.backwards else s

    def of_samples(self, start: int, steps: int, rows: int) -> Tensor:
        """The same, each step of a sequence a sample."""
        if self.of_steps:
            return self.window(start, steps, rows).flatten(self.lead, self.lead + 1)
        if self.latest is None or self.latest[0] != (steps, rows):
            s = self.window(start, steps, rows)
            after = [1] * (s.dim() - self.lead - 1)
            s = s if steps == 1 else s.repeat(*[1] * self.lead, steps, *after)
            self.latest = (steps, rows), s
        return self.latest[1]

    def unlabelled(self, local: LossAndGrads, s: Tensor) -> LossAndGrads:
        """A mean over the labelled samples of a window, as its part of the batch's mean."""
        share = (s != IGNORED).to(local.dy.dtype).flatten(self.lead).mean(self.lead)
        whole = (self.s != IGNORED).to(local.dy.dtype).flatten(self.lead).mean(self.lead)
        factor = share / whole.clamp(min=torch.finfo(whole.dtype).tiny)

        def times(t: Tensor) -> Tensor:
            return t * factor.view([*factor.shape, *[1] * (t.dim() - self.lead)])

        scaled = times(local.loss), times(local.dy), tuple(map(times, local.dtensors))
        return LossAndGrads(*scaled, local.logits, local.labels)


def steps_without_traces(layer: Diagonal, window: int | None) -> int:
    """How long a sequence may be that a diagonal layer computes in one window, without traces.

    As long as the window that was asked for; otherwise as long as a window of all steps takes less
    memory than the traces would, twice 2 x states x inputs numbers for a sample.
    """
    if window is not None:
        return window
    numbers_per_step = 6 * layer.states + 8 * layer.hidden  # of a sample, about
    return WINDOW + 4 * layer.states * layer.inputs // numbers_per_step


class Unrolled:
    """The gradients of a recurrent block in closed form; see `ClosedForm` for its methods.

    Args:
        block: a recurrent block.
        at: where the objective looks; a diagonal layer has its own `loss_at`.
        codes: draws the objective's tensors for a direction and a step, if each step has its own.
        window: time steps that are processed together. More is faster where kernel launches
            dominate, and takes memory for as many steps. None leaves the choice to a diagonal
            layer: see `steps_without_traces`.
        lazy: the next block is recurrent and pulls the states.
        keep_codes: store the codes of all steps instead of drawing them for every batch.
        target: what labels are; with positions, each step has one.
        classes: how many, or how many numbers a label has.
        stacked: tensors have a leading dimension of restarts.
    """

    label = "closed form"

    def __init__(
        self,
        block: Block,
        at: Place = Place.AFTER,
        codes: Codes | None = None,
        window: int | None = None,
        lazy: bool = False,
        keep_codes: bool = False,
        target: Target = CLASSES,
        classes: int = 0,
        stacked: bool = False,
    ) -> None:
        self.block, self.at, self.codes = block, at, codes
        self.layer: Any = block.layer
        self.diagonal = isinstance(block.layer, Diagonal)
        self.whole = steps_without_traces(self.layer, window) if self.diagonal else 0
        self.window, self.lazy, self.keep_codes = window or WINDOW, lazy, keep_codes
        self.target, self.classes, self.lead = target, classes, int(stacked)
        every = bool(target.positions) or not self.diagonal
        self.loss_at: LossAt = LossAt.EVERY if every else self.layer.loss_at
        self.objective: Objective = IDLE
        self.drawn: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.windows_repeat: Callable[[bool], None] = lambda repeat: None  # told where they do

    @property
    def directions(self) -> int:
        """Directions of time; each has its own of the objective's tensors."""
        return 1 + self.layer.bidirectional

    def set_objective(self, objective: Objective) -> None:
        self.objective = objective
        self.drawn = {}

    def forward(self, params: Params, x: "Sequences | UnrolledBatch") -> UnrolledBatch:
        """A batch that is ready to run."""
        if isinstance(x, UnrolledBatch):
            return UnrolledBatch(self, params, x)
        x = _over(self.block.prologue, x, self.lead)
        if not self.lead:
            return UnrolledBatch(self, params, as_sequences(x, self.layer))
        if isinstance(x, Tensor) and x.dim() == 3 and self.layer.inputs == 1:
            x = x.unsqueeze(-1)
        return UnrolledBatch(self, params, x)

    def run(self, saved: UnrolledBatch, out: Tensor | None = None) -> Iterator[StepWindow]:
        """Read the sequences to their ends; yields forward states, and writes all into `out`."""
        saved.cells = cells = [self._cell(saved, way) for way in range(self.directions)]
        x = saved.x
        if isinstance(cells[0], DiagonalCell) and cells[0].reads_twice:
            first = self._cell(replace(saved, learns=False), 0)
            for window in self._windows(x):
                first.read(window)
                del window
            first.finish()
            cells[0].begin_again(first)
            del first  # its tables are free
            x = _without_learning(x)
        for window in self._windows(x):
            start, states = window.start, cells[0].read(window)
            del window
            if states is not None:
                self._write(out, StepWindow(start, states), 0)
                yield StepWindow(start, states)
            del states
        cells[0].finish()
        for way, cell in enumerate(cells[1:], 1):
            for window in self._windows(x, backwards=True):
                states = cell.read(window).flip(-3)
                self._write(out, StepWindow(window.start, states), way)
            cell.finish()
        last = [cell.last for cell in cells]
        saved.last = last[0] if len(last) == 1 else torch.cat(last, -1)
        saved.states = out
        if out is not None and self.diagonal and saved.lengths is not None:
            saved.states = aligned_at_start(out, saved.lengths, saved.shape[-1])

    def gradients(
        self,
        params: Params,
        saved: UnrolledBatch,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> tuple[LossAndGrads, list[dict[str, Tensor]]]:
        """The local loss of a batch, a mean over its steps, and the summed gradients."""
        if not saved.learns or not saved.cells:
            self.prepare_gradients(saved, s, tensors)
            self.finish(saved)
        keys = [self._key(way) for way in range(self.directions)]
        grads = {
            key + name: grad
            for key, cell in zip(keys, saved.cells, strict=True)
            for name, grad in cell.gradients().items()
        }
        return self._report(saved), [grads]

    def _key(self, way: int) -> str:
        """What the names of a cell's parameters begin with."""
        return f"{len(self.block.prologue)}." + ("" if self.diagonal else f"cells.{way}.")

    def prepare_gradients(
        self, saved: UnrolledBatch, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> None:
        """Let the gradients of a batch be computed when it runs."""
        s = self._in_steps(s, saved)
        saved.s, saved.tensors, saved.learns, saved.cells = s, tensors, True, []

    def _in_steps(self, s: Tensor, saved: UnrolledBatch) -> Tensor:
        """Labels of positions, one for each step of the sequences."""
        if not self.target.positions:
            return s
        steps = saved.shape[-1]
        return s if self.lead else reduced(s, (steps,), self.target, self.classes)

    def measure(
        self, params: Params, saved: UnrolledBatch, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        saved.s, saved.tensors = self._in_steps(s, saved), tensors
        self.finish(saved)
        report, saved.s = self._report(saved), None
        return report

    def error(self, saved: UnrolledBatch, labels: Tensor) -> Tensor:
        """Not defined: a recurrent block is never the last."""
        raise NotImplementedError

    def output(self, saved: UnrolledBatch) -> Any:
        """The input of the next block: last states, sequences, or the batch itself if `lazy`."""
        if self.lazy:
            return saved
        if saved.last is None:
            self.finish(saved)
        if not self.layer.sequence:
            assert saved.last is not None
            return _over(self.block.tail, saved.last, self.lead)
        assert saved.states is not None
        return _over(self.block.tail, _padded(saved.states, saved.lengths), self.lead)

    def finish(self, saved: UnrolledBatch, all_states: bool = False) -> None:
        """Run to the end, and store all states if they are asked for or the block's output."""
        out = None
        if all_states or (self.layer.sequence and not self.lazy):
            *rows, steps = saved.shape
            steps = self._longest(saved) if self.diagonal else steps
            like = next(self.layer.parameters()).detach()
            out = like.new_zeros(*rows, steps, self.layer.hidden * self.directions)
        for _ in self.run(saved, out):
            pass

    def _longest(self, saved: UnrolledBatch) -> int:
        return saved.shape[-1] if saved.lengths is None else int(saved.lengths.max())

    def _cell(self, saved: UnrolledBatch, way: int) -> Any:
        module: Any = self.layer if self.diagonal else self.layer.cells[way]
        key, own = self._key(way), module.named_parameters()
        params = {name: saved.params.get(key + name, p).detach() for name, p in own}
        signals, of_steps = None, bool(self.target.positions)
        if saved.s is not None:
            signals = Signals(saved.s, self.lead, of_steps, backwards=bool(way))
        if self.diagonal:
            steps, tensors = self._longest(saved), saved.tensors
            return DiagonalCell(
                self.loss_at,
                self.layer.sequence,
                DiagonalWeights.of(params),
                steps,
                self._span(saved.x, steps),
                saved.lengths,
                lambda y, s: self._of_samples(y, s, 0, tensors, signals),
                None if signals is None else signals.of_samples,
                saved.learns,
            )
        act, rows = activation(self.layer.activation), saved.shape[:-1]
        assert act is not None
        bias = params["bias_x"] + params["bias_h"] if "bias_x" in params else None
        weights = CellWeights(params["weight_x"], params["weight_h"], bias, self.layer.leak, act)
        if signals is None:
            return CellGradients(weights, rows)
        objective = self._objective(saved, way, signals)
        return CellGradients(weights, rows, objective, saved.learns, self.at is Place.BEFORE)

    def _objective(
        self, saved: UnrolledBatch, way: int, signals: Signals
    ) -> Callable[[int, Steps], tuple[LossAndGrads, float]]:
        """The loss of a window of states, and its share of the batch's mean."""
        tensors, before = saved.tensors, self.at is Place.BEFORE
        sequences, longest = saved.shape[-2:]
        total = sequences * longest if saved.lengths is None else int(saved.lengths.sum())

        def objective(start: int, window: Steps) -> tuple[LossAndGrads, float]:
            steps, rows = window.shape
            if self.codes is None:
                y = window.z_of_samples if before else window.states_of_samples
                s = signals.of_samples(start, steps, rows)
                return self._of_samples(y, s, way, tensors, signals), rows * steps / total
            y = window.z if before else window.states
            s = signals.window(start, steps, rows)
            local = self._of_steps(y, s, way, start, signals)
            loss = local.loss if steps == 1 else local.loss.sum(-1)
            return local._replace(loss=loss, logits=None), rows / total

        return objective

    def _of_samples(
        self,
        y: Tensor,
        s: Tensor,
        way: int,
        tensors: tuple[Tensor, ...],
        signals: Signals | None = None,
    ) -> LossAndGrads:
        """The objective of a window, in which each step of a sequence counts as a sample."""
        objective = over_dimension(self.objective) if self.lead else self.objective
        local = objective(y, s, *tensors[way :: self.directions])
        if not self.target.positions or signals is None:
            return local
        local = local._replace(labels=s)
        return signals.unlabelled(local, s) if self.target.ignores else local

    def _of_steps(
        self, y: Tensor, s: Tensor, way: int, start: int, signals: Signals
    ) -> LossAndGrads:
        """The objective of a window, `(..., steps, rows, units)`, with a projection per step."""
        objective, tensors = self.objective, self._codes(way, start, y.shape[-3])
        if y.shape[-3] == 1:
            y, tensors = y.squeeze(-3), tuple(t.squeeze(self.lead) for t in tensors)
            s = s.squeeze(self.lead) if signals.of_steps else s
        else:
            in_dims = 0, 0 if signals.of_steps else None, *[0] * len(tensors)
            objective = over_dimension(objective, in_dims)
        local = (over_dimension(objective) if self.lead else objective)(y, s, *tensors)
        return signals.unlabelled(local, s) if self.target.ignores else local

    def _codes(self, way: int, start: int, steps: int) -> tuple[Tensor, ...]:
        """The objective's tensors of each step, stacked."""
        assert self.codes is not None
        each = []
        for step in range(start, start + steps):
            tensors = self.drawn.get((way, step)) or self.codes(way, step)
            if self.keep_codes:
                self.drawn[way, step] = tensors
            each.append(tensors)
        each = each[::-1] if way else each
        return tuple(torch.stack(column, self.lead) for column in zip(*each, strict=True))

    def _span(self, x: "Sequences | UnrolledBatch", steps: int) -> int:
        """Steps of a window: all of a diagonal layer's, if they are few or tokens."""
        alone = self.objective is not IDLE and self.objective.closed_form is None
        if alone and (not self.diagonal or self.loss_at is LossAt.EVERY):
            return 1  # autograd differentiates the objective
        if self.codes is not None and self.target.ignores:
            return 1  # the codes of a step for its labelled rows alone
        tokens = not isinstance(x, UnrolledBatch) and not x.is_floating_point()
        whole = self.diagonal and (tokens or steps <= self.whole)
        return steps if whole else self.window

    def _windows(
        self, x: "Sequences | UnrolledBatch", backwards: bool = False
    ) -> Iterator[StepWindow]:
        """The inputs of each window, `(..., steps, rows, inputs)`."""
        if not isinstance(x, UnrolledBatch):
            return self._cut(x, backwards)
        return self._joined(x) if self.diagonal else self._split(x)

    def _split(self, x: UnrolledBatch) -> Iterator[StepWindow]:
        """The windows of the layer below, cut to the length that this layer can take."""
        span = self._span(x, 0)
        for start, below in x.windows():
            for i, values in enumerate(below.split(span, self.lead)):
                yield StepWindow(start + i * span, values)

    def _joined(self, x: UnrolledBatch) -> Iterator[StepWindow]:
        """The windows of the layer below, joined and cut to the length of this layer's."""
        waiting: list[Tensor] = []
        start, longest = 0, self._longest(x)
        span, steps = self._span(x, longest), 0
        for below in x.windows():
            waiting.append(below.values)
            steps += below.values.shape[self.lead]
            while steps >= (count := min(span, longest - start)) > 0:
                joined = waiting[0] if len(waiting) == 1 else torch.cat(waiting, self.lead)
                now, rest = joined.split((count, steps - count), self.lead)
                waiting, steps = [rest] if steps > count else [], steps - count
                del joined, rest
                yield StepWindow(start, now)
                start += count

    def _cut(self, x: Sequences, backwards: bool) -> Iterator[StepWindow]:
        """A batch in windows of time; no sequence ends within a window.

        Unless lengths differ or codes are stored, all but the first few and the last are alike.
        """
        data, lengths = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
        if self.diagonal and isinstance(x, Padded):
            data, lengths = aligned_at_end(x), None
        dim = self.lead + 1
        spans = _spans(data.shape[dim], self._span(x, data.shape[dim]), lengths, backwards)
        alike = lengths is None and not self.keep_codes and len(spans) > FIRST_FEW
        for number, (start, stop, rows) in enumerate(spans):
            if alike and number in (FIRST_FEW, len(spans) - 1):
                self.windows_repeat(number < len(spans) - 1)
            steps = data.narrow(dim, start, stop - start)
            steps = steps if rows is None else steps.narrow(dim - 1, 0, rows)
            steps = steps.flip(dim) if backwards and stop - start > 1 else steps
            steps = steps.transpose(dim - 1, dim)
            yield StepWindow(start, steps.contiguous() if self.diagonal else steps)

    def _write(self, out: Tensor | None, window: StepWindow, way: int) -> None:
        """Write a window's states to their place in `(..., rows, steps, units)`."""
        if out is None:
            return
        dim, units = self.lead + 1, self.layer.hidden
        states = window.values.transpose(dim - 1, dim)
        rows, steps = states.shape[dim - 1], states.shape[dim]
        window_out = out.narrow(dim - 1, 0, rows).narrow(dim, window.start, steps)
        window_out.narrow(dim + 1, way * units, units).copy_(states)

    def _report(self, saved: UnrolledBatch) -> LossAndGrads:
        """The loss of all directions, and the prediction from the last states if there is one."""
        loss = sum(cell.loss for cell in saved.cells if cell.loss is not None)
        assert isinstance(loss, Tensor)
        columns = zip(*(cell.dtensors for cell in saved.cells), strict=True)
        dtensors = tuple(t for column in columns for t in column)
        cell = saved.cells[0]
        logits = cell.logits
        if logits is not None and saved.lengths is not None and not self.diagonal:
            assert saved.s is not None
            logits = self.objective(cell.last, saved.s, *saved.tensors[:: self.directions]).logits
        labels = cell.labels
        if labels is None and self.target.positions:
            assert saved.s is not None
            labels = saved.s.flatten(self.lead, self.lead + 1)
        return LossAndGrads(loss, loss, dtensors, logits, labels)


def _without_learning(x: Any) -> Any:
    """The same batch, to be read once more."""
    if not isinstance(x, UnrolledBatch):
        return x
    return replace(x, x=_without_learning(x.x), s=None, learns=False, tensors=(), cells=[])


def computed(x: Any) -> Sequences:
    """A block's output as tensors; an `UnrolledBatch` is run to its end."""
    if not isinstance(x, UnrolledBatch):
        return x
    x.source.finish(x, all_states=True)
    assert x.states is not None
    return _padded(x.states, x.lengths)


def _padded(states: Tensor, lengths: Tensor | None) -> Sequences:
    return states if lengths is None else Padded(states, lengths)


def _spans(
    steps: int, span: int, lengths: Tensor | None, backwards: bool
) -> list[tuple[int, int, int | None]]:
    """(start, stop, rows that are still going on) of each window; the longest rows come first."""
    spans: list[tuple[int, int, int | None]] = []
    start, longest = 0, steps if lengths is None else int(lengths.max())
    assert lengths is None or bool((lengths[:-1] >= lengths[1:]).all()), "longest rows come first"
    while start < longest:
        rows = None if lengths is None else int((lengths > start).sum())
        stop = min(start + span, longest if lengths is None else int(lengths[:rows].min()))
        spans.append((start, stop, rows))
        start = stop
    return spans[::-1] if backwards else spans


def _over(modules: list[Any], x: Sequences, lead: int) -> Sequences:
    """Modules applied to a batch, also of sequences of different lengths."""
    for module in modules:
        x = torch.vmap(module)(x) if lead else through(module, x)
    return x
