"""`plan`: the peak memory of a training run before it starts, and how to keep within a budget."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd.common import plugins
from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_whole
from tpsgd.common.units import columns, size
from tpsgd.engine.device import available, resolve_device
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.lengths import with_lengths_for
from tpsgd.engine.settings import Memory, Settings, listed, memory_in_words, name_of
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.batches import has_lookup
from tpsgd.engine.sources.inputs import tensor
from tpsgd.engine.spec import completed
from tpsgd.memory.budget import within
from tpsgd.memory.meter import PARTS, Stage
from tpsgd.memory.rehearse import (
    Inputs,
    MemoryProfile,
    best_segments,
    rehearse,
    settings_of_backprop,
)
from tpsgd.nets.cuts.split import layers_of, samples_of
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.recurrent import tokens_of
from tpsgd.rules import Rule, frozen, resolve
from tpsgd.targets import CLASSES, Target
from tpsgd.train import sequential, simultaneous

MICRO_BATCH = 8  # samples, unless the planned run has another micro-batch


@dataclass(frozen=True)
class Line:
    """The bytes of one way to train at its peak, by what they are for.

    `peak` is the later `Run.peak_bytes`; `total` adds the inputs that are `kept` for reuse.
    """

    name: str
    parts: dict[str, int]
    kept: int = 0
    blocks: tuple["Line", ...] = ()
    segments: int = 0  # of a net whose activations are checkpointed

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        return self.peak + self.kept

    def as_dict(self) -> dict[str, Any]:
        """The line as plain values."""
        blocks = [block.as_dict() for block in self.blocks]
        return asdict(self) | {"peak": self.peak, "total": self.total, "blocks": blocks}


@dataclass(frozen=True)
class Plan:
    """A line for every way to train, first the one that was asked for, and settings for `fit`."""

    lines: tuple[Line, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    budget: str | int | None = None
    pipeline: Any = None  # a `PipelinePlan` of the plug-in tpsgd-parallel, if ranks were asked for

    @property
    def peak_bytes(self) -> int:
        """The first line's total, kept inputs included."""
        return self.lines[0].total

    @property
    def backprop(self) -> int:
        """The bytes that backprop would take: same net, batch and optimizer."""
        if all(line.name != "backprop" for line in self.lines):
            raise TpsgdError("backprop was not planned: leave others=False out")
        return self["backprop"].total

    def __getitem__(self, name: str) -> Line:
        return {line.name: line for line in self.lines}[name]

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        lines = [line.as_dict() for line in self.lines]
        memory = self.settings.get("memory", Memory())
        values = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(memory).items()}
        record = {"lines": lines, "memory": values, "remarks": list(self.remarks)}
        if self.pipeline is not None:
            record["pipeline"] = self.pipeline.as_dict()
        return record

    def __str__(self) -> str:
        tables = [table(self.lines, "way to train")]
        if self.budget is not None:
            chosen = memory_in_words(asdict(self.settings["memory"]))
            tables.insert(0, f"{Memory(self.budget).budget_in_words}: {chosen}")
        if len(self.lines[0].blocks) > 1:
            tables.append(table(self.lines[0].blocks, f"{self.lines[0].name}: block"))
        if self.pipeline is not None:
            tables.append(columns(self.pipeline.cells()))
        return "\n\n".join([*tables, *(fill(line, 80) for line in self.remarks)])

    def plot(self, file: Path | str) -> Path:
        """Stacked bars of every way to train, as a figure; needs matplotlib."""
        from tpsgd.memory.plot import draw

        return draw(self, Path(file))


def table(lines: Sequence[Line], title: str) -> str:
    """Lines as a table of bytes in aligned columns."""
    head, *rows = cells(lines, title)
    rows = [[name if len(name) <= 30 else name[:29] + "…", *row] for name, *row in rows]
    return columns([head, *rows])


def cells(lines: Sequence[Line], title: str) -> list[list[str]]:
    """The head and the rows of a table of bytes; parts that no line has are left out."""
    shown = [part for part in PARTS if any(line.parts.get(part) for line in lines)]
    inputs = ["inputs"] if any(line.kept for line in lines) else []
    rows = [[title, *(PARTS[part][0] for part in shown), *inputs, "total"]]
    for line in lines:
        counts = [line.parts.get(part, 0) for part in shown]
        counts += [line.kept, line.total] if inputs else [line.total]
        rows.append([line.name, *map(short, counts)])
    return rows


def short(count: int) -> str:
    """Bytes as a short text, for a table.

    Examples:
        >>> short(1536), short(0)
        ('1.5K', '-')
    """
    text = size(count).replace(" ", "").removesuffix("B")
    return re.sub(r"(\d{3})\.\d+", r"\1", text) if count else "-"


