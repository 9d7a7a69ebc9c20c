"""The classes of a stream: their names, the index of each, and which labels are new."""

import math
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError, shortened
from tpsgd.engine.sources.inputs import labels, tensor
from tpsgd.losses import Loss
from tpsgd.targets import Target


class Classes:
    """The classes of a stream by their names, or by their indices if they have none."""

    def __init__(self, names: Sequence[Hashable] | None, outputs: int) -> None:
        self.named, self.names = names is not None, list(range(outputs) if names is None else names)
        if isinstance(names, str) or len(set(self.names)) < len(self.names):
            raise TpsgdError(f"classes must be a list of different names, got {names!r}")
        if len(self.names) != outputs:
            names = f"classes has {len(self.names)} names"
            raise TpsgdError(f"the model has {outputs} outputs, but {names}")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def described(self) -> list[Any] | int:
        """The names, or the number of classes if they have none."""
        return list(self.names) if self.named else len(self)

    def add(self, name: Hashable = None) -> None:
        self.names.append(self.check_new(name))

    def check_new(self, name: Any) -> Any:
        """The name of a new class, if it can be one; the next index if classes have no names."""
        _check_name(name)
        if not self.named:
            if name not in (None, len(self)):
                raise TpsgdError(
                    f"label {name!r} is not a new class: the classes have no names "
                    f"(classes=[...]), so the next one is {len(self)}"
                )
            return len(self)
        if name is None:
            raise TpsgdError("the classes have names, so a new one needs a name, too: got None")
        if name in self.names:
            raise TpsgdError(f"there is a class {name!r} already")
        if self.names and isinstance(name, str) not in {isinstance(n, str) for n in self.names}:
            raise TpsgdError(
                f"label {name!r} is a {type(name).__name__}, but the classes have names such as "
                f"{self.names[0]!r}: pass labels by their names"
            )
        return name

    def new(self, y: Any) -> list[Any]:
        """The labels in y that are not a class yet, in the order in which they come."""
        if is_rows(y):
            return []
        if self.named:
            new = dict.fromkeys(label for label in plain(y) if label not in self.names)
            checked = [self.check_new(label) for label in new]
            if len({isinstance(label, str) for label in checked}) > 1:
                shown = shortened(", ".join(map(repr, checked)))
                raise TpsgdError(f"the names of classes must be text, or none of them, got {shown}")
            return checked
        index = labels(tensor(y, "y"), None, None)
        new = sorted({int(label) for label in index.unique() if label >= len(self)})
        for expected, label in enumerate(new, len(self)):
            if label != expected:
                raise TpsgdError(
                    f"label {label} skips class {expected}: the stream has classes 0 to "
                    f"{len(self) - 1}, and new ones count on from {len(self)} without a gap; to "
                    "use labels of any kind, name the classes, Stream(model, classes=[...])"
                )
        return new

    def indices(self, y: Any, loss: Loss | None = None, new: Sequence[Any] = ()) -> Tensor:
        """The index of each label, with the new classes after the old ones; float rows, checked."""
        if is_rows(y) or not self.named:
            y = tensor(y, "y")
            return labels(y, loss, len(self) + len(new), False, Target.of(y, loss))
        position = {name: i for i, name in enumerate([*self.names, *new])}
        return torch.tensor([position[label] for label in plain(y)], dtype=torch.long)


def is_rows(y: Any) -> bool:
    """Whether labels are rows of numbers: soft labels, or yes and no for several classes."""
    if isinstance(y, Tensor):
        return y.is_floating_point()
    return isinstance(y, np.ndarray) and y.dtype.kind == "f"


def plain(y: Any) -> list[Any]:
    """Labels as Python values."""
    values = y.tolist() if isinstance(y, (Tensor, np.ndarray)) else list(y)
    for value in values:
        _check_name(value)
    return values


def _check_name(value: Any) -> None:
    """Refuse what cannot name a class: lists, and NaN (a missing label), which equals nothing."""
    if not isinstance(value, Hashable) or (isinstance(value, float) and math.isnan(value)):
        raise TpsgdError(f"a label is the name of a class, got {shortened(repr(value))}")
