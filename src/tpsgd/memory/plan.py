"""`plan`: the peak bytes of a training before it starts, and how to stay within a budget."""

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tpsgd.engine.assemble import rules_for
from tpsgd.engine.backprop import Backprop
from tpsgd.engine.device import available, resolve_device
from tpsgd.engine.optimizers import adam
from tpsgd.engine.settings import Memory, Settings, listed
from tpsgd.errors import TpsgdError
from tpsgd.memory.rehearse import Inputs, Rehearsal, rehearse
from tpsgd.nets.blocks import split
from tpsgd.nets.recurrent import tokens_of
from tpsgd.rules import Rule, frozen, readout
from tpsgd.solvers import SOLVERS
from tpsgd.train import sequential, simultaneous
from tpsgd.units import as_bytes, columns, size

if TYPE_CHECKING:
    from tpsgd.engine.meter import Stage

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "projections": "codes",
    "workspace": "cuDNN",
}


@dataclass(frozen=True)
class Line:
    """What one way of training holds at its peak, by what it is for; in bytes."""

    name: str
    parts: dict[str, int]
    kept: int = 0  # inputs kept for reuse, which come on top
    blocks: tuple["Line", ...] = ()

    @property
    def peak(self) -> int:
        """As `Run.peak_bytes` will have it: without kept inputs."""
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        """Kept inputs included."""
        return self.peak + self.kept

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        blocks = [block.as_dict() for block in self.blocks]
        return asdict(self) | {"peak": self.peak, "total": self.total, "blocks": blocks}


@dataclass(frozen=True)
class Plan:
    """The lines of a plan, the first of which is the way that was asked for.

    `settings` are those that `fit` needs to keep to it.
    """

    lines: tuple[Line, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    budget: str | int | None = None

    @property
    def peak_bytes(self) -> int:
        """Of the way that was asked for, kept inputs included."""
        return self.lines[0].total

    def __getitem__(self, name: str) -> Line:
        return {line.name: line for line in self.lines}[name]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        lines = [line.as_dict() for line in self.lines]
        memory = self.settings.get("memory", Memory())
        chosen = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(memory).items()}
        return {"lines": lines, "memory": chosen, "remarks": list(self.remarks)}

    def __str__(self) -> str:
        tables = [table(self.lines, "way to train")]
        if self.budget is not None:
            tables.insert(0, f"within {size(as_bytes(self.budget))}: {self.settings['memory']}")
        if len(self.lines[0].blocks) > 1:
            tables.append(table(self.lines[0].blocks, f"{self.lines[0].name}: block"))
        return "\n\n".join([*tables, *(textwrap.fill(line, 80) for line in self.remarks)])

    def plot(self, file: Path | str) -> Path:
        """Stacked bars of every way to train, as a picture; needs matplotlib."""
        from tpsgd.memory.plot import draw

        return draw(self, Path(file))


def table(lines: Sequence[Line], title: str) -> str:
    """Lines as a table of bytes in aligned columns."""
    head, *rows = cells(lines, title)
    rows = [[name if len(name) <= 30 else name[:29] + "…", *row] for name, *row in rows]
    return columns([head, *rows])


def cells(lines: Sequence[Line], title: str) -> list[list[str]]:
    """The head and the rows of a table of bytes; parts that no line has are left out."""
    brief = PARTS | {"gradients": "grads", "optimizer": "optim.", "activations": "activ."}
    shown = [part for part in PARTS if any(line.parts.get(part) for line in lines)]
    kept = ["inputs"] if any(line.kept for line in lines) else []
    rows = [[title, *(brief[part] for part in shown), *kept, "total"]]
    for line in lines:
        counts = [line.parts.get(part, 0) for part in shown]
        counts += [line.kept, line.total] if kept else [line.total]
        rows.append([line.name, *map(short, counts)])
    return rows


def short(count: int) -> str:
    """Bytes in few characters.

    Examples:
        >>> short(1536), short(0)
        ('1.5K', '-')
    """
    text = size(count).replace(" ", "").removesuffix("B")
    return re.sub(r"(\d{3})\.\d+", r"\1", text) if count else "-"


def plan(
    model: nn.Module,
    input_shape: Sequence[int],
    *,
    rule: Rule | Sequence[Rule] | None = None,
    samples: int = 0,
    dtype: torch.dtype | None = None,
    others: bool = True,
    **settings: Any,
) -> Plan:
    """The peak bytes of training, before it starts: per block, in total, and beside backprop.

    The training is rehearsed: the very code of `fit` runs on tensors that have shapes but no
    memory. Data sets are not counted. What a CPU's libraries take for themselves is not seen; what
    cuDNN takes is measured, if the GPU is there, by running each convolution once.

    Args:
        model: as for `fit`. It is not changed.
        input_shape: of one sample.
        rule: default: `rules.readout()`.
        samples: number of samples, validation included; reused inputs are counted from it.
        dtype: of the data; default: float32, or int64 for a model that starts with a look-up.
        others: also plan the other schedule, backprop and its ways to save memory, and training
            only the last layer.
        **settings: those of `fit`. Without a `schedule` both are planned. `device="cuda"` works
            without a GPU, but cuDNN's workspaces are only measured with one.

    Returns:
        A plan to print and to plot; `fit(..., **plan.settings)` keeps to it. A line's `peak` is
        what `run.peak_bytes` will be, its `kept` is `run.kept_bytes`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        >>> found = plan(model, (784,), batch_size=64, others=False)
        >>> found["sequential"].parts["weights"] == 4 * (784 * 256 + 256 + 256 * 10 + 10)
        True
    """
    rule = readout() if rule is None else rule
    wanted = Settings.of("plan", settings)
    _check(model, input_shape, samples, wanted)
    inputs = Inputs(tuple(input_shape), dtype or _dtype(model, input_shape), samples)
    waits = any(r.needs_output for r in rules_for(rule, split(model), simultaneous)[:-1])
    if "schedule" not in settings and waits:
        wanted = replace(wanted, schedule=simultaneous)
    budget = wanted.memory.budget
    if budget is not None:
        from tpsgd.memory.budget import within

        wanted = within(model, inputs, rule, wanted)
    recurrent = any(block.recurrent for block in split(model))
    ways = list(_ways(rule, wanted, "schedule" not in settings and others, others, recurrent))
    rehearsals = {name: rehearse(model, inputs, how, s) for name, how, s in ways}
    lines = tuple(line_of(name, rehearsals[name], s.memory.reuse) for name, _, s in ways)
    remarks = _remarks(next(iter(rehearsals.values())), wanted, samples)
    return Plan(lines, {"memory": wanted.memory}, remarks, budget)


