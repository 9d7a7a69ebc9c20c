"""predsim: against the published definition written out sample by sample, and local."""

import pytest
import torch
from helpers import images, points, seeded
from torch import nn

import tpsgd
from tpsgd import TpsgdError, check_rule, rules
from tpsgd.maths.pooling import cells, grid_for
from tpsgd.maths.predsim import labels_alike, similarity
from tpsgd.maths.random import Key
from tpsgd.memory.meter import LiveBytes
from tpsgd.objectives import Site, differentiate
from tpsgd.zoo.vgg import vgg

SHAPES = [((6,), False), ((2, 3), False), ((4, 5), True), ((4, 6, 6), True), ((3, 1, 1), True)]
INDEX = torch.tensor([0, 1, 2, 1, 0])


def cosine(a, b):
    a, b = a - a.mean(), b - b.mean()
    return (a @ b) / (a.norm() * b.norm())


def placed(shape, maps, **options):
    site = Site(shape, 3, Key(1), maps, dtype=torch.float64)
    return rules.predsim(**options).objective(site)


def outputs(*shape, seed=1, samples=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape, generator=g, dtype=torch.float64)


def by_hand(objective, y, s, features, maps):
    """0.99 of the mean squared difference of cosines, 0.01 of the cross-entropy."""
    *own, R = objective.tensors
    K = own[0] if own else torch.eye(y.shape[1], dtype=y.dtype)
    if maps:
        made = nn.functional.conv2d(y, K, padding=1) if own else y
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


@pytest.mark.parametrize("convolve", [True, False])
@pytest.mark.parametrize("shape", [(6,), (4, 6, 6)])
def test_the_loss_is_the_published_one(shape, convolve):
    objective = placed(shape, len(shape) > 1, features=16, convolve=convolve)
    y = outputs(*shape)
    found = objective.loss(y, INDEX, *objective.tensors)
    assert found == pytest.approx(float(by_hand(objective, y, INDEX, 16, len(shape) > 1)), rel=1e-6)


