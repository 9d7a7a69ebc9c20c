"""`check_rule`: the contract that every rule keeps, for people who write rules."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError, reason
from tpsgd.engine.fit import fit
from tpsgd.maths.random import Key
from tpsgd.objectives import BlockSignal, LossAndGrads, NetSignal, Objective, Site, differentiate
from tpsgd.rules import Rule, resolve
from tpsgd.train import simultaneous


def check_rule(rule: Rule | str) -> None:
    """Raise a `TpsgdError` that says what is wrong with a rule, if anything is.

    - its closed form, where it has one, equals autograd on its loss, in float64;
    - its objective is a pure function: the same inputs give the same numbers, no input changes, and
      the derivative has its own memory (training writes into it);
    - the same key gives the same objective, its random numbers included;
    - a signal of the whole net is a function of the net and the batch, and tells the truth about
      update locking: without it, no block behind is asked before a block has its signal;
    - a small model trains with it, the same way twice.

    Examples:
        >>> from tpsgd import rules
        >>> check_rule(rules.tpsgd_l2())
    """
    rule = resolve(rule) if isinstance(rule, str) else rule  # type: ignore[assignment]
    if not isinstance(rule, Rule):
        raise TpsgdError(f"check_rule takes a Rule or its name, got {type(rule).__name__}")
    with _named(rule.name):
        problem = next(_problems(rule), None)
    if problem:
        raise TpsgdError(f"{rule.name}: {problem}")


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Any error of the functions of a rule is one sentence that begins with `what`."""
    try:
        yield
    except Exception as error:
        raise TpsgdError(f"{what}: {reason(error)}") from error


def _problems(rule: Rule) -> Iterator[str]:
    if isinstance(rule.signal, NetSignal):
        watched = _Watched(rule.signal)
        _train(replace(rule, signal=watched), torch.float64)
        yield from watched.problems
        for objective, y, s in watched.seen:
            yield from _problems_of_gradient(objective, y, s)
    for shape, maps in (((6,), False), ((3, 4, 4), True), ((3, 5), True)):
        if rule.objective is not None and not isinstance(rule.signal, NetSignal):
            site = Site(shape, 4, Key(seed=1), maps, rule.loss, dtype=torch.float64)
            with _named(f"its objective failed for an output of shape {shape}"):
                objective, again = rule.objective(site), rule.objective(site)
            if not isinstance(objective, Objective):
                yield f"its objective must return an Objective, got a {type(objective).__name__}"
            if not all(map(torch.equal, objective.tensors, again.tensors)):
                yield f"the same key gave two different objectives for {shape}"
            generator = torch.Generator().manual_seed(0)
            y = torch.randn(5, *shape, generator=generator, dtype=torch.float64)
            s = torch.tensor([0, 1, 2, 3, 1])
            if rule.needs_output:
                s = torch.randn(5, 4, generator=generator, dtype=torch.float64)
            yield from _problems_of_gradient(objective, y, s)
    moved, weights = _train(rule)
    if moved is (rule.objective is None):
        state = "moved a block that it should leave alone" if moved else "left a block untouched"
        yield f"training {state}"
    if not all(torch.equal(a, b) for a, b in zip(weights, _train(rule)[1], strict=True)):
        yield "two runs with the same seed gave different weights"


