"""How a recurrent block learns: it reads a batch to its end while `cell_gradients` sums gradients.

Only one window of a few steps and the sums are in memory, however long the sequences are. If the
next block is recurrent, too, it pulls the states window by window: the unrolled batch of the first
block is the input of the second.

The nearest relative is OSTTP (Ortner, Pes, Gentinetta, Frenkel & Pantazi, "Online spatio-temporal
learning with target projection", 2023). It has eligibility traces where the paper, and this module,
have the inputs of the time step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpsgd.nets.activations import activation
from tpsgd.nets.blocks import Block
from tpsgd.nets.cell_gradients import CellGradients, CellWeights, Steps, StepWindow, WindowLoss
from tpsgd.nets.closed_form import Params
from tpsgd.nets.padded import Padded, Sequences, as_sequences, through
from tpsgd.nets.stacked import over_dimension
from tpsgd.objectives import IDLE, LossAndGrads, Objective
from tpsgd.rules import Place

FIRST_FEW = 4  # windows; a longest and a shorter one are among them, whichever way they are read
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
        """Lengths of its sequences, if they differ."""
        return self.x.lengths if isinstance(self.x, (Padded, UnrolledBatch)) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sequences and time steps of the longest; if stacked, after the number of restarts."""
        if isinstance(self.x, UnrolledBatch):
            return self.x.shape
        return tuple(self.x.shape[: self.source.lead + 2])

    def windows(self) -> Iterator[StepWindow]:
        """Its states, window by window; with `learns`, gradients are summed on the way.

        All windows are in the same memory: read one before the next comes.
        """
        return self.source.run(self)


