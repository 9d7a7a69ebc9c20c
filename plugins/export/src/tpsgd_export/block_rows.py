"""The rows of a block: its layers in the order in which they are computed, and what each one reads.

A row is a layer with its norm, what is added to its output before the activation, the activation
and pools. A plain block is a row; a residual block, or several layers that learn together, are a
few. A `forward` is read from its torch.fx graph, that of a section of a traced model, too.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.blocks import Block, is_activation
from tpsgd.nets.cuts.balance import Blocks
from tpsgd.nets.cuts.sections import Section, is_flatten, is_size, twin
from tpsgd.nets.cuts.split import LAYERS as LAYERS_ALONE
from tpsgd.nets.cuts.split import layers_of, split
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.padded import SequenceLayer

INPUT = -1  # of the block, where a row could be
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, SequenceLayer)
DROPOUT = nn.modules.dropout._DropoutNd  # left out: a device learns without it
RESHAPING = (nn.Flatten, nn.Identity, nn.Unflatten, DROPOUT)
POOLS: dict[type, str] = {
    nn.MaxPool1d: "max", nn.MaxPool2d: "max", nn.AvgPool1d: "mean", nn.AvgPool2d: "mean",
    nn.AdaptiveAvgPool1d: "cells", nn.AdaptiveAvgPool2d: "cells",
}  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
IN_PLACE = (operator.iadd, "add_")
ADDITIONS = (operator.add, torch.add, "add", *IN_PLACE)
DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d)
PIXELS = ((2, 3), (-2, -1), (-1, -2), (3, 2))  # dimensions of a map, whose mean is a pool


@dataclass(frozen=True)
class LayerRow:
    """A layer of a block.

    Args:
        block: the layer with what is around it, as a block of its own.
        source: the row whose output it reads, or `INPUT`.
        added: the row whose output is added to its own before the activation, or `INPUT`.
    """

    block: Block
    source: int = INPUT
    added: int | None = None


def cut(
    model: nn.Module, blocks: Blocks | str | None, shape: Sequence[int] | None = None
) -> list[Block]:
    """The blocks of a model, as `tpsgd.split` makes them; a block for each layer is the usual."""
    return layers_of(model) if blocks == LAYERS_ALONE else split(model, shape, blocks=blocks)


def rows_of(block: Block) -> list[LayerRow]:
    """The rows of a block; a block that has other parts than rows is refused."""
    plain = isinstance(block.layer, LAYERS) or type(block.layer).__module__.startswith("torch.nn")
    if plain and not block.earlier and not any(map(_takes_means, block.tail)):
        return [LayerRow(block)]
    return _Reader(block).rows()


def _takes_means(module: nn.Module) -> bool:
    """Whether a section is the mean of maps and no more."""
    nodes = module.learning.graph.nodes if isinstance(module, Section) else ()
    calls = [node for node in nodes if node.op.startswith("call")]
    return len(calls) == 1 and _is_mean(calls[0])


@dataclass(eq=False)
class _Row:
    """A row while it is read. `changes`: how many modules have changed its output so far."""

    name: str
    layer: nn.Module
    source: "_Value"
    norms: list[nn.Module] = field(default_factory=list)
    added: "_Value | None" = None
    activation: nn.Module | None = None
    tail: list[nn.Module] = field(default_factory=list)
    changes: int = 0

    @property
    def is_sum(self) -> bool:
        """Whether something can still be added before an activation."""
        return self.added is None and self.activation is None and not self.tail


@dataclass(frozen=True)
class _Value:
    """What a row gives after so many changes, reshaped; without a row, the block's input."""

    row: _Row | None = None
    changes: int = 0
    shapes: tuple[nn.Module, ...] = ()


