"""Models by a word: `mlp:256,256`, `cnn:16x5,16x5`, or `path.py:factory`."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from .errors import TpsgdError

Factory = Callable[[], nn.Module]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "leaky-relu": nn.LeakyReLU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
}


def factory(
    word: str, shape: tuple[int, ...], classes: int, activation: str = "leaky-relu"
) -> Factory:
    """A function that makes a fresh model for samples of this shape.

    Examples:
        >>> factory("mlp:8", (1, 4, 4), 3)()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=16, out_features=8, bias=True)
          (2): LeakyReLU(negative_slope=0.01)
          (3): Linear(in_features=8, out_features=3, bias=True)
        )
    """
    if activation not in ACTIVATIONS:
        raise TpsgdError(f"unknown activation {activation!r}: choose {', '.join(ACTIVATIONS)}")
    act = ACTIVATIONS[activation]
    kind, _, rest = word.partition(":")
    if kind == "mlp":
        widths = _numbers(word, rest)
        return lambda: mlp(shape, widths, classes, act)
    if kind == "cnn":
        layers = [_layer(word, part) for part in rest.split(",")]
        if len(shape) != 3:
            raise TpsgdError(f"{word} needs images (channels, height, width), not {shape}")
        _check_sizes(word, shape, layers)
        return lambda: cnn(shape, layers, classes, act)
    if word.rpartition(":")[0].endswith(".py"):
        return from_file(word)
    raise TpsgdError(
        f"unknown model {word!r}: write mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel) "
        "or path.py:factory"
    )


def mlp(
    shape: tuple[int, ...], widths: list[int], classes: int, activation: type[nn.Module]
) -> nn.Sequential:
    """Flatten, then linear layers with an activation after each but the last."""
    inputs = 1
    for n in shape:
        inputs *= n
    layers: list[nn.Module] = [nn.Flatten()]
    for width in widths:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def cnn(
    shape: tuple[int, ...],
    layers: list[tuple[int, int]],
    classes: int,
    activation: type[nn.Module],
) -> nn.Sequential:
    """The paper's plain CNN: convolutions with stride 1 and no padding, then one linear layer."""
    channels, height, width = shape
    modules: list[nn.Module] = []
    for filters, kernel in layers:
        modules += [nn.Conv2d(channels, filters, kernel), activation()]
        channels, height, width = filters, height - kernel + 1, width - kernel + 1
    return nn.Sequential(*modules, nn.Flatten(), nn.Linear(channels * height * width, classes))


def from_file(word: str) -> Factory:
    """The function `name` of a Python file, given as `path.py:name`."""
    path_text, _, name = word.rpartition(":")
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise TpsgdError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"tpsgd_model_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look themselves up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TpsgdError(f"{path} does not run: {type(error).__name__}: {error}") from error
    made = getattr(module, name, None)
    if not callable(made):
        raise TpsgdError(f"{path} has no function {name!r}")

    def build() -> nn.Module:
        model = made()
        if not isinstance(model, nn.Module):
            raise TpsgdError(f"{word} gave a {type(model).__name__}, not an nn.Module")
        return model

    return build


def _numbers(word: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        numbers = [0]
    if any(n < 1 for n in numbers):
        raise TpsgdError(f"cannot read {word!r}: write widths like mlp:256,128")
    return numbers


def _layer(word: str, text: str) -> tuple[int, int]:
    filters, _, kernel = text.partition("x")
    try:
        layer = int(filters), int(kernel or 3)
    except ValueError:
        layer = 0, 0
    if min(layer) < 1:
        raise TpsgdError(
            f"cannot read {word!r}: write layers like cnn:16x5,16x5 (filters x kernel)"
        )
    return layer


def _check_sizes(word: str, shape: tuple[int, ...], layers: list[tuple[int, int]]) -> None:
    if shape[2] <= 4 < shape[0]:
        raise TpsgdError(
            f"images of shape {shape} look like (height, width, channels); {word} needs the "
            "channels first: x.transpose(0, 3, 1, 2)"
        )
    loss = sum(kernel - 1 for _, kernel in layers)
    if min(shape[1:]) <= loss:
        raise TpsgdError(f"{word} leaves nothing of images of {shape[1]} x {shape[2]} pixels")
