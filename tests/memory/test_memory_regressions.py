"""What a review found in the frugal steps, so that it stays mended."""

import pytest
import torch
from helpers import folded, mlp, points, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Memory, TpsgdError, rules
from tpsgd.memory.meter import LiveBytes, tensor_bytes


def weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("settings", [{"micro_batch": 4}, {"slices": 2}])
def test_gradients_that_were_left_behind_are_not_learned_from(settings):
    clean, dirty = (seeded(lambda: mlp(6, 8, 3)) for _ in range(2))
    for p in dirty.parameters():
        p.grad = torch.full_like(p, 5.0)
    for model in (clean, dirty):
        tpsgd.fit(
            model, points(), epochs=1, batch_size=16, optimizer=tpsgd.sgd, **folded(**settings)
        )
    assert torch.equal(weights(clean), weights(dirty))


@pytest.mark.parametrize("settings", [{"micro_batch": 4}, {}])
def test_backprop_does_not_learn_from_gradients_that_were_left_behind(settings):
    clean, dirty = (seeded(lambda: mlp(6, 8, 3)) for _ in range(2))
    for p in dirty.parameters():
        p.grad = torch.full_like(p, 5.0)
    for model in (clean, dirty):
        tpsgd.fit_backprop(model, points(), epochs=1, batch_size=16, **folded(**settings))
    assert torch.equal(weights(clean), weights(dirty))


def test_an_optimizer_with_hooks_sees_whole_gradients():
    shapes = []

    def factory(params):
        optimizer = torch.optim.SGD(params, lr=0.1)
        look = lambda o, *_: shapes.extend(p.grad.shape for p in o.param_groups[0]["params"])  # noqa: E731
        optimizer.register_step_pre_hook(look)
        return optimizer

    tpsgd.fit(mlp(6, 8, 3), points(), epochs=1, optimizer=factory, memory=Memory(slices=4))
    assert (8, 6) in shapes and (2, 6) not in shapes


def test_a_budget_leaves_random_numbers_alone():
    def drawn(**settings):
        torch.manual_seed(3)
        loader = DataLoader(
            TensorDataset(*points()), 16, shuffle=True, generator=torch.Generator().manual_seed(1)
        )
        model = seeded(lambda: mlp(6, 8, 3))
        tpsgd.fit(model, loader, epochs=2, **folded(**settings))
        return weights(model), torch.rand(1)

    (one, after), (other, also) = drawn(reuse=True), drawn(budget="1GB")
    assert torch.equal(one, other) and torch.equal(after, also)


@pytest.mark.full
def test_a_loaders_batches_are_part_of_the_budget():
    x, y = torch.randn(1024, 500), torch.arange(1024) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=512)
    with pytest.raises(TpsgdError) as caught:
        tpsgd.fit(mlp(500, 8, 3), loader, epochs=1, memory=1000)
    least = int(str(caught.value).partition("(")[2].partition(" bytes")[0])
    assert least > 2 * 512 * 500 * 4


def test_validation_is_measured():
    x, y = points(400)
    plain = tpsgd.fit(
        mlp(6, 64, 3), (x[:32], y[:32]), epochs=1, batch_size=32, memory=Memory(micro_batch=1)
    )
    live = LiveBytes()
    model = mlp(6, 64, 3)
    with live:
        run = tpsgd.fit(
            model,
            (x[:32], y[:32]),
            epochs=1,
            batch_size=32,
            memory=Memory(micro_batch=1),
            validation=(x, y),
        )
    assert live.peak + tensor_bytes(model) <= run.peak_bytes + run.kept_bytes + 4096
    assert run.peak_bytes <= plain.peak_bytes + 8192


@pytest.mark.full
def test_a_budget_that_changes_what_is_learned_warns():
    model = nn.Sequential(nn.Linear(200, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    data = torch.randn(512, 200), torch.arange(512) % 3
    with pytest.warns(UserWarning, match="changes what is learned: batch normalisation"):
        run = tpsgd.fit(model, data, epochs=1, batch_size=512, memory="200KB", rule=rules.readout())
    assert run.settings["micro_batch"] is not None


def test_a_block_that_pools_learns_in_the_memory_of_its_output():
    """Its maps before the norm and after it, and the derivative before the norm: not a fourth."""

    def peak(pool):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), *pool,
            nn.Flatten(), nn.Linear(16 * 32 * 32 // 4 ** len(pool), 3),
        )  # fmt: skip
        settings = {"rule": rules.readout(features=64), "batch_size": 32, "samples": 64}
        settings |= {"order": tpsgd.simultaneous, "others": False}
        plan = tpsgd.plan(model, (3, 32, 32), **settings)
        return plan.lines[0].parts["activations"]

    maps = 32 * 16 * 32 * 32 * 4  # bytes of one
    assert peak([nn.MaxPool2d(2)]) < 3.8 * maps < 4 * maps < peak([])
