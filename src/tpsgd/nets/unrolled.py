"""How a recurrent block learns: it reads a batch to its end, and `sweep` adds the gradients up.

What lives at any time is one window of steps (one step, unless more are asked for) and the sums,
however long the sequences are. A layer that hands its states on to another recurrent layer does so
window by window, in lockstep: the pass through the first layer is the input of the second.

The nearest relative is OSTTP (Ortner, Pes, Gentinetta, Frenkel & Pantazi, "Online spatio-temporal
learning with target projection", 2023), which has eligibility traces where the paper, and this
module, have the inputs of the step itself.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tpsgd.errors import TpsgdError
from tpsgd.nets.activations import activation
from tpsgd.nets.blocks import Block
from tpsgd.nets.cell_gradients import Look, Sweep, Weights, Window
from tpsgd.nets.padded import Padded
from tpsgd.nets.recurrent import Recurrent, Sequences, as_sequences
from tpsgd.objectives import IDLE, LossAndGrads, Objective
from tpsgd.rules import Place

Params = Mapping[str, Tensor]
Codes = Callable[[int, int], tuple[Tensor, ...]]  # (direction, step) -> the objective's tensors


@dataclass(eq=False)
class Pass:
    """A batch on its way through a recurrent block. Nothing is computed before it is needed.

    It can itself be the input of the next recurrent block, which then pulls window after window.
    """

    engine: "Unrolled"
    params: Params
    x: "Sequences | Pass"
    s: Tensor | None = None  # the signal, if the objective is to look at the states
    learns: bool = False  # and its gradients are wanted
    tensors: tuple[Tensor, ...] = ()
    sweeps: list[Sweep] = field(default_factory=list)
    last: Tensor | None = None  # the last states, once it has run
    states: Tensor | None = None  # all of them, where the next block needs them at once

    @property
    def lengths(self) -> Tensor | None:
        """Of its sequences, where they differ."""
        return self.x.lengths if isinstance(self.x, (Padded, Pass)) else None

    @property
    def steps(self) -> int:
        """Of the longest sequence."""
        return self.x.steps if isinstance(self.x, Pass) else self.x.shape[self.engine.lead + 1]

    @property
    def rows(self) -> tuple[int, ...]:
        """How many sequences, after the number of restarts where they are stacked."""
        if isinstance(self.x, Pass):
            return self.x.rows
        return tuple(self.x.shape[: self.engine.lead + 1])

    def windows(self) -> Iterator[Window]:
        """Its states, window by window; it learns on the way if it is to."""
        return self.engine.run(self)


class Unrolled:
    """The engine of a recurrent block; `learner` describes the face that engines have.

    `window` steps are taken together: more is faster where launching work costs more than doing it,
    and needs memory for as many steps. `lazy`: the next block is recurrent and pulls the states.
    `codes` draws the objective's tensors for a step, if each step has its own.
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
        assert isinstance(block.layer, Recurrent)
        self.block, self.layer, self.at = block, block.layer, at
        self.codes, self.window, self.lazy, self.keep_codes = codes, window, lazy, keep_codes
        self.lead = int(stacked)
        self.objective: Objective = IDLE
        self.kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def set_objective(self, objective: Objective) -> None:
        """Follow this objective from now on."""
        self.objective = objective
        self.kept = {}

    def forward(self, params: Params, x: "Sequences | Pass") -> Pass:
        """A batch that is ready to run."""
        if isinstance(x, Pass):
            return Pass(self, params, x)
        x = _over(self.block.prologue, x, self.lead)
        if not self.lead:
            return Pass(self, params, as_sequences(x, self.layer))
        one_feature = isinstance(x, Tensor) and x.dim() == 3 and self.layer.inputs == 1
        return Pass(self, params, x.unsqueeze(-1) if one_feature else x)  # type: ignore[union-attr]

    def run(self, saved: Pass, out: Tensor | None = None) -> Iterator[Window]:
        """Read the sequences to their ends; forward states as they come, all of them into `out`."""
        saved.sweeps = [self._sweep(saved, way) for way in range(len(self.layer.cells))]
        inputs = self._pulled(saved.x) if isinstance(saved.x, Pass) else self._cut(saved.x, False)
        for window in inputs:
            states = Window(window.start, saved.sweeps[0].read(window))
            self._write(out, states, 0)
            yield states
        for way, sweep in enumerate(saved.sweeps[1:], 1):
            assert not isinstance(saved.x, Pass)
            for window in self._cut(saved.x, True):
                states = sweep.read(window).flip(-3)
                self._write(out, Window(window.start, states), way)
        saved.last = torch.cat([sweep.h for sweep in saved.sweeps], -1)
        saved.states = out

    def gradients(
        self,
        params: Params,
        saved: Pass,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> tuple[LossAndGrads, list[dict[str, Tensor]]]:
        """The local loss of a batch, a mean over its steps, and the summed gradients."""
        if not saved.learns or not saved.sweeps:
            self.teach(saved, s, tensors)
            self._finish(saved)
        key = f"{len(self.block.prologue)}.cells."
        grads = {
            f"{key}{way}.{name}": grad
            for way, sweep in enumerate(saved.sweeps)
            for name, grad in sweep.gradients().items()
        }
        return self._report(saved), [grads]

    def teach(self, saved: Pass, s: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Let a batch be learned from when it runs."""
        saved.s, saved.tensors, saved.learns, saved.sweeps = s, tensors, True, []

    def measure(
        self, params: Params, saved: Pass, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        saved.s, saved.tensors = s, tensors
        self._finish(saved)
        report, saved.s = self._report(saved), None
        return report

    def error(self, saved: Pass, labels: Tensor) -> Tensor:
        """Never asked for: a recurrent block is not the last."""
        raise TpsgdError("a model must end with a classifier, an nn.Linear for example")

    def output(self, saved: Pass) -> Any:
        """What the next block gets: last states, sequences, or this pass, to be pulled."""
        if self.lazy:
            return saved
        if saved.last is None:
            self._finish(saved)
        if saved.states is None:
            assert saved.last is not None
            return _over(self.block.tail, saved.last, self.lead)
        return _over(self.block.tail, _padded(saved.states, saved.lengths), self.lead)

    def room(self, saved: Pass) -> Tensor:
        """Memory for all states of a batch."""
        units = self.layer.hidden * len(self.layer.cells)
        return self._weights(saved.params, 0).h.new_zeros(*saved.rows, saved.steps, units)

    def _finish(self, saved: Pass) -> None:
        """Run to the end, and keep all states where they are this block's output."""
        out = self.room(saved) if self.layer.sequence and not self.lazy else None
        for _ in self.run(saved, out):
            pass

    def _weights(self, params: Params, way: int) -> Weights:
        """A cell's weights: those given, or the module's own where they do not learn."""
        cell: Any = self.layer.cells[way]
        key = f"{len(self.block.prologue)}.cells.{way}."
        x, h, bias_x, bias_h = (
            params.get(key + name, getattr(cell, name))
            for name in ("weight_x", "weight_h", "bias_x", "bias_h")
        )
        bias = None if bias_x is None else bias_x.detach() + bias_h.detach()
        act = activation(self.layer.activation)
        assert act is not None
        return Weights(x.detach(), h.detach(), bias, self.layer.leak, act)

    def _sweep(self, saved: Pass, way: int) -> Sweep:
        weights, before = self._weights(saved.params, way), self.at is Place.BEFORE
        if saved.s is None:
            return Sweep(weights, saved.rows)
        ends, s, tensors = saved.lengths, saved.s, saved.tensors
        total = saved.rows[-1] * saved.steps if ends is None else int(ends.sum())

        def look(window: Window, y: Tensor) -> Look:
            rows = y.shape[-2]
            local = self._ask(y, s.narrow(self.lead, 0, rows), way, window.start, tensors)
            share = rows / total
            if self.codes is None:
                return Look(local, share * y.shape[-3])
            loss = local.loss if y.shape[-3] == 1 else local.loss.sum(-1)
            return Look(local._replace(loss=loss, logits=None), share)

        return Sweep(weights, saved.rows, look, saved.learns, before)

    def _ask(
        self, y: Tensor, s: Tensor, way: int, start: int, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The objective at a window's states, `(..., steps, rows, units)`.

        With one projection for all steps they are as many samples; otherwise each has its own.
        """
        steps, ask = y.shape[-3], self.objective
        if self.codes is None:
            count = len(tensors) // len(self.layer.cells)
            own = tensors[way * count : (way + 1) * count]
            if steps > 1:
                s = s.repeat(*[1] * self.lead, steps, *[1] * (s.dim() - self.lead - 1))
            y = y.flatten(-3, -2)
        else:
            own = self._codes(way, start, steps)
            if steps == 1:
                y, own = y.squeeze(-3), tuple(t.squeeze(self.lead) for t in own)
            else:
                ask = _vmapped(ask, (0, None, *[0] * len(own)))
        return (_vmapped(ask, 0) if self.lead else ask)(y, s, *own)

    def _codes(self, way: int, start: int, steps: int) -> tuple[Tensor, ...]:
        """The objective's tensors of each step, stacked; made again each time unless kept."""
        each = [self._code(way, start + i) for i in range(steps)]
        each = each[::-1] if way else each
        return tuple(torch.stack(column, self.lead) for column in zip(*each, strict=True))

    def _code(self, way: int, step: int) -> tuple[Tensor, ...]:
        assert self.codes is not None
        if (way, step) in self.kept:
            return self.kept[way, step]
        made = self.codes(way, step)
        if self.keep_codes:
            self.kept[way, step] = made
        return made

    @property
    def span(self) -> int:
        """Steps that can be taken together: one where autograd differentiates the objective."""
        return self.window if self.objective is IDLE or self.objective.closed_form else 1

    def _pulled(self, x: Pass) -> Iterator[Window]:
        """The windows of the layer below, none longer than this one can take."""
        for window in x.windows():
            for i, values in enumerate(window.values.split(self.span, self.lead)):
                yield Window(window.start + i * self.span, values)

    def _cut(self, x: Sequences, backwards: bool) -> Iterator[Window]:
        """A batch in windows of time, in which the same rows are alive all along."""
        data, ends = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
        dim = self.lead + 1
        for start, stop, rows in _spans(data.shape[dim], self.span, ends, backwards):
            part = data.narrow(dim, start, stop - start)
            part = part if rows is None else part.narrow(dim - 1, 0, rows)
            part = part.flip(dim) if backwards and stop - start > 1 else part
            yield Window(start, part.transpose(dim - 1, dim))

    def _write(self, out: Tensor | None, window: Window, way: int) -> None:
        """A window's states, at their place in `(..., rows, steps, units)`."""
        if out is None:
            return
        dim, units = self.lead + 1, self.layer.hidden
        states = window.values.transpose(dim - 1, dim)
        rows, steps = states.shape[dim - 1], states.shape[dim]
        part = out.narrow(dim - 1, 0, rows).narrow(dim, window.start, steps)
        part.narrow(dim + 1, way * units, units).copy_(states)

    def _report(self, saved: Pass) -> LossAndGrads:
        sweeps = saved.sweeps
        loss = sum(sweep.loss for sweep in sweeps if sweep.loss is not None)
        assert isinstance(loss, Tensor)
        dtensors = tuple(t for sweep in sweeps for t in sweep.dtensors)
        return LossAndGrads(loss, loss, dtensors, self._logits(saved))

    def _logits(self, saved: Pass) -> Tensor | None:
        """What the objective makes of the sequences' last states, if it classifies."""
        if saved.lengths is None or saved.sweeps[0].logits is None:
            return saved.sweeps[0].logits
        own = saved.tensors[: len(saved.tensors) // len(self.layer.cells)]
        assert saved.s is not None
        return self.objective(saved.sweeps[0].h, saved.s, *own).logits


def computed(x: Any) -> Sequences:
    """A block's output as tensors, computed now if it was to be pulled."""
    if not isinstance(x, Pass):
        return x
    out = x.engine.room(x)
    for _ in x.engine.run(x, out):
        pass
    return _padded(out, x.lengths)


def _padded(states: Tensor, lengths: Tensor | None) -> Sequences:
    return states if lengths is None else Padded(states, lengths)


def _spans(
    steps: int, span: int, ends: Tensor | None, backwards: bool
) -> Iterator[tuple[int, int, int | None]]:
    """(start, stop, rows alive) of each window; rows are sorted, the longest first."""
    cuts: list[tuple[int, int, int | None]] = []
    start, longest = 0, steps if ends is None else int(ends.max())
    assert ends is None or bool((ends[:-1] >= ends[1:]).all()), "the longest sequences come first"
    while start < longest:
        rows = None if ends is None else int((ends > start).sum())
        stop = min(start + span, longest if ends is None else int(ends[:rows].min()))
        cuts.append((start, stop, rows))
        start = stop
    yield from reversed(cuts) if backwards else cuts


def _vmapped(ask: Any, dims: Any) -> Callable[..., LossAndGrads]:
    """The objective over one more dimension; vmap cannot return None."""

    def present(*args: Tensor) -> dict[str, Any]:
        return {k: v for k, v in ask(*args)._asdict().items() if v is not None}

    return lambda *args: LossAndGrads(**torch.vmap(present, in_dims=dims)(*args))


def _over(modules: list[Any], x: Sequences, lead: int) -> Sequences:
    """Modules on a batch, sequences of different lengths included."""
    for module in modules:
        if isinstance(x, Padded):
            x = Padded(module(x.data), x.lengths)
        else:
            x = torch.vmap(module)(x) if lead else module(x)
    return x
