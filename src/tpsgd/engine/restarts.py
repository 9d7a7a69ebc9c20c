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

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import all_outputs, evaluate
from tpsgd.engine.fit import fit_models
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import TwoRates
from tpsgd.engine.record import Run, of_run
from tpsgd.engine.settings import Settings, listed
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.loaders import first_samples, is_stream
from tpsgd.maths.kernels.fused_optimizers import ELEMENTWISE
from tpsgd.maths.random import Key
from tpsgd.nets.blocks import Block
from tpsgd.nets.cuts.leaves import is_chain
from tpsgd.nets.cuts.split import split
from tpsgd.nets.layers import layer_kind
from tpsgd.nets.padded import Padded, SequenceLayer
from tpsgd.objectives import NetSignal, Place, Site
from tpsgd.rules import Rule, resolve
from tpsgd.saved.checkpoint import Checkpoint


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
        order = "stacked" if self.stacked else "one by one"
        seeds = f"seeds {self.runs[0].seed} to {self.runs[-1].seed}"
        title = f"{len(self)} restarts of {self.runs[0].rule}, {order}, {seeds}; the first:"
        return f"{title}\n{self.runs[0]}"

    def evaluate(self, data: Any) -> list[float]:
        """Each model's accuracy; R² if labels are numbers."""
        return [evaluate(run.predictor, data) for run in self.runs]


def fit_many(
    factory: Callable[[], nn.Module],
    data: Any,
    *,
    restarts: int = 25,
    rule: Rule | str | Sequence[Rule | str] | None = None,
    backprop: bool | Backprop = False,
    stacked: bool | None = None,
    **settings: Any,
) -> Restarts:
    """Train `restarts` fresh models from a factory, with the seeds `seed`, `seed + 1`, ...

    Args:
        factory: makes a new, randomly initialised model; called under `torch.manual_seed`.
        data: as for `fit`.
        restarts: how many.
        rule: as for `fit`.
        backprop: train with backpropagation instead of a rule; `Backprop(segments=True)` of
            `tpsgd.engine.learners.backprop`: with activation checkpointing.
        stacked: train all together (True) or one by one (False); None stacks MLPs and recurrent
            nets on a GPU, where that is faster.
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
    chosen = Settings.of("fit_many", settings)
    rule = resolve(rule)
    models = [make_model(factory, chosen.seed + r) for r in range(restarts)]
    if len({id(model) for model in models}) < restarts:
        raise TpsgdError("the factory must make a new model each time, but gave one twice")
    device = chosen.device or next(models[0].parameters(), torch.empty(0)).device
    possible = restarts > 1 and torch.device(device).type == "cuda" if stacked is None else stacked
    obstacle = stacking_obstacle(models[0], data, chosen, rule, backprop) if possible else None
    if stacked and obstacle:
        raise TpsgdError(f"these restarts cannot be stacked: {obstacle}; leave stacked=None")
    method = Backprop() if backprop is True else backprop or rule
    if possible and obstacle is None and restarts > 1:
        return Restarts(models, fit_models(models, data, method, chosen), True)
    runs = []
    for seed, model in enumerate(models, chosen.seed):
        checkpoint = chosen.checkpoint
        if isinstance(checkpoint, Checkpoint) and restarts > 1:
            checkpoint = checkpoint.within(f"seed-{seed}")
        alone = replace(chosen, seed=seed, checkpoint=checkpoint)
        if restarts > 1:
            name = " + ".join(each.name for each in listed(method))
            alone = replace(alone, **of_run({"callbacks": chosen.callbacks}, name, seed))
        runs += fit_models([model], data, method, alone)
    return Restarts(models, runs, False)


def make_model(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A factory's model, its weights drawn from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = None if isinstance(factory, nn.Module) or not callable(factory) else factory()
    if not isinstance(model, nn.Module):
        raise TpsgdError(
            "restarts need a factory, a function without arguments that makes a new model each "
            f"time, got {type(factory if model is None else model).__name__}"
        )
    return model


def stacking_obstacle(
    model: nn.Module, data: Any, settings: Settings, rule: Rule | Sequence[Rule], backprop: Any
) -> str | None:
    """The reason why restarts of this model cannot be stacked, or None."""
    for samples in (data, settings.validation):
        if is_stream(samples):
            return "a loader gives every restart the same batches"
        pair = isinstance(samples, (tuple, list))
        if pair and isinstance(samples[0], (Padded, PackedSequence, list)):
            return "sequences of different lengths end at different times in each restart"
    if not all(map(_elementwise, listed(settings.optimizer))):
        return "the optimizer must act on each number by itself"
    if isinstance(backprop, Backprop) and backprop.segments:
        return "activation checkpointing is for one model at a time"
    if backprop and any(isinstance(m, nn.RNN) for m in model.modules()):
        return "torch's nn.RNN computes one model at a time; take tpsgd.Recurrent"
    if settings.memory.budget is not None or isinstance(settings.memory.reuse, (str, Path)):
        return "a memory budget, and inputs kept in a file, are for one model at a time"
    if settings.checkpoint is not None:
        return "a checkpoint holds one model"
    if settings.augment is not None:
        return "augment changes the batches of one model at a time"
    if settings.weight_decay or settings.clip is not None:
        return "weight decay and clip look at the parameters of one model"
    if settings.precision is not None:
        return "a lower precision is for one model at a time"
    solved = any(isinstance(f, SOLVERS) for f in listed(settings.optimizer))
    recurrent = any(isinstance(m, (nn.RNN, SequenceLayer)) for m in model.modules())
    solved = solved or (settings.optimizer is None and recurrent)  # the default head
    if solved and all_outputs(model, first_samples(data), 2).dim() > 2:
        return "a block is solved for labels of every position, one model at a time"
    if settings.early_stopping is not None or settings.callbacks:
        return "restarts would stop at different times"
    if not is_chain(model):
        return "the model is of a class, and blocks of many are one model at a time"
    cut = {"blocks": settings.blocks, "split_points": settings.split_points}
    if not backprop and any(block.earlier for block in split(model, **cut)):  # type: ignore
        return "blocks of several layers learn through autograd, one model at a time"
    for r in listed(rule):
        if isinstance(r.signal, NetSignal):
            return f"{r.name} computes its signals for one model at a time"
        objective = r.objective and r.objective(Site((2,), 2, Key()))
        if objective and not objective.written_out:
            return f"{r.name}'s loss has no derivative in closed form"
        if objective and objective.noise_at is not None:
            return f"{r.name} draws random numbers for one model at a time"
    return next(filter(None, map(_unstackable, split(model))), None)


def _elementwise(factory: Any) -> bool:
    """Whether stacking changes nothing: the optimizer treats each number by itself, or solves."""
    if factory is None or isinstance(factory, (*SOLVERS, TwoRates)):
        return True
    if getattr(factory, "by_name", False):
        return getattr(factory, "elementwise", False)
    optimizer = factory([nn.Parameter(torch.zeros(1))]) if callable(factory) else None
    return type(optimizer) in ELEMENTWISE


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
