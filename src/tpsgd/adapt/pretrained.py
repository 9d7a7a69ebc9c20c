"""Backbones by name: a VGG or a ResNet with a file of weights, or one of the caller's own."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from tpsgd.adapt import weights
from tpsgd.adapt.backbone import IMAGENET, Backbone
from tpsgd.errors import TpsgdError
from tpsgd.zoo import vgg
from tpsgd.zoo.resnet import resnet

NAMES = ("vgg11", "vgg16", "vgg11-bn", "vgg16-bn", "resnet18", "resnet34")


def backbone(
    name: str,
    file: str | Path | None = None,
    taps: tuple[str, ...] = (),
) -> Backbone:
    """A backbone by its name, with the weights in a file.

    Args:
        name: vgg11, vgg16 (taps pool1 to pool5), either with -bn; resnet18, resnet34 (taps layer1
            to layer4); or `FILE.py:FUNCTION`, which returns a `Backbone` or any `nn.Module`.
        file: `.pth`, `.safetensors` or `.npz`, with torchvision's names; the classifier's weights
            may be there or not. vgg16's are looked for in `$TPSGD_DATA/vgg16` if none are named.
        taps: submodules to read from, where the function returns a plain module.
    """
    if ".py:" in name:
        return _own(name, file, taps)
    if name not in NAMES:
        raise TpsgdError(
            f"unknown backbone {name!r}: choose from {', '.join(NAMES)}, or give FILE.py:FUNCTION"
        )
    model, known, parts = _resnet(name) if name.startswith("resnet") else _vgg(name)
    weights.put(model, weights.load(_there(name, file)), needed=parts)
    mean, std = IMAGENET
    found = Backbone(model, known, mean=mean, std=std, name=name)
    for tap in taps:
        found.path(tap)
    return found


def _vgg(name: str) -> tuple[nn.Module, dict[str, str], tuple[str, ...]]:
    depth, norm = int(name.removeprefix("vgg").removesuffix("-bn")), name.endswith("-bn")
    whole = vgg.vgg(depth, (3, 32, 32), 2, dense=(), batch_norm=norm)
    model = nn.Sequential()
    model.add_module("features", whole.get_submodule("features"))
    return model, vgg.taps(depth, norm), ("features",)


def _resnet(name: str) -> tuple[nn.Module, dict[str, str], tuple[str, ...]]:
    whole = resnet(int(name.removeprefix("resnet")), (3, 224, 224), 2)
    model = nn.Sequential()
    for part, module in whole.named_children():
        if part in ("avgpool", "flatten", "fc"):
            break
        model.add_module(part, module)
    taps = {part: part for part in ("layer1", "layer2", "layer3", "layer4")}
    return model, taps, ("conv1", "bn1", *taps)


def _there(name: str, file: str | Path | None) -> Path:
    """The file of weights, which for vgg16 may lie among the data sets."""
    if file is not None:
        return Path(file).expanduser()
    place = Path(os.environ.get("TPSGD_DATA", "")) / name / f"{name}_features.npz"
    if "TPSGD_DATA" in os.environ and place.is_file():
        return place
    raise TpsgdError(
        f"{name} needs a file of weights: .pth, .safetensors or .npz with torchvision's names, "
        "such as those listed at docs.pytorch.org/vision/stable/models"
    )


def _own(spec: str, file: str | Path | None, taps: tuple[str, ...]) -> Backbone:
    """What a function of the caller's returns, with weights from a file if one is named."""
    from tpsgd.data.user_files import call

    path, _, function = spec.rpartition(":")
    if not Path(path).expanduser().is_file():
        raise TpsgdError(f"there is no {path}; check the name, or give the full path")
    made: Any = call(Path(path).expanduser(), function)
    model = made.model if isinstance(made, Backbone) else made
    if not isinstance(model, nn.Module):
        raise TpsgdError(
            f"{spec} must return an nn.Module or an adapt.Backbone, returned a "
            f"{type(made).__name__}"
        )
    if file is not None:
        weights.put(model, weights.load(file))
    if isinstance(made, Backbone):
        return made
    if not taps:
        raise TpsgdError(f"{spec} returns a plain module: name the submodule to read from (taps)")
    mean, std = IMAGENET
    return Backbone(model, taps, mean=mean, std=std, name=function)
