"""`fit`: a plain torch model, data and a rule in; the same model, trained, and a record out."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from tpsgd.engine.assemble import (
    classes_of,
    form_for,
    infos,
    make_learner,
    rules_for,
    sizes_of,
    unstack,
)
from tpsgd.engine.augmented import augmented
from tpsgd.engine.batches import (
    UNCUT,
    Form,
    Source,
    count_samples,
    first_samples,
    in_stream,
    source,
)
from tpsgd.engine.device import forget_resident_peak, resident, resolve_device
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import Meter, tensor_bytes
from tpsgd.engine.optimizers import OptimizerFactory, adam, make_optimizer
from tpsgd.engine.record import Epoch, Run
from tpsgd.engine.schedules import sequential
from tpsgd.engine.settings import Memory, Schedule, Settings
from tpsgd.engine.solvable import check_solvers
from tpsgd.engine.trainer import BlockSettings, EarlyStopping, Trainer
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss
from tpsgd.nets.blocks import split
from tpsgd.nets.padded import Padded
from tpsgd.rules import Place, Rule, readout
from tpsgd.solvers import SOLVERS
from tpsgd.units import as_bytes, size


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
    window: int | None = None,
    memory: str | int | Memory | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    precision: torch.dtype | None = None,
) -> Run:
    """Train a model in place without backpropagation. It is never re-initialised.

    Args:
        model: an `nn.Sequential`, cut into blocks by `tpsgd.split`.
        data: `(x, y)` as tensors or numpy arrays, a `Dataset` or a `DataLoader`. Labels are class
            indices, or float rows: several classes at once with `bce`, soft with `cross_entropy`.
            Sequences are (samples, steps, features), tokens (samples, steps) in whole numbers;
            those of different lengths come as `tpsgd.Padded`, a `PackedSequence` or a list.
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
        window: recurrent layers: read sequences in chunks of so many time steps, the input too. It
            changes memory and speed, not what is learned. Default: sequences are gathered whole and
            read step by step (a few at a time on a GPU).
        memory: a budget, "64MB" or bytes, or settings: `tpsgd.Memory(reuse=False, micro_batch=32)`.
        augment: a random change of every batch that is learned from, on the device: one of
            `tpsgd.augment`, or any `x -> x` of the same shape. Every epoch of every block then sees
            new versions of the samples, so inputs are computed again (`reuse=False`). Solvers that
            meet each sample once (`ridge`) and validation take the samples as they are. `plan`
            does not count what it takes, a copy or two of a batch.
        precision: `torch.bfloat16`: samples, activations and gradients in half the bytes, kept
            inputs too. Parameters, the optimizer's state, batch norm's statistics and what
            objectives learn stay in float32; so does the model that comes out. It is faster where
            the hardware multiplies in it (GPUs, CPUs with AMX), and slower elsewhere. Not for
            recurrent layers, solvers and stacked restarts.

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
        schedule=schedule,
        loss=loss,
        optimizer=optimizer,
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        device=device,
        validation=validation,
        early_stopping=early_stopping,
        lr_schedule=lr_schedule,
        callbacks=callbacks,
        progress=progress,
        window=window,
        memory=Memory.of(memory),
        augment=augment,
        precision=precision,
    )
    return train_local([model], data, readout() if rule is None else rule, settings)[0]


