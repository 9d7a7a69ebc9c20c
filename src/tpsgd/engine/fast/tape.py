"""A function's torch operators, recorded once and replayed without the Python around them.

On a CPU the step of a small net spends most of its time in Python: objects, dictionaries, views.
`record` runs a function and notes every operator that it calls. From two equal records, `Tape`
writes a straight-line Python function of these operators alone, and runs it on other inputs:

    v0 = index_select(c0, 0, a0)      # a0: an argument, c0: a tensor that exists all the time
    v1 = addmm(c1, v0, c2)            # c2: a view of a weight, made once
    del v0                            # as soon as nothing needs it

Operators, their order, their memory and so their results are those of the function. A record holds
for arguments of the same shapes and strides, and as long as the function calls the same operators
with the same numbers: a function that reads a value (`item`) cannot be recorded, and one whose
numbers change from call to call gives two different records. Only the learning rate of a fused
optimizer may change: see `Tape.set_rate`.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpsgd.maths.kernels.torch_internals import internal

_BINDINGS = "_C._VariableFunctions", "_C.TensorBase"  # where Python finds operators
VALUES_MATTER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Value(NamedTuple):
    """A tensor that exists while the record runs: an argument, or a result of an operator."""

    number: int


class Constant:
    """A tensor that exists all the time; two are equal if they are the same memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and _same_memory(self.tensor, other.tensor)


