"""A backbone up to one tap in int8, weights and activations, by onnxruntime: fastest on a CPU.

    light = onnx_int8(encoder.model, encoder.taps["pool5"], examples, "folder")
    encoder = encoder.like(light, "vgg16 in int8")

The ONNX graph is written layer by layer from torch.fx's trace. It is compared with the model before
it is quantised, so a wrong translation is an error.
"""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError

OPSET, IR_VERSION = 17, 8  # old enough for any onnxruntime of today
TOLERANCE = 1e-3  # of the largest feature, between the model and its translation
Operator = tuple[str, list[Tensor], dict[str, Any]]  # its name, its weights and attributes


def onnx_int8(model: nn.Module, tap: str, examples: Tensor, folder: str | Path) -> nn.Module:
    """The part of a model up to a submodule, with weights and activations in int8.

    The examples set the range of every activation, so they should be typical samples; a few dozen
    are enough. The number of threads is torch's at the first run.

    Args:
        model: plain layers and sums that torch.fx can trace; evaluation mode is assumed.
        tap: the submodule to end at, such as `"features.30"`.
        examples: a batch of normalised inputs.
        folder: where the file, `TAP-int8.onnx`, is written; it must stay there.

    Returns:
        A module with that one submodule, under its old name, which runs on the CPU without
        gradients and takes batches of inputs of the examples' shape.
    """
    q = _quantisation()
    if not isinstance(examples, Tensor) or not len(examples) or not examples.is_floating_point():
        raise TpsgdError("the examples must be a batch of at least one input, in floating point")
    examples = examples.detach().cpu().float()
    part = _up_to(copy.deepcopy(model).cpu().float().eval(), tap)
    file = Path(folder) / f"{tap}-int8.onnx"
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        graph, ready = Path(scratch) / "float.onnx", Path(scratch) / "ready.onnx"
        graph.write_bytes(_translated(part, tuple(examples.shape[1:])))
        _compare(part, Session(graph), examples)
        # this folds BatchNorm into the convolution before it
        q.shape_inference.quant_pre_process(graph, ready, skip_symbolic_shape=True)
        batches = iter([{"x": x.numpy()} for x in examples.split(8)])
        q.quantize_static(
            ready, file, SimpleNamespace(get_next=lambda: next(batches, None)),
            q.QuantFormat.QDQ, per_channel=True,
        )  # fmt: skip
    light: nn.Module = Session(file)
    for name in reversed(tap.split(".")):
        light = nn.Sequential(OrderedDict([(name, light)]))
    return light.eval()


class Session(nn.Module):
    """An ONNX file as a module: one tensor in, one out."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.session: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the open session, which cannot be copied."""
        return {**self.__dict__, "session": None}

    def forward(self, x: Tensor) -> Tensor:
        """Run the file, in float32 from outside."""
        if self.session is None:
            self.session = _opened(self.file)
        expected = self.session.get_inputs()[0].shape[1:]
        if list(x.shape[1:]) != expected:
            raise TpsgdError(
                f"{self.file.name} takes inputs of shape {tuple(expected)}, as its examples had, "
                f"got {tuple(x.shape[1:])}: make it again with examples of that shape"
            )
        (y,) = self.session.run(None, {"x": x.detach().cpu().float().contiguous().numpy()})
        return torch.from_numpy(y).to(x.device)


def file_bytes(model: nn.Module) -> int:
    """The bytes of the ONNX files of a model."""
    return sum(m.file.stat().st_size for m in model.modules() if isinstance(m, Session))


def _quantisation() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime.quantization.shape_inference
    except ImportError as error:
        raise TpsgdError(
            "int8 backbones by ONNX need two packages; run: pip install onnx onnxruntime"
        ) from error
    return onnxruntime.quantization


def _opened(file: Path) -> Any:
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # x86 processors without VNNI overflow in int8 products without this; others are slow with it
    features = getattr(torch.cpu, "get_capabilities", dict)()
    careful = not (features.get("avx512_vnni") or features.get("avx_vnni"))
    options.add_session_config_entry("session.x64quantprecision", str(int(careful)))
    try:
        return runtime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common class
        raise TpsgdError(f"{file} is missing or damaged: make it again") from error


def _up_to(model: nn.Module, tap: str) -> fx.GraphModule:
    """The model as a graph that ends with the tap."""
    try:
        traced = fx.symbolic_trace(model)
    except Exception as error:  # anything that the forward pass does with a symbolic input
        raise TpsgdError(
            f"{type(model).__name__} cannot be traced for ONNX (its forward decides by values); "
            "use quantize.bf16 or quantize.int8"
        ) from error
    inside = [n for n in traced.graph.nodes if tap in (n.meta.get("nn_module_stack") or ())]
    if not inside:
        raise TpsgdError(f"{type(model).__name__} never runs a submodule {tap!r}: tap another")
    traced.graph.output_node().args = (inside[-1],)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return traced


