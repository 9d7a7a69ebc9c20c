"""Layers, pools and local losses of a recipe as ONNX operators, forwards and by their gradients.

Feature maps have the shape (batch, channels, rows, columns); those of a `Conv1d` have one row.
`params` are the names of a layer's parameters in the graph, by their names in the layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tpsgd_export.recipe import (
    BlockRecipe,
    CellLayer,
    Convolution,
    Dense,
    LocalLoss,
    Pair,
    Pool,
    Shape,
)
from tpsgd_export.to_onnx.graph import Graph, Tensors

Params = Mapping[str, str]
Grads = dict[str, str]
CODES = "codes"  # in place of a parameter's name: class codes that learn


def activate(g: Graph, block: BlockRecipe, z: str) -> str:
    """y = sigma(z)."""
    if block.activation == "none":
        return z
    if block.activation == "leaky_relu":
        return g.LeakyRelu(z, alpha=block.slope)
    if block.activation == "relu6":
        return g.Min(g.Relu(z), 6.0)
    return {"relu": g.Relu, "tanh": g.Tanh, "sigmoid": g.Sigmoid}[block.activation](z)


def times_derivative(g: Graph, block: BlockRecipe, dy: str, y: str) -> str:
    """dy * sigma'(z), from y = sigma(z)."""
    kind = block.activation
    if kind == "relu6":
        dy = g.Where(g.Less(y, 6.0), dy, 0.0)
    if kind in ("relu", "relu6", "leaky_relu"):
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
    layer = block.layer
    if isinstance(layer, CellLayer):
        return x
    expected = (layer.channels, *layer.size) if isinstance(layer, Convolution) else (layer.inputs,)
    return x if shape == expected else g.Reshape(x, [0, *expected])


def forward(g: Graph, block: BlockRecipe, x: str, params: Params, all_states: bool = True) -> str:
    """y = sigma(x W + b); of a recurrent layer the states of all steps, or the last one."""
    layer, bias = block.layer, [params["bias"]] if "bias" in params else []
    if isinstance(layer, CellLayer):
        return read_sequence(g, block, x, params, all_states)[0]
    if isinstance(layer, Dense):
        z = g.Gemm(x, params["weight"], *bias, transB=1)
    else:
        assert isinstance(layer, Convolution)
        kernels = layer.filters, layer.channels // layer.groups, *layer.kernel
        z = g.Conv(
            x, g.Reshape(params["weight"], kernels), *bias, strides=layer.stride,
            pads=layer.padding * 2, dilations=layer.dilation, group=layer.groups,
        )  # fmt: skip
    return activate(g, block, z)


def gradients(g: Graph, block: BlockRecipe, x: str, dz: str) -> Grads:
    """The derivatives of the local loss with respect to a layer's weight and bias."""
    layer, axes = block.layer, [0]
    if isinstance(layer, Convolution):
        weight, axes = _convolution_gradient(g, layer, x, dz), [0, 2, 3]
        grads = {"weight": g.Reshape(weight, list(block.parameters["weight"].shape))}
    else:
        grads = {"weight": g.Gemm(dz, x, transA=1)}
    if "bias" in block.parameters:
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


def pooled(g: Graph, block: BlockRecipe, y: str) -> tuple[str, Shape]:
    """The output of a block after its pools, and its shape."""
    if block.recurrent:
        return y, block.shape[-1:]
    shape = as_maps(block.shape) if len(block.shape) > 1 else block.shape
    for pool in block.pools:
        y, shape = _pooled(g, pool, y), (pool.channels, *pool.out)
    return y, shape


def _pooled(g: Graph, pool: Pool, y: str) -> str:
    if pool.kind == "cells":
        return _averages(g, y, pool.size, pool.out)
    operator = g.MaxPool if pool.kind == "max" else g.AveragePool
    return operator(y, kernel_shape=pool.kernel, strides=pool.stride)


def _averages(g: Graph, y: str, size: Pair, grid: Pair, backwards: bool = False) -> str:
    """Feature maps averaged over a grid of cells, A y B^T; or the gradient of that, A^T y B."""
    if size == grid:
        return y
    A, B = (_cells(*each) for each in zip(size, grid, strict=True))
    left, right = (A.T, B) if backwards else (A, B.T)
    return g.MatMul(g.MatMul(left, y), right)


