"""Learning over time: the paper's equations, autograd step by step, the parts, and chunks.

The paper's update of a recurrent cell, written out here number by number:

    D_t = sign(Y* B_t - H_{t+1}) * H_{t+1} * (1 - H_{t+1})                (tpSGD l1)
    grad W_H = sum_t H_t^T D_t,   grad W_X = sum_t X_t^T D_t,   grad b = sum_t D_t

Ours is the mean over samples and time, and a weight is stored as (units, inputs).
"""

import copy
from dataclasses import replace
from itertools import product
from math import exp

import pytest
import torch
from helpers import LOCAL, LOCKED, close, ragged, same, seeded, sequences, state, tokens
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Padded, Place, Recurrent, projections, rules
from tpsgd.maths.random import Key
from tpsgd.nets import inits
from tpsgd.nets.unrolled import UnrolledBatch
from tpsgd.objectives import Site

pytestmark = pytest.mark.usefixtures("unwatched")

CLASSES, HIDDEN = 3, 5
SGD = {"optimizer": torch.optim.SGD, "lr": 0.5}
RECOMPUTED = tpsgd.Memory(reuse=False)
ORDERS = {"sequential": tpsgd.sequential, "simultaneous": tpsgd.simultaneous}
ANY = {**LOCAL, "tpsgd_smooth_l1": lambda **k: rules.tpsgd(F.smooth_l1_loss, **k)}


def net(*layers, units=HIDDEN, seed=0):
    """Recurrent layers, given by functions, and a linear classifier, in float64."""
    return seeded(
        lambda: nn.Sequential(*(make() for make in layers), nn.Linear(units, CLASSES)).double(),
        seed,
    )


def cell(inputs=4, hidden=HIDDEN, **options):
    return lambda: Recurrent(inputs, hidden, **options)


def wide(layer):
    """A paper's cell with weights that matter."""
    return lambda: layer(init=inits.scaled_uniform(1.0, 0.5))


def fitted(model, data, **settings):
    """A copy of a model, trained on all samples at once, so that their order does not matter."""
    model = copy.deepcopy(model)
    tpsgd.fit(model, data, **({"epochs": 1, "batch_size": 1000} | SGD | settings))
    return model


# ---- the paper's equations -----------------------------------------------------------------------


def sigmoid(z):
    return 1 / (1 + exp(-z))


def d_l1(target, h):
    return float(target > h) - float(target < h)


D = {
    "l1": (rules.tpsgd_l1, projections.binary, d_l1),
    "l2": (rules.tpsgd_l2, projections.normal, lambda target, h: target - h),
    "drtp": (rules.drtp, projections.orthogonal, lambda target, h: target),
}


def naive(layer, way, x, y, d, codes):
    """The sums of the paper, with loops over samples, time and units; divided at the end."""
    W_X, W_H, b_X, b_H = (getattr(layer.cells[way], k).tolist() for k in NAMES)
    units, features, steps = range(len(W_H)), range(len(W_X[0])), x.shape[1]
    sums = {k: p.detach().numpy() * 0.0 for k, p in layer.cells[way].named_parameters()}
    for sample, label in zip(x.tolist(), y.tolist(), strict=True):
        H = [0.0] * len(W_H)
        for t in reversed(range(steps)) if way else range(steps):
            X, target = sample[t], codes[t][label].tolist()
            new = [
                sigmoid(
                    sum(H[j] * W_H[i][j] for j in units)
                    + b_H[i]
                    + sum(X[j] * W_X[i][j] for j in features)
                    + b_X[i]
                )
                for i in units
            ]
            for i in units:
                delta = d(target[i], new[i]) * new[i] * (1 - new[i]) / (len(x) * steps)
                for j in units:
                    sums["weight_h"][i, j] += delta * H[j]
                for j in features:
                    sums["weight_x"][i, j] += delta * X[j]
                sums["bias_x"][i] += delta
                sums["bias_h"][i] += delta
            H = new
    return {k: torch.from_numpy(v) for k, v in sums.items()}


NAMES = ("weight_x", "weight_h", "bias_x", "bias_h")


