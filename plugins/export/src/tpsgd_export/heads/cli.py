"""`tpsgd export one-pass`: a head that learns from each sample once, as C."""

from pathlib import Path
from typing import Annotated

from tpsgd.cli.options import Overwrite, option
from tpsgd.cli.terminal import waiting
from tpsgd.common.errors import TpsgdError
from tpsgd_export.exported_model import ExportData

CALIBRATION = 256  # training samples whose size sets the scale of the features


def export_one_pass(
    samples: ExportData,
    out: Annotated[Path, option("Folder for head.h and head.c.")],
    features: Annotated[
        int | None, option("Random features; 0: the inputs themselves.", min=0)
    ] = None,
    ram: Annotated[str | None, option("Budget, such as 40KB: as many features as fit.")] = None,
    ridge: Annotated[float, option("Penalty on the weights.")] = 1.0,
    forgetting: Annotated[float, option("What older samples count after a wrong answer.")] = 1.0,
    spare: Annotated[int, option("Classes that may come later.", min=0)] = 0,
    seed: Annotated[int, option("Of the projection.", min=0)] = 0,
    name: Annotated[str, option("What all names in the C begin with.")] = "head",
    overwrite: Overwrite = False,
) -> None:
    """C99 that learns from each sample once: least squares on random features, without a rate."""
    from tpsgd import export
    from tpsgd.data.split import of_every_class

    data = samples.load(seed)
    if data.targets or data.train[1].dim() > 1:
        raise TpsgdError("a head learns a class for each sample: tpsgd export c writes numbers")
    some = of_every_class(data.train[1], CALIBRATION)
    with waiting("writing, compiling, and comparing it with ridge regression"):
        exported = export.one_pass(
            out, shape=data.shape, classes=data.classes, features=features, ram=ram, ridge=ridge,
            forgetting=forgetting, spare=spare, samples=data.train[0][some],
            inputs=data.inputs, seed=seed, name=name, overwrite=overwrite,
        )  # fmt: skip
    print(exported)