def _cells(pixels: int, cells: int) -> np.ndarray:
    """(cells, pixels): the share of each pixel in the average of a cell; cells may overlap."""
    matrix = np.zeros((cells, pixels), np.float32)
    for i in range(cells):
        start, stop = i * pixels // cells, -(-(i + 1) * pixels // cells)
        matrix[i, start:stop] = 1 / (stop - start)
    return matrix


def features(g: Graph, local: LocalLoss, y: str) -> str:
    """What a readout reads of the output."""
    if local.grid is None:
        return y
    averages = _averages(g, y, _size(local), local.grid)
    return g.Reshape(averages, [0, local.codes.size])


def _size(local: LocalLoss) -> Pair:
    """Rows and columns of the feature maps that a local loss looks at."""
    _, rows, columns = as_maps(local.shape)
    return rows, columns


class LossGradients(NamedTuple):
    """The value of a loss, dL/dy, and of a learned readout dL/dP."""

    value: str
    dy: str
    codes: str = ""


@dataclass(frozen=True)
class BlockLoss:
    """What a block lowers: the loss of the logits, or the local loss of a hidden block."""

    indices: str  # the classes of a batch
    rows: str  # one-hot
    share: str  # 1 / the number of samples
    classes: int
    loss: str
    local: LocalLoss | None = None
    codes: str = ""  # P, of the output's shape or of a readout's features
    gain: Any = 1.0  # of a readout's logits

    def at(self, g: Graph, y: str, codes: str = "") -> LossGradients:
        """The loss of the output y; `codes` are those of a time step."""
        if self.local is None:
            return self._of_logits(g, self.loss, y)
        if self.local.name == "readout":
            return self._readout(g, self.local, y)
        aim = g.Gather(codes or self.codes, self.indices, axis=0)
        if self.local.name == "inner":
            dy = g.Mul(aim, g.Neg(self.share))
            return LossGradients(g.ReduceSum(g.Mul(dy, y), keepdims=0), dy)
        rest = g.Sub(y, aim)
        if self.local.name == "l2":
            return self._half_square(g, rest)
        return LossGradients(self._mean(g, g.Abs(rest)), g.Mul(g.Sign(rest), self.share))

    def _mean(self, g: Graph, values: str) -> str:
        """The sum over all but the samples, averaged over these."""
        return g.Mul(g.ReduceSum(values, keepdims=0), self.share)

    def _half_square(self, g: Graph, rest: str) -> LossGradients:
        value = g.Mul(self._mean(g, g.Mul(rest, rest)), 0.5)
        return LossGradients(value, g.Mul(rest, self.share))

    def _of_logits(self, g: Graph, loss: str, y: str) -> LossGradients:
        if loss == "mse":
            return self._half_square(g, g.Sub(y, self.rows))
        if loss == "cross_entropy":
            p, values = g.Softmax(y, axis=1), g.Neg(g.Mul(g.LogSoftmax(y, axis=1), self.rows))
        else:
            p, values = g.Sigmoid(y), g.Sub(g.Softplus(y), g.Mul(y, self.rows))
        return LossGradients(self._mean(g, values), g.Mul(g.Sub(p, self.rows), self.share))

    def _readout(self, g: Graph, local: LocalLoss, y: str) -> LossGradients:
        f = features(g, local, y)
        logits = g.Mul(g.Gemm(f, self.codes, transB=1), self.gain)
        value, error, _ = self._of_logits(g, local.loss, logits)
        error = g.Mul(error, self.gain)
        df = g.MatMul(error, self.codes)
        codes = g.Gemm(error, f, transA=1) if local.learned else ""
        if local.grid is not None:
            cells = g.Reshape(df, [0, local.shape[0], *local.grid])
            df = _averages(g, cells, _size(local), local.grid, backwards=True)
        return LossGradients(value, df, codes)


def learn(
    g: Graph, block: BlockRecipe, x: str, params: Params, loss: BlockLoss, all_states: bool
) -> tuple[str, str, Grads]:
    """The output of a block, its loss, and the gradients of its parameters and class codes."""
    if block.recurrent:
        return read_sequence(g, block, x, params, all_states, loss)
    y = forward(g, block, x, params)
    value, dy, codes = loss.at(g, y)
    grads = gradients(g, block, x, times_derivative(g, block, dy, y))
    return y, value, grads | ({CODES: codes} if codes else {})


