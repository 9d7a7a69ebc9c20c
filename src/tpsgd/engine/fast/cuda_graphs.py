"""A step as a CUDA graph, captured once and replayed for every batch.

On a GPU a small net's step is mostly launch latency. A step can be captured if it always has the
same shapes, does not wait for the device and reads what differs between batches (sample indices,
random numbers of augmentation) from the same tensors. In a small net, a block's update runs while
the blocks after it compute forward, which do not depend on it: with local losses the two can run at
the same time. On a CPU nothing changes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.device import side_stream, update_stream
from tpsgd.engine.learners.updaters import OptimizerSteps
from tpsgd.engine.sources.augment import Augmented
from tpsgd.engine.sources.batches import (
    ArraySource,
    BatchForm,
    DerivedSource,
    SampleBatch,
    ThroughBlocks,
    is_library_module,
)
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.stacked import Stacked
from tpsgd.objectives import NetSignal
from tpsgd.projections import Redrawn
from tpsgd.train import Source, Step

SMALL = 32 << 20  # bytes of all blocks' outputs that may be kept until every update has ended
WARM_UP = 1  # real batches before the capture, which itself computes nothing


def captured(step: Step, learners: Sequence[Any], source: Source, library_only: bool) -> Step:
    """The step as a graph where that is possible, otherwise the step itself.

    `library_only`: the whole net consists of torch's and this library's modules.
    """
    return CapturedStep(step, source) if _can_capture(learners, source, library_only) else step


class CapturedStep:
    """A step that is replayed for every whole batch; a smaller batch takes the plain step.

    The micro-batches of a batch have a graph for the first, the last and those between: the first
    one makes the gradients, the last one takes the optimizer's step.
    """

    def __init__(self, step: Step, source: Source) -> None:
        self.step, self.form = step, source.form
        self.learning: list[bool] = []
        self.graphs: dict[tuple[int, bool, bool], tuple[Any, list[Tensor], list[Any]]] = {}
        self.pool: Any = None  # the memory that these graphs share
        self.warmed_up = 0
        self.begins = self.whole = True  # whether a batch begins, and whether it is a whole one

    def __call__(self, learners: Sequence[Any], batch: SampleBatch) -> None:
        """Learn from a batch."""
        first, self.begins = self.begins, batch.last
        if first:
            self._begin(learners, batch)
        if not self.whole:
            self.step(learners, batch)
        elif self.warmed_up < WARM_UP:
            self.warmed_up += batch.last
            self._warm_up(learners, batch)
        else:
            kind = batch.size, first, batch.last
            if kind not in self.graphs:
                inputs = [t.clone() for t in tensors_of(batch.index)]
                static = replace(batch, index=_with_tensors(batch.index, iter(inputs)))
                graph = self._capture(learners, static)
                self.graphs[kind] = graph, inputs, [x.figures.unstored for x in learners]
            graph, inputs, figures = self.graphs[kind]
            for tensor, value in zip(inputs, tensors_of(batch.index), strict=True):
                tensor.copy_(value)
            graph.replay()
            for learner, unstored in zip(learners, figures, strict=True):
                learner.figures.unstored = unstored

    def _begin(self, learners: Sequence[Any], batch: SampleBatch) -> None:
        """Before a batch: see whether it is whole, and whether the step is still the same."""
        self.whole = round(batch.size / batch.share) == self.form.batch_size
        learning = [learner.learning for learner in learners]
        if learning != self.learning:
            self.learning, self.graphs, self.warmed_up = learning, {}, 0

    def _warm_up(self, learners: Sequence[Any], batch: SampleBatch) -> None:
        """A plain step on the stream of the capture, where libraries allocate what they keep."""
        stream, current = side_stream(self.form.device), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.step(learners, batch)
        current.wait_stream(stream)

    def _capture(self, learners: Sequence[Any], batch: SampleBatch) -> Any:
        """The step as a graph.

        `torch.cuda.graph` would wait for the device and empty the allocator's cache each time,
        which takes longer than capturing a small net.
        """
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        free, total = torch.cuda.mem_get_info(self.form.device)
        if free < total / 2:
            torch.cuda.empty_cache()  # a graph cannot use the memory in it
        graph = torch.cuda.CUDAGraph()
        stream, current = side_stream(self.form.device), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            graph.capture_begin(self.pool)
            try:
                self.step(learners, batch)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph


def step_on_two_streams(learners: Sequence[Any], batch: SampleBatch) -> None:
    """`train.step` with the updates on a second stream, while later blocks compute forward."""
    x, labels = batch.load()
    stream = update_stream(labels.device) if torch.cuda.is_available() else None  # a plan has none
    operands = []  # of updates that may not have ended
    for learner in learners:
        saved, last = learner.forward(x), learner is learners[-1]
        x = None if last else learner.output(saved)
        if stream is not None and not last:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(None if last else stream):
            if learner.learning:
                learner.update(saved, labels, output_unused=last)
        operands.append(saved)
    if stream is not None and len(learners) > 1:
        torch.cuda.current_stream().wait_stream(stream)


def step_with_optimizers_aside(learners: Sequence[Any], batch: SampleBatch) -> None:
    """`train.step`, in which a block's optimizer runs while the next block computes.

    An optimizer's kernels use a small part of a GPU. A block's gradients live until the next
    block has its own.
    """
    x, labels = batch.load()
    stream = update_stream(labels.device) if labels.is_cuda else None  # a CPU has none
    in_use: list[Any] = []  # the gradients that an optimizer reads meanwhile
    for learner in learners:
        saved, last, updater = learner.forward(x), learner is learners[-1], learner.updater
        aside = learner.learning and not last and labels.is_cuda and updater.slices == 1
        if learner.learning:
            updater.waits = aside
            learner.update(saved, labels, output_unused=last)
            updater.waits = False
        x = None if last else learner.output(saved)  # of the weights before the update
        del saved
        if stream is not None and in_use and (aside or last):
            torch.cuda.current_stream().wait_stream(stream)
            in_use = []
        if stream is not None and aside:
            in_use = [p.grad for p in updater.moving.values()]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                updater.step_optimizer()


def suits_optimizers_aside(learners: Sequence[Any], form: BatchForm) -> bool:
    """Whether several blocks learn by steps of an optimizer, each for a whole batch."""
    learning = [learner for learner in learners if learner.learning]
    return (
        form.device.type == "cuda"
        and form.micro_batch is None
        and len(learning) > 1
        and all(type(learner.updater) is OptimizerSteps for learner in learning)
        and not any(learner.updater.waits for learner in learning)
    )


def suits_two_streams(learners: Sequence[Any], form: BatchForm) -> bool:
    """Whether several blocks learn by closed forms, and their outputs take little memory."""
    outputs = sum(learner.widest for learner in learners) * form.batch_size * len(form.seeds)
    return (
        form.device.type == "cuda"
        and len(learners) > 1
        and form.micro_batch is None
        and outputs <= SMALL
        and all(isinstance(learner.gradient, (ClosedForm, Stacked)) for learner in learners)
    )


def tensors_of(index: Any) -> list[Tensor]:
    """The tensors in which a batch differs from others: its index, or those of a tuple."""
    return [t for part in index for t in tensors_of(part)] if isinstance(index, tuple) else [index]


def _with_tensors(index: Any, tensors: Iterator[Tensor]) -> Any:
    """The index with other tensors in their places."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(part, tensors) for part in index)
    return next(tensors)


