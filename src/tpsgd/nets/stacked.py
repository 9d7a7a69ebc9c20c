"""Many restarts in one step, by `torch.vmap`: tensors have a leading dimension of restarts."""

from typing import Any

import torch
from torch import Tensor

from tpsgd.nets.closed_form import ClosedForm, Gradients, Params, Saved
from tpsgd.objectives import NOT_COMPUTED, LossAndGrads, over_dimension, without_none


class Stacked:
    """A closed form for many restarts; see `ClosedForm`."""

    label = "closed form"

    def __init__(self, closed_form: ClosedForm):
        self.closed_form = closed_form
        self.set_objective = closed_form.set_objective
        self.forward = torch.vmap(closed_form.forward)
        self.objective_input = torch.vmap(closed_form.objective_input)
        self.error = torch.vmap(closed_form.error)
        self.output = torch.vmap(closed_form.output)

    def gradients(
        self,
        params: Params,
        saved: Saved,
        s: Tensor,
        tensors: tuple[Tensor, ...],
        output_unused: bool = False,
    ) -> Gradients:
        def one_restart(params: Params, saved: Saved, s: Tensor, tensors: Any) -> Any:
            local, (grads,) = self.closed_form.gradients(params, saved, s, tensors)
            return without_none(local), grads

        local, grads = torch.vmap(one_restart)(params, saved, s, tensors)
        return LossAndGrads(**{"loss": NOT_COMPUTED, "dy": NOT_COMPUTED, **local}), [grads]

    def measure(
        self, params: Params, saved: Saved, s: Tensor, tensors: tuple[Tensor, ...]
    ) -> LossAndGrads:
        objective = over_dimension(self.closed_form.objective)
        return objective(self.objective_input(saved), s, *tensors)