def read_sequence(
    g: Graph,
    block: BlockRecipe,
    x: str,
    params: Params,
    all_states: bool,
    loss: BlockLoss | None = None,
) -> tuple[str, str, Grads]:
    """A recurrent cell that reads sequences (batch, steps, inputs) in a Scan over time.

    The loss is a mean over all steps. The states are fixed inputs of the time steps
    (`tpsgd.nets.cell_gradients`), so gradients are summed while the sequence is read.
    Class codes are (classes, units), or (steps, classes, units) if each time step has its own.
    """
    units, steps = block.layer.outputs, g.Shape(x, start=1, end=2)
    biases = [tensor for name, tensor in params.items() if "bias" in name]
    bias = [g.Add(*biases)] if biases else []
    zeros = g.Expand(0.0, g.Concat(g.Shape(x, start=0, end=1), [units], axis=0))
    sums = _sum_shapes(block, loss) if loss else {}
    carried: Tensors = [
        (zeros, ("batch", units)),
        *((g.constant(np.zeros(shape, np.float32)), shape) for shape in sums.values()),
    ]
    sequences: Tensors = [(x, ("batch", block.layer.inputs))]
    if loss and loss.local:
        if loss.local.codes.per_step:
            codes = g.Transpose(g.Slice(loss.codes, [0], steps, [0]), perm=[1, 0, 2])
            sequences = [*sequences, (codes, ("classes", units))]
        loss = replace(loss, share=g.Div(loss.share, g.Cast(g.Squeeze(steps), to=1)))

    def body(inner: Graph, before: list[str], slices: list[str]) -> tuple[list[str], Tensors]:
        (h, *totals), (now, *codes) = before, slices
        new, c = _cell_step(inner, block, params, bias, now, h)
        terms = []
        if loss:
            terms = _terms(inner, block, loss.at(inner, new, *codes), now, h, c)
        stacked: Tensors = [(new, ("batch", units))] if all_states else []
        return [new, *map(inner.Add, totals, terms)], stacked

    results = g.scan(carried, sequences, body)
    y, total = results[-1 if all_states else 0], dict(zip(sums, results[1:], strict=False))
    of_layer = [(name, name.removeprefix("cells.0.")) for name in params]
    grads = {name: total["bias" if "bias" in word else word] for name, word in of_layer if total}
    if CODES in total:
        grads[CODES] = total[CODES]
    return y, total.get("loss", ""), grads


def _sum_shapes(block: BlockRecipe, loss: BlockLoss) -> dict[str, Shape]:
    """What is summed over the time steps, in the order of `_terms`."""
    inputs, units = block.layer.inputs, block.layer.outputs
    shapes = {"loss": (), "weight_x": (units, inputs), "weight_h": (units, units), "bias": (units,)}
    return shapes | ({CODES: (loss.classes, units)} if block.learned_codes else {})


def _terms(g: Graph, block: BlockRecipe, loss: LossGradients, x: str, h: str, c: str) -> list[str]:
    """What a time step adds to the loss and to the gradients of W_X, W_H, biases and codes."""
    assert isinstance(block.layer, CellLayer)
    dz = times_derivative(g, block, g.Mul(loss.dy, block.layer.leak), c)
    weights = [g.Gemm(dz, tensor, transA=1) for tensor in (x, h)]
    terms = [loss.value, *weights, g.ReduceSum(dz, [0], keepdims=0)]
    return [*terms, loss.codes] if loss.codes else terms


def _cell_step(
    g: Graph, block: BlockRecipe, params: Params, bias: list[str], x: str, h: str
) -> tuple[str, str]:
    """The state after a time step, and sigma(z) in it."""
    assert isinstance(block.layer, CellLayer)
    z = g.Gemm(x, params["cells.0.weight_x"], *bias, transB=1)
    z = g.Add(z, g.Gemm(h, params["cells.0.weight_h"], transB=1))
    c, leak = activate(g, block, z), block.layer.leak
    return (c if leak == 1 else g.Add(h, g.Mul(g.Sub(c, h), leak))), c
