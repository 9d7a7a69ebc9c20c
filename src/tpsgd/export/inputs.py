"""What the numbers of a sample mean: columns, how they are scaled, and the names of the classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import Recipe

BYTES = 255.0  # what pixels that are stored as bytes are divided by
METHODS = {
    "standard": "standardises them as for training",
    "minmax": "scales them as for training",
    "bytes": "divides bytes by 255, as for training",
}


@dataclass(frozen=True)
class Inputs:
    """Samples as they are measured, and as the model takes them: (x - shift) / scale.

    Feature i of a sample has number i modulo the count of `shift`; without a scaling both `shift`
    and `scale` are empty.
    """

    columns: tuple[str, ...] = ()
    shift: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    method: str = ""

    def note(self, function: str) -> str:
        """In a sentence, what is done to inputs before the net reads them."""
        if not self.shift:
            return ""
        return f"inputs: {function} {METHODS.get(self.method, METHODS['minmax'])}"


def read_inputs(
    inputs: Mapping[str, Any] | None, classes: Sequence[str] | None, recipe: Recipe
) -> Inputs:
    """`Data.inputs` and `Data.classes` for a net; what does not fit it is refused."""
    inputs, features = inputs or {}, recipe.shape[-1]
    if not isinstance(inputs, Mapping):
        raise TpsgdError("inputs= takes data.inputs, what a sample looks like")
    columns = tuple(map(str, inputs.get("columns") or ()))
    if columns and len(columns) != features:
        raise TpsgdError(
            f"inputs= has {len(columns)} columns, and the net takes {features} numbers"
        )
    names = tuple(map(str, classes or ()))
    if names and len(names) != max(2, recipe.classes):
        raise TpsgdError(
            f"classes= has {len(names)} names, and the net tells {max(2, recipe.classes)} classes "
            "apart"
        )
    scaling = inputs.get("scaling") or {}
    return Inputs(columns, *_scaling(scaling, features), names, str(scaling.get("method", "")))


def _scaling(
    scaling: Mapping[str, Any], features: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if scaling.get("method") == "bytes":
        return (0.0,), (BYTES,)
    if "shift" not in scaling:
        return (), ()
    try:
        shift, scale = (np.array(scaling[key], np.float32).ravel() for key in ("shift", "scale"))
    except (KeyError, TypeError, ValueError):
        raise TpsgdError("inputs= has a scaling without numbers for shift and scale") from None
    fits = len(shift) == len(scale) and len(shift) in (1, features)
    if not fits or not np.isfinite([*shift, *scale]).all() or not scale.all():
        raise TpsgdError(
            f"inputs= must have a finite shift, and a scale other than 0, for each of the "
            f"{features} features"
        )
    return tuple(shift.tolist()), tuple(scale.tolist())