def _can_capture(learners: Sequence[Any], source: Source, library_only: bool) -> bool:
    form, below = source.form, source
    while isinstance(below, DerivedSource):
        if isinstance(below, ThroughBlocks) and not library_only:
            return False
        if isinstance(below, Augmented) and not below.library_only:
            return False
        below = below.source
    learning = [learner for learner in learners if learner.learning]
    return (
        isinstance(below, ArraySource)
        and isinstance(below.x, Tensor)  # sequences of different lengths change their shapes
        and form.device.type == "cuda"
        and below.x.device == form.device
        and source.samples > 8 * form.batch_size
        and all(map(_capturable, learning))
        and all(map(library_modules_only, learners))
    )


def _capturable(learner: Any) -> bool:
    """Whether the learner's step waits for nothing: torch's modules, a written-out objective."""
    optimizer = learner.updater.optimizer
    redrawn = any(isinstance(t, Redrawn) for t in learner.tensors)
    if optimizer is None or redrawn or learner.objective.noise_at is not None:
        return False  # a solver counts its samples; redrawn codes and noise begin on the CPU
    for group in optimizer.param_groups:
        if not group.get("capturable", isinstance(optimizer, torch.optim.SGD)):
            return False
        if learner.settings.lr_schedule is not None and not isinstance(group["lr"], Tensor):
            return False
    return learner.written_out and library_modules_only(learner)


def library_modules_only(learner: Any) -> bool:
    """Whether a block has none of the user's modules, which might wait for the device."""
    if getattr(learner.block.layer, "is_tap", False):  # hooks, and the user's frozen module
        return False
    if isinstance(learner.signal, NetSignal):
        return False
    return all(is_library_module(m) for top in learner.block.modules for m in top.modules())
