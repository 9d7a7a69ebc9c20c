"""Backbones by name: a VGG or a ResNet with a file of weights, or a function in a Python file."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.files import call_function, is_function
from tpsgd.zoo import vgg
from tpsgd.zoo.resnet import resnet
from tpsgd_adapt import weights
from tpsgd_adapt.backbone import IMAGENET, Backbone

NAMES = ("vgg11", "vgg16", "vgg11-bn", "vgg16-bn", "resnet18", "resnet34")
MEAN, STD = IMAGENET


def backbone(name: str, file: str | Path | None = None, taps: tuple[str, ...] = ()) -> Backbone:
    """A backbone by its name, with the weights in a file.

    Args:
        name: vgg11, vgg16 (taps pool1 to pool5), either with -bn; resnet18, resnet34 (taps layer1
            to layer4); or `FILE.py:FUNCTION`, which returns a `Backbone` or any `nn.Module`, whose
            images then get ImageNet's mean and standard deviation.
        file: `.pth`, `.safetensors` or `.npz`, with torchvision's names; the classifier's weights
            may be missing. If `file` is missing, vgg16's are taken from `$TPSGD_DATA/vgg16`.
        taps: submodules to read from, if the function returns a plain module.
    """
    if is_function(name):
        return _from_function(name, file, taps)
    if name not in NAMES:
        hint = suggestion(name, NAMES)
        raise TpsgdError(f"unknown backbone {name!r}: {hint} (or give FILE.py:FUNCTION)")
    model, paths = _body(name)
    needed = tuple(child for child, module in model.named_children() if list(module.parameters()))
    weights.put(model, weights.load(_weights_file(name, file)), needed)
    frozen = Backbone(model, paths, mean=MEAN, std=STD, name=name)
    for tap in taps:
        frozen.path(tap)
    return frozen


def _body(name: str) -> tuple[nn.Module, dict[str, str]]:
    """The net without its classifier, and the submodules of its taps."""
    if name.startswith("resnet"):
        whole, last = resnet(int(name.removeprefix("resnet")), (3, 224, 224), 2), "layer4"
        taps = {f"layer{i}": f"layer{i}" for i in range(1, 5)}
    else:
        depth, norm = int(name.removeprefix("vgg").removesuffix("-bn")), name.endswith("-bn")
        whole, last = vgg.vgg(depth, (3, 32, 32), 2, dense=(), batch_norm=norm), "features"
        taps = vgg.taps(depth, norm)
    body = nn.Sequential()
    for child, module in whole.named_children():
        body.add_module(child, module)
        if child == last:
            break
    return body, taps


def _weights_file(name: str, file: str | Path | None) -> Path:
    """The file of weights; that of vgg16 may lie among the data sets."""
    if file is not None:
        return Path(file).expanduser()
    stored = Path(os.environ.get("TPSGD_DATA", "")) / name / f"{name}_features.npz"
    if "TPSGD_DATA" in os.environ and stored.is_file():
        return stored
    kinds = ".pth, .safetensors or .npz with torchvision's names"
    raise TpsgdError(f"{name} needs a file of weights, {kinds}; see pytorch.org/vision")


def _from_function(spec: str, file: str | Path | None, taps: tuple[str, ...]) -> Backbone:
    """The module that a function in a Python file returns, with weights if a file is named."""
    result: Any = call_function(spec)
    model = result.model if isinstance(result, Backbone) else result
    if not isinstance(model, nn.Module):
        kind = type(result).__name__
        raise TpsgdError(f"{spec} must return an nn.Module or Backbone, got {kind}")
    if file is not None:
        weights.put(model, weights.load(file))
    if isinstance(result, Backbone):
        return result
    if not taps:
        raise TpsgdError(f"{spec} returns a plain module: name the submodule to read from (taps)")
    return Backbone(model, taps, mean=MEAN, std=STD, name=spec.rpartition(":")[2])
