"""What each rule of the family hands to its blocks, against the published equations."""

from dataclasses import replace

import pytest
import torch
from helpers import images, mlp, points, seeded
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import rules
from tpsgd.maths.noise import below, normal
from tpsgd.objectives import NetSignal

family = pytest.importorskip("tpsgd_family")

EXACT = {"rtol": 1e-9, "atol": 1e-12}


class Seen(NetSignal):
    """A signal that keeps what it was called with, and what it gave."""

    def __init__(self, signal):
        self.signal, self.about, self.needs_output = signal, signal.about, signal.needs_output
        self.first = None

    def __call__(self, learners, x, labels):
        given = list(self.signal(learners, x, labels))
        if self.first is None:
            noises = [learner.noise.clone() for learner in learners]
            tensors = [learner.tensors for learner in learners]
            self.first = x.clone(), labels.clone(), given, noises, tensors
        return given


def step(model, data, rule, lr=1.0):
    """One step of SGD on one batch: the gradients by name, and what the signal saw and gave."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    seen = Seen(rule.signal) if isinstance(rule.signal, NetSignal) else None
    watched = rule if seen is None else replace(rule, signal=seen)
    settings = {"optimizer": torch.optim.SGD, "lr": lr, "epochs": 1, "batch_size": len(data[1])}
    tpsgd.fit(model, data, rule=watched, order=tpsgd.simultaneous, progress=False, **settings)
    after = dict(model.named_parameters())
    grads = {name: (p - after[name].detach()) / lr for name, p in before.items()}
    return before, grads, seen and seen.first


def samples(n=24):
    x, y = points(n=n)
    return x.double(), y


def net(*widths, activation=nn.Tanh):
    return mlp(*widths, activation=activation).double()


def hand(x, before, act=torch.tanh):
    """Inputs h_0 .. and values z_1 .. of a perceptron, layer by layer."""
    h, z = [x], []
    for i in range(0, 2 * (len(before) // 2), 2):
        z.append(h[-1] @ before[f"{i}.weight"].T + before[f"{i}.bias"])
        h.append(act(z[-1]))
    return h, z


def residual(logits, y):
    """Softmax minus the label, over the number of samples."""
    return (logits.softmax(1) - F.one_hot(y, logits.shape[1])) / len(y)


def sent_back(x, y, before, matrices):
    """The gradients of all layers of a tanh perceptron, with these matrices on the way back."""
    h, z = hand(x, before)
    d, grads = residual(z[-1], y), {}
    for i in range(len(z) - 1, -1, -1):
        grads |= {f"{2 * i}.weight": d.T @ h[i], f"{2 * i}.bias": d.sum(0)}
        if i:
            d = (d @ matrices[i - 1]) * (1 - h[i] ** 2)
    return grads


def agree(grads, expected, names=None, **tolerance):
    for name in names or expected:
        torch.testing.assert_close(grads[name], expected[name], **(tolerance or EXACT))


def test_feedback_alignment_is_backprop_with_other_matrices():
    x, y = samples()
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), family.feedback_alignment())
    matrices = [tensors[0] for tensors in seen[4][:-1]]
    assert [tuple(m.shape) for m in matrices] == [(5, 7), (3, 5)]
    agree(grads, sent_back(x, y, before, matrices))


@pytest.mark.parametrize("uniform", [False, True])
def test_sign_symmetry_has_the_signs_of_the_weights(uniform):
    x, y = samples()
    rule = family.sign_symmetry(uniform)
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), rule)
    weights = [before["2.weight"], before["4.weight"]]
    if uniform:
        matrices = [w.sign() / (3 * w.shape[1]) ** 0.5 for w in weights]
    else:
        matrices = [t[0] * w.sign() for t, w in zip(seen[4][:-1], weights, strict=True)]
        assert all((t[0] >= 0).all() for t in seen[4][:-1])
    agree(grads, sent_back(x, y, before, matrices))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 2), nn.Tanh(), nn.Flatten(), nn.Linear(20, 6), nn.GELU(), nn.Linear(6, 3),
    )  # fmt: skip


def test_feedback_through_the_weights_themselves_is_backprop():
    x, y = images(n=16)
    model, data = seeded(convolutional).double(), (x.double(), y)
    weights = {1: model[4].weight, 2: model[7].weight, 3: model[9].weight}
    own = {number: [w.detach().clone()] for number, w in weights.items()}
    F.cross_entropy(model(data[0]), y).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model = seeded(convolutional).double()
    rule = rules.with_tensors(family.feedback_alignment(), own)
    _, grads, _ = step(model, data, rule)
    agree(grads, expected, rtol=1e-7, atol=1e-10)
    twice, once = seeded(convolutional).double(), seeded(convolutional).double()
    tpsgd.fit(twice, data, rule=rule, epochs=1, batch_size=16, optimizer=torch.optim.SGD, lr=0.0)
    once.train()(data[0])  # the second pass does not count in the statistics of batch norm
    torch.testing.assert_close(twice[1].running_mean, once[1].running_mean, **EXACT)


def test_pepita_takes_the_steps_of_the_published_program():
    x, y = samples()
    model = net(6, 7, 5, 3, activation=nn.ReLU)
    before, grads, seen = step(model, (x, y), family.pepita(scale=0.5))
    (projection,) = seen[4][0]  # (classes, inputs): F transposed
    assert projection.abs().max() <= 0.5 * (6 / 6) ** 0.5
    expected = {name: torch.zeros_like(p) for name, p in before.items()}
    for sample, label in zip(x, y, strict=True):  # one sample at a time, as the authors' program

        def passes(v):
            outputs = [v]
            for i in (0, 2, 4):
                a = before[f"{i}.weight"] @ outputs[-1] + before[f"{i}.bias"]
                outputs.append(a.softmax(0) if i == 4 else a.clamp(min=0))
            return outputs

        first = passes(sample)
        target = F.one_hot(label, 3)
        second = passes(sample + projection.T @ (first[-1] - target))
        deltas = [first[1] - second[1], first[2] - second[2], second[3] - target]
        for i, delta in zip((0, 2, 4), deltas, strict=True):
            expected[f"{i}.weight"] += torch.outer(delta, second[i // 2]) / len(x)
            expected[f"{i}.bias"] += delta / len(x)
    agree(grads, expected)


def good_net():
    norms = [nn.RMSNorm(n, elementwise_affine=False) for n in (12, 7, 5)]
    return seeded(lambda: nn.Sequential(
        norms[0], nn.Linear(12, 7), nn.ReLU(), norms[1], nn.Linear(7, 5), nn.ReLU(), norms[2],
        nn.Linear(5, 3),
    )).double()  # fmt: skip


def test_forward_forward_lowers_hintons_loss_in_every_block():
    x, y = points(n=24, features=12)
    x, model = x.double(), good_net()
    rule = family.forward_forward(threshold=0.7, strength=2.0)
    before, grads, seen = step(model, (x, y), rule)
    x, y, _, noises, _ = seen  # in the order of the batch
    wrong = (y + 1 + below(noises[0], y.shape, 2)) % 3
    assert (wrong != y).all() and (wrong < 3).all() and len(set(wrong.tolist())) == 3
    weights = {name: p.clone().requires_grad_() for name, p in before.items()}
    total = 0.0
    passed = []
    for labels in (y, wrong):
        first = torch.cat([2.0 * F.one_hot(labels, 3), x[:, 3:]], 1)
        h1 = F.relu(F.rms_norm(first, (12,)) @ weights["1.weight"].T + weights["1.bias"])
        inputs = F.rms_norm(h1.detach(), (7,))
        h2 = F.relu(inputs @ weights["4.weight"].T + weights["4.bias"])
        passed.append((h1, h2))
    for h, units in ((0, 7), (1, 5)):
        good, bad = ((p[h] ** 2).sum(1) - 0.7 * units for p in passed)
        total = total + (F.softplus(-good).sum() + F.softplus(bad).sum()) / (2 * len(x))
    total.backward()
    agree(grads, {n: weights[n].grad for n in ("1.weight", "1.bias", "4.weight", "4.bias")})
    assert not grads["7.weight"].any()  # the last layer is left alone


def test_forward_forward_predicts_the_class_with_the_most_goodness():
    model, rule = good_net(), family.forward_forward(strength=2.0)
    x, _ = points(n=10, features=12)
    logits = rule.predictor(model)(x.double())
    for c in range(3):
        first = torch.cat([2.0 * F.one_hot(torch.full((10,), c), 3), x.double()[:, 3:]], 1)
        goodness = (model[:6](first) ** 2).sum(1)  # of the second hidden layer alone
        torch.testing.assert_close(logits[:, c], goodness, **EXACT)
    y = logits.argmax(1)
    assert tpsgd.evaluate(model, (x.double(), y), rule=rule) == 1.0


def true_gradients(before, x, y, wanted):
    """Autograd's gradients of the mean cross-entropy of a tanh perceptron, and its z_i."""
    weights = {name: p.clone().requires_grad_() for name, p in before.items()}
    _, z = hand(x, weights)
    return torch.autograd.grad(F.cross_entropy(z[-1], y), wanted(weights, z))


