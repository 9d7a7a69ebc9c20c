"""Counts what torch's operators do: multiply-adds, other results, bytes read and written.

A dispatch mode sees every operator that runs, also those of a backward pass, and adds up

- `multiply_adds` of matrix products and convolutions, by torch's own table (`flop_counter`),
- `elements`: the numbers that all other operators compute,
- `read` and `written`: the bytes of an operator's arguments and results, each moved once.

Views move nothing. What a kernel moves inside (columns of a convolution, caches) is not seen.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
COUNTED = ("multiply_adds", "elements", "read", "written")
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
GATHERS = {aten.index_select, aten.index, aten.gather, aten.embedding}
VECTORS = {aten.dot, aten.mv}  # products that torch's table leaves out
Counts = dict[str, int]


class OperationCount(TorchDispatchMode):
    """Adds up the operators under it, by the label that `label` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[Any, Counts] = {}
        self.operators: dict[str, int] = {}  # calls by name
        self.current: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @contextmanager
    def label(self, label: Any) -> Iterator[None]:
        """Count the operators inside under this label."""
        before, self.current = self.current, label
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        counted = count(func, args, kwargs, result)
        if any(counted.values()):
            total = self.counts.setdefault(self.current, dict.fromkeys(COUNTED, 0))
            for name, number in counted.items():
                total[name] += number
            name = str(func.overloadpacket).removeprefix("aten.")
            self.operators[name] = self.operators.get(name, 0) + 1
        return result


def count(func: Any, args: Any, kwargs: Any, result: Any) -> Counts:
    """What one call of an operator does."""
    packet, none = func.overloadpacket, dict.fromkeys(COUNTED, 0)
    inputs, results = list(tensors((*args, *kwargs.values()))), list(tensors([result]))
    changed = list(tensors(mutated(func, args, kwargs)))
    storages = {t.untyped_storage()._cdata for t in inputs}
    fresh = [t for t in results if t.untyped_storage()._cdata not in storages]
    if packet in EMPTY or not (fresh or changed):  # memory without numbers, or a view
        return none
    outputs = changed or fresh
    read = sum(map(size, inputs))
    if packet in GATHERS:  # only the rows that are picked
        read = sum(map(size, inputs[1:])) + sum(map(size, fresh))
    products = multiply_adds(packet, args, kwargs, result)
    elements = 0 if products else sum(t.numel() for t in outputs)
    written = sum(map(size, outputs))
    return {"multiply_adds": products, "elements": elements, "read": read, "written": written}


def multiply_adds(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of a matrix product or a convolution; 0 for other operators."""
    if packet in VECTORS:
        return args[0].numel()
    if packet not in flop_registry:
        return 0
    options = {k: v for k, v in kwargs.items() if k != "out"}
    return flop_registry[packet](*args, **options, out_val=result) // 2


def mutated(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to."""
    arguments = func._schema.arguments
    values = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
    writes = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [values[name] for name in writes if name in values and name != "grads"]


def size(tensor: Tensor) -> int:
    """The bytes of a tensor's different numbers; those of an expanded one are there once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(n for n, stride in pairs if stride) * tensor.itemsize


def tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, lists of them included."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)
