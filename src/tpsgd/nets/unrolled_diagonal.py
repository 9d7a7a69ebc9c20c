"""How a block with a diagonal recurrence learns: windows of time, a loss in one of three places.

    every   each window's losses are known when it has been read
    last    one loss at the end: its derivative meets the traces, or the only window
    mean    one loss at the end, but it depends on every step: sequences are read twice, first for
            the mean over time, then with the derivative, which is the same at each step

Only one window, the traces and the sums are in memory, however long the sequences are; of tokens,
all steps are one window. Sequences of different lengths are aligned at their ends, with zeros
before them: zeros leave the state at zero. The class codes are the same at each step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.nets.blocks import Block
from tpsgd.nets.cell_gradients import StepWindow
from tpsgd.nets.diagonal import Diagonal, DiagonalWeights, LossAt
from tpsgd.nets.diagonal_gradients import DiagonalGradients, DiagonalWindow
from tpsgd.nets.padded import Padded, aligned_at_end, aligned_at_start, steps_inside
from tpsgd.nets.stacked import over_dimension
from tpsgd.nets.unrolled import FIRST_FEW, Repeated, Unrolled, UnrolledBatch, over, padded
from tpsgd.objectives import LossAndGrads
from tpsgd.rules import Place

WINDOW = 32  # time steps that are computed together, unless the whole sequence takes less memory


def steps_without_traces(layer: Diagonal, window: int | None) -> int:
    """How long a sequence may be that is computed in one window, without traces.

    That of a window that was asked for; otherwise as long as a window of all steps takes less
    memory than the traces would, twice 2 x states x inputs numbers for a sample.
    """
    if window is not None:
        return window
    step = 6 * layer.states + 8 * layer.hidden  # about as many numbers of a sample
    return WINDOW + 4 * layer.states * layer.inputs // step


class UnrolledDiagonal(Unrolled):
    """The gradients of a block with a diagonal recurrence; see `Unrolled`.

    `window`: None leaves the choice to the layer, see `steps_without_traces`.
    """

    def __init__(
        self, block: Block, window: int | None, lazy: bool = False, stacked: bool = False
    ) -> None:
        super().__init__(block, Place.AFTER, None, window or WINDOW, lazy, stacked=stacked)
        self.whole = steps_without_traces(self.layer, window)

    def run(self, saved: UnrolledBatch, out: Tensor | None = None) -> Iterator[StepWindow]:
        """Read the sequences to their ends; yields outputs, and writes all into `out`."""
        batch = _Reading(self, saved)
        saved.cells = [batch.cell]
        again = batch.read_for_mean()
        for start, x in batch.windows(again):
            y = batch.read(start, x)
            del x
            if y is not None:
                self._write(out, StepWindow(start, y), 0)
                yield StepWindow(start, y)
            del y
        batch.finish()
        saved.last, saved.states = batch.last, out

    def _by_name(self, saved: UnrolledBatch) -> dict[str, Tensor]:
        return saved.cells[0].gradients()

    def finish(self, saved: UnrolledBatch, all_states: bool = False) -> None:
        """Run to the end, and store all outputs if they are asked for or the block's output."""
        out, lengths = None, saved.lengths
        if all_states or (self.layer.sequence and not self.lazy):
            shape = [*saved.shape[:-1], self.steps_of(saved), self.layer.hidden]
            out = self.weights(saved).c.new_empty(shape)
        for _ in self.run(saved, out):
            pass
        if out is not None and lengths is not None:
            saved.states = aligned_at_start(out, lengths, saved.shape[-1])

    def output(self, saved: UnrolledBatch) -> Any:
        """The input of the next block: one output, all outputs, or the batch itself if `lazy`."""
        if self.lazy:
            return saved
        if saved.last is None:
            self.finish(saved)
        if not self.layer.sequence:
            assert saved.last is not None
            return over(self.block.tail, saved.last, self.lead)
        assert saved.states is not None
        return over(self.block.tail, padded(saved.states, saved.lengths), self.lead)

    def _report(self, saved: UnrolledBatch) -> LossAndGrads:
        cell = saved.cells[0]
        return LossAndGrads(cell.loss, cell.loss, tuple(cell.dtensors), cell.logits)

    def weights(self, saved: UnrolledBatch) -> DiagonalWeights:
        """The layer's weights: those given, or the module's own if they do not learn."""
        key = f"{len(self.block.prologue)}."
        names = self.layer.named_parameters()
        return DiagonalWeights.of({k: saved.params.get(key + k, p).detach() for k, p in names})

    def steps_of(self, saved: UnrolledBatch) -> int:
        """Time steps of the longest sequence."""
        return saved.shape[-1] if saved.lengths is None else int(saved.lengths.max())

    def span_of(self, saved: UnrolledBatch, steps: int) -> int:
        """StepWindow that are computed together: all, if they are few or tokens, or a window."""
        if self.layer.loss_at is LossAt.EVERY and self.span == 1:
            return 1
        tokens = not isinstance(saved.x, UnrolledBatch) and not saved.x.is_floating_point()
        return steps if tokens or steps <= self.whole else self.window

    def objective_of(self, y: Tensor, s: Tensor, tensors: tuple[Tensor, ...]) -> LossAndGrads:
        """The objective of some samples."""
        return (over_dimension(self.objective) if self.lead else self.objective)(y, s, *tensors)