@pytest.mark.parametrize(("both_ways", "order"), [(False, "sequential"), (True, "simultaneous")])
@pytest.mark.parametrize("name", D)
def test_one_step_is_the_papers_sum_written_out(name, both_ways, order):
    make, projection, d = D[name]
    x, y = sequences(n=6, steps=4)
    layer = wide(lambda init: Recurrent.paper(4, HIDDEN, init=init, bidirectional=both_ways))
    model = net(layer, units=HIDDEN * (1 + both_ways))
    for p in model[0].parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    after = fitted(model, (x, y), rule=make(), seed=7, order=ORDERS[order])
    for way in range(1 + both_ways):
        codes = [projection()((HIDDEN,), CLASSES, Key(7, -1 if way else 0, t)) for t in range(4)]
        step = naive(model[0], way, x, y, d, codes)
        old, new = state(model[0].cells[way]), state(after[0].cells[way])
        close(new, {k: old[k] + SGD["lr"] * step[k] for k in NAMES})


def test_the_codes_change_from_step_to_step_and_are_those_of_the_paper():
    drawn = []

    def rows(key, classes, shape, device):
        drawn.append(key)
        return projections.normal().rows(key, classes, shape, device)

    spy = projections.Projection("spy", rows)
    model, (x, y) = net(cell(bidirectional=True), units=2 * HIDDEN), sequences(steps=3)
    fitted(model, (x, y), rule=rules.tpsgd_l2(spy), seed=4)
    assert set(drawn) == {Key(4, block, step) for block in (0, -1) for step in range(3)}
    drawn.clear()
    fitted(model, (x, y), rule=rules.readout(projection=spy), seed=4)
    assert set(drawn) == {Key(4, 0, 0), Key(4, -1, 0)}


# ---- autograd, one step at a time ----------------------------------------------------------------


def first_learner(model, data, **settings):
    """The first block with its objective drawn, and all samples as one batch."""
    kept = []
    settings |= {"optimizer": tpsgd.sgd, "lr": 0.1}
    tpsgd.fit(model, data, order=kept.append, batch_size=1000, **settings)
    learner = kept[0].learners[0]
    learner.start()
    return learner, *next(kept[0].source.batches()).load()


def by_autograd(layer, x, y, rule, seed=0):
    """Loss, gradients and the codes' gradients: autograd inside a step, states cut off."""
    data, lengths = (x.data, x.lengths) if isinstance(x, Padded) else (x, None)
    if not data.is_floating_point():
        data = F.one_hot(data, layer.inputs).double()
    steps = data.shape[1]
    lengths = torch.full((len(data),), steps) if lengths is None else lengths
    total, grads, dcodes = 0.0, {}, []
    for way, one in enumerate(layer.cells):
        W = {k: p.detach().clone().requires_grad_() for k, p in one.named_parameters()}
        site = Site((layer.hidden,), CLASSES, Key(), dtype=torch.float64, recurrent=True)
        codes, value = {}, 0.0
        h = torch.zeros(len(data), layer.hidden, dtype=torch.float64)
        for t in reversed(range(steps)) if way else range(steps):
            step = t if rule.per_step else 0
            if step not in codes:
                key = Key(seed, -1 if way else 0, step)
                codes[step] = rule.objective(replace(site, key=key))
                for P in codes[step].learned_tensors:
                    P.requires_grad_()
            alive = lengths > t
            if not alive.any():
                continue
            z = data[:, t] @ W["weight_x"].T + h @ W["weight_h"].T
            z = z + W["bias_x"] + W["bias_h"] if "bias_x" in W else z
            new = (1 - layer.leak) * h + layer.leak * layer.activation(z)
            seen = (z if rule.at is Place.BEFORE else new)[alive]
            value = value + codes[step].loss(seen, y[alive], *codes[step].tensors) * alive.sum()
            h = torch.where(alive[:, None], new, h).detach()
        value = value / lengths.sum()
        P = [P for o in codes.values() for P in o.learned_tensors]
        found = torch.autograd.grad(value, [*W.values(), *P])
        grads |= {f"0.cells.{way}.{k}": g for k, g in zip(W, found, strict=False)}
        dcodes += found[len(W) :]
        total += float(value.detach())
    return total, grads, dcodes


