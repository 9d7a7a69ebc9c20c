"""`tpsgd predict` and `tpsgd evaluate`: a saved model on new samples."""

import csv
import io
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, option
from tpsgd.cli.terminal import live_bar, waiting
from tpsgd.common import figures
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.names import printable
from tpsgd.common.output import check_new

if TYPE_CHECKING:
    from tpsgd.data.new_samples import NewSamples

Folder = Annotated[Path, typer.Argument(metavar="MODEL", help="A folder of: tpsgd train --save.")]
READ = "FILE.csv, FILE.npz, a folder of images or FILE.py:FUNCTION, as for training, {}; or a "
READ += "built-in data set, whose test samples are taken."
NewData = Annotated[str, option(READ.format("with or without labels"), "--data")]
LabelledData = Annotated[str, option(READ.format("with labels"), "--data")]
ModelFile = Annotated[
    str | None, option("FILE.py:FUNCTION that made the model, if it was your own.", "--model")
]
Label = Annotated[
    str | None, option("FILE.csv: the label column, if not as in training.", "--label")
]
Device = Annotated[str, option("cpu, cuda, cuda:1, ...", "--device")]


def predict(
    folder: Folder,
    data: NewData,
    out: Annotated[Path | None, option("CSV file for the predictions (default: print).")] = None,
    model: ModelFile = None,
    label: Label = None,
    device: Device = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Predict the classes of new samples with a saved model, as a table with probabilities."""
    options.keep_apart(data, model, *folder.expanduser().glob("model*"), out=out)
    if out is not None:
        out = out.expanduser()
        if not out.absolute().parent.is_dir():
            raise TpsgdError(f"there is no folder {out.parent} for --out {out.name}")
        check_new(out, overwrite)
    trained, samples = _load(folder, data, model, label, device, needs_labels=False)
    if samples.note:
        print(f"tpsgd: the labels are ignored: {samples.note}", file=sys.stderr)
    with live_bar() as advance:
        classes, probabilities = trained.predict_with_probabilities(
            samples.x, progress=partial(advance, "predicting")
        )
    text = _table(trained, samples, classes.tolist(), probabilities.tolist())
    if out is None:
        if sys.stdout.isatty():  # which would obey control characters
            text = "".join(f"{printable(line)}\n" for line in text.splitlines())
        print(text, end="")
        return
    write_whole(out, text.encode())
    print(f"saved {len(samples.names):,} predictions in {out}")


def evaluate(
    folder: Folder,
    data: LabelledData,
    model: ModelFile = None,
    label: Label = None,
    device: Device = "cpu",
    plot: Annotated[
        Path | None, option("FILE.png or FILE.svg for the confusion matrix as a heat map.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Test a saved model on samples with labels: accuracy, figures per class, confusion matrix."""
    options.keep_apart(data, model, *folder.expanduser().glob("model*"), plot=plot)
    if plot is not None:
        figures.check_file(plot := plot.expanduser(), "confusion matrix")
    trained, samples = _load(folder, data, model, label, device)
    if samples.y is None:
        raise TpsgdError(f"{data} has no labels to compare with: use tpsgd predict")
    with waiting("testing"):
        result = trained.confusion((samples.x, samples.y))
    if plot is not None:
        result.plot(plot)
    if as_json:
        record = {"accuracy": result.accuracy, "samples": result.samples, "data": data}
        print(json.dumps(record | result.as_dict()))
        return
    print(f"accuracy {result.accuracy:.2%} of {result.samples:,} samples ({data})\n")
    print(result.text(shutil.get_terminal_size().columns))


def _load(
    folder: Path,
    data: str,
    model: str | None,
    label: str | None,
    device: str,
    needs_labels: bool = True,
) -> "tuple[tpsgd.Trained, NewSamples]":
    """The model, and the samples in the form that it takes."""
    from tpsgd.data.new_samples import read_new

    trained = tpsgd.load(folder, factory=model, device=device)
    if not trained.classes:
        raise TpsgdError(
            f"the model in {folder} has no names of classes: save it with "
            "run.save(folder, classes=data.classes, inputs=data.inputs)"
        )
    inputs = trained.inputs | ({} if label is None else {"label": label})
    reading = {"inputs": inputs, "classes": trained.classes, "seed": trained.run.seed}
    with waiting(f"reading {data}"):
        return trained, read_new(data, needs_labels=needs_labels, **reading)


def _table(
    trained: "tpsgd.Trained",
    samples: "NewSamples",
    classes: list[int],
    probabilities: list[list[float]],
) -> str:
    """A row per sample: its name, its label if it has one, its class, all probabilities."""
    names, stream = trained.classes, io.StringIO()
    labels = [] if samples.y is None else [[names[i]] for i in samples.y.tolist()]
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(
        ["sample", *["label"][: len(labels)], "prediction", *(f"p({name})" for name in names)]
    )
    for i, sample in enumerate(samples.names):
        label = labels[i] if labels else []
        row = [sample, *label, names[classes[i]], *(f"{p:.6g}" for p in probabilities[i])]
        table.writerow(row)
    return stream.getvalue()