class Rate:
    """The learning rate of a fused optimizer, which may change from call to call."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rate)


class Call(NamedTuple):
    """An operator with its arguments and its results."""

    operator: Any
    run: Any  # the quickest way to call it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Value | None, ...]  # None: one of its arguments, or no tensor
    several: bool  # it returns a tuple or a list


class Recording(NamedTuple):
    """What a function has called, and the values of its results."""

    calls: list[Call]
    results: list[Any]


class _Recording(TorchDispatchMode):
    """Notes every operator. Tensors are not kept alive, except those that are constants."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.constant = True  # whether the operators do not depend on values
        self._names: dict[int, tuple[Any, Any]] = {}  # by address: weak reference and name
        self._views: dict[tuple[Any, ...], Any] = {}  # names of views by memory and geometry
        self._memory: dict[Value, int] = {}  # which value's memory a value shares
        self._count = 0
        for tensor in arguments:
            self._new_value(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, which spares torch the import of its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named_args = tuple(map(self.name, args))
        named_kwargs = {
            k: Rate(v) if k == "lr" and isinstance(v, float) else self.name(v)
            for k, v in kwargs.items()
        }
        run, out = _run(func, args, kwargs)
        self.constant = self.constant and not _depends_on_values(func, args)
        several = isinstance(out, (tuple, list))
        outs = out if several else (out,)
        if func.namespace == "profiler":
            return out
        if func.is_view and not _numbers((named_args, named_kwargs)):
            for tensor in outs:  # a view of a constant is a constant
                self._names[id(tensor)] = weakref.ref(tensor), Constant(tensor)
        elif func.is_view and not several:
            self._view(out, Call(func, run, named_args, named_kwargs, (), False))
        else:
            results = tuple(map(self._result, outs))
            self.calls.append(Call(func, run, named_args, named_kwargs, results, several))
        return out

    def name(self, value: Any) -> Any:
        """A tensor as `Value` or `Constant`, lists of them included; anything else as it is."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.name, value))
        if not isinstance(value, Tensor):
            return value
        self.constant = self.constant and value.layout is torch.strided
        name = self._name_of(value)
        if name is None:
            name = Constant(value)
            self._names[id(value)] = weakref.ref(value), name
        return name

    def _name_of(self, tensor: Tensor) -> Any:
        """The name of a tensor that has one; another tensor may have had its address before."""
        reference, name = self._names.get(id(tensor), (lambda: None, None))
        return name if reference() is tensor else None

    def _view(self, out: Tensor, call: Call) -> None:
        """A view of a value; the same view again is the same value."""
        memory = self._memory[call.args[0]]
        geometry = memory, *_geometry(out)
        if geometry not in self._views:
            value = self._new_value(out, memory)
            self.calls.append(call._replace(results=(value,)))
        self._names[id(out)] = weakref.ref(out), self._views[geometry]

    def _result(self, tensor: Any) -> Value | None:
        """An operator's result as a new value, unless it is one of its arguments."""
        if not isinstance(tensor, Tensor) or self._name_of(tensor) is not None:
            return None
        return self._new_value(tensor)

    def _new_value(self, tensor: Tensor, memory: int | None = None) -> Value:
        value = Value(self._count)
        self._count += 1
        self._memory[value] = value.number if memory is None else memory
        self._views[(self._memory[value], *_geometry(tensor))] = value
        self._names[id(tensor)] = weakref.ref(tensor), value
        return value


def _geometry(t: Tensor) -> tuple[Any, ...]:
    """How a tensor looks at its memory."""
    return t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()


def _depends_on_values(func: Any, args: Any) -> bool:
    """Whether an operator's result is a Python value, or has a shape that depends on values."""
    if func is torch.ops.aten.index.Tensor:  # by numbers it has the shape of the index
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not VALUES_MATTER.isdisjoint(func.tags)


def _run(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Call an operator by its quickest way from Python: that way, and what it returned."""
    name = func._schema.name.removeprefix("aten::")
    for home in _BINDINGS:
        run = getattr(internal(home), name, None)
        if run is not None:
            try:
                out = run(*args, **kwargs)
                return run, out if func._schema.returns else None
            except TypeError:  # it has other arguments there
                continue
    return func._op, func(*args, **kwargs)


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return (
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and _geometry(a)[2:] == _geometry(b)[2:]
    )


def record(
    function: Callable[[], Any], arguments: Sequence[Tensor], results: Callable[[], list[Any]]
) -> Recording | None:
    """Call a function and note its operators; None if it reads the value of a tensor.

    Args:
        function: it is called once, and computes what it always does.
        arguments: the tensors that differ from call to call.
        results: what the function has left behind, tensors or None.
    """
    recording = _Recording(arguments)
    with recording:
        function()
    names = [None if t is None else recording.name(t) for t in results()]
    return Recording(recording.calls, names) if recording.constant else None


class Tape:
    """A record as a function of its arguments, which returns a list of its results."""

    def __init__(self, record: Recording, arguments: int) -> None:
        self.rates: list[float] = []
        self.places: dict[int, list[int]] = {}  # of rates among them, by a call's first parameter
        self.names: dict[str, Any] = {"rates": self.rates}
        self._by_id: dict[int, str] = {}
        lines = self._lines(record, arguments)
        inputs = ", ".join(f"v{i}" for i in range(arguments))
        self.source = "\n    ".join([f"def replay({inputs}):", *lines])
        exec(compile(self.source, "<tape>", "exec"), self.names)
        # without its own name, so that it does not keep itself alive
        self.replay: Callable[..., list[Any]] = self.names.pop("replay")

    def _lines(self, record: Recording, arguments: int) -> list[str]:
        """One line for each call, and one for what nothing needs any more."""
        calls = _needed(record)
        last_use: dict[int, int] = {}
        for i, call in enumerate(calls):
            for number in (*_numbers(call.args), *_numbers(call.kwargs), *_numbers(call.results)):
                last_use[number] = i
        results = set(_numbers(record.results))
        unused: dict[int, list[str]] = {}
        for number, i in last_use.items():
            if number not in results:
                unused.setdefault(i, []).append(f"v{number}")
        lines = []
        for i, call in enumerate(calls):
            lines.append(self._line(call))
            if i in unused:
                lines.append(f"del {', '.join(unused[i])}")
        lines.append(f"return [{', '.join(map(self._text, record.results))}]")
        return lines

    def _line(self, call: Call) -> str:
        args = [*map(self._text, call.args)]
        for k, v in call.kwargs.items():
            text = self._rate(call, v) if isinstance(v, Rate) else self._text(v)
            args.append(f"{k}={text}")
        text = f"{self._operator(call)}({', '.join(args)})"
        if not any(v is not None for v in call.results):
            return text
        names = ["_" if v is None else f"v{v.number}" for v in call.results]
        return f"{', '.join(names)}{',' if call.several else ''} = {text}"

    def _text(self, value: Any) -> str:
        """A value in Python's words; what has none gets a name."""
        if isinstance(value, Value):
            return f"v{value.number}"
        if isinstance(value, Constant):
            return self._constant(value.tensor)
        if isinstance(value, (list, tuple)) and _numbers(value):
            inside = "".join(f"{self._text(v)}, " for v in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, (list, tuple)):
            return self._constant(_tensors(value))
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        if isinstance(value, float) and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _rate(self, call: Call, rate: Rate) -> str:
        """A learning rate, which `set_rate` may change: by its place among all of them."""
        self.places.setdefault(id(call.args[0][0].tensor), []).append(len(self.rates))
        self.rates.append(rate.number)
        return f"rates[{len(self.rates) - 1}]"

    def set_rate(self, params: Sequence[Tensor], rate: float) -> bool:
        """Let a fused optimizer take another learning rate from now on; False: it has none here.

        It is the optimizer of these parameters, of which it may update some in each of its calls.
        """
        places = [place for p in params for place in self.places.get(id(p), ())]
        for place in places:
            self.rates[place] = rate
        return bool(places)

    def _operator(self, call: Call) -> str:
        name = str(call.operator).replace(".", "_")
        name += "" if self.names.get(name, call.run) is call.run else "_directly"
        self.names[name] = call.run
        return name

    def _constant(self, value: Any) -> str:
        name = self._by_id.get(id(value))
        if name is None:
            name = self._by_id[id(value)] = f"c{len(self._by_id)}"
            self.names[name] = value
        return name


def _needed(record: Recording) -> list[Call]:
    """The calls that change a tensor, draw random numbers or make what another one needs."""
    needed, calls = set(_numbers(record.results)), []
    for call in reversed(record.calls):
        pure = not call.operator._schema.is_mutable
        pure = pure and torch.Tag.nondeterministic_seeded not in call.operator.tags
        pure = pure and any(value is not None for value in call.results)  # a check makes nothing
        if pure and needed.isdisjoint(_numbers(call.results)):
            continue
        needed.update(_numbers(call.args), _numbers(call.kwargs))
        calls.append(call)
    return calls[::-1]


def _tensors(value: Any) -> Any:
    """Constants as the tensors that they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tensors, value))
    return value.tensor if isinstance(value, Constant) else value


def _numbers(value: Any) -> list[int]:
    """The numbers of all values among arguments."""
    if isinstance(value, Value):
        return [value.number]
    if isinstance(value, dict):
        value = tuple(value.values())
    if not isinstance(value, (list, tuple)):
        return []
    return [number for v in value for number in _numbers(v)]
