"""Blocks in closed form against direct solutions, and the penalty that they choose."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Place, TpsgdError, ridge, rules
from tpsgd.engine.solvers.least_squares import ALPHAS, MomentSums, SampleSums
from tpsgd.maths.random import Key

torch.manual_seed(0)
X = torch.randn(90, 6, dtype=torch.float64) * torch.tensor([1.0, 3.0, 0.1, 2.0, 1.0, 5.0]) + 7
Y = ((X - 7) @ torch.randn(6, 3, dtype=torch.float64)).argmax(1)


def head(**options):
    return nn.Sequential(nn.Linear(6, 3, **options)).double()


def by_hand(x, y, alpha, bias=True):
    """Centred, then the normal equations."""
    mx, my = (x.mean(0), y.mean(0)) if bias else (0 * x[0], 0 * y[0])
    a, b = x - mx, y - my
    W = torch.linalg.solve(a.T @ a / len(x) + alpha * torch.eye(x.shape[1]).double(), a.T @ b)
    return (W / len(x)).T, my - mx @ (W / len(x))


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 10.0])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_normal_equations(alpha, bias):
    model = head(bias=bias)
    tpsgd.fit(model, (X, Y), optimizer=ridge(alpha), batch_size=20)
    weight, shift = by_hand(X, F.one_hot(Y, 3).double(), alpha, bias)
    torch.testing.assert_close(model[0].weight.detach(), weight, rtol=1e-8, atol=1e-10)
    if bias:
        torch.testing.assert_close(model[0].bias.detach(), shift, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("n", "d", "kind"), [(20, 6, MomentSums), (9, 30, MomentSums), (9, 30, SampleSums)]
)
def test_the_penalty_is_that_of_generalised_cross_validation(n, d, kind, bias):
    """Against the hat matrix, written out; alphas that leave nothing to judge by do not count."""
    torch.manual_seed(n)
    x, y = torch.randn(n, d).double() * torch.linspace(0.1, 3, d).double() + 2, torch.randn(n, 2)
    y = x[:, -2:] + 3 * y.double()
    sums = kind(x, y, bias)
    sums.add(x, y)
    a = x - x.mean(0) * bias
    scale, best = (a.square().sum() / n / min(n, d)).item(), None
    for alpha in ALPHAS:
        ridge_of = a.T @ a + n * alpha * scale * torch.eye(d).double()
        hat = a @ torch.linalg.solve(ridge_of, a.T) + bias / n
        rest = (y - hat @ y).square().sum() / n
        score = float(rest / (1 - hat.trace() / n) ** 2)
        if hat.trace() / n < 0.95 and (best is None or score < best[0]):
            best = (score, alpha)
    expected, _ = by_hand(x, y, best[1] * scale, bias)
    torch.testing.assert_close(sums.solve(None)[0], expected, rtol=1e-5, atol=1e-8)


def test_the_penalty_is_on_record_and_inputs_read_once_are_not_kept():
    model = two_layers()
    run = tpsgd.fit(model, (X, Y), rule=rules.frozen(), optimizer=ridge())
    (alpha,) = run.settings["alphas"].values()
    again = two_layers()
    again.load_state_dict(model.state_dict())
    tpsgd.fit(again, (X, Y), rule=rules.frozen(), optimizer=ridge(alpha))
    torch.testing.assert_close(again[2].weight, model[2].weight, rtol=1e-7, atol=1e-9)
    assert list(run.settings["alphas"]) == [2] and run.kept_bytes == 0


def test_noise_is_shrunk_and_signal_is_not():
    x = torch.randn(60, 50).double()
    y = (x[:, 0] > 0).long()
    new = torch.randn(2000, 50).double()
    shares = []
    for alpha in (1e-12, None):
        model = nn.Sequential(nn.Linear(50, 2)).double()
        tpsgd.fit(model, (x, y), optimizer=ridge(alpha))
        shares.append(tpsgd.evaluate(model, (new, (new[:, 0] > 0).long())))
    assert shares[1] > shares[0]


def test_constant_and_repeated_inputs_and_few_samples():
    for x in (torch.cat([X, X[:, :1], torch.ones(90, 1).double()], 1), X[:4]):
        model, y = nn.Sequential(nn.Linear(x.shape[1], 3)).double(), torch.arange(len(x)) % 3
        tpsgd.fit(model, (x, y), optimizer=ridge(0.0), loss=tpsgd.mse)
        best = torch.linalg.lstsq(
            torch.cat([x, torch.ones(len(x), 1).double()], 1), F.one_hot(y, 3).double(),
            driver="gelsd",
        ).solution  # fmt: skip
        given = x @ best[:-1] + best[-1]
        torch.testing.assert_close(model(x).detach(), given, rtol=1e-7, atol=1e-8)


def test_large_offsets_do_not_cancel():
    """float32 inputs around 1e4: as good as centred ones."""
    x = (X + 1e4).float()
    found = []
    for given in (x.double(), x.double() - 1e4):
        sums = MomentSums(given, F.one_hot(Y, 3).double(), True)
        for i in torch.arange(90).split(11):
            sums.add(given[i], F.one_hot(Y[i], 3).double())
        found.append(sums.solve(1e-6).weight)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-8)


def test_yes_or_no_answers_are_cut_in_the_middle():
    labels = torch.stack([X[:, 1] > 7, X[:, 3] > 8], 1).double()
    model = nn.Sequential(nn.Linear(6, 2)).double()
    run = tpsgd.fit(model, (X, labels), optimizer=ridge(), loss=tpsgd.bce)
    assert tpsgd.evaluate(model, (X, labels)) > 0.8
    rest = model(X).detach() - (2 * labels - 1)
    assert run.loss == pytest.approx(float(rest.square().sum(1).mean() / 2), rel=1e-5)


def test_hidden_blocks_with_several_labels_reach_for_their_sum():
    """bce: the head fits -1 and 1, a hidden block P y* with y* of zeros and ones."""
    labels = torch.stack([X[:, 1] > 7, X[:, 3] > 8, X[:, 0] > 7], 1).double()
    model = two_layers()
    tpsgd.fit(model, (X, labels), rule=BEFORE, optimizer=ridge(0.1), loss=tpsgd.bce)
    weight, _ = by_hand(X, labels @ projected(0, 0, (8,)), 0.1)
    torch.testing.assert_close(model[0].weight.detach(), weight, rtol=1e-6, atol=1e-8)


def test_frozen_blocks_before_a_solved_one_need_no_solver():
    model = two_layers()
    model[0].requires_grad_(False)
    for rule in (rules.readout(), BEFORE):
        tpsgd.fit(model, (X, Y), rule=rule, optimizer=ridge())
    assert tpsgd.evaluate(model, (X, Y)) > 0.5


def test_a_rate_for_all_is_not_for_a_solver():
    model = two_layers()
    run = tpsgd.fit(
        model, (X, Y), optimizer=[torch.optim.Adam, ridge()], lr=0.01, epochs=2,
        lr_schedule=lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    )  # fmt: skip
    assert run.sample_passes == 90 * 2 + 90


def test_stacked_layers_over_time_steps():
    """A linear layer on (samples, steps, features), restarts together and one by one."""
    x = torch.randn(30, 4, 5).double()
    y = torch.arange(30) % 3

    def make():
        return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()

    found = [
        tpsgd.fit_many(make, (x, y), rule=BEFORE, optimizer=ridge(0.1), restarts=2, stacked=s)
        for s in (False, True)
    ]
    for a, b in zip(*(f.models for f in found), strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def test_its_passes_and_progress():
    seen = []
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    run = tpsgd.fit(
        model, (X, Y), epochs=3, optimizer=[torch.optim.Adam, ridge()],
        memory=tpsgd.Memory(reuse=False),
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen[-1] == (4 * 90, 4 * 90) and run.sample_passes == 4 * 90
    assert run.forward_passes == 90
    assert run.settings["optimizer"] == "['Adam', 'ridge()']"


def two_layers(act=nn.Tanh, first=None):
    return nn.Sequential(first or nn.Linear(6, 8), act(), nn.Linear(8, 3)).double()


BEFORE = rules.tpsgd_l2(at=Place.BEFORE)


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (two_layers(), {}, "readout-learned does not lower a squared error"),
        (two_layers(), {"rule": rules.tpsgd_l1(at=Place.BEFORE)}, "does not lower a squared error"),
        (two_layers(), {"rule": rules.tpsgd_l2()}, "looks beyond the activation; take at="),
        (two_layers(), {"rule": BEFORE, "order": tpsgd.simultaneous}, "use order=tpsgd.seq"),
        (nn.Sequential(nn.Linear(6, 3), nn.Tanh()).double(), {}, "after the last layer"),
        (nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)).double(), {}, "after the last layer"),
        (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double(),
            {"rule": BEFORE},
            "BatchNorm1d lies between",
        ),
        (
            nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(12, 3)).double(),
            {"rule": BEFORE},
            "linear in their weights",
        ),
        (
            nn.Sequential(nn.Linear(6, 8), nn.Flatten(), nn.Linear(8, 3)).double(),
            {"rule": rules.tpsgd_l2(at=Place.END)},
            "looks at the block's end",
        ),
        (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)).double(),
            {"rule": rules.frozen()},
            "a module before the layer learns too",
        ),
    ],
)
def test_refusals(model, options, reason):
    x = (X > 7).long() if isinstance(model[0], nn.Embedding) else X
    with pytest.raises(TpsgdError, match=reason):
        tpsgd.fit(model, (x, Y), **{"optimizer": ridge()} | options)


def test_more_refusals():
    frozen = head()
    frozen[0].bias.requires_grad_(False)
    with pytest.raises(TpsgdError, match="its bias may not learn"):
        tpsgd.fit(frozen, (X, Y), optimizer=ridge())
    hooked = head()
    hooked[0].register_forward_hook(lambda *_: None)
    with pytest.raises(TpsgdError, match="has a hook"):
        tpsgd.fit(hooked, (X, Y), optimizer=ridge())
    with pytest.raises(TpsgdError, match="backprop, whose gradients"):
        tpsgd.fit_backprop(head(), (X, Y), optimizer=ridge())
    grouped = nn.Sequential(nn.Conv1d(2, 4, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(TpsgdError, match="has groups"):
        tpsgd.fit(grouped.double(), (X.view(-1, 2, 3), Y), rule=BEFORE, optimizer=ridge())
    circular = nn.Sequential(
        nn.Conv1d(2, 4, 2, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(16, 3)
    ).double()
    with pytest.raises(TpsgdError, match="not padded with zeros"):
        tpsgd.fit(circular, (X.view(-1, 2, 3), Y), rule=BEFORE, optimizer=ridge())
    for alpha in (-1.0, float("nan"), float("inf"), "much"):
        with pytest.raises(TpsgdError, match="alpha must be a"):
            ridge(alpha)
    with pytest.raises(TpsgdError, match=r"got a list; .* optimizer=tpsgd.ridge\(\)"):
        tpsgd.fit(head(), (X, Y), optimizer=ridge)
    with pytest.raises(TpsgdError, match="too large"):
        tpsgd.fit(head(), (X * 1e200, Y), optimizer=ridge())


def test_a_solve_too_large_is_refused_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr("tpsgd.engine.learners.solved.available", lambda device: 1000)
    model = two_layers()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(TpsgdError, match=r"block 2 .* 8 inputs need about .* 1000 B are free"):
        tpsgd.fit(model, (X, Y), optimizer=[torch.optim.Adam, ridge()])
    assert all(map(torch.equal, before, model.parameters()))


def projected(seed, block, shape, classes=3):
    return tpsgd.projections.normal()(shape, classes, Key(seed, block)).double()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_hidden_blocks_reach_for_the_projected_labels(alpha):
    """Every block against the normal equations on the inputs that it really gets."""
    model = nn.Sequential(
        nn.Linear(6, 8),
        nn.Tanh(),
        nn.Dropout(0.5),
        nn.Linear(8, 5),
        nn.LeakyReLU(),
        nn.Linear(5, 3),
    ).double()
    run = tpsgd.fit(model, (X, Y), rule=BEFORE, optimizer=ridge(alpha), seed=4, batch_size=32)
    model.eval()
    h1, h2 = model[:2](X).detach(), model[:5](X).detach()
    for block, (layer, x) in enumerate(zip((model[0], model[3]), (X, h1), strict=True)):
        y = projected(4, block, (layer.out_features,))[Y]
        weight, bias = by_hand(x, y, alpha)
        torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(layer.bias.detach(), bias, rtol=1e-6, atol=1e-8)
        rest = layer(x).detach() - y
        assert run.history[block].loss == pytest.approx(
            float(rest.square().sum(1).mean() / 2), 1e-5
        )
    weight, _ = by_hand(h2, F.one_hot(Y, 3).double(), alpha)
    torch.testing.assert_close(model[5].weight.detach(), weight, rtol=1e-6, atol=1e-8)
    assert run.sample_passes == 3 * 90 and len(run.history) == 3


def test_the_penalty_of_a_hidden_block_is_chosen_for_its_own_targets():
    """Codes of very different sizes: as if the targets had been written out."""
    x, y = X[:20], Y[:20]
    codes = torch.randn(3, 4).double() * torch.tensor([1e-3, 1.0, 30.0]).double()[:, None]
    onehot = F.one_hot(y, 3).double()
    mixed, plain = MomentSums(x, onehot, True), MomentSums(x, codes[y], True)
    mixed.add(x, onehot)
    plain.add(x, codes[y])
    for a, b in zip(mixed.solve(None, codes), plain.solve(None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [None, 0.0, 0.2])
def test_few_samples_give_the_same_by_way_of_their_products(bias, alpha):
    torch.manual_seed(1)
    x, y = torch.randn(12, 30).double() + 2, F.one_hot(torch.arange(12) % 3, 3).double()
    found = []
    for kind in (MomentSums, SampleSums):
        sums = kind(x, y, bias)
        sums.add(x[:5], y[:5])
        sums.add(x[5:], y[5:])
        found.append(sums.solve(alpha))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    if alpha == 0.0:  # interpolation, with the smallest weights that do it
        weight, shift, loss, _ = found[1]
        torch.testing.assert_close(x @ weight.T + shift, y, rtol=0, atol=1e-9)
        assert float(loss) < 1e-12
        if not bias:
            torch.testing.assert_close(weight.T, torch.linalg.pinv(x) @ y, rtol=1e-6, atol=1e-9)


def test_more_inputs_than_memory_for_their_products_but_few_samples(monkeypatch):
    """4,000 inputs: products with one another would be 900 MB; 30 samples need 5 MB."""
    monkeypatch.setattr("tpsgd.engine.learners.solved.available", lambda device: 50 << 20)
    x, y = torch.randn(30, 4000), torch.arange(30) % 3
    x[y == 1, :40] += 2
    x[y == 2, :40] -= 2
    model = nn.Sequential(nn.Linear(4000, 3))
    tpsgd.fit(model, (x, y), optimizer=ridge())
    assert tpsgd.evaluate(model, (x, y)) == 1.0
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_sampler=[[0, 1]]
    )
    with pytest.raises(TpsgdError, match="pool its inputs first"):
        tpsgd.fit(model, loader, optimizer=ridge())  # who knows how many samples it has


@pytest.mark.parametrize(
    ("layer", "shape", "space"),
    [
        (nn.Conv2d(2, 4, 3), (2, 6, 5), (4, 3)),
        (nn.Conv2d(2, 4, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2)), (2, 6, 7), (3, 3)),
        (nn.Conv2d(2, 4, 3, padding="same", bias=False), (2, 4, 4), (4, 4)),
        (nn.Conv1d(2, 4, 3, padding=1, stride=2), (2, 9), (5,)),
        (nn.Conv1d(2, 4, 2, dilation=3), (2, 9), (6,)),
        (nn.Linear(5, 4), (3, 5), (3,)),
    ],
)
def test_convolutions_by_patches(layer, shape, space):
    """Against least squares over the whole linear map, which autograd gives."""
    torch.manual_seed(2)
    x, y = torch.randn(40, *shape).double(), torch.arange(40) % 3
    units = 4 * int(torch.tensor(space).prod())
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(units, 3)).double()
    out = (*space, 4) if isinstance(layer, nn.Linear) else (4, *space)
    run = tpsgd.fit(model, (x, y), rule=BEFORE, optimizer=ridge(0.0), batch_size=16)
    targets = projected(0, 0, out)[y]
    start = [p.detach().clone() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def rest(*params):
        call = torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x,))
        return (call - targets).square().sum() / (2 * len(x))

    assert run.history[0].loss == pytest.approx(float(rest(*start)), rel=1e-6)
    for gradient in torch.func.grad(rest, tuple(range(len(start))))(*start):
        assert gradient.abs().max() < 1e-9  # a minimum, of a convex function


def test_patches_are_made_a_few_samples_at_a_time(monkeypatch):
    x, y = torch.randn(40, 2, 8, 8), torch.arange(40) % 3
    found = []
    for held in (1 << 25, 8 * 64 * 18 * 3):  # all, and three samples
        monkeypatch.setattr("tpsgd.engine.solvers.equations._PATCHES", held)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        run = tpsgd.fit(
            model, (x, y), rule=BEFORE, optimizer=ridge(0.1), batch_size=40,
            memory=tpsgd.Memory(reuse=False),
        )  # fmt: skip
        found.append((model[0].weight.detach().clone(), run.peak_bytes))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-6)
    assert found[1][1] < 0.6 * found[0][1]


def test_stacked_restarts_are_those_one_by_one():
    def make():
        return two_layers(nn.LeakyReLU)

    options = {"rule": BEFORE, "optimizer": ridge(), "restarts": 3}
    one = tpsgd.fit_many(make, (X, Y), stacked=False, **options)
    many = tpsgd.fit_many(make, (X, Y), stacked=True, **options)
    for a, b in zip(one.models, many.models, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)
    for a, b in zip(one.runs, many.runs, strict=True):
        assert [e.loss for e in a.history] == pytest.approx([e.loss for e in b.history], rel=1e-5)


def test_a_stream_is_read_once():
    """A head is solved in one pass, with memory that does not depend on the samples."""

    class Once(torch.utils.data.IterableDataset):
        def __init__(self, times):
            self.times, self.read = times, 0

        def __iter__(self):
            self.read += 1
            return iter([(x, y) for _ in range(self.times) for x, y in zip(X, Y, strict=True)])

    peaks = []
    for times in (1, 8):
        model, data = head(), Once(times)
        run = tpsgd.fit(model, data, optimizer=ridge(0.1), batch_size=10)
        assert data.read == 2  # the first sample, to learn its shape, and the pass
        weight, _ = by_hand(X, F.one_hot(Y, 3).double(), 0.1)
        torch.testing.assert_close(model[0].weight.detach(), weight, rtol=1e-8, atol=1e-10)
        peaks.append(run.peak_bytes)
    assert peaks[0] == peaks[1]


def test_two_rates_reach_their_groups():
    x, y = torch.randn(32, 5, 3), torch.arange(32) % 2
    for layer in (tpsgd.Recurrent(3, 4), nn.RNN(3, 4, batch_first=True)):
        model = nn.Sequential(layer, nn.Linear(4, 2))
        before = {k: p.clone() for k, p in model.state_dict().items()}
        rates = [tpsgd.two_rates(x=0.5, h=0.0), torch.optim.Adam]
        tpsgd.fit(model, (x, y), rule=rules.drtp(), optimizer=rates, epochs=1)
        for name, p in model.state_dict().items():
            state = name.endswith(("weight_h", "bias_h")) or "_hh_" in name
            assert torch.equal(before[name], p) == state, name
    with pytest.raises(TpsgdError, match="leave lr out"):
        tpsgd.fit(model, (x, y), optimizer=rates, lr=0.1)
    for bad in (-1.0, float("inf")):
        with pytest.raises(TpsgdError, match="learning rates must be numbers"):
            tpsgd.two_rates(x=bad, h=1.0)


@pytest.mark.parametrize("bias", [True, False])
def test_merged_sums_are_the_sums_over_all_samples(bias):
    x, y = X + 1e4, F.one_hot(Y, 3).double()  # means that must not be lost
    whole = MomentSums(x, y, bias)
    whole.add(x, y)
    total, *others = [MomentSums(x, y, bias) for _ in range(3)]
    for sums, rows in zip(
        (total, *others), (slice(0, 4), slice(4, 50), slice(50, 90)), strict=True
    ):
        sums.add(x[rows], y[rows])
    for sums in others:
        total.merge(sums)
    assert total.count == whole.count
    for name in ("x", "y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name))
