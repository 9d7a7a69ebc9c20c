"""What one call of `partial_fit` leaves for the next, so that many calls are one training run."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tpsgd.engine.learner import EarlyStopping
from tpsgd.engine.optimizers import OptimizerFactory
from tpsgd.engine.record import Patience
from tpsgd.objectives import Objective, Site
from tpsgd.rules import Rule


@dataclass
class StreamOptimizer:
    """A factory whose optimizers go on from the state of the one before."""

    make: OptimizerFactory
    states: list[dict[str, Any]] = field(default_factory=list)  # one per parameter
    optimizer: Optimizer | None = None  # the latest one

    def __call__(self, params: Iterable[Tensor]) -> Optimizer:
        """An optimizer over the same parameters as before."""
        params = list(params)
        self.optimizer = self.make(params)
        if len(params) == len(self.states):
            self.optimizer.state.update(zip(params, self.states, strict=True))
        return self.optimizer

    def store(self) -> None:
        """Keep the state of the latest optimizer, and let go of it."""
        if self.optimizer is not None:
            params = self.optimizer.param_groups[0]["params"]
            self.states = [self.optimizer.state[p] for p in params]
            self.optimizer = None


class Stream:
    """The optimizers, the objectives' tensors and the patience of a stream of samples.

    An objective is drawn and calibrated in the first call. Its tensors (class codes, which may be
    learned) stay as they are afterwards.
    """

    def __init__(self, optimizer: OptimizerFactory, blocks: int) -> None:
        self.optimizers = [StreamOptimizer(optimizer) for _ in range(blocks)]
        self.tensors: dict[int, tuple[Tensor, ...]] = {}
        self.mean_loss: float | None = None  # of held-out samples, the latest calls
        self.patience: Patience | None = None
        self.stopped = False

    def continued(self, rule: Rule) -> Rule:
        """The rule, with the tensors that its objectives had before."""
        make = rule.objective
        if make is None:
            return rule

        def objective(site: Site) -> Objective:
            drawn, block = make(site), site.key.block
            if block in self.tensors:
                return replace(drawn, tensors=self.tensors[block], calibration=None)
            self.tensors[block] = drawn.tensors
            return drawn

        return replace(rule, objective=objective)

    def store(self) -> None:
        """Keep what the call has changed."""
        for optimizer in self.optimizers:
            optimizer.store()

    def watch(self, loss: float, stopping: EarlyStopping) -> None:
        """Stop if the mean loss of held-out samples has not improved for long enough.

        It is an exponential mean over about as many calls as the patience has.
        """
        self.patience = self.patience or Patience(stopping)
        before = loss if self.mean_loss is None else self.mean_loss
        self.mean_loss = before + (loss - before) * 2 / (stopping.patience + 1)
        self.stopped = self.patience.spent(self.mean_loss)
