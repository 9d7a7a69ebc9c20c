"""The settings of `fit` that a peer takes by keyword."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.loaders import first_pair
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.targets import refuse_all_but_classes


def peer_settings(
    function: str, keywords: Mapping[str, Any], takes: Sequence[str], **fixed: Any
) -> Settings:
    """Settings from the keywords that the caller gave, and those that the method fixes itself."""
    for name in keywords:
        if name not in takes:
            raise TpsgdError(f"{function} has no argument {name!r}: {suggestion(name, takes)}")
    return Settings.of(function, {**keywords, **fixed})


def check_data(name: str, data: Any) -> Any:
    """A few samples; refused if they are several inputs, or labels are not one class for each."""
    samples, target = first_pair(data, None)
    refuse_all_but_classes(name, target)
    if isinstance(samples, ModelInputs):
        raise TpsgdError(f"{name} needs samples of one tensor, got several inputs: take tpsgd.fit")
    return samples