def test_forward_gradients_of_weights_are_a_directional_derivative_times_its_direction():
    x, y = samples()
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), family.forward_gradient())
    true = true_gradients(before, x, y, lambda weights, z: list(weights.values()))
    directions = []
    for block, noise in enumerate(seen[3]):  # the numbers of a block, weight first
        weight, bias = before[f"{2 * block}.weight"], before[f"{2 * block}.bias"]
        numbers = normal(noise, (weight.numel() + bias.numel(),)).double()
        directions += [numbers[: weight.numel()].view(weight.shape), numbers[weight.numel() :]]
    slope = sum((g * v).sum() for g, v in zip(true, directions, strict=True))
    agree(grads, {n: slope * v for n, v in zip(before, directions, strict=True)})


def test_weight_perturbation_is_the_forward_gradient_of_a_small_step():
    x, y = samples()
    small = step(net(6, 7, 5, 3), (x, y), family.weight_perturbation(1e-6))[1]
    exact = step(net(6, 7, 5, 3), (x, y), family.forward_gradient())[1]
    agree(small, exact, rtol=1e-4, atol=1e-6)
    large = step(net(6, 7, 5, 3), (x, y), family.weight_perturbation(0.5))[1]
    assert not torch.allclose(large["0.weight"], exact["0.weight"], rtol=1e-2)


