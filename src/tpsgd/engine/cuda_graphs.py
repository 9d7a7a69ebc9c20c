"""A step as a CUDA graph, captured once and replayed for every batch.

On a GPU a small net's step is mostly launch latency. A step can be captured if it always has the
same shapes, does not wait for the device and reads its sample indices from the same tensor. On a
CPU nothing changes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tpsgd.engine.batches import Arrays, Batch, ThroughBlocks, is_library_module
from tpsgd.projections import Redrawn
from tpsgd.protocols import Source
from tpsgd.train import Step

WARM_UP = 2  # real steps taken before the capture, which itself computes nothing


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps are captured."""
    return torch.cuda.Stream(device)


def captured(step: Step, learners: Sequence[Any], source: Source, library_only: bool) -> Step:
    """The step as a graph where that is possible, otherwise the step itself.

    `library_only`: the whole net consists of torch's and this library's modules.
    """
    return CapturedStep(step, source) if _can_capture(learners, source, library_only) else step


class CapturedStep:
    """A step that is replayed for every whole batch; a smaller batch takes the plain step."""

    def __init__(self, step: Step, source: Source) -> None:
        self.step, self.form = step, source.form
        self.learning: list[bool] = []
        self.graph: torch.cuda.CUDAGraph | None = None
        self.index = torch.empty(0)
        self.warmed_up = 0

    def __call__(self, learners: Sequence[Any], batch: Batch) -> None:
        """Learn from a batch."""
        learning = [learner.learning for learner in learners]
        if learning != self.learning:  # the step has changed
            self.learning, self.graph, self.warmed_up = learning, None, 0
        if batch.size < self.form.batch_size:
            self.step(learners, batch)
            return
        stream = side_stream(self.form.device)
        if self.graph is None and self.warmed_up < WARM_UP:
            self.warmed_up += 1
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(learners, batch)
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.graph is None:
            self.index = batch.index.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.step(learners, replace(batch, index=self.index))
        self.index.copy_(batch.index)
        self.graph.replay()


def _can_capture(learners: Sequence[Any], source: Source, library_only: bool) -> bool:
    form = source.form
    below = source.source if isinstance(source, ThroughBlocks) else source
    learning = [learner for learner in learners if learner.learning]
    return (
        isinstance(below, Arrays)
        and isinstance(below.x, Tensor)  # sequences of different lengths change their shapes
        and form.device.type == "cuda"
        and below.x.device == form.device
        and form.micro_batch is None
        and source.samples > 8 * form.batch_size
        and all(map(_capturable, learning))
        and (source is below or library_only)
        and all(map(library_modules_only, learners))
    )


def _capturable(learner: Any) -> bool:
    """Whether the learner's step waits for nothing: torch's modules, a written-out objective."""
    optimizer = learner.optimizer
    if optimizer is None or any(isinstance(t, Redrawn) for t in learner.tensors):
        return False  # a solver counts its samples; redrawn codes begin on the CPU
    for group in optimizer.param_groups:
        if not group.get("capturable", isinstance(optimizer, torch.optim.SGD)):
            return False
        if learner.settings.lr_schedule is not None and not isinstance(group["lr"], Tensor):
            return False
    # losses over a whole batch could be captured too; no GPU has tried it yet
    return learner.mean_over_samples and learner.written_out and library_modules_only(learner)


def library_modules_only(learner: Any) -> bool:
    """Whether a block has none of the user's modules, which might wait for the device."""
    if getattr(learner.block.layer, "is_tap", False):  # hooks, and the user's frozen module
        return False
    return all(is_library_module(m) for top in learner.block.modules for m in top.modules())
