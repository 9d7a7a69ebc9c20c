"""`fit` and `fit_backprop`: a torch model and data in, the trained model and a record out."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.extension import Extension
from tpsgd.engine.fast.wrapper import wrapper
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import LRSchedule, OptimizerFactory
from tpsgd.engine.record import Run
from tpsgd.engine.run import run_training
from tpsgd.engine.settings import EarlyStopping, Memory, Order, Settings
from tpsgd.engine.spec import Method
from tpsgd.losses import Loss
from tpsgd.rules import Rule, resolve
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Epoch


def fit(
    model: nn.Module,
    data: Any,
    *,
    rule: Rule | str | Sequence[Rule | str] | None = None,
    order: Order | None = None,
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
    weight_decay: float = 0.0,
    clip: float | None = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | bool | None = None,
    window: int | None = None,
    memory: str | int | Memory | None = None,
    augment: Callable[[Tensor], Tensor] | None = None,
    precision: torch.dtype | None = None,
    blocks: int | str | Sequence[int] | None = None,
    split_points: Sequence[str] = (),
    no_split: Sequence[Any] = (),
    checkpoint: str | Path | Checkpoint | None = None,
    parallel: Extension | None = None,
    **unknown: Any,
) -> Run:
    """Train a model in place without backpropagation. It is never re-initialised.

    On a CPU, nets too small for several threads are trained with one; `run.settings["threads"]` is
    the number, callbacks run with torch's own, and so does everything afterwards.

    Args:
        model: an `nn.Sequential` or a model of any class, cut into blocks as `tpsgd.split` shows.
        data: `(x, y)` as tensors or numpy arrays, a `Dataset` or a `DataLoader`; of several inputs
            `x` is a tuple or a dict. Labels are class indices; real numbers, (samples,) or
            (samples, k), which are standardised; classes or numbers of every step or pixel, -100
            for none; or float rows: several classes with `bce`, soft labels with `cross_entropy`.
            Sequences are (samples, steps, features), tokens (samples, steps) in whole numbers;
            those of different lengths come as `tpsgd.Padded`, a `PackedSequence` or a list. Bytes
            (uint8) that are no tokens are pixels: they are divided by 255, in `evaluate`,
            `tpsgd.data.load` and `tpsgd.adapt` too. All other numbers are taken as they are.
        rule: one rule for the net, `tpsgd.rules.readout()` or its name "readout"; or a list with
            one per block, the last included (which only lends its loss). Default:
            `rules.default()`.
        order: `tpsgd.sequential` (the paper's) or `tpsgd.simultaneous`. Default: the one that
            suits the net: `simultaneous` if the rule needs the net's output (DFA, sDFA), or if five
            blocks or more of a net with batch norm learn, none is solved, and no budget or reuse of
            inputs is asked for; otherwise `sequential`.
        loss: of the last block: `tpsgd.cross_entropy`, its name or `nn.CrossEntropyLoss()`; `bce`,
            `mse`, `l1`, `huber`. Default: of numbers `mse`; of classes the rule's (`mse` for tpSGD,
            else `cross_entropy`).
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
        weight_decay: weights of two dimensions or more, local classifiers' too, shrink by this
            times the learning rate with every step: 5e-4 for SGD, 0.05 for Adam, which becomes
            AdamW.
        clip: the largest norm of all gradients of a block; larger ones are scaled to it.
        callbacks: called with an `Epoch` after every epoch of a block; `True` stops that block.
            They may change numbers of the model in place, but replace nothing in it; modules that
            they put into evaluation or training mode get their mode back. One with a method
            `begin` is given the net before the training, as probes are.
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
            the memory of every number. "auto" is a block per layer up to 8 layers, and 4 blocks of
            deeper nets: the default for a model of a class of yours. Default for `nn.Sequential`:
            every layer is a block. Each recurrent layer stays a block, and solvers need blocks of
            one layer. `print(tpsgd.split(model, shape))` shows where a model is cut.
        split_points: the names of the modules that begin a block, in place of `blocks`.
        no_split: classes, or names of modules, that stay inside one block.
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
    Settings.refuse_unknown("fit", unknown)
    settings = Settings(
        order=order, loss=loss, optimizer=optimizer, lr=lr, epochs=epochs,
        batch_size=batch_size, seed=seed, device=device, validation=validation,
        early_stopping=early_stopping, lr_schedule=lr_schedule,
        weight_decay=weight_decay, clip=clip, callbacks=callbacks, progress=progress,
        window=window, memory=Memory.of(memory), augment=augment, precision=precision,
        blocks=blocks, split_points=split_points, no_split=no_split, checkpoint=checkpoint,
        parallel=parallel,
    )  # fmt: skip
    return fit_models([model], data, resolve(rule), settings)[0]


def fit_backprop(
    model: nn.Module,
    data: Any,
    *,
    segments: int | bool = False,
    **settings: Any,
) -> Run:
    """Train a model in place *with* backpropagation: the same loop and record as `fit`.

    It is `fit` on a single block that is the whole model, so any `nn.Module` works.

    Args:
        model: any module.
        data: as for `fit`.
        segments: activation checkpointing: store only what enters each of this many segments of
            an `nn.Sequential`, and recompute the rest in the backward pass; True: one segment per
            block. Gradients do not change.
        **settings: those of `fit`, one value each, because there is one block. Of
            `memory=tpsgd.Memory(...)`, `micro_batch` (gradient accumulation) and `measure` apply.
    """
    chosen = Settings.of("fit_backprop", settings)
    (run,) = fit_models([model], data, Backprop(segments), chosen)
    run.settings |= {"segments": segments}
    return run


def fit_models(models: list[nn.Module], data: Any, method: Method, settings: Settings) -> list[Run]:
    """Train models with the features that the settings ask for; several models are stacked."""
    features = import_module("tpsgd.features.extensions")  # which knows the engine, not vice versa
    return run_training(models, data, method, settings, features.features_of(settings), wrapper)