def test_forward_gradients_of_activities_are_those_of_every_sample():
    x, y = samples()
    rule = family.forward_gradient(activations=True)
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), rule)
    x, y, _, noises, _ = seen
    first, second, _ = true_gradients(before, x, y, lambda weights, z: z)
    h, z = hand(x, before)
    v = [normal(noise, y.shape, torch.float64) for noise, y in zip(noises, z[:2], strict=False)]
    slope = (first * v[0]).sum(1) + (second * v[1]).sum(1)
    expected = {}
    for i in range(2):
        d = slope[:, None] * v[i]
        expected |= {f"{2 * i}.weight": d.T @ h[i], f"{2 * i}.bias": d.sum(0)}
    d = residual(z[-1], y)  # the last layer has its true gradient
    agree(grads, expected | {"4.weight": d.T @ h[2], "4.bias": d.sum(0)})


def test_local_forward_gradients_are_right_on_average():
    site = tpsgd.objectives.Site((6,), 3, tpsgd.objectives.Key(2), dtype=torch.float64)
    objective = family.local_forward_gradient(learned=True).objective(site)
    true = rules.readout(learned=True).objective(site)
    y, s = points(n=9, features=6)
    y, codes, total = y.double(), objective.tensors[0], 0
    for draw in range(4000):
        key = torch.tensor([draw, 7])
        local = objective(y, s, codes, key, objective.tensors[2])
        total = total + local.dy / 4000
    exact = true(y, s)
    torch.testing.assert_close(local.loss, exact.loss)
    torch.testing.assert_close(local.dtensors[0], exact.dtensors[0])
    assert (total - exact.dy).norm() < 0.1 * exact.dy.norm() * 6**0.5


def test_difference_target_propagation_has_lees_targets():
    x, y = samples()
    rule = family.target_propagation(step=0.3, noise=0.2)
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), rule)
    x, y, _, noises, _ = seen
    h, z = hand(x, before)
    # V and c have learned from this batch already: draw those from before
    drawn = [
        rule.objective(
            tpsgd.objectives.Site(
                (units,), 3, tpsgd.objectives.Key(0, i), dtype=torch.float64, behind=behind
            )
        ).tensors
        for i, (units, behind) in enumerate([(7, (5, 7)), (5, (3, 5))])
    ]
    target2 = h[2] - 0.3 * (z[-1].softmax(1) - F.one_hot(y, 3)) @ before["4.weight"]
    V, c = drawn[0]
    target1 = h[1] - torch.tanh(h[2] @ V + c) + torch.tanh(target2 @ V + c)
    expected = {}
    for i, target in enumerate((target1, target2)):
        d = (h[i + 1] - target) * (1 - h[i + 1] ** 2) / len(x)
        expected |= {f"{2 * i}.weight": d.T @ h[i], f"{2 * i}.bias": d.sum(0)}
    agree(grads, expected)
    V, c = (t.clone().requires_grad_() for t in drawn[0])
    noisy = h[1] + 0.2 * normal(noises[0], h[1].shape, torch.float64)
    forward = torch.tanh(noisy @ before["2.weight"].T + before["2.bias"])
    (((torch.tanh(forward @ V + c) - noisy) ** 2).sum() / (2 * len(x))).backward()
    learned = seen[4][0]  # after a step of rate 1
    torch.testing.assert_close(drawn[0][0] - learned[0], V.grad, **EXACT)
    torch.testing.assert_close(drawn[0][1] - learned[1], c.grad, **EXACT)


