"""Samples scaled as those that a model was trained on, by what it was saved with."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tpsgd.errors import TpsgdError
from tpsgd.nets.padded import Padded


def scaled(x: Any, scaling: Mapping[str, Any]) -> Any:
    """(x - shift) / scale of each feature, in float32; the padding of series stays 0."""
    if isinstance(x, Padded):
        is_step = torch.arange(x.data.shape[1]) < x.lengths.unsqueeze(1)
        data = torch.as_tensor(scaled(x.data, scaling))
        return Padded(data * is_step.view(*is_step.shape, *[1] * (x.dim() - 2)), x.lengths)
    try:
        shift, scale = (np.array(scaling[key], np.float32) for key in ("shift", "scale"))
        return np.require((np.asarray(x) - shift) / scale, np.float32, ["C", "W"])
    except (TypeError, ValueError) as error:
        raise TpsgdError(
            f"samples of shape {tuple(x.shape[1:])} cannot be scaled as those that the"
            f" model was trained on ({error})."
        ) from error