class _Reader:
    """Reads the modules of one block."""

    def __init__(self, block: Block) -> None:
        self.block, self.read = block, list[_Row]()

    def rows(self) -> list[LayerRow]:
        """The rows in an order in which each reads earlier ones; the last gives the output."""
        value = _Value()
        names = [*self.block.paths, *[""] * len(self.block.modules)]
        for name, module in zip(names, self.block.modules, strict=False):
            value = self.apply(name, module, value)
        if value.row is None:
            raise TpsgdError("it has no layer that reads its input")
        value.row.tail += value.shapes
        last = _Value(value.row, value.changes)
        order = list(_before(value.row, set()))
        if len(order) < len(self.read):
            unread = next(row for row in self.read if row not in order)
            raise TpsgdError(f"nothing in the block reads what {_title(unread.layer)} gives")
        for read in [last, *(v for row in order for v in _inputs(row))]:
            if read.row and read.changes < read.row.changes:
                raise TpsgdError(
                    f"the output of {_title(read.row.layer)} is read both before and after a norm, "
                    "a sum, an activation or a pool, and is not exported"
                )
        return [self._finished(row, order) for row in order]

    def _finished(self, row: _Row, order: list[_Row]) -> LayerRow:
        number: dict[_Row | None, int] = {each: i for i, each in enumerate(order)} | {None: INPUT}
        block = Block(
            self.block.index, row.name, row.layer, list(row.source.shapes), row.norms,
            row.activation, row.tail, self.block.key,
        )  # fmt: skip
        added = None if row.added is None else number[row.added.row]
        return LayerRow(block, number[row.source.row], added)

    # ---- modules -----------------------------------------------------------------------------

    def apply(self, name: str, module: nn.Module, x: _Value) -> _Value:
        """What a module makes of a value."""
        if isinstance(module, (nn.Identity, DROPOUT)):
            return x
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            for child, each in module.named_children():
                x = self.apply(f"{name}.{child}", each, x)
            return x
        if isinstance(module, RESHAPING):
            return _Value(x.row, x.changes, (*x.shapes, module))
        if isinstance(module, Section):
            graph = module.evaluating or module.learning
            return self._run(graph.graph, graph.get_submodule, "", x)
        if isinstance(module, NORMS):
            return self._changed(module, x, lambda row: row.is_sum, lambda r: r.norms)
        if isinstance(module, tuple(POOLS)):
            return self._changed(module, x, lambda row: True, lambda row: row.tail)
        if is_activation(module):
            return self._activated(module, x)
        if isinstance(module, LAYERS) or type(module).__module__.startswith("torch.nn"):
            if not any(True for _ in module.parameters()):
                raise TpsgdError(f"{_title(module)} is not exported inside a block")
            if any(row.layer is module for row in self.read):
                raise TpsgdError(f"{_title(module)} is called twice, and is not exported")
            self.read.append(_Row(name, module, x))
            return _Value(self.read[-1])
        return self._run(_traced(module), module.get_submodule, name, x)

    def _changed(
        self,
        module: nn.Module,
        x: _Value,
        fits: Callable[[_Row], bool],
        where: Callable[[_Row], list[nn.Module]],
    ) -> _Value:
        """A row with one module more."""
        if x.row is None or x.shapes or not fits(x.row):
            after = "a layer" if isinstance(module, NORMS) else "a layer or its activation"
            raise TpsgdError(f"{_title(module)} is exported directly after {after} only")
        where(x.row).append(module)
        return self._next(x)

    def _activated(self, module: nn.Module, x: _Value) -> _Value:
        row = x.row
        if row is None or row.activation is not None or row.tail:
            raise TpsgdError(f"{_title(module)} is exported directly after a layer or a sum only")
        row.activation = module
        return _Value(row, self._next(x).changes, x.shapes)

    def _next(self, x: _Value) -> _Value:
        """The value after a change of its row."""
        assert x.row is not None
        if x.changes < x.row.changes:
            raise TpsgdError(
                f"the output of {_title(x.row.layer)} goes two ways before its activation, and is "
                "not exported"
            )
        x.row.changes += 1
        return _Value(x.row, x.row.changes)

    def added(self, a: _Value, b: _Value, in_place: bool = False) -> _Value:
        """The sum of two values: that of the layer which came last gets the other."""
        numbers = {row: i for i, row in enumerate(self.read)}
        hosts = [v for v in (a, b) if v.row and v.row.is_sum and not v.shapes]
        hosts = [v for v in hosts if v.row and v.changes == v.row.changes]
        host = max(hosts, key=lambda v: numbers[v.row] if v.row else -1, default=_Value())
        other = b if host is a else a
        earlier = _before(other.row, set()) if other.row else ()
        if host.row is None or host.row in earlier:
            raise TpsgdError(
                "a sum without a layer directly before it is not exported; relu(x + layer(y)) is"
            )
        if other.shapes:
            raise TpsgdError("a sum of values that were reshaped is not exported")
        host.row.added = self._overwritten(a) if in_place and other is a else other
        return self._next(host)

    def _overwritten(self, x: _Value) -> _Value:
        """The first operand of a sum in place, which nothing else may read then."""
        if x.row is None or not x.row.is_sum:
            raise TpsgdError(
                "a sum in place (+=, add_) into what is not directly a layer's output is not "
                "exported; write a + b"
            )
        return self._next(x)

    # ---- graphs ------------------------------------------------------------------------------

    def _run(self, graph: fx.Graph, module: Callable[[str], nn.Module], name: str, x: Any) -> Any:
        """What the calls of a `forward` make of a value."""
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                if values:
                    raise TpsgdError("a forward of several inputs is not exported")
                values[node] = x
            elif node.op == "output":
                result = values.get(node.args[0]) if isinstance(node.args[0], fx.Node) else None
                if not isinstance(result, _Value):
                    raise TpsgdError("a forward that does not give one tensor is not exported")
                return result
            elif is_size(node):
                values[node] = None
            elif node.op == "call_module":
                path = f"{name}.{node.target}" if name else str(node.target)
                read = [values.get(a) for a in node.all_input_nodes]
                if len(read) != 1 or not isinstance(read[0], _Value):
                    raise TpsgdError(f"{node.target} reads more than one tensor: not exported")
                values[node] = self.apply(path, module(str(node.target)), read[0])
            else:
                values[node] = self._called(node, values)
        raise TpsgdError("a forward without an output is not exported")

    def _called(self, node: fx.Node, values: dict[fx.Node, Any]) -> _Value:
        """What a function makes of its arguments."""
        read = [values[n] for n in node.all_input_nodes if isinstance(values.get(n), _Value)]
        word = getattr(node.target, "__name__", str(node.target)).strip("_")
        if node.op == "get_attr" or not read:
            raise TpsgdError(f"{word} is not exported: its layers are modules of their own")
        x = read[0]
        if node.target in ADDITIONS:
            both: list[Any] = [values.get(a) for a in node.args if isinstance(a, fx.Node)]
            if len(both) == len(node.args) == 2 and None not in both and not node.kwargs:
                return self.added(both[0], both[1], node.target in IN_PLACE)
        elif node.target in DROPOUTS:
            raise TpsgdError("dropout is exported as a module, nn.Dropout, which is left out")
        elif word in ("clone", "contiguous"):
            return x
        elif _is_mean(node):
            pooled = self.apply("mean", nn.AdaptiveAvgPool2d(1), x)
            return pooled if node.kwargs.get("keepdim") else self.apply("", nn.Flatten(), pooled)
        elif _flattens(node):
            return self.apply("flatten", nn.Flatten(), x)
        elif len(read) == 1 and (same := twin(node, node)) is not None:
            return self.apply(word, same, x)
        raise TpsgdError(f"{word} is not exported inside a block; sums, layers and relu are")


