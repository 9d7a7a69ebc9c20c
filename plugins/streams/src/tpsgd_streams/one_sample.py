"""`learn_one` and `predict_one`: a model of streams with river's methods."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.engine.sources.inputs import tensor


class OneSample(ABC):
    """River's methods for a model that learns by `partial_fit`.

    A sample is a dictionary of numbers, as in river, or an array. The names of the first sample
    settle the order of the numbers; one that is missing later counts as 0.
    """

    samples: int  # that came
    _names: tuple[Any, ...] | None = None  # of the numbers of a sample

    @property
    @abstractmethod
    def classes(self) -> tuple[Any, ...]:
        """The names of the classes."""

    @abstractmethod
    def partial_fit(self, x: Any, y: Any) -> Any:
        """Learn from some samples."""

    @abstractmethod
    def predict(self, x: Any) -> list[Any]:
        """The class of each sample."""

    @abstractmethod
    def probabilities(self, x: Any) -> Tensor:
        """Each sample's probabilities of the classes."""

    def learn_one(self, x: Any, y: Any) -> None:
        """Learn from a single sample."""
        before = self._names
        try:
            self.partial_fit(self._row(x), [y])
        except BaseException:
            self._names = before
            raise

    def predict_one(self, x: Any) -> Any:
        """The class of a single sample; None before the first was learned."""
        return self.predict(self._row(x))[0] if self.samples else None

    def predict_proba_one(self, x: Any) -> dict[Any, float]:
        """The probability of each class for a single sample; {} before the first was learned."""
        if not self.samples:
            return {}
        row = self.probabilities(self._row(x))[0]
        return dict(zip(self.classes, row.tolist(), strict=True))

    def _row(self, x: Any) -> Tensor:
        """A sample as a batch of one."""
        if not isinstance(x, Mapping):
            return tensor(x, "x")[None]
        names = tuple(x) if self._names is None else self._names
        if more := [name for name in x if name not in names]:
            shown = shortened(", ".join(map(repr, names)))
            raise TpsgdError(f"{more[0]!r} was not in the first sample, which had {shown}")
        row = torch.tensor([[_number(name, x.get(name, 0.0)) for name in names]])
        self._names = names
        return row


def _number(name: Any, value: Any) -> float:
    """One of the numbers of a sample."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        got = f"{shortened(repr(value))} for {name!r}"
        raise TpsgdError(f"the values of a sample must be numbers, got {got}") from None
