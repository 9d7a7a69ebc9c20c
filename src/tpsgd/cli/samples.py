"""Samples for a model that exists already: to calibrate it, or to go on with its training."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import option, setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import waiting
from tpsgd.common.errors import TpsgdError

RuleWord = Annotated[
    str | None,
    option("A rule; see: tpsgd rules.", "--rule", show_default=f"{DEFAULT}, or a saved model's"),
]


@dataclass(frozen=True)
class CalibrationData:
    """Samples that readouts are calibrated with; a saved model needs none."""

    TITLE = "Data"

    data: str | None = setting(None, options.DATA, show_default="digits; of a saved model, none")
    max_train: int | None = setting(None, "Use only this many training samples.", min=1)
    on_disk: Path | None = setting(None, "Keep the decoded data in this folder, not in memory.")  # noqa: RUF009
    scale: str | None = setting(
        None,
        "Features of tables and series: none, standard or minmax.",
        choices=options.SCALES,
        show_default="standard for .csv, else none; of a saved model, its own",
    )

    def load(self, seed: int, scale: str | None) -> "tpsgd.data.Data":
        """The data set."""
        return options.DataOptions(self.data or "digits", self.max_train, self.on_disk, scale).load(
            seed
        )


def samples_for(
    trained: "tpsgd.Trained", samples: CalibrationData, folder: str, split: bool
) -> Any:
    """Training samples in the form that a saved model takes; with `split`, a whole data set."""
    from tpsgd.data.new_samples import read_new
    from tpsgd.data.registry import DATASETS

    if samples.data is None and not split:
        return None, None
    if samples.data is None:
        raise TpsgdError(f"a page has samples in it: name the data of {folder} with --data")
    if samples.scale is not None:
        raise TpsgdError(f"the model in {folder} has its own scaling: leave --scale out")
    reads_table = samples.data.lower().endswith((".csv", ".tsv"))
    if not trained.inputs or samples.data in DATASETS or (split and not reads_table):
        data = _loaded(trained, samples, folder)
        return (data, None) if split else data.train
    with waiting(f"reading {samples.data}"):
        new = read_new(samples.data, inputs=trained.inputs, classes=trained.classes)
    if split:
        return _held_out(trained, samples, new), None
    return new.x[: samples.max_train], None if new.y is None else new.y[: samples.max_train]


def _loaded(trained: "tpsgd.Trained", samples: CalibrationData, folder: str) -> "tpsgd.data.Data":
    """A data set with the scaling of the model."""
    import torch

    from tpsgd.saved.scaling import scaled

    scaling = trained.inputs.get("scaling") or {}
    data = samples.load(trained.run.seed, "none" if trained.inputs else samples.scale)
    if trained.classes and tuple(trained.classes) != tuple(data.classes):
        raise TpsgdError(
            f"the model in {folder} tells {len(trained.classes)} classes apart, "
            f"{', '.join(map(str, trained.classes[:5]))}, ...; those of the data differ"
        )
    if "shift" not in scaling:
        return data
    train, test = (
        (torch.as_tensor(scaled(x, scaling)), y) for x, y in (data.train, data.test)
    )  # fmt: skip
    return replace(data, train=train, test=test, reading=data.reading | {"scaling": scaling})


def _held_out(trained: "tpsgd.Trained", samples: CalibrationData, new: Any) -> "tpsgd.data.Data":
    """A table with the columns, the scaling and the classes of the model, split in two."""
    import torch

    from tpsgd.data.split import hold_out_test, stratified

    spec, seed = str(samples.data), trained.run.seed
    if new.y is None:
        raise TpsgdError(f"{spec} has no labels to learn from")
    mask, note = hold_out_test(new.y.numpy(), seed, spec)
    train, test = map(torch.from_numpy, (mask, ~mask))
    if samples.max_train is not None and samples.max_train < int(train.sum()):
        train[mask] = torch.from_numpy(stratified(new.y[train].numpy(), samples.max_train, seed))
    reading = {name: value for name, value in trained.inputs.items() if name != "shape"}
    return tpsgd.data.Data(
        spec, (new.x[train], new.y[train]), (new.x[test], new.y[test]), trained.classes,
        tuple(new.x.shape[1:]), note, reading=reading,
    )  # fmt: skip
