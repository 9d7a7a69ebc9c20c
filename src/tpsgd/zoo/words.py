"""Models by a word: `mlp:256,256`, `cnn:16x5,16x5`, `vgg:11`, `vit:8x192`, `rnn:512,512+256`.

A function's word is `FILE.py:FUNCTION`. Recurrent words are `rnn`, or `birnn` for bidirectional
layers: leaky cells without a prefix, the paper's cells with `paper-`, an `nn.RNN` with `torch-`;
and `lru`, diagonal recurrences that remember for long. The layers' sizes follow, and after a `+`
the widths of a perceptron before the classifier.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.files import is_function, load_function
from tpsgd.common.units import size
from tpsgd.engine.device import available
from tpsgd.nets import inits
from tpsgd.nets.cuts.leaves import is_chain
from tpsgd.nets.cuts.split import split
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.recurrent import Recurrent
from tpsgd.zoo import vgg
from tpsgd.zoo.resnet import resnet
from tpsgd.zoo.vit import vit

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
CELLS = ("rnn", "birnn", "paper-rnn", "paper-birnn", "torch-rnn", "torch-birnn", "lru")
NUMBER = r"[1-9]\d{0,8}"
NUMBERS = rf"{NUMBER}(,{NUMBER})*"
LAYERS = rf"{NUMBER}x{NUMBER}(,{NUMBER}x{NUMBER})*"
UNITS = "units like rnn:512 or rnn:512,512+256 (a perceptron after the +)"
FORMS = {  # the pattern of the text after the colon, and an example
    "mlp": (NUMBERS, "widths like mlp:256,128"),
    "cnn": (LAYERS, "layers like cnn:16x5 (filters x kernel)"),
    "vgg": ("|".join(map(str, vgg.LAYERS)), "vgg:8, vgg:11 or vgg:16"),
    "resnet": ("18|34", "resnet:18 or resnet:34"),
    "vit": (rf"{NUMBER}x{NUMBER}", "layers and width like vit:8x192"),
    **dict.fromkeys(CELLS, (rf"{NUMBERS}(\+{NUMBERS})?", UNITS)),
}


def factory(
    word: str,
    shape: tuple[int, ...],
    classes: int,
    activation: str = "leaky-relu",
    *,
    tokens: int | None = None,
    init: str | None = None,
    leak: float | None = None,
    loss_at: str | None = None,
) -> Factory:
    """A function that makes a fresh model for samples of this shape.

    Args:
        word: `mlp:...`, `cnn:...`, `vgg:11` (a norm after every layer but the last), `vit:8x192`
            (layers, width), `rnn:...`, `lru:...` and other recurrent words, or `FILE.py:FUNCTION`.
        shape: the shape of one sample; (steps, features) for sequences, (steps,) for tokens.
        classes: the number of classes, or of numbers to predict.
        activation: of an MLP, a CNN or the perceptron after recurrent layers.
        tokens: the size of the vocabulary, if samples are tokens.
        init: initial weights of recurrent cells, a name in `tpsgd.inits`.
        leak: of `rnn:` and `birnn:`, as for `tpsgd.Recurrent`.
        loss_at: of `lru:`, as for `Recurrent.diagonal`: mean, last or every.

    Examples:
        >>> factory("mlp:8", (1, 4, 4), 3)()
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=16, out_features=8, bias=True)
          (2): LeakyReLU(negative_slope=0.01)
          (3): Linear(in_features=8, out_features=3, bias=True)
        )
        >>> [type(m).__name__ for m in factory("rnn:8,8+4", (28, 28), 3)()]
        ['Recurrent', 'Recurrent', 'Linear', 'LeakyReLU', 'Linear']
    """
    if activation not in ACTIVATIONS:
        hint = suggestion(activation, ACTIVATIONS)
        raise TpsgdError(f"unknown activation {activation!r}: {hint}")
    act = ACTIVATIONS[activation]
    kind, _, text = word.partition(":")
    if kind in FORMS and not re.fullmatch(FORMS[kind][0], text, re.ASCII):
        raise TpsgdError(f"cannot read {word!r}: write {FORMS[kind][1]}")
    if loss_at is not None and kind != "lru":
        raise TpsgdError(f"loss_at is for diagonal recurrences such as lru:256, not for {word}")
    if kind in CELLS:
        sizes, widths = map(_numbers, (text + "+").split("+")[:2])
        cell = _cell(word, kind, init, leak, {"loss_at": loss_at} if loss_at else {})
        inputs = _features(word, shape, tokens)
        _check_memory(word, [inputs, *sizes, *widths, classes], squares=True)
        return lambda: rnn(cell, inputs, sizes, widths, classes, act)
    if init is not None or leak is not None:
        raise TpsgdError(f"init and leak are for recurrent models such as rnn:512, not for {word}")
    if kind in FORMS and tokens is not None:
        raise TpsgdError(f"{word} cannot read tokens, numbers of words: choose rnn:512")
    if kind == "mlp":
        widths = _numbers(text)
        _check_memory(word, [math.prod(shape), *widths, classes])
        return lambda: mlp(shape, widths, classes, act)
    if kind == "cnn":
        layers = [(int(n), int(k)) for n, k in (layer.split("x") for layer in text.split(","))]
        _check_images(word, shape, layers)
        _check_memory(word, [shape[0], *(n for n, _ in layers), classes], layers[0][1] ** 2)
        return lambda: cnn(shape, layers, classes, act)
    if kind in ("vgg", "resnet"):
        if activation not in ("leaky-relu", "relu"):  # the first is the default of other models
            raise TpsgdError(f"{word} has ReLUs: leave the activation {activation!r} out")
        if kind == "resnet":
            return lambda: resnet(int(text), shape, classes, small=max(shape[1:], default=0) < 64)
        return lambda: vgg.vgg(int(text), shape, classes, batch_norm=True, dense_norm=True)
    if kind == "vit":
        depth, width = map(int, text.split("x"))
        _check_memory(word, [width, width], times=8 * depth)
        return lambda: vit(shape, classes, depth=depth, width=width)
    if is_function(word):
        return from_file(word)
    words = "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), vgg:11, vit:8x192, rnn:512 or "
    hint = f"{suggestion(kind, FORMS)}; write {words}lru:256 (units), FILE.py:FUNCTION"
    raise TpsgdError(f"unknown model {word!r}: {hint}")


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model has a recurrent layer that the library can train."""
    kinds = (SequenceLayer, nn.RNN) if is_chain(model) else SequenceLayer
    return any(isinstance(m, kinds) for m in model.modules())