@torch.no_grad()
def _compare(part: fx.GraphModule, session: Session, examples: Tensor) -> None:
    """Raise where the translation computes something else than the model."""
    y = part(examples[:2].clone())
    with suppress(TpsgdError):  # a graph that cannot be run
        output = session(examples[:2])
        if y.shape == output.shape and (y - output).abs().max() <= TOLERANCE * y.abs().max():
            return
    raise TpsgdError("the ONNX graph does not compute what the model does; use quantize.int8")


# ---- translation ---------------------------------------------------------------------------------


def _translated(part: fx.GraphModule, shape: tuple[int, ...]) -> bytes:
    """The graph as an ONNX file."""
    from onnx import TensorProto, helper, numpy_helper

    names: dict[fx.Node, str] = {}
    nodes: list[Any] = []
    constants: list[Any] = []
    for node in part.graph.nodes:
        if node.op == "placeholder":
            names[node] = "x"
        elif node.op == "output":
            nodes.append(helper.make_node("Identity", [names[node.args[0]]], ["y"]))
        else:
            op, tensors, attributes = _layer(part, node)
            own = [f"{node.name}_{i}" for i in range(len(tensors))]
            arrays = [np.ascontiguousarray(t.detach().numpy()) for t in tensors]
            constants += [numpy_helper.from_array(*a) for a in zip(arrays, own, strict=True)]
            inputs = [names[n] for n in node.all_input_nodes]
            nodes.append(helper.make_node(op, [*inputs, *own], [node.name], **attributes))
            names[node] = node.name
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "backbone", inputs, outputs, constants)
    opset = [helper.make_opsetid("", OPSET)]
    return helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION).SerializeToString()


def _layer(part: fx.GraphModule, node: fx.Node) -> Operator:
    if node.op == "call_module":
        module = part.get_submodule(str(node.target))
        for kind, write in MODULES.items():
            if isinstance(module, kind):
                return write(module)
        what = type(module).__name__
    else:
        if node.target in FUNCTIONS and all(isinstance(a, fx.Node) for a in node.args):
            return FUNCTIONS[node.target], [], {}
        if node.target is torch.flatten and node.args[1:] == (1,):
            return "Flatten", [], {"axis": 1}
        what = getattr(node.target, "__name__", str(node.target))
    raise TpsgdError(f"{what} has no ONNX form: tap a module before it, or use quantize.int8")


def _conv(m: Any) -> Operator:
    before_after = m._reversed_padding_repeated_twice  # last dimension first, both sides of each
    pads = [*before_after[::2][::-1], *before_after[1::2][::-1]]
    if m.padding_mode != "zeros":
        raise TpsgdError(f"padding_mode={m.padding_mode!r} has no ONNX form; use quantize.int8")
    attributes = {"strides": m.stride, "pads": pads, "dilations": m.dilation, "group": m.groups}
    return "Conv", _weights(m), attributes


def _weights(m: Any) -> list[Tensor]:
    return [m.weight] if m.bias is None else [m.weight, m.bias]


def _pool(m: Any) -> Operator:
    size, stride, pad = (_pair(v) for v in (m.kernel_size, m.stride, m.padding))
    shared = {"kernel_shape": size, "strides": stride, "pads": pad + pad, "ceil_mode": m.ceil_mode}
    if isinstance(m, nn.MaxPool2d):
        return "MaxPool", [], {**shared, "dilations": _pair(m.dilation)}
    return "AveragePool", [], {**shared, "count_include_pad": m.count_include_pad}


def _norm(m: Any) -> Operator:
    tensors = [m.weight, m.bias, m.running_mean, m.running_var]
    if any(t is None for t in tensors):
        raise TpsgdError(f"{m} has no ONNX form, only one with weights and running statistics")
    return "BatchNormalization", tensors, {"epsilon": m.eps}


def _global(m: Any) -> Operator:
    if _pair(m.output_size) != (1, 1):
        raise TpsgdError(f"{m} has no ONNX form, only one cell: tap a module before it")
    return "GlobalAveragePool", [], {}


def _pair(v: Any) -> tuple[Any, ...]:
    return tuple(v) if isinstance(v, tuple | list) else (v, v)


MODULES: dict[Any, Callable[[Any], Operator]] = {
    (nn.Conv1d, nn.Conv2d): _conv,
    nn.Linear: lambda m: ("Gemm", _weights(m), {"transB": 1}),
    (nn.MaxPool2d, nn.AvgPool2d): _pool,
    nn.AdaptiveAvgPool2d: _global,
    (nn.BatchNorm1d, nn.BatchNorm2d): _norm,
    nn.ReLU: lambda m: ("Relu", [], {}),
    nn.LeakyReLU: lambda m: ("LeakyRelu", [], {"alpha": m.negative_slope}),
    nn.ReLU6: lambda m: ("Clip", [torch.tensor(0.0), torch.tensor(6.0)], {}),
    nn.Flatten: lambda m: ("Flatten", [], {"axis": m.start_dim}),
    (nn.Identity, nn.Dropout, nn.Dropout2d): lambda m: ("Identity", [], {}),
}
FUNCTIONS: dict[Any, str] = {
    operator.add: "Add", operator.iadd: "Add", torch.add: "Add",
    torch.relu: "Relu", F.relu: "Relu",
}  # fmt: skip
