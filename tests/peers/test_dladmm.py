"""dlADMM against its authors' numbers, second methods, and what a caller may do wrong.

The authors' softmax adds 1e-10 to its denominator, so their numbers and ours agree to about 1e-10
at first and, as the problem is not convex, to a few 1e-9 after 20 iterations: the tolerances below.
"""

import json
import math
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import mlp, points, same, seeded, state
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tpsgd
from tpsgd import Padded, TpsgdError
from tpsgd_peers import admm
from tpsgd_peers.admm import StepSizes, activated, begin, hidden_z, output_z
from tpsgd_peers.dladmm import fit_dladmm

dladmm = import_module("tpsgd_peers.dladmm")  # the module, not the arm of the same name
FIXTURE = Path(__file__).parents[1] / "fixtures" / "dladmm_relu.npz"
PUBLISHED = {"theta": 1.0, "tau": 1.0, "fista_step": 4.0}


def net(*widths, slope=0.0, bias=True, seed=0, dtype=torch.float32):
    """Linear layers with (Leaky)ReLU between them."""

    def make():
        layers = []
        for i, o in pairwise(widths):
            act = nn.LeakyReLU(slope) if slope else nn.ReLU()
            layers += [nn.Linear(i, o, bias=bias), act]
        return nn.Sequential(*layers[:-1]).to(dtype)

    return seeded(make, seed)


