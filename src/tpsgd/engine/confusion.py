"""`confusion`: which classes a model takes for which, and its figures per class."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.common import figures
from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import printable
from tpsgd.common.units import columns
from tpsgd.engine.evaluate import answers, cut_of

# The most classes that have a line in a table, numbers in a heat map, and names at its axes.
LISTED, NUMBERED, NAMED = 30, 15, 40
MOST_CLASSES, DRAWN = 4096, 1000  # of a matrix, which then takes 128 MB, and of a heat map
FIGURES = 31, 25  # characters that the figures take in a table of classes, and of pairs of them


class Mistake(NamedTuple):
    """Samples of one class that were predicted as another; `share` of the true class's samples."""

    true: str
    predicted: str
    samples: int
    share: float


class ClassFigures(NamedTuple):
    """Samples, predictions, recall and precision of one class.

    Recall is the share of the class's samples that were predicted right; precision is the share of
    the predictions of the class that are right. Each is None where it would be 0 / 0.
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
        return sum(map(sum, self.counts))

    @property
    def accuracy(self) -> float:
        """The share of samples that are predicted right."""
        return sum(row[i] for i, row in enumerate(self.counts)) / self.samples

    @property
    def per_class(self) -> list[ClassFigures]:
        """The figures of each class, in the order of the classes."""
        rows, predicted = [], map(sum, zip(*self.counts, strict=True))
        each = zip(self.classes, self.counts, predicted, strict=True)
        for i, (name, row, predictions) in enumerate(each):
            samples = sum(row)
            recall = row[i] / samples if samples else None
            precision = row[i] / predictions if predictions else None
            rows.append(ClassFigures(name, samples, predictions, recall, precision))
        return rows

    def mistakes(self, most: int | None = None) -> list[Mistake]:
        """Pairs of classes that are confused, by the number of samples; at most `most` pairs."""
        pairs = [
            Mistake(self.classes[i], self.classes[j], count, count / sum(row))
            for i, row in enumerate(self.counts)
            for j, count in enumerate(row)
            if count and i != j
        ]
        return sorted(pairs, key=lambda pair: -pair.samples)[:most]

    def __add__(self, other: "Confusion") -> "Confusion":
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
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        figures.check_file(file := Path(file), "confusion matrix")
        if len(self.classes) > DRAWN:
            raise TpsgdError(f"a heat map has at most {DRAWN:,} classes, not {len(self.classes):,}")
        side = min(12.0, max(4.0, 1.8 + 0.42 * len(self.classes)))
        with rc_context(figures.LOOK):
            figure = Figure(figsize=(side, side), layout="constrained")
            heat_map(figure.add_subplot(), self)
            return figures.write(figure, file)

    def text(self, width: int = 80) -> str:
        """The figures per class, and the matrix if it fits the width, else the worst pairs.

        Of many classes, those of the least recall; long names lose their middle.
        """
        rows, head = self.per_class, ""
        of_classes, of_pairs = (max(3, width - most) for most in FIGURES)
        if len(rows) > LISTED:
            rows = sorted(rows, key=lambda c: 2 if c.recall is None else c.recall)[:LISTED]
            head = f"the {LISTED} of {len(self.classes):,} classes with the least recall:\n"
        lines = [("class", "samples", "recall", "precision")]
        for c in rows:
            figures = f"{c.samples:,}", _percent(c.recall), _percent(c.precision)
            lines.append((_shortened(c.name, of_classes), *figures))
        tables = [head + columns(lines)]
        if matrix := self._matrix(width):
            tables.append(matrix)
        elif mistakes := self.mistakes(10):
            pairs = [
                (*(_shortened(n, of_pairs // 2) for n in p[:2]), str(p.samples), f"{p.share:.1%}")
                for p in mistakes
            ]
            names = ("true class", "predicted as", "samples", "of the class")
            tables.append("most confused:\n" + columns([names, *pairs]))
        return "\n\n".join(tables)

    __str__ = text

    def _matrix(self, width: int) -> str:
        """The counts as a table, if it fits the width and its rows are not too many."""
        if len(self.classes) > LISTED:
            return ""
        cells = [("true \\ predicted", *self.classes)]
        for name, row in zip(self.classes, self.counts, strict=True):
            cells.append((name, *(str(count or "·") for count in row)))
        matrix = columns(cells)
        return matrix if max(map(len, matrix.splitlines())) <= width else ""


@torch.no_grad()
def confusion(
    model: nn.Module, data: Any, *, classes: Sequence[str] = (), batch_size: int = 1024
) -> Confusion:
    """Count how often samples of each class are predicted as each class.

    Labels are as for `evaluate`, with one class per sample, step or pixel: of soft labels the
    largest entry counts. A single yes-or-no output has the classes 0 and 1.

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
    total, cut = torch.zeros(0, dtype=torch.long), cut_of(model)
    for out, y, target in answers(model, data, batch_size):
        if target.numbers:
            raise TpsgdError("y has numbers, not classes: tpsgd.evaluate gives R² of them")
        predicted = out.max(1).indices if out.shape[1] > 1 else (out[:, 0] > cut).long()
        count = max(2, out.shape[1])
        if count > MOST_CLASSES:
            raise TpsgdError(
                f"{count:,} classes are too many for a confusion matrix, of {MOST_CLASSES:,} at "
                "most: tpsgd.evaluate gives the accuracy"
            )
        pairs = _class_numbers(y) * count + predicted
        total = total if len(total) else pairs.new_zeros(count, count)
        total.view(-1).index_add_(0, pairs, torch.ones_like(pairs))
    names = tuple(map(str, classes)) or tuple(map(str, range(len(total))))
    if len(names) != len(total):
        raise TpsgdError(f"the model has {len(total)} classes, but {len(names)} names were given")
    return Confusion(tuple(map(tuple, total.tolist())), names)


def _class_numbers(y: Tensor) -> Tensor:
    if not y.is_floating_point():
        return y.long()
    if y.shape[1] == 1:
        return (y[:, 0] > 0.5).long()
    if not bool(((y.sum(1) - 1).abs() < 1e-3).all()):
        raise TpsgdError(
            "a sample has several classes: a confusion matrix needs one class per sample"
        )
    return y.max(1).indices


def _shortened(name: str, most: int) -> str:
    """A name without its middle, if it is long; the ends of names tell them apart."""
    end = (most - 1) // 2
    return name if len(name) <= most else f"{name[: most - 1 - end]}…{name[len(name) - end :]}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def heat_map(axes: Any, confusion: Confusion, title: str = "") -> None:
    """Draw a matrix into axes: each row is the shares of one true class, in per cent."""
    counts, names = confusion.counts, [printable(name) for name in confusion.classes]
    shares = [[100 * count / (sum(row) or 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=100)
    axes.grid(False)
    axes.set(title=title, xlabel="predicted class", ylabel="true class")
    if len(names) <= NAMED:
        ticks, words = range(len(names)), [shorten(name, 16, placeholder="…") for name in names]
        turned = 90 if max(map(len, words)) > 2 else 0
        plain = {"fontsize": 9 if len(names) <= NUMBERED else 6, "parse_math": False}
        axes.set_xticks(ticks, words, rotation=turned, **plain)
        axes.set_yticks(ticks, words, **plain)
    if len(names) > NUMBERED:
        return
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            if counts[i][j]:
                colour = "white" if share > 60 else "#333333"
                text = "<1" if share < 0.5 else f"{share:.0f}"
                axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)