def test_the_hsic_bottleneck_is_mas_formula():
    x, y = samples()
    rule = family.hsic_bottleneck(beta=20.0, sigma=2.0)
    before, grads, seen = step(net(6, 7, 5, 3), (x, y), rule)
    x, y = seen[:2]
    weights = {name: p.clone().requires_grad_() for name, p in before.items()}
    n, one = len(x), torch.eye(len(x), dtype=torch.float64)

    def kernel(a):
        K = torch.exp(-torch.cdist(a, a, compute_mode="donot_use_mm_for_euclid_dist") ** 2
                      / (2 * 4.0 * a.shape[1]))  # fmt: skip
        centred = K @ (one - 1 / n)
        return centred @ torch.linalg.inv(centred + 1e-5 * n * one)

    def nhsic(a, b):
        return torch.trace(kernel(a) @ kernel(b))

    h1 = torch.tanh(x @ weights["0.weight"].T + weights["0.bias"])
    labels = F.one_hot(y, 3).double()
    (nhsic(h1, x) - 20.0 * nhsic(h1, labels)).backward()
    expected = {"0.weight": weights["0.weight"].grad, "0.bias": weights["0.bias"].grad}
    agree(grads, expected, rtol=1e-5, atol=1e-6)


def test_own_tensors_are_what_a_rule_begins_with():
    P = torch.arange(21.0).view(3, 7) / 10
    x, y = samples()
    rule = rules.with_tensors(rules.tpsgd_l2(), {1: [P]})
    before, grads, _ = step(net(6, 7, 3), (x, y), rule)
    h, _ = hand(x, before)
    d = (h[1] - P[y].double()) * (1 - h[1] ** 2) / len(x)
    agree(grads, {"0.weight": d.T @ x, "0.bias": d.sum(0)}, rtol=1e-6, atol=1e-7)
    with pytest.raises(tpsgd.TpsgdError, match=r"needs tensors \[\(3, 7\)\] in block 1, got"):
        step(net(6, 7, 3), (x, y), rules.with_tensors(rules.tpsgd_l2(), {1: [P.T]}))
    redrawn = net(6, 7, 3)
    how = {"optimizer": torch.optim.SGD, "lr": 1.0, "epochs": 1, "batch_size": len(y)}
    tpsgd.fit(redrawn, (x, y), rule=rule, memory=tpsgd.Memory(redraw=True), **how)
    stored = net(6, 7, 3)
    tpsgd.fit(stored, (x, y), rule=rule, **how)
    assert torch.equal(redrawn[0].weight, stored[0].weight)
    site = tpsgd.objectives.Site((4, 3, 3), 2, tpsgd.objectives.Key(), maps=True)
    K, R = torch.randn(4, 4, 3, 3), torch.randn(2, 36)
    own = rules.with_tensors(rules.predsim(), {1: [K, R]}).objective(site)
    assert all(map(torch.equal, own.tensors, (K, R))) and own.learned
    assert own.tensors[0].data_ptr() != K.data_ptr()  # K is not trained in place
    learned = rules.with_tensors(rules.readout(True), {2: [R]}).objective(site)
    assert torch.equal(learned.tensors[0], rules.readout(True).objective(site).tensors[0])
    with pytest.raises(tpsgd.TpsgdError, match="frozen has no objective"):
        rules.with_tensors(rules.frozen(), {1: [P]})
    for wrong in ({0: [P]}, {1: P}, {1: [1.0]}, {"1": [P]}):
        with pytest.raises(tpsgd.TpsgdError, match="tensors must be lists of tensors"):
            rules.with_tensors(rules.tpsgd_l2(), wrong)  # type: ignore[arg-type]
