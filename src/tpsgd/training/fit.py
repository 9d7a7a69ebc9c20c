"""`fit` and `fit_backprop`: a torch model and data in, the trained model and a record out."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tpsgd.engine.assemble import (
    Anatomy,
    Method,
    assemble,
    block_infos,
    check_optimizers,
    unstack,
)
from tpsgd.engine.backprop import Backprop
from tpsgd.engine.device import forget_resident_peak, resident, resolve_device
from tpsgd.engine.learner import EarlyStopping
from tpsgd.engine.meter import Meter, tensor_bytes
from tpsgd.engine.observers import Progress, Recorder
from tpsgd.engine.optimizers import OptimizerFactory, adam
from tpsgd.engine.record import Epoch, Run
from tpsgd.engine.settings import Memory, Settings
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss
from tpsgd.memory.budget import within_budget
from tpsgd.nets.blocks import split
from tpsgd.rules import Rule, readout
from tpsgd.train import Net, sequential
from tpsgd.units import as_bytes, size


def fit(
    model: nn.Module,
    data: Any,
    *,
    rule: Rule | Sequence[Rule] | None = None,
    schedule: Callable[[Net], None] = sequential,
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
    return run_training([model], data, readout() if rule is None else rule, settings)[0]


def fit_backprop(
    model: nn.Module, data: Any, *, checkpoint: int | bool = False, **settings: Any
) -> Run:
    """Train a model in place *with* backpropagation: the same loop and record as `fit`.

    It is `fit` on a single block that is the whole model, so any `nn.Module` works.

    Args:
        model: any module.
        data: as for `fit`.
        checkpoint: activation checkpointing: store only what enters each of this many segments of
            an `nn.Sequential`, and recompute the rest in the backward pass; True: one segment per
            block. Gradients do not change.
        **settings: those of `fit`, one value each, because there is one block. Of
            `memory=tpsgd.Memory(...)`, `micro_batch` (gradient accumulation) and `measure` apply.
    """
    wanted = Settings.of("fit_backprop", settings)
    (run,) = run_training([model], data, Backprop(checkpoint), wanted)
    run.settings |= {"checkpoint": checkpoint}
    return run


def run_training(
    models: list[nn.Module], data: Any, method: Method, settings: Settings
) -> list[Run]:
    """Train models by a rule or by backprop; several models are restarts, stacked into one."""
    started, budget = time.perf_counter(), settings.memory.budget
    local = not isinstance(method, Backprop)
    _check_model(models[0], local)
    if budget is not None:
        settings = _within_budget(models, data, method, settings)
    _check_folder(settings.memory.reuse)
    with training_context(models, settings, keep_inputs=local) as device:
        net, anatomy = assemble(models, data, method, settings, device)
        check_optimizers(net.learners)
        runs = _new_runs(method, anatomy, settings, len(models))
        meter = Meter(device) if settings.memory.measure else None
        net.observers += [Recorder(runs, settings.callbacks)]
        net.observers += [] if meter is None else [meter]
        if settings.progress is not None:
            net.observers += [Progress(settings.progress, net.learners, net.source.samples)]
        with meter or nullcontext():
            _run_schedule(net, settings, device, runs, started)
        for r, run in enumerate(runs):
            run.blocks = block_infos(net.learners, anatomy)
            penalties = {
                x.block.index + 1: x.penalties[r]
                for x in net.learners
                if getattr(x, "penalties", None)
            }
            run.settings |= {"alphas": penalties} if penalties else {}
            run.settings["memory_budget"] = budget
            if meter is not None:
                run.peak_bytes = meter.peak(sum(map(tensor_bytes, models)))
                run.kept_bytes = meter.kept_bytes
            _warn_over_budget(run, budget)
    if len(models) > 1:
        unstack(anatomy.cuts, net.learners)
    return runs


def _run_schedule(
    net: Net, settings: Settings, device: torch.device, runs: list[Run], started: float
) -> None:
    """Train the net, and time it."""
    forget_resident_peak()
    began = time.perf_counter()
    for observer in net.observers:
        if isinstance(observer, Recorder):
            observer.began = began
    settings.schedule(net)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    for run in runs:
        run.seconds = time.perf_counter() - began
        run.setup_seconds = began - started
        run.resident_bytes = resident()[1]


def _new_runs(method: Method, anatomy: Anatomy, settings: Settings, restarts: int) -> list[Run]:
    """An empty record for each restart."""
    if isinstance(method, (Rule, Backprop)):
        name = method.name
    else:
        name = " + ".join(rule.name for rule in anatomy.rules)
    return [
        Run(name, s.seed, s.describe(name, anatomy.loss, anatomy.rules[:-1]))
        for s in (replace(settings, seed=settings.seed + r) for r in range(restarts))
    ]


def _check_model(model: nn.Module, local: bool) -> None:
    """Refuse what has no blocks, or no parameters, before anything looks for its device."""
    if local:
        split(model)
    elif next(model.parameters(), None) is None:
        raise TpsgdError(f"{type(model).__name__} has no parameters that may learn")


def _check_folder(folder: Any) -> None:
    if isinstance(folder, (str, Path)) and not Path(folder).expanduser().is_dir():
        raise TpsgdError(f"reuse={str(folder)!r} is no folder to keep inputs in")


def _within_budget(
    models: list[nn.Module], data: Any, method: Method, settings: Settings
) -> Settings:
    """The settings that keep within their budget."""
    if isinstance(method, Backprop):
        raise TpsgdError("backprop takes no memory budget: it has no blocks to train one by one")
    if len(models) > 1:
        raise TpsgdError("a memory budget is for one model at a time, not for stacked restarts")
    return within_budget(models[0], data, method, settings)


def _warn_over_budget(run: Run, budget: str | int | None) -> None:
    if budget is not None and run.peak_bytes + run.kept_bytes > as_bytes(budget):
        warnings.warn(
            f"training held {size(run.peak_bytes + run.kept_bytes)}, more than the budget of "
            f"{size(as_bytes(budget))}",
            stacklevel=4,
        )


@contextmanager
def training_context(
    models: list[nn.Module], settings: Settings, keep_inputs: bool = True
) -> Iterator[torch.device]:
    """Models on their device, random numbers seeded; modes and the caller's numbers restored.

    `keep_inputs`: no module writes into its input, which may be the output that an earlier block
    has yet to learn from.
    """
    device = settings.device
    if device is None:
        device = next(models[0].parameters()).device
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
            yield device
        finally:
            for m in writers:
                m.inplace = True  # type: ignore[assignment]
            for module, mode in modes:
                module.training = mode
