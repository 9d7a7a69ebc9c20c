"""The auxiliary net: against torch's own modules, its derivative against autograd, its memory."""

import pytest
import torch
from helpers import points, seeded
from torch import nn

import tpsgd
from tpsgd import TpsgdError, check_rule, rules
from tpsgd.maths.auxiliary import cells_a_side
from tpsgd.maths.random import Key
from tpsgd.memory.meter import LiveBytes
from tpsgd.objectives import Site, differentiate

SHAPES = [((6,), False), ((2, 3), False), ((4, 5), True), ((4, 6, 6), True), ((3, 1, 1), True)]
INDEX = torch.tensor([0, 1, 2, 1, 0])
HALF = torch.bfloat16


def placed(shape, maps, loss=tpsgd.cross_entropy, **options):
    site = Site(shape, 3, Key(1), maps, loss, dtype=torch.float64)
    defaults = {"channels": 5, "kernels": (1, 3), "share": 0.0}
    return rules.auxiliary(**(defaults | options)).objective(site)


def outputs(*shape, seed=1, samples=5):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape, generator=g, dtype=torch.float64)


def torch_net(objective, maps, side):
    """The same net of torch's modules, with the objective's weights."""
    *hidden, R = objective.tensors
    layers = [nn.AdaptiveAvgPool2d(side)] if maps else []
    for K, *norm in zip(*(hidden[i::3] for i in range(3)), strict=True):
        if maps:
            layer = nn.Conv2d(K.shape[1], len(K), K.shape[-1], padding="same", bias=False)
        else:
            layer = nn.Linear(K.shape[1], len(K), bias=False)
        layer.weight = nn.Parameter(K.clone())
        batch_norm = nn.BatchNorm2d(len(K)) if maps else nn.BatchNorm1d(len(K))
        batch_norm.weight, batch_norm.bias = (nn.Parameter(t.clone()) for t in norm)
        layers += [layer, batch_norm, nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten()] if maps else []
    head = nn.Linear(R.shape[1], len(R), bias=False)
    head.weight = nn.Parameter(R.clone())
    return nn.Sequential(*layers, head).double()


@pytest.mark.parametrize("kernels", [(1,), (3,), (1, 3), (5, 1, 3)])
@pytest.mark.parametrize("shape", [(6,), (4, 12, 12)])
def test_it_is_the_published_net_of_torchs_modules(shape, kernels):
    maps = len(shape) > 1
    objective, y = placed(shape, maps, kernels=kernels, side=4), outputs(*shape)
    y.requires_grad_()
    net = torch_net(objective, maps, 4)
    logits = net(y)
    wanted = nn.functional.cross_entropy(logits, INDEX)
    wanted.backward()
    local = objective(y.detach(), INDEX)
    torch.testing.assert_close(local.logits, logits.detach())
    torch.testing.assert_close(local.loss, wanted.detach())
    torch.testing.assert_close(local.dy, y.grad)
    torch.testing.assert_close(local.dtensors[0], net[1 if maps else 0].weight.grad)
    torch.testing.assert_close(local.dtensors[-1], net[-1].weight.grad)


def equal(objective, y, s):
    """What is written out against autograd on the loss: of y and of every tensor."""
    local = objective(y, s)
    wanted = differentiate(objective.loss, y, s, objective.tensors, len(objective.tensors))
    pairs = [(local.loss, wanted.loss), (local.dy, wanted.dy)]
    for a, b in [*pairs, *zip(local.dtensors, wanted.dtensors, strict=True)]:
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    return local


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    ("loss", "share"), [(tpsgd.cross_entropy, 0.0), (tpsgd.cross_entropy, 0.6), (tpsgd.bce, 0.9)]
)
@pytest.mark.parametrize("kernels", [(), (1,), (1, 3)])
@pytest.mark.parametrize("side", [1, 3, 10])
@pytest.mark.parametrize(("shape", "maps"), [*SHAPES, ((4, 6, 4), True), ((2, 3, 2, 4), True)])
def test_the_derivative_written_out_is_the_losss(shape, maps, side, kernels, loss, share):
    objective = placed(shape, maps, loss, side=side, kernels=kernels, share=share)
    y = outputs(*shape)
    for s in (INDEX, outputs(3, seed=2).softmax(1)):
        before = [t.clone() for t in (y, s, *objective.tensors)]
        local = equal(objective, y, s)
        assert len(local.dtensors) == 1 + 3 * len(kernels) and local.dy.shape == y.shape
        assert all(map(torch.equal, before, (y, s, *objective.tensors)))
    if len(shape) == 3:
        equal(objective, y.contiguous(memory_format=torch.channels_last), INDEX)


