"""A model whose `forward` cannot be traced, cut along its list of layers: transformers, mostly.

The model's own code runs in each part, with stand-ins for the layers of the list. The first part
runs it up to the list, and notes what every layer gets besides the activation (masks, positions);
the last part runs it again with the activation in place of the last layer's output.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.model_inputs import ModelInputs, answer
from tpsgd.nets.modes import evaluating

Leaves = list[tuple[str, nn.Module]]
LISTS = (nn.ModuleList, nn.Sequential)


class Reached(Exception):
    """The last layer of the list has been reached: the model's code need not go on."""


class StandIn(nn.Module):
    """In place of a layer in the list, while the model's code runs around it."""

    def __init__(self, layer: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        vars(self).update(layer=layer, function=function)  # neither is a part of this module

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class LayerList:
    """A model with its list of layers, as its parts share them."""

    def __init__(self, model: nn.Module, path: str, around: Sequence[nn.Module]) -> None:
        self.model, self.list = model, model.get_submodule(path)
        self.around = list(around)  # the modules that the list is in
        self.before: nn.Module = nn.ModuleList()  # those that are called before the list
        self.layers = list(self.list)  # type: ignore[arg-type]
        self.more: int | None = None  # values that a layer returns besides the activation
        self.called = False  # whether a layer has shown that

    def call(self, x: ModelInputs, functions: Sequence[Callable[..., Any]], training: bool) -> Any:
        """What the model returns with these functions in place of its layers, in a mode."""
        modules = self.list._modules
        pairs = zip(modules, self.layers, functions, strict=True)
        stand_ins = {name: StandIn(layer, function) for name, layer, function in pairs}
        before, modes = dict(modules), [module.training for module in self.around]
        modules.update(stand_ins)
        for module in self.around:
            module.training = training
        try:
            return x.call(self.model)
        finally:
            modules.update(before)
            for module, mode in zip(self.around, modes, strict=True):
                module.training = mode

    def returned(self, activation: Tensor) -> Any:
        """An activation in the form in which a layer returns it."""
        return activation if self.more is None else (activation, *[None] * self.more)

    def activation(self, output: Any) -> Tensor:
        """The activation in what a layer has returned."""
        self.more, self.called = len(output) - 1 if isinstance(output, tuple) else None, True
        return output[0] if isinstance(output, tuple) else output

    def contexts(self, x: ModelInputs, training: bool) -> tuple[Tensor, list[tuple[Any, Any]]]:
        """What the first layer reads, and what each layer gets besides it."""
        contexts: list[tuple[Any, Any]] = []
        first: list[Tensor] = []

        def without_graph(value: Any) -> Any:
            return value.detach() if isinstance(value, Tensor) else value

        def stand_in(activation: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not contexts:
                first.append(activation)
            if not self.called:
                with torch.no_grad():
                    self.activation(self.layers[0](activation, *args, **kwargs))
            contexts.append(map_aggregate((args, kwargs), without_graph))  # type: ignore[arg-type]
            if len(contexts) == len(self.layers):
                raise Reached
            return self.returned(activation)

        try:
            self.call(x, [stand_in] * len(self.layers), training)
        except Reached:
            return first[0], contexts
        raise TpsgdError(
            f"{type(self.model).__name__} does not call each of the {len(self.layers)} layers in "
            "its list once and in order, so it cannot be cut along them"
        )


class _Part(nn.Module):
    """A part of the model; the modules of the model that belong to it are its own."""

    reads_inputs = True
    shared: LayerList

    def __init__(self, shared: LayerList, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        vars(self)["shared"] = shared


class BeforeList(_Part):
    """The model up to its list of layers: embeddings, mostly."""

    block_title = "embeddings"

    def __init__(self, shared: LayerList, parts: Sequence[nn.Module]) -> None:
        super().__init__(shared, parts)
        shared.before = self.parts
        for i, module in enumerate(shared.around):
            for name, p in module.named_parameters(recurse=False):
                self.register_parameter(f"{name}_{i}", p)

    def forward(self, x: Any) -> ModelInputs:
        x = x if isinstance(x, ModelInputs) else ModelInputs({0: x})
        activation, contexts = self.shared.contexts(x, self.training)
        return ModelInputs(x.tensors, activation, contexts)


class ListLayer(_Part):
    """A layer of the list."""

    def __init__(self, shared: LayerList, number: int) -> None:
        super().__init__(shared, [shared.layers[number]])
        self.number, self.block_title = number, type(shared.layers[number]).__name__

    def forward(self, x: ModelInputs) -> ModelInputs:
        if x.context is None:  # the activation was kept, or has come from elsewhere
            with torch.no_grad(), evaluating(self.shared.before):
                x.context = self.shared.contexts(ModelInputs(x.tensors), self.training)[1]
        args, kwargs = x.context[self.number]
        output = self.shared.layers[self.number](x.data, *args, **kwargs)
        return x.with_activation(self.shared.activation(output))


class AfterList(_Part):
    """The model from its list of layers on: a norm and a classifier, mostly."""

    def __init__(self, shared: LayerList, parts: Sequence[nn.Module]) -> None:
        super().__init__(shared, parts)
        self.block_title = " + ".join(type(m).__name__ for m in parts) or "output"

    def forward(self, x: ModelInputs) -> ModelInputs:
        learning, shared = torch.is_grad_enabled(), self.shared

        def passed_on(activation: Tensor, *args: Any, **kwargs: Any) -> Any:
            return shared.returned(activation)

        def last(*args: Any, **kwargs: Any) -> Any:
            torch.set_grad_enabled(learning)
            return shared.returned(x.data)

        with torch.no_grad(), evaluating(shared.before):  # what is computed again
            functions = [*[passed_on] * (len(shared.layers) - 1), last]
            output = shared.call(x, functions, self.training)
        return x.with_activation(answer(output))


def longest_list(model: nn.Module) -> str | None:
    """The path of the list with most parameters whose layers are of one kind; None without one."""
    paths: dict[str, int] = {}
    for path, module in model.named_modules():
        if not path or not isinstance(module, LISTS):
            continue
        layers = list(module.children())
        inside = any(path.startswith(f"{other}.") for other in paths)
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1 and not inside:
            paths[path] = sum(p.numel() for p in module.parameters())
    return max(paths, key=lambda path: paths[path], default=None)


def leaves(model: nn.Module) -> Leaves:
    """A part before the list, its layers, and a part after it; nothing if there is no list."""
    path = longest_list(model)
    if path is None:
        return []
    before, after, around, module = [], [], [], model
    for name in path.split("."):
        around.append(module)
        children = list(module._modules)
        place = children.index(name)
        before += [m for n in children[:place] if (m := module._modules[n]) is not None]
        after = [m for n in children[place + 1 :] if (m := module._modules[n]) is not None] + after
        module = module.get_submodule(name)
    shared = LayerList(model, path, around)
    first = BeforeList(shared, before)
    layers = [(f"{path}.{i}", ListLayer(shared, i)) for i in range(len(shared.layers))]
    return [("embeddings", first), *layers, ("output", AfterList(shared, after))]
