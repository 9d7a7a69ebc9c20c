"""An epoch's steps, one CUDA graph replayed per batch where that is possible.

On a GPU a small net's step is mostly launch latency. A step that reads its sample indices from one
place, waits for nothing and always has the same shapes can be captured once and replayed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tpsgd.engine.batches import Arrays, MicroBatch, Source, Through
from tpsgd.engine.learner import Learner
from tpsgd.engine.meter import side_stream
from tpsgd.projections import Redrawn

Step = Callable[[MicroBatch], None]


class Steps:
    """Runs a step on every batch of a source, or on every piece of one."""

    WARM_UP = 2  # real steps taken before the capture, which itself computes nothing

    def __init__(
        self,
        step: Step,
        source: Source,
        learners: list[Learner],
        fixed_rate: bool,
        behind_ours: bool = False,
        ours: bool = True,
    ):
        self.step, self.source, self.learners = step, source, learners
        self.fixed_rate, self.behind_ours, self.ours = fixed_rate, behind_ours, ours
        self.graph: torch.cuda.CUDAGraph | None = None
        self.index = torch.empty(0)
        self.taken = 0
        self.done = 0  # pieces, over all epochs

    def forget(self) -> None:
        """The step has changed: capture it anew."""
        self.graph, self.taken = None, 0

    def epoch(self, block: int, epoch: int) -> Iterator[tuple[int, Callable[[], None]]]:
        """The epoch's batches: how many samples, and what to call to learn from them."""
        if not self._can_capture():
            for piece in self.source.batches(block, epoch):
                size = piece.labels.shape[1 if self.source.form.stacked else 0]
                held = [piece]  # the step empties it, so that no batch outlives its step
                del piece
                yield size, lambda held=held: self.step(held.pop())
            return
        for index in self._arrays.indices(block, epoch):
            if not self.source.form.skips(index.shape[-1]):
                yield index.shape[-1], lambda index=index: self._take(index)

    def _take(self, index: Tensor) -> None:
        form = self.source.form
        if index.shape[-1] < form.batch_size:  # the last, smaller batch
            self.step(self._piece(index))
            return
        stream = side_stream(form.device)
        if self.graph is None and self.taken < self.WARM_UP:
            self.taken += 1
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(self._piece(index))
            torch.cuda.current_stream().wait_stream(stream)
            return
        if self.graph is None:
            self.index = index.clone()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=stream):
                self.step(self._piece(self.index))
        self.index.copy_(index)
        self.graph.replay()

    @property
    def _arrays(self) -> Arrays:
        """The samples themselves, before any frozen blocks."""
        source = self.source.source if isinstance(self.source, Through) else self.source
        assert isinstance(source, Arrays)
        return source

    def _piece(self, index: Tensor) -> MicroBatch:
        x, labels = self._arrays.take(index)
        return MicroBatch(self.source.seen(x) if isinstance(self.source, Through) else x, labels)

    def _can_capture(self) -> bool:
        source, form = self.source, self.source.form
        below = source.source if isinstance(source, Through) else source
        return (
            isinstance(below, Arrays)
            and isinstance(below.x, Tensor)  # sequences of different lengths change their shapes
            and form.device.type == "cuda"
            and below.x.device == form.device
            and form.micro_batch is None
            and source.samples > 8 * form.batch_size
            and all(_capturable(x, self.fixed_rate) for x in self.learners)
            and (source is below or self.behind_ours)
            and self.ours
        )


def _capturable(learner: Learner, fixed_rate: bool) -> bool:
    """Whether the learner's step waits for nothing: torch's own modules, a known objective."""
    optimizer = learner.optimizer
    if optimizer is None or any(isinstance(t, Redrawn) for t in learner.tensors):
        return False  # a recursion, which counts its samples; codes, which begin on the CPU
    for group in optimizer.param_groups:
        if not group.get("capturable", isinstance(optimizer, torch.optim.SGD)):
            return False
        if not fixed_rate and not isinstance(group["lr"], Tensor):
            return False
    # losses over a whole batch could be captured too; no GPU has tried it yet
    return learner.mean_over_samples and learner.known and known_modules(learner)


def known_modules(learner: Learner) -> bool:
    """Whether a block has no module of the caller's own, which might wait for the device."""
    if getattr(learner.block.layer, "is_tap", False):  # hooks, and a frozen module of the caller's
        return False
    modules = (m for top in learner.block.modules for m in top.modules())
    return all(type(m).__module__.startswith(("torch.nn", "tpsgd.")) for m in modules)
