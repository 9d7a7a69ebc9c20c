"""A block's gradients by autograd, on a graph that starts at the block's detached input.

The graph ends where the objective looks; what follows there, pooling for example, only computes the
next block's input. Activations are freed layer by layer as the backward pass leaves them, the
block's own output and the derivative with respect to it too.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.maths.kernels.memory_format import full
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import Gradients, Params
from tpsgd.nets.layers import reading_pixels_first, skips_pixels
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import SequenceLayer, through
from tpsgd.nets.precision import lowered, rounded
from tpsgd.objectives import IDLE, LossAndGrads, Objective, Place, over_dimension

INPUTS: Any = "the model's inputs"  # among the values of a forward pass
THROUGH_TIME = "autograd through time"


class Autograd:
    """Gradients of a block of any modules; see `ClosedForm` for its methods.

    `stacked`: of many restarts, in one graph in which no restart depends on another.
    """

    label = "autograd"

    def __init__(
        self,
        block: Block,
        at: Place,
        objective: Objective = IDLE,
        stacked: bool = False,
        precision: torch.dtype | None = None,
    ):
        self.block, self.at, self.objective = block, at, objective
        self.stacked, self.precision = stacked, precision
        self.functions = block.functions(at)  # from the block's input to there
        modules = [m for module in block.modules for m in module.modules()]
        self.strided = list(filter(skips_pixels, modules))
        if any(isinstance(m, (nn.RNNBase, SequenceLayer)) for m in modules):
            self.label = THROUGH_TIME

    def set_objective(self, objective: Objective) -> None:
        self.objective = objective

    def forward(self, params: Params, x: Tensor) -> dict[Place, Any]:
        """What the objective looks at; the graph starts here while the block learns."""
        learning = torch.set_grad_enabled(self.block.layer.training)
        with learning, reading_pixels_first(self.strided):
            if self.stacked:
                return torch.vmap(self._outputs_with)(dict(params), x.detach())
            with lowered(x.device, self.precision):
                y = x.detach()
                for function in self.functions:
                    y = through(function, y)
                if isinstance(y, ModelInputs):
                    return {self.at: y.data, INPUTS: y.without_activation()}
                return {self.at: y}

    def _outputs_with(self, params: dict[str, Tensor], x: Tensor) -> dict[Place, Tensor]:
        """The block's output with other parameters than its own."""
        modules, outputs = self.block.modules, {}
        last_before = modules.index(self.block.layer) + len(self.block.between)
        for i, module in enumerate(modules):
            key = f"{i}."
            replaced = {k[len(key) :]: p for k, p in params.items() if k.startswith(key)}
            x = torch.func.functional_call(module, replaced, (x,))
            if i == last_before:
                outputs[Place.BEFORE] = x
        return outputs | {Place.END: x}

    def objective_input(self, saved: dict[Place, Tensor]) -> Tensor:
        return saved[self.at].detach()

    def gradients(
        self,
        params: Params,
        saved: dict[Place, Tensor],
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        """The local loss of a batch and the gradients of the block's parameters.

        These are computed when they are read, so that class codes can learn before.
        """
        local = self._local(saved, s, tensors)
        names = [name for name in params if not name.startswith("objective.")]
        y = saved[self.at]
        if self.at is not Place.END:  # y is freed in the backward pass
            if not output_unused:
                self.output(saved)
            del saved[self.at]
        start, local = _graph_of(y, local)
        del y
        return local, self._parameter_gradients(params, names, [start])

    def _parameter_gradients(
        self, params: Params, names: list[str], start: list[Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        with reading_pixels_first(self.strided):  # checkpointed segments compute again
            values = [params[n] for n in names]
            grads = torch.autograd.grad(start.pop(), values, allow_unused=True)
        gradients = {n: g for n, g in zip(names, grads, strict=True) if g is not None}
        del grads  # the reader takes them out one by one
        yield gradients

    def backward(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, share: float
    ) -> LossAndGrads:
        """As `gradients`, but autograd adds this share of them to each parameter's `grad`."""
        local = self._local(saved, s, ())
        dy = local.dy if share == 1.0 else local.dy * share
        start, local = _graph_of(saved[self.at], local._replace(dy=dy))
        with reading_pixels_first(self.strided):
            torch.autograd.backward(start, inputs=list(params.values()))
        return local

    def _local(
        self, saved: dict[Place, Tensor], s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The derivatives of the local loss, which may be left out."""
        if self.stacked:
            return self.measure({}, saved, s, tensors)
        y = self.objective_input(saved)
        local = self.objective.in_cells(*rounded(self.precision, y, s, tensors))
        return local._replace(dy=full(local.dy, y))

    def measure(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        y = self.objective_input(saved)
        if self.stacked:
            return over_dimension(self.objective)(y, s)
        return self.objective(*rounded(self.precision, y, s, tensors))

    def error(self, saved: dict[Place, Tensor], labels: Tensor) -> Tensor:
        return -len(labels) * self.measure({}, saved, labels, ()).dy

    def output(self, saved: dict[Place, Any]) -> Any:
        """The input of the next block, computed once."""
        if Place.END not in saved:
            y = saved[self.at].detach()
            with torch.no_grad(), lowered(y.device, self.precision):
                saved[Place.END] = self.block.onwards(self.at, y)
        y = saved[Place.END].detach()
        y = y if self.precision is None else y.to(self.precision)
        return saved[INPUTS].with_activation(y) if INPUTS in saved else y


class _Start(torch.autograd.Function):
    """A number whose derivative with respect to y is dy, which is freed once it has been used.

    Given to `torch.autograd.grad` as an argument, dy would live as long as the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, dy: list[Tensor]) -> Tensor:  # pyright: ignore
        ctx.dy = dy
        return y.new_empty(())  # any number will do

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        return ctx.dy.pop(), None


def _graph_of(y: Tensor, local: LossAndGrads) -> tuple[Tensor, LossAndGrads]:
    """Where the backward pass starts; the result no longer has the derivative."""
    with torch.enable_grad():
        start = _Start.apply(y, [local.dy.to(y.dtype)])
    return start, local._replace(dy=y.new_empty(0))  # type: ignore[return-value]