def plan(
    model: nn.Module,
    input_shape: Any,
    *,
    rule: Rule | Sequence[Rule] | None = None,
    samples: int = 0,
    dtype: torch.dtype | None = None,
    y: Any = None,
    others: bool = True,
    ranks: int | None = None,
    **settings: Any,
) -> Plan:
    """Estimate the peak memory of a training run: per block, in total, compared with backprop.

    The run is rehearsed: the code of `fit` itself runs on tensors that have shapes but no memory.
    Data sets and the workspaces of a CPU's libraries are not counted; cuDNN's are measured, if
    there is a GPU, by running each convolution once.

    Args:
        model: as for `fit`. It is not changed.
        input_shape: of one sample, or a few samples themselves; for a model of several inputs a
            dict or a tuple of them.
        rule: default: `rules.default()`.
        samples: number of samples, validation included; reused inputs are counted from it, and the
            default batch size follows from it (0: unknown, 128).
        dtype: of the data; default: float32, or int64 for a model that starts with a look-up.
        y: a few labels, unless each sample has one class: numbers, or labels per step or pixel.
        others: also plan the other order, backprop, backprop with activation checkpointing (in
            the number of segments that saves most), backprop and this way in micro-batches of 8
            (this way without kept inputs), and training only the last layer. If this way has
            micro-batches, the line after it is for backprop in the same micro-batches.
        ranks: also plan a pipeline over this many ranks: which blocks each of them trains, the
            multiplications of a step and the bytes that takes, and how much of the time ranks are
            busy (`plan.pipeline`). Needs the plug-in tpsgd-parallel.
        **settings: those of `fit`. Without an `order` both are planned, first the one that `fit`
            takes by default. With `blocks`, the first line is for blocks of several layers, and
            one more for a layer per block. `device="cuda"` works without a GPU, but cuDNN's
            workspaces are only measured with one. `progress` is called with (ways planned, total).

    Returns:
        A plan to print and to plot; `fit(..., **plan.settings)` keeps to it. A line's `total` is
        what `run.total_bytes` will be: its `peak`, `run.peak_bytes`, and the inputs that are
        `kept`, `run.kept_bytes`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> small = plan(model, (784,), batch_size=64, others=False)
        >>> small["sequential"].parts["weights"] == 4 * (784 * 256 + 256 + 256 * 10 + 10)
        True
    """
    rule = resolve(rule)
    chosen = Settings.of("plan", settings)
    inputs = _inputs(model, input_shape, dtype, samples, y, chosen)
    blocks = layers_of(model, inputs.blank(1, torch.device("meta")), chosen.no_split)
    recurrent = any(block.recurrent for block in blocks)
    chosen = with_lengths_for(chosen, samples)
    both, asked = chosen.order is None, chosen.optimizer
    chosen = completed(rule, blocks, chosen)
    budget = chosen.memory.budget
    if budget is not None:
        chosen = within(model, inputs, rule, chosen)
    ways = [(name_of(chosen.order), rule, chosen)]
    if others:
        for name, method, other in _other_ways(rule, chosen, both, recurrent, asked):
            ways.append((name, method, completed(method, blocks, other)))
    profiles, lines, pipeline = [], [], None
    for done, (name, method, way) in enumerate(ways):
        if callable(chosen.progress):
            chosen.progress(done, len(ways))
        segments = 0
        if isinstance(method, Backprop) and method.segments:
            segments = best_segments(model, inputs, way)
            method = Backprop(segments)
        profiles.append(rehearse(model, inputs, method, way))
        lines.append(line_of(name, profiles[-1], way.memory.reuse, segments))
    remarks = [*_remarks(profiles[0], chosen, samples)]
    remarks += [f"{x.name}: {x.segments} segments save most" for x in lines if x.segments]
    if ranks is not None:
        arguments = model, inputs, rule, replace(chosen, optimizer=asked), ranks
        pipeline = plugins.attribute("pipeline")().plan(*arguments)
        remarks.append(f"the same by hand: tpsgd.pipeline(stages={pipeline.stages})")
    return Plan(tuple(lines), {"memory": chosen.memory}, tuple(remarks), budget, pipeline)


