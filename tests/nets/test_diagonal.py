"""The diagonal recurrence: its equations in complex numbers, autograd through time, windows.

The oracle is the recurrence as it is published, one step after another in complex float64, and
autograd through all of it; the layer itself has real numbers, chunks of powers and traces.
"""

import copy
from functools import partial

import pytest
import torch
from helpers import close, ragged, same, seeded, sequences, state, tokens
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Padded, Recurrent, TpsgdError, rules
from tpsgd.maths.kernels import scan
from tpsgd.nets.unrolled import WINDOW, steps_without_traces
from tpsgd.objectives import Objective

pytestmark = pytest.mark.usefixtures("unwatched")

CLASSES, UNITS = 3, 5
PLACES = ("last", "mean", "every")
ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
SGD = {"optimizer": torch.optim.SGD, "lr": 0.01}
RULES = {
    "readout": rules.readout,
    "learned": lambda: rules.readout(learned=True),
    "l2": rules.tpsgd_l2,
    "l1": rules.tpsgd_l1,
    "drtp": rules.drtp,
    "any loss": lambda: rules.tpsgd(F.smooth_l1_loss),
    "standardised": lambda: rules.drtp(standardise=True),
}


def layer(at="mean", inputs=4, units=UNITS, states=3, **options):
    """A small layer with parameters that matter, in float64."""
    made = seeded(lambda: Recurrent.diagonal(inputs, units, states=states, loss_at=at, **options))
    g = torch.Generator().manual_seed(2)
    for p in made.double().parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)
    return made


def net(*layers, units=UNITS):
    return nn.Sequential(*layers, seeded(lambda: nn.Linear(units, CLASSES)).double())


def stack(at, inputs=4):
    return net(layer(at, inputs, sequence=True), layer(at, UNITS))


def fitted(model, data, **settings):
    model = copy.deepcopy(model)
    tpsgd.fit(model, data, **({"epochs": 2, "batch_size": 1000} | SGD | settings))
    return model


def published(layer, x):
    """All outputs, step by step in complex numbers."""
    p = dict(layer.named_parameters())
    lam = torch.exp(torch.complex(-p["nu_log"].exp(), p["theta_log"].exp()))
    B = torch.complex(p["weight_b"][:, 0], p["weight_b"][:, 1])
    C = torch.complex(p["weight_c"][..., 0], -p["weight_c"][..., 1])
    h = torch.zeros(len(x), len(lam), dtype=lam.dtype)
    outputs = []
    for t in range(x.shape[1]):
        h = lam * h + p["gamma_log"].exp() * (x[:, t].to(B.dtype) @ B.T)
        u = (h @ C.T).real + x[:, t] @ p["weight_d"].T
        a, b = (F.gelu(u) @ p["gate"].T + p["gate_bias"]).chunk(2, -1)
        outputs.append(F.layer_norm(a * b.sigmoid(), (layer.hidden,), p["norm"], p["norm_bias"]))
    return torch.stack(outputs, 1)


def of_place(outputs, at):
    return outputs.mean(1) if at == "mean" else outputs[:, -1]


# ---- the module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 15, 16, 17, 40, 300])
def test_outputs_are_those_of_the_published_recurrence(steps):
    x, _ = sequences(n=3, steps=steps)
    made = layer(sequence=True)
    with torch.no_grad():
        windows = made(x)
    whole = made(x)
    torch.testing.assert_close(whole, published(made, x), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(windows, whole, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("at", PLACES)
def test_what_the_layer_returns(at):
    x, _ = sequences(steps=9)
    made = layer(at)
    torch.testing.assert_close(made(x), of_place(published(made, x), at))
    with torch.no_grad():
        torch.testing.assert_close(made(x), of_place(published(made, x), at))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("at", PLACES)
def test_each_sequence_of_a_ragged_batch_is_read_as_if_alone(at, sequence):
    x, _ = sequences(steps=11)
    made, padded = layer(at, sequence=sequence), ragged(x)
    out = made(padded)
    for i, n in enumerate(padded.lengths.tolist()):
        alone = made(x[i : i + 1, :n])[0]
        torch.testing.assert_close(out.data[i, :n] if sequence else out[i], alone)


def test_online_use_goes_on_from_the_state():
    x, _ = sequences(steps=12)
    made, whole, state, parts = layer(), layer(sequence=True)(x), None, []
    for chunk in x.split([1, 1, 4, 6], 1):
        y, state = made.read(chunk, state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert state.shape == (len(x), 3, 2)


def test_lambda_begins_in_its_ring_and_states_with_the_size_of_inputs():
    made = seeded(lambda: Recurrent.diagonal(1, 8, states=4000, r_min=0.8, r_max=0.9, phase=1.0))
    size, angle = torch.exp(-made.nu_log.exp()), made.theta_log.exp()
    assert 0.8 <= size.min() < 0.81 and 0.89 < size.max() <= 0.9
    assert angle.min() < 0.01 and 0.99 < angle.max() <= 1.0
    torch.testing.assert_close(made.gamma_log.exp(), (1 - size.square()).sqrt())
    # uniform in the area of the ring
    assert abs(size.square().mean() - (0.8**2 + 0.9**2) / 2) < 0.01


def test_tokens_are_looked_up():
    x, _ = tokens(steps=6)
    made = layer(inputs=7, sequence=True)
    torch.testing.assert_close(made(x), made(F.one_hot(x, 7).double()))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"states": 0}, "needs inputs, units and states"),
        ({"loss_at": "first"}, 'loss_at must be "last", "mean" or "every"'),
        ({"r_min": 0.9, "r_max": 0.5}, "0 <= r_min < r_max < 1"),
        ({"r_max": 1.0}, "0 <= r_min < r_max < 1"),
        ({"phase": 7.0}, "phase must be over 0"),
    ],
)
def test_options_that_make_no_sense(options, match):
    with pytest.raises(TpsgdError, match=match):
        Recurrent.diagonal(4, 5, **options)


