"""The two files of an adaptor: its tensors, and their description, `adaptor.json`.

They describe the backbone by a hash of its weights and by the output of its taps for one sample of
reproducible noise. Other weights are accepted, with a warning, only if the output is nearly the
same (for example of the same backbone in int8).
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import fingerprint, pooled
from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.projections import uniform
from tpsgd.saved import folder as folders
from tpsgd.saved.folder import FolderFormat

ADAPTOR = FolderFormat("adaptor", 2)
ALIKE = 0.1  # relative difference of features up to which a backbone counts as the same one


def write(
    folder: Path, backbone: Backbone, description: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """Write both files, each completely or not at all.

    `description` has the `taps` (each with its `module` and `shape`), the `shape` of a sample, and
    anything else that JSON can hold.
    """
    tensors = tensors | _reference_outputs(backbone, description)
    description = {
        "backbone": backbone.name,
        "backbone_sha256": fingerprint(backbone.model),
        "preprocessing": {"mean": backbone.mean, "std": backbone.std},
        **description,
    }
    return folders.write(ADAPTOR, folder, description, tensors)


def check_backbone(
    folder: Any, backbone: Backbone, description: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Refuse a backbone whose taps give other features than the adaptor was trained on."""
    adaptor = f"the adaptor in {folder}"
    modules = {tap: entry["module"] for tap, entry in description["taps"].items()}
    if not modules.items() <= backbone.taps.items():
        taps = f"this backbone has the taps {backbone.taps}"
        raise TpsgdError(f"{adaptor} reads the taps {modules}, {taps}")
    trained = {k: tuple(v) for k, v in description["preprocessing"].items()}
    if trained != (scale := {"mean": backbone.mean, "std": backbone.std}):
        images = f"images scaled by {trained}, the backbone scales them by {scale}"
        raise TpsgdError(f"{adaptor} was trained on {images}")
    expected = {tap: tuple(entry["shape"]) for tap, entry in description["taps"].items()}
    shapes = backbone.shapes(torch.zeros(1, *description["shape"]), list(expected))
    if shapes != expected:
        taps = f"taps of shape {expected}, this backbone's have {shapes}"
        raise TpsgdError(f"{adaptor} was trained on {taps}: it is another one")
    gaps = []
    for name, output in _reference_outputs(backbone, description).items():
        stored = tensors[name].to(output.device)
        gaps.append(float((output - stored).norm() / stored.norm().clamp(min=1e-12)))
    if not all(gap <= ALIKE for gap in gaps):
        gap = f"the features of this one differ by {max(gaps):.0%} from those it was trained on"
        raise TpsgdError(f"{adaptor} belongs to another backbone: {gap}")
    if description.get("backbone_sha256") != fingerprint(backbone.model):
        warnings.warn(
            f"the backbone's weights are not those that {adaptor} was trained on, but its features "
            f"are within {max(gaps):.1%} of them",
            stacklevel=3,
        )


def _reference_outputs(backbone: Backbone, description: dict[str, Any]) -> dict[str, Tensor]:
    """Each tap's output for noise that is the same on every machine, averaged over space."""
    x = uniform(3**-0.5)(tuple(description["shape"]), 1, Key(0, 0), "cpu").abs()  # from 0 to 1
    outputs = backbone(x.to(backbone.device), list(description["taps"]))
    return {f"probe.{i}": pooled(y)[0] for i, y in enumerate(outputs.values())}
