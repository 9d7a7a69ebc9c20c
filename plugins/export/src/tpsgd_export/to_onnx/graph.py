"""An ONNX graph while it is written: nodes, constants, inner graphs.

Opset 17 and IR version 8 run in onnxruntime from 1.17 on, and in its builds for browsers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import safe

OPSET, IR_VERSION = 17, 8
LARGEST = 1 << 30  # bytes of constants; a file of 2 GB cannot be written
Dims = Sequence[int | str]  # a dimension with a name is free
Tensors = Sequence[tuple[str, Dims]]  # names in the graph, and shapes


def onnx_package() -> Any:
    """The package `onnx`, which is not a dependency of the library."""
    try:
        import onnx
    except ImportError as error:
        raise TpsgdError("ONNX files need the package onnx; run: pip install onnx") from error
    return onnx


@dataclass(frozen=True)
class Port:
    """An input or output of a graph: its name, its shape and the type of its numbers."""

    name: str
    dims: Dims
    dtype: type = np.float32

    def __post_init__(self) -> None:
        if safe(self.name) != self.name:
            raise TpsgdError(
                f"{self.name!r} cannot name a tensor of an ONNX graph: name the modules with "
                "letters, digits and _"
            )


class Graph:
    """Nodes in the order in which they run. Every operator is a method: `g.Add(a, b)`.

    Its arguments are names of tensors, or numbers, which become constants; it returns the name of
    the result. All names begin with `prefix`, so that graphs can be put into one another: an inner
    graph sees the tensors of the graphs around it by their names.
    """

    def __init__(self, prefix: str = "", outer: "Graph | None" = None) -> None:
        self.onnx = onnx_package()
        self.prefix, self.nodes = prefix, []
        self.root: Graph = self if outer is None else outer.root
        self.names = 0  # of the root: how many tensors have a name
        self.constants: dict[Any, Any] = {}  # of the root: tensors by type, shape and bytes

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)
        return partial(self._add, operator)

    def _add(self, operator: str, *inputs: Any, outputs: int = 0, **attributes: Any) -> Any:
        """Append a node; the name of its output, or a list of so many names."""
        names = [x if isinstance(x, str) else self.constant(x) for x in inputs]
        results = [self.name(operator) for _ in range(outputs or 1)]
        self.nodes.append(self.onnx.helper.make_node(operator, names, results, **attributes))
        return results if outputs else results[0]

    def name(self, word: str) -> str:
        """A name that no other tensor has."""
        self.root.names += 1
        return f"{self.root.prefix}{word}_{self.root.names}"

    def constant(self, value: Any) -> str:
        """The name of a constant; real numbers are float32, whole numbers int64."""
        array = np.asarray(value)
        dtype = {"f": np.float32, "i": np.int64}.get(array.dtype.kind, array.dtype)
        array = np.array(array, dtype, order="C")
        key, constants = (array.dtype.str, array.shape, array.tobytes()), self.root.constants
        if key not in constants:
            constants[key] = self.onnx.numpy_helper.from_array(array, self.name("constant"))
        return constants[key].name

    def inner(self) -> "Graph":
        """A graph inside this one, for the body of a Scan or the branch of an If."""
        return Graph(outer=self)

    def scan(
        self,
        carried: Tensors,
        sequences: Tensors,
        body: Callable[["Graph", list[str], list[str]], tuple[list[str], Tensors]],
    ) -> list[str]:
        """Run a body over the second dimension of the sequences.

        The body gets a graph, the carried tensors and the slices of a step. It returns the carried
        tensors after the step, and tensors that are stacked to sequences. So does the scan.
        """
        inner, inputs = self.inner(), [*carried, *sequences]
        ports = [Port(inner.name("step"), dims) for _, dims in inputs]
        names = [port.name for port in ports]
        new, stacked = body(inner, names[: len(carried)], names[len(carried) :])
        after = [*zip(new, (dims for _, dims in carried), strict=True), *stacked]
        outputs = [Port(inner.Identity(tensor), dims) for tensor, dims in after]
        axes = {"scan_input_axes": [1] * len(sequences), "scan_output_axes": [1] * len(stacked)}
        return self.Scan(
            *(tensor for tensor, _ in inputs), outputs=len(outputs),
            body=inner.proto("cell", ports, outputs), num_scan_inputs=len(sequences),
            **{name: values for name, values in axes.items() if values},
        )  # fmt: skip

    def proto(self, name: str, inputs: Sequence[Port], outputs: Sequence[Port]) -> Any:
        """The graph; the constants are in the root."""
        constants = list(self.constants.values())
        if (size := sum(constant.ByteSize() for constant in constants)) > LARGEST:
            raise TpsgdError(
                f"class codes and frozen weights take {size:,} bytes, more than an ONNX file can "
                "have; rules.readout() has codes of a few numbers for each filter"
            )
        ports = [[self._info(port) for port in ports] for ports in (inputs, outputs)]
        return self.onnx.helper.make_graph(self.nodes, name, *ports, constants)

    def _info(self, port: Port) -> Any:
        helper = self.onnx.helper
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype))
        return helper.make_tensor_value_info(port.name, kind, list(port.dims))

    def output(self, value: str, name: str) -> None:
        """Give a tensor the name of an output."""
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))


def as_model(graph: Any, about: str) -> Any:
    """A graph as a model that onnx has checked."""
    onnx = onnx_package()
    opset = [onnx.helper.make_opsetid("", OPSET)]
    model = onnx.helper.make_model(
        graph, opset_imports=opset, ir_version=IR_VERSION, producer_name="tpsgd", doc_string=about
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def count_nodes(graph: Any) -> int:
    """The nodes of a graph and of the graphs inside it."""
    inner = (a.g for node in graph.node for a in node.attribute if a.HasField("g"))
    return len(graph.node) + sum(count_nodes(g) for g in inner)
