"""The settings of `fit` and of everything that trains like it, with their checks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpsgd import losses
from tpsgd.common.errors import TpsgdError, shortened, suggestion
from tpsgd.common.numbers import is_real, is_whole
from tpsgd.common.units import as_bytes, size
from tpsgd.engine.learners.optimizers import LRSchedule, OptimizerFactory, adam
from tpsgd.engine.learners.regularised import Regularised
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.augment import Augmentation
from tpsgd.losses import Loss
from tpsgd.maths.learning_rates import RateCurve
from tpsgd.nets.cuts.balance import Blocks
from tpsgd.nets.cuts.split import AUTO, LAYERS, Where
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Epoch, Net

if TYPE_CHECKING:
    from tpsgd.rules import Rule

Order = Callable[[Net], None]
ProgressFunction = Callable[[int, int], None]  # called with what is done and the total
LOW = "low"  # in place of a memory budget: as little memory as is reasonable
FAST = "fast"  # in place of a memory budget: whatever keeping inputs takes
RENAMED = {  # names of before 0.2, for one version, and of other libraries
    "schedule": "it is order= now, as order=tpsgd.simultaneous",
    "learning_rate": "it is lr=",
    "checkpoint": "checkpoint must be a folder or tpsgd.Checkpoint; activation checkpointing is "
    "fit_backprop(segments=...)",
}
LARGEST_RATE = 1000  # no sensible learning rate comes near it: 1e9 was meant to be 1e-9, say


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a block when its loss (on validation data where given) has stopped improving."""

    patience: int = 2
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if not is_real(self.patience) or not is_real(self.min_delta):
            raise TpsgdError(f"patience and min_delta must be numbers, got {shortened(self)}")


@dataclass(frozen=True)
class BlockSettings:
    """How one block is trained."""

    epochs: int
    optimizer: Any  # a factory of optimizers, or a solver
    lr: float | None = None
    early_stopping: EarlyStopping | None = None
    lr_schedule: Any = None