def train_local(
    models: list[nn.Module], data: Any, rule: Rule | Sequence[Rule], settings: Settings
) -> list[Run]:
    """Train models by local rules; several models are restarts, stacked into one."""
    started = time.perf_counter()
    budget = settings.memory.budget
    if budget is not None:
        settings = _within(models, data, rule, settings)
    folder = settings.memory.reuse
    if isinstance(folder, (str, Path)) and not Path(folder).expanduser().is_dir():
        raise TpsgdError(f"reuse={str(folder)!r} is no folder to keep inputs in")
    cuts = [split(model) for model in models]
    blocks = cuts[0]
    if settings.window is not None and not any(block.recurrent for block in blocks):
        raise TpsgdError("window is for models with recurrent layers, and there is none")
    courses = settings.courses(len(blocks))
    rules = rules_for(rule, blocks, settings.schedule)
    loss = settings.loss or rules[-1].loss
    name = rule.name if isinstance(rule, Rule) else " + ".join(r.name for r in rules)
    with prepared(models, settings) as (device, dtype, meter):
        x = first_samples(data)
        form = form_for(blocks, x, in_stream(data), settings, device, dtype, len(models))
        sizes = sizes_of(blocks, x, settings, form)
        classes = classes_of(sizes[-1][Place.END], blocks[-1])
        known = source(data, form, loss, classes, complete=True)
        with meter.watch():
            learners = [
                make_learner(i, cuts, rules[i], loss, sizes[i], classes, settings, form)
                for i in range(len(blocks))
            ]
        check_solvers(learners, rules, courses, sizes, settings, known.samples, form)
        runs = [
            Run(name, one.seed, one.describe(name, loss, rules[:-1]))
            for one in (replace(settings, seed=settings.seed + r) for r in range(len(models)))
        ]
        teach(learners, courses, known, loss, classes, form, meter, runs, settings, started)
        for r, run in enumerate(runs):
            run.blocks = infos(learners, rules, courses)
            solved = {x.block.index + 1: x.alphas[r] for x in learners if x.alphas}
            run.settings |= {"alphas": solved} if solved else {}
            run.peak_bytes = meter.peak(sum(map(tensor_bytes, models)))
            run.kept_bytes = meter.kept
            run.settings["memory_budget"] = budget
            _check_held(run, budget)
    if len(models) > 1:
        unstack(cuts, learners)
    return runs


def _within(
    models: list[nn.Module], data: Any, rule: Rule | Sequence[Rule], settings: Settings
) -> Settings:
    """The settings that keep within their budget."""
    from tpsgd.memory.budget import within
    from tpsgd.memory.rehearse import Inputs

    if len(models) > 1:
        raise TpsgdError("a memory budget is for one model at a time, not for stacked restarts")
    x, batch_size = _glance(data, settings.batch_size)
    if isinstance(x, Padded):
        raise TpsgdError(UNCUT)
    given = [data] if settings.validation is None else [data, settings.validation]
    samples = sum(map(count_samples, given))
    inputs, reserved = Inputs(tuple(x.shape[1:]), x.dtype, samples), 0
    if in_stream(data):  # a loader's batches, this one and the next, and the labels kept of all
        reserved = 2 * batch_size * x[0].nbytes + 3 * 8 * samples
    settings = replace(settings, batch_size=batch_size)
    return within(models[0], inputs, rule, settings, reserved)


def _glance(data: Any, batch_size: int) -> tuple[Any, int]:
    """A few samples and the size of a batch; random numbers stay where they are."""
    own = data.generator if isinstance(data, DataLoader) else None
    state = None if own is None else own.get_state()
    try:
        with torch.random.fork_rng():
            if not isinstance(data, DataLoader):
                return first_samples(data), batch_size
            x = first_samples(data, count=1 << 30)
            return x[:2], len(x)
    finally:
        if own is not None and state is not None:
            own.set_state(state)


def _check_held(run: Run, budget: str | int | None) -> None:
    if budget is not None and run.peak_bytes + run.kept_bytes > as_bytes(budget):
        warnings.warn(
            f"training held {size(run.peak_bytes + run.kept_bytes)}, more than the budget of "
            f"{size(as_bytes(budget))}",
            stacklevel=4,
        )


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
    device = resolve_device(device)
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


def teach(
    learners: list[Learner],
    courses: list[BlockSettings],
    data: Source,
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
        augmented(data, settings.augment),
        None if held_out is None else source(held_out, form, loss, classes),
        meter,
        runs,
        settings.lr_schedule,
        settings.callbacks,
        settings.progress,
        settings.memory.reuse if settings.augment is None else False,
    )
    for learner, course in zip(learners, courses, strict=True):
        if learner.trains and not isinstance(course.optimizer, SOLVERS):
            # a mistake in the last block's should not wait for the others
            make_optimizer(course.optimizer, learner.params, course.lr)
    meter.begin()
    forget_resident_peak()
    trainer.began = time.perf_counter()
    settings.schedule(trainer)
    if form.device.type == "cuda":
        torch.cuda.synchronize(form.device)
    for run in runs:
        run.seconds = time.perf_counter() - trainer.began
        run.setup_seconds = trainer.began - started
        run.resident_bytes = resident()[1]
