"""The library's optimizers take the steps of torch's, whose decorators they leave out."""

from functools import partial

import pytest
import torch
from torch import nn

from tpsgd.engine.fast import optimizer_steps
from tpsgd.engine.learners.optimizers import TwoRates, adam, make_optimizer, sgd, two_rates
from tpsgd.maths.kernels.fused_optimizers import Adam

TORCH = {
    adam: partial(torch.optim.Adam, lr=1e-3, fused=True),
    sgd: partial(torch.optim.SGD, lr=0.1),
    two_rates(x=0.01, h=0.01): partial(torch.optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("factory", TORCH, ids=lambda f: f.__name__)
def test_steps_hooks_rates_and_states_are_torch_s(factory):
    weights, calls = [], []
    for make in (factory, TORCH[factory]):
        torch.manual_seed(0)
        layer = nn.Linear(5, 3)
        lr = None if isinstance(make, TwoRates) else 0.01
        optimizer = make_optimizer(make, dict(layer.named_parameters()), lr)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.randn(7, 5)).square().sum().backward()
            assert optimizer.step(lambda: 3.0) == 3.0
            scheduler.step()
        assert torch.is_grad_enabled() and optimizer.param_groups[0]["lr"] == 0.0025
        weights.append((*layer.parameters(), *optimizer.state_dict()["state"].get(0, {}).values()))
    assert len(calls) == 10 and len(weights[0]) == len(weights[1])
    assert all(map(torch.equal, *weights))


def test_an_optimizer_s_state_can_be_saved_and_loaded():
    layer = nn.Linear(5, 3)
    first, second = (adam(layer.parameters()) for _ in range(2))
    layer(torch.randn(7, 5)).sum().backward()
    first.step()
    second.load_state_dict(first.state_dict())
    assert isinstance(second, Adam)
    assert torch.equal(second.state[layer.weight]["exp_avg"], first.state[layer.weight]["exp_avg"])


class Waiting:
    """A learner with a gradient, or without."""

    def __init__(self, settings, grad):
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.ones(2) if grad else None
        self.settings, self.moving, self.optimizer = settings, {"p": p}, object()
        self.applied = self.dropped = 0

    def apply_gradients(self):
        self.applied += 1

    def drop_gradients(self):
        self.dropped += 1


@pytest.mark.parametrize("joint", [True, False])
def test_every_block_takes_its_step_together_or_alone(joint, monkeypatch):
    steps = []

    def joint_step(optimizers):
        return (lambda: steps.append(optimizers)) if joint else None

    monkeypatch.setattr(optimizer_steps, "joint_step", joint_step)
    blocks = [Waiting("a", True), Waiting("a", False), Waiting("b", True), Waiting("a", True)]
    optimizer_steps._step_together(blocks)
    assert [b.applied for b in blocks] == ([0, 1, 1, 0] if joint else [1, 1, 1, 1])
    assert [b.dropped for b in blocks] == ([1, 0, 0, 1] if joint else [0, 0, 0, 0])
    assert len(steps) == joint
    optimizer_steps._step_together([])