class _Watched(NetSignal):
    """A signal of the whole net, looked at in the first batch of a small model."""

    def __init__(self, signal: NetSignal) -> None:
        self.signal, self.about, self.needs_output = signal, signal.about, signal.needs_output
        self.problems, self.seen = list[str](), list[tuple[Objective, Tensor, Any]]()

    def __call__(self, learners: Any, x: Any, labels: Tensor) -> Iterable[BlockSignal | None]:
        if not self.problems and not self.seen:
            self._look(learners, x, labels)
        return self.signal(learners, x, labels)

    def _look(self, learners: Any, x: Any, labels: Tensor) -> None:
        asked = [_Asked(learner) for learner in learners]
        for number, _ in enumerate(self.signal(asked, x, labels), 1):
            if not self.needs_output and any(behind.computed for behind in asked[number:]):
                self.problems.append("its signal asks blocks behind, and needs_output is False")
                break
        once, again = (list(self.signal(learners, x, labels)) for _ in range(2))
        if len(once) != len(learners):
            raise TpsgdError(f"its signal is of {len(once)} blocks, the model has {len(learners)}")
        if not all(map(torch.equal, _tensors(once), _tensors(again))):
            self.problems.append("its signal gives other numbers for the same batch")
        for learner, own in zip(learners[:-1], once, strict=False):
            if own is not None and own.gradients is None:
                objective = replace(learner.draw(), tensors=learner.tensors)
                y = learner.gradient.objective_input(own.saved)
                self.seen.append((objective, y.clone(), own.signal))


class _Asked:
    """A learner that knows whether it has computed."""

    def __init__(self, learner: Any) -> None:
        self.learner, self.computed = learner, False

    def __getattr__(self, name: str) -> Any:
        self.computed |= name == "forward"
        return getattr(self.learner, name)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in signals, lists and tuples of them."""
    if isinstance(value, BlockSignal):
        value = (value.signal, *(value.gradients or {}).values())
    parts = value if isinstance(value, (list, tuple)) else ()
    return [value] if isinstance(value, Tensor) else [t for part in parts for t in _tensors(part)]


def _problems_of_gradient(objective: Objective, y: Tensor, s: Any) -> Iterator[str]:
    inputs = (y, *_tensors([s]), *objective.tensors)
    before = [t.clone() for t in inputs]
    function = "closed form" if objective.written_out else "loss"
    at = f"for an output of shape {tuple(y.shape)}"
    with _named(f"its {function} failed {at}"):
        if not isinstance(local := objective.in_cells(y, s), LossAndGrads):
            raise TpsgdError(f"it must return LossAndGrads, got a {type(local).__name__}")
        local, again = objective(y, s), objective(y, s)
    if not all(map(torch.equal, before, inputs)):
        yield "its objective changes its inputs"
    if not (torch.isfinite(local.loss) and torch.isfinite(local.dy).all()):
        yield "its loss or derivative is not finite for ordinary numbers"
    if not (torch.equal(local.loss, again.loss) and torch.equal(local.dy, again.dy)):
        yield "its objective gives other numbers for the same inputs"
    if any(local.dy.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for t in inputs):
        yield "dL/dy shares memory with an input; return a new tensor"
    learned = len(objective.learned_tensors)
    with _named(f"its loss failed {at}"):
        expected = differentiate(objective.loss, y, s, objective.tensors, learned)
    names = ["the loss", "dL/dy", *(f"dL/dtensor {i}" for i in range(len(local.dtensors)))]
    values = local.loss, local.dy, *local.dtensors
    autograd = expected.loss, expected.dy, *expected.dtensors
    for name, a, b in zip(names, values, autograd, strict=True):
        if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-9, atol=1e-12):
            yield f"{name} in closed form differs from autograd's {at}"


def _train(rule: Rule, dtype: torch.dtype = torch.float32) -> tuple[bool, list[Tensor]]:
    """Whether training changes the first block of a small model, and the weights at its end."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution = nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten()
        model = nn.Sequential(*convolution, nn.Linear(48, 6), nn.Tanh(), nn.Linear(6, 4))
        x, y = torch.randn(32, 1, 6, 6, dtype=dtype), torch.arange(32) % 4
        model = model.to(dtype)
    before = [p.clone() for p in model[0].parameters()]
    fit(model, (x, y), rule=rule, order=simultaneous, epochs=1, batch_size=8)
    moved = not all(map(torch.equal, before, model[0].parameters()))
    return moved, [p.detach() for p in model.parameters()]
