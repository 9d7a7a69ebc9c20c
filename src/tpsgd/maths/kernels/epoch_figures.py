"""The loss and accuracy of an epoch, summed on the device: no step waits for a number.

The logits of several batches are looked at together: a few numbers cost as much as many. On a CPU a
step leaves its batch behind, and `keep` stores it afterwards (a tape cannot count batches). On a
GPU the step itself stores it, at a place that a counter on the GPU says, so that a graph can; then
`keep` counts the batch. Stacked restarts are looked at batch by batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsgd.losses import Loss, labelled
from tpsgd.objectives import NOT_COMPUTED, LossAndGrads
from tpsgd.targets import CLASSES, Target


class StoredBatch(NamedTuple):
    """What the figures need from a batch; the loss may be `NOT_COMPUTED`: that of the logits."""

    loss: Any
    logits: Tensor | None
    labels: Tensor


class EpochFigures(NamedTuple):
    """The means of an epoch, for each restart; accuracy of classes, R² of numbers."""

    losses: list[float]
    accuracies: list[float] | None
    fits: list[float] | None


class Figures:
    """Sums of an epoch. `unstored` is what a step leaves for `keep`: on a GPU, whether it did."""

    def __init__(self, device: torch.device, restarts: int | None) -> None:
        shape = (restarts,) if restarts else ()
        self.loss = torch.zeros(shape, device=device, dtype=torch.float32)
        self.correct = torch.zeros(shape, device=device, dtype=torch.long)
        self.of_logits: Loss | None = None  # the loss, if it can be computed from the logits
        self.loss_is_later = self.classifies = self.multi_label = False
        self.target = CLASSES
        self.counted = torch.zeros_like(self.correct)  # positions with a label
        self.moments: Tensor | None = None  # of labels that are numbers: see `moments_of`
        self.unstored: Any = None
        self.restarts, self.on_gpu = restarts, device.type == "cuda"
        self.most_bytes, self.most_batches = (256 << 10, 64) if self.on_gpu else (16 << 10, 16)
        counters = int(self.on_gpu)  # on a GPU, the place of the next batch
        self.place = torch.zeros(counters, dtype=torch.long, device=device)
        self.free()

    def expect(self, target: Target, outputs: int) -> None:
        """What labels are, and how many numbers one has if it is of numbers."""
        self.target = target
        if target.numbers:
            shape, device = (*self.loss.shape, 4, outputs), self.loss.device
            self.moments = torch.zeros(shape, device=device, dtype=torch.float64)

    def free(self) -> None:
        """Drop what is stored, and the memory for it."""
        self.logits = self.labels = torch.empty(0)  # (samples, classes), (samples,)
        self.batches: list[tuple[Tensor, Tensor]] = []  # views of both, one for each batch
        self.stored = 0  # batches

    def add(self, local: LossAndGrads, labels: Tensor) -> None:
        """Add a batch, or leave it for `keep`; one with many logits is looked at in the step."""
        labels = labels if local.labels is None else local.labels
        batch = StoredBatch(local.loss, local.logits, labels)
        if self.restarts:
            self._add_restarts(batch)
        elif not self.on_gpu and not self._is_large(local.logits):
            self.unstored = batch
        elif self._to_store(batch):
            assert batch.logits is not None
            shape = len(self.batches), *labels.shape
            self.logits.view(*shape[:2], -1).index_copy_(0, self.place, batch.logits[None])
            self.labels.view(shape).index_copy_(0, self.place, labels[None])
            self.place.add_(1)
            self.unstored = True

    def keep(self) -> None:
        """Store the batch that a step has left, or count the batch that it has stored."""
        if self.unstored is None:
            return
        unstored, self.unstored = self.unstored, None
        if not self.on_gpu:
            batch = StoredBatch(*unstored)
            if not self._to_store(batch):
                return
            logits, labels = self.batches[self.stored]
            logits.copy_(batch.logits)  # type: ignore[arg-type]
            labels.copy_(batch.labels)
        self.stored += 1
        if self.stored == len(self.batches):
            self.count_stored()

    def collect(self, samples: int) -> "EpochFigures":
        """What was counted since the last call, per restart; waits for the device."""
        self.count_stored()
        labels = self.counted.clamp(min=1) if self.target.positions else samples
        losses = (self.loss.double() / labels).reshape(-1).tolist()
        shares = (self.correct.double() / labels).reshape(-1).tolist() if self.classifies else None
        sums, fits = [self.loss, self.correct, self.counted], None
        if self.moments is not None:
            if bool((self.moments[..., 0, :] > 0).any()):
                fits = r_squared(self.moments).reshape(-1).tolist()
            sums.append(self.moments)
        for t in sums:
            t.zero_()
        return EpochFigures(losses, shares, fits)

    def _add_restarts(self, batch: StoredBatch) -> None:
        loss, logits, labels = batch
        if loss is NOT_COMPUTED:
            assert self.of_logits is not None and logits is not None
            mean = self.of_logits.mean if self.target.positions else self.of_logits.value
            loss = torch.vmap(mean)(logits, labels)
        self._add_loss(loss, labels, 1)
        if logits is not None and self.moments is not None:
            self.moments.add_(moments_of(logits, labels))
        elif logits is not None:
            self.classifies = self._of_classes(labels)
            self.correct.add_(hits(logits, labels, self.multi_label))

    def _add_loss(self, mean: Tensor, labels: Tensor, dim: int) -> None:
        """Add the mean loss of some samples, which are in this dimension of the labels."""
        if self.target.positions:
            count = labelled(labels, dim)
            self.loss.add_(mean * count)
            self.counted.add_(count)
        else:
            self.loss.add_(mean, alpha=labels.shape[dim])

    def _of_classes(self, labels: Tensor) -> bool:
        """Whether labels are of classes, so that there is an accuracy."""
        numbers = self.of_logits is not None and self.of_logits.of_numbers
        return not self.target.numbers and not (numbers and labels.is_floating_point())

    def _is_large(self, logits: Tensor | None) -> bool:
        """Whether logits are worth a look of their own."""
        return logits is not None and 2 * logits.nbytes > self.most_bytes

    def _to_store(self, batch: StoredBatch) -> bool:
        """Add a batch's loss; whether its logits are to be stored, for which there is memory."""
        loss, logits, labels = batch
        self.loss_is_later = loss is NOT_COMPUTED
        if loss is not NOT_COMPUTED:
            self._add_loss(loss, labels, 0)
        if logits is None:
            return False
        self.classifies = self._of_classes(labels)
        large = self._is_large(logits)
        if not self.batches and not large:
            self._allocate(logits, labels)
        if large or labels.shape != self.batches[0][1].shape:  # or the last batch of an epoch
            self._count(logits, labels)
            return False
        return True

    def _allocate(self, logits: Tensor, labels: Tensor) -> None:
        """Memory for several batches; classes first on a CPU, where the loss of few is faster."""
        nbytes, n, classes = logits.nbytes + labels.nbytes, len(labels), logits.shape[1]
        samples = n * max(1, min(self.most_bytes // nbytes, self.most_batches))
        shape = (samples, classes) if self.on_gpu else (classes, samples)
        self.logits = logits.new_empty(shape) if self.on_gpu else logits.new_empty(shape).T
        self.labels = labels.new_empty(samples, *labels.shape[1:])
        self.batches = list(zip(self.logits.split(n), self.labels.split(n), strict=True))

    def count_stored(self) -> None:
        """Look at the logits that are stored, and begin anew."""
        if self.stored:
            n = self.stored * len(self.batches[0][1])
            self.stored = 0
            if self.on_gpu:
                self.place.zero_()
            self._count(self.logits[:n], self.labels[:n])

    def _count(self, logits: Tensor, labels: Tensor) -> None:
        if self.loss_is_later and self.target.positions:
            assert self.of_logits is not None
            self.loss.add_(self.of_logits.total(logits, labels))
            self.counted.add_(labelled(labels))
        elif self.loss_is_later:
            assert self.of_logits is not None
            self.loss.add_(self.of_logits.value(logits, labels), alpha=len(labels))
        if self.moments is not None:
            self.moments.add_(moments_of(logits, labels))
        else:
            self.correct.add_(hits(logits, labels, self.multi_label))


def moments_of(outputs: Tensor, numbers: Tensor) -> Tensor:
    """Of every number: samples, sum, sum of squares, and sum of squared errors, in float64.

    The last dimensions of the arguments are samples and numbers.
    """
    y, errors = numbers.double(), (outputs - numbers).double()
    return torch.stack(
        (torch.ones_like(y).sum(-2), y.sum(-2), y.square().sum(-2), errors.square().sum(-2)), -2
    )


def r_squared(moments: Tensor) -> Tensor:
    """The share of the numbers' variance that outputs explain, the mean over several numbers.

    Examples:
        >>> y = torch.tensor([[1.0], [2.0], [3.0]])
        >>> r_squared(moments_of(y, y)), r_squared(moments_of(torch.full((3, 1), 2.0), y))
        (tensor(1., dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    count, total, squares, errors = moments.unbind(-2)
    around_mean = squares - total.square() / count
    constant = around_mean <= 1e-12 * squares
    shares = 1 - errors / torch.where(constant, 1.0, around_mean)
    return torch.where(constant, (errors <= 0).double(), shares).mean(-1)


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
