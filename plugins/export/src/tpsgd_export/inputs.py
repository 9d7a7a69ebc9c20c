"""What the numbers of a sample mean: columns, how they are scaled, and the names of the classes."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd_export.recipe import StepRecipe

BYTES = 255.0  # what pixels that are stored as bytes are divided by
FEWEST_STEPS = 0.01  # of float32 beside a feature's scale: larger ones lose digits that matter
KEYS = ("shape", "vocabulary", "columns", "label", "targets", "imputation", "scaling")
METHODS = {
    "standard": "standardises them as for training",
    "minmax": "scales them as for training",
    "bytes": "divides bytes by 255, as for training",
}


@dataclass(frozen=True)
class SampleFormat:
    """Samples as they are measured, and as the model takes them: (x - shift) / scale.

    Feature i of a sample has number i modulo the count of `shift`; without a scaling both `shift`
    and `scale` are empty. `classes` are the names of classes, or of numbers.
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

    def warn_of_lost_digits(self, function: str = "net_scale") -> None:
        """Warn of features so far from 0 that float32, which the program reads, has few steps."""
        shift, scale = np.array(self.shift), np.abs(self.scale)
        steps = np.spacing(np.abs(shift).astype(np.float32))
        if (coarse := steps > FEWEST_STEPS * scale).any():
            i = int(coarse.argmax())
            name = f"'{self.columns[i]}'" if len(self.columns) == len(shift) else f"x[{i}]"
            warnings.warn(
                f"{function} takes float32 numbers, which lie {steps[i]:g} apart near"
                f" {shift[i]:.9g}, and {name} varies by about {scale[i]:.3g} there: subtract"
                " the same constant from it in the training data and, before it becomes a float, on"
                " the device",
                stacklevel=3,
            )


def read_inputs(
    inputs: Mapping[str, Any] | None, classes: Sequence[str] | None, recipe: StepRecipe
) -> SampleFormat:
    """`Data.inputs` and `Data.classes` for a net; what does not fit it is refused."""
    inputs, features = inputs or {}, recipe.shape[-1]
    if not isinstance(inputs, Mapping):
        raise TpsgdError("inputs= takes data.inputs, what a sample looks like")
    if unknown := [key for key in inputs if key not in KEYS]:
        raise TpsgdError(f"inputs= has {unknown[0]!r}; what is read of it is {', '.join(KEYS)}")
    columns = tuple(map(str, inputs.get("columns") or ()))
    if columns and len(columns) != features:
        raise TpsgdError(f"inputs= has {len(columns)} columns, and the net {features} inputs")
    of_numbers = recipe.targets is not None
    names = tuple(map(str, (inputs.get("targets") if of_numbers else classes) or ()))
    count = recipe.classes if of_numbers else max(2, recipe.classes)
    if names and len(names) != count:
        what = "numbers" if of_numbers else "classes"
        raise TpsgdError(f"classes= has {len(names)} names, and the net {count} {what}")
    scaling = inputs.get("scaling") or {}
    method = str(scaling.get("method", ""))
    return SampleFormat(columns, *_scaling(scaling, features), names, method)


def _scaling(
    scaling: Mapping[str, Any], features: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if scaling.get("method") == "bytes":
        return (0.0,), (BYTES,)
    if "shift" not in scaling:
        return (), ()
    try:
        shift, scale = (np.array(scaling[key], np.float64).ravel() for key in ("shift", "scale"))
    except (KeyError, OverflowError, TypeError, ValueError):
        raise TpsgdError("inputs= has a scaling without numbers for shift and scale") from None
    fits = len(shift) == len(scale) and len(shift) in (1, features)
    with np.errstate(over="ignore"):
        rounded = [values.astype(np.float32) for values in (shift, scale)]
    if not fits or not np.isfinite(rounded).all() or not rounded[1].all():
        raise TpsgdError(
            f"inputs= must have a finite shift, and a scale other than 0, for each of the "
            f"{features} features"
        )
    return tuple(shift.tolist()), tuple(scale.tolist())
