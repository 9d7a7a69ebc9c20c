"""predsim: against the published definition written out sample by sample, and local."""

import pytest
import torch
from helpers import images, seeded
from torch import nn

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.hashing import Key
from tpsgd.objectives import Site, cells, grid_for
from tpsgd.similarity import similarity
from tpsgd.vgg import vgg


def cosine(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a @ b) / (a.norm() * b.norm())


def by_hand(objective, y, s, features, maps):
    """0.99 of the mean squared difference of cosines, 0.01 of the cross-entropy."""
    K, R = objective.tensors
    if maps:
        made = nn.functional.conv2d(y, K, padding=1)
        z = torch.stack([torch.stack([m.std() for m in one]) for one in made])
        read = cells(y, grid_for(y.shape[1:], features))
    else:
        z, read = y @ K.T, y
    known = torch.eye(len(R), dtype=y.dtype)[s]
    pairs = [(i, j) for i in range(len(y)) for j in range(len(y))]
    alike = [(cosine(z[i], z[j]) - cosine(known[i], known[j])) ** 2 for i, j in pairs]
    logits = read @ R.T
    wrong = [logits[i].logsumexp(0) - logits[i, c] for i, c in enumerate(s)]
    return 0.99 * sum(alike) / len(alike) + 0.01 * sum(wrong) / len(wrong)


@pytest.mark.parametrize("shape", [(6,), (4, 6, 6)])
def test_the_loss_is_the_published_one(shape):
    site = Site(shape, 3, Key(1), len(shape) > 1, dtype=torch.float64)
    objective = rules.predsim(features=16).objective(site)
    y, s = torch.randn(5, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0])
    found = objective.loss(y, s, *objective.tensors)
    assert found == pytest.approx(float(by_hand(objective, y, s, 16, len(shape) > 1)), rel=1e-6)


def test_samples_that_are_alike_have_a_cosine_of_one():
    z = torch.tensor([[1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [4.0, 2.0, 1.0]])
    assert similarity(z).diagonal() == pytest.approx([1.0] * 3, abs=1e-4)
    assert float(similarity(z)[0, 1]) == pytest.approx(1.0, abs=1e-4)
    assert float(similarity(z)[0, 2]) < 0


@pytest.mark.parametrize("schedule", [tpsgd.sequential, tpsgd.simultaneous])
def test_it_learns_and_later_blocks_do_not_reach_earlier_ones(schedule):
    def net(last):
        model = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(64, 8),
                nn.ReLU(),
                nn.Linear(8, 3),
            )
        )
        with torch.no_grad():
            model[3].weight.mul_(last)
        return model

    models = [net(1.0), net(5.0)]
    for model in models:
        before = model[0].weight.clone()
        tpsgd.fit(model, images(), rule=rules.predsim(), schedule=schedule, epochs=2, batch_size=16)
        assert not torch.equal(before, model[0].weight)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_the_plan_says_that_pieces_would_differ():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    found = tpsgd.plan(model, (6,), 16, rules.predsim(), micro_batch=4, others=False)
    assert any("whole batch" in line for line in found.remarks)


def test_vgg_has_torchvisions_names_and_sizes():
    net = vgg(16, (3, 32, 32), 10)
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == 13 and "features.28.weight" in net.state_dict()
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("depth", "shape"), [(12, (3, 32, 32)), (11, (3, 16, 16))])
def test_a_vgg_that_cannot_be(depth, shape):
    with pytest.raises(TpsgdError, match="VGG"):
        vgg(depth, shape, 10)
