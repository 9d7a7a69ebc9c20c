"""Blocks solved by least squares: in one pass (`ridge`), or again after every batch (`rls`)."""

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.engine.device import available
from tpsgd.engine.learners.updaters import Updater
from tpsgd.engine.solvers import SOLVERS, Recursive, Ridge
from tpsgd.engine.solvers.equations import Equations, bytes_to_solve, inputs_of, keeps_samples
from tpsgd.engine.solvers.least_squares import MomentSums, SampleSums, workspace
from tpsgd.engine.solvers.solvable import unsolvable
from tpsgd.engine.sources.inputs import NO_LABEL
from tpsgd.maths.positions import Layout
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.stacked import Stacked
from tpsgd.objectives import Place
from tpsgd.projections import Redrawn

SOLVED_BY_STREAMS: WeakSet[nn.Module] = WeakSet()  # layers whose sums over a stream are gone


class Solver(Updater):
    """Weights that solve linear equations; the sums over samples live while the block learns.

    `samples` is how many there are, 0 if that is unknown; `layout` is of labels of every position.
    """

    label = "solved"

    def __init__(self, samples: int = 0, layout: Layout | None = None) -> None:
        self.samples, self.layout = (samples if layout is None else 0), layout
        self.sums: MomentSums | SampleSums | None = None
        self.equations: Equations | None = None

    def stop(self) -> None:
        """Drop the sums."""
        figures = self.learner.figures
        figures.loss = figures.loss.float()
        super().stop()
        self.sums = self.equations = None

    def make_equations(self) -> Equations:
        """What the layer's weights must solve, once the objective is drawn."""
        learner = self.learner
        layer: Any = learner.block.layer
        codes: Any = learner.tensors[0] if learner.tensors else None
        if isinstance(codes, Redrawn):
            codes = codes.whole()
        stacked = bool(learner.restarts)
        classes = layer.weight.shape[0] if codes is None else codes.shape[1 if stacked else 0]
        signed = learner.multi_label and codes is None
        return Equations(layer, classes, codes, signed, stacked, self.layout)

    def _parameter(self, name: str) -> Tensor | None:
        return self.learner.params.get(f"{len(self.learner.block.prologue)}.{name}")

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias to solve for."""
        return self._parameter("bias") is not None

    def _set_weights(self, weight: Tensor, bias: Tensor) -> None:
        for name, values in (("weight", weight), ("bias", bias)):
            if (parameter := self._parameter(name)) is not None:
                parameter.copy_(values.reshape(parameter.shape))


class RidgeSolver(Solver):
    """Least squares after one pass over the samples, in their stored order."""

    in_stored_order = True

    def __init__(self, samples: int = 0, layout: Layout | None = None) -> None:
        super().__init__(samples, layout)
        self.penalty: Tensor | None = None  # of each restart
        self.before_solving: Callable[[int], None] = lambda workspace: None

    @property
    def penalties(self) -> tuple[float, ...]:
        """The penalty that was used, for each restart."""
        return () if self.penalty is None else tuple(self.penalty.reshape(-1).tolist())

    @property
    def grows(self) -> bool:
        """Whether its memory grows with every batch, because samples are kept."""
        return self.collecting and isinstance(self.sums, SampleSums)

    def start(self, learner: Any) -> None:
        """Begin to collect the equations."""
        super().start(learner)
        self.collecting = True

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """Add a batch to the sums."""
        equations = self.equations = self.equations or self.make_equations()
        for rows in equations.parts(saved, labels):
            if self.sums is None:
                keeps = keeps_samples(equations.layer, equations.single, self.samples)
                self.sums = (SampleSums if keeps else MomentSums)(*rows, self.has_bias)
            self.sums.add(*rows)

    def end_epoch(self) -> None:
        """Solve for the weight and the bias."""
        assert self.sums is not None and self.equations is not None
        if not self.sums.count:
            raise TpsgdError(NO_LABEL)
        learner = self.learner
        self.before_solving(workspace(self.sums))
        try:
            solution = self.sums.solve(learner.settings.optimizer.alpha, self.equations.mixing)
        except RuntimeError:  # of the eigenvectors
            raise TpsgdError(
                f"block {learner.block.index + 1} ({learner.block}) has inputs too large or too "
                "unlike one another for its equations to be solved: scale them to about 1"
            ) from None
        self._set_weights(solution.weight, solution.bias)
        self.penalty = solution.alpha
        learner.figures.loss = solution.loss * self.sums.count  # rows: one or more for each sample
        learner.figures.counted.fill_(self.sums.count)  # of positions
        self.collecting = False

    def stop(self) -> None:
        """Drop the sums, also if the block was solved in an earlier run."""
        super().stop()
        self.collecting = False


class RecursiveSolver(Solver):
    """Least squares after every batch, from the sums over all samples so far."""

    def start(self, learner: Any) -> None:
        """Begin with no samples, and say so if the layer was solved before."""
        super().start(learner)
        if learner.block.layer in SOLVED_BY_STREAMS:
            warnings.warn(
                f"rls() starts from no samples: block {learner.block.index + 1} ({learner.block}) "
                "forgets the samples of an earlier call; to go on with them, take one tpsgd.Stream "
                "and call its partial_fit",
                stacklevel=2,
            )

    def apply(self, saved: Any, s: Tensor, labels: Tensor, output_unused: bool) -> None:
        """Measure the loss on the batch first, then learn from it."""
        self.learner.measure(saved, labels)
        self.learn(saved.x, labels)

    def learn(self, x: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch to the sums, and solve for the weights."""
        equations = self.equations = self.equations or self.make_equations()
        for rows in equations.parts(x, labels):
            self.sums = self.sums or MomentSums(*rows, self.has_bias)
            self.sums.add(*rows)
        assert isinstance(self.sums, MomentSums)
        gamma = self.learner.settings.optimizer.gamma
        self._set_weights(*self.sums.so_far(gamma, equations.mixing))

    def stop(self) -> None:
        """Drop the sums over the samples."""
        if self.sums is not None:
            SOLVED_BY_STREAMS.add(self.learner.block.layer)
        super().stop()


def check_solvers(learners: list[Any], spec: Any, one_by_one: bool, samples: int) -> None:
    """Refuse blocks that their solver cannot solve, before any block has learned."""
    together = not one_by_one and len(learners) > 1
    need, learned, form = 0, False, spec.form
    for learner, rule, shape_at in zip(learners, spec.rules, spec.sizes, strict=True):
        block, solver = learner.block, learner.settings.optimizer
        if learner.epochs and isinstance(solver, SOLVERS):
            last = learner is learners[-1]
            reason = unsolvable(block, rule, last)
            closed_form = isinstance(learner.gradient, (ClosedForm, Stacked))
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
