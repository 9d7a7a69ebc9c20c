"""`fit`: a plain torch model, data and a rule in; the same model, trained, and a record out."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .blocks import Block, shapes, split, whole
from .errors import TpsgdError
from .hashing import Key
from .learner import (
    Closed,
    Engine,
    Learner,
    OptimizerFactory,
    Stacked,
    Traced,
    adam,
    make_optimizer,
)
from .losses import Loss, bce, cross_entropy
from .memory import Meter, tensor_bytes
from .objectives import IDLE, Objective, Site, move, output
from .rules import Place, Rule, Signal, readout
from .run import BlockInfo, Epoch, Run
from .schedules import sequential
from .sources import Form, first_samples, source
from .trainer import Course, EarlyStopping, Trainer

Schedule = Callable[[Trainer], None]
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Everything `fit` and its siblings have in common; see `fit` for what each one means."""

    schedule: Schedule = sequential
    loss: Loss | None = None
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] = adam
    lr: float | Sequence[float] | None = None
    epochs: int | Sequence[int] = 5
    batch_size: int = 128
    seed: int = 0
    device: torch.device | str | None = None
    validation: Any = None
    early_stopping: EarlyStopping | Sequence[EarlyStopping | None] | None = None
    lr_schedule: Callable[[Optimizer], LRScheduler] | None = None
    callbacks: Sequence[Callable[[Epoch], Any]] = ()
    progress: Callable[[int, int], None] | None = None
    reuse: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise TpsgdError(f"batch_size must be 1 or more, got {self.batch_size!r}")
        if not isinstance(self.seed, int):
            raise TpsgdError(f"seed must be a whole number, got {self.seed!r}")
        if not callable(self.schedule):
            raise TpsgdError(
                "schedule must be tpsgd.sequential or tpsgd.simultaneous, the function itself, "
                f"got {self.schedule!r}"
            )
        if self.loss is not None and not isinstance(self.loss, Loss):
            raise TpsgdError(
                f"loss must be tpsgd.mse, tpsgd.cross_entropy or tpsgd.bce, got {self.loss!r}"
            )

    def courses(self, blocks: int) -> list[Course]:
        """Each block's course, from values given per block or for all."""
        columns = (
            _per_block(self.epochs, blocks, "epochs"),
            _per_block(self.optimizer, blocks, "optimizer"),
            _per_block(self.lr, blocks, "lr"),
            _per_block(self.early_stopping, blocks, "early_stopping"),
        )
        for epochs in columns[0]:
            if not isinstance(epochs, int) or epochs < 0:
                raise TpsgdError(f"epochs must be a whole number, 0 or more, got {epochs!r}")
        for lr in columns[2]:
            if lr is not None and not (isinstance(lr, (int, float)) and 0 <= lr < math.inf):
                raise TpsgdError(f"lr must be a number, 0 or more, got {lr!r}")
        return [Course(*row) for row in zip(*columns, strict=True)]  # type: ignore[arg-type]

    def describe(self, rule: str, loss: Loss, rules: Sequence[Rule] = ()) -> dict[str, Any]:
        """The settings as plain values, for the record."""
        return {
            "rule": rule,
            "options": [f"{r.options}, {r.at.value}" for r in rules if r.objective is not None],
            "loss": loss.name,
            "schedule": getattr(self.schedule, "__name__", str(self.schedule)),
            "optimizer": str(_name(self.optimizer)),
            "lr": self.lr if self.lr is None or isinstance(self.lr, float) else str(self.lr),
            "epochs": self.epochs if isinstance(self.epochs, int) else list(self.epochs),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "device": None if self.device is None else str(self.device),
            "reuse": self.reuse,
            "validation": self.validation is not None,
            "early_stopping": None if self.early_stopping is None else str(self.early_stopping),
            "lr_schedule": None if self.lr_schedule is None else str(_name(self.lr_schedule)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }


def fit(
    model: nn.Module,
    data: Any,
    *,
    rule: Rule | Sequence[Rule] | None = None,
    schedule: Schedule = sequential,
    loss: Loss | None = None,
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] = adam,
    lr: float | Sequence[float] | None = None,
    epochs: int | Sequence[int] = 5,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    validation: Any = None,
    early_stopping: EarlyStopping | Sequence[EarlyStopping | None] | None = None,
    lr_schedule: Callable[[Optimizer], LRScheduler] | None = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | None = None,
    reuse: bool | None = None,
) -> Run:
    """Train a model in place without backpropagation. It is never re-initialised.

    Args:
        model: an `nn.Sequential`, cut into blocks by `tpsgd.split`.
        data: `(x, y)` as tensors or numpy arrays, a `Dataset` or a `DataLoader`. Labels are class
            indices, or float rows: several classes at once with `bce`, soft with `cross_entropy`.
        rule: one rule for the net, or a list with one per block, the last included (which only
            lends its loss). Default: `rules.readout()`.
        schedule: `tpsgd.sequential` (the paper's) or `tpsgd.simultaneous`.
        loss: of the last block; default: the rule's own (`mse` for tpSGD, else `cross_entropy`).
        optimizer: a factory, `params -> torch.optim.Optimizer`; default Adam at 1e-3.
        lr: overrides the optimizer's learning rate.
        epochs: passes over the data *per block*.
        early_stopping: `tpsgd.EarlyStopping(patience, min_delta)`.
            `optimizer`, `lr`, `epochs` and `early_stopping` may be lists, one entry per block.
        batch_size: samples per step (a `DataLoader` brings its own). A last batch of one sample is
            left out when the model has batch normalisation, which cannot take it.
        seed: of the projections, the order of samples and dropout.
        device: where to train; default: where the model is.
        validation: held-out data, measured after every epoch.
        lr_schedule: `optimizer -> torch.optim.lr_scheduler`, stepped once per epoch.
        callbacks: called with an `Epoch` after every epoch of a block; `True` stops that block.
        progress: called with (sample passes done, total) every few batches.
        reuse: keep each block's inputs in memory (True), recompute them (False), or keep them
            where they fit in half of the free memory (None). Kept inputs are those of one pass
            over the data: with random augmentation in a `Dataset` or `DataLoader`, blocks after
            the first see one version of each sample unless `reuse=False`.

    Returns:
        The record of the run: history, seconds, sample passes, peak memory, settings.

    Examples:
        >>> import torch
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> run = fit(model, (x, y), epochs=1)
        >>> run.sample_passes
        128
    """
    settings = Settings(
        schedule, loss, optimizer, lr, epochs, batch_size, seed, device, validation,
        early_stopping, lr_schedule, callbacks, progress, reuse,
    )  # fmt: skip
    return train_local([model], data, readout() if rule is None else rule, settings)[0]


