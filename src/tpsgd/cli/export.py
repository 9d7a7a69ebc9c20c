"""`tpsgd export c | page | onnx`: a training step that leaves Python."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import Overwrite, RuleWord, option, setting
from tpsgd.cli.terminal import waiting
from tpsgd.errors import TpsgdError
from tpsgd.output import check_new

if TYPE_CHECKING:
    from torch import nn

OPTIMIZERS = ("sgd", "momentum", "adam")
CALIBRATION = 256  # training samples that calibrated readouts measure
app = typer.Typer(help="Write the training step as C, a page or ONNX.", no_args_is_help=True)


@dataclass(frozen=True)
class Net:
    """The net that leaves, and how it learns."""

    TITLE = "Net"

    model: str = setting("mlp:32", options.MODELS + " Or a folder of: tpsgd train --save.")
    activation: str = setting("leaky-relu", "leaky-relu, relu, tanh, sigmoid.")
    optimizer: str = setting("sgd", "sgd, momentum (0.9) or adam.", choices=OPTIMIZERS)
    loss: str | None = setting(
        None, "Last layer: mse, cross-entropy or bce.", choices=options.LOSSES
    )
    readout_scale: float | None = setting(
        None, "readout: factor of the logits, not measured.", min=0
    )
    seed: int = setting(0, "Of the class codes and of fresh weights.", min=0)

    def build(self, data: "tpsgd.data.Data") -> "nn.Module":
        """The saved model, or a fresh one."""
        import torch

        if Path(self.model).is_dir():
            trained = tpsgd.load(self.model)
            if trained.classes and tuple(trained.classes) != tuple(data.classes):
                raise TpsgdError(
                    f"the model in {self.model} tells {len(trained.classes)} classes apart, "
                    f"{', '.join(map(str, trained.classes[:5]))}, ...; those of the data differ"
                )
            return trained.model
        torch.manual_seed(self.seed)
        factory, _ = options.Model(self.model, self.activation).factory_for(data)
        return factory()

    def settings(self, rule: str) -> dict[str, Any]:
        """The arguments that all three exports take."""
        from tpsgd import rules
        from tpsgd.comparison.arms import entry

        entry(rule)
        if rule not in rules.ALL:
            raise TpsgdError(f"{rule} is no local rule with a step: choose readout or tpsgd-l2")
        scaled = rule == "readout" and self.readout_scale is not None
        chosen = rules.readout(scale=self.readout_scale) if scaled else rules.ALL[rule].make()
        loss = None if self.loss is None else getattr(tpsgd, self.loss.replace("-", "_"))
        return {"rule": chosen, "optimizer": self.optimizer, "loss": loss, "seed": self.seed}


@app.command("c")
@options.grouped
def export_c(
    data: options.Data,
    net: Net,
    out: Annotated[Path, option("Folder for net.h, net.c and tpsgd.h.")],
    rule: RuleWord = "readout",
    batch: Annotated[int, option("Samples of a step.", min=1)] = 1,
    codes: Annotated[str, option("Class codes: auto, hash, flash or binary.")] = "auto",
    ram: Annotated[str | None, option("Budget for weights and scratch, such as 16KB.")] = None,
    numbers: Annotated[str, option("float32, int16 or int8.")] = "float32",
    spare: Annotated[int, option("Classes that may come later.", min=0)] = 0,
    files: Annotated[str, option("plain, or arduino: a library with a sketch.")] = "plain",
    overwrite: Overwrite = False,
) -> None:
    """C99 for a microcontroller: no heap, no library, every byte counted beforehand."""
    from tpsgd import export

    samples = data.load(net.seed)
    x, y = samples.train
    many = slice(None) if numbers != "float32" else slice(CALIBRATION)
    with waiting("writing, compiling, and running it beside fit"):
        exported = export.c(
            net.build(samples), out, shape=samples.shape, batch=batch, codes=codes, ram=ram,
            numbers=numbers, spare=spare, files=files, overwrite=overwrite, samples=x[many],
            labels=y[many], **net.settings(rule),
        )  # fmt: skip
    print(exported)


@app.command("page")
@options.grouped
def export_page(
    data: options.Data,
    net: Net,
    out: Annotated[Path, option("The page, such as learns.html.")],
    rule: RuleWord = "readout",
    lr: Annotated[float, option("Learning rate at first.")] = 0.01,
    spare: Annotated[int, option("Classes that a visitor may add.", min=0)] = 3,
    overwrite: Overwrite = False,
) -> None:
    """One HTML file that learns in the browser, from the same C as WebAssembly."""
    from tpsgd import export

    check_new(out, overwrite)
    samples = data.load(net.seed)
    with waiting("writing, compiling, and running it beside fit"):
        exported = export.page(
            net.build(samples), samples, out, lr=lr, spare=spare, **net.settings(rule)
        )
    print(exported)


@app.command("onnx")
@options.grouped
def export_onnx(
    data: options.Data,
    net: Net,
    out: Annotated[Path, option("The graph, such as step.onnx.")],
    rule: RuleWord = "readout",
    epoch: Annotated[bool, option("A whole epoch in one graph.", "--epoch")] = False,
    overwrite: Overwrite = False,
) -> None:
    """A training step that stock onnxruntime runs, with predict.onnx and run.py beside it."""
    from tpsgd import export

    check_new(out, overwrite)
    samples = data.load(net.seed)
    with waiting("writing the graph, and running it beside fit"):
        exported = export.onnx(
            net.build(samples), out, shape=samples.shape, epoch=epoch,
            samples=samples.train[0][:CALIBRATION], **net.settings(rule),
        )  # fmt: skip
    print(exported)
