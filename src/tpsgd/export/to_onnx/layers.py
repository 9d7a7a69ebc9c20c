"""Layers, pools and local losses of a recipe as ONNX operators, forwards and by their gradients.

Feature maps have the shape (batch, channels, rows, columns); those of a `Conv1d` have one row.
`params` are the names of a layer's parameters in the graph, by their names in the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tpsgd.export.recipe import (
    BlockRecipe,
    Cell,
    Convolution,
    Dense,
    LocalLoss,
    Pair,
    Pool,
    Shape,
)
from tpsgd.export.to_onnx.graph import Dims, Graph, Port

Params = Mapping[str, str]
Grads = dict[str, str]
CODES = "codes"  # in place of a parameter's name: class codes that learn


@dataclass(frozen=True)
class Labels:
    """The labels of a batch: class indices, their rows y*, and 1 / the number of samples."""

    indices: str
    rows: str
    share: str


def activate(g: Graph, block: BlockRecipe, z: str) -> str:
    """y = sigma(z)."""
    if block.activation == "none":
        return z
    if block.activation == "leaky_relu":
        return g.LeakyRelu(z, alpha=block.slope)
    return {"relu": g.Relu, "tanh": g.Tanh, "sigmoid": g.Sigmoid}[block.activation](z)


def times_derivative(g: Graph, block: BlockRecipe, dy: str, y: str) -> str:
    """dy * sigma'(z), from y = sigma(z)."""
    kind = block.activation
    if kind in ("relu", "leaky_relu"):
        below = g.Mul(dy, block.slope) if kind == "leaky_relu" else 0.0
        return g.Where(g.Greater(y, 0.0), dy, below)
    if kind == "tanh":
        return g.Mul(dy, g.Sub(1.0, g.Mul(y, y)))
    return g.Mul(dy, g.Mul(y, g.Sub(1.0, y))) if kind == "sigmoid" else dy


def as_maps(shape: Shape) -> Shape:
    """Channels, rows and columns of feature maps that may have columns only."""
    return shape if len(shape) == 3 else (shape[0], 1, *shape[1:])


def layer_input(g: Graph, block: BlockRecipe, x: str, shape: Shape) -> str:
    """x in the shape that a block's layer reads."""
    layer = _plain(block)
    expected = (layer.inputs,) if isinstance(layer, Dense) else (layer.channels, *layer.size)
    return x if shape == expected else g.Reshape(x, [0, *expected])


def forward(g: Graph, block: BlockRecipe, x: str, params: Params) -> str:
    """y = sigma(x W + b)."""
    layer, bias = _plain(block), [params["bias"]] if "bias" in params else []
    if isinstance(layer, Dense):
        z = g.Gemm(x, params["weight"], *bias, transB=1)
    else:
        kernels = layer.filters, layer.channels // layer.groups, *layer.kernel
        z = g.Conv(
            x, g.Reshape(params["weight"], kernels), *bias, strides=layer.stride,
            pads=layer.padding * 2, dilations=layer.dilation, group=layer.groups,
        )  # fmt: skip
    return activate(g, block, z)


def _plain(block: BlockRecipe) -> Dense | Convolution:
    """The layer of a block that is not recurrent."""
    assert isinstance(block.layer, (Dense, Convolution))
    return block.layer


def gradients(g: Graph, block: BlockRecipe, x: str, dz: str) -> Grads:
    """The derivatives of the local loss with respect to a layer's weight and bias."""
    layer = _plain(block)
    if isinstance(layer, Dense):
        grads = {"weight": g.Gemm(dz, x, transA=1)}
    else:
        weight = _convolution_gradient(g, layer, x, dz)
        grads = {"weight": g.Reshape(weight, list(block.parameters["weight"].shape))}
    if "bias" in block.parameters:
        axes = [0] if isinstance(layer, Dense) else [0, 2, 3]
        grads["bias"] = g.ReduceSum(dz, axes, keepdims=0)
    return grads