def _inputs(
    model: nn.Module,
    shape: Any,
    dtype: torch.dtype | None,
    samples: Any,
    y: Any,
    settings: Settings,
) -> Inputs:
    """What samples will look like; mistakes that `fit` would learn of from its data are refused."""
    if not is_whole(samples):
        raise TpsgdError(f"samples must be a whole number, 0 or more, got {samples!r}")
    if settings.device is not None and not str(settings.device).startswith("cuda"):
        resolve_device(settings.device)
    target = CLASSES if y is None else Target.of(tensor(y, "y"), settings.loss)
    arrays = Tensor, np.ndarray, Mapping, ModelInputs
    several = isinstance(shape, tuple) and any(isinstance(n, (tuple, *arrays)) for n in shape)
    if several or isinstance(shape, arrays):
        return Inputs.of(samples_of(model, shape), samples, target)
    if not isinstance(shape, Sequence) or not all(is_whole(n, 1) for n in shape):
        text = shorten(repr(shape), 40)
        raise TpsgdError(f"input_shape must be one sample's sizes, such as (1, 28, 28), got {text}")
    return Inputs(tuple(shape), dtype or _dtype(model, shape), samples, {}, target)


def _other_ways(
    rule: Any, settings: Settings, both: bool, recurrent: bool, asked: Any
) -> Iterator[tuple[str, Any, Settings]]:
    """What a plan compares with: the other order, three forms of backprop, the last layer.

    `asked` is the optimizer that was asked for; without one, the other order has its default.
    """
    optimizers = [o for o in listed(settings.optimizer) if not isinstance(o, SOLVERS)]
    locked = any(r.needs_net for r in listed(rule))
    plain = settings_of_backprop(settings)
    samples = settings.memory.micro_batch or MICRO_BATCH
    cut, name = samples < settings.batch_size, f"backprop, micro-batch {samples}"
    in_micro_batches = name, Backprop(), plain.within(micro_batch=samples)
    if cut and settings.memory.micro_batch is not None:
        yield in_micro_batches
    if both and not locked and (asked is None or len(optimizers) == len(listed(asked))):
        other = simultaneous if settings.order is sequential else sequential
        yield other.__name__, rule, replace(settings, order=other, optimizer=asked)
    of_blocks = rule, settings.optimizer, settings.lr, settings.epochs, settings.early_stopping
    lists = any(isinstance(value, (list, tuple)) for value in of_blocks)  # an entry for each block
    if settings.blocks is not None and not lists:
        yield "a layer per block", rule, replace(settings, blocks=None)
    yield "backprop", Backprop(), plain
    if not recurrent:
        yield "backprop, checkpointed", Backprop(segments=True), plain
    if cut and settings.memory.micro_batch is None:
        name = f"{name_of(settings.order)}, micro-batch {samples}"
        yield name, rule, settings.within(micro_batch=samples, reuse=False, fast=False)
        yield in_micro_batches
    last = plain.within(reuse=False)
    yield "last layer alone", frozen(), last if asked else replace(last, optimizer=None)


def line_of(name: str, profile: MemoryProfile, reuse: Any, segments: int = 0) -> Line:
    """A line from a rehearsal: the highest of all stages, and the highest of each block."""

    def parts_of(stages: list[Stage]) -> dict[str, int]:
        parts = dict.fromkeys(PARTS, 0) | {"weights": profile.weights}
        for part, count in max(stages, key=lambda stage: stage.peak).parts.items():
            parts[part or "activations"] += count
        return parts

    blocks = []
    for i, block in enumerate(profile.names if len(profile.names) > 1 else []):
        if stages := [stage for stage in profile.stages if stage.blocks == (i,)]:
            blocks.append(Line(f"{i + 1}: {block.partition(': ')[2]}", parts_of(stages)))
    kept = 0 if isinstance(reuse, (str, Path)) else profile.kept  # a file takes no memory
    return Line(name, parts_of(profile.stages), kept, tuple(blocks), segments)


def _remarks(profile: MemoryProfile, settings: Settings, samples: int) -> Iterator[str]:
    memory, input_size = settings.memory, size(profile.kept)
    if not samples and settings.order is sequential and memory.reuse is not False:
        yield (
            "samples= is not given: inputs kept for reuse are not counted, and the order of the "
            "samples is counted as if there were a million"
        )
    if isinstance(memory.reuse, (str, Path)):
        yield f"{input_size} of inputs for reuse lie in a file in {memory.reuse}"
    if memory.micro_batch is not None and profile.varies:
        yield f"micro-batches change what is learned: {', '.join(profile.varies)} in this model"
    if memory.reuse is None and profile.kept > available(torch.device("cpu")) / 2:
        yield (
            f"{input_size} of inputs are more than half of the free memory here: fit would "
            "recompute them; memory=Memory(reuse=False) plans that"
        )
    if str(settings.device).startswith("cuda") and not torch.cuda.is_available():
        yield "no GPU is here: planned as on a CPU; what cuDNN takes is not counted"


def _dtype(model: nn.Module, shape: Sequence[int]) -> torch.dtype:
    tokens = tokens_of(model) > 1 and len(shape) == 1
    return torch.long if tokens or has_lookup(model.modules()) else torch.float32
