"""`tpsgd predict` and `tpsgd evaluate`: a saved model on new samples."""

import csv
import io
import json
import re
import shutil
import sys
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, option, setting
from tpsgd.cli.terminal import live_bar, waiting
from tpsgd.common import figures
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.names import printable
from tpsgd.common.output import check_new
from tpsgd.common.units import columns

if TYPE_CHECKING:
    from torch import Tensor

    from tpsgd.data.new_samples import NewSamples

Folder = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder of: tpsgd train --save.")]
FILES = (
    "FILE.csv, FILE.npz, a folder of images or FILE.py:FUNCTION, as for training; or a built-in "
    "data set, whose test samples are taken."
)


@dataclass(frozen=True)
class NewData:
    """New samples for a saved model."""

    TITLE = "Samples and model"

    data: str = setting(MISSING, FILES)
    label: str | None = setting(None, "FILE.csv: the label column, if not as in training.")
    factory: str | None = setting(
        None, "FILE.py:FUNCTION that made the model, if it was your own.", "--factory", "--model"
    )
    device: str = setting("cpu", "cpu, cuda, cuda:1, ...")

    def load(self, folder: Path, needs_labels: bool) -> "tuple[tpsgd.Trained, NewSamples]":
        """The model, and the samples in the form that it takes."""
        from tpsgd.data.new_samples import read_new

        trained = tpsgd.load(folder, factory=self.factory, device=self.device)
        if not trained.classes and not trained.gives_numbers:
            raise TpsgdError(
                f"the model in {folder} has no names of classes: save it with "
                "run.save(folder, classes=data.classes, inputs=data.inputs)"
            )
        inputs = trained.inputs | ({} if self.label is None else {"label": self.label})
        inputs = {"targets": []} | inputs if trained.gives_numbers else inputs
        reading = {"inputs": inputs, "classes": trained.classes, "seed": trained.run.seed}
        with waiting(f"reading {self.data}"):
            return trained, read_new(self.data, needs_labels=needs_labels, **reading)

    def keep_apart(self, folder: Path, **outputs: Path | None) -> None:
        """Refuse results in place of the samples or the model."""
        options.keep_apart(self.data, self.factory, *folder.expanduser().glob("model*"), **outputs)


