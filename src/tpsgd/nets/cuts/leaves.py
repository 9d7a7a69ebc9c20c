"""The modules of a model in the order in which data meets them, and blocks of one layer each."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.blocks import Block, hooked, hooked_parameters, is_activation
from tpsgd.nets.cuts import lists, traced
from tpsgd.nets.cuts.sections import Section
from tpsgd.nets.layers import LAYERS
from tpsgd.nets.padded import SequenceLayer
from tpsgd.nets.recurrent import Joined, feeds_recurrent, views

Leaves = list[tuple[str, nn.Module]]
_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
)
_ON_INPUTS = (*_NORMS, nn.modules.dropout._DropoutNd)  # after an activation: of the next block
_ATTENTION = (nn.MultiheadAttention, nn.TransformerDecoderLayer)  # have several inputs
_ENCODERS = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
_LOOK_UPS = (*traced.LOOK_UPS, lists.BeforeList)


def is_chain(model: nn.Module) -> bool:
    """Whether a model is an `nn.Sequential`, or a single layer, whose modules come one by one."""
    sequential = isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward
    return sequential or isinstance(model, (*LAYERS, nn.RNNBase, SequenceLayer))


def leaves_of_model(
    model: nn.Module, inputs: Sequence[str | int] = (), samples: Any = None
) -> Leaves:
    """The modules of a model of any class, for the inputs that it gets; a few samples if known."""
    if not isinstance(model, nn.Module):
        raise TpsgdError(f"a model is an nn.Module, got a {type(model).__name__}")
    _refuse_kind(model)
    chain = is_chain(model)
    if hooked(model) and (isinstance(model, nn.Sequential) or not chain):
        raise TpsgdError(
            "the model has hooks, which blocks that learn one by one would not run: put them on "
            "its layers, or train it whole with tpsgd.fit_backprop"
        )
    if chain:
        return list(_opened(list(leaves_of(model))))
    name = type(model).__name__
    if inputs:
        _refuse_inputs(model, inputs)
    for path, module in model.named_modules():
        _refuse(path or name, module)
    try:
        leaves = traced.leaves(model, inputs, samples)
    except traced.Untraceable as reason:
        leaves = lists.leaves(model)
        if not leaves:
            raise TpsgdError(
                f"cannot cut {name} into blocks: {reason}. Put what depends on data into a module "
                "of its own, which then stays whole, or train the model whole with "
                "tpsgd.fit_backprop"
            ) from reason
    return [(path, module) for path, module in leaves if not isinstance(module, nn.Identity)]


def leaves_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules of nested `nn.Sequential`s by name, in the order in which data meets them."""
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        if hooked(module):
            yield name, module
            return
        for child_name, child in module._modules.items():  # a module used twice comes twice
            if child is not None:
                yield from leaves_of(child, f"{name}.{child_name}" if name else child_name)
        return
    _refuse_kind(module)
    if not isinstance(module, nn.Identity):
        yield name or type(module).__name__, module


def _refuse_kind(module: nn.Module) -> None:
    """Refuse a module that has no `forward` of its own."""
    name = type(module).__name__
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise TpsgdError(f"{name} is compiled: pass the module as it was before")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise TpsgdError(f"{name} holds a model: pass the model itself, its attribute module")
    if type(module).forward is nn.Module.forward:  # nn.ModuleList
        raise TpsgdError(f"{name} has no forward method: pass nn.Sequential of its modules")


def _refuse_inputs(model: nn.Module, inputs: Sequence[str | int]) -> None:
    """Refuse inputs that `forward` does not take, or too few of them."""
    by_name = {name: None for name in inputs if isinstance(name, str)}
    try:
        inspect.signature(model.forward).bind(*(i for i in inputs if i not in by_name), **by_name)
    except TypeError as error:
        raise TpsgdError(
            f"{type(model).__name__}.forward does not fit x, {len(inputs)} "
            f"input{'s' * (len(inputs) > 1)}: {error}; several inputs are a tuple or a dict"
        ) from None


def _opened(leaves: Leaves) -> Iterator[tuple[str, nn.Module]]:
    """The leaves with every `nn.RNN` replaced by its layers, which share its parameters.

    GRU and LSTM stay whole; they give their last state, or all to another recurrent layer.
    """
    for i, (name, module) in enumerate(leaves):
        if not is_tap(module):  # no gradient runs through a frozen one
            _refuse(name, module, in_chain=True)
        if type(module) is nn.RNN:
            layers = views(module, feeds_recurrent([m for _, m in leaves[i + 1 :]]))
            many = module.num_layers > 1
            yield from ((f"{name}.{k}" if many else name, m) for k, m in enumerate(layers))
        elif isinstance(module, nn.RNNBase):
            yield name, Joined(module, feeds_recurrent([m for _, m in leaves[i + 1 :]]))
        else:
            yield name, module