def problem(*widths, n=40, slope=0.1, bias=True, seed=0):
    """A problem in float64 whose unknowns do not agree with one another."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    W = [draw(o, i) / i**0.5 for i, o in pairwise(widths)]
    b = [draw(len(w)) if bias else None for w in W]
    labels = torch.arange(n) % widths[-1]
    p = begin(W, b, draw(n, widths[0]), labels, [slope] * (len(W) - 1))
    p.z = [z + draw(*z.shape) for z in p.z]
    p.a = [p.a[0], *(a + draw(*a.shape) for a in p.a[1:])]
    p.u = draw(*p.u.shape) / 3
    p.m = [F.linear(a, w, c) for a, w, c in zip(p.a, p.W, p.b, strict=True)]
    return p


def lagrangian(p, rho):
    """The function that the updates of W, b, a and z lower; see `peers.admm`."""
    gaps = [z - m for z, m in zip(p.z, p.m, strict=True)]
    hidden = zip(p.a[1:], p.z[:-1], p.slopes, strict=True)
    gaps += [a - activated(z, slope) for a, z, slope in hidden]
    penalty = rho / 2 * torch.stack([gap.square().sum() for gap in gaps]).sum()
    loss = F.cross_entropy(p.z[-1], p.labels, reduction="sum")
    return loss + (p.u * gaps[p.last]).sum() + penalty


# --- the authors' numbers


@pytest.fixture
def theirs():
    return {k: torch.from_numpy(np.asarray(v)) for k, v in np.load(FIXTURE).items()}


def their_net(theirs, k):
    """Their net, with its weights after k iterations."""
    model = net(6, 9, 8, 3, dtype=torch.float64)
    for i, layer in enumerate(model[::2]):
        layer.weight.data.copy_(theirs[f"{i}.weight.{k}"])
        layer.bias.data.copy_(theirs[f"{i}.bias.{k}"].flatten())
    return model


@pytest.mark.parametrize("k", [1, 20])
def test_the_weights_are_the_authors(theirs, k):
    model, data = their_net(theirs, 0), (theirs["x"].T, theirs["labels"])
    fit_dladmm(model, data, iterations=k, rho=float(theirs["rho"]), **PUBLISHED)
    expected, before = state(their_net(theirs, k)), state(their_net(theirs, 0))
    for name, value in state(model).items():
        assert (expected[name] - before[name]).abs().max() > 1e-9  # it did move
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9 if k == 1 else 2e-8)


def test_the_loss_and_accuracy_are_the_authors(theirs):
    data = theirs["x"].T, theirs["labels"]
    run = fit_dladmm(
        their_net(theirs, 0), data, iterations=20, rho=float(theirs["rho"]), **PUBLISHED
    )
    found = torch.tensor([(e.loss, e.accuracy) for e in run.history], dtype=torch.float64)
    torch.testing.assert_close(found, theirs["cost_accuracy"], rtol=0, atol=2e-9)


# --- each update by a second method


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3, 1.0, -0.5])
def test_hidden_z_is_the_best_of_a_fine_grid(slope):
    m, a = torch.meshgrid(*[torch.linspace(-3, 3, 25, dtype=torch.float64)] * 2, indexing="ij")
    z = hidden_z(m, a, slope)
    grid = torch.linspace(-6, 6, 4801, dtype=torch.float64)[:, None, None]

    def value(z):
        return (z - m).square() + (a - F.leaky_relu(z, slope)).square()

    least = value(grid).amin(0)
    assert (value(z) <= least + 1e-12).all()
    assert (least - value(z)).max() < 1e-5  # half a grid step, squared: not far below it either


def test_hidden_z_by_hand():
    m = torch.tensor([1.0, -1.0, -1.0, 2.0])
    a = torch.tensor([3.0, -2.0, 3.0, -1.0])
    # (m+a)/2; min(m, 0); m = -1 and a = 3: 0 + 9 below, 4 + 4 above at 1; 2 and -1: 4 + 1, 2 x 2.25
    assert hidden_z(m, a, 0.0).tolist() == [2.0, -1.0, 1.0, 0.5]


@pytest.mark.cover(1)
@pytest.mark.parametrize("rho", [1e-2, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("classes", [2, 10])
def test_fista_finds_the_minimum_that_newton_finds(rho, classes):
    p = problem(5, classes, n=30)
    z = output_z(p, StepSizes(rho), most=2000, tolerance=0.0)
    best, y_star = p.m[0], F.one_hot(p.labels, classes).double()
    for _ in range(300):  # Newton's steps, none longer than 1
        q = F.softmax(best, 1)
        g = q - y_star + p.u + rho * (best - p.m[0])
        H = q.diag_embed() - q[:, :, None] * q[:, None] + rho * torch.eye(classes).double()
        step = torch.linalg.solve(H, g)
        best = best - step / step.norm(dim=1, keepdim=True).clamp(min=1)
    assert g.abs().max() < 1e-10
    torch.testing.assert_close(z, best, rtol=0, atol=1e-7)


@pytest.mark.parametrize("rho", [1e-6, 1e-3, 0.1])
def test_fista_with_the_authors_step_need_not_converge(rho):
    """Two classes, uncertain labels: why our default is 2."""
    p = problem(5, 2, n=200)
    p.u = -torch.rand(200, 1).double() * (F.softmax(p.m[0], 1) - F.one_hot(p.labels, 2))
    left = []
    for step in (2.0, 4.0):
        steps = StepSizes(rho, fista_step=step)
        z = output_z(p, steps, most=2000, tolerance=0.0)
        g = F.softmax(z, 1) - F.one_hot(p.labels, 2) + p.u + rho * (z - p.m[0])
        left.append(float(g.norm()))
    assert left[0] < 1e-3 < 1 < left[1]


def test_fista_stops_at_the_tolerance_and_at_the_limit():
    p = problem(5, 3)
    args = (p, StepSizes(0.1))
    assert torch.equal(output_z(*args, most=0), p.z[0])
    one, two = (output_z(*args, most=k, tolerance=0.0) for k in (1, 2))
    assert not torch.equal(one, two)
    assert torch.equal(output_z(*args, most=9, tolerance=math.inf), one)


@pytest.mark.cover(2)
@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("widths", [(5, 3), (5, 7, 3), (5, 7, 6, 8, 3)])
@pytest.mark.parametrize("rho", [1e-3, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_no_update_raises_the_lagrangian(widths, slope, rho, bias):
    p, steps = problem(*widths, slope=slope, bias=bias), StepSizes(rho, theta=1e-6, tau=1e-6)
    updates = [admm.update_z, admm.update_b, admm.update_W, admm.update_a]
    value, lowered = float(lagrangian(p, rho)), set()
    for _ in range(3):
        for i in reversed(range(len(p.W))):
            for update in updates[: 4 if i else 3]:
                update(p, i, steps)
                after = float(lagrangian(p, rho))
                # FISTA ends within its tolerance of the minimum, not at it
                assert after <= value + (1e-3 if update is admm.update_z else 1e-9)
                lowered |= {update.__name__} if after < value - 1e-6 else set()
                value = after
    wanted = {"update_z", "update_W"}
    wanted |= {"update_b"} if bias else set()
    wanted |= {"update_a"} if len(widths) > 2 else set()
    assert lowered == wanted


def test_what_a_layer_gives_is_kept_up_to_date():
    p = problem(5, 7, 6, 3)
    for _ in range(3):
        dladmm.iterate(p, StepSizes(0.1))
    for i in range(3):
        torch.testing.assert_close(p.m[i], F.linear(p.a[i], p.W[i], p.b[i]))


def test_the_bias_is_the_minimum():
    p, steps = problem(5, 7, 3), StepSizes(0.3)
    for i in range(2):
        admm.update_b(p, i, steps)
        b = p.b[i].clone().requires_grad_()
        p.m[i] = F.linear(p.a[i], p.W[i], b)
        (g,) = torch.autograd.grad(lagrangian(p, steps.rho), b)
        assert g.abs().max() < 1e-12
        p.m[i] = p.m[i].detach()


@pytest.mark.parametrize("first", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("which", ["W", "a"])
def test_steps_are_those_of_a_literal_search(first, which):
    """The gradient by autograd, theta doubled as long as the bound does not hold."""
    p, rho, i = problem(5, 7, 3), 0.3, 1
    x = (p.W if which == "W" else p.a)[i]

    def value(v):
        W, a = (v, p.a[i]) if which == "W" else (p.W[i], v)
        r = p.z[i] - F.linear(a, W, p.b[i])
        own = (a - F.leaky_relu(p.z[i - 1], p.slopes[i - 1])).square().sum()
        return (p.u * r).sum() + rho / 2 * (r.square().sum() + own)

    g, theta, doublings = torch.func.grad(value)(x), first, 0
    while value(x - g / theta) > value(x) - g.square().sum() / theta / 2:
        theta, doublings = 2 * theta, doublings + 1
    steps = StepSizes(rho, theta=first, tau=first)
    (admm.update_W if which == "W" else admm.update_a)(p, i, steps)
    torch.testing.assert_close((p.W if which == "W" else p.a)[i], x - g / theta)
    assert (doublings > 0) == (first == 1e-4 or (first == 1.0 and which == "W"))


def test_doubling_is_bounded():
    needed = torch.tensor([0.0, 1.0, 1.5, 4.0, math.inf])
    assert admm.doubled(1.0, needed).tolist() == [1, 1, 2, 4, 2.0**admm.DOUBLINGS]


def test_a_step_of_no_length_is_no_step():
    """Where the gradient is 0 nothing moves, and nothing becomes NaN."""
    p, steps = problem(5, 3), StepSizes(1.0)
    p.z[0], p.u = p.m[0].clone(), torch.zeros_like(p.u)
    before = p.W[0]
    admm.update_W(p, 0, steps)
    assert torch.equal(p.W[0], before)


# --- learning


@pytest.mark.cover(1)
@pytest.mark.parametrize("widths", [(6, 3), (6, 20, 3), (6, 20, 20, 3), (6, 24, 24, 24, 3)])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_it_interpolates_what_can_be_told_apart(widths, slope, unwatched):
    x, y = points(apart=4.0)
    run = fit_dladmm(net(*widths, slope=slope), (x / x.std(), y), iterations=250)
    losses = [e.loss for e in run.history]
    assert run.history[-1].accuracy == 1.0
    assert losses[-1] < 0.5 * losses[0]


def test_it_learns_what_a_line_cannot_tell(unwatched):
    """Two halves of each class on opposite sides: a linear model is at chance, about a half."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=g)
    y = (x[:, 0] * x[:, 1] > 0).long()
    linear = fit_dladmm(net(2, 2), (x, y), iterations=100)
    assert linear.history[-1].accuracy < 0.7
    run = fit_dladmm(net(2, 64, 2, slope=0.1), (x, y), iterations=600, rho=0.1)
    assert run.history[-1].accuracy > 0.85