def equal(objective, y, s):
    """What is written out against autograd on the loss: y's, K's and R's."""
    found = objective(y, s)
    wanted = differentiate(objective.loss, y, s, objective.tensors, len(objective.tensors))
    pairs = [(found.loss, wanted.loss), (found.dy, wanted.dy)]
    for a, b in [*pairs, *zip(found.dtensors, wanted.dtensors, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    return found


@pytest.fixture(params=[False, True], ids=["about the mean", "in one pass"])
def reads_once(request, monkeypatch):
    """Maps are copied about their mean, or their moments are taken in one pass as on a GPU."""
    monkeypatch.setattr("tpsgd.maths.predsim._reads_once", lambda z: request.param)


@pytest.mark.cover(2)
@pytest.mark.parametrize("convolve", [True, False])
@pytest.mark.parametrize("features", [1, 16, 100])
@pytest.mark.parametrize(("shape", "maps"), [*SHAPES, ((4, 6, 4), True), ((2, 3, 2, 4), True)])
def test_the_derivative_written_out_is_the_losss(shape, maps, features, convolve, reads_once):
    objective = placed(shape, maps, features=features, convolve=convolve, share=0.6)
    y = outputs(*shape)
    for s in (INDEX, outputs(3, seed=2).softmax(1), outputs(3, seed=3).sigmoid()):
        held = [t.clone() for t in (y, s, *objective.tensors)]
        found = equal(objective, y, s)
        assert len(found.dtensors) == 1 + convolve and found.dy.shape == y.shape
        assert all(map(torch.equal, held, (y, s, *objective.tensors)))
    if len(shape) == 3:
        y = y.contiguous(memory_format=torch.channels_last)
        dy = equal(objective, y, INDEX).dy
        assert dy.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("convolve", [True, False])
def test_maps_that_are_the_same_everywhere_have_no_slope(convolve, reads_once):
    """A deviation of nothing has no derivative: none is followed, as autograd has it."""
    objective = placed((4, 6, 6), True, convolve=convolve)
    y = outputs(4, 6, 6).relu()
    y[0] = 0.0
    y[1, 2] = 0.0
    assert equal(objective, y, INDEX).dy.isfinite().all()


@pytest.mark.parametrize("convolve", [True, False])
def test_it_keeps_the_contract_of_a_rule(convolve):
    check_rule(rules.predsim(features=16, convolve=convolve))


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_labels_are_alike_in_one_of_two_ways(classes):
    s = torch.arange(7) % classes
    hot = nn.functional.one_hot(s, classes).double()
    torch.testing.assert_close(
        labels_alike(s, classes, torch.float64), similarity(hot), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(labels_alike(hot, classes, torch.float64), similarity(hot))


@pytest.mark.parametrize("convolve", [True, False])
@pytest.mark.parametrize(("shape", "maps"), SHAPES)
def test_stacked_it_gives_each_what_it_gets_alone(shape, maps, convolve):
    objective, y = placed(shape, maps, features=16, convolve=convolve), outputs(2, *shape)[:3]
    y = y.transpose(0, 1).contiguous()  # two restarts of three samples
    tensors = tuple(torch.stack([t, t + 0.1]) for t in objective.tensors)

    def one(y, *tensors):
        local = objective(y, INDEX[:3], *tensors)
        return local.loss, local.dy, local.dtensors, local.logits

    stacked = torch.vmap(one)(y, *tensors)
    for i in range(2):
        loss, dy, dtensors, logits = one(y[i], *(t[i] for t in tensors))
        pairs = [(stacked[0][i], loss), (stacked[1][i], dy), (stacked[3][i], logits)]
        pairs += [(a[i], b) for a, b in zip(stacked[2], dtensors, strict=True)]
        for a, b in pairs:
            torch.testing.assert_close(a, b)


def test_its_step_holds_one_more_batch_of_maps_and_their_derivative(reads_once):
    objective, y = placed((4, 16, 16), True, features=64), outputs(4, 16, 16, samples=64)
    s, peaks = torch.arange(64) % 3, []
    for step in (
        objective,
        lambda y, s: differentiate(objective.loss, y, s, objective.tensors, len(objective.tensors)),
    ):
        live = LiveBytes()
        with live:
            step(y, s)
        peaks.append(live.peak / y.nbytes)
    assert peaks[0] < 2.5 < peaks[1]


def test_its_block_learns_in_closed_form_and_says_how_well_it_reads():
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    run = tpsgd.fit(model, points(), rule=rules.predsim(), epochs=3, batch_size=16)
    assert run.blocks[0].learning == "closed form"
    first = [e.accuracy for e in run.history if e.block == run.history[0].block]
    assert first[-1] > 0.5


@pytest.mark.parametrize("maps", [False, True], ids=["vectors", "maps"])
@pytest.mark.parametrize("rule", [rules.predsim(), rules.auxiliary()], ids=lambda r: r.name)
def test_a_step_lowers_the_loss_of_the_activations_output(maps, rule):
    """One step of plain SGD against autograd on the loss *after* the activation."""
    layer = nn.Conv2d(2, 4, 3) if maps else nn.Linear(6, 8)
    tail = [nn.Flatten(), nn.Linear(64, 3)] if maps else [nn.Linear(8, 3)]
    model = seeded(lambda: nn.Sequential(layer, nn.ReLU(), *tail)).double()
    x, y = images() if maps else points()
    hidden = model[:2](x.double())
    site = Site(tuple(hidden.shape[1:]), 3, Key(seed=5), maps, dtype=torch.float64)
    objective = rule.objective(site)
    loss = objective.loss(hidden, y, *objective.tensors)
    wanted = model[0].weight - 0.1 * torch.autograd.grad(loss, model[0].weight)[0]
    tpsgd.fit(
        model, (x.double(), y), rule=rule, optimizer=torch.optim.SGD, lr=0.1, epochs=1,
        batch_size=len(x), seed=5,
    )  # fmt: skip
    torch.testing.assert_close(model[0].weight, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [rules.predsim(), rules.auxiliary()], ids=lambda r: r.name)
def test_the_local_loss_does_not_see_dropout_after_the_activation(rule):
    """As published: only the next block's inputs are dropped."""
    weights = []
    for dropout in (nn.Identity(), nn.Dropout(0.5)):

        def make(dropout=dropout):
            first = nn.Linear(6, 8), nn.ReLU(), dropout
            return nn.Sequential(*first, nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

        model = seeded(make)
        settings = {"order": tpsgd.simultaneous, "epochs": 2, "batch_size": 16}
        run = tpsgd.fit(model, points(), rule=rule, **settings)
        assert run.blocks[0].learning == "closed form"
        weights.append([model[i].weight.detach().clone() for i in (0, 3)])
    assert torch.equal(weights[0][0], weights[1][0])
    assert not torch.equal(weights[0][1], weights[1][1])


def test_without_similarity_it_is_a_local_classifier():
    y, s = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.arange(6) % 3
    objective = rules.predsim(share=0, convolve=False).objective(
        Site((5,), 3, Key(), dtype=torch.float64)
    )
    local = objective(y.detach(), s)
    loss = nn.functional.cross_entropy(y @ objective.tensors[-1].T, s)
    assert torch.allclose(local.loss, loss) and torch.allclose(
        local.dy, torch.autograd.grad(loss, y)[0]
    )


def test_samples_that_are_alike_have_a_cosine_of_one():
    z = torch.tensor([[1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [4.0, 2.0, 1.0]])
    assert similarity(z).diagonal() == pytest.approx([1.0] * 3, abs=1e-4)
    assert float(similarity(z)[0, 1]) == pytest.approx(1.0, abs=1e-4)
    assert float(similarity(z)[0, 2]) < 0


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
def test_it_learns_and_later_blocks_do_not_reach_earlier_ones(order):
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
        tpsgd.fit(model, images(), rule=rules.predsim(), order=order, epochs=2, batch_size=16)
        assert not torch.equal(before, model[0].weight)
    assert torch.equal(models[0][0].weight, models[1][0].weight)


def test_the_plan_says_that_pieces_would_differ():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    found = tpsgd.plan(
        model, (6,), rule=rules.predsim(), batch_size=16, others=False,
        memory=tpsgd.Memory(micro_batch=4),
    )  # fmt: skip
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
