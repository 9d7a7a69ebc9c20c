"""A block's gradients by autograd, on a graph that starts at the block's detached input."""

import torch
from torch import Tensor

from tpsgd.maths.memory_format import full
from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import Gradients, Params
from tpsgd.nets.precision import lowered, rounded
from tpsgd.nets.stacked import over_dimension
from tpsgd.objectives import IDLE, LossAndGrads, Objective
from tpsgd.rules import Place


class Autograd:
    """Gradients of a block of any modules; same methods as `ClosedForm`.

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

    def set_objective(self, objective: Objective) -> None:
        """Follow this objective from now on."""
        self.objective = objective

    def forward(self, params: Params, x: Tensor) -> dict[Place, Tensor]:
        """The block's output at every place; the graph starts here while the block learns."""
        with torch.set_grad_enabled(self.block.layer.training):
            if self.stacked:
                return torch.vmap(self._outputs_with)(dict(params), x.detach())
            with lowered(x.device, self.precision):
                return self.block.outputs(x.detach())

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
        """What the objective looks at."""
        return saved[self.at].detach()

    def gradients(
        self,
        params: Params,
        saved: dict[Place, Tensor],
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        """The local loss of a batch and the gradients of the block's parameters."""
        local = self._local(saved, s, tensors)
        names = [name for name in params if not name.startswith("objective.")]
        y = saved[self.at]
        dy = local.dy.to(y.dtype)
        grads = torch.autograd.grad(y, [params[n] for n in names], dy, allow_unused=True)
        return local, [{n: g for n, g in zip(names, grads, strict=True) if g is not None}]

    def backward(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, share: float
    ) -> LossAndGrads:
        """As `gradients`, but autograd adds this share of them to each parameter's `grad`."""
        local = self._local(saved, s, ())
        dy = local.dy if share == 1.0 else local.dy * share
        dy = dy.to(saved[self.at].dtype)
        torch.autograd.backward(saved[self.at], dy, inputs=list(params.values()))
        return local

    def _local(
        self, saved: dict[Place, Tensor], s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The derivatives of the local loss, which may be left out."""
        y = self.objective_input(saved)
        if self.stacked:
            return over_dimension(self.objective)(y, s)
        local = self.objective.coarse(*rounded(self.precision, y, s, tensors))
        return local._replace(dy=full(local.dy, y))

    def measure(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        y = self.objective_input(saved)
        if self.stacked:
            return over_dimension(self.objective)(y, s)
        return self.objective(*rounded(self.precision, y, s, tensors))

    def error(self, saved: dict[Place, Tensor], labels: Tensor) -> Tensor:
        """Where each sample's output should go: minus the derivative of its loss."""
        arguments = rounded(self.precision, self.objective_input(saved), labels)
        return -len(labels) * self.objective(*arguments).dy

    def output(self, saved: dict[Place, Tensor]) -> Tensor:
        """The input of the next block."""
        y = saved[Place.END].detach()
        return y if self.precision is None else y.to(self.precision)