class _Reading:
    """A batch while it is read: its windows, its loss where the layer has it, its outputs."""

    def __init__(self, source: UnrolledDiagonal, saved: UnrolledBatch) -> None:
        self.source, self.saved, self.lead = source, saved, source.lead
        self.at, self.sequence = source.layer.loss_at, source.layer.sequence
        self.steps, self.lengths = source.steps_of(saved), saved.lengths
        self.span = source.span_of(saved, self.steps)
        self.window_count = -(-self.steps // self.span)
        self.measures, self.learns = saved.s is not None, saved.learns and saved.s is not None
        self.cell = DiagonalGradients(source.weights(saved), self.learns and self.window_count > 1)
        self.total: Tensor | None = None  # of outputs over time
        self.dy: Tensor | None = None  # the derivative with respect to the mean, once it is known
        self.last: Tensor | None = None  # what a layer without `sequence` returns
        self.end: DiagonalWindow | None = None
        if saved.s is not None and self.at is LossAt.EVERY:
            self.repeated = Repeated(saved.s, self.lead)
            self.count = saved.shape[-2] * self.steps
            self.count = self.count if self.lengths is None else int(self.lengths.sum())

    # ---- windows ---------------------------------------------------------------------------------

    def windows(self, again: bool = False) -> Iterator[tuple[int, Tensor]]:
        """The inputs `(..., steps, rows, inputs)` of each window with its first step."""
        x = self.saved.x
        if isinstance(x, UnrolledBatch):
            yield from self._grouped(_without_learning(x) if again else x)
            return
        data: Any = aligned_at_end(x) if isinstance(x, Padded) else x
        dim, count = self.lead + 1, self.window_count
        alike = self.lengths is None and count > FIRST_FEW and self.span > 1
        for number in range(count):
            if alike and number in (FIRST_FEW, count - 1):
                self.source.windows_repeat(number < count - 1)
            start = number * self.span
            steps = data.narrow(dim, start, min(self.span, self.steps - start))
            yield start, steps.transpose(dim - 1, dim).contiguous()

    def _grouped(self, x: UnrolledBatch) -> Iterator[tuple[int, Tensor]]:
        """The outputs of the layer below, in windows of this layer's length."""
        waiting: list[Tensor] = []
        start, steps = 0, 0
        for below in x.windows():
            waiting.append(below.values)
            steps += below.values.shape[self.lead]
            while steps >= min(self.span, self.steps - start) > 0:
                together = waiting[0] if len(waiting) == 1 else torch.cat(waiting, self.lead)
                count = min(self.span, self.steps - start)
                now, rest = together.split((count, steps - count), self.lead)
                waiting, steps = [rest] if steps > count else [], steps - count
                del together, rest
                yield start, now
                start += count

    # ---- learning --------------------------------------------------------------------------------

    def read_for_mean(self) -> bool:
        """Read all windows for the mean over time, if several need its derivative."""
        if not self.learns or self.at is not LossAt.MEAN or self.window_count == 1:
            return False
        first = _Reading(self.source, replace(self.saved, learns=False, cells=[]))
        first.sequence = False
        for start, window in first.windows():
            first.read(start, window)
        first.finish()
        self.last, self.dy = first.last, first.dy
        done, cell = first.cell, self.cell
        cell.loss, cell.dtensors, cell.logits = done.loss, done.dtensors, done.logits
        return True

    def read(self, start: int, x: Tensor) -> Tensor | None:
        """The outputs of a window, if anything needs them; learn from it."""
        cell, final = self.cell, start + self.span >= self.steps
        window, y = cell.window(x, self._inside(start, x)), None
        if self.sequence or self.at is LossAt.MEAN or (self.at is LossAt.EVERY and self.measures):
            h = cell.states(window)
            f = cell.features(window, h, self.learns and self.at is not LossAt.LAST)
            y = f.pop("y")
            if self.at is LossAt.MEAN and self.last is None:
                self._add_to_mean(y, window)
                if final:
                    self._take_mean()
            dy = self._derivative(y, window)
            if self.learns and dy is not None:
                cell.learn(window, h, f, dy)
        if not final or self.at is not LossAt.MEAN:
            cell.go_on(window)
        self.end = window if final else None
        return y.unflatten(-2, window.b.shape[-2:]) if y is not None and self.sequence else None

    def _inside(self, start: int, x: Tensor) -> Tensor | None:
        if self.lengths is None:
            return None
        stop = min(start + self.span, self.steps)
        return steps_inside(self.lengths, start, stop, x.device)

    def _derivative(self, y: Tensor, window: DiagonalWindow) -> Tensor | None:
        """The derivative of the loss with respect to the outputs of a window, if it is known."""
        if self.at is LossAt.EVERY and self.saved.s is not None:
            return self._of_every_step(y, window)
        if self.at is not LossAt.MEAN or self.dy is None or not self.learns:
            return None
        steps = window.b.shape[-2]
        if window.inside is None:
            share = (self.dy / self.steps).unsqueeze(-3)
            each = share.expand(*share.shape[:-3], steps, *share.shape[-2:])
            return each.flatten(-3, -2).contiguous()  # of one sample it would be a view
        assert self.lengths is not None
        share = self.dy / self.lengths.to(y.device).unsqueeze(-1)
        return (window.inside.unsqueeze(-1) * share).flatten(-3, -2)

    def _of_every_step(self, y: Tensor, window: DiagonalWindow) -> Tensor | None:
        """Add the loss of a window's steps, each a sample; its derivative, to learn from."""
        (steps, rows), tensors = window.b.shape[-2:], self.saved.tensors
        s, inside = self.repeated(steps, rows), window.inside
        if inside is None:
            local = self.source.objective_of(y, s, tensors)
            share = steps * rows / self.count
            self._add_loss(local, share, rows)
            return local.dy.reshape(y.shape).contiguous().mul_(share) if self.learns else None
        chosen = inside.flatten().nonzero().squeeze(1)
        local = self.source.objective_of(y[chosen], s[chosen], tensors)
        share = len(chosen) / self.count
        self._add_loss(local, share, rows)
        if not self.learns:
            return None
        return torch.zeros_like(y).index_copy_(0, chosen, local.dy.reshape(len(chosen), -1) * share)

    def _add_to_mean(self, y: Tensor, window: DiagonalWindow) -> None:
        y = y.unflatten(-2, window.b.shape[-2:])
        y = y if window.inside is None else y * window.inside.unsqueeze(-1)
        total = y.sum(-3)
        self.total = total if self.total is None else self.total.add_(total)

    def _take_mean(self) -> None:
        """The mean over time, and the derivative of its loss."""
        assert self.total is not None
        lengths = None if self.lengths is None else self.lengths.to(self.total.device)
        self.last = self.total / (self.steps if lengths is None else lengths.unsqueeze(-1))
        self.dy = self._loss_at_end(self.last)

    def finish(self) -> None:
        """After the last window: the output, and the loss of the last step."""
        if self.at is LossAt.MEAN:
            return
        assert self.end is not None
        f = self.cell.at_end(self.end)
        self.last = f.pop("y")
        dy = self._loss_at_end(self.last) if self.at is LossAt.LAST else None
        if dy is not None and self.learns:
            self.cell.learn_at_end(self.end, f, dy)

    def _loss_at_end(self, y: Tensor) -> Tensor | None:
        """Note a loss that is taken once for a sequence; its derivative."""
        if self.saved.s is None:
            return None
        local = self.source.objective_of(y, self.saved.s, self.saved.tensors)
        self._add_loss(local, 1.0, y.shape[-2])
        return local.dy.reshape(y.shape).contiguous()

    def _add_loss(self, local: LossAndGrads, share: float, rows: int) -> None:
        cell = self.cell
        if cell.loss is None:
            cell.loss, cell.dtensors = local.loss * share, [t * share for t in local.dtensors]
        else:
            cell.loss.add_(local.loss, alpha=share)
            for total, t in zip(cell.dtensors, local.dtensors, strict=True):
                total.add_(t, alpha=share)
        cell.logits = None if local.logits is None else local.logits[..., -rows:, :]


def _without_learning(x: UnrolledBatch) -> UnrolledBatch:
    """The same batch, to be read once more."""
    below = _without_learning(x.x) if isinstance(x.x, UnrolledBatch) else x.x
    return replace(x, x=below, s=None, learns=False, tensors=(), cells=[])