def is_tap(layer: nn.Module) -> bool:
    """Whether it is a layer of a frozen backbone."""
    return getattr(layer, "is_tap", False)


def _refuse(name: str, module: nn.Module, in_chain: bool = False) -> None:
    """Refuse a module whose gradient would be wrong, or that gets other inputs than it needs."""
    kind = f"{type(module).__name__} (module {name!r})"
    if isinstance(module, _ATTENTION) and in_chain:
        raise TpsgdError(
            f"{kind} is not supported as a layer of nn.Sequential, because it has several inputs: "
            "put it into a module of your own that calls it, or take "
            "nn.TransformerEncoderLayer(..., batch_first=True)"
        )
    reads_sequences = type(module) is nn.RNN or isinstance(module, SequenceLayer)
    for m in module.modules():
        if reads_sequences and (hooked(m) or is_parametrized(m) or hooked_parameters(m)):
            raise TpsgdError(
                f"{kind} has hooks or a parametrization, such as weight_norm, which the gradients "
                "of recurrent layers do not know: remove them, or train the model with "
                "tpsgd.fit_backprop"
            )
        if isinstance(module, _ENCODERS) and not getattr(m, "batch_first", True):
            raise TpsgdError(
                f"{kind} takes (tokens, batch, width): its attention would run across samples; "
                "make it with batch_first=True"
            )
        if any(isinstance(p, nn.UninitializedParameter) for p in m.parameters(recurse=False)):
            raise TpsgdError(f"{name!r} is lazy: run one batch through the model first")


# ---- layers, and what follows them ---------------------------------------------------------------


def blocks_of(leaves: Leaves, of_class: bool) -> list[Block]:
    """Blocks of one layer each; `of_class`: the leaves are those of a class of the user's.

    There a module with nothing but vectors, a scale or a norm of the user's own, is no layer.
    """
    groups: list[tuple[str, nn.Module, Leaves]] = []  # a layer and what follows it
    pending: Leaves = []  # before the first layer
    for name, module in leaves:
        if _is_layer(module) and not (of_class and _has_vectors_alone(module)):
            groups.append((name, module, []))
        else:
            (groups[-1][2] if groups else pending).append((name, module))
    blocks: list[Block] = []
    for i, (name, layer, followers) in enumerate(groups):
        between, act, rest = 0, None, [m for _, m in followers]
        if not isinstance(layer, SequenceLayer):
            between, act = _around_activation(rest)
        after = between + (act is not None)
        last = i == len(groups) - 1
        cut = next((k for k in range(after, len(rest)) if _is_of_next(rest[k])), len(rest))
        cut = len(rest) if last else cut
        paths = [path for path, _ in [*pending, (name, layer), *followers[:cut]]]
        prologue, pending = [m for _, m in pending], followers[cut:]
        modules = prologue, rest[:between], act, rest[after:cut]
        blocks.append(
            Block(
                i, name, layer, *modules, paths=tuple(paths), ends=(name, name), of_class=of_class
            )
        )
    return blocks


def _is_of_next(module: nn.Module) -> bool:
    """Whether a module after an activation acts on the inputs of the next block."""
    return isinstance(module, _ON_INPUTS) or getattr(module, "reads_inputs", False)


def _is_layer(module: nn.Module) -> bool:
    return (
        any(True for _ in module.parameters())
        and not isinstance(module, _NORMS)
        and not is_activation(module)
    )


def _has_vectors_alone(module: nn.Module) -> bool:
    """Whether nothing in a module is a layer: scales and shifts, or numbers that are added."""
    if isinstance(module, Section):
        return not module.is_layer
    return not any(p.dim() > 1 for p in module.parameters())


def _around_activation(followers: list[nn.Module]) -> tuple[int, nn.Module | None]:
    """How many modules are between a layer and its activation, and the activation."""
    for i, module in enumerate(followers):
        if is_activation(module):
            return i, module
    norms = next((i for i, m in enumerate(followers) if not isinstance(m, _NORMS)), len(followers))
    return norms, None


def is_incomplete(block: Block) -> bool:
    """Whether a layer is no block by itself, but learns together with the next one.

    That is a depthwise convolution, which mixes no channels; the patches of `zoo.vit`; and in a
    class of the user's an embedding, whose output says nothing of the order of tokens.
    """
    layer: Any = block.layer
    convolution = isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    if convolution and layer.groups == layer.in_channels > 1:
        return True
    embeds = getattr(layer, "embeds", False)
    return embeds or (block.of_class and isinstance(layer, _LOOK_UPS))
