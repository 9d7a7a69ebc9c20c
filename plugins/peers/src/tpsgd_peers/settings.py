"""The settings of `fit` that a peer takes by keyword."""

from collections.abc import Mapping, Sequence
from typing import Any

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.engine.settings import Settings


def peer_settings(
    function: str, keywords: Mapping[str, Any], takes: Sequence[str], **fixed: Any
) -> Settings:
    """Settings from the keywords that the caller gave, and those that the method fixes itself."""
    for name in keywords:
        if name not in takes:
            raise TpsgdError(f"{function} has no argument {name!r}: {suggestion(name, takes)}")
    return Settings.of(function, {**keywords, **fixed})
