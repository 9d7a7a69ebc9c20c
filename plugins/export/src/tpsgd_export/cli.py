"""`tpsgd export c | page | onnx | one-pass`: a training step that leaves Python."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tpsgd.cli import options
from tpsgd.cli.options import Overwrite, option
from tpsgd.cli.samples import RuleWord
from tpsgd.cli.terminal import waiting
from tpsgd.common.errors import TpsgdError
from tpsgd.common.output import check_new
from tpsgd_export.exported_model import BACKPROP, ExportData, ModelToExport, NetToExport
from tpsgd_export.heads.cli import export_one_pass

CALIBRATION = 256  # training samples that calibrated readouts measure
app = typer.Typer(help="Write the training step as C, a page or ONNX.", no_args_is_help=True)


@app.command("c")
@options.grouped
def export_c(
    samples: ExportData,
    net: NetToExport,
    out: Annotated[Path, option("Folder for net.h, net.c and tpsgd.h.")],
    rule: RuleWord = None,
    batch: Annotated[int, option("Samples of a step.", min=1)] = 1,
    ram: Annotated[str | None, option("Budget for weights and scratch, such as 16KB.")] = None,
    numbers: Annotated[str, option("float32, int16 or int8.")] = "float32",
    rate: Annotated[
        float | None, option("Integers: learning rate of their check.", show_default="2^-7")
    ] = None,
    least: Annotated[
        float | None, option("Integers: share of samples right in the check.", show_default="0.5")
    ] = None,
    frozen: Annotated[str, option("int8: weights that do not learn are bytes.")] = "float32",
    spare: Annotated[int, option("Classes that may come later.", min=0)] = 0,
    blocks: Annotated[str, option("As of train: 4, 2,2,4, auto, or layers: one each.")] = "layers",
    files: Annotated[str, option("plain, or a library: arduino, zephyr.")] = "plain",
    name: Annotated[str, option("What all names in the C begin with.")] = "net",
    overwrite: Overwrite = False,
) -> None:
    """C99 for a microcontroller: no heap, no library, every byte counted beforehand."""
    from tpsgd import export

    floats = numbers == "float32"
    check = {name: v for name, v in (("rate", rate), ("least", least)) if v is not None}
    if floats and check:
        raise TpsgdError(f"--{next(iter(check))} is for the check of integers: --numbers int8")
    exporting = net.read(samples, rule, learned_codes=floats)
    measured = floats and not exporting.gives_numbers  # all labels have mean and deviation
    x, y = _calibration(exporting, CALIBRATION if measured else None)
    with waiting("writing, compiling, and running it beside fit"):
        exported = export.c(
            exporting.model, out, shape=exporting.shape, batch=batch, ram=ram, numbers=numbers,
            frozen=frozen, spare=spare, blocks=options.block_numbers(blocks), files=files,
            name=name, overwrite=overwrite, samples=x, labels=y,
            inputs=exporting.inputs, classes=exporting.classes, **check, **exporting.settings,
        )  # fmt: skip
    _print(exporting, exported)


@app.command("page")
@options.grouped
def export_page(
    samples: ExportData,
    net: NetToExport,
    out: Annotated[Path, option("The page, such as learns.html.")],
    rule: RuleWord = None,
    overwrite: Overwrite = False,
) -> None:
    """One HTML file that learns in the browser, from the same C as WebAssembly."""
    from tpsgd import export

    _check_local(rule)
    check_new(out, overwrite)
    exporting = net.read(samples, rule, split=True)
    with waiting("writing, compiling, and running it beside fit"):
        exported = export.page(
            exporting.model, exporting.data, out, overwrite=overwrite, **exporting.settings
        )
    _print(exporting, exported)


@app.command("onnx")
@options.grouped
def export_onnx(
    samples: ExportData,
    net: NetToExport,
    out: Annotated[Path, option("The graph, such as step.onnx.")],
    rule: RuleWord = None,
    overwrite: Overwrite = False,
) -> None:
    """A training step that stock onnxruntime runs, with predict.onnx and run.py beside it."""
    from tpsgd import export

    _check_local(rule)
    check_new(out, overwrite)
    exporting = net.read(samples, rule)
    if exporting.gives_numbers:
        raise TpsgdError("a graph of ONNX learns classes: tpsgd export c writes numbers as C")
    x, _ = _calibration(exporting, CALIBRATION)
    with waiting("writing the graph, and running it beside fit"):
        exported = export.onnx(
            exporting.model, out, shape=exporting.shape, samples=x, inputs=exporting.inputs,
            overwrite=overwrite, **exporting.settings,
        )  # fmt: skip
    _print(exporting, exported)


app.command("one-pass")(options.grouped(export_one_pass))


def _check_local(rule: str | None) -> None:
    if rule == BACKPROP:
        raise TpsgdError(f"{BACKPROP}, the control, is written as C only: tpsgd export c")


def _calibration(exporting: ModelToExport, count: int | None) -> tuple[Any, Any]:
    """Samples for calibration, and their labels; sequences of different lengths are left out."""
    from tpsgd.data.split import of_every_class
    from tpsgd.nets.padded import Padded

    x, y = exporting.train
    if x is None or isinstance(x, Padded):
        return None, None
    some = of_every_class(y, count)
    return x[some], None if y is None else y[some]


def _print(exporting: ModelToExport, exported: Any) -> None:
    print(*filter(None, [exporting.note, exported]), sep="\n")