def mlp(
    shape: tuple[int, ...], widths: list[int], classes: int, activation: type[nn.Module]
) -> nn.Sequential:
    """Flatten, then linear layers with an activation after each except the last."""
    return nn.Sequential(nn.Flatten(), *_perceptron(math.prod(shape), widths, classes, activation))


def rnn(
    cell: partial[nn.Module],
    inputs: int,
    sizes: list[int],
    widths: list[int],
    classes: int,
    activation: type[nn.Module],
) -> nn.Sequential:
    """Recurrent layers, the last of which returns its last state, then a perceptron."""
    directions = 1 + cell.keywords.get("bidirectional", False)
    if cell.func is nn.RNN and len(set(sizes)) == 1:
        layers = [cell(inputs, sizes[0], len(sizes))]
    else:
        layers = []
        for number, hidden in enumerate(sizes, 1):
            states = {} if cell.func is nn.RNN else {"sequence": number < len(sizes)}
            layers.append(cell(inputs, hidden, **states))
            inputs = hidden * directions
    units = sizes[-1] * directions
    return nn.Sequential(*layers, *_perceptron(units, widths, classes, activation))


def reservoir(make: Factory) -> Factory:
    """A factory of reservoirs for a model: leaky layers of the same sizes, and a linear head.

    A perceptron between the recurrent layers and the head is left out.
    """
    blocks = split(make())
    layers: list[Any] = [b.layer for b in blocks if isinstance(b.layer, SequenceLayer)]
    head = blocks[-1].layer
    if not layers or blocks[0].layer is not layers[0] or not isinstance(head, nn.Linear):
        models = "models that begin with a recurrent layer and end with an nn.Linear"
        raise TpsgdError(f"reservoir is a control for {models}, such as rnn:512")
    units, classes = layers[-1].hidden * (1 + layers[-1].bidirectional), head.out_features
    first = inits.reservoir(x=0.3 * min(1.0, 32 / layers[0].inputs))

    def build() -> nn.Module:
        copies = []
        for layer in layers:
            options: dict[str, Any] = {"init": first if layer is layers[0] else None}
            options |= {"sequence": layer is not layers[-1], "bidirectional": layer.bidirectional}
            options |= {"leak": layer.leak} if getattr(layer, "leak", 1.0) < 1 else {}
            copies.append(Recurrent(layer.inputs, layer.hidden, **options))
        return nn.Sequential(*copies, nn.Linear(units, classes))

    return build