# ---- the scan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 16, 17, 300])
def test_the_adjoint_is_the_transpose_of_the_scan(steps):
    g = torch.Generator().manual_seed(0)
    nu, theta = torch.rand(2, 3, generator=g, dtype=torch.float64)
    b, c = torch.randn(2, 3, 2, steps, 4, generator=g, dtype=torch.float64)
    start = torch.randn(3, 2, 4, generator=g, dtype=torch.float64)
    made = scan.Scan(nu, theta, steps)
    d, before = made.adjoints(c)
    left, right = (c * made.states(b, start)).sum(), (d * b).sum() + (before * start).sum()
    torch.testing.assert_close(left, right)


def test_fast_decay_neither_overflows_nor_divides():
    nu = torch.tensor([1e-6, 60.0, 1e30])
    states = scan.Scan(nu, nu * 0, 400).states(torch.ones(3, 2, 400, 1))
    assert states.isfinite().all()
    torch.testing.assert_close(states[2], torch.ones(2, 400, 1))


# ---- gradients -----------------------------------------------------------------------------------


def learner_of(model, data, **settings):
    """The first block with its objective drawn, and all samples as one batch."""
    kept = []
    settings = {"optimizer": tpsgd.sgd, "lr": 0.1, "batch_size": 1000} | settings
    tpsgd.fit(model, data, order=kept.append, **settings)
    learner = kept[0].learners[0]
    learner.start()
    return learner, *next(kept[0].source.batches()).load()


