"""Many restarts of one experiment, together where that is faster.

On a GPU a small MLP's step is launch latency, so restarts are stacked: parameters, projections and
batches get a leading dimension and one step serves all. Elsewhere they run one after another. Both
ways give restart r the same initial weights, projections and sample order, all from `seed + r`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tpsgd.engine.backprop import Backprop
from tpsgd.engine.optimizers import ELEMENTWISE, TwoRates, adam
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings, listed
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key
from tpsgd.nets.blocks import Block, split
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import Padded
from tpsgd.objectives import Site
from tpsgd.rules import Place, Rule, readout
from tpsgd.solvers import SOLVERS
from tpsgd.training.evaluate import evaluate
from tpsgd.training.fit import run_training


@dataclass
class Restarts:
    """Trained models and their records, in the order of their seeds."""

    models: list[nn.Module]
    runs: list[Run]
    stacked: bool

    def __len__(self) -> int:
        return len(self.models)

    def __iter__(self) -> Iterator[tuple[nn.Module, Run]]:
        return iter(zip(self.models, self.runs, strict=True))

    def __str__(self) -> str:
        how = "stacked" if self.stacked else "one by one"
        seeds = f"seeds {self.runs[0].seed} to {self.runs[-1].seed}"
        title = f"{len(self)} restarts of {self.runs[0].rule}, {how}, {seeds}; the first:"
        return f"{title}\n{self.runs[0]}"

    def evaluate(self, data: Any) -> list[float]:
        """Each model's accuracy."""
        return [evaluate(model, data) for model in self.models]


def fit_many(
    factory: Callable[[], nn.Module],
    data: Any,
    *,
    restarts: int = 25,
    rule: Rule | Sequence[Rule] | None = None,
    backprop: bool = False,
    stacked: bool | None = None,
    **settings: Any,
) -> Restarts:
    """Train `restarts` fresh models from a factory, with the seeds `seed`, `seed + 1`, ...

    Args:
        factory: makes a new, randomly initialised model; called under `torch.manual_seed`.
        data: as for `fit`.
        restarts: how many.
        rule: as for `fit`.
        backprop: train with backpropagation instead of a rule.
        stacked: train all at once (True) or one by one (False); None stacks MLPs and recurrent nets
            on a GPU, where that is faster.
        **settings: everything else that `fit` takes.

    When stacked, `seconds` and `peak_bytes` of every run are those of all restarts together.

    Examples:
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> many = fit_many(lambda: nn.Sequential(nn.Linear(8, 2)), (x, y), restarts=2, epochs=1)
        >>> [run.seed for run in many.runs]
        [0, 1]
    """
    if restarts < 1:
        raise TpsgdError(f"restarts must be 1 or more, got {restarts}")
    wanted = Settings.of("fit_many", settings)
    rule = readout() if rule is None else rule
    models = [make_model(factory, wanted.seed + r) for r in range(restarts)]
    if len({id(model) for model in models}) < restarts:
        raise TpsgdError("the factory must make a new model each time, but gave one twice")
    device = wanted.device or next(models[0].parameters(), torch.empty(0)).device
    if stacked is None:
        stacked = torch.device(device).type == "cuda" and restarts > 1
        stacked = stacked and stacking_obstacle(models[0], data, wanted, rule, backprop) is None
    elif stacked and (reason := stacking_obstacle(models[0], data, wanted, rule, backprop)):
        raise TpsgdError(f"these restarts cannot be stacked: {reason}; leave stacked=None")
    method = Backprop() if backprop else rule
    if stacked and restarts > 1:
        return Restarts(models, run_training(models, data, method, wanted), True)
    runs = [
        run_training([model], data, method, replace(wanted, seed=wanted.seed + r))[0]
        for r, model in enumerate(models)
    ]
    return Restarts(models, runs, False)


def make_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A factory's model, its weights drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = None if isinstance(factory, nn.Module) else factory()
    if not isinstance(made, nn.Module):
        raise TpsgdError(
            "restarts need a factory, a function without arguments that makes a new model each "
            f"time, got {type(factory if made is None else made).__name__}"
        )
    return made


def stacking_obstacle(
    model: nn.Module, data: Any, settings: Settings, rule: Rule | Sequence[Rule], backprop: bool
) -> str | None:
    """The reason why restarts of this model cannot be stacked, or None."""
    for part in (data, settings.validation):
        if isinstance(part, (Dataset, DataLoader)) and not isinstance(part, TensorDataset):
            return "a loader gives every restart the same batches"
        if isinstance(part, (tuple, list)) and isinstance(part[0], (Padded, PackedSequence, list)):
            return "sequences of different lengths end at different times in each restart"
    if not all(map(_elementwise, listed(settings.optimizer))):
        return "the optimizer must act on each number by itself"
    if backprop and any(isinstance(m, nn.RNN) for m in model.modules()):
        return "torch's nn.RNN computes one model at a time; take tpsgd.Recurrent"
    if settings.memory.budget is not None or isinstance(settings.memory.reuse, (str, Path)):
        return "a memory budget, and inputs kept in a file, are for one model at a time"
    if settings.augment is not None:
        return "augment changes the batches of one model at a time"
    if settings.precision is not None:
        return "a lower precision is for one model at a time"
    if settings.early_stopping is not None or settings.callbacks:
        return "restarts would stop at different times"
    for r in listed(rule):
        objective = r.objective and r.objective(Site((2,), 2, Key()))
        if objective and not objective.written_out:
            return f"{r.name}'s loss has no derivative in closed form"
    return next(filter(None, map(_unstackable, split(model))), None)


def _elementwise(factory: Any) -> bool:
    """Whether stacking changes nothing: an optimizer of numbers one by one, or ridge."""
    if factory is adam or isinstance(factory, (*SOLVERS, TwoRates)):
        return True
    if getattr(factory, "elementwise", False):
        return True
    made = factory([nn.Parameter(torch.zeros(1))]) if callable(factory) else None
    return type(made) in ELEMENTWISE


def _unstackable(block: Block) -> str | None:
    kind = layer_kind(block.layer)
    if not block.recurrent and (kind is None or not kind.stackable):
        return f"{block} is not a linear or recurrent layer"
    if block.between or any(isinstance(m, nn.modules.dropout._DropoutNd) for m in block.modules):
        return f"{block} has a normalisation or dropout"
    if not all(p.requires_grad for m in block.modules for p in m.parameters()):
        return f"{block} has parameters that do not learn"
    if not block.recurrent and not block.closed_form(Place.END):
        return f"{block} has no closed form"
    return None