def _perceptron(
    inputs: int, widths: list[int], classes: int, activation: type[nn.Module]
) -> list[nn.Module]:
    """Linear layers with an activation after each except the last."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), activation()]
        inputs = width
    return [*layers, nn.Linear(inputs, classes)]


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
    """The factory that `FILE.py:FUNCTION` names."""
    function = load_function(word)

    def build() -> nn.Module:
        if not isinstance(model := function(), nn.Module):
            raise TpsgdError(f"{word} returned a {type(model).__name__}, not an nn.Module")
        return model

    return build


def _check_memory(word: str, sizes: list[int], times: int = 1, squares: bool = False) -> None:
    """Refuse layers whose weights alone, about 4 bytes for each pair of units, exceed the memory.

    `squares`: a layer's units are also connected with one another.
    """
    nbytes = 4 * times * sum(a * b + squares * b * b for a, b in pairwise(sizes))
    if nbytes > (free := available(torch.device("cpu"))):
        weights = f"weights of {size(nbytes)}, and {size(free)} of memory are free"
        raise TpsgdError(f"{word} has {weights}: choose smaller layers")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _cell(
    word: str, kind: str, init: str | None, leak: float | None, of_diagonal: dict[str, Any]
) -> partial[nn.Module]:
    """A function that makes a recurrent layer: of inputs and units."""
    style = kind.rpartition("-")[0]
    if kind == "lru" and not (init is leak is None):
        raise TpsgdError(f"init and leak are not for {word}, whose states keep their own pace")
    if style == "torch" and init is not None:
        raise TpsgdError(f"init is not for {word}, which begins as torch has it")
    if style and leak is not None:
        raise TpsgdError(f"leak is not for {word}, whose cells do not leak")
    if kind == "lru":
        return partial(Recurrent.diagonal, **of_diagonal)
    options: dict[str, Any] = {"bidirectional": kind.endswith("birnn")}
    options |= {} if init is None else {"init": inits.named(init)}
    options |= {} if leak is None else {"leak": leak}
    if style == "torch":
        return partial(nn.RNN, batch_first=True, **options)
    return partial(Recurrent.paper if style == "paper" else Recurrent, **options)


def _features(word: str, shape: tuple[int, ...], tokens: int | None) -> int:
    """The number of features of a time step; for tokens, the size of the vocabulary."""
    if tokens is not None and len(shape) == 1:
        return tokens
    if len(shape) == 2 and tokens is None:
        return shape[1]
    hints = {
        1: "; x[..., None] makes each number a time step",
        3: "; seq-mnist-rows has MNIST's images as sequences of rows",
    }
    problem = f"not samples of shape {shape}{hints.get(len(shape), '')}"
    raise TpsgdError(f"{word} needs sequences (steps, features), {problem}")


def _check_images(word: str, shape: tuple[int, ...], layers: list[tuple[int, int]]) -> None:
    if len(shape) != 3:
        raise TpsgdError(f"{word} needs images (channels, height, width), not {shape}")
    if shape[2] <= 4 < shape[0]:
        problem = f"images of shape {shape} look like (height, width, channels)"
        raise TpsgdError(f"{problem}; {word} needs channels first: x.transpose(0, 3, 1, 2)")
    if min(shape[1:]) <= sum(kernel - 1 for _, kernel in layers):
        raise TpsgdError(f"{word} leaves nothing of images of {shape[1]} x {shape[2]} pixels")
