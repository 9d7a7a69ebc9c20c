"""Recursive least squares: a forgetting factor by its definition, and its bound."""

import pytest
import torch
from streams.nets import X, Y

from tpsgd import OnePass, TpsgdError, rls
from tpsgd_streams.recursion import RecursiveHead


def rows(count, width=6, seed=0):
    random = torch.Generator().manual_seed(seed)
    h = torch.randn((count, width), generator=random).double()
    return h, torch.randint(3, (count,), generator=random)


def test_forgotten_samples_count_by_powers_of_the_factor():
    """The weighted ridge regression, solved at once; the penalty is forgotten, too."""
    h, y = rows(80)
    targets = torch.nn.functional.one_hot(y).double()
    head = RecursiveHead(6, 3, 2.0, 0.9, torch.inf)
    for few in torch.arange(80).split(7):
        head.add(h[few], h[few], targets[few])
    h = torch.nn.functional.pad(h, (0, 1), value=1.0)
    weight = 0.9 ** torch.arange(79, -1, -1).double()
    matrix = (h.mT * weight) @ h + 2.0 * 0.9**80 * torch.eye(7).double()
    expected = torch.linalg.solve(matrix, (h.mT * weight) @ targets)
    torch.testing.assert_close(head.W, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(head.P, torch.linalg.inv(matrix), rtol=1e-8, atol=1e-12)


def test_without_forgetting_one_by_one_and_together_are_the_same():
    h, y = rows(150)
    targets = torch.nn.functional.one_hot(y).double()
    together, single = (RecursiveHead(6, 3, 1.0, 1.0, None) for _ in range(2))
    together.add(h, h, targets)
    for row, target in zip(torch.nn.functional.pad(h, (0, 1), value=1.0), targets, strict=True):
        single._learn(single.P, single.W, row, target)
    torch.testing.assert_close(together.W, single.W, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together.P, single.P, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bound, survives", [(None, True), (1e300, False)])
def test_one_class_alone_does_not_destroy_the_others(bound, survives):
    model = OnePass(64, solver=rls(0.1), forgetting=0.995, bound=bound).partial_fit(X, Y)
    before, zeros = model.evaluate((X, Y)), X[Y == 0]
    assert before > 0.8
    for _ in range(3000 // len(zeros)):
        model.partial_fit(zeros, [0] * len(zeros))
    head = model._head
    assert isinstance(head, RecursiveHead)
    assert (float(head.P.trace()) < 10 * 65 / 0.1 / 0.995) == survives
    after = model.evaluate((X, Y))
    assert after > before - 0.15 if survives else after < 0.5


def test_a_changed_meaning_is_learned_anew():
    forgets, keeps = (OnePass(40, solver=rls(), forgetting=f) for f in (0.998, 1.0))
    changed = (Y + 1) % 10
    for model in (forgets, keeps):
        for labels in (Y, Y, changed):
            model.partial_fit(X, labels.tolist())
    assert forgets.evaluate((X, changed)) > 0.75 > 0.5 > keeps.evaluate((X, changed))


@pytest.mark.parametrize("forgetting", [1.0, 0.99])
def test_samples_that_ruin_the_inverse_are_refused_and_nothing_is_lost(forgetting):
    model = OnePass(20, solver=rls(1e-6), forgetting=forgetting).partial_fit(X, Y)
    before, classes = model.outputs(X), model.classes
    with pytest.raises(TpsgdError, match="too large, or too unlike"):
        for _ in range(5):
            model.partial_fit(1e10 * X.double(), Y + 1)
    assert model.classes == classes and model.samples == len(Y)
    assert model.outputs(X).equal(before)
