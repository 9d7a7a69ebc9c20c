"""`RiverClassifier`: a model of streams as a classifier of river, for its pipelines and metrics."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

if find_spec("river") is None:
    raise ImportError("tpsgd.RiverClassifier needs river: pip install river")

from river import base


class RiverClassifier(base.Classifier):
    """A classifier of river that learns through a `tpsgd.OnePass` or `tpsgd.Stream`.

    Args:
        make: a function without arguments that returns a new model, so that `clone` works.

    Examples:
        >>> from functools import partial
        >>> import tpsgd
        >>> from river import compose, preprocessing
        >>> make = partial(tpsgd.OnePass, 50, solver=tpsgd.rls())
        >>> model = preprocessing.StandardScaler() | RiverClassifier(make)
        >>> for i in range(40):
        ...     model.learn_one({"a": i % 2, "b": i % 3}, "odd" if i % 2 else "even")
        >>> model.predict_one({"a": 1, "b": 0})
        'odd'
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make
        self.model = make()

    @property
    def _multiclass(self) -> bool:
        return True

    def learn_one(self, x: dict[Any, Any], y: Any) -> None:
        """Learn from a single sample."""
        self.model.learn_one(x, y)

    def predict_one(self, x: dict[Any, Any], **options: Any) -> Any:
        """The class of a single sample; None before the first was learned."""
        return self.model.predict_one(x)

    def predict_proba_one(self, x: dict[Any, Any], **options: Any) -> dict[Any, float]:
        """The probability of each class for a single sample."""
        return self.model.predict_proba_one(x)