@dataclass(frozen=True)
class Memory:
    """How `fit` saves memory; every setting gives the same training step.

    Args:
        budget: "64MB", or bytes: the most that training may hold beyond the data set, the model and
            reused inputs included. `fit` then chooses the other settings by `tpsgd.plan`. If the
            budget is too small, it raises an error that names the smallest feasible one. Files are
            written only where nothing else fits, in a folder that is named, `Memory("64MB",
            reuse=folder)`. "low" is no amount: no inputs are kept, and gradients in slices or
            micro-batches of 8 samples or more are chosen if they need less memory and change
            nothing that is learned.
        reuse: where the inputs of each block come from after the first epoch: kept in memory
            (True), kept in a temporary file in a folder (its path), recomputed (False), or kept in
            memory as far as training then takes no more of it than backprop would (None). Kept
            inputs are those of one pass over the data: with random augmentation in a `Dataset` or
            `DataLoader`, blocks after the first see one version of each sample unless
            `reuse=False`. A `DataLoader`'s samples come in the library's order where they are kept,
            which is shuffled anew for every epoch, and in the loader's where they are recomputed.
        micro_batch: process at most this many samples at a time; gradients are summed, so that a
            step equals that of the whole batch (except for batch normalisation, dropout and losses
            that are no mean over samples).
        slices: compute the gradient of a weight in this many slices, each applied before the next
            is computed (by default a few slices for large weights).
        redraw: regenerate the class codes for every batch instead of storing them.
        fast: keep inputs in memory if they take less than half of what is free, and compute each
            gradient whole, which may take more memory than backprop; `memory="fast"`.
        measure: measure the memory of the run (`run.total_bytes`).
    """

    budget: str | int | None = None
    reuse: bool | str | Path | None = None
    micro_batch: int | None = None
    slices: int | None = None
    redraw: bool = False
    fast: bool = False
    measure: bool = True

    def __post_init__(self) -> None:
        for name in ("micro_batch", "slices"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise TpsgdError(f"{name} must be a whole number, 1 or more, got {value!r}")
        if self.reuse is not None and not isinstance(self.reuse, (bool, str, Path)):
            raise TpsgdError(f"reuse must be True, False, None or a folder, got {self.reuse!r}")
        if self.fast and (self.budget is not None or self.reuse is not None):
            raise TpsgdError("memory='fast' keeps inputs in memory: leave reuse and the budget out")
        if self.budget is None:
            return
        if self.budget != LOW:
            as_bytes(self.budget)
        folder = isinstance(self.reuse, (str, Path)) and self.budget != LOW
        if self.micro_batch or self.slices or self.redraw or not (self.reuse is None or folder):
            raise TpsgdError(
                "a memory budget chooses micro_batch, slices, redraw and reuse itself: leave them "
                "out, or the budget; only a folder, reuse=FOLDER, may go with an amount"
            )

    @property
    def budget_in_words(self) -> str:
        """What the budget asks for."""
        if self.budget is None or self.budget == LOW:
            return "in low memory" if self.budget else "without a budget"
        return f"within {size(as_bytes(self.budget))}"

    @classmethod
    def of(cls, memory: "str | int | Memory | None") -> "Memory":
        """Settings as they are; "fast"; anything else is a budget."""
        if isinstance(memory, Memory):
            return memory
        return cls(fast=True) if memory == FAST else cls(budget=memory)


def memory_in_words(settings: Mapping[str, Any]) -> str:
    """The memory settings of a run in words, from a mapping of their names."""
    micro_batch, slices, reuse = (settings[k] for k in ("micro_batch", "slices", "reuse"))
    words = [f"micro-batches of {micro_batch}" if micro_batch else "whole batches"]
    words += [f"gradients in {slices} slices"] if slices else []
    words += ["codes redrawn"] if settings["redraw"] else []
    if reuse is not None:
        place = "memory" if reuse is True else f"a file in {reuse}"
        words.append(f"inputs reused from {place}" if reuse else "inputs recomputed")
    return ", ".join(words)


@dataclass(frozen=True)
class Settings:
    """What `fit`, `fit_many`, `plan`, `compare` and `adapt.fit` take by keyword; see `fit`."""

    order: Order | None = None
    loss: Any = None  # a Loss, or what `losses.resolve` takes
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None
    lr: float | Sequence[float] | None = None
    epochs: Any = 5  # a number, a list for the blocks, or None: `lengths` chooses it
    batch_size: Any = 128  # a number, or None: `lengths` chooses it
    seed: int = 0
    device: torch.device | str | None = None
    validation: Any = None
    early_stopping: EarlyStopping | Sequence[EarlyStopping | None] | None = None
    lr_schedule: LRSchedule | None = None
    weight_decay: float = 0.0
    clip: float | None = None
    callbacks: Sequence[Callable[[Epoch], Any]] = ()
    progress: Callable[[int, int], None] | bool | None = None
    window: int | None = None
    memory: Memory = Memory()
    augment: Callable[[Tensor], Tensor] | None = None
    precision: torch.dtype | None = None
    blocks: Blocks | str | None = None
    split_points: Sequence[str] = ()
    no_split: Sequence[Any] = ()
    checkpoint: str | Path | Checkpoint | None = None
    parallel: Any = None  # an `engine.extension.Extension`

    @classmethod
    def of(cls, function: str, keywords: Mapping[str, Any]) -> "Settings":
        """The settings that a function was called with; a name that does not exist is an error.

        Without epochs or a batch size, the data decide.
        """
        cls.refuse_unknown(function, keywords)
        return cls(**{"epochs": None, "batch_size": None, **keywords})

    @classmethod
    def refuse_unknown(cls, function: str, keywords: Iterable[str]) -> None:
        """Refuse names that are no settings; a name of the last version says what it is now."""
        names = [field.name for field in fields(cls)]
        for name in (name for name in keywords if name not in names):
            advice = RENAMED.get(name) or suggestion(name, names)
            raise TpsgdError(f"{function} has no argument {name!r}: {advice}")

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", Memory.of(self.memory))
        if isinstance(self.checkpoint, int):
            raise TpsgdError(RENAMED["checkpoint"])
        object.__setattr__(self, "loss", losses.resolve(self.loss))
        if self.checkpoint is not None:
            object.__setattr__(self, "checkpoint", Checkpoint.of(self.checkpoint))
        self._check_augment()
        for name, fits, expected in self._expectations():
            if not fits:
                raise TpsgdError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    def _expectations(self) -> list[tuple[str, bool, str]]:
        """Settings, whether each has a value that it may have, and what it must be."""

        def positive(number: Any) -> bool:
            return number is None or (isinstance(number, int) and is_whole(number, 1))

        functions = isinstance(self.callbacks, (list, tuple)) and all(map(callable, self.callbacks))
        curve = callable(self.lr_schedule) or isinstance(self.lr_schedule, RateCurve | None)
        seed = isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63
        blocks = isinstance(self.blocks, (int, list, tuple, type(None))) or self.blocks in (
            AUTO,
            LAYERS,
        )
        progress = callable(self.progress) or isinstance(self.progress, bool | None)
        extends = hasattr(self.parallel, "prepare") and not isinstance(self.parallel, type)
        parallel = self.parallel is None or extends
        return [
            ("batch_size", positive(self.batch_size), "1 or more"),
            ("window", positive(self.window), "1 time step or more"),
            ("seed", seed, "a whole number of up to 63 bits"),
            ("precision", self.precision in (None, torch.bfloat16),
             "torch.bfloat16 or None (float16 needs its loss scaled against underflow)"),
            ("weight_decay", isinstance(self.weight_decay, (int, float))
             and 0 <= self.weight_decay < 1, "a number from 0 to below 1"),
            ("clip", self.clip is None
             or ((is_real(self.clip) or isinstance(self.clip, float)) and self.clip > 0),
             "a positive number, the largest norm of a block's gradients, or None"),
            ("blocks", blocks,
             "a number of blocks, 'auto', 'layers', or a list of the numbers of layers in each"),
            ("parallel", parallel, "tpsgd.data_parallel(), tpsgd.pipeline() or None"),
            ("callbacks", functions, "a list of functions of an Epoch"),
            ("progress", progress, "a function, True or False"),
            ("order", self.order is None or callable(self.order),
             "tpsgd.sequential or tpsgd.simultaneous, the function itself, or None"),
            ("lr_schedule", curve,
             "tpsgd.one_cycle(), or a function optimizer -> torch.optim.lr_scheduler"),
            ("validation", not isinstance(self.validation, (int, float, str)),
             "held-out samples, (x, y), a Dataset or a DataLoader, which you split off yourself"),
        ]  # fmt: skip

    @property
    def where(self) -> Where:
        """Where the model is cut; a solver of all blocks needs blocks of one layer."""
        where = Where(self.blocks, self.split_points, self.no_split)
        solves = isinstance(self.optimizer, SOLVERS)
        return replace(where, blocks=LAYERS) if solves and not where.chosen else where

    def within(self, **changes: Any) -> "Settings":
        """The same settings with other memory settings."""
        return replace(self, memory=replace(self.memory, **changes))

    def _check_augment(self) -> None:
        if self.augment is None:
            return
        if not callable(self.augment):
            raise TpsgdError(
                "augment must be a function of a batch, such as tpsgd.augment.flip(), several as "
                f"tpsgd.augment.chain(...), got a {type(self.augment).__name__}"
            )
        if self.memory.reuse:
            raise TpsgdError(
                f"reuse={self.memory.reuse} keeps one version of each sample, but augment makes "
                "new ones: leave reuse out, and inputs are recomputed"
            )
        if self.memory.budget not in (None, LOW):
            raise TpsgdError(
                "a memory budget does not count what augment takes: set "
                "memory=tpsgd.Memory(reuse=False, micro_batch=...) instead"
            )

    def per_block(self, blocks: int) -> list[BlockSettings]:
        """The settings of each block, from values for each block or for all."""
        columns = [
            self._of_blocks(name, blocks)
            for name in ("epochs", "optimizer", "lr", "early_stopping")
        ]
        return [self._of_block(*row) for row in zip(*columns, strict=True)]

    def _of_blocks(self, name: str, blocks: int) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple)):
            return [value] * blocks
        if len(value) != blocks:
            raise TpsgdError(f"{name} has {len(value)} entries, but the model has {blocks} blocks")
        return list(value)

    def _of_block(self, epochs: Any, optimizer: Any, lr: Any, stopping: Any) -> BlockSettings:
        """The settings of one block; a solver reads each sample once and has no learning rate."""
        optimizer = adam if optimizer is None else optimizer
        if not isinstance(epochs, int) or epochs < 0:
            raise TpsgdError(f"epochs must be a whole number, 0 or more, got {epochs!r}")
        if stopping is not None and not isinstance(stopping, EarlyStopping):
            raise TpsgdError(
                f"early_stopping must be tpsgd.EarlyStopping(patience, min_delta), got {stopping!r}"
            )
        if lr is not None and not (isinstance(lr, (int, float)) and 0 <= lr <= LARGEST_RATE):
            raise TpsgdError(f"lr must be a number from 0 to {LARGEST_RATE}, got {lr!r}")
        if isinstance(optimizer, SOLVERS):
            if self.precision:
                raise TpsgdError("a solver's equations need full precision: leave precision out")
            epochs, lr = min(epochs, 1), None
        elif callable(optimizer) and (self.weight_decay or self.clip is not None):
            optimizer = Regularised(optimizer, self.weight_decay, self.clip)
        return BlockSettings(epochs, optimizer, lr, stopping, self.lr_schedule)

    def describe(self, rule: str, loss: Loss, rules: "Sequence[Rule]" = ()) -> dict[str, Any]:
        """The settings as plain values, for the record."""
        return {
            "rule": rule,
            "options": [f"{r.options}, {r.at.value}" for r in rules if r.objective is not None],
            "loss": loss.name,
            "order": None if self.order is None else str(name_of(self.order)),
            "optimizer": str(name_of(self.optimizer or adam)),
            "lr": self.lr if self.lr is None or isinstance(self.lr, float) else str(self.lr),
            "epochs": self.epochs if isinstance(self.epochs, int) else list(self.epochs),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "device": None if self.device is None else str(self.device),
            "window": self.window,
            "blocks": self.blocks if self.blocks is None else str(self.blocks),
            "split_points": list(self.split_points),
            "no_split": [str(name_of(what)) for what in self.no_split],
            "memory_budget": self.memory.budget,
            "reuse": str(self.memory.reuse)
            if isinstance(self.memory.reuse, Path)
            else self.memory.reuse,
            "micro_batch": self.memory.micro_batch,
            "slices": self.memory.slices,
            "redraw": self.memory.redraw,
            "fast": self.memory.fast,
            "measure": self.memory.measure,
            "precision": None if self.precision is None else str(self.precision)[6:],
            "augment": None if self.augment is None else str(name_of(self.augment)),
            "validation": self.validation is not None,
            "early_stopping": None if self.early_stopping is None else str(self.early_stopping),
            "lr_schedule": None if self.lr_schedule is None else str(name_of(self.lr_schedule)),
            "weight_decay": self.weight_decay or None,  # as in checkpoints from before it
            "clip": self.clip,
            "parallel": None if self.parallel is None else str(self.parallel),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def listed(value: Any) -> list[Any]:
    """One value, or a list of values, as a list."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def name_of(factory: Any) -> Any:
    """A function by its name, and what a partial function has besides; the same in every process.

    Examples:
        >>> name_of(partial(listed, value=3))
        "listed {'value': 3}"
    """
    if isinstance(factory, (list, tuple)):
        return [name_of(f) for f in factory]
    if isinstance(factory, partial):
        keywords = {k: name_of(v) if callable(v) else v for k, v in factory.keywords.items()}
        return " ".join(map(str, (name_of(factory.func), *factory.args, keywords)))
    if isinstance(factory, (Augmentation, RateCurve)):
        return factory.name
    return getattr(factory, "__name__", type(factory).__name__)