def test_the_loss_falls_with_every_iteration(unwatched):
    x, y = points(n=60)
    run = fit_dladmm(net(6, 16, 3), (x / x.std(), y), iterations=100)
    losses = [e.loss for e in run.history]
    assert all(b < a for a, b in pairwise(losses[5:]))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_model_keeps_its_kind(bias, dtype, unwatched):
    model = net(6, 9, 3, bias=bias, dtype=dtype)
    x, y = points()
    before, modules, mode = state(model), list(model.modules()), model.training
    run = fit_dladmm(model, (x, y), iterations=5)
    assert list(model.modules()) == modules and model.training is mode
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    after = state(model)
    assert after.keys() == before.keys() and not same(after, before)
    assert {t.dtype for t in after.values()} == {dtype}
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    with torch.no_grad():
        out = model(x.to(dtype))
    assert run.history[-1].accuracy == pytest.approx((out.argmax(1) == y).double().mean())
    assert run.loss == pytest.approx(F.cross_entropy(out, y).item(), rel=1e-5)


def test_float32_follows_float64(unwatched):
    x, y = points()
    runs = [
        fit_dladmm(net(6, 9, 3, dtype=dtype), (x, y), iterations=50)
        for dtype in (torch.float32, torch.float64)
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-3)


@pytest.mark.parametrize("rho", [1e-6, 1.0])
@pytest.mark.parametrize(
    "spoil",
    {
        "constant column": lambda x: torch.cat([x, torch.full((len(x), 1), 5.0)], 1),
        "duplicates": lambda x: x[torch.arange(len(x)) // 8 * 8],
        "few samples": lambda x: torch.cat([x] * 20, 1),
        "zeros": lambda x: x * 0,
        "large": lambda x: x * 1e4,
        "small": lambda x: x * 1e-6,
    }.items(),
    ids=lambda item: item[0],
)
def test_awkward_inputs_stay_finite(spoil, rho, unwatched):
    x, y = points()
    x = spoil[1](x)
    model = net(x.shape[1], 8, 3)
    run = fit_dladmm(model, (x, y), iterations=30, rho=rho)
    assert all(math.isfinite(e.loss) for e in run.history)
    assert all(torch.isfinite(p).all() for p in model.parameters())


# --- the shell


def test_every_kind_of_data_gives_the_same(unwatched):
    x, y = points()
    x = x.double()
    pairs = TensorDataset(x, y)
    kinds = [
        (x, y),
        (x.numpy(), y.numpy()),
        pairs,
        _Own(x, y),
        _Endless(x, y),
        DataLoader(pairs, batch_size=7),
        DataLoader(_Endless(x, y), batch_size=5),
    ]
    losses = []
    for data in kinds:
        model = net(6, 9, 3, dtype=torch.float64)
        losses.append(fit_dladmm(model, data, iterations=5).loss)
    assert losses == pytest.approx([losses[0]] * len(kinds), rel=1e-9)


class _Own(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class _Endless(IterableDataset):
    """Does not say how long it is."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return zip(self.x, self.y, strict=True)


def test_images_are_flattened_and_bytes_converted(unwatched):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 255, (30, 1, 4, 4), generator=g, dtype=torch.uint8)
    y = torch.arange(30) % 3
    model = nn.Sequential(nn.Flatten(), *net(16, 8, 3))
    run = fit_dladmm(model, (x, y), iterations=3)
    assert run.kept_bytes == 4 * x.numel()
    with torch.no_grad():
        assert run.loss == pytest.approx(F.cross_entropy(model(x / 255), y).item(), rel=1e-5)


def test_the_record():
    x, y = points()
    seen, progress = [], []
    model = net(6, 9, 3)
    run = fit_dladmm(
        model,
        (x, y),
        iterations=4,
        seed=3,
        validation=points(seed=1),
        callbacks=[seen.append],
        progress=lambda done, total: progress.append((done, total)),
    )
    assert run.rule == "dladmm" and run.seed == 3
    assert run.history == seen and [e.epoch for e in seen] == [1, 2, 3, 4]
    assert {e.block for e in seen} == {0}
    assert run.sample_passes == 4 * 2 * 2 * 48
    assert progress == [(k * 192, 768) for k in (1, 2, 3, 4)]
    assert seen[-1].val_accuracy == pytest.approx(tpsgd.evaluate(model, points(seed=1)))
    with torch.no_grad():
        vx, vy = points(seed=1)
        assert seen[-1].val_loss == pytest.approx(F.cross_entropy(model(vx), vy).item(), rel=1e-5)
    assert run.seconds > 0 and run.setup_seconds > 0 and run.kept_bytes == 0
    assert [b.learning for b in run.blocks] == ["alternating updates"] * 2
    assert [b.parameters for b in run.blocks] == [63, 30]
    json.dumps(run.as_dict())
    assert run.settings["rho"] == 1.0 and run.settings["rho_at_end"] == 1.0
    assert run.settings["iterations"] == 4 and run.settings["max_rho"] is None
    assert "alternating updates" in str(run)


def test_a_callback_ends_the_run(unwatched):
    model = net(6, 9, 3)
    run = fit_dladmm(model, points(), iterations=9, callbacks=[lambda e: e.epoch == 2])
    other = net(6, 9, 3)
    fit_dladmm(other, points(), iterations=2)
    assert len(run.history) == 2 and same(state(model), state(other))


def test_a_callback_may_use_autograd(unwatched):
    model = net(6, 9, 3)
    fit_dladmm(model, (X, Y), iterations=1, callbacks=[lambda e: model(X).sum().backward()])
    assert model[0].weight.grad is not None


def test_the_same_twice(unwatched):
    models = [net(6, 9, 3), net(6, 9, 3)]
    data = _Own(*points())
    for model in models:
        fit_dladmm(model, data, iterations=5, seed=4)
    assert same(state(models[0]), state(models[1]))


def test_interruptions_leave_a_whole_iteration(unwatched, monkeypatch):
    """Wherever in an iteration Ctrl-C comes, the model is what the iterations before it made."""
    expected = net(6, 9, 3)
    fit_dladmm(expected, points(), iterations=2)
    update_W, calls = admm.update_W, []

    def interrupted(*args):
        update_W(*args)
        calls.append(1)
        if len(calls) == 4 * 2 + 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(admm, "update_W", interrupted)
    model = net(6, 9, 3)
    with pytest.raises(KeyboardInterrupt):
        fit_dladmm(model, points(), iterations=9)
    assert same(state(model), state(expected))


def test_a_loss_that_is_no_number_is_named_and_not_kept(unwatched, monkeypatch):
    expected, model = net(6, 9, 3), net(6, 9, 3)
    fit_dladmm(expected, points(), iterations=1)
    iterate, calls = dladmm.iterate, []

    def spoiled(p, steps):
        iterate(p, steps)
        calls.append(1)
        if len(calls) == 2:
            p.W[0] = p.W[0] * math.nan
            p.m[0] = p.m[0] * math.nan

    monkeypatch.setattr(dladmm, "iterate", spoiled)
    with pytest.raises(TpsgdError, match="became nan in iteration 2"):
        fit_dladmm(model, points(), iterations=5)
    assert same(state(model), state(expected))


def test_rho_grows_when_the_loss_rises(unwatched, monkeypatch):
    seen, iterate = [], dladmm.iterate
    rising = iter(range(100))
    monkeypatch.setattr(dladmm, "loss_and_accuracy", lambda p: (float(next(rising)), 0.0))
    monkeypatch.setattr(
        dladmm, "iterate", lambda p, steps: (seen.append(steps.rho), iterate(p, steps))
    )
    run = fit_dladmm(net(6, 9, 3), points(), iterations=7, rho=0.01, max_rho=0.5)
    assert seen == pytest.approx([0.01] * 4 + [0.1, 0.5, 0.5])
    assert run.settings["rho"] == 0.01 and run.settings["rho_at_end"] == 0.5
    seen.clear()
    fit_dladmm(net(6, 9, 3), points(), iterations=7, rho=0.01)
    assert seen == [0.01] * 7


# --- memory


@pytest.mark.cover(1)
@pytest.mark.parametrize("widths", [(6, 3), (40, 64, 10), (20, 64, 64, 64, 5), (30, 10, 80, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_plan_is_what_is_held(widths, dtype):
    model = net(*widths, slope=0.1, dtype=dtype)
    x, y = points(n=500, features=widths[0], classes=widths[-1])
    run = fit_dladmm(model, (x.to(dtype), y), iterations=2)
    own = sum(p.nbytes for p in model.parameters())
    planned = dladmm.planned_bytes(500, list(widths), dtype.itemsize)
    assert run.peak_bytes - own <= planned <= 1.4 * (run.peak_bytes - own)


def test_what_does_not_fit_is_refused_before_it_is_tried(monkeypatch):
    x, y = points()
    model = net(6, 64, 3)
    before = state(model)
    monkeypatch.setattr(dladmm, "begin", lambda *args: pytest.fail("it was tried"))
    monkeypatch.setattr(dladmm, "available", lambda device: 100_000)
    for data in ((x, y), _Own(x, y), DataLoader(_Endless(x, y), batch_size=8)):
        with pytest.raises(
            TpsgdError, match=r"all 4\d samples.* KB, and 97\.7 KB are free on cpu: use"
        ):
            fit_dladmm(model, data)
    assert same(state(model), before)


def test_an_endless_stream_is_refused_while_it_is_read(monkeypatch):
    class Forever(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.randn(6), 0

    monkeypatch.setattr(dladmm, "available", lambda device: 2 << 20)
    with pytest.raises(TpsgdError, match="are free on cpu"):
        fit_dladmm(net(6, 64, 3), Forever())


# --- one sentence for each mistake

X, Y = points()
BAD_MODELS = {
    "conv": (nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), "Conv1d"),
    "norm": (
        nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
        "Batch",
    ),
    "dropout": (
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 3)),
        "Dropout",
    ),
    "tanh": (mlp(6, 4, 3), "has Tanh"),
    "prelu": (nn.Sequential(nn.Linear(6, 4), nn.PReLU(), nn.Linear(4, 3)), "has PReLU"),
    "softmax": (nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)), "has Softmax"),
    "late flatten": (
        nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)),
        "has Flatten",
    ),
    "no activation": (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), "has no activation"),
    "one output": (nn.Sequential(nn.Linear(6, 1)), "give it 2"),
    "half": (nn.Sequential(nn.Linear(6, 3)).half(), "float32 or float64"),
    "recurrent": (nn.Sequential(nn.RNN(6, 4, batch_first=True), nn.Linear(4, 3)), "Recurrent"),
}


@pytest.mark.parametrize("model, said", BAD_MODELS.values(), ids=BAD_MODELS)
def test_models_it_cannot_train(model, said):
    before = state(model)
    with pytest.raises(TpsgdError, match=said) as error:
        fit_dladmm(model, (X, Y))
    assert "\n" not in str(error.value) and same(state(model), before)


def test_frozen_layers_and_hooks_are_refused():
    model = net(6, 9, 3)
    model[0].bias.requires_grad_(False)
    with pytest.raises(TpsgdError, match=r"block 1 \(0: Linear \+ ReLU\) is frozen"):
        fit_dladmm(model, (X, Y))
    model = net(6, 9, 3)
    model[2].register_forward_hook(lambda *args: None)
    with pytest.raises(TpsgdError, match=r"block 2 .* has hooks"):
        fit_dladmm(model, (X, Y))


BAD_SETTINGS = [
    ({"iterations": 0}, "iterations must be a whole number, 1 or more, got 0"),
    ({"iterations": 2.5}, "iterations must be a whole number"),
    ({"rho": 0}, "rho must be a number above 0, got 0"),
    ({"rho": math.nan}, "rho must be a number above 0, got nan"),
    ({"rho": "1"}, "rho must be a number above 0, got '1'"),
    ({"theta": -1.0}, "theta must be a number above 0"),
    ({"tau": math.inf}, "tau must be a number above 0"),
    ({"fista_step": 0.0}, "fista_step must be a number above 0"),
    ({"max_rho": 0.5}, r"max_rho must be rho \(1\) or more, got 0.5"),
    ({"max_rho": math.inf}, "max_rho must be a number"),
    ({"max_rho": "much"}, "max_rho must be a number"),
    ({"epochs": 3}, "fit_dladmm has no argument 'epochs'"),
    ({"calbacks": []}, "fit_dladmm has no argument 'calbacks': did you mean 'callbacks'"),
    ({"seed": 0.5}, "seed must be a whole number"),
    ({"device": "nowhere"}, "unknown device"),
    ({"validation": (X[:, :4], Y)}, "cannot take an input of shape"),
    ({"validation": (X, Y + 1)}, "label 3 is out of range"),
    ({"validation": (X, F.one_hot(Y, 3).float())}, "dlADMM needs class indices"),
]


@pytest.mark.parametrize("given, said", BAD_SETTINGS)
def test_settings_it_cannot_take(given, said):
    with pytest.raises(TpsgdError, match=said) as error:
        fit_dladmm(net(6, 9, 3), (X, Y), **given)
    assert "\n" not in str(error.value)


BAD_DATA = {
    "float labels": ((X, F.one_hot(Y, 3).float()), "got float labels"),
    "float rows in a loader": (_Own(X, F.one_hot(Y, 3).float()), "got float labels"),
    "several labels": ((X, F.one_hot(Y, 3)), "one class for each sample"),
    "out of range": ((X, Y + 1), "label 3 is out of range"),
    "nan": ((X.clone().fill_(math.nan), Y), "NaN or infinity"),
    "empty": ((X[:0], Y[:0]), "the data is empty"),
    "lengths": ((X, Y[:-1]), "48 samples but y has 47"),
    "width": ((X[:, :5], Y), "cannot take an input of shape"),
    "steps": ((X.view(12, 4, 6), Y[:12]), "one number per class"),
    "ragged": ((Padded.of([X[:3], X[:5]]), Y[:2]), "sequences of different lengths"),
}


@pytest.mark.parametrize("data, said", BAD_DATA.values(), ids=BAD_DATA)
def test_data_it_cannot_take(data, said):
    with pytest.raises(TpsgdError, match=said) as error:
        fit_dladmm(net(6, 9, 3), data)
    assert "\n" not in str(error.value)


# --- on a GPU, where there is one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_gpu_learns_the_same():
    x, y = points()
    models = [net(6, 9, 3, dtype=torch.float64) for _ in range(2)]
    runs = [
        fit_dladmm(m, (x, y), iterations=20, device=d)
        for m, d in zip(models, ("cpu", "cuda"), strict=True)
    ]
    assert runs[0].loss == pytest.approx(runs[1].loss, rel=1e-8)
    assert models[1][0].weight.is_cuda and runs[1].peak_bytes > 0
