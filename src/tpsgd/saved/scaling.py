"""Samples filled and scaled as those that a model was trained on, by what it was saved with."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.padded import Padded

AT_A_TIME = 1 << 12  # samples that are scaled together, in float64


def as_trained(x: Any, inputs: Mapping[str, Any]) -> Any:
    """Samples with blanks (NaN) filled and features scaled as `Data.inputs` says."""
    imputation, scaling = inputs.get("imputation") or {}, inputs.get("scaling") or {}
    x = filled(x, imputation)
    if "shift" in scaling:
        return scaled(x, scaling)
    rounded = partial(np.require, dtype=np.float32, requirements=["C", "W"])
    return _of_features(rounded, x) if imputation else x


def filled(x: Any, imputation: Mapping[str, Any]) -> Any:
    """x in float64, with the value of its feature wherever it is NaN."""
    if not imputation:
        return x

    def fill(data: Any) -> Any:
        return np.where(np.isnan(data), np.array(imputation["values"], np.float64), data)

    return _of_features(fill, x)


def scaled(x: Any, scaling: Mapping[str, Any]) -> Any:
    """(x - shift) / scale of each feature, rounded to float32; the padding of series stays 0."""

    def scale(data: Any) -> Any:
        shift, factor = (np.array(scaling[key], np.float64) for key in ("shift", "scale"))
        result = np.empty(data.shape, np.float32)
        for start in range(0, len(data), AT_A_TIME):
            piece = slice(start, start + AT_A_TIME)
            result[piece] = (data[piece] - shift) / factor
        return result

    return _of_features(scale, x)


def _of_features(function: Callable[[Any], Any], x: Any) -> Any:
    """A function of an array applied to samples; the padding of series stays 0."""
    if isinstance(x, Padded):
        is_step = torch.arange(x.data.shape[1]) < x.lengths.unsqueeze(1)
        data = torch.as_tensor(_of_features(function, x.data))
        return Padded(data * is_step.view(*is_step.shape, *[1] * (x.dim() - 2)), x.lengths)
    try:
        return function(np.asarray(x))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        shape = f"samples of shape {tuple(x.shape[1:])}"
        problem = "cannot be scaled as those that the model was trained on"
        raise TpsgdError(f"{shape} {problem} ({error}).") from error