@pytest.mark.cover(2)
@pytest.mark.parametrize(("steps", "window"), [(7, None), (7, 1), (7, 3), (40, None), (40, 17)])
@pytest.mark.parametrize("at", PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_autograd_through_time(rule, at, steps, window):
    x, y = sequences(n=6, steps=steps)
    made = layer(at)
    learner, batch, labels = learner_of(net(made), (x, y), rule=RULES[rule](), window=window)
    with torch.no_grad():
        saved = learner.forward(batch)
        local, (grads,) = learner.gradient.gradients(learner.params, saved, labels, learner.tensors)
    objective, outputs = learner.gradient.objective, published(made, x)
    codes = [P.detach().requires_grad_() for P in learner.tensors]
    if at == "every":  # a mean over time of each step's loss
        each = [objective.loss(out, y, *codes) for out in outputs.unbind(1)]
        loss = torch.stack(each).mean()
    else:
        loss = objective.loss(of_place(outputs, at), y, *codes)
    params = dict(made.named_parameters())
    expected = torch.autograd.grad(loss, [*params.values(), *codes], allow_unused=True)
    close(grads, {f"0.{k}": g for k, g in zip(params, expected, strict=False)}, 1e-7, 1e-10)
    torch.testing.assert_close(local.loss, loss.detach())
    for got, right in zip(local.dtensors, expected[len(params) :], strict=False):
        torch.testing.assert_close(got, right)


@pytest.mark.cover(1)
@pytest.mark.parametrize("rule", [rules.dfa, rules.sdfa])
@pytest.mark.parametrize("at", PLACES)
def test_errors_of_the_output_teach_it_too(rule, at):
    x, y = sequences(steps=11)
    before = stack(at)
    after = fitted(before, (x, y), rule=rule(), window=3)
    close(state(after), state(fitted(before, (x, y), rule=rule())))
    assert not same(state(before[0]), state(after[0]))


# ---- windows, orders, and data of all kinds ---------------------------------------------------


@pytest.mark.cover(1)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", PLACES)
def test_windows_and_recomputed_inputs_change_nothing(at, order):
    x, y = sequences(steps=11)
    settings = {"order": ORDERS[order]}
    right = state(fitted(stack(at), (x, y), **settings))
    for window in (1, 3, 50):
        close(state(fitted(stack(at), (x, y), window=window, **settings)), right)
    settings |= {"window": 4, "memory": tpsgd.Memory(reuse=False, micro_batch=5)}
    close(state(fitted(stack(at), (x, y), **settings)), right)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("at", PLACES)
def test_padding_does_not_count(at, order):
    x, y = sequences(steps=11)
    settings = {"order": ORDERS[order]}
    padded = ragged(x)
    junk = Padded(padded.data.clone(), padded.lengths)
    for row, n in zip(junk.data, junk.lengths, strict=True):
        row[n:] = 9.0
    right = state(fitted(stack(at), (padded, y), **settings))
    for window in (None, 1, 4):
        close(state(fitted(stack(at), (junk, y), window=window, **settings)), right)


@pytest.mark.parametrize("at", PLACES)
def test_ragged_gradients_are_those_of_each_sequence_alone(at):
    x, y = sequences(n=6, steps=11)
    padded, made = ragged(x), layer(at)
    learner, batch, labels = learner_of(net(made), (padded, y), window=3)
    with torch.no_grad():
        saved = learner.forward(batch)
        _, (grads,) = learner.gradient.gradients(learner.params, saved, labels, learner.tensors)
    objective, losses = learner.gradient.objective, []
    for row, n, label in zip(x, padded.lengths.tolist(), y, strict=True):
        outputs = published(made, row[None, :n])
        seen = outputs[0] if at == "every" else of_place(outputs, at)
        loss = objective.loss(seen, label.repeat(len(seen)), *learner.tensors)
        losses.append(loss * (n / int(padded.lengths.sum()) if at == "every" else 1 / len(x)))
    params = dict(made.named_parameters())
    right = torch.autograd.grad(sum(losses), params.values())
    close(grads, {f"0.{k}": g for k, g in zip(params, right, strict=True)}, 1e-7, 1e-10)


@pytest.mark.cover(2)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at", PLACES)
def test_tokens_learn_as_their_one_hot_vectors(at, padded, window):
    x, y = tokens(steps=9)
    vectors = F.one_hot(x, 7).double()
    if padded:
        lengths = ragged(x).lengths
        x, vectors = Padded(x, lengths), Padded(vectors, lengths)
    model = stack(at, inputs=7)
    close(state(fitted(model, (x, y), window=window)), state(fitted(model, (vectors, y))))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("at", PLACES)
def test_it_stands_between_leaky_layers(at, padded):
    x, y = sequences(steps=8)
    leaky = seeded(lambda: Recurrent(4, 6, sequence=True)).double()
    upper = seeded(lambda: Recurrent(UNITS, 4)).double()
    model = net(leaky, layer(at, 6, sequence=True), upper, units=4)
    data = (ragged(x) if padded else x, y)
    close(state(fitted(model, data, window=3)), state(fitted(model, data, window=1)))


@pytest.mark.parametrize("backprop", [False, True])
@pytest.mark.parametrize("at", PLACES)
def test_stacked_restarts_are_those_trained_one_by_one(at, backprop):
    data = sequences(steps=7)

    def factory():
        first = Recurrent.diagonal(4, UNITS, states=3, loss_at=at, sequence=True)
        last = Recurrent.diagonal(UNITS, UNITS, loss_at=at)
        return nn.Sequential(first, last, nn.Linear(UNITS, CLASSES)).double()

    settings = SGD | {"restarts": 2, "epochs": 1, "batch_size": 6, "window": None}
    settings |= {"backprop": True} if backprop else {"window": 3}
    together = tpsgd.fit_many(factory, data, stacked=True, **settings)
    alone = tpsgd.fit_many(factory, data, stacked=False, **settings)
    for a, b in zip(together.models, alone.models, strict=True):
        close(state(a), state(b), 1e-7, 1e-9)


def test_nothing_passes_between_layers():
    x, y = sequences(steps=6)
    other = stack("mean")
    for p in other[1:].parameters():
        p.data.add_(1.0)
    settings = {"order": tpsgd.simultaneous, "epochs": 1}
    a, b = (fitted(model, (x, y), **settings) for model in (stack("mean"), other))
    assert same(state(a[0]), state(b[0]))
    assert not same(state(a[1]), state(b[1]))


def test_backprop_trains_the_same_module():
    x, y = sequences(n=48, steps=20)
    model = stack("last")
    run = tpsgd.fit_backprop(model, (x, y), epochs=20, batch_size=12, lr=1e-2)
    assert run.history[-1].loss < 0.5 * run.history[0].loss


def test_a_layer_learns_what_happened_long_ago():
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (256,), generator=g)
    x = 0.05 * torch.randn(256, 150, 1, generator=g)
    x[:, 3, 0] += 2.0 * y - 1  # the class is told in the fourth of 150 steps
    slow = {"loss_at": "last", "r_min": 0.98}
    model = seeded(lambda: nn.Sequential(Recurrent.diagonal(1, 16, **slow), nn.Linear(16, 2)))
    tpsgd.fit(model, (x, y), epochs=40, batch_size=32, lr=1e-2)
    assert tpsgd.evaluate(model, (x, y)) > 0.95


