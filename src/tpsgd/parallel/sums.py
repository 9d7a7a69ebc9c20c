"""What learners sum over the ranks besides gradients: figures, and the equations of solvers."""

from typing import Any

import torch
from torch import Tensor

from tpsgd.parallel.ranks import Ranks
from tpsgd.solvers.least_squares import MomentSums, SampleSums


class SummedFigures:
    """The figures of a learner, summed over the ranks when they are collected."""

    def __init__(self, figures: Any, ranks: Ranks) -> None:
        self.figures, self.ranks = figures, ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.figures, name)

    def collect(self, samples: int) -> tuple[list[float], list[float] | None]:
        """Mean loss and accuracy over the samples of all ranks."""
        figures = self.figures
        figures.count_stored()
        classifies = torch.tensor(float(figures.classifies), device=figures.loss.device)
        sums = torch.stack([t.double() for t in (figures.loss, figures.correct, classifies)])
        loss, correct, classifying = self.ranks.add_up(sums)
        figures.loss.copy_(loss)
        figures.correct.copy_(correct)
        figures.classifies = bool(classifying > 0)
        return figures.collect(samples)


def gather_rows(rows: Tensor | None, ranks: Ranks) -> Tensor:
    """The rows of all ranks in the order of the ranks; a rank without any gives None."""
    import torch.distributed as dist

    form = None if rows is None else (tuple(rows.shape), rows.dtype, str(rows.device.type))
    forms = ranks.from_all(form)
    shape, dtype, device = next(form for form in forms if form is not None)
    counts = [0 if form is None else form[0][0] for form in forms]
    padded = torch.zeros((max(counts), *shape[1:]), dtype=dtype, device=device)
    if rows is not None:
        padded[: len(rows)] = rows
    everyone = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(everyone, padded)
    return torch.cat([t[:count] for t, count in zip(everyone, counts, strict=True)])


def join_sums(learner: Any, ranks: Ranks) -> None:
    """Join the sums that the ranks have of a block's equations; exact in float64."""
    sums: MomentSums | SampleSums | None = learner.sums
    form = None if sums is None else (isinstance(sums, SampleSums), *sums.sides)
    stores, inputs, targets = next(f for f in ranks.from_all(form) if f is not None)
    if learner.equations is None:
        learner.equations = learner.make_equations()
    if stores:
        rows = (None, None) if sums is None else _rows(sums)
        x, y = (gather_rows(t, ranks) for t in rows)
        learner.sums = SampleSums(x, y, learner.has_bias)
        learner.sums.add(x, y)
        return
    if not isinstance(sums, MomentSums):  # the rank has no samples
        device = next(iter(learner.params.values())).device
        x, y = (torch.empty(0, side, device=device) for side in (inputs, targets))
        sums = learner.sums = MomentSums(x, y, learner.has_bias)
    sums.pool(ranks.add_up)


def _rows(sums: Any) -> tuple[Tensor, Tensor]:
    """The samples that a rank has stored."""
    return torch.cat(sums.xs), torch.cat(sums.ys)
