"""The local step in closed form: forward, objective, times sigma', one product with the input.

    z = x W + b,   y = sigma(z),   dz = dL/dy * sigma'(z),   dW = x^T dz,   db = sum dz

Autograd is off. `layers` has the products of each layer kind, `activations` each sigma'. The
functions are pure in their tensors (parameters come in, gradients go out), so `torch.vmap` can
stack them over restarts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpsgd.maths.kernels import through_norm
from tpsgd.maths.kernels.memory_format import bands, channels_last, full, spread
from tpsgd.nets.activations import activation
from tpsgd.nets.blocks import Block
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.precision import apply, lowered, rounded
from tpsgd.objectives import IDLE, NOT_COMPUTED, LossAndGrads, Objective, Place

Params = Mapping[str, Tensor]
Gradients = tuple[LossAndGrads, Iterable[dict[str, Tensor]]]  # a few parameters at a time


class Saved(NamedTuple):
    """What the gradients need from the forward pass."""

    x: Tensor
    z: Tensor  # before the activation; shares y's memory where sigma' is a function of y
    y: Tensor
    layer_out: Tensor  # before the batch norm, if there is one
    stats: tuple[Tensor, ...] = ()  # the batch norm's mean and inverse deviation
    output: Sequence[Tensor] = ()  # a list, for the block's output once it has been computed
    inputs: Any = ()  # of a model whose blocks read them: `ModelInputs`


class ClosedForm:
    """A block's forward and gradients as functions of its parameters.

    Args:
        block: a block for which `block.closed_form(at)` holds.
        at: where the objective looks.
        objective: may be set later by `set_objective`.
        in_place: overwrite tensors that are no longer needed.
        precision: compute in this number format; inputs arrive in it, batch norm keeps its own.
    """

    label = "closed form"

    def __init__(
        self,
        block: Block,
        at: Place,
        objective: Objective = IDLE,
        in_place: bool = True,
        precision: torch.dtype | None = None,
    ) -> None:
        self.block, self.at, self.objective = block, at, objective
        self.in_place, self.precision = in_place, precision
        self.slices = 1  # of the weight's gradient, computed and used one after another
        kind = layer_kind(block.layer)
        assert kind is not None, f"{block} has no closed form"
        self.kind, self.act = kind, activation(block.activation)
        self.norm = block.between[0] if block.between else None
        from_output = self.act is not None and self.act.from_output
        self.overwrites = in_place and from_output and at is not Place.BEFORE
        relu = type(block.activation) is nn.ReLU and self.overwrites and self.norm is None
        self.with_relu = kind.with_relu if relu else None
        self.index = len(block.prologue)  # the layer's number among the block's modules
        self.pools = in_place and block.pools

    def set_objective(self, objective: Objective) -> None:
        self.objective = objective

    def forward(self, params: Params, x: Any) -> Saved:
        """From the block's input to the activation's output."""
        x, inputs = apply(self.block.prologue, x, self.precision), ()
        if isinstance(x, ModelInputs):
            x, inputs = x.data, x.without_activation()
        weight, bias = self._weights(params)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        output = [] if self.pools else ()
        if self.with_relu is not None and x.is_cuda and type(x) is Tensor:  # not in a plan
            y = self.with_relu(self.block.layer, x, weight, bias)
            return Saved(x, y, y, y, (), output, inputs)
        subtracted = self.norm is not None and self.norm.training  # a norm subtracts any bias again
        out = self.kind.forward(self.block.layer, x, weight, None if subtracted else bias)
        z, stats = (out, ()) if self.norm is None else self._normalise(out, params, bias)
        if self.act is None:
            return Saved(x, z, z, out, stats, output, inputs)
        if self.overwrites and self.act.forward_:
            z = y = self.act.forward_(z)  # in the memory of z, and of out without a norm
        else:
            y = self.act.forward(z)
        return Saved(x, z, y, out, stats, output, inputs)

    def objective_input(self, saved: Saved) -> Tensor:
        """What the objective looks at."""
        if self.at is Place.END:
            y = self.output(saved)
            return y.data if isinstance(y, ModelInputs) else y
        return saved.z if self.at is Place.BEFORE else saved.y

    def gradients(
        self,
        params: Params,
        saved: Saved,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        """The local loss of a batch and the gradients of the block's parameters.

        They come all together, or the weight's in `slices` of its rows, so that each slice can be
        used and dropped before the next is computed. `output_unused`: nothing reads the block's
        output any more, so its memory may be overwritten.
        """
        y = self.objective_input(saved)
        local = self.objective.in_cells(*rounded(self.precision, y, s, tensors))
        unused = output_unused and local.logits is not saved.y  # which the record still reads
        grads = self._parameter_gradients(params, saved, [local.dy.to(y.dtype)], unused)
        return local._replace(dy=NOT_COMPUTED), grads  # dy is freed once it has gone through sigma'

    def measure(
        self, params: Params, saved: Saved, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        return self.objective(*rounded(self.precision, self.objective_input(saved), s, tensors))

    def error(self, saved: Saved, labels: Tensor) -> Tensor:
        """Where each sample's output should go: minus the derivative of its loss."""
        return -len(labels) * self.measure({}, saved, labels, ()).dy

    def output(self, saved: Saved) -> Tensor:
        """The input of the next block; of a block that pools, computed once."""
        if saved.output:
            output = saved.output[0]
        elif not self.block.tail:
            output = saved.y
        else:
            with lowered(saved.y.device, self.precision):
                output = self.block.onwards(Place.AFTER, saved.y)
            output = output if self.precision is None else output.to(self.precision)
            if isinstance(saved.output, list):
                saved.output.append(output)
        carried = isinstance(saved.inputs, ModelInputs)
        return saved.inputs.with_activation(output) if carried else output

    def _weights(self, params: Params, offset: int = 0) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the layer (offset 0) or the norm (1): given, or the module's own."""
        module = self.block.layer if offset == 0 else self.norm
        key = f"{self.index + offset}."
        bias = params.get(key + "bias", getattr(module, "bias", None))
        return params.get(key + "weight", getattr(module, "weight", None)), bias  # type: ignore

    def _parameter_gradients(
        self, params: Params, saved: Saved, holder: list[Tensor], output_unused: bool
    ) -> Iterator[dict[str, Tensor]]:
        """The gradients; `holder` has dy, and is emptied so that nobody else keeps it alive."""
        dy = holder.pop()
        if self.at is Place.END and dy.dim() != saved.y.dim():
            dy = dy.reshape(saved.y.shape)
        if self.at is Place.BEFORE or self.act is None:
            dz = full(dy, saved.z)
        else:
            dz = self._through_activation(saved, dy, self.in_place and output_unused)
        del dy
        grads: dict[str, Tensor] = {}
        if self.norm is not None:
            dz = self._norm_gradients(grads, params, saved, dz)
        key = f"{self.index}."
        weight, bias = self._weights(params)
        if bias is not None:
            grads[key + "bias"] = self.kind.bias_gradient(dz)
        for name, rows in sliced(key + "weight", len(weight), self.slices):
            grads[name] = self.kind.weight_gradient(self.block.layer, saved.x, dz, weight, rows)
            yield grads
            grads = {}

    def _through_activation(self, saved: Saved, dy: Tensor, output_unused: bool) -> Tensor:
        """dy * sigma'(z), in dy's own memory or the output's where they may be overwritten."""
        assert self.act is not None
        value = saved.y if self.act.from_output else saved.z
        if dy.shape == value.shape:
            dense = any((dy.is_contiguous(), dy.mT.is_contiguous(), channels_last(dy)))
            into = saved.y if output_unused else dy if dense else None
            return self.act.backward(dy, value, into if self.in_place else None)
        if self.pools and not output_unused:
            self.output(saved)  # nothing else reads y then
            output_unused = True
        into, down = saved.y if output_unused else torch.empty_like(value), dy.shape[2]
        self.act.backward(spread(dy, value), bands(value, down), bands(into, down))
        return into

    def _normalise(
        self, out: Tensor, params: Params, bias: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The norm of the layer's output, from which the bias was left out while it learns."""
        norm = self.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        if norm.training and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        weight, shift = self._weights(params, 1)
        running, momentum = (norm.running_mean, norm.running_var), float(norm.momentum or 0.0)
        z, mean, inverse_std = torch.native_batch_norm(
            out, weight, shift, *running, norm.training, momentum, norm.eps
        )
        if norm.training and bias is not None and norm.running_mean is not None:
            norm.running_mean.data.add_(bias, alpha=momentum)  # as quietly as torch writes it
        return z, (mean, inverse_std)

    def _norm_gradients(
        self, grads: dict[str, Tensor], params: Params, saved: Saved, dz: Tensor
    ) -> Tensor:
        norm = self.norm
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm) and saved.stats
        weight, _ = self._weights(params, 1)
        if norm.training and self.in_place and through_norm.suits(dz, saved.layer_out):
            dout, dweight, dbias = through_norm.in_place(dz, saved.layer_out, weight, *saved.stats)
        else:
            stats = (norm.running_mean, norm.running_var, *saved.stats)
            dout, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dz, saved.layer_out, weight, *stats, norm.training, norm.eps, (True, True, True)
            )
        key = f"{self.index + 1}."
        grads[key + "weight"], grads[key + "bias"] = dweight, dbias
        return dout


def sliced(name: str, rows: int, slices: int) -> Iterator[tuple[str, slice | None]]:
    """The slices of a weight's rows by their names; a single slice is the weight itself.

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