def _inputs(row: _Row) -> list[_Value]:
    """What a row reads."""
    return [row.source] if row.added is None else [row.source, row.added]


def _before(row: _Row, seen: set[_Row]) -> Iterator[_Row]:
    """Rows in the order of their computation, up to this one."""
    for value in _inputs(row):
        if value.row and value.row not in seen:
            yield from _before(value.row, seen)
    seen.add(row)
    yield row


class _Proxy(fx.Proxy):
    """A tensor of a `forward` that is traced; torch.fx itself reads `x += y` as `x = x + y`."""

    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})


class _Tracer(fx.Tracer):
    """Traces sums in place as such."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)


def _traced(module: nn.Module) -> fx.Graph:
    """The calls of a module's `forward` in evaluation mode."""
    try:
        with modes_restored(module):
            module.eval()
            return _Tracer().trace(module)
    except Exception as error:  # whatever a module does with what is no tensor
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TpsgdError(f"its forward cannot be read by torch.fx: {reason}") from error


def _is_mean(node: fx.Node) -> bool:
    """Whether a call is the mean of every map."""
    word = getattr(node.target, "__name__", node.target)
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) == 2 else None)
    known = set(node.kwargs) <= {"dim", "keepdim"} and len(node.args) <= 2
    return word == "mean" and known and isinstance(dims, (tuple, list)) and tuple(dims) in PIXELS


def _flattens(node: fx.Node) -> bool:
    """Whether a call is `x.view(x.size(0), -1)`."""
    sizes = [n for n in node.all_input_nodes if n is not node.args[0]]
    return bool(node.args) and is_flatten([*sizes, node], _counts_samples)


def _counts_samples(size: Any) -> bool:
    """Whether a node is the first of a tensor's sizes."""
    if not isinstance(size, fx.Node):
        return False
    return len(size.args) == 2 and bool(size.args[1] == 0)


def _title(module: nn.Module) -> str:
    return str(getattr(module, "block_title", type(module).__name__))
