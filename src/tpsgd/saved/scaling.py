"""Samples filled and scaled as those that a model was trained on, by what it was saved with."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded


def as_trained(x: Any, inputs: Mapping[str, Any]) -> Any:
    """Samples with blanks (NaN) filled and features scaled as `Data.inputs` says."""
    imputation, scaling = inputs.get("imputation") or {}, inputs.get("scaling") or {}
    x = filled(x, imputation) if imputation else x
    return scaled(x, scaling) if "shift" in scaling else x


def filled(x: Any, imputation: Mapping[str, Any]) -> Any:
    """x in float32, with the value of its feature wherever it is NaN."""

    def fill(data: Any) -> Any:
        values = np.array(imputation["values"], np.float32)
        return np.require(np.where(np.isnan(data), values, data), np.float32, ["C", "W"])

    return _of_features(fill, x)


def scaled(x: Any, scaling: Mapping[str, Any]) -> Any:
    """(x - shift) / scale of each feature, in float32; the padding of series stays 0."""

    def scale(data: Any) -> Any:
        shift, factor = (np.array(scaling[key], np.float32) for key in ("shift", "scale"))
        return np.require((data - shift) / factor, np.float32, ["C", "W"])

    return _of_features(scale, x)


def _of_features(function: Callable[[Any], Any], x: Any) -> Any:
    """A function of an array applied to samples; the padding of series stays 0."""
    if isinstance(x, Padded):
        is_step = torch.arange(x.data.shape[1]) < x.lengths.unsqueeze(1)
        data = torch.as_tensor(_of_features(function, x.data))
        return Padded(data * is_step.view(*is_step.shape, *[1] * (x.dim() - 2)), x.lengths)
    try:
        return function(np.asarray(x))
    except (KeyError, TypeError, ValueError) as error:
        raise TpsgdError(
            f"samples of shape {tuple(x.shape[1:])} cannot be scaled as those that the"
            f" model was trained on ({error})."
        ) from error
