"""`confusion`: which classes a model takes for which, and its figures per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.training import confusion_plot
from tpsgd.training.evaluate import answers, last_module
from tpsgd.units import columns

SEVERAL = "a sample has several classes: a confusion matrix needs one class per sample"
NONE = "–"
LISTED = 30  # so many classes at most have a line


class Mistake(NamedTuple):
    """Samples of one class that were taken for another; `share` is that of the true class."""

    true: str
    predicted: str
    samples: int
    share: float


class ClassFigures(NamedTuple):
    """One class: how many samples it has and how many were predicted; recall and precision.

    Recall is the share of its samples that were predicted right, which is the accuracy on this
    class; precision is the share of the predictions of this class that are right. They are None
    for a class without samples, or without predictions.
    """

    name: str
    samples: int
    predictions: int
    recall: float | None
    precision: float | None


@dataclass(frozen=True)
class Confusion:
    """How often samples of each class were predicted as each class; `print` shows tables.

    `counts[i][j]` is the number of samples of class i that were predicted as class j.
    """

    counts: tuple[tuple[int, ...], ...]
    classes: tuple[str, ...]

    @property
    def samples(self) -> int:
        """The number of samples."""
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """The share of samples that are predicted right, as by `tpsgd.evaluate`."""
        return sum(row[i] for i, row in enumerate(self.counts)) / self.samples

    @property
    def per_class(self) -> list[ClassFigures]:
        """The figures of each class, in the order of the classes."""
        predictions = [sum(column) for column in zip(*self.counts, strict=True)]
        return [
            ClassFigures(
                name,
                sum(row),
                predictions[i],
                row[i] / sum(row) if any(row) else None,
                row[i] / predictions[i] if predictions[i] else None,
            )
            for i, (name, row) in enumerate(zip(self.classes, self.counts, strict=True))
        ]

    def mistakes(self, most: int | None = None) -> list[Mistake]:
        """Pairs of classes that are confused, by the number of samples; at most so many."""
        pairs = [
            Mistake(self.classes[i], self.classes[j], count, count / sum(row))
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if count and i != j
        ]
        return sorted(pairs, key=lambda pair: -pair.samples)[:most]

    def __add__(self, other: "Confusion") -> "Confusion":
        """The sum over two sets of samples, or over two models."""
        if self.classes != other.classes:
            raise TpsgdError("confusion matrices of different classes cannot be added")
        rows = zip(self.counts, other.counts, strict=True)
        sums = tuple(tuple(a + b for a, b in zip(*row, strict=True)) for row in rows)
        return Confusion(sums, self.classes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: figures per class, and the counts that are not 0, by true class."""
        counts = {
            name: {self.classes[j]: count for j, count in enumerate(row) if count}
            for name, row in zip(self.classes, self.counts, strict=True)
        }
        return {"per_class": [c._asdict() for c in self.per_class], "confusion": counts}

    def plot(self, file: Path | str) -> Path:
        """Draw a heat map, as a PNG or an SVG by the suffix of the file name."""
        return confusion_plot.write(self, Path(file))

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int = 80) -> str:
        """The figures per class, and the matrix if it is narrow enough, else the worst pairs."""
        figures = columns([("class", "samples", "recall", "precision"), *self._figures()])
        if len(self.classes) > LISTED:
            figures = (
                f"the {LISTED} of {len(self.classes):,} classes with the least recall:\n{figures}"
            )
        tables = [figures]
        matrix = columns([("true \\ predicted", *self.classes), *self._matrix()])
        if max(map(len, matrix.splitlines())) <= width:
            tables.append(matrix)
        elif mistakes := self.mistakes(10):
            rows = [(p.true, p.predicted, str(p.samples), f"{p.share:.1%}") for p in mistakes]
            head = ("true class", "predicted as", "samples", "of the class")
            tables.append("most confused:\n" + columns([head, *rows]))
        return "\n\n".join(tables)

    def _figures(self) -> list[tuple[str, ...]]:
        """A row per class; of many classes those that the model does worst on."""
        classes = self.per_class
        if len(classes) > LISTED:
            classes = sorted(classes, key=lambda c: 2 if c.recall is None else c.recall)[:LISTED]
        return [
            (c.name, f"{c.samples:,}", _percent(c.recall), _percent(c.precision)) for c in classes
        ]

    def _matrix(self) -> list[tuple[str, ...]]:
        rows = zip(self.classes, self.counts, strict=True)
        return [(name, *(str(count or "·") for count in row)) for name, row in rows]


@torch.no_grad()
def confusion(
    model: nn.Module, data: Any, *, classes: Sequence[str] = (), batch_size: int = 1024
) -> Confusion:
    """Count how often samples of each class are predicted as each class.

    Labels are as for `evaluate`, with one class per sample: of soft labels the largest entry
    counts. A single yes-or-no output has the classes 0 and 1.

    Args:
        model: any module that gives one number per class.
        data: as for `evaluate`.
        classes: their names, in the order of the outputs; default: their numbers.
        batch_size: samples per forward pass.

    Returns:
        The counts, with `accuracy`, `per_class` (recall and precision), `mistakes` and `plot`.

    Examples:
        >>> x = torch.tensor([[2.0, 0.0], [3.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        >>> result = confusion(nn.Identity(), (x, torch.tensor([0, 0, 1, 1])), classes=["a", "b"])
        >>> print(result)
        class  samples  recall   precision
        a      2        100.0 %  66.7 %
        b      2        50.0 %   100.0 %
        <BLANKLINE>
        true \\ predicted  a  b
        a                 2  ·
        b                 1  1
    """
    cut = 0.5 if isinstance(last_module(model), nn.Sigmoid) else 0.0
    total: Any = 0
    for out, y in answers(model, data, batch_size):
        predicted = out.max(1).indices if out.shape[1] > 1 else (out[:, 0] > cut).long()
        count = max(2, out.shape[1])
        pairs = _class_numbers(y) * count + predicted
        total = total + torch.bincount(pairs, minlength=count * count).view(count, count)
    names = tuple(map(str, classes)) or tuple(map(str, range(len(total))))
    if len(names) != len(total):
        raise TpsgdError(f"the model has {len(total)} classes, but {len(names)} names were given")
    return Confusion(tuple(map(tuple, total.tolist())), names)


def _class_numbers(y: Tensor) -> Tensor:
    """The number of each sample's class."""
    if not y.is_floating_point():
        return y.long()
    if y.shape[1] == 1:
        return (y[:, 0] > 0.5).long()
    if not bool(((y.sum(1) - 1).abs() < 1e-3).all()):
        raise TpsgdError(SEVERAL)
    return y.max(1).indices


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"