def fit_backprop(
    model: nn.Module,
    data: Any,
    *,
    loss: Loss = cross_entropy,
    optimizer: OptimizerFactory = adam,
    lr: float | None = None,
    epochs: int = 5,
    batch_size: int = 128,
    seed: int = 0,
    device: torch.device | str | None = None,
    validation: Any = None,
    early_stopping: EarlyStopping | None = None,
    lr_schedule: Callable[[Optimizer], LRScheduler] | None = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Train a model in place *with* backpropagation: the same loop and record as `fit`.

    It is `fit` on a single block that is the whole model, so any `nn.Module` will do. The arguments
    are `fit`'s, one value each: there are no blocks to give their own, and nothing to reuse.
    """
    settings = Settings(
        sequential, loss, optimizer, lr, epochs, batch_size, seed, device, validation,
        early_stopping, lr_schedule, callbacks, progress,
    )  # fmt: skip
    return train_backprop(model, data, settings)


def train_local(
    models: list[nn.Module], data: Any, rule: Rule | Sequence[Rule], settings: Settings
) -> list[Run]:
    """Train models by local rules; several models are restarts, stacked into one."""
    started = time.perf_counter()
    cuts = [split(model) for model in models]
    blocks = cuts[0]
    rules = rules_for(rule, blocks, settings.schedule)
    courses = settings.courses(len(blocks))
    loss = settings.loss or rules[-1].loss
    name = rule.name if isinstance(rule, Rule) else " + ".join(r.name for r in rules)
    with prepared(models, settings) as (device, dtype, meter):
        form = _form(blocks, settings, device, dtype, len(models))
        sizes = _sizes(blocks, data, settings, form)
        classes = _classes(sizes[-1][Place.END], blocks[-1])
        with meter.watch():
            learners = [
                _learner(i, cuts, rules[i], loss, sizes[i], classes, settings, form)
                for i in range(len(blocks))
            ]
        runs = [
            Run(name, one.seed, one.describe(name, loss, rules[:-1]))
            for one in (replace(settings, seed=settings.seed + r) for r in range(len(models)))
        ]
        _teach(learners, courses, data, loss, classes, form, meter, runs, settings, started)
        for run in runs:
            run.blocks = _infos(learners, rules)
            run.peak_bytes = meter.peak(sum(map(tensor_bytes, models)))
            run.kept_bytes = meter.kept
    if len(models) > 1:
        _unstack(cuts, learners)
    return runs


def train_backprop(model: nn.Module, data: Any, settings: Settings) -> Run:
    """Train the whole model as one block."""
    started = time.perf_counter()
    block, loss = whole(model), settings.loss or cross_entropy
    courses = settings.courses(1)
    if not block.named_parameters():
        raise TpsgdError(f"{block.name} has no parameters that may learn")
    try:
        layers = split(model)
    except TpsgdError:  # any module will do here
        layers = [block]
    with prepared([model], settings, keep_inputs=False) as (device, dtype, meter):
        form = _form(layers, settings, device, dtype, 1)
        size = _sizes([block], data, settings, form)[0]
        classes = _classes(size[Place.END], block)
        engine = Traced(block, _place(block, loss), output(loss))
        learner = Learner(
            block, engine, lambda: output(loss), params=dict(block.named_parameters()),
            several=loss is bce, width=len(layers), trains=True,
        )  # fmt: skip
        infos = [
            BlockInfo(str(b), "backprop", _count(b.named_parameters()), "autograd") for b in layers
        ]
        run = Run("backprop", settings.seed, settings.describe("backprop", loss), infos)
        _teach([learner], courses, data, loss, classes, form, meter, [run], settings, started)
        run.peak_bytes = meter.peak(tensor_bytes(model))
    return run


def rules_for(rule: Rule | Sequence[Rule], blocks: list[Block], schedule: Schedule) -> list[Rule]:
    """One rule per block, or an error that lists the blocks."""
    rules: list[Any] = list(rule) if isinstance(rule, (list, tuple)) else [rule]
    if isinstance(rule, Rule):
        rules *= len(blocks)
    if len(rules) != len(blocks) or not all(isinstance(r, Rule) for r in rules):
        listed = "; ".join(map(str, blocks))
        raise TpsgdError(
            f"rule must be a tpsgd.rules value or a list of {len(blocks)}, one per block, got "
            f"{len(rules)}: {[getattr(r, 'name', r) for r in rules]}; the blocks are {listed}; "
            "a rule is made by calling it, as in rule=tpsgd.rules.tpsgd_l2()"
        )
    for r in rules[:-1]:
        if r.needs_output and schedule is sequential:
            raise TpsgdError(
                f"{r.name} cannot learn block by block: its signal is the error of the whole net's "
                "output, which is not trained yet; use schedule=tpsgd.simultaneous"
            )
    return rules


@contextmanager
def prepared(
    models: list[nn.Module], settings: Settings, keep_inputs: bool = True
) -> Iterator[tuple[torch.device, torch.dtype, Meter]]:
    """Models on their device, random numbers seeded; modes and the caller's numbers restored.

    `keep_inputs`: no module writes into its input, which may be the output that an earlier block
    has yet to learn from.
    """
    first = next(models[0].parameters())
    device = settings.device if settings.device is not None else first.device
    device = usable(device)
    for model in models:
        model.to(device)
    modules = [m for model in models for m in model.modules()]
    modes = [(m, m.training) for m in modules]
    writers = [m for m in modules if keep_inputs and getattr(m, "inplace", False)]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        try:
            for m in writers:
                m.inplace = False  # type: ignore[assignment]
            yield device, first.dtype, Meter(device)
        finally:
            for m in writers:
                m.inplace = True  # type: ignore[assignment]
            for module, mode in modes:
                module.training = mode


def usable(device: torch.device | str) -> torch.device:
    """A device that tensors can be made on, with its number ("cuda" becomes "cuda:0")."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise TpsgdError(f"unknown device {str(device)!r}: write cpu, cuda or cuda:1") from None
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise TpsgdError(f"device {wanted} was asked for, but torch sees no GPU here")
    if wanted.type == "meta":
        raise TpsgdError("device meta holds no numbers: nothing can be trained on it")
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TpsgdError(f"device {wanted} cannot be used here: {reason}") from None


def _teach(
    learners: list[Learner],
    courses: list[Course],
    data: Any,
    loss: Loss,
    classes: int,
    form: Form,
    meter: Meter,
    runs: list[Run],
    settings: Settings,
    started: float,
) -> None:
    """Run the schedule and time it."""
    held_out = settings.validation
    trainer = Trainer(
        learners,
        courses,
        source(data, form, loss, classes, complete=True),
        None if held_out is None else source(held_out, form, loss, classes),
        meter,
        runs,
        settings.lr_schedule,
        settings.callbacks,
        settings.progress,
        settings.reuse,
    )
    for learner, course in zip(learners, courses, strict=True):
        if learner.trains:  # a mistake in the last block's should not wait for the others
            make_optimizer(course.optimizer, list(learner.params.values()), course.lr)
    meter.begin()
    settings.schedule(trainer)
    if form.device.type == "cuda":
        torch.cuda.synchronize(form.device)
    for run in runs:
        run.seconds = time.perf_counter() - trainer.began
        run.setup_seconds = trainer.began - started


def _learner(
    i: int,
    cuts: list[list[Block]],
    rule: Rule,
    loss: Loss,
    size: dict[Place, tuple[int, ...]],
    classes: int,
    settings: Settings,
    form: Form,
) -> Learner:
    """Block i of every restart, with its objective and gradients."""
    block, last = cuts[0][i], i == len(cuts[0]) - 1
    at = _place(block, loss) if last else rule.at
    frozen = not last and rule.objective is None
    wish = output(loss) if last else IDLE
    make = rule.objective

    def draw() -> Objective:
        if last or make is None:
            return wish
        maps = block.maps and len(size[at]) > 1
        keys = [Key(settings.seed + r, i) for r in range(len(cuts))]
        drawn = [
            make(Site(size[at], classes, key, maps, loss, form.device, form.dtype)) for key in keys
        ]
        if len(cuts) > 1:
            return _stack_objectives(drawn)
        return move(drawn[0], form) if form.channels_last else drawn[0]

    params = [dict(cut[i].named_parameters()) for cut in cuts]
    if len(cuts) > 1:
        engine: Engine = Stacked(Closed(block, at, wish, in_place=False))
        tensors: dict[str, Tensor] = {
            k: torch.stack([p[k].detach() for p in params]) for k in params[0]
        }
    else:
        engine = (Closed if block.closed_form(at) else Traced)(block, at, wish)
        tensors = dict(params[0])
    return Learner(
        block,
        engine,
        draw,
        Signal.LABEL if last else rule.signal,
        tensors,
        several=loss is bce,
        stack=len(cuts) if len(cuts) > 1 else None,
        trains=bool(tensors) and not frozen,
    )


def _stack_objectives(objectives: list[Objective]) -> Objective:
    columns = zip(*(o.tensors for o in objectives), strict=True)
    return replace(objectives[0], tensors=tuple(torch.stack(column) for column in columns))


def _unstack(cuts: list[list[Block]], learners: list[Learner]) -> None:
    """Write stacked parameters back into the restarts' models."""
    for i, learner in enumerate(learners):
        for r, cut in enumerate(cuts):
            for name, p in cut[i].named_parameters().items():
                p.data.copy_(learner.params[name][r])


def _sizes(
    blocks: list[Block], data: Any, settings: Settings, form: Form
) -> list[dict[Place, tuple[int, ...]]]:
    """Output shapes of every block, which held-out data must have too."""
    sizes = shapes(blocks, form(first_samples(data)))
    if settings.validation is not None:
        x = form(first_samples(settings.validation))
        if shapes(blocks, x) != sizes:
            raise TpsgdError(
                f"the validation data's samples, of shape {tuple(x.shape[1:])}, give other output "
                "shapes than the training data's"
            )
    return sizes


def _form(
    blocks: list[Block], settings: Settings, device: torch.device, dtype: torch.dtype, restarts: int
) -> Form:
    modules = [m for block in blocks for top in block.modules for m in top.modules()]
    return Form(
        device,
        dtype,
        settings.batch_size,
        tuple(settings.seed + r for r in range(restarts)),
        channels_last=Form.may_be_channels_last(modules),
        whole_numbers=any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in modules),
        skip_single=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules),
    )


