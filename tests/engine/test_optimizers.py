"""The library's optimizers take the steps of torch's, whose decorators they leave out."""

from functools import partial

import pytest
import torch
from torch import nn

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