@options.grouped
def predict(
    folder: Folder,
    new: NewData,
    out: Annotated[Path | None, option("FILE.csv or FILE.npz (default: print).")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict new samples, with or without labels: classes with probabilities, or numbers."""
    new.keep_apart(folder, out=out)
    if out is not None:
        out = out.expanduser()
        if not out.absolute().parent.is_dir():
            raise TpsgdError(f"there is no folder {out.parent} for --out {out.name}")
        check_new(out, overwrite)
    trained, samples = new.load(folder, needs_labels=False)
    if samples.note:
        print(f"tpsgd: the labels are ignored: {samples.note}", file=sys.stderr)
    with live_bar() as advance:
        ahead, shares = partial(advance, "predicting"), None
        if trained.gives_numbers:
            answers = trained.predict(samples.x, progress=ahead)
        else:
            answers, shares = trained.predict_with_probabilities(samples.x, progress=ahead)
    if samples.y is not None and samples.y.numel() != answers.numel():
        print("tpsgd: the labels are ignored: y has another shape than outputs", file=sys.stderr)
        samples = samples._replace(y=None)
    in_arrays = out is not None and out.suffix.lower() == ".npz"
    content = (_arrays if in_arrays else _table)(trained, samples, answers, shares)
    if out is not None:
        write_whole(out, content)
        text = f"saved {len(samples.names):,} predictions in {out}\n"
    else:
        text = content.decode()
        if sys.stdout.isatty():  # which would obey control characters
            text = "".join(f"{printable(line)}\n" for line in text.splitlines())
    print(text, end="")


@options.grouped
def evaluate(
    folder: Folder,
    new: NewData,
    plot: Annotated[
        Path | None, option("FILE.png or FILE.svg for the confusion matrix as a heat map.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test a saved model on samples with labels: accuracy, figures per class, confusion matrix.

    Of numbers, R² and the mean absolute error of each column.
    """
    from tpsgd.engine.confusion import MOST_CLASSES
    from tpsgd.losses import IGNORED

    new.keep_apart(folder, plot=plot)
    if plot is not None:
        figures.check_file(plot := plot.expanduser(), "confusion matrix")
    trained, samples = new.load(folder, needs_labels=True)
    if samples.y is None:
        raise TpsgdError(f"{new.data} has no labels to compare with: use tpsgd predict")
    if trained.gives_numbers:
        if plot is not None:
            raise TpsgdError("numbers have no confusion matrix: leave --plot out")
        _show_numbers(trained, (samples.x, samples.y), new.data, as_json)
        return
    pair, many = (samples.x, samples.y), len(trained.classes) > MOST_CLASSES and plot is None
    with waiting("testing"):
        result = None if many else trained.confusion(pair)
        accuracy = trained.evaluate(pair) if result is None else result.accuracy
    if result is not None and plot is not None:
        result.plot(plot)
    count = int((samples.y != IGNORED).sum())
    if as_json:
        record = {"accuracy": accuracy, "samples": count, "data": new.data}
        print(json.dumps(record | (result.as_dict() if result else {})))
        return
    noun = "samples" if samples.y.dim() == 1 else "labels"
    print(f"accuracy {accuracy:.2%} of {count:,} {noun} ({new.data})\n")
    if result is None:
        print(f"{len(trained.classes):,} classes are too many for a table")
    else:
        print(result.text(shutil.get_terminal_size().columns))


def _show_numbers(trained: "tpsgd.Trained", pair: Any, data: str, as_json: bool) -> None:
    """R², and the mean absolute error of each column."""
    score, errors = trained.evaluate(pair), trained.errors(pair).tolist()
    by_name = dict(zip(_heads(trained, pair[1].reshape(-1, len(errors))), errors, strict=True))
    if as_json:
        record = {"r2": score, "mean_absolute_error": by_name, "samples": len(pair[1])}
        print(json.dumps(record | {"data": data}))
        return
    print(f"R² {score:.3f} of {len(pair[1]):,} samples ({data})\n")
    rows = [(printable(name), f"{error:.5g}") for name, error in by_name.items()]
    print(columns([("column", "mean absolute error"), *rows]))


def _heads(trained: "tpsgd.Trained", answers: "Tensor") -> list[str]:
    """The names of the columns of predictions, of one class for each sample none."""
    if answers.dim() > 2:
        raise TpsgdError("there are no columns for the predictions of pixels: write --out FILE.npz")
    if answers.dim() == 1 and not trained.gives_numbers:
        return []
    count = answers[0].numel()
    names = list(trained.inputs.get("targets", ()))
    if len(names) != count or (count > 1 and "positions" in trained.run.settings):
        noun = "step " if "positions" in trained.run.settings else "y"
        names = [f"{noun}{i}" for i in range(1, count + 1)] if count > 1 else ["y"]
    return names


def _table(trained: "tpsgd.Trained", samples: "NewSamples", answers: Any, shares: Any) -> bytes:
    """A row per sample: its name, its label if it has one, what is predicted, probabilities."""
    heads, names = _heads(trained, answers), trained.classes
    cells = [("sample", samples.names)]

    def add(values: "Tensor", heads: list[str]) -> None:
        for head, column in zip(heads, values.reshape(len(values), -1).T.tolist(), strict=True):
            if trained.gives_numbers:
                cells.append((head, [f"{value:.7g}" for value in column]))
            else:
                cells.append((head, [names[i] if i >= 0 else "" for i in column]))

    if samples.y is not None:
        add(samples.y, [f"label({head})" for head in heads] or ["label"])
    add(answers, heads or ["prediction"])
    if not heads:
        for name, column in zip(names, shares.T.tolist(), strict=True):
            cells.append((f"p({name})", [f"{share:.6g}" for share in column]))
    table = csv.writer(stream := io.StringIO(), lineterminator="\n")
    table.writerows([[head for head, _ in cells], *zip(*(c for _, c in cells), strict=True)])
    return stream.getvalue().encode(errors="backslashreplace")  # names of classes may be no text


def _arrays(trained: "tpsgd.Trained", samples: "NewSamples", answers: Any, shares: Any) -> bytes:
    """The arrays of a .npz file: samples, what is predicted, probabilities."""
    import numpy as np

    arrays = {"sample": np.array(samples.names), "prediction": answers.numpy(force=True)}
    if shares is not None:
        names = np.array(trained.classes)
        if all(re.fullmatch(r"-?\d{1,18}", name) for name in trained.classes):
            names = names.astype(np.int64)  # as they are in the labels
        arrays["prediction"] = names[arrays["prediction"]]
        arrays |= {"classes": names, "probabilities": shares.numpy(force=True)}
    np.savez_compressed(stream := io.BytesIO(), **arrays)
    return stream.getvalue()
