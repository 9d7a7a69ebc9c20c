"""What a `forward` asks of sizes while it is traced: `x.dim() == 4`, `int(x.shape[2])`.

A trace has no sizes, so the answer comes from a few samples: tracing ends at the question, the
graph so far is computed for them, and tracing begins anew with the answer. It must not depend on
the number of samples.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute

from tpsgd.nets.cuts.sections import is_size
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.modes import attributes_restored

UNKNOWN = {
    bool: "it decides by the values of a tensor, or by the number of samples",
    int: "it makes a number of the values of a tensor, or of the number of samples",
    len: "it takes the length of a tensor, the number of samples: take x.shape[0]",
}


class Question(Exception):
    """What a node would tell: whether something holds, a number, or a length."""

    def __init__(self, node: fx.Node, kind: Callable[[Any], Any]) -> None:
        super().__init__(UNKNOWN[kind])
        self.node, self.kind = node, kind


class _Asks:
    """A proxy that asks its tracer for numbers."""

    def __len__(self: Any) -> int:
        return self.tracer.answer(self.node, len)

    def __int__(self: Any) -> int:
        return self.tracer.answer(self.node, int)

    __index__ = __int__


class SizedProxy(_Asks, fx.Proxy):
    """A value in a trace."""

    def __getattr__(self, name: str) -> "SizedAttribute":
        return SizedAttribute(self, name)


class SizedAttribute(_Asks, Attribute):
    """An attribute of a value, such as its shape."""


def answer(question: Question, model: nn.Module, samples: Any) -> Any:
    """What a node tells of samples; None if their number, or their values, may change it."""
    of_values = question.kind is not len and not is_size(question.node)
    if of_values or not isinstance(samples, (Tensor, ModelInputs)):
        return None
    x = samples if isinstance(samples, ModelInputs) else ModelInputs.of((samples,))
    more = ModelInputs({name: torch.cat([t, t[:1]]) for name, t in x.tensors.items()})
    try:
        with attributes_restored(model), torch.no_grad(), torch.random.fork_rng([]):
            model.eval()
            values = [question.kind(_computed(question.node, model, each)) for each in (x, more)]
    except Exception:  # whatever a model does with samples that do not fit
        return None
    return values[0] if values[0] == values[1] else None


def _computed(node: fx.Node, model: nn.Module, x: ModelInputs) -> Any:
    """The value of a node for samples."""
    nodes = [*node.graph.nodes]
    inputs = [n for n in nodes if n.op == "placeholder"]
    names = [str(n.target) for n in inputs]
    values: dict[fx.Node, Any] = {}
    for name, tensor in x.tensors.items():
        values[inputs[names.index(name) if isinstance(name, str) else name]] = tensor
    for each in nodes[: nodes.index(node) + 1]:
        if each.op != "placeholder":
            values[each] = _called(each, model, values)
    return values[node]


def _called(node: fx.Node, model: nn.Module, values: dict[fx.Node, Any]) -> Any:
    arguments: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    args: Sequence[Any] = arguments[0]
    if node.op == "get_attr":
        return attrgetter(str(node.target))(model)
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **arguments[1])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **arguments[1])
    function: Any = node.target
    return function(*args, **arguments[1])
