"""Models that take several tensors, whose blocks may read any of them: a mask, a second input.

`ModelInputs` carries these tensors along with the activation that the blocks have computed so far.
Modules see the activation alone, unless they say that they read inputs (`reads_inputs`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError

ANSWERS = ("logits", "out", "prediction_logits", "last_hidden_state")  # of a model's output


class ModelInputs:
    """The tensors that a model takes for some samples, and the activation computed from them.

    The tensors have the names of the arguments of `forward`, or their numbers. `context` is what a
    model's first block has computed for all later ones; it is of these samples alone.

    Examples:
        >>> x = ModelInputs({"image": torch.zeros(5, 1, 8, 8), "row": torch.zeros(5, 3)})
        >>> len(x[:2]), x.shape
        (2, torch.Size([5, 1, 8, 8]))
    """

    def __init__(
        self,
        tensors: Mapping[str | int, Tensor],
        activation: Tensor | None = None,
        context: Any = None,
    ) -> None:
        self.tensors, self.activation, self.context = dict(tensors), activation, context

    @classmethod
    def of(cls, values: Mapping[Any, Any] | Sequence[Any]) -> "ModelInputs":
        """From tensors by name, or in the order of the model's arguments, of as many samples."""
        named = isinstance(values, Mapping)
        pairs: Any = values.items() if named else enumerate(values)
        tensors = {name: torch.as_tensor(value) for name, value in pairs}
        lengths = {name: len(t) if t.dim() else 0 for name, t in tensors.items()}
        if not tensors or len(set(lengths.values())) > 1 or not min(lengths.values()):
            words = ", ".join(f"{name}: {n}" for name, n in lengths.items())
            kind = "dict" if named else "tuple (samples of one input come as an array or a list)"
            raise TpsgdError(
                f"several inputs, a {kind}, must have a row for each sample, got {words or 'none'}"
            )
        return cls(tensors)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ModelInputs":
        """The same with a function applied to every tensor; without the context."""
        activation = None if self.activation is None else function(self.activation)
        return ModelInputs({k: function(t) for k, t in self.tensors.items()}, activation)

    def through(self, module: Any) -> "ModelInputs":
        """The same with a module's output as the activation."""
        y = module(self if getattr(module, "reads_inputs", False) else self.data)
        return y if isinstance(y, ModelInputs) else self.with_activation(y)

    def with_activation(self, activation: Tensor) -> "ModelInputs":
        """The same inputs with another activation."""
        return ModelInputs(self.tensors, activation, self.context)

    def without_activation(self) -> "ModelInputs":
        """The same inputs, so that the activation is not kept alive."""
        return ModelInputs(self.tensors, None, self.context)

    def get(self, name: str, number: int) -> Tensor:
        """The tensor for an argument of the model."""
        tensor = self.tensors.get(name, self.tensors.get(number))
        if tensor is None:
            given = ", ".join(map(str, self.tensors))
            raise TpsgdError(f"the model needs the input {name!r} (argument {number}), got {given}")
        return tensor

    def call(self, model: Callable[..., Any]) -> Any:
        """What a model returns for these tensors."""
        numbers = sorted(name for name in self.tensors if isinstance(name, int))
        named = {name: t for name, t in self.tensors.items() if isinstance(name, str)}
        return model(*(self.tensors[i] for i in numbers), **named)

    @property
    def forms(self) -> dict[str | int, tuple[tuple[int, ...], torch.dtype]]:
        """The shape of one sample's tensors, and their number formats."""
        return {name: (tuple(t.shape[1:]), t.dtype) for name, t in self.tensors.items()}

    @property
    def data(self) -> Tensor:
        """The activation; before there is one, the first tensor."""
        return next(iter(self.tensors.values())) if self.activation is None else self.activation

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(t.shape)}" for name, t in self.tensors.items())
        return f"ModelInputs({shapes})"

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> "ModelInputs":
        return self.map(lambda t: t[index.to(t.device) if isinstance(index, Tensor) else index])

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        own = 0 if self.activation is None else self.activation.nbytes
        return own + sum(t.nbytes for t in self.tensors.values())

    def stride(self) -> tuple[Any, ...]:
        return tuple((t.shape, t.stride()) for t in self.tensors.values())

    def dim(self) -> int:
        return self.data.dim()

    def is_floating_point(self) -> bool:
        return self.data.is_floating_point()

    def to(self, place: Any) -> "ModelInputs":
        """All tensors on a device; or the activation in another number format."""
        if isinstance(place, torch.dtype):
            return self.with_activation(self.data.to(place))
        return self.map(lambda t: t.to(place))

    def clone(self) -> "ModelInputs":
        return self.map(torch.clone)

    def detach(self) -> "ModelInputs":
        """The same without the graph of the activation."""
        if self.activation is None:
            return self
        return self.with_activation(self.activation.detach())


def data_of(x: Any) -> Any:
    """The activation alone, without the model's inputs; anything else as it is."""
    return x.data if isinstance(x, ModelInputs) else x


def answer(output: Any) -> Any:
    """The tensor among the outputs of a model: its logits, or the first of a tuple or a dict.

    Examples:
        >>> answer({"out": torch.ones(2), "aux": torch.zeros(2)})
        tensor([1., 1.])
    """
    if isinstance(output, Tensor):
        return output
    for name in ANSWERS:
        values = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
        if isinstance(value := values.get(name), Tensor):
            return value
    several = list(output.values()) if isinstance(output, Mapping) else output
    several = several if isinstance(several, (tuple, list)) else ()
    first = next((value for value in several if value is not None), None)
    return first if isinstance(first, Tensor) else output


class Called(nn.Module):
    """A model of any class, called with one tensor or several; it gives one tensor."""

    reads_inputs = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.block_title = model, type(model).__name__
        self.training = model.training

    def forward(self, x: Any) -> Any:
        return answer(x.call(self.model) if isinstance(x, ModelInputs) else self.model(x))
