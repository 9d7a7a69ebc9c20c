"""Blocks solved by least squares: in one pass (`ridge`), or again after every batch (`rls`)."""

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.engine.device import available
from tpsgd.engine.learners.learner import BlockLearner
from tpsgd.engine.solvers import SOLVERS, Recursive, Ridge
from tpsgd.engine.solvers.equations import Equations, bytes_to_solve, inputs_of, keeps_samples
from tpsgd.engine.solvers.least_squares import MomentSums, SampleSums, workspace
from tpsgd.engine.solvers.solvable import unsolvable
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.stacked import Stacked
from tpsgd.projections import Redrawn
from tpsgd.rules import Place
from tpsgd.train import Source

SOLVED_BY_STREAMS: WeakSet[nn.Module] = WeakSet()  # layers whose sums over a stream are gone


class SolvedLearner(BlockLearner):
    """A block whose weights solve linear equations; its sums over samples live while it learns."""

    def __init__(self, *args: Any, samples: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.samples = samples  # how many there are; 0 if unknown
        self.sums: MomentSums | SampleSums | None = None
        self.equations: Equations | None = None

    @property
    def how(self) -> str:
        """Where its weights come from, in words."""
        return "solved" if self.trains else "frozen"

    def start(self) -> None:
        """Draw the objective; the block stays in evaluation mode."""
        super().start()
        self.resume()

    def stop(self) -> None:
        """Freeze the block and drop its sums."""
        super().stop()
        self.sums = self.equations = None
        self.figures.loss = self.figures.loss.float()

    def make_equations(self) -> Equations:
        """What the layer's weights must solve, once the objective is drawn."""
        layer: Any = self.block.layer
        codes: Any = self.tensors[0] if self.tensors else None
        if isinstance(codes, Redrawn):
            codes = codes.whole()
        classes = layer.weight.shape[0] if codes is None else codes.shape[1 if self.restarts else 0]
        signed = self.multi_label and codes is None
        return Equations(layer, classes, codes, signed, bool(self.restarts))

    @property
    def _bias(self) -> Tensor | None:
        return self.params.get(f"{len(self.block.prologue)}.bias")

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias to solve for."""
        return self._bias is not None

    def _set_weights(self, weight: Tensor, bias: Tensor) -> None:
        parameter = self.params[f"{len(self.block.prologue)}.weight"]
        parameter.copy_(weight.reshape(parameter.shape))
        if self._bias is not None:
            self._bias.copy_(bias)


class RidgeLearner(SolvedLearner):
    """A block solved after one pass over the samples, in their stored order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.collecting = False
        self.penalty: Tensor | None = None  # of each restart

    @property
    def penalties(self) -> list[float]:
        """The penalty that was used, for each restart."""
        return [] if self.penalty is None else self.penalty.reshape(-1).tolist()

    @property
    def grows(self) -> bool:
        """Whether its memory grows with every batch, because samples are kept."""
        return self.collecting and isinstance(self.sums, SampleSums)

    def start(self) -> None:
        """Draw the objective and begin to collect the equations."""
        super().start()
        self.collecting = self.learning

    def stop(self) -> None:
        """Freeze the block, also if it was solved in an earlier run."""
        super().stop()
        self.collecting = False

    def batches(self, source: Source, epoch: int) -> Iterator[Any]:
        """Every sample once, in the stored order and without augmentation."""
        return source.batches()

    def forward(self, x: Any) -> Any:
        """The block's values; while equations are collected, the layer's inputs are enough."""
        if not self.collecting:
            return super().forward(x)
        for module in self.block.prologue:
            x = torch.vmap(module)(x) if self.restarts else module(x)
        return x

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """Add a batch to the sums."""
        equations = self.equations = self.equations or self.make_equations()
        for rows in equations.parts(saved, labels):
            if self.sums is None:
                keeps = keeps_samples(equations.layer, equations.single, self.samples)
                self.sums = (SampleSums if keeps else MomentSums)(*rows, self.has_bias)
            self.sums.add(*rows)

    def end_epoch(self, samples: int) -> None:
        """Solve for the weight and the bias."""
        if not self.learning:
            return
        assert self.sums is not None and self.equations is not None
        self.before_solving(workspace(self.sums))
        try:
            solution = self.sums.solve(self.settings.optimizer.alpha, self.equations.mixing)
        except RuntimeError:  # of the eigenvectors
            raise TpsgdError(
                f"block {self.block.index + 1} ({self.block}) has inputs too large or too unlike "
                "one another for its equations to be solved: scale them to about 1"
            ) from None
        self._set_weights(solution.weight, solution.bias)
        self.penalty = solution.alpha
        self.figures.loss = solution.loss * self.sums.count  # rows: one or more for each sample
        self.collecting = False


class RecursiveLearner(SolvedLearner):
    """A block solved after every batch, from the sums over all samples so far."""

    def start(self) -> None:
        """Begin with no samples, and say so if the layer was solved before."""
        super().start()
        if self.learning and self.block.layer in SOLVED_BY_STREAMS:
            warnings.warn(
                f"rls() starts from no samples: block {self.block.index + 1} ({self.block}) "
                "forgets the samples of an earlier call; to go on with them, take one tpsgd.Stream "
                "and call its partial_fit",
                stacklevel=2,
            )

    def stop(self) -> None:
        """Freeze the block; the sums over its samples are gone."""
        if self.learning and self.sums is not None:
            SOLVED_BY_STREAMS.add(self.block.layer)
        super().stop()

    def update(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool = False) -> None:
        """Measure the loss on the batch first, then learn from it."""
        self.measure(saved, labels)
        self.learn(saved.x, labels)

    def learn(self, x: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch to the sums, and solve for the weights."""
        equations = self.equations = self.equations or self.make_equations()
        for rows in equations.parts(x, labels):
            self.sums = self.sums or MomentSums(*rows, self.has_bias)
            self.sums.add(*rows)
        assert isinstance(self.sums, MomentSums)
        self._set_weights(*self.sums.so_far(self.settings.optimizer.gamma, equations.mixing))


def check_solvers(learners: list[BlockLearner], spec: Any, one_by_one: bool, samples: int) -> None:
    """Refuse blocks that their solver cannot solve, before any block has learned."""
    together = not one_by_one and len(learners) > 1
    need, learned, form = 0, False, spec.form
    for learner, rule, shape_at in zip(learners, spec.rules, spec.sizes, strict=True):
        block, solver = learner.block, learner.settings.optimizer
        if learner.epochs and isinstance(solver, SOLVERS):
            last = learner is learners[-1]
            reason = unsolvable(block, rule, last)
            closed_form = isinstance(learner.backend, (ClosedForm, Stacked))
            if isinstance(solver, Recursive) and not closed_form:
                reason = reason or "its gradients have no closed form; take ridge()"
            if together and (isinstance(solver, Ridge) or learned):
                reason = "its inputs change while it is solved; use order=tpsgd.sequential"
                if any(r.needs_output for r in spec.rules[:-1]):
                    reason = "its inputs change while it is solved, as the other blocks' rule needs"
            name = f"block {block.index + 1} ({block})"
            if reason:
                raise TpsgdError(f"{solver.__name__} cannot solve {name}: {reason}")
            layer, single = block.layer, last or len(shape_at[Place.BEFORE]) == 1
            keeps = isinstance(solver, Ridge) and keeps_samples(layer, single, samples)
            memory = bytes_to_solve(layer, samples, form.batch_size, keeps, len(form.seeds))
            need = need + memory if together else memory
            if need > (free := available(form.device)):
                raise TpsgdError(
                    f"{name} cannot be solved here: its {inputs_of(layer):,} inputs "
                    f"need about {size(need)} for their products with one another, and "
                    f"{size(free)} are free; pool its inputs first, or train it with an optimizer"
                )
        learned = learned or learner.trains
