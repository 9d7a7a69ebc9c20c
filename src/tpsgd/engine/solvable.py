"""Which blocks a solver can solve, and whether there is room to; said before any block learns."""

from typing import Any

import torch

from tpsgd.engine.batches import Form
from tpsgd.engine.device import available
from tpsgd.engine.learner import Learner
from tpsgd.engine.schedules import sequential
from tpsgd.engine.settings import Settings
from tpsgd.engine.trainer import BlockSettings
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.nets.blocks import Block, hooked
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.layers import LAYERS, layer_kind
from tpsgd.nets.stacked import Stacked
from tpsgd.objectives import Site
from tpsgd.rules import Place, Rule, Signal
from tpsgd.solvers import SOLVERS, Recursive, Ridge
from tpsgd.solvers.equations import bytes_to_solve, inputs_of, keeps_samples
from tpsgd.units import size


def check_solvers(
    learners: list[Learner],
    rules: list[Rule],
    courses: list[BlockSettings],
    sizes: list[dict[Place, tuple[int, ...]]],
    settings: Settings,
    samples: int,
    form: Form,
) -> None:
    """Refuse blocks that their solver cannot solve, before any block has learned."""
    together = settings.schedule is not sequential and len(learners) > 1
    need, learned = 0, False
    for learner, rule, course, shape in zip(learners, rules, courses, sizes, strict=True):
        block, solver = learner.block, course.optimizer
        if learner.trains and course.epochs and isinstance(solver, SOLVERS):
            last = learner is learners[-1]
            reason = unsolvable(block, rule, last)
            if isinstance(solver, Recursive) and not isinstance(
                learner.engine, (ClosedForm, Stacked)
            ):
                reason = reason or "its gradients have no closed form; take ridge()"
            if together and (isinstance(solver, Ridge) or learned):
                reason = "its inputs change while it is solved; use schedule=tpsgd.sequential"
            name = f"block {block.index + 1} ({block})"
            if reason:
                raise TpsgdError(f"{solver.__name__} cannot solve {name}: {reason}")
            layer: Any = block.layer
            single = last or len(shape[Place.BEFORE]) == 1
            keeps = isinstance(solver, Ridge) and keeps_samples(layer, single, samples)
            room = bytes_to_solve(layer, samples, form.batch_size, keeps, len(form.seeds))
            need = need + room if together else room
            _check_room(name, layer, need, form.device)
        learned = learned or learner.trains


def _check_room(name: str, layer: Any, need: int, device: torch.device) -> None:
    """Refuse before memory runs out, not after."""
    if need > (free := available(device)):
        raise TpsgdError(
            f"{name} cannot be solved in closed form here: its {inputs_of(layer):,} inputs need "
            f"about {size(need)} for their products with one another, and {size(free)} are free; "
            "pool its inputs first, or train it with an optimizer"
        )


def unsolvable(block: Block, rule: Rule, last: bool) -> str | None:
    """Why a block's weights are no solution of linear equations, or None."""
    layer, make = block.layer, rule.last if last else rule.objective
    kind = LAYERS.get(type(layer))
    if kind is None or kind.equations is None:
        return "only nn.Linear, nn.Conv1d and nn.Conv2d are linear in their weights"
    if layer_kind(layer) is None or not kind.dense(layer):
        return "its convolution has groups, or is not padded with zeros"
    if block.between:
        return f"{type(block.between[0]).__name__} stands between the layer and its activation"
    if any(hooked(m) for m in block.modules):
        return "one of its modules has a hook"
    if any(p.requires_grad for m in block.prologue for p in m.parameters()):
        return "a module before the layer learns too"
    if not all(p.requires_grad for p in layer.parameters()):
        return "its weight or its bias may not learn (requires_grad is False)"
    if make is None:
        bare = block.modules[-1] is layer
        return None if bare else "what stands after the last layer is not linear"
    if rule.signal is not Signal.LABEL or not make(Site((2,), 2, Key())).squared:
        return f"{rule.name} does not lower a squared error to the projected label"
    if rule.at is not Place.BEFORE and block.activation is not None:
        return f"{rule.name} looks beyond the activation; take at=tpsgd.Place.BEFORE"
    if rule.at is Place.END and block.tail:
        return f"{rule.name} looks at the block's end; take at=tpsgd.Place.BEFORE"
    return None