CELLS = {
    "tanh": {"leak": 1.0},
    "leaky tanh": {"leak": 0.3},
    "leaky sigmoid": {"leak": 0.6, "activation": nn.Sigmoid},
    "relu": {"leak": 1.0, "activation": nn.ReLU},
    "leaky relu": {"leak": 0.5, "activation": nn.ReLU},
    "gelu": {"leak": 1.0, "activation": nn.GELU},
    "leaky gelu": {"leak": 0.4, "activation": nn.GELU},
}
SOME = ("leaky tanh", "leaky gelu")  # a derivative from the output, and one from the input
INPUTS = {
    "floats": (lambda: sequences(n=6, steps=4), 4),
    "tokens": (lambda: tokens(n=6, steps=4), 7),
    "ragged floats": (lambda: (ragged(sequences(n=6, steps=4)[0]), sequences(n=6)[1]), 4),
    "ragged tokens": (lambda: (ragged(tokens(n=6, steps=4)[0]), tokens(n=6)[1]), 7),
}


@pytest.mark.parametrize(
    ("how", "kind"),
    [(how, kind) for how in CELLS for kind in INPUTS if kind == "floats" or how in SOME],
)
def test_gradients_are_autograds_on_one_step_with_the_states_cut_off(how, kind):
    data, inputs = INPUTS[kind]
    model = net(cell(inputs, bidirectional=True, **CELLS[how]), units=2 * HIDDEN)
    for p in model[0].parameters():
        nn.init.normal_(p, std=0.7, generator=torch.Generator().manual_seed(1))
    for (name, make), at in product(ANY.items(), (Place.BEFORE, Place.AFTER)):
        rule = make(at=at)
        learner, x, y = first_learner(model, data(), rule=rule, window=len(name) % 3 + 1)
        with torch.no_grad():
            saved = learner.forward(x)
            local, (grads,) = learner.gradient.gradients(learner.params, saved, y, learner.tensors)
        loss, wanted, dcodes = by_autograd(model[0], *data(), rule)
        wanted |= dict(enumerate(dcodes))
        grads |= dict(enumerate(local.dtensors))
        assert grads.keys() == wanted.keys()
        learned = [k for k in learner.params if k.startswith("objective.")]
        assert learned == [f"objective.{i}" for i in range(len(dcodes))]
        for k, g in wanted.items():
            far = (grads[k] - g).abs().max()
            assert far <= 1e-12 * max(1.0, float(g.abs().max())), (name, at, k)
        assert float(local.loss) == pytest.approx(loss), (name, at)


def test_a_cell_without_biases_has_no_gradients_for_them():
    model = net(lambda: nn.RNN(4, HIDDEN, batch_first=True, bias=False))
    x, y = sequences()
    for make in ANY.values():
        learner, x, y = first_learner(model, (x, y), rule=make())
        with torch.no_grad():
            saved = learner.forward(x)
            _, (grads,) = learner.gradient.gradients(learner.params, saved, y, learner.tensors)
        close(grads, by_autograd(learner.block.layer, x, y, make())[1])


def test_learned_codes_follow_their_gradient():
    """Two steps: in the second, the codes have moved."""
    rule, model, (x, y) = rules.readout(learned=True), net(cell()), sequences()
    learner, batch, labels = first_learner(model, (x, y), rule=rule)
    first = learner.tensors[0].detach().clone()
    dcodes = by_autograd(model[0], x, y, rule)[2][0]
    with torch.no_grad():
        learner.update(learner.forward(batch), labels, labels)
    torch.testing.assert_close(learner.tensors[0].detach(), first - 0.1 * dcodes)


@pytest.mark.cover(1)
@pytest.mark.parametrize("loss", [tpsgd.bce, tpsgd.cross_entropy], ids=lambda x: x.name)
@pytest.mark.parametrize("name", LOCAL)
def test_rows_of_labels_equal_their_indices(name, loss):
    x, y = sequences()
    settings = {"rule": LOCAL[name](), "loss": loss, "epochs": 2}
    for window in (1, 3):
        index = fitted(net(cell()), (x, y), window=window, **settings)
        rows = fitted(net(cell()), (x, F.one_hot(y, 3).double()), window=window, **settings)
        close(state(index), state(rows))


