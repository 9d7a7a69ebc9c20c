"""What is compared: models by the accuracy of classes, or by R² where labels are numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from tpsgd import losses
from tpsgd.common.errors import TpsgdError
from tpsgd.data import Data
from tpsgd.engine.evaluate import all_outputs, evaluate, evaluate_numbers
from tpsgd.engine.restarts import make_model
from tpsgd.engine.sources.inputs import inputs, tensor
from tpsgd.targets import Target
from tpsgd.zoo.words import Factory


def as_data(data: Any, loss: Any, factory: Factory) -> Data:
    """A data set, or the arrays ((x, y), (x_test, y_test)), in the form that is trained on."""
    if isinstance(data, Data):
        name, classes, pairs = data.name, data.classes, (data.train, data.test)
    elif isinstance(data, Sequence) and [len(p) for p in data if isinstance(p, Sequence)] == [2, 2]:
        name, classes, pairs = "arrays", None, data
    else:
        raise TpsgdError(
            "data must be a data set as from tpsgd.data.load, or ((x, y), (x_test, y_test)), got a "
            f"{type(data).__name__}"
        )
    train, test = ((inputs(x), tensor(y, "y")) for x, y in pairs)
    y, loss = train[1], losses.resolve(loss)
    whole = not y.is_floating_point() and not classes
    if whole and loss is not None and loss.of_numbers and _one_output(factory, train[0]):
        train, test = ((x, y.float()) for x, y in (train, test))
    elif whole and classes is None:
        classes = tuple(map(str, range(1 + int(max(t[1].max() for t in (train, test))))))
    if isinstance(data, Data):
        return replace(data, train=train, test=test)
    return Data(name, train, test, classes or (), tuple(train[0].shape[1:]), "")


def _one_output(factory: Factory, x: Any) -> bool:
    return all_outputs(make_model(factory, 0), x[:2], 2).shape[1] == 1


def target_of(y: Tensor, loss: Any) -> Target:
    """What labels are; whole numbers of a shape are classes of positions."""
    target = Target.of(y, losses.resolve(loss))
    return target if target.rows else replace(target, positions=target.shape)


def score(model: nn.Module, data: Any, target: Target) -> float:
    """The accuracy of a model; R² if labels are numbers."""
    return (evaluate_numbers if target.numbers else evaluate)(model, data)


def in_words(text: str, numbers: bool) -> str:
    """A text about accuracy; about R² if labels are numbers.

    Examples:
        >>> in_words("test accuracy (%)", True), in_words("accuracy_std", False)
        ('test R²', 'accuracy_std')
    """
    if numbers:
        for word in ("accuracy (%)", "accuracy %", "Accuracy", "accuracy"):
            text = text.replace(word, "R²")
    return text


def as_json(values: dict[str, Any], numbers: bool) -> dict[str, Any]:
    """Plain values whose names say accuracy; r2 if labels are numbers."""
    if not numbers:
        return values
    names = (name.replace("accuracies", "r2s").replace("accuracy", "r2") for name in values)
    return dict(zip(names, values.values(), strict=True))
