"""The local step in closed form: forward, objective, times sigma', one product with the input.

    z = x W + b,   y = sigma(z),   dz = dL/dy * sigma'(z),   dW = x^T dz,   db = sum dz

Autograd is off. With a `precision` below the parameters', inputs arrive in it, the layer's weights
are rounded for the product, and batch norm keeps its own numbers as they are.

The functions are pure in their tensors (parameters come in, gradients go out), so `torch.vmap`
stacks them over restarts as they are. `in_place` reuses memory where that is safe.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.maths.memory_format import bands, channels_last, full, spread, sum_of_rows
from tpsgd.nets.activations import activation
from tpsgd.nets.blocks import Block, padding
from tpsgd.rules import Place

aten = torch.ops.aten
Params = Mapping[str, Tensor]


class Saved(NamedTuple):
    """What the forward half leaves for the gradient half."""

    x: Tensor
    z: Tensor  # before the activation; the same memory as y when sigma' can be read off y
    y: Tensor
    layer_out: Tensor  # before the batch norm, if there is one
    stats: tuple[Tensor, ...] = ()  # the batch norm's mean and inverse deviation


class ClosedForm:
    """A block's forward and gradient as functions of its parameters."""

    def __init__(self, block: Block, precision: torch.dtype | None = None) -> None:
        self.block, self.precision = block, precision
        self.layer = block.layer
        self.norm = block.between[0] if block.between else None
        self.act = activation(block.activation)
        self.at_layer = len(block.prologue)

    def weights(self, params: Params, offset: int = 0) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the layer (offset 0) or the norm (1): given, or the module's own."""
        module = self.layer if offset == 0 else self.norm
        key = f"{self.at_layer + offset}."
        bias = params.get(key + "bias", getattr(module, "bias", None))
        return params.get(key + "weight", getattr(module, "weight", None)), bias  # type: ignore

    def forward(self, params: Params, x: Tensor, at: Place, in_place: bool) -> Saved:
        """From the block's input to the activation's output."""
        x = riding(self.block.prologue, x, self.precision)
        out = self._layer(x, *self.weights(params))
        z, stats = (out, ()) if self.norm is None else self._normalise(out, params)
        if self.act is None:
            return Saved(x, z, z, out, stats)
        reuse = in_place and self.act.from_output and at is not Place.BEFORE
        if reuse and self.act.forward_:
            y = self.act.forward_(z)
            return Saved(x, y, y, y if self.norm is None else out, stats)
        return Saved(x, z, self.act.forward(z), out, stats)

    def gradients(
        self,
        params: Params,
        saved: Saved,
        dy: Tensor,
        at: Place,
        in_place: bool,
        output_unused: bool = False,
        slices: int = 1,
    ) -> Iterator[dict[str, Tensor]]:
        """The parameters' gradients, given the objective's derivative at its place.

        They come all at once, or the weight's as so many `slices` of its rows, one after another,
        so that each can be used and forgotten before the next is made.
        `output_unused`: nobody needs the block's output any more, so its memory may be used.
        """
        if at is Place.END and dy.dim() != saved.y.dim():
            dy = dy.reshape(saved.y.shape)
        if at is Place.BEFORE or self.act is None:
            dz = full(dy, saved.z)
        else:
            dz = self._through_activation(saved, dy, in_place, in_place and output_unused)
        grads: dict[str, Tensor] = {}
        if self.norm is not None:
            dz = self._norm_gradients(grads, params, saved, dz)
        key = f"{self.at_layer}."
        weight, bias = self.weights(params)
        if bias is not None:
            grads[key + "bias"] = self._bias_gradient(dz)
        for name, part in sliced(key + "weight", len(weight), slices):
            grads[name] = self._weight_gradient(saved.x, dz, weight, part)
            yield grads
            grads = {}

    def _through_activation(
        self, saved: Saved, dy: Tensor, in_place: bool, output_unused: bool
    ) -> Tensor:
        """dy * sigma'(z), in dy's own memory or the output's where they may be used."""
        assert self.act is not None
        kept = saved.y if self.act.from_output else saved.z
        if dy.shape == kept.shape:
            room = dy if _dense(dy) else saved.y if output_unused else None
            return self.act.backward(dy, kept, room if in_place else None)
        room, down = saved.y if output_unused else torch.empty_like(kept), dy.shape[2]
        self.act.backward(spread(dy, kept), bands(kept, down), bands(room, down))
        return room

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = self.layer
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias)
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
        convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
        pads = padding(layer)
        return convolve(x, weight, bias, layer.stride, pads, layer.dilation, layer.groups)  # type: ignore

    def _bias_gradient(self, dz: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return sum_of_rows(dz.reshape(-1, dz.shape[-1]))
        return _sum_per_filter(dz)

    def _weight_gradient(self, x: Tensor, dz: Tensor, weight: Tensor, part: slice | None) -> Tensor:
        """Of the whole weight, or of some of its rows."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            x, dz = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
            return (dz if part is None else dz[:, part]).T @ x
        assert isinstance(layer, (nn.Conv1d, nn.Conv2d))
        _, dw, _ = aten.convolution_backward(
            dz if part is None else dz[:, part],
            x,
            (weight if part is None else weight[part]).to(x.dtype),
            None,
            layer.stride,
            padding(layer),
            layer.dilation,
            False,
            [0] * len(layer.stride),
            layer.groups,
            (False, True, False),
        )
        return dw

    def _normalise(self, out: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        norm = self.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        weight, bias = self.weights(params, 1)
        z, mean, inverse_std = torch.native_batch_norm(
            out,
            weight,
            bias,
            norm.running_mean,
            norm.running_var,
            norm.training,
            float(norm.momentum or 0.0),
            norm.eps,
        )
        return z, (mean, inverse_std)

    def _norm_gradients(
        self, grads: dict[str, Tensor], params: Params, saved: Saved, dz: Tensor
    ) -> Tensor:
        norm = self.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm) and saved.stats
        weight, _ = self.weights(params, 1)
        mean, inverse_std = saved.stats
        dout, dweight, dbias = aten.native_batch_norm_backward(
            dz,
            saved.layer_out,
            weight,
            norm.running_mean,
            norm.running_var,
            mean,
            inverse_std,
            norm.training,
            norm.eps,
            (True, True, True),
        )
        key = f"{self.at_layer + 1}."
        grads[key + "weight"], grads[key + "bias"] = dweight, dbias
        return dout


def riding(modules: Iterable[nn.Module], x: Tensor, precision: torch.dtype | None) -> Tensor:
    """x through modules that ride with a layer; in a lower precision where one is given."""
    with lowered(x.device, precision):
        for module in modules:
            x = module(x)
    return x if precision is None else x.to(precision)


def lowered(device: torch.device, precision: torch.dtype | None) -> AbstractContextManager[Any]:
    """Where modules compute in a lower precision, if one is given."""
    return nullcontext() if precision is None else torch.autocast(device.type, precision)


def sliced(name: str, rows: int, slices: int) -> Iterator[tuple[str, slice | None]]:
    """The slices of a weight's rows by their names; one is the weight itself.

    Examples:
        >>> list(sliced("weight", 5, 2))
        [('weight[0]', slice(0, 2, None)), ('weight[1]', slice(2, 5, None))]
    """
    slices = min(slices, rows)
    if slices == 1:
        yield name, None
        return
    for i in range(slices):
        yield f"{name}[{i}]", slice(rows * i // slices, rows * (i + 1) // slices)


def _sum_per_filter(dz: Tensor) -> Tensor:
    """The sum over samples and pixels; as a product where the filters lie last, which is faster."""
    if channels_last(dz):
        return sum_of_rows(dz.permute(0, 2, 3, 1).reshape(-1, dz.shape[1]))
    return dz.sum((0, *range(2, dz.dim())))


def _dense(t: Tensor) -> bool:
    """Whether the tensor owns each of its elements (an expanded one does not)."""
    return t.is_contiguous() or (
        t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
    )