@pytest.mark.parametrize("pixels", [6, 12])
def test_its_similarity_is_predsims_of_the_averages_without_a_convolution(pixels):
    y = outputs(4, pixels, pixels)
    pooled = nn.functional.adaptive_avg_pool2d(y, 6)
    objective = placed((4, pixels, pixels), True, share=0.6, side=6)
    other = rules.predsim(0.6, convolve=False)
    other = other.objective(Site((4, 6, 6), 3, Key(1), True, dtype=torch.float64))
    parts = []
    for local in (objective(y, INDEX), other(pooled, INDEX)):
        parts.append(local.loss - 0.4 * nn.functional.cross_entropy(local.logits, INDEX))
    torch.testing.assert_close(*parts)
    assert float(parts[0]) > 0.01


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_it_keeps_the_contract_of_a_rule(share):
    check_rule(rules.auxiliary(channels=8, share=share))


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_stacked_vectors_get_what_each_gets_alone(share):
    objective, y = placed((6,), False, share=share), outputs(2, 6).transpose(0, 1).contiguous()
    tensors = tuple(torch.stack([t, t + 0.1]) for t in objective.tensors)

    def one(y, *tensors):
        local = objective(y, INDEX, *tensors)
        return local.loss, local.dy, local.dtensors, local.logits

    stacked = torch.vmap(one)(y, *tensors)
    for i in range(2):
        loss, dy, dtensors, logits = one(y[i], *(t[i] for t in tensors))
        pairs = [(stacked[0][i], loss), (stacked[1][i], dy), (stacked[3][i], logits)]
        for a, b in [*pairs, *((a[i], b) for a, b in zip(stacked[2], dtensors, strict=True))]:
            torch.testing.assert_close(a, b)


def test_in_bfloat16_it_is_that_of_float32_up_to_rounding():
    objective, y = placed((8, 12, 12), True, channels=16, side=6), outputs(8, 12, 12, samples=64)
    s = torch.arange(64) % 3
    rounded = (t.to(HALF) for t in objective.tensors)
    wanted, local = objective(y, s), objective(y.to(HALF), s, *rounded)
    assert local.dy.dtype is HALF and local.logits.dtype is torch.float32
    assert float(local.loss) == pytest.approx(float(wanted.loss), rel=0.02)
    for a, b in zip((local.dy, *local.dtensors), (wanted.dy, *wanted.dtensors), strict=True):
        assert float((a - b).norm()) < 0.1 * float(b.norm())


def test_feature_maps_are_cut_into_equal_cells_where_they_can_be():
    assert [cells_a_side(n, 10) for n in (1, 9, 10, 11, 16, 28, 32, 160)] == [
        1, 9, 10, 10, 8, 7, 8, 10,
    ]  # fmt: skip


def test_its_step_needs_little_memory_beside_large_maps():
    """It works on cells: much less than the batch of maps, and one number per cell goes back."""
    objective, y = placed((16, 40, 40), True, channels=8), outputs(16, 40, 40, samples=16)
    live = LiveBytes()
    with live:
        local = objective.in_cells(y, torch.arange(16) % 3)
    assert live.peak < 0.5 * y.nbytes
    assert local.dy.shape == (16, 16, 10, 10)


def test_its_block_learns_in_closed_form_and_says_how_well_it_reads():
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    run = tpsgd.fit(model, points(), rule=rules.auxiliary(), epochs=4, batch_size=16, lr=0.01)
    assert run.blocks[0].learning == "closed form"
    first = [e.accuracy for e in run.history if e.block == run.history[0].block]
    assert first[-1] > 0.6


def test_the_plan_says_that_micro_batches_would_differ():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = tpsgd.plan(
        model, (6,), rule=rules.auxiliary(), batch_size=16, others=False,
        memory=tpsgd.Memory(micro_batch=4),
    )  # fmt: skip
    assert any("whole batch" in line for line in plan.remarks)


@pytest.mark.parametrize("options", [{"channels": 0}, {"side": 0}, {"kernels": (2,)}])
def test_a_net_that_cannot_be(options):
    with pytest.raises(TpsgdError, match="auxiliary net needs"):
        rules.auxiliary(**options)
    with pytest.raises(TpsgdError, match="share must be a number from 0 to 1, got"):
        rules.auxiliary(share=1.5)


@pytest.mark.parametrize(
    "wrong", [{"kernels": (3.0,)}, {"channels": 8.5}, {"kernels": 4}, {"side": 0}]
)
def test_sizes_that_are_no_whole_numbers_are_refused(wrong):
    with pytest.raises(TpsgdError, match="an auxiliary net needs"):
        rules.auxiliary(**wrong)


def test_one_kernel_needs_no_list():
    assert rules.auxiliary(kernels=3).options == rules.auxiliary(kernels=(3,)).options
