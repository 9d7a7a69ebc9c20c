"""Weight decay and the limit of the gradient's norm, against torch's own loop."""

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd.engine.fast.optimizer_steps import quick_step
from tpsgd.engine.learners.optimizers import adam, make_optimizer, momentum
from tpsgd.engine.learners.regularised import Regularised
from tpsgd.features.run_identity import difference

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(64) % 3
SETTINGS = {"epochs": 3, "batch_size": 64, "lr": 0.05}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def by_hand(make, decay, clip):
    """Three steps on whole batches by torch's optimizer and torch's functions."""
    model = net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = make(groups, lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), Y).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def nesterov(params, lr):
    return torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["free", "limited"])
@pytest.mark.parametrize("decay", [0.0, 0.5])
@pytest.mark.parametrize("factory, torchs", [(adam, torch.optim.AdamW), (momentum, nesterov)])
def test_backprop_is_torch_s_loop(factory, torchs, decay, clip):
    model = net()
    more = {"weight_decay": decay, "clip": clip, "optimizer": factory}
    tpsgd.fit_backprop(model, (X, Y), **SETTINGS, **more)
    for p, q in zip(model.parameters(), by_hand(torchs, decay, clip).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", [{"weight_decay": 0.5}, {"clip": 0.01}], ids=str)
def test_each_setting_changes_every_block(setting):
    plain, changed = net(), net()
    tpsgd.fit(plain, (X, Y), **SETTINGS)
    run = tpsgd.fit(changed, (X, Y), **SETTINGS, **setting)
    for name in ("0.weight", "3.weight"):
        assert not torch.equal(plain.get_parameter(name), changed.get_parameter(name))
    assert setting.items() <= run.settings.items()


def test_decay_shrinks_matrices_alone():
    frozen_in_place = {"lr": 0.05, "weight_decay": 0.1, "optimizer": tpsgd.sgd}
    model, still = net(), net()
    x = torch.zeros_like(X)  # the gradient of the first weight is zero
    tpsgd.fit(model, (x, Y), epochs=2, batch_size=64, rule="tpsgd-l2", **frozen_in_place)
    shrunk = still[0].weight * (1 - 0.05 * 0.1) ** 2
    torch.testing.assert_close(model[0].weight, shrunk)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_the_decay_of_each_adam_is_no_part_of_its_gradient(name):
    p = nn.Parameter(torch.ones(2, 2))
    factory = Regularised(getattr(torch.optim, name), 0.5)
    optimizer = make_optimizer(factory, {"p": p}, 0.1)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((2, 2), 1 - 0.1 * 0.5))


def test_a_user_s_groups_keep_their_rates():
    def factory(params):
        first, *others = params
        return torch.optim.SGD([{"params": [first], "lr": 0.5}, {"params": others}], lr=0.1)

    params = dict(net().named_parameters())
    groups = make_optimizer(Regularised(factory, 0.2), params, None).param_groups
    rates = [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]
    assert rates == [(0.5, 0.2, 1), (0.1, 0.2, 1), (0.1, 0.0, 4)]


def test_a_checkpoint_from_before_these_settings_is_of_the_same_run():
    settings = tpsgd.fit(net(), (X, Y), epochs=1).settings
    before = {k: v for k, v in settings.items() if k not in ("weight_decay", "clip")}
    assert difference(before, settings) == ""


def test_the_norm_is_that_of_a_block_and_its_local_classifier():
    limit, norms = 1e-3, []

    def factory(params):
        params = list(params)
        optimizer = torch.optim.SGD(params, lr=0.1)

        def note(*_):
            norms.append(torch.stack([p.grad.norm() for p in params]).norm().item())

        optimizer.register_step_post_hook(note)
        return optimizer

    tpsgd.fit(net(), (X, Y), optimizer=factory, epochs=1, batch_size=32, clip=limit)
    assert norms == pytest.approx([limit] * len(norms), rel=1e-2) and len(norms) == 4


@pytest.mark.parametrize("slices", [1, 3])
def test_a_limit_looks_at_the_whole_gradient(slices):
    model, whole = net(), net()
    tpsgd.fit(whole, (X, Y), **SETTINGS, clip=0.01, memory=tpsgd.Memory(slices=1))
    tpsgd.fit(model, (X, Y), **SETTINGS, clip=0.01, memory=tpsgd.Memory(slices=slices))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("schedule", [None, tpsgd.one_cycle()], ids=["constant", "one_cycle"])
def test_fast_and_slow_steps_with_decay_agree(schedule, monkeypatch):
    x, y = X.repeat(20, 1), Y.repeat(20)
    trained = []
    for fast in "10":
        monkeypatch.setenv("TPSGD_FAST", fast)
        model = net()
        settings = {"lr": 0.01, "epochs": 2, "batch_size": 16, "lr_schedule": schedule}
        tpsgd.fit(model, (x, y), weight_decay=0.1, **settings)
        trained.append(list(model.parameters()))
    for p, q in zip(*trained, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("factory", [adam, momentum])
def test_two_groups_have_a_quick_step(factory):
    params = dict(nn.Linear(3, 2).named_parameters())
    optimizer = make_optimizer(Regularised(factory, 0.1), params, 0.01)
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(optimizer.param_groups) == 2 and quick_step(optimizer) is not None


def test_solved_layers_have_no_steps():
    tpsgd.fit(net(), (X, Y), optimizer=[adam, tpsgd.ridge()], clip=1.0, weight_decay=0.1)


@pytest.mark.parametrize(
    "setting, problem",
    [
        ({"weight_decay": -1.0}, "weight_decay must be a number from 0 to below 1, got -1.0"),
        ({"clip": 0}, "clip must be a positive number"),
        ({"optimizer": torch.optim.Rprop, "weight_decay": 0.1}, "Rprop has no weight decay"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "optimizer must be a factory"),
    ],
)
def test_mistakes_are_named(setting, problem):
    with pytest.raises(tpsgd.TpsgdError, match=problem):
        tpsgd.fit(net(), (X, Y), epochs=1, **setting)


def test_restarts_are_trained_one_by_one():
    with pytest.raises(tpsgd.TpsgdError, match="weight decay and clip"):
        tpsgd.fit_many(net, (X, Y), restarts=2, stacked=True, weight_decay=0.1)