def _check(model: nn.Module, shape: Any, samples: Any, settings: Settings) -> None:
    """Refuse what `fit` would find out from its data."""
    whole = isinstance(shape, Sequence) and all(isinstance(n, int) and n > 0 for n in shape)
    if not whole:
        raise TpsgdError(
            f"input_shape must be one sample's sizes, such as (1, 28, 28), got {_brief(shape)}"
        )
    if not isinstance(samples, int) or samples < 0:
        raise TpsgdError(f"samples must be a whole number, 0 or more, got {samples!r}")
    if settings.window is not None and not any(b.recurrent for b in split(model)):
        raise TpsgdError("window is for models with recurrent layers, and there is none")
    device = settings.device
    if device is not None and not str(device).startswith("cuda"):
        resolve_device(device)


def _brief(value: Any) -> str:
    """What was given, if that is short."""
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def _ways(
    rule: Any, settings: Settings, both: bool, others: bool, recurrent: bool
) -> Iterator[tuple[str, Any, Settings]]:
    """Every way to train that a plan compares, the one that was asked for first."""
    yield settings.schedule.__name__, rule, settings
    locked = any(r.needs_output for r in listed(rule))
    solved = any(isinstance(o, SOLVERS) for o in listed(settings.optimizer))
    if both and not locked and not solved:
        other = simultaneous if settings.schedule is sequential else sequential
        yield other.__name__, rule, replace(settings, schedule=other)
    if not others:
        return
    one = next((o for o in listed(settings.optimizer) if not isinstance(o, SOLVERS)), adam)
    whole = replace(
        settings, schedule=sequential, optimizer=one, lr=None, epochs=1, window=None,
        memory=Memory(), early_stopping=None,
    )  # fmt: skip
    pieces = max(1, settings.batch_size // 4)
    yield "backprop", Backprop(), whole
    yield "backprop, 4 micro-batches", Backprop(), whole.within(micro_batch=pieces)
    if not recurrent:
        yield "backprop, checkpointed", Backprop(checkpoint=True), whole
    yield "last layer alone", frozen(), whole.within(reuse=False)


def line_of(name: str, found: Rehearsal, reuse: Any = None) -> Line:
    """A rehearsal as a line: its highest stage, and each block's own."""
    kept = found.kept if reuse is None or isinstance(reuse, bool) else 0  # a file takes no memory
    top = max(found.stages, key=lambda stage: stage.peak)
    blocks = []
    for i, block in enumerate(found.names):
        own = [stage for stage in found.stages if stage.blocks == (i,)]
        if own and len(found.names) > 1:
            stage = max(own, key=lambda stage: stage.peak)
            blocks.append(
                Line(f"{i + 1}: {block.partition(': ')[2]}", _parts(stage, found.weights))
            )
    return Line(name, _parts(top, found.weights), kept, tuple(blocks))


def _parts(stage: "Stage", weights: int) -> dict[str, int]:
    parts = {"weights": weights} | dict.fromkeys(list(PARTS)[1:], 0)
    for name, count in stage.parts.items():
        parts[name or "activations"] += count
    return parts


def _remarks(found: Rehearsal, settings: Settings, samples: int) -> tuple[str, ...]:
    remarks = []
    if not samples and settings.schedule is sequential and settings.memory.reuse is not False:
        remarks.append("inputs kept for reuse are not counted: say how many samples there are")
    if isinstance(settings.memory.reuse, (str, Path)):
        remarks.append(
            f"{size(found.kept)} of inputs for reuse lie in a file in {settings.memory.reuse}"
        )
    if settings.memory.micro_batch is not None and found.varies:
        remarks.append(
            f"micro-batches change what is learned: {', '.join(found.varies)} in this model"
        )
    if (
        found.kept
        and settings.memory.reuse is None
        and found.kept > available(torch.device("cpu")) / 2
    ):
        remarks.append(
            f"{size(found.kept)} of inputs are more than half of the free memory here: fit would "
            "recompute them; memory=Memory(reuse=False) plans that"
        )
    device = settings.device
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        remarks.append("no GPU is here: planned as on a CPU; what cuDNN takes is not counted")
    return tuple(remarks)


def _dtype(model: nn.Module, shape: Sequence[int]) -> torch.dtype:
    looks_up = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in model.modules())
    tokens = tokens_of(model) > 1 and len(shape) == 1
    return torch.long if looks_up or tokens else torch.float32
