"""Where a block's gradients come from: ways to get the same ones, with one face.

`forward(params, x)` gives what `local(params, saved, s, tensors)` needs.

- `Closed`: the closed form, autograd off.
- `Autograd`: autograd inside the block, on a graph that starts at its (detached) input.
- `Stacked`: the closed form for many restarts at once, parameters stacked.
- `Unrolled` (in its own module): the closed form of a recurrent block.

In a lower `precision` the first two compute in it; parameters, and what an objective learns, are
rounded as they are used, and their gradients arrive in whatever they were computed in.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tpsgd.nets.blocks import Block
from tpsgd.nets.closed_form import ClosedForm, Params, Saved, lowered, riding
from tpsgd.nets.unrolled import Unrolled
from tpsgd.objectives import IDLE, LossAndGrads, Objective
from tpsgd.projections import Redrawn
from tpsgd.rules import Place

Gradients = tuple[LossAndGrads, Iterable[dict[str, Tensor]]]  # a part at a time


class Closed:
    """Gradients written out; see `closed_form`."""

    label = "closed form"

    def __init__(
        self,
        block: Block,
        at: Place,
        objective: Objective = IDLE,
        in_place: bool = True,
        precision: torch.dtype | None = None,
    ):
        self.form, self.block, self.precision = ClosedForm(block, precision), block, precision
        self.at, self.objective, self.in_place = at, objective, in_place
        self.slices = 1  # of the weight's gradient, made and used one after another

    def set_objective(self, objective: Objective) -> None:
        """Follow this objective from now on."""
        self.objective = objective

    def forward(self, params: Params, x: Tensor) -> Saved:
        """The block's values, up to its activation."""
        return self.form.forward(params, x, self.at, self.in_place)

    def objective_input(self, saved: Saved) -> Tensor:
        """What the objective looks at."""
        if self.at is Place.END:
            return self.output(saved)
        return saved.z if self.at is Place.BEFORE else saved.y

    def gradients(
        self,
        params: Params,
        saved: Saved,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        """The local loss of a batch and the gradients of the block's parameters."""
        y = self.objective_input(saved)
        local = self.objective.coarse(*rounded(self.precision, y, s, tensors))
        form, at, in_place, dy = self.form, self.at, self.in_place, local.dy.to(y.dtype)
        local = local._replace(dy=dy)
        return local, form.gradients(params, saved, dy, at, in_place, output_unused, self.slices)

    def measure(
        self, params: Params, saved: Saved, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        return self.objective(*rounded(self.precision, self.objective_input(saved), s, tensors))

    def error(self, saved: Saved, labels: Tensor) -> Tensor:
        """Where each sample's output should go: minus the derivative of its loss."""
        given = rounded(self.precision, self.objective_input(saved), labels)
        return -len(labels) * self.objective(*given).dy

    def output(self, saved: Saved) -> Tensor:
        """What the next block gets."""
        return riding(self.block.tail, saved.y, self.precision)


class Autograd:
    """Gradients by autograd inside the block; of many restarts at once if `stacked`.

    Stacked, there is one graph, but no number of one restart ever meets one of another.
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
        """The block's values at every place, on a graph that starts here while it learns."""
        with torch.set_grad_enabled(self.block.layer.training):
            if self.stacked:
                return torch.vmap(self._with)(dict(params), x.detach())
            with lowered(x.device, self.precision):
                return self.block.outputs(x.detach())

    def _with(self, params: dict[str, Tensor], x: Tensor) -> dict[Place, Tensor]:
        """The block's values with other parameters than its own."""
        seen, layer = {}, self.block.modules.index(self.block.layer) + len(self.block.between)
        for i, module in enumerate(self.block.modules):
            own = {k[len(f"{i}.") :]: p for k, p in params.items() if k.startswith(f"{i}.")}
            x = torch.func.functional_call(module, own, (x,))
            if i == layer:
                seen[Place.BEFORE] = x
        return seen | {Place.END: x}

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
        local = self.measure(params, saved, s, tensors)
        names = [name for name in params if not name.startswith("objective.")]
        y = saved[self.at]
        dy = local.dy.to(y.dtype)
        grads = torch.autograd.grad(y, [params[n] for n in names], dy, allow_unused=True)
        return local, [{n: g for n, g in zip(names, grads, strict=True) if g is not None}]

    def backward(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, share: float
    ) -> LossAndGrads:
        """As `local`, but autograd adds a share of a batch's gradients to the parameters' own."""
        local = self.measure(params, saved, s, ())
        dy = local.dy if share == 1.0 else local.dy * share
        dy = dy.to(saved[self.at].dtype)
        torch.autograd.backward(saved[self.at], dy, inputs=list(params.values()))
        return local

    def measure(
        self, params: Params, saved: dict[Place, Tensor], s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of a batch."""
        if not self.stacked:
            return self.objective(*rounded(self.precision, self.objective_input(saved), s, tensors))
        one = torch.vmap(lambda y, s: _present(self.objective(y, s)))
        return LossAndGrads(**one(self.objective_input(saved), s))

    def error(self, saved: dict[Place, Tensor], labels: Tensor) -> Tensor:
        """Where each sample's output should go: minus the derivative of its loss."""
        given = rounded(self.precision, self.objective_input(saved), labels)
        return -len(labels) * self.objective(*given).dy

    def output(self, saved: dict[Place, Tensor]) -> Tensor:
        """What the next block gets."""
        y = saved[Place.END].detach()
        return y if self.precision is None else y.to(self.precision)


class Stacked:
    """A closed form for many restarts at once, by `torch.vmap`."""

    label = "closed form"

    def __init__(self, engine: Closed):
        self.engine = engine
        self.forward = torch.vmap(engine.forward)
        self.objective_input = torch.vmap(engine.objective_input)
        self.output = torch.vmap(engine.output)
        self.error = torch.vmap(engine.error)
        self.set_objective = engine.set_objective

    def gradients(
        self,
        params: Params,
        saved: Saved,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        """As `Closed.local`, with a leading dimension of restarts."""

        def one(p: Params, saved: Saved, s: Tensor, tensors: tuple[Tensor, ...]) -> Any:
            local, (grads,) = self.engine.gradients(p, saved, s, tensors)
            return _present(local), grads

        known, grads = torch.vmap(one)(params, saved, s, tensors)
        return LossAndGrads(**known), [grads]

    def measure(
        self, params: Params, saved: Saved, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        """The local loss of every restart."""
        one = torch.vmap(lambda y, s, *own: _present(self.engine.objective(y, s, *own)))
        return LossAndGrads(**one(self.objective_input(saved), s, *tensors))


def rounded(
    precision: torch.dtype | None, y: Tensor, s: Tensor, tensors: tuple[Any, ...] = ()
) -> tuple[Any, ...]:
    """An objective's arguments in one number format.

    In a lower precision that is float32 for vectors, which are small, and the precision itself for
    feature maps.
    """
    if precision is None:
        return (y, s, *tensors)
    dtype = torch.float32 if y.dim() == 2 else precision
    s = s.to(dtype) if s.is_floating_point() else s
    return (y.to(dtype), s, *(in_format(t, dtype) for t in tensors))


def in_format(t: "Tensor | Redrawn", dtype: torch.dtype) -> "Tensor | Redrawn":
    """An objective's tensor in a number format."""
    return replace(t, dtype=dtype) if isinstance(t, Redrawn) else t.to(dtype)


def _present(local: LossAndGrads) -> dict[str, Any]:
    """The parts of a LossAndGrads that are there: vmap cannot return None."""
    return {k: v for k, v in local._asdict().items() if v is not None}


Engine = Closed | Autograd | Stacked | Unrolled