class Unrolled:
    """The gradients of a recurrent block in closed form; same methods as `ClosedForm`.

    Args:
        block: a recurrent block.
        at: where the objective looks.
        codes: draws the objective's tensors for a direction and a step, if each step has its own.
        window: time steps that are processed together. More is faster where kernel launches
            dominate, and takes memory for as many steps.
        lazy: the next block is recurrent and pulls the states.
        keep_codes: store the codes of all steps instead of drawing them for every batch.
        stacked: tensors have a leading dimension of restarts.
    """

    label = "closed form"

    def __init__(
        self,
        block: Block,
        at: Place,
        codes: Codes | None = None,
        window: int = 1,
        lazy: bool = False,
        keep_codes: bool = False,
        stacked: bool = False,
    ) -> None:
        self.block, self.at = block, at
        self.layer: Any = block.layer
        self.codes, self.window, self.lazy, self.keep_codes = codes, window, lazy, keep_codes
        self.lead = int(stacked)
        self.objective: Objective = IDLE
        self.drawn: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self.windows_repeat: Callable[[bool], None] = lambda repeat: None  # told where they do

    @property
    def ways(self) -> int:
        """Directions of time; each has its own of the objective's tensors."""
        return 1 + self.layer.bidirectional

    def set_objective(self, objective: Objective) -> None:
        """Follow this objective from now on."""
        self.objective = objective
        self.drawn = {}

    def forward(self, params: Params, x: "Sequences | UnrolledBatch") -> UnrolledBatch:
        """A batch that is ready to run."""
        if isinstance(x, UnrolledBatch):
            return UnrolledBatch(self, params, x)
        x = over(self.block.prologue, x, self.lead)
        if not self.lead:
            return UnrolledBatch(self, params, as_sequences(x, self.layer))
        if isinstance(x, Tensor) and x.dim() == 3 and self.layer.inputs == 1:
            x = x.unsqueeze(-1)
        return UnrolledBatch(self, params, x)

    def run(self, saved: UnrolledBatch, out: Tensor | None = None) -> Iterator[StepWindow]:
        """Read the sequences to their ends; yields forward states, and writes all into `out`."""
        saved.cells = [self._cell(saved, way) for way in range(len(self.layer.cells))]
        below = saved.x
        inputs = self._pulled(below) if isinstance(below, UnrolledBatch) else self._cut(below)
        for window in inputs:
            states = StepWindow(window.start, saved.cells[0].read(window))
            self._write(out, states, 0)
            yield states
        saved.cells[0].finish()
        for way, cell in enumerate(saved.cells[1:], 1):
            assert not isinstance(below, UnrolledBatch)
            for window in self._cut(below, backwards=True):
                states = cell.read(window).flip(-3)
                self._write(out, StepWindow(window.start, states), way)
            cell.finish()
        last = [cell.h for cell in saved.cells]
        saved.last = last[0] if len(last) == 1 else torch.cat(last, -1)
        saved.states = out

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
        key = f"{len(self.block.prologue)}."
        return self._report(saved), [{key + k: grad for k, grad in self._by_name(saved).items()}]

    def _by_name(self, saved: UnrolledBatch) -> dict[str, Tensor]:
        """The gradients of a batch by the names of the layer's parameters."""
        return {
            f"cells.{way}.{name}": grad
            for way, cell in enumerate(saved.cells)
            for name, grad in cell.gradients().items()
        }

    def prepare_gradients(
        self, saved: UnrolledBatch, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> None:
        """Let the gradients of a batch be computed when it runs."""
        saved.s, saved.tensors, saved.learns, saved.cells = s, tensors, True, []

    def measure(
        self, params: Params, saved: UnrolledBatch, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        saved.s, saved.tensors = s, tensors
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
        if saved.states is None:
            assert saved.last is not None
            return over(self.block.tail, saved.last, self.lead)
        return over(self.block.tail, padded(saved.states, saved.lengths), self.lead)

    def finish(self, saved: UnrolledBatch, all_states: bool = False) -> None:
        """Run to the end, and store all states if they are asked for or the block's output."""
        out = None
        if all_states or (self.layer.sequence and not self.lazy):
            units = self.layer.hidden * len(self.layer.cells)
            out = self._weights(saved.params, 0).h.new_zeros(*saved.shape, units)
        for _ in self.run(saved, out):
            pass

    def _weights(self, params: Params, way: int) -> CellWeights:
        """A cell's weights: those given, or the module's own if they do not learn."""
        cell: Any = self.layer.cells[way]
        key = f"{len(self.block.prologue)}.cells.{way}."
        x, h, bias_x, bias_h = (
            params.get(key + name, getattr(cell, name))
            for name in ("weight_x", "weight_h", "bias_x", "bias_h")
        )
        bias = None if bias_x is None else bias_x.detach() + bias_h.detach()
        act = activation(self.layer.activation)
        assert act is not None
        return CellWeights(x.detach(), h.detach(), bias, self.layer.leak, act)

    def _cell(self, saved: UnrolledBatch, way: int) -> CellGradients:
        weights, before = self._weights(saved.params, way), self.at is Place.BEFORE
        *lead, sequences, steps = saved.shape
        shape = (*lead, min(self.span, steps), sequences)
        if saved.s is None:
            return CellGradients(weights, shape)
        s, tensors, repeated = saved.s, saved.tensors, Repeated(saved.s, self.lead)
        total = sequences * steps if saved.lengths is None else int(saved.lengths.sum())

        def objective(start: int, window: Steps) -> WindowLoss:
            steps, rows = window.shape
            if self.codes is None:
                y = window.z_of_samples if before else window.states_of_samples
                local = self._of_samples(y, repeated(steps, rows), way, tensors)
                return WindowLoss(local, rows * steps / total)
            y = window.z if before else window.states
            local = self._of_steps(y, s.narrow(self.lead, 0, rows), way, start)
            loss = local.loss if steps == 1 else local.loss.sum(-1)
            return WindowLoss(local._replace(loss=loss, logits=None), rows / total)

        return CellGradients(weights, shape, objective, saved.learns, before)

    def _of_samples(
        self, y: Tensor, s: Tensor, way: int, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The objective of a window, in which each step of a sequence counts as a sample."""
        objective = over_dimension(self.objective) if self.lead else self.objective
        return objective(y, s, *tensors[way :: self.ways])

    def _of_steps(self, y: Tensor, s: Tensor, way: int, start: int) -> LossAndGrads:
        """The objective of a window, `(..., steps, rows, units)`, with a projection per step."""
        objective, tensors = self.objective, self._codes(way, start, y.shape[-3])
        if y.shape[-3] == 1:
            y, tensors = y.squeeze(-3), tuple(t.squeeze(self.lead) for t in tensors)
        else:
            objective = over_dimension(objective, (0, None, *[0] * len(tensors)))
        return (over_dimension(objective) if self.lead else objective)(y, s, *tensors)

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

    @property
    def span(self) -> int:
        """Steps that can be processed together: one if autograd differentiates the objective."""
        return self.window if self.objective is IDLE or self.objective.closed_form else 1

    def _pulled(self, x: UnrolledBatch) -> Iterator[StepWindow]:
        """The windows of the layer below, cut to the length that this layer can take."""
        for window in x.windows():
            for i, values in enumerate(window.values.split(self.span, self.lead)):
                yield StepWindow(window.start + i * self.span, values)

    def _cut(self, x: Sequences, backwards: bool = False) -> Iterator[StepWindow]:
        """A batch in windows of time; no sequence ends within a window.

        Unless lengths differ or codes are stored, all but the first few and the last are alike.
        """
        data, lengths = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
        dim = self.lead + 1
        spans = _spans(data.shape[dim], self.span, lengths, backwards)
        alike = lengths is None and not self.keep_codes and len(spans) > FIRST_FEW
        for number, (start, stop, rows) in enumerate(spans):
            if alike and number in (FIRST_FEW, len(spans) - 1):
                self.windows_repeat(number < len(spans) - 1)
            steps = data.narrow(dim, start, stop - start)
            steps = steps if rows is None else steps.narrow(dim - 1, 0, rows)
            steps = steps.flip(dim) if backwards and stop - start > 1 else steps
            yield StepWindow(start, steps.transpose(dim - 1, dim))

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
        loss = sum(cell.loss for cell in saved.cells if cell.loss is not None)
        assert isinstance(loss, Tensor)
        columns = zip(*(cell.dtensors for cell in saved.cells), strict=True)
        dtensors = tuple(t for column in columns for t in column)
        return LossAndGrads(loss, loss, dtensors, self._logits(saved))

    def _logits(self, saved: UnrolledBatch) -> Tensor | None:
        """The objective's prediction from the last states, if it makes one."""
        if saved.lengths is None or saved.cells[0].logits is None:
            return saved.cells[0].logits
        assert saved.s is not None
        return self.objective(saved.cells[0].h, saved.s, *saved.tensors[:: self.ways]).logits


class Repeated:
    """The signals of a batch, repeated for every step of a window; as long as its shape stays."""

    def __init__(self, s: Tensor, lead: int) -> None:
        self.s, self.lead, self.shape, self.repeated = s, lead, (1, s.shape[lead]), s

    def __call__(self, steps: int, rows: int) -> Tensor:
        """Those of the first rows."""
        if self.shape != (steps, rows):
            s, lead = self.s.narrow(self.lead, 0, rows), self.lead
            self.repeated = s.repeat(*[1] * lead, steps, *[1] * (s.dim() - lead - 1))
            self.shape = steps, rows
        return self.repeated


def computed(x: Any) -> Sequences:
    """A block's output as tensors; an `UnrolledBatch` is run to its end."""
    if not isinstance(x, UnrolledBatch):
        return x
    x.source.finish(x, all_states=True)
    assert x.states is not None
    return padded(x.states, x.lengths)


def padded(states: Tensor, lengths: Tensor | None) -> Sequences:
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


def over(modules: list[Any], x: Sequences, lead: int) -> Sequences:
    """Modules applied to a batch, also of sequences of different lengths."""
    for module in modules:
        x = torch.vmap(module)(x) if lead else through(module, x)
    return x
