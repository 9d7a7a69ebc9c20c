"""`check_rule` passes every rule of ours, and tells what is wrong with a bad one."""

from dataclasses import replace

import pytest
import torch
from helpers import DRAWN, PLACES
from torch.nn import functional as F

from tpsgd import Rule, TpsgdError, check_rule, projections, rules
from tpsgd.objectives import LossAndGrads, NetSignal, Objective, Place, l2

pytestmark = pytest.mark.usefixtures("unwatched")

GOOD = {name: make() for name, make in DRAWN.items()} | {
    "frozen": rules.frozen(),
    "smooth l1": rules.tpsgd(F.smooth_l1_loss),
}


@pytest.mark.parametrize("name", GOOD)
def test_every_rule_of_ours_passes(name):
    check_rule(GOOD[name])


@pytest.mark.cover(1)
@pytest.mark.parametrize("at", PLACES, ids=lambda p: p.name)
@pytest.mark.parametrize("name", DRAWN)
def test_every_rule_passes_at_every_place(name, at):
    check_rule(DRAWN[name](at=at))


@pytest.mark.parametrize("projection", ["uniform", "binary", "orthogonal", "per_filter"])
def test_a_rule_passes_with_every_projection(projection):
    check_rule(rules.tpsgd_l2(getattr(projections, projection)(0.5)))


def changed(closed=None, loss=None, objective=None) -> Rule:
    """`tpsgd_l2` with one thing wrong."""

    def make(site):
        good = l2(site.draw(projections.normal()))
        good = replace(good, closed_form=closed(good) if closed else good.closed_form)
        return replace(good, loss=loss) if loss else good

    return Rule("odd", objective or make, at=Place.AFTER)


def fails(rule, *words):
    with pytest.raises(TpsgdError) as caught:
        check_rule(rule)
    said = str(caught.value)
    assert said.startswith("odd: ") and "\n" not in said
    assert all(word in said for word in words), said


def test_a_wrong_derivative():
    def closed(good):
        return lambda y, s, P: (found := good.closed_form(y, s, P))._replace(dy=found.dy * 1.01)

    fails(changed(closed), "dL/dy", "differs from autograd")


def test_a_derivative_of_the_wrong_sign():
    def closed(good):
        return lambda y, s, P: (found := good.closed_form(y, s, P))._replace(dy=-found.dy)

    fails(changed(closed), "dL/dy", "differs from autograd")


def test_a_derivative_of_the_wrong_shape():
    def closed(good):
        return lambda y, s, P: (found := good.closed_form(y, s, P))._replace(
            dy=found.dy.flatten(1)[:, :1]
        )

    fails(changed(closed), "dL/dy", "differs")


def test_a_wrong_loss():
    def closed(good):
        return lambda y, s, P: (found := good.closed_form(y, s, P))._replace(loss=found.loss + 1)

    fails(changed(closed), "the loss", "differs from autograd")


def test_a_wrong_derivative_of_what_is_learned():
    def objective(site):
        good = rules.readout(learned=True).objective(site)

        def closed(y, s, P, gain):
            found = good.closed_form(y, s, P, gain)
            return found._replace(dtensors=(2 * found.dtensors[0],))

        return replace(good, closed_form=closed)

    fails(Rule("odd", objective), "dL/dtensor 0", "differs from autograd")


def test_a_rule_that_changes_its_inputs():
    def closed(good):
        def spoil(y, s, P):
            found = good.closed_form(y, s, P)
            y.mul_(0.5)
            return found

        return spoil

    fails(changed(closed), "changes its inputs")


def test_a_rule_that_changes_its_projection():
    def closed(good):
        def spoil(y, s, P):
            found = good.closed_form(y, s, P)
            P.mul_(0.5)
            return found

        return spoil

    fails(changed(closed), "changes its inputs")


def test_a_rule_that_hands_out_its_input_as_the_derivative():
    """Training writes into the derivative, and would spoil the block's output."""

    def objective(site):
        return Objective(
            lambda y, s: (y * y).sum() / 2, lambda y, s: LossAndGrads((y * y).sum() / 2, y), ()
        )

    fails(Rule("odd", objective), "shares memory")


def test_a_rule_with_a_loss_left_to_chance():
    def objective(site):
        P = site.draw(projections.normal())
        return Objective(lambda y, s, P: (y * torch.rand_like(y)).sum(), None, (P,))

    fails(Rule("odd", objective), "other numbers for the same inputs")


def test_a_rule_whose_projection_is_left_to_chance():
    def objective(site):
        return l2(torch.randn(site.classes, *site.shape, dtype=site.dtype))

    fails(Rule("odd", objective), "the same key", "different objectives")


def test_a_rule_that_remembers():
    """Its objectives agree when asked twice, but training goes another way the second time."""
    calls = [0]

    def objective(site):
        scale = 1.0 if site.dtype == torch.float64 else 2.0 ** (calls[0] // 2)
        calls[0] += site.dtype != torch.float64
        return l2(site.draw(projections.normal()) * scale)

    fails(Rule("odd", objective), "two runs with the same seed")


def test_a_rule_that_does_nothing():
    def objective(site):
        return Objective(
            lambda y, s: (y * 0).sum(), lambda y, s: LossAndGrads(y.new_zeros(()), y * 0)
        )

    fails(Rule("odd", objective), "left a block untouched")


def test_something_that_is_no_rule():
    with pytest.raises(TpsgdError, match="check_rule takes a Rule or its name, got function"):
        check_rule(rules.drtp)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda y, target: (y - target).square(), "one number"),
        (lambda y, target: 0.5, "one number"),
        (lambda y, target: (y - target).detach().square().mean(), "depend on the output"),
        (lambda y, target: (y - target).log().mean(), "not finite"),
    ],
)
def test_a_loss_that_cannot_be_followed(loss, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        check_rule(rules.tpsgd(loss))


def test_mistakes_of_beginners():
    """Whatever a rule's own functions do, one sentence names the rule and the function."""

    def of(loss, *more, **options):
        return Rule("odd", lambda site: Objective(loss, *more, **options))

    def square(y, s, *tensors):
        return y.square().mean()

    P = torch.ones(4, 3, dtype=torch.float64)
    fails(Rule("odd", lambda site: None), "must return an Objective, got a NoneType")
    fails(Rule("odd", lambda site: square), "must return an Objective, got a function")
    fails(Rule("odd", lambda: None), "objective failed", "(6,): TypeError", "0 positional")
    fails(
        of(square, lambda y, s: y),
        "its closed form failed",
        "must return LossAndGrads, got a Tensor",
    )
    fails(of(square, tensors=P), "its objective failed", "tuple such as (P,), got a Tensor")
    fails(of(lambda y: y.mean()), "its loss failed", "shape (5, 6): TypeError: ", "1 positional")
    fails(of(lambda y, s, P: (y - P).mean(), None, (P,)), "its loss failed", "RuntimeError", "size")
    short = of(square, lambda y, s: LossAndGrads(y.square().mean(), None))
    fails(short, "its closed form failed", "AttributeError")
    for what in (3, Objective(square)):
        with pytest.raises(TpsgdError, match="odd: objective must be None or a function of a Site"):
            Rule("odd", what)


class Silent(NetSignal):
    """A signal for no block."""

    def __call__(self, learners, x, labels):
        yield from ()


def test_a_signal_of_no_block():
    rule = Rule("odd", lambda site: l2(site.draw(projections.normal())), signal=Silent())
    fails(rule, "its signal is of 0 blocks, the model has 3")
