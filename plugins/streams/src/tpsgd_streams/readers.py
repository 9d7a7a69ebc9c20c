"""How samples reach the nets of a stream.

A model with a method `stream_reader` says so itself: an adaptor's layers read features of its taps.
"""

from typing import Any

import numpy as np
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import all_outputs, evaluate, form_for
from tpsgd.engine.sources.inputs import check_values, inputs, tensor
from tpsgd.nets.model_inputs import ModelInputs

EXAMPLES = 2  # samples that show whether a model can take them


class ModelReader:
    """Samples of a model that learns as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.nets = model, [model]  # the nets that learn
        self.names: list[str] | None = None  # of the classes, if the model has any
        self.form: Any = None  # of the samples so far: type, shape, number format, several inputs

    def inputs(self, x: Any) -> list[Any]:
        """What each net sees of some samples."""
        return [x]

    def check(self, x: Any) -> None:
        """Refuse samples that the model cannot take; one of a new shape goes through it."""
        check_values(x, form_for(self.model, EXAMPLES))
        forms = x.forms if isinstance(x, ModelInputs) else {}
        form = type(x), x.shape[1:], x.dtype, forms
        if form != self.form:
            all_outputs(self.model, x[:EXAMPLES], EXAMPLES)
            self.form = form

    def outputs(self, x: Any, batch_size: int) -> Tensor:
        """One number per class for each sample."""
        return all_outputs(self.model, x, batch_size)

    def evaluate(self, data: Any) -> float:
        """The share of samples whose rows of labels are all predicted."""
        return evaluate(self.model, data)

    def add_class(self, name: str) -> None:
        """Tell the model the name of a new class, if it has names."""


def samples_of(x: Any, y: Any) -> tuple[Any, Any]:
    """Samples and labels; a single sample as one of several."""
    if y is None:
        raise TpsgdError("y must be the labels of x, got None: a stream learns from labels")
    single = isinstance(y, str) or not hasattr(y, "__len__") or getattr(y, "ndim", 1) == 0
    if single:
        if isinstance(x, dict):
            x = {name: tensor(t, "x")[None] for name, t in x.items()}
        else:
            x = tuple(tensor(t, "x")[None] for t in (x if isinstance(x, tuple) else (x,)))
            x = x if len(x) > 1 else x[0]
        y = y.reshape(1) if isinstance(y, (Tensor, np.ndarray)) else [y]
    x = inputs(x)
    if len(x) != len(y):
        raise TpsgdError(f"x has {len(x):,} samples but y has {len(y):,} labels")
    return x, y
