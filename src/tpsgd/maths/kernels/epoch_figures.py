"""The loss and accuracy of an epoch, summed on the device: no step waits for a number.

The logits of several batches are looked at together: a few numbers cost as much as many. On a CPU a
step leaves its batch behind, and `keep` stores it afterwards (a tape cannot count batches). On a
GPU the step itself stores it, at a place that a counter on the GPU says, so that a graph can.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsgd.losses import Loss
from tpsgd.objectives import LATER, LossAndGrads


class StoredBatch(NamedTuple):
    """What the figures need from a batch; the loss may be `LATER`: that of the logits."""

    loss: Any
    logits: Tensor | None
    labels: Tensor


class Figures:
    """Sums of an epoch. `unstored` is what a step leaves for `keep`."""

    def __init__(self, device: torch.device, shape: tuple[int, ...] = ()) -> None:
        self.loss = torch.zeros(shape, device=device, dtype=torch.float32)
        self.correct = torch.zeros(shape, device=device, dtype=torch.long)
        self.of_logits: Loss | None = None  # the loss, if it can be computed from the logits
        self.classifies = self.multi_label = False
        self.unstored: Any = None

    def add(self, local: LossAndGrads, labels: Tensor) -> None:
        """Add a batch, or leave it for `keep`."""
        raise NotImplementedError

    def _of_classes(self, labels: Tensor) -> bool:
        """Whether labels are of classes, so that there is an accuracy."""
        numbers = self.of_logits is not None and self.of_logits.of_numbers
        return not (numbers and labels.is_floating_point())

    def keep(self) -> None:
        """Store what a step has left."""

    def count_stored(self) -> None:
        """Look at what is stored."""

    def free(self) -> None:
        """Drop what is stored, and the room for it."""

    def collect(self, samples: int) -> tuple[list[float], list[float] | None]:
        """Mean loss and accuracy since the last call, per restart; waits for the device."""
        self.count_stored()
        losses = (self.loss.double() / samples).reshape(-1).tolist()
        shares = (self.correct.double() / samples).reshape(-1).tolist() if self.classifies else None
        self.loss.zero_()
        self.correct.zero_()
        return losses, shares


class RestartFigures(Figures):
    """Of stacked restarts: each batch is looked at by itself."""

    def add(self, local: LossAndGrads, labels: Tensor) -> None:
        """Add a batch of each restart."""
        loss: Any = local.loss
        if loss is LATER:
            assert self.of_logits is not None and local.logits is not None
            loss = torch.vmap(self.of_logits.value)(local.logits, labels)
        self.loss.add_(loss, alpha=labels.shape[1])
        if local.logits is not None:
            self.classifies = self._of_classes(labels)
            self.correct.add_(hits(local.logits, labels, self.multi_label))


class StoredFigures(Figures):
    """Logits and labels of some batches, which `count_stored` looks at together."""

    ROOM, BATCHES = 0, 0  # at most so many bytes and batches are looked at together

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.loss_is_later = False  # whether the loss is that of the logits
        self.free()

    def free(self) -> None:
        """Drop what is stored, and the room for it."""
        self.logits = self.labels = torch.empty(0)  # (samples, classes), (samples,)
        self.room: list[tuple[Tensor, Tensor]] = []  # parts of both, one for each batch
        self.stored = 0  # batches

    def count_stored(self) -> None:
        """Look at the logits that are stored."""
        if self.stored:
            n = self.stored * len(self.room[0][1])
            self.stored = 0
            self._count(self.logits[:n], self.labels[:n])

    def _to_store(self, batch: StoredBatch) -> bool:
        """Add a batch's loss; whether its logits are to be stored, and then there is room."""
        self.loss_is_later = batch.loss is LATER
        if batch.loss is not LATER:
            self.loss.add_(batch.loss, alpha=len(batch.labels))
        if batch.logits is None:
            return False
        self.classifies = self._of_classes(batch.labels)
        large = self._is_large(batch.logits)
        if not self.room and not large:
            self._make_room(batch.logits, batch.labels)
        if large or batch.labels.shape != self.room[0][1].shape:  # or the last batch of an epoch
            self._count(batch.logits, batch.labels)
            return False
        return True

    def _is_large(self, logits: Tensor | None) -> bool:
        """Whether logits are worth a look of their own."""
        return logits is not None and 2 * logits.nbytes > self.ROOM

    def _make_room(self, logits: Tensor, labels: Tensor) -> None:
        """Room for as many batches as fit."""
        nbytes, n = logits.nbytes + labels.nbytes, len(labels)
        samples = n * max(1, min(self.ROOM // nbytes, self.BATCHES))
        self.logits = self._empty(logits, samples)
        self.labels = labels.new_empty(samples, *labels.shape[1:])
        self.room = list(zip(self.logits.split(n), self.labels.split(n), strict=True))

    def _empty(self, logits: Tensor, samples: int) -> Tensor:
        return logits.new_empty(samples, logits.shape[1])

    def _batch_stored(self) -> None:
        self.stored += 1
        if self.stored == len(self.room):
            self.count_stored()

    def _count(self, logits: Tensor, labels: Tensor) -> None:
        if self.loss_is_later:
            assert self.of_logits is not None
            self.loss.add_(self.of_logits.value(logits, labels), alpha=len(labels))
        self.correct.add_(hits(logits, labels, self.multi_label))


class CpuFigures(StoredFigures):
    """Stored after the step; classes first, as the loss of few classes is faster."""

    ROOM, BATCHES = 16 << 10, 16

    def add(self, local: LossAndGrads, labels: Tensor) -> None:
        """Leave a batch for `keep`; one of many classes is looked at in the step."""
        batch = StoredBatch(local.loss, local.logits, labels)
        if self._is_large(local.logits):
            self._to_store(batch)
        else:
            self.unstored = batch

    def keep(self) -> None:
        """Store the batch that a step has left."""
        if self.unstored is None:
            return
        batch, self.unstored = StoredBatch(*self.unstored), None
        if self._to_store(batch):
            logits, labels = self.room[self.stored]
            logits.copy_(batch.logits)  # type: ignore[arg-type]
            labels.copy_(batch.labels)
            self._batch_stored()

    def _empty(self, logits: Tensor, samples: int) -> Tensor:
        return logits.new_empty(logits.shape[1], samples).T


class GpuFigures(StoredFigures):
    """Stored in the step; `keep` counts batches, also of a step that is replayed as a graph."""

    ROOM, BATCHES = 256 << 10, 64

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.place = torch.zeros(1, dtype=torch.long, device=device)  # of the next batch

    def add(self, local: LossAndGrads, labels: Tensor) -> None:
        """Store a batch at the place that the counter says."""
        if self._to_store(StoredBatch(local.loss, local.logits, labels)):
            shape = len(self.room), *labels.shape
            logits = self.logits.view(*shape[:2], -1)
            logits.index_copy_(0, self.place, local.logits[None])  # type: ignore[index]
            self.labels.view(shape).index_copy_(0, self.place, labels[None])
            self.place.add_(1)
            self.unstored = True  # uncounted, that is

    def keep(self) -> None:
        """Count a batch that a step has stored."""
        if self.unstored is not None:
            self.unstored = None
            self._batch_stored()

    def count_stored(self) -> None:
        """Look at the logits that are stored, and begin anew."""
        if self.stored:
            self.place.zero_()
        super().count_stored()


def figures_for(device: torch.device, restarts: int | None) -> Figures:
    """The figures of a learner on this device."""
    if restarts:
        return RestartFigures(device, (restarts,))
    return GpuFigures(device) if device.type == "cuda" else CpuFigures(device)


def hits(logits: Tensor, labels: Tensor, multi_label: bool) -> Tensor:
    """How many samples are right, over the last dimension but one (the batch).

    `multi_label`: rows of yes-or-no labels, all of which must be right.
    """
    if not labels.is_floating_point():
        right = logits.max(-1).indices == labels  # on a CPU faster than argmax
    elif multi_label:
        right = ((logits > 0) == (labels > 0.5)).all(-1)
    else:
        right = logits.max(-1).indices == labels.max(-1).indices
    return right.sum(-1)