def _convolution_gradient(g: Graph, layer: Convolution, x: str, dz: str) -> str:
    """dW by a convolution: channels are its batch, samples its channels, dz its kernels.

    Stride and dilation trade places. Rows that the stride never reached are cut off.
    """
    groups, channels = layer.groups, layer.channels // layer.groups
    if groups == 1:
        turned = g.Transpose(x, perm=[1, 0, 2, 3])
    else:
        apart = g.Reshape(x, [0, groups, channels, *layer.size])
        apart = g.Transpose(apart, perm=[2, 1, 0, 3, 4])
        turned = g.Reshape(apart, [channels, -1, *layer.size])
    dw = g.Conv(
        turned, g.Transpose(dz, perm=[1, 0, 2, 3]), strides=layer.dilation,
        pads=layer.padding * 2, dilations=layer.stride, group=groups,
    )  # fmt: skip
    return g.Transpose(g.Slice(dw, [0, 0], layer.kernel, [2, 3]), perm=[1, 0, 2, 3])


def pooled(g: Graph, pool: Pool, y: str) -> str:
    """Feature maps after a pool."""
    if pool.kind == "cells":
        return _averages(g, y, pool.size, pool.out)
    operator = g.MaxPool if pool.kind == "max" else g.AveragePool
    return operator(y, kernel_shape=pool.kernel, strides=pool.stride)


def _averages(g: Graph, y: str, size: Pair, grid: Pair) -> str:
    """Feature maps averaged over a grid of cells, as products A y B^T."""
    if size == grid:
        return y
    rows, columns = (_cells(*each) for each in zip(size, grid, strict=True))
    return g.MatMul(g.MatMul(rows, y), columns.T)


def _back_to_pixels(g: Graph, df: str, size: Pair, grid: Pair) -> str:
    """The derivative of `_averages`: A^T df B."""
    if size == grid:
        return df
    rows, columns = (_cells(*each) for each in zip(size, grid, strict=True))
    return g.MatMul(g.MatMul(rows.T, df), columns)


def _cells(pixels: int, cells: int) -> np.ndarray:
    """(cells, pixels): the share of each pixel in the average of a cell; cells may overlap."""
    matrix = np.zeros((cells, pixels), np.float32)
    for i in range(cells):
        start, stop = i * pixels // cells, -(-(i + 1) * pixels // cells)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def head_loss(g: Graph, loss: str, y: str, labels: Labels) -> tuple[str, str]:
    """The loss of outputs y against the labels, and dL/dy."""
    if loss == "mse":
        rest = g.Sub(y, labels.rows)
        return _half_square(g, rest, labels), g.Mul(rest, labels.share)
    if loss == "cross_entropy":
        p, values = g.Softmax(y, axis=1), g.Neg(g.Mul(g.LogSoftmax(y, axis=1), labels.rows))
    else:
        p, values = g.Sigmoid(y), g.Sub(g.Softplus(y), g.Mul(y, labels.rows))
    error = g.Mul(g.Sub(p, labels.rows), labels.share)
    return g.Mul(g.ReduceSum(values, keepdims=0), labels.share), error


def _half_square(g: Graph, rest: str, labels: Labels) -> str:
    return g.Mul(g.ReduceSum(g.Mul(rest, rest), keepdims=0), g.Mul(labels.share, 0.5))


def features(g: Graph, local: LocalLoss, y: str) -> str:
    """What a readout reads of the output."""
    if local.grid is None:
        return y
    averages = _averages(g, y, _size(local), local.grid)
    return g.Reshape(averages, [0, local.codes.size])


def local_loss(
    g: Graph, local: LocalLoss, y: str, labels: Labels, P: str, gain: Any = 1.0
) -> "Local":
    """A local loss of the output y; P has the output's shape, or a readout's."""
    if local.name == "readout":
        f = features(g, local, y)
        value, error = head_loss(g, local.loss, g.Mul(g.Gemm(f, P, transB=1), gain), labels)
        error = g.Mul(error, gain)
        df, codes = g.MatMul(error, P), g.Gemm(error, f, transA=1) if local.learned else ""
        if local.grid is None:
            return Local(value, df, codes)
        cells = g.Reshape(df, [0, local.shape[0], *local.grid])
        return Local(value, _back_to_pixels(g, cells, _size(local), local.grid), codes)
    aim = g.Gather(P, labels.indices, axis=0)
    if local.name == "inner":
        dy = g.Mul(aim, g.Neg(labels.share))
        return Local(g.ReduceSum(g.Mul(dy, y), keepdims=0), dy)
    rest = g.Sub(y, aim)
    if local.name == "l2":
        return Local(_half_square(g, rest, labels), g.Mul(rest, labels.share))
    value = g.Mul(g.ReduceSum(g.Abs(rest), keepdims=0), labels.share)
    return Local(value, g.Mul(g.Sign(rest), labels.share))