def _place(block: Block, loss: Loss) -> Place:
    """Where the last block's loss looks: at the logits, even if a link function follows them."""
    link = {cross_entropy: (nn.Softmax, nn.LogSoftmax), bce: (nn.Sigmoid,)}.get(loss, ())
    return Place.BEFORE if isinstance(block.activation, link) else Place.END


def _classes(shape: tuple[int, ...], block: Block) -> int:
    if len(shape) != 1:
        raise TpsgdError(
            f"the last block ({block}) must give one number per class, shape (batch, classes), but "
            f"gives (batch, {', '.join(map(str, shape))}); end the model with pooling or "
            "nn.Flatten() and an nn.Linear"
        )
    return shape[0]


def _infos(learners: list[Learner], rules: list[Rule]) -> list[BlockInfo]:
    infos = []
    for learner, rule in zip(learners, rules, strict=True):
        name = "head" if learner is learners[-1] else rule.name
        how = learner.engine.label if learner.trains else "frozen"
        count = _count(learner.block.named_parameters())
        infos.append(BlockInfo(str(learner.block), name, count, how))
    return infos


def _count(params: Mapping[str, Tensor]) -> int:
    return sum(p.numel() for p in params.values())


def _per_block(value: T | Sequence[T], blocks: int, name: str) -> list[T]:
    if not isinstance(value, (list, tuple)):
        return [value] * blocks  # type: ignore[list-item]
    if len(value) != blocks:
        raise TpsgdError(f"{name} has {len(value)} entries, but the model has {blocks} blocks")
    return list(value)


def _name(factory: Any) -> Any:
    if isinstance(factory, (list, tuple)):
        return [_name(f) for f in factory]
    if isinstance(factory, partial):
        return f"{_name(factory.func)} {factory.keywords}"
    return getattr(factory, "__name__", type(factory).__name__)