# ---- the whole is its parts ----------------------------------------------------------------------


def moved(projection, where):
    """A projection whose keys are mapped first."""
    return projections.Projection(
        projection.name, lambda key, *rest: projection.rows(where(key), *rest), projection.std
    )


def up(key):
    """The key of the same cell, one block higher."""
    return replace(key, block=key.block + 1 if key.block >= 0 else key.block - 1)


@pytest.mark.cover(2)
@pytest.mark.parametrize("second", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("name", LOCAL)
def test_a_second_layer_in_the_stack_learns_as_on_the_first_ones_sequences(name, reuse, second):
    x, y = sequences()
    upper = cell(HIDDEN, 6, bidirectional=second)
    stack = net(cell(sequence=True), upper, units=6 * (1 + second))
    settings, codes = {"epochs": 3, "memory": tpsgd.Memory(reuse=reuse)}, projections.normal()
    whole = fitted(stack, (x, y), rule=LOCAL[name](projection=codes), **settings)
    alone = fitted(net(cell()), (x, y), rule=LOCAL[name](projection=codes), **settings)
    close(state(whole[0]), state(alone[0]))
    higher = LOCAL[name](projection=moved(codes, up))
    with torch.no_grad():
        states = whole[0](x)
    close(state(whole[1:]), state(fitted(stack[1:], (states, y), rule=higher, **settings)))


@pytest.mark.parametrize("first", [False, True], ids=["one way", "both ways"])
@pytest.mark.parametrize("name", LOCAL)
def test_simultaneous_updates_of_a_stack_are_those_of_its_parts_on_the_old_states(name, first):
    x, y = sequences()
    lower = cell(sequence=True, bidirectional=first)
    stack = net(lower, cell(HIDDEN * (1 + first), 6), units=6)
    codes = projections.normal()
    settings = {"rule": LOCAL[name](projection=codes), "order": tpsgd.simultaneous}
    whole = fitted(stack, (x, y), **settings)
    with torch.no_grad():
        states = stack[0](x)
    settings["rule"] = LOCAL[name](projection=moved(codes, up))
    close(state(whole[1:]), state(fitted(stack[1:], (states, y), **settings)))
    below = nn.Sequential(copy.deepcopy(stack[0]), nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    below(x)
    settings["rule"] = LOCAL[name](projection=codes)
    close(state(whole[0]), state(fitted(below, (x, y), **settings)[0]))


def test_three_layers_in_lockstep_equal_three_with_something_between_them():
    """A module between two layers makes them keep all states instead of pulling them."""
    x, y = sequences()

    def made(*between):
        parts = (cell(sequence=True), cell(HIDDEN, 6, sequence=True), cell(6, HIDDEN))
        return net(parts[0], *between, parts[1], *between, parts[2])

    for order, name in product(ORDERS.values(), ("tpsgd", "readout")):
        settings = {"rule": LOCAL[name](), "order": order, "epochs": 2, "memory": RECOMPUTED}
        pulled = fitted(made(), (x, y), window=2, **settings)
        kept = fitted(made(lambda: nn.Dropout(0.0)), (x, y), **settings)
        for p, q in zip(pulled.parameters(), kept.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", LOCAL)
def test_both_ways_is_one_cell_and_one_on_the_reversed_sequence(name):
    x, y = sequences()
    steps, codes = x.shape[1], projections.normal()
    model = net(cell(bidirectional=True, leak=0.5), units=2 * HIDDEN)

    def mirrored(key):
        step = steps - 1 - key.step if LOCAL[name]().per_step else 0
        return Key(key.seed, -1, step)

    whole = fitted(model, (x, y), rule=LOCAL[name](projection=codes), epochs=3)
    ends = []
    for way, (data, projection) in enumerate([(x, codes), (x.flip(1), moved(codes, mirrored))]):
        part = net(cell(leak=0.5))
        part[0].cells[0].load_state_dict(model[0].cells[way].state_dict())
        part = fitted(part, (data, y), rule=LOCAL[name](projection=projection), epochs=3)
        close(state(whole[0].cells[way]), state(part[0].cells[0]))
        ends.append(part[0](data))
    torch.testing.assert_close(whole[0](x), torch.cat(ends, 1))


def test_a_rule_for_each_layer():
    x, y = sequences()
    stack = net(cell(sequence=True), cell(HIDDEN, 6), units=6)
    mixed = [rules.tpsgd_l1(), rules.readout(), rules.frozen()]
    run = tpsgd.fit(stack, (x, y), rule=mixed, epochs=1)
    assert [b.rule for b in run.blocks] == ["tpsgd-l1", "readout", "head"]
    assert [b.learning for b in run.blocks] == ["closed form", "closed form", "solved"]


# ---- chunks --------------------------------------------------------------------------------------

TALL = {
    "one layer": ([cell()], HIDDEN, lambda: sequences(n=6, steps=8)),
    "both ways": ([cell(bidirectional=True)], 2 * HIDDEN, lambda: sequences(n=6, steps=8)),
    "two layers": ([cell(sequence=True), cell(HIDDEN)], HIDDEN, lambda: sequences(n=6, steps=8)),
    "both ways twice": (
        [cell(sequence=True, bidirectional=True), cell(2 * HIDDEN, bidirectional=True)],
        2 * HIDDEN,
        lambda: sequences(n=6, steps=8),
    ),
    "tokens": ([cell(7)], HIDDEN, lambda: tokens(n=6, steps=8)),
    "ragged": ([cell()], HIDDEN, lambda: (ragged(sequences(n=6, steps=8)[0]), sequences(n=6)[1])),
    "ragged tokens, two layers": (
        [cell(7, sequence=True), cell(HIDDEN)],
        HIDDEN,
        lambda: (ragged(tokens(n=6, steps=8)[0]), tokens(n=6)[1]),
    ),
    "ragged, both ways": (
        [cell(bidirectional=True)],
        2 * HIDDEN,
        lambda: (ragged(sequences(n=6, steps=8)[0]), sequences(n=6)[1]),
    ),
    "gelu": ([cell(activation=nn.GELU)], HIDDEN, lambda: sequences(n=6, steps=8)),
}


CHUNKED = [
    (name, kind, order)
    for name, kind, order in product(LOCAL, TALL, ORDERS)
    if (order == "sequential" or len(TALL[kind][0]) > 1)
    and (kind == "two layers" or name in ("tpsgd_l1", "readout_learned"))
]


@pytest.mark.cover(2)
@pytest.mark.parametrize(("name", "kind", "order"), CHUNKED)
def test_chunked_is_whole(name, kind, order):
    layers, units, data = TALL[kind]
    settings = {"rule": LOCAL[name](), "order": ORDERS[order], "batch_size": 4}
    whole = fitted(net(*layers, units=units), data(), memory=RECOMPUTED, **settings)
    assert not same(state(whole), state(net(*layers, units=units)))
    for window in (1, 3, 7, 100) if len(layers) > 1 else (1, 3):
        chunked = fitted(
            net(*layers, units=units), data(), window=window, memory=RECOMPUTED, **settings
        )
        close(state(chunked), state(whole), rtol=0, atol=1e-10)


def test_windows_do_not_change_the_record():
    x, y = sequences(steps=8)
    runs = [
        tpsgd.fit(net(cell()), (x, y), rule=LOCAL[name](), window=w, validation=(x, y), epochs=2)
        for name in LOCAL
        for w in (None, 3)
    ]
    for whole, chunked in zip(runs[::2], runs[1::2], strict=True):
        for a, b in zip(whole.history, chunked.history, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=1e-6)
            assert a.val_loss == pytest.approx(b.val_loss, rel=1e-6)
            assert (a.accuracy, a.val_accuracy) == (b.accuracy, b.val_accuracy)
        assert chunked.settings["window"] == 3


@pytest.mark.parametrize("kind", ["one feature", "bytes"])
def test_chunks_of_other_numbers(kind):
    """One feature without its dimension, and whole numbers that are not tokens."""
    x, y = sequences(steps=8)
    data = x[..., 0] if kind == "one feature" else (50 * x).to(torch.uint8)
    inputs = 1 if kind == "one feature" else 4
    whole, chunked = (fitted(net(cell(inputs)), (data, y), window=w) for w in (None, 3))
    close(state(chunked), state(whole))
    by_hand = data[..., None] if kind == "one feature" else data.double() / 255
    close(state(fitted(net(cell(inputs)), (by_hand, y))), state(whole))


def test_chunks_of_one_feature_in_whole_numbers():
    x, y = tokens(steps=8)
    whole, chunked = (fitted(net(cell(1)), (x, y), window=w) for w in (None, 3))
    close(state(chunked), state(whole))


# ---- groups of parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCAL)
def test_each_group_alone_takes_its_part_of_the_joint_step(name):
    x, y = sequences()
    model = net(cell())
    joint = state(fitted(model, (x, y), rule=LOCAL[name]()))
    groups = {"x": ("weight_x", "bias_x"), "h": ("weight_h", "bias_h")}
    for frozen, names in groups.items():
        part = copy.deepcopy(model)
        for k in names:
            getattr(part[0].cells[0], k).requires_grad_(False)
        after = state(fitted(part, (x, y), rule=LOCAL[name]()))
        for k in NAMES:
            wanted = state(model) if k in names else joint
            key = f"0.cells.0.{k}"
            torch.testing.assert_close(after[key], wanted[key], msg=lambda m, k=k: f"{k}: {m}")
            assert k in names or not torch.equal(after[key], state(model)[key]), (frozen, k)


# ---- what the block hands on, and what it says ---------------------------------------------------


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("both_ways", [False, True])
def test_the_unrolled_forward_is_the_modules_own(kind, sequence, both_ways):
    data, inputs = INPUTS[kind]
    units, steps = HIDDEN * (1 + both_ways), 4
    layer = cell(inputs, bidirectional=both_ways, sequence=sequence)
    tail = [nn.Flatten] if sequence and "ragged" not in kind else []
    if sequence and not tail:
        layers, units = [layer, cell(units)], HIDDEN
    else:
        layers, units = [layer, *tail], units * steps if sequence else units
    model = net(*layers, units=units)
    learner, x, _ = first_learner(model, data())
    learner.stop()
    with torch.no_grad():
        found, wanted = learner.output(learner.forward(x)), model[0](x)
        wanted = wanted.flatten(1) if tail else wanted
    if isinstance(found, UnrolledBatch):
        pieces = torch.cat([w.values[:, :1].clone() for w in found.windows()])
        found, wanted = pieces[:, 0], wanted.data[0]  # the longest: others are cut on the way
    elif isinstance(found, Padded):
        assert torch.equal(found.lengths, wanted.lengths)
        alive = torch.arange(steps) < found.lengths[:, None]
        found, wanted = found.data[alive], wanted.data[alive]
    torch.testing.assert_close(found, wanted)


def test_readout_reports_how_often_the_last_step_is_right():
    x, y = sequences(n=60)
    model = net(cell(hidden=20, leak=0.5, init=inits.reservoir(x=1.0)), units=20)
    seen, rule = [], rules.readout(scale=4.0)
    tpsgd.fit(model, (x, y), rule=rule, epochs=30, lr=0.02, callbacks=[seen.append])
    first = [e for e in seen if e.block == 1]
    assert first[-1].accuracy > 0.9 > 0.6 > first[-1].loss
    P = projections.normal()((20,), CLASSES, Key(0, 0, 0)).double()
    hits = ((model[0](x) @ P.T).argmax(1) == y).double().mean()
    assert first[-1].accuracy == pytest.approx(float(hits), abs=0.05)


def test_the_same_code_at_each_step_is_a_property_of_the_rule():
    assert rules.tpsgd_l1().per_step and rules.tpsgd_l2().per_step and rules.drtp().per_step
    assert not rules.readout().per_step and not rules.readout(learned=True).per_step
    x, y = sequences()
    once = replace(rules.tpsgd_l2(), per_step=False)
    loss, wanted, _ = by_autograd(net(cell())[0], x, y, once)
    learner, x, y = first_learner(net(cell()), (x, y), rule=once)
    with torch.no_grad():
        saved = learner.forward(x)
        local, (grads,) = learner.gradient.gradients(learner.params, saved, y, learner.tensors)
    close(grads, wanted)
    assert float(local.loss) == pytest.approx(loss)


@pytest.mark.parametrize("name", LOCKED)
def test_dfa_projects_the_error_at_every_step(name):
    x, y = sequences()
    model = net(cell(sequence=True), cell(HIDDEN, 6), units=6)
    after = fitted(model, (x, y), rule=LOCKED[name](), order=tpsgd.simultaneous)
    with torch.no_grad():
        states = model[0](x)
        error = F.one_hot(y, 3).double() - model(x).softmax(1)
    error = error.sign() if name == "sdfa" else error
    for i, data in enumerate((x, states)):
        layer, total = model[i], 0.0
        W = {k: p.detach().clone().requires_grad_() for k, p in layer.cells[0].named_parameters()}
        h = torch.zeros(len(x), layer.hidden, dtype=torch.float64)
        for t in range(x.shape[1]):
            P = projections.normal()((layer.hidden,), CLASSES, Key(0, i, t)).double()
            z = data[:, t] @ W["weight_x"].T + h @ W["weight_h"].T + W["bias_x"] + W["bias_h"]
            new = (1 - layer.leak) * h + layer.leak * torch.tanh(z)
            total = total - (new * (error @ P)).sum() / (len(x) * x.shape[1])
            h = new.detach()
        grads = dict(zip(W, torch.autograd.grad(total, list(W.values())), strict=True))
        wanted = {k: W[k].detach() - SGD["lr"] * grads[k] for k in W}
        close(state(after[i].cells[0]), wanted)


@pytest.mark.full
@pytest.mark.real_data("mnist")
def test_readout_beats_its_frozen_control_on_rows_of_mnist():
    data = tpsgd.data.load("mnist", max_train=12_000)
    (x, y), (test_x, test_y) = data.train, data.test
    rows, test = (x.view(-1, 28, 28), y), (test_x[:2000].view(-1, 28, 28), test_y[:2000])
    accuracy = {}
    for rule in (rules.readout(), rules.frozen()):
        model = seeded(lambda: nn.Sequential(Recurrent(28, 64), nn.Linear(64, 10)))
        tpsgd.fit(model, rows, rule=rule, epochs=2, batch_size=32, lr=3e-3, window=28)
        accuracy[rule.name] = tpsgd.evaluate(model, test)
    assert accuracy["readout"] > accuracy["frozen"] + 0.1


@pytest.mark.parametrize("between", [nn.LayerNorm(6), nn.PReLU()])
def test_what_rides_with_a_recurrent_block_does_not_learn_and_is_not_counted(between):
    layers = cell(hidden=6, sequence=True)(), between, cell(6, hidden=6)()
    model = nn.Sequential(*layers, nn.Linear(6, CLASSES)).double()
    before = {k: p.clone() for k, p in between.state_dict().items()}
    run = tpsgd.fit(model, sequences(), epochs=1, lr=0.1)
    assert all(torch.equal(p, before[k]) for k, p in between.state_dict().items())
    assert run.blocks[1].parameters == sum(p.numel() for p in model[2].parameters())
    learned = {id(p) for block in tpsgd.split(model) for p in block.named_parameters().values()}
    assert learned == {id(p) for m in (model[0], model[2], model[3]) for p in m.parameters()}


def test_whole_numbers_are_tokens_only_for_a_layer_that_meets_them():
    x = torch.randint(0, 255, (20, 12), dtype=torch.uint8)
    model = nn.Sequential(nn.Unflatten(1, (3, 4)), nn.RNN(4, 5, batch_first=True), nn.Linear(5, 2))
    tpsgd.fit(model, (x, torch.arange(20) % 2), epochs=1)
    tpsgd.evaluate(model, (x, torch.arange(20) % 2))