def _size(local: LocalLoss) -> Pair:
    """Rows and columns of the feature maps that a local loss looks at."""
    _, rows, columns = as_maps(local.shape)
    return rows, columns


def calibrated_gain(g: Graph, target: float, mean_square: str) -> str:
    """The gain that makes the root mean square of the features `target`; of zeros, it is 1."""
    rms = g.Sqrt(mean_square)
    return g.Div(target, g.Where(g.Greater(rms, 0.0), rms, 1.0))


class Local(NamedTuple):
    """A local loss, dL/dy, and of a learned readout dL/dP."""

    value: str
    dy: str
    codes: str = ""


class Carried(NamedTuple):
    """A tensor that a Scan carries from step to step."""

    start: str
    new: str
    dims: Dims


class CellScan:
    """A recurrent cell that reads sequences (batch, steps, inputs) in a Scan over time.

    The states are fixed inputs of the time steps (`tpsgd.nets.cell_gradients`), so that gradients
    are summed while the sequence is read. Nothing grows with its length, but for the states of all
    steps where the next layer reads them.
    """

    def __init__(self, g: Graph, block: BlockRecipe, x: str, params: Params) -> None:
        assert isinstance(block.layer, Cell)
        self.g, self.block, self.layer, self.x, self.params = g, block, block.layer, x, params
        self.weight_x, self.weight_h = (params[f"cells.0.weight_{k}"] for k in "xh")
        biases = [params[f"cells.0.bias_{k}"] for k in "xh" if f"cells.0.bias_{k}" in params]
        self.bias = [g.Add(*biases)] if biases else []
        batch = g.Shape(x, start=0, end=1)
        self.start = g.Expand(0.0, g.Concat(batch, [self.layer.outputs], axis=0))

    def read(self, all_states: bool) -> str:
        """The last state of each sequence, or the states of all steps."""
        body = self.g.inner()
        h, x = body.name("h"), body.name("x")
        new, _ = self._step(body, x, h)
        carried = {h: Carried(self.start, new, ("batch", self.layer.outputs))}
        (last,), states = self._scan(body, carried, {x: self.x}, new if all_states else None)
        return states if all_states else last

    def mean_square(self) -> str:
        """The mean square of the states of all steps, for a readout's calibration."""
        g, body = self.g, self.g.inner()
        h, x, total = (body.name(word) for word in ("h", "x", "squares"))
        new, _ = self._step(body, x, h)
        squares = body.Add(total, body.ReduceMean(body.Mul(new, new), keepdims=0))
        carried = {
            h: Carried(self.start, new, ("batch", self.layer.outputs)),
            total: Carried(g.constant(0.0), squares, ()),
        }
        results, _ = self._scan(body, carried, {x: self.x}, None)
        return g.Div(results[1], self._steps())

    def learn(
        self, local: LocalLoss, labels: Labels, P: str, gain: Any, all_states: bool, classes: int
    ) -> tuple[str, str, Grads]:
        """As `read`; and the local loss, a mean over all steps, with the summed gradients.

        P is (classes, units), or (steps, classes, units) if each time step has its own codes.
        """
        g, body, layer = self.g, self.g.inner(), self.layer
        h, x, loss = (body.name(word) for word in ("h", "x", "loss"))
        codes = body.name("P") if local.codes.per_step else P
        each = replace(labels, share=g.Div(labels.share, self._steps()))
        new, c = self._step(body, x, h)
        at_step = local_loss(body, local, new, each, codes, gain)
        dz = times_derivative(body, self.block, body.Mul(at_step.dy, layer.leak), c)
        terms = self._terms(body, x, h, dz)
        if at_step.codes:
            terms[CODES] = at_step.codes, (classes, layer.outputs)
        carried = {
            h: Carried(self.start, new, ("batch", layer.outputs)),
            loss: Carried(g.constant(0.0), body.Add(loss, at_step.value), ()),
            **self._sums(body, terms),
        }
        scanned = {x: self.x} | ({codes: self._codes_of_steps(P)} if local.codes.per_step else {})
        states = new if all_states else None
        (last, value, *sums), states = self._scan(body, carried, scanned, states)
        of_word = dict(zip(terms, sums, strict=True))
        words = [(name, name.removeprefix("cells.0.")) for name in self.params]
        grads = {name: of_word["bias" if "bias" in word else word] for name, word in words}
        if at_step.codes:
            grads[CODES] = of_word[CODES]
        return (states if all_states else last), value, grads

    def _terms(self, body: Graph, x: str, h: str, dz: str) -> dict[str, tuple[str, Shape]]:
        """What a step adds to the gradients of W_X, W_H and the biases, and their shapes."""
        units, inputs = self.layer.outputs, self.layer.inputs
        return {
            "weight_x": (body.Gemm(dz, x, transA=1), (units, inputs)),
            "weight_h": (body.Gemm(dz, h, transA=1), (units, units)),
            "bias": (body.ReduceSum(dz, [0], keepdims=0), (units,)),
        }

    def _sums(self, body: Graph, terms: Mapping[str, tuple[str, Shape]]) -> dict[str, Carried]:
        """The terms, summed over the steps."""
        sums = {}
        for term, shape in terms.values():
            total, zeros = body.name("sum"), self.g.constant(np.zeros(shape, np.float32))
            sums[total] = Carried(zeros, body.Add(total, term), shape)
        return sums

    def _step(self, body: Graph, x: str, h: str) -> tuple[str, str]:
        """The state after a time step, and sigma(z) in it."""
        z = body.Gemm(x, self.weight_x, *self.bias, transB=1)
        c = activate(body, self.block, body.Add(z, body.Gemm(h, self.weight_h, transB=1)))
        leak = self.layer.leak
        return (c if leak == 1 else body.Add(h, body.Mul(body.Sub(c, h), leak))), c

    def _steps(self) -> str:
        """How many time steps there are."""
        g = self.g
        return g.Cast(g.Squeeze(g.Shape(self.x, start=1, end=2)), to=1)

    def _codes_of_steps(self, P: str) -> str:
        """As many codes as there are time steps, with the steps in the second dimension."""
        g = self.g
        codes = g.Slice(P, [0], g.Shape(self.x, start=1, end=2), [0])
        return g.Transpose(codes, perm=[1, 0, 2])

    def _scan(
        self, body: Graph, carried: dict[str, Carried], scanned: dict[str, str], states: str | None
    ) -> tuple[list[str], str]:
        """Run the body over the second dimension of what is scanned: x, and codes of each step.

        Returns what was carried, after the last step, and the `states` of all steps.
        """
        layer = self.layer
        slices = (("batch", layer.inputs), ("classes", layer.outputs))
        inputs = [Port(name, tensor.dims) for name, tensor in carried.items()]
        inputs += [Port(name, dims) for name, dims in zip(scanned, slices, strict=False)]
        outputs = [Port(body.Identity(tensor.new), tensor.dims) for tensor in carried.values()]
        axes: dict[str, list[int]] = {"scan_input_axes": [1] * len(scanned)}
        if states:
            outputs.append(Port(body.Identity(states), ("batch", layer.outputs)))
            axes["scan_output_axes"] = [1]
        results = self.g.Scan(
            *(tensor.start for tensor in carried.values()), *scanned.values(),
            outputs=len(outputs), body=body.proto("cell", inputs, outputs),
            num_scan_inputs=len(scanned), **axes,
        )  # fmt: skip
        return results[: len(carried)], results[-1] if states else ""
