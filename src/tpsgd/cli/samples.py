"""Samples for a saved model: to calibrate it, or to go on with its training."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import option, setting
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import waiting
from tpsgd.common.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.data.new_samples import NewSamples

RuleWord = Annotated[
    str | None,
    option(
        "A rule, or FILE.py:FUNCTION; see: tpsgd rules.",
        "--rule",
        show_default=f"{DEFAULT}, or a saved model's",
    ),
]


@dataclass(frozen=True)
class CalibrationData(options.Unscaled):
    """Samples that readouts are calibrated with; a saved model needs none."""

    data: str | None = setting(  # type: ignore[assignment]
        None, options.DATA, show_default="digits; of a saved model, none"
    )

    def load(self, seed: int = 0, **choices: Any) -> "tpsgd.data.Data":
        """The data set, a table standardised."""
        return super().load(seed, **({"scale": None} | choices))


def calibration_samples(
    trained: "tpsgd.Trained", samples: CalibrationData, folder: str
) -> tuple[Any, Any]:
    """Training samples in the form that a saved model takes, and labels if there are any."""
    from tpsgd.data.registry import DATASETS
    from tpsgd.data.split import of_every_class

    if samples.data is None:
        return None, None
    if not trained.inputs or samples.data in DATASETS:
        return data_for(trained, samples, folder).train
    new = _read(trained, samples.data)
    some = of_every_class(new.y, samples.max_train)
    return new.x[some], None if new.y is None else new.y[some]


def data_for(trained: "tpsgd.Trained", samples: options.Unscaled, folder: str) -> "tpsgd.data.Data":
    """A data set with the columns, the scaling and the classes of a saved model."""
    import torch

    from tpsgd.saved.scaling import scaled

    if trained.inputs and samples.data.lower().endswith((".csv", ".tsv")):
        return _split_table(trained, samples)
    choices = {"scale": "none"} if trained.inputs else {}
    choices |= {"task": "regression"} if trained.gives_numbers else {}
    data = samples.load(trained.run.seed, **choices)
    if trained.classes and tuple(trained.classes) != tuple(data.classes):
        raise TpsgdError(
            f"the model in {folder} tells {len(trained.classes)} classes apart, "
            f"{', '.join(map(str, trained.classes[:5]))}, ...; those of the data differ"
        )
    shape = tuple(trained.inputs.get("shape") or ())
    if shape == (3, *data.shape[1:]) and data.shape[0] == 1:  # all images are grey, unlike before
        train, test = ((x.expand(-1, 3, -1, -1), y) for x, y in (data.train, data.test))
        data = replace(data, train=train, test=test, shape=shape)
    scaling = trained.inputs.get("scaling") or {}
    if "shift" not in scaling:
        return data
    train, test = ((torch.as_tensor(scaled(x, scaling)), y) for x, y in (data.train, data.test))
    return replace(data, train=train, test=test, reading=data.reading | {"scaling": scaling})


def _split_table(trained: "tpsgd.Trained", samples: options.Unscaled) -> "tpsgd.data.Data":
    """A table as the model reads it, with a part held out for the test."""
    import torch

    from tpsgd.data.split import hold_out_test, stratified

    new, seed = _read(trained, samples.data), trained.run.seed
    if new.y is None:
        raise TpsgdError(f"{samples.data} has no labels to learn from")
    mask, note = hold_out_test(new.y.numpy(), seed, samples.data)
    train, test = map(torch.from_numpy, (mask, ~mask))
    if samples.max_train is not None and samples.max_train < int(train.sum()):
        train[mask] = torch.from_numpy(stratified(new.y[train].numpy(), samples.max_train, seed))
    reading = {name: value for name, value in trained.inputs.items() if name != "shape"}
    return tpsgd.data.Data(
        samples.data, (new.x[train], new.y[train]), (new.x[test], new.y[test]), trained.classes,
        tuple(new.x.shape[1:]), note, reading=reading,
    )  # fmt: skip


def _read(trained: "tpsgd.Trained", spec: str) -> "NewSamples":
    from tpsgd.data.new_samples import read_new

    with waiting(f"reading {spec}"):
        return read_new(spec, inputs=trained.inputs, classes=trained.classes)
