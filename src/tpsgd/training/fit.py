"""`fit` and `fit_backprop`: a torch model and data in, the trained model and a record out."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.anatomy import Anatomy, Method, rules_for, schedule_for
from tpsgd.engine.assemble import assemble, block_infos, check_optimizers, unstack
from tpsgd.engine.backprop import Backprop
from tpsgd.engine.batches import stored_samples, workers_watched
from tpsgd.engine.device import (
    forget_resident_peak,
    limit_threads,
    resident,
    resolve_device,
    threads_restored,
    with_threads,
)
from tpsgd.engine.learner import EarlyStopping
from tpsgd.engine.lengths import length_in_words, with_lengths
from tpsgd.engine.meter import Meter, tensor_bytes
from tpsgd.engine.optimizers import LRSchedule, OptimizerFactory
from tpsgd.engine.record import Epoch, Progress, Recorder, Run
from tpsgd.engine.settings import LOW, Memory, Schedule, Settings
from tpsgd.engine.solved import with_default_optimizers
from tpsgd.errors import TpsgdError
from tpsgd.fast.wrapper import wrapper
from tpsgd.losses import Loss
from tpsgd.memory.budget import within_budget
from tpsgd.nets.blocks import overwriting, split
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.precision import without_autocast
from tpsgd.parallel.job import Parallel, SingleProcess
from tpsgd.rules import Rule, resolve
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Net
from tpsgd.training.changes import Changes
from tpsgd.training.checkpoints import keep_checkpoints
from tpsgd.training.last_good import LastGoodWeights
from tpsgd.training.likely_mistakes import (
    hint_for,
    refuse_broken_weights,
    warn_of_bytes,
    warn_of_link,
)
from tpsgd.training.memory_choice import memory_choice
from tpsgd.training.progress_bar import bar_unless
from tpsgd.training.run_identity import check_same_on_ranks, identity
from tpsgd.units import as_bytes, size


def fit(
    model: nn.Module,
    data: Any,
    *,
    rule: Rule | str | Sequence[Rule | str] | None = None,
    schedule: Schedule | None = None,
    loss: Loss | str | nn.Module | None = None,
    optimizer: OptimizerFactory | Sequence[OptimizerFactory] | None = None,
    lr: float | Sequence[float] | None = None,
    epochs: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    validation: Any = None,
    early_stopping: EarlyStopping | Sequence[EarlyStopping | None] | None = None,
    lr_schedule: LRSchedule | None = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | bool | None = None,
    window: int | None = None,
    memory: str | int | Memory | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    precision: torch.dtype | None = None,
    blocks: int | Sequence[int] | None = None,
    checkpoint: str | Path | Checkpoint | None = None,
    parallel: Parallel | None = None,
) -> Run:
    """Train a model in place without backpropagation. It is never re-initialised.

    On a CPU, nets too small for several threads are trained with one; `run.settings["threads"]` is
    the number, callbacks run with torch's own, and so does everything afterwards.

    Args:
        model: an `nn.Sequential`, cut into blocks by `tpsgd.split`.
        data: `(x, y)` as tensors or numpy arrays, a `Dataset` or a `DataLoader`. Labels are class
            indices, or float rows: several classes with `bce`, soft labels with `cross_entropy`,
            any numbers with `mse` (then the record has no accuracy, and the rule must not have a
            local classifier, as the default has).
            Sequences are (samples, steps, features), tokens (samples, steps) in whole numbers;
            those of different lengths come as `tpsgd.Padded`, a `PackedSequence` or a list. Bytes
            (uint8) that are no tokens are pixels: they are divided by 255, in `evaluate`,
            `tpsgd.data.load` and `tpsgd.adapt` too. All other numbers are taken as they are.
        rule: one rule for the net, `tpsgd.rules.readout()` or its name "readout"; or a list with
            one per block, the last included (which only lends its loss). Default:
            `rules.default()`.
        schedule: `tpsgd.sequential` (the paper's) or `tpsgd.simultaneous`. Default: the one that
            suits the net: `simultaneous` if the rule needs the net's output (DFA, sDFA), or if five
            blocks or more of a net with batch norm learn, none is solved, and no budget or reuse of
            inputs is asked for; otherwise `sequential`.
        loss: of the last block: `tpsgd.cross_entropy`, its name or `nn.CrossEntropyLoss()`;
            `tpsgd.bce`; `tpsgd.mse`. Default: the rule's (`mse` for tpSGD, else `cross_entropy`).
        optimizer: a factory, `params -> torch.optim.Optimizer`. Default: Adam at 1e-3; but the
            last layer of a recurrent net is solved by `tpsgd.ridge()` under `sequential`, unless it
            cannot be, because Adam needs many more epochs for it (`run.settings["optimizer"]`).
        lr: overrides the optimizer's learning rate.
        epochs: passes over the data *per block*. Default: as many as make 2,000 steps a block, and
            at least 5 (`run.length`).
        early_stopping: `tpsgd.EarlyStopping(patience, min_delta)`.
            `optimizer`, `lr`, `epochs` and `early_stopping` may be lists, one entry per block.
        batch_size: samples per step, unless a `DataLoader` sets it. Default: the power of two
            nearest to the root of the number of samples, 8 to 128. A last batch of one sample is
            left out when the model has batch normalisation, which cannot take it.
        seed: of the projections, the order of samples and dropout.
        device: where to train; default: where the model is.
        validation: held-out data, measured after every epoch.
        lr_schedule: `tpsgd.one_cycle()`, which changes the rate with every batch; or
            `optimizer -> torch.optim.lr_scheduler`, stepped once per epoch.
        callbacks: called with an `Epoch` after every epoch of a block; `True` stops that block.
            They may change numbers of the model in place, but replace nothing in it; modules that
            they put into evaluation or training mode get their mode back.
        progress: called with (sample passes done, total) every few batches. Without a function, a
            terminal shows a bar with the time left after two seconds; False shows none.
        window: recurrent layers: read sequences, the input too, in chunks of this many time steps.
            It changes memory and speed, not what is learned. Default: sequences are gathered whole
            and read 8 steps at a time (16 on a GPU).
        memory: by default training takes no more than backprop would, and inputs of a block are
            kept only as far as they fit under that (`run.memory_choice`). "fast" keeps them where
            the machine has room; "low" is the least that is reasonable; "64MB", or bytes, a budget;
            or settings: `tpsgd.Memory(reuse=False, micro_batch=32)`.
        augment: a random change of every batch that is learned from, on the device: one of
            `tpsgd.augment`, or any `x -> x` of the same shape. Every epoch of every block then sees
            new versions of the samples, so inputs are recomputed (`reuse=False`). `ridge` and
            validation see the samples unchanged. `plan` does not count the memory of augmentation,
            a copy or two of a batch.
        precision: `torch.bfloat16`: samples, activations, gradients and kept inputs in half the
            bytes. Parameters, the optimizer's state, batch norm's statistics and learned readouts
            stay in float32. Faster where the hardware multiplies in it (GPUs, CPUs with AMX),
            slower elsewhere. Not for recurrent layers, solvers and stacked restarts. A
            `torch.autocast` around `fit` has no effect.
        blocks: train blocks of several layers: gradients flow inside each block, and stop at its
            input. A number of blocks, the last layer in the last one, or a list of the numbers of
            layers in each. With a number, the cut makes the memory of the largest block smallest;
            it is in `run.blocks`. 1 is the whole net as one block, which is backprop; `plan` shows
            the memory of every number. Default: every layer is a block. Each recurrent layer stays
            a block, and solvers need blocks of one layer.
        checkpoint: a folder for the state of training, written after epochs, at most every five
            seconds; or `tpsgd.Checkpoint(folder, every=60, resume=True)`, which goes on from there.
            On a CPU the weights are then those of a run that was never interrupted, bit for bit.
        parallel: how to share the work among the processes that `torchrun` starts:
            `tpsgd.data_parallel()` gives each process its share of every batch, `tpsgd.pipeline()`
            some of the blocks. Every process calls `fit` with the same arguments and ends with the
            same model and record. Process 0 alone shows progress, calls the callbacks and writes
            checkpoints.

    Returns:
        The record of the run: history, seconds, sample passes, memory, settings.

    Examples:
        >>> import torch
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> run = fit(model, (x, y), epochs=1)
        >>> run.sample_passes
        128
    """
    settings = Settings(
        schedule=schedule, loss=loss, optimizer=optimizer, lr=lr, epochs=epochs,
        batch_size=batch_size, seed=seed, device=device, validation=validation,
        early_stopping=early_stopping, lr_schedule=lr_schedule, callbacks=callbacks,
        progress=progress, window=window, memory=Memory.of(memory), augment=augment,
        precision=precision, blocks=blocks, checkpoint=checkpoint, parallel=parallel,
    )  # fmt: skip
    return run_training([model], data, resolve(rule), settings)[0]


def fit_backprop(
    model: nn.Module,
    data: Any,
    *,
    checkpoint: int | bool | str | Path | Checkpoint = False,
    **settings: Any,
) -> Run:
    """Train a model in place *with* backpropagation: the same loop and record as `fit`.

    It is `fit` on a single block that is the whole model, so any `nn.Module` works.

    Args:
        model: any module.
        data: as for `fit`.
        checkpoint: activation checkpointing: store only what enters each of this many segments of
            an `nn.Sequential`, and recompute the rest in the backward pass; True: one segment per
            block. Gradients do not change. A folder, or a `tpsgd.Checkpoint`: as for `fit`.
        **settings: those of `fit`, one value each, because there is one block. Of
            `memory=tpsgd.Memory(...)`, `micro_batch` (gradient accumulation) and `measure` apply.
    """
    if isinstance(checkpoint, (str, Path, Checkpoint)):
        settings, checkpoint = {**settings, "checkpoint": checkpoint}, False
    chosen = Settings.of("fit_backprop", settings)
    (run,) = run_training([model], data, Backprop(checkpoint), chosen)
    run.settings |= {"checkpoint": checkpoint}
    return run


def run_training(
    models: list[nn.Module], data: Any, method: Method, settings: Settings
) -> list[Run]:
    """Train models by a rule or by backprop; several models are restarts, stacked into one."""
    started, budget, asked = time.perf_counter(), settings.memory.budget, settings
    parallel = settings.parallel or SingleProcess()
    with ExitStack() as stack:
        stack.enter_context(workers_watched())
        settings = stack.enter_context(parallel.joined(settings))
        settings = _complete(models[0], data, method, settings)
        parallel.plan(models[0], data, method, settings)
        keep_inputs = not isinstance(method, Backprop)
        device = stack.enter_context(training_context(models, settings, keep_inputs))
        progress = stack.enter_context(bar_unless(settings.progress))
        last_good = stack.enter_context(LastGoodWeights())
        net, anatomy = assemble(models, data, method, settings, device, wrapper)
        refuse_broken_weights(models)
        warn_of_link(anatomy)
        warn_of_bytes(net.source)
        samples = stored_samples(net.source)
        check_optimizers(net.learners)
        threads = limit_threads(device, _largest_product(anatomy, data, settings))
        runs = _new_runs(method, anatomy, settings, len(models))
        modes = modes_restored(*models)  # a callback may evaluate the model
        callbacks = [modes(with_threads(threads, f)) for f in settings.callbacks]
        recorder = Recorder(runs, callbacks, last_good.restore)
        meter = Meter(device) if settings.memory.measure else None
        net.observers = [recorder, last_good]
        if callbacks and settings.parallel is None:
            net.observers.insert(1, Changes(models[0], net))
        if progress is not None:
            net.observers += [Progress(progress, net.learners, net.source.samples)]
        if meter is not None:
            net.observers = meter.around(net.observers)
        _check_ranks(net, models[0], runs[0], settings)
        with (
            parallel.shared(net, models),
            _checkpoints(net, models, recorder, meter, settings, budget is None),
        ):
            forget_resident_peak()
            began, seconds = _train(net, settings, parallel, recorder, meter)
        for r, run in enumerate(runs):
            run.seconds, run.setup_seconds = seconds, began - started
            run.settings["memory_budget"] = budget
            _describe(run, r, models, net, anatomy, meter)
        runs = parallel.same_records(runs)
        for run in runs:
            run.hint = hint_for(run, samples, anatomy)
            run.length = length_in_words(asked, run, samples)
    for run, model in zip(runs, models, strict=True):
        run.memory, run.backprop = memory_choice(run, model, net, anatomy, settings, meter)
    _warn_above_budget(runs[0], budget)
    if len(models) > 1:
        unstack(anatomy.cuts, net.learners)
    return runs


def _check_ranks(net: Net, model: nn.Module, run: Run, settings: Settings) -> None:
    """Refuse ranks that were started with different settings, models or data."""
    if settings.parallel is not None:
        values = identity(net, model, run.settings) | {"number of batches": net.source.steps}
        check_same_on_ranks(settings.parallel.ranks.from_all(values))


def _checkpoints(
    net: Net,
    models: list[nn.Module],
    recorder: Recorder,
    meter: Meter | None,
    settings: Settings,
    keeps_ended: bool,
) -> AbstractContextManager[None]:
    """A context in which the net writes checkpoints, if the settings ask for them."""
    if not isinstance(settings.checkpoint, Checkpoint):
        return nullcontext()
    return keep_checkpoints(
        settings.checkpoint, net, models, recorder, meter, settings.callbacks, keeps_ended
    )


def _complete(model: nn.Module, data: Any, method: Method, settings: Settings) -> Settings:
    """The settings with schedule, optimizers and memory chosen; mistakes in them are refused.

    That is before the model is moved to another device.
    """
    settings = with_lengths(settings, data)
    if isinstance(method, Backprop):  # what needs blocks does not apply, and is not recorded
        memory = Memory(settings.memory.budget, None, settings.memory.micro_batch)
        memory = replace(memory, measure=settings.memory.measure)
        settings = replace(settings, schedule=None, window=None, memory=memory, blocks=None)
    else:
        blocks = split(model, settings.blocks)
        rules_for(method, blocks, settings.schedule)
        settings.per_block(len(blocks))
    schedule = schedule_for(method, model, settings)
    settings = with_default_optimizers(method, model, replace(settings, schedule=schedule))
    folder = settings.memory.reuse
    if isinstance(folder, (str, Path)) and not Path(folder).expanduser().is_dir():
        raise TpsgdError(f"reuse={str(folder)!r} is no folder to keep inputs in")
    if settings.memory.budget is not None:
        if isinstance(method, Backprop):
            raise TpsgdError(
                "backprop takes no memory budget, because it cannot train block by block: leave it "
                "out, or take memory=tpsgd.Memory(micro_batch=8), which needs less"
            )
        settings = within_budget(model, data, method, settings)
    return settings


def _largest_product(anatomy: Anatomy, data: Any, settings: Settings) -> int:
    """The multiplications of the largest layer in a step, by which threads are chosen."""
    batch_size = anatomy.form.micro_batch or getattr(data, "batch_size", None)
    return anatomy.largest_product * (batch_size or settings.batch_size)


def _train(
    net: Net,
    settings: Settings,
    parallel: SingleProcess,
    recorder: Recorder,
    meter: Meter | None,
) -> tuple[float, float]:
    """Run the schedule: when it began, and its seconds with those before a checkpoint."""
    assert settings.schedule is not None
    device = net.source.form.device
    with meter or nullcontext():
        recorder.began = began = time.perf_counter()
        parallel.schedule(settings.schedule)(net)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return began, time.perf_counter() - recorder.began


def _describe(
    run: Run,
    number: int,
    models: list[nn.Module],
    net: Net,
    anatomy: Anatomy,
    meter: Meter | None,
) -> None:
    """Write blocks, penalties and memory into the record of a restart with this number."""
    run.resident_bytes = resident()[1]
    run.model = models[number]
    run.blocks = block_infos(net.learners, anatomy, number)
    if solved := [x for x in net.learners if x.penalties]:
        run.settings["alphas"] = {x.block.index + 1: x.penalties[number] for x in solved}
    if meter is None:
        return
    copies = [p for x in net.learners for p in x.params.values()] if len(models) > 1 else []
    stacked = sum(p.nbytes for p in copies)  # of the parameters, made before the meter started
    run.peak_bytes = meter.peak(sum(map(tensor_bytes, models)) + stacked)
    run.kept_bytes = meter.kept_bytes


def _warn_above_budget(run: Run, budget: str | int | None) -> None:
    if budget not in (None, LOW) and run.total_bytes > as_bytes(budget):
        text = f"training took {size(run.total_bytes)}, more than the budget of"
        warnings.warn(f"{text} {size(as_bytes(budget))}", stacklevel=4)


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


@contextmanager
def training_context(
    models: list[nn.Module], settings: Settings, keep_inputs: bool = True, seeded: bool = True
) -> Iterator[torch.device]:
    """Models on their device, random numbers seeded (`seeded`).

    Modes, the random generator and the number of threads are restored at the end.

    `keep_inputs`: no module writes into its input, which may be the output that an earlier block
    has yet to learn from.
    """
    device = settings.device
    if device is None:
        device = next(models[0].parameters(), torch.empty(0)).device
    device = resolve_device(device)
    for model in models:
        model.to(device)
    writers = [m for model in models if keep_inputs for m in overwriting(model)]
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, modes_restored(*models), threads_restored(), without_autocast():
        if seeded:
            torch.manual_seed(settings.seed)
        try:
            for module in writers:
                module.inplace = False
            yield device
        finally:
            for module in writers:
                module.inplace = True
