"""`fit_backprop`: the sibling that the rules are measured against, and its ways to save memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.checkpoint import checkpoint as checkpointed

from tpsgd.engine.assemble import (
    classes_of,
    count,
    form_for,
    parameters,
    place_of,
    sizes_of,
    unstack,
)
from tpsgd.engine.batches import Form, first_samples, in_stream, source
from tpsgd.engine.fit import prepared, teach
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import tensor_bytes
from tpsgd.engine.optimizers import OptimizerFactory, adam
from tpsgd.engine.record import BlockInfo, Epoch, Run
from tpsgd.engine.schedules import sequential
from tpsgd.engine.settings import Settings
from tpsgd.engine.trainer import EarlyStopping
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.nets.blocks import Block, split, whole
from tpsgd.nets.engines import Autograd
from tpsgd.nets.recurrent import Recurrent, connect
from tpsgd.objectives import output
from tpsgd.rules import Place
from tpsgd.solvers import SOLVERS


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
    micro_batch: int | None = None,
    checkpoint: int | bool = False,
    step_inside: bool = False,
    augment: Callable[[Tensor], Tensor] | None = None,
    precision: torch.dtype | None = None,
) -> Run:
    """Train a model in place *with* backpropagation: the same loop and record as `fit`.

    It is `fit` on a single block that is the whole model, so any `nn.Module` will do. The arguments
    are `fit`'s, one value each: there are no blocks to give their own, and nothing to reuse. Three
    are backprop's own ways to save memory, which change no gradient (micro-batches do with batch
    normalisation and dropout):

    Args:
        model: any module.
        data: as for `fit`, like the rest.
        micro_batch: gradient accumulation: at most so many samples at once, as for `fit`.
        checkpoint: keep only what enters each of so many segments of an `nn.Sequential`, and
            compute the rest again on the way back; True: a segment for each block.
        step_inside: move each parameter as soon as its gradient is there, inside the backward pass,
            and drop the gradient.
        augment: as for `fit`.
        precision: as for `fit`, by `torch.autocast`.
    """
    settings = Settings(
        sequential, loss, optimizer, lr, epochs, batch_size, seed, device, validation,
        early_stopping, lr_schedule, callbacks, progress, micro_batch=micro_batch,
        augment=augment, precision=precision,
    )  # fmt: skip
    if step_inside and micro_batch is not None:
        raise TpsgdError("step_inside moves after each micro-batch: leave one of the two out")
    run = train_backprop([model], data, settings, checkpoint, step_inside)[0]
    run.settings |= {"checkpoint": checkpoint, "step_inside": step_inside}
    return run


def train_backprop(
    models: list[nn.Module],
    data: Any,
    settings: Settings,
    checkpoint: int | bool = False,
    step_inside: bool = False,
) -> list[Run]:
    """Train whole models as one block each; several models are restarts, stacked into one."""
    started = time.perf_counter()
    loss = settings.loss or cross_entropy
    layers = _layers(models[0], settings)
    wholes = [whole(in_segments(connect(model), checkpoint)) for model in models]
    courses, block = settings.courses(1), wholes[0]
    with prepared(models, settings, keep_inputs=False) as (device, dtype, meter):
        x, whole_batches = first_samples(data), replace(settings, window=None)
        form = form_for(layers, x, in_stream(data), whole_batches, device, dtype, len(models))
        size = sizes_of([block], x, settings, form)[0]
        classes = classes_of(size[Place.END], block)
        learner = whole_learner(wholes, loss, form, len(layers), step_inside)
        layer_infos = [
            BlockInfo(str(b), "backprop", count(b.named_parameters()), "autograd") for b in layers
        ]
        runs = [
            Run("backprop", one.seed, one.describe("backprop", loss), layer_infos)
            for one in (replace(settings, seed=settings.seed + r) for r in range(len(models)))
        ]
        known = source(data, form, loss, classes, complete=True)
        teach([learner], courses, known, loss, classes, form, meter, runs, settings, started)
        for run in runs:
            run.peak_bytes = meter.peak(sum(map(tensor_bytes, models)))
    if len(models) > 1:
        unstack([[one] for one in wholes], [learner])
    return runs


def _layers(model: nn.Module, settings: Settings) -> list[Block]:
    """The model's blocks, which here are only counted; what backprop cannot train is refused."""
    optimizer, block = settings.courses(1)[0].optimizer, whole(connect(model))
    if isinstance(optimizer, SOLVERS):
        raise TpsgdError(
            f"{optimizer.__name__} solves one block at a time; backprop, whose gradients go "
            "through all of them, needs an optimizer"
        )
    if not block.named_parameters():
        raise TpsgdError(f"{block.name} has no parameters that may learn")
    try:
        return split(model)
    except TpsgdError:  # any module will do here
        return [block]


def whole_learner(
    wholes: list[Block], loss: Loss, form: Form, width: int, step_inside: bool = False
) -> Learner:
    """The whole model as one learner."""
    block, stack = wholes[0], len(wholes) if len(wholes) > 1 else None
    engine = Autograd(block, place_of(block, loss), output(loss), bool(stack), form.precision)
    return Learner(
        block, engine, lambda: output(loss), params=parameters(0, [[one] for one in wholes]),
        several=loss is bce, stack=stack, width=width,
        accumulates=form.micro_batch is not None or step_inside, step_inside=step_inside,
    )  # fmt: skip


class Segments(nn.Sequential):
    """Parts of a model of which only the inputs are kept; the last one's insides are, too."""

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Sequential`'s."""
        *parts, last = self
        for part in parts:
            again = partial(_recomputing, part)
            input = checkpointed(part, input, use_reentrant=False, context_fn=again)
        return last(input)


def _recomputing(part: nn.Module) -> tuple[Any, Any]:
    """What surrounds a segment's first pass, nothing, and its second."""
    return nullcontext(), _statistics_kept(part)


@contextmanager
def _statistics_kept(part: nn.Module) -> Iterator[None]:
    """Batch norms compute as ever, but what they remember stays as it is."""
    norms = [m for m in part.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [(b, b.clone()) for m in norms for b in m.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def in_segments(model: nn.Module, segments: int | bool) -> nn.Module:
    """The model, with its insides computed again on the way back."""
    if not segments:
        return model
    if not isinstance(segments, int):
        raise TpsgdError(f"checkpoint must be True or a number of segments, got {segments!r}")
    if any(isinstance(m, (Recurrent, nn.RNN)) for m in model.modules()):
        raise TpsgdError("checkpoint is for models without recurrent layers")
    blocks = split(model)
    count = len(blocks) if segments is True else segments
    if not 1 <= count <= len(blocks):
        raise TpsgdError(f"checkpoint must be between 1 and {len(blocks)} segments, got {count}")
    ends = [len(blocks) * (i + 1) // count for i in range(count)]
    parts = [blocks[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    return Segments(*(nn.Sequential(*(m for b in part for m in b.modules)) for part in parts))