# ---- memory --------------------------------------------------------------------------------------


def test_the_whole_sequence_is_one_window_while_that_takes_less_than_traces():
    few, many = Recurrent.diagonal(1, 64), Recurrent.diagonal(64, 64)
    assert steps_without_traces(few, None) == WINDOW
    assert steps_without_traces(many, None) > WINDOW
    assert steps_without_traces(many, 5) == 5


def pixels(at, layers, units=16):
    each = (
        Recurrent.diagonal(1 if i == 0 else units, units, loss_at=at, sequence=i < layers - 1)
        for i in range(layers)
    )
    return nn.Sequential(*each, nn.Linear(units, CLASSES))


def test_a_step_is_recorded_as_a_tape(monkeypatch):
    from tpsgd.engine.fast import replay

    tapes = []
    tape = replay.Tape
    monkeypatch.setattr(replay, "Tape", lambda *a: tapes.append(tape(*a)) or tapes[-1])
    x, y = torch.rand(320, 20, 1), torch.arange(320) % CLASSES
    model = pixels("mean", 2)
    tpsgd.fit(model, (x, y), batch_size=8, epochs=1, order=tpsgd.simultaneous)
    assert len(tapes) == 1
    assert all(p.isfinite().all() for p in model.parameters())


def test_tokens_and_a_loss_that_autograd_differentiates():
    model = nn.Sequential(Recurrent.diagonal(6, 5, loss_at="every"), nn.Linear(5, 3))
    data = torch.randint(6, (16, 9)), torch.arange(16) % 3
    run = tpsgd.fit(model, data, rule=rules.predsim(), epochs=1)
    assert run.loss is not None and run.loss < 10


@pytest.mark.parametrize("at", ["last", "every"])
def test_a_loss_whose_derivative_is_expanded(at):
    def objective(site):
        return Objective(lambda y, s: (y.sum(1) - s.float()).abs().mean())

    model = nn.Sequential(Recurrent.diagonal(4, 5, loss_at=at), nn.Linear(5, 3))
    x, y = sequences(steps=9)
    run = tpsgd.fit(model, (x.float(), y), rule=rules.Rule("sum", objective), epochs=1)
    assert run.loss is not None


def test_a_parametrised_layer_computes():
    made, x = Recurrent.diagonal(4, 5), torch.randn(2, 7, 4)
    before = made(x)
    nn.utils.parametrize.register_parametrization(made, "weight_b", nn.Identity())
    assert torch.equal(made(x), before)


def test_the_state_that_read_returns_holds_no_other_states():
    _, state_after = Recurrent.diagonal(4, 5).read(torch.randn(2, 40, 4))
    assert state_after.untyped_storage().nbytes() == state_after.nbytes


@pytest.mark.parametrize("at", ["last", "mean", "every"])
@pytest.mark.parametrize("steps", [5, 80])
def test_a_batch_may_be_one_sample(at, steps):
    x, y = torch.randn(5, steps, 2), torch.arange(5) % 2
    alone = nn.Sequential(Recurrent.diagonal(2, 4, loss_at=at), nn.Linear(4, 2))
    together = copy.deepcopy(alone)
    sgd = partial(torch.optim.SGD, lr=0.01)
    settings = {"epochs": 1, "batch_size": 5, "optimizer": sgd, "rule": rules.readout(scale=1.0)}
    tpsgd.fit(alone, (x, y), memory=tpsgd.Memory(micro_batch=1), **settings)
    tpsgd.fit(together, (x, y), **settings)
    for a, b in zip(alone.parameters(), together.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
