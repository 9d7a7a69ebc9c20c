"""`fit_backprop`: the sibling that the rules are measured against, and its ways to save memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
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
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.engine.schedules import sequential
from tpsgd.engine.settings import Settings
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.blocks import Block, split, whole
from tpsgd.nets.recurrent import Recurrent, connect
from tpsgd.objectives import output
from tpsgd.rules import Place
from tpsgd.solvers import SOLVERS


def fit_backprop(
    model: nn.Module,
    data: Any,
    *,
    checkpoint: int | bool = False,
    **settings: Any,
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
    run = train_backprop([model], data, Settings.of("fit_backprop", settings), checkpoint)[0]
    run.settings |= {"checkpoint": checkpoint}
    return run


def train_backprop(
    models: list[nn.Module],
    data: Any,
    settings: Settings,
    checkpoint: int | bool = False,
) -> list[Run]:
    """Train whole models as one block each; several models are restarts, stacked into one."""
    started = time.perf_counter()
    _check(settings)
    loss = settings.loss or cross_entropy
    layers = _layers(models[0], settings)
    wholes = [whole(in_segments(connect(model), checkpoint)) for model in models]
    courses, block = settings.courses(1), wholes[0]
    with prepared(models, settings, keep_inputs=False) as (device, dtype, meter):
        x, whole_batches = first_samples(data), replace(settings, window=None)
        form = form_for(layers, x, in_stream(data), whole_batches, device, dtype, len(models))
        size = sizes_of([block], x, settings, form)[0]
        classes = classes_of(size[Place.END], block)
        learner = whole_learner(wholes, loss, form, len(layers))
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


def _check(settings: Settings) -> None:
    """Refuse what needs blocks that are trained one by one."""
    if settings.memory.budget is not None:
        raise TpsgdError("backprop takes no memory budget: it has no blocks to train one by one")
    if settings.schedule is not sequential:
        raise TpsgdError("backprop has no schedule: leave schedule out")


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


def whole_learner(wholes: list[Block], loss: Loss, form: Form, width: int) -> Learner:
    """The whole model as one learner."""
    block, stack = wholes[0], len(wholes) if len(wholes) > 1 else None
    engine = Autograd(block, place_of(block, loss), output(loss), bool(stack), form.precision)
    return Learner(
        block, engine, lambda: output(loss), params=parameters(0, [[one] for one in wholes]),
        several=loss is bce, stack=stack, width=width,
        accumulates=form.micro_batch is not None,
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
