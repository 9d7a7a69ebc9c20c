"""`tpsgd predict` and `tpsgd evaluate`: a saved model on new samples."""

import csv
import io
import json
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

if TYPE_CHECKING:
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
    model: str | None = setting(None, "FILE.py:FUNCTION that made the model, if it was your own.")
    device: str = setting("cpu", "cpu, cuda, cuda:1, ...")

    def load(self, folder: Path, needs_labels: bool) -> "tuple[tpsgd.Trained, NewSamples]":
        """The model, and the samples in the form that it takes."""
        from tpsgd.data.new_samples import read_new

        trained = tpsgd.load(folder, factory=self.model, device=self.device)
        if not trained.classes:
            raise TpsgdError(
                f"the model in {folder} has no names of classes: save it with "
                "run.save(folder, classes=data.classes, inputs=data.inputs)"
            )
        inputs = trained.inputs | ({} if self.label is None else {"label": self.label})
        reading = {"inputs": inputs, "classes": trained.classes, "seed": trained.run.seed}
        with waiting(f"reading {self.data}"):
            return trained, read_new(self.data, needs_labels=needs_labels, **reading)

    def keep_apart(self, folder: Path, **outputs: Path | None) -> None:
        """Refuse results in place of the samples or the model."""
        options.keep_apart(self.data, self.model, *folder.expanduser().glob("model*"), **outputs)


@options.grouped
def predict(
    folder: Folder,
    new: NewData,
    out: Annotated[Path | None, option("CSV file for the predictions (default: print).")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Predict the classes of new samples, with or without labels, as a table with probabilities."""
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
        classes, probabilities = trained.predict_with_probabilities(
            samples.x, progress=partial(advance, "predicting")
        )
    text = _table(trained.classes, samples, classes, probabilities)
    if out is not None:
        write_whole(out, text.encode())
        text = f"saved {len(samples.names):,} predictions in {out}\n"
    elif sys.stdout.isatty():  # which would obey control characters
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
    """Test a saved model on samples with labels: accuracy, figures per class, confusion matrix."""
    new.keep_apart(folder, plot=plot)
    if plot is not None:
        figures.check_file(plot := plot.expanduser(), "confusion matrix")
    trained, samples = new.load(folder, needs_labels=True)
    if samples.y is None:
        raise TpsgdError(f"{new.data} has no labels to compare with: use tpsgd predict")
    with waiting("testing"):
        result = trained.confusion((samples.x, samples.y))
    if plot is not None:
        result.plot(plot)
    if as_json:
        record = {"accuracy": result.accuracy, "samples": result.samples, "data": new.data}
        print(json.dumps(record | result.as_dict()))
        return
    print(f"accuracy {result.accuracy:.2%} of {result.samples:,} samples ({new.data})\n")
    print(result.text(shutil.get_terminal_size().columns))


def _table(names: tuple[str, ...], samples: "NewSamples", classes: Any, probabilities: Any) -> str:
    """A row per sample: its name, its label if it has one, its class, all probabilities."""
    columns = {"sample": samples.names}
    if samples.y is not None:
        columns["label"] = [names[i] for i in samples.y.tolist()]
    columns["prediction"] = [names[i] for i in classes.tolist()]
    for name, shares in zip(names, probabilities.T.tolist(), strict=True):
        columns[f"p({name})"] = [f"{share:.6g}" for share in shares]
    table = csv.writer(stream := io.StringIO(), lineterminator="\n")
    table.writerows([columns, *zip(*columns.values(), strict=True)])
    return stream.getvalue()
