"""Recurrent layers that learn a label for each step, against autograd and by hand."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import same, seeded, state
from torch import nn

import tpsgd
from tpsgd import Recurrent, TpsgdError, rules
from tpsgd.losses import IGNORED
from tpsgd.maths.random import Key
from tpsgd.objectives import Site

STEPS, INPUTS, UNITS, CLASSES = 7, 3, 4, 3
RULES = {
    "readout": lambda: rules.readout(calibrate=False),
    "learned": lambda: rules.readout(True, calibrate=False),
    "l2": rules.tpsgd_l2,
    "l1": rules.tpsgd_l1,
    "drtp": rules.drtp,
}


def sequences(gaps=False, n=6):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, STEPS, INPUTS, generator=g, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (n, STEPS), generator=g)
    if gaps:
        y[0, :3], y[1], y[2, -1] = IGNORED, IGNORED, IGNORED
    return x, y


def net(*layers, outputs=CLASSES):
    units = UNITS * (1 + getattr(layers[-1], "bidirectional", False))
    model = nn.Sequential(*layers, nn.Linear(units, outputs)).double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(p.numel()))
    return model


def learner_of(model, data, **settings):
    """The first block with its objective drawn, and all samples as one batch."""
    nets = []
    settings |= {"optimizer": tpsgd.sgd, "lr": 0.1, "batch_size": 1000}
    tpsgd.fit(model, data, order=nets.append, **settings)
    learner = nets[0].learners[0]
    learner.start()
    return learner, *next(nets[0].source.batches()).load()


def gradients(learner, x, labels):
    with torch.no_grad():
        saved = learner.forward(x)
        return learner.gradient.gradients(learner.params, saved, labels, learner.tensors)


def mean_loss(objective_of, states, y, count):
    """The mean over labelled positions, from the objective of each step."""
    total = 0.0
    for t in range(states.shape[1]):
        labelled = y[:, t] != IGNORED
        if labelled.any():
            objective, tensors = objective_of(t)
            local = objective.loss(states[labelled, t], y[labelled, t], *tensors)
            total = total + local * labelled.sum()
    return total / count


@pytest.mark.parametrize(("name", "gaps"), list(product(RULES, (False, True))))
def test_a_cell_learns_each_steps_label_with_the_states_cut_off(name, gaps):
    x, y = sequences(gaps)
    rule, count = RULES[name](), int((y != IGNORED).sum())
    layer = Recurrent(INPUTS, UNITS, leak=0.4, bidirectional=True, sequence=True)
    model = net(layer)
    for window in (1, 3, STEPS):
        learner, *batch = learner_of(model, (x, y), rule=rule, window=window)
        local, (grads,) = gradients(learner, *batch)
        value = 0.0
        for way, cell in enumerate(layer.cells):
            W = {k: p.detach().requires_grad_() for k, p in cell.named_parameters()}
            with torch.no_grad():
                states = layer(x)[..., way * UNITS : (way + 1) * UNITS]
            zero = torch.zeros_like(states[:, :1])
            before = torch.cat([states[:, 1:], zero] if way else [zero, states[:, :-1]], 1)
            z = x @ W["weight_x"].T + before @ W["weight_h"].T + W["bias_x"] + W["bias_h"]
            new = torch.lerp(before, torch.tanh(z), 0.4)

            def objective_of(t, way=way):
                site = Site((UNITS,), CLASSES, Key(), dtype=torch.float64, recurrent=True)
                key = Key(0, -1 if way else 0, t if rule.per_step else 0)
                objective = rule.objective(replace(site, key=key))
                return objective, objective.tensors

            way_loss = mean_loss(objective_of, new, y, count)
            expected = torch.autograd.grad(way_loss, list(W.values()))
            for key, right in zip(W, expected, strict=True):
                ours = grads[f"0.cells.{way}.{key}"]
                torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-12)
            value += float(way_loss.detach())
        assert float(local.loss) == pytest.approx(value)


@pytest.mark.parametrize(("name", "gaps"), list(product(RULES, (False, True))))
def test_a_diagonal_layer_learns_each_steps_label_as_through_time(name, gaps):
    x, y = sequences(gaps)
    layer = Recurrent.diagonal(INPUTS, UNITS, sequence=True)  # its loss is at every step
    model = nn.Sequential(layer, nn.Linear(UNITS, CLASSES)).double()
    for window in (None, 2, 3):
        learner, *batch = learner_of(model, (x, y), rule=RULES[name](), window=window)
        local, (grads,) = gradients(learner, *batch)
        outputs, objective = layer(x), learner.gradient.objective
        labelled = y != IGNORED
        loss = objective.loss(outputs[labelled], y[labelled], *learner.tensors)
        expected = torch.autograd.grad(loss, list(layer.parameters()))
        for (key, _), right in zip(layer.named_parameters(), expected, strict=True):
            torch.testing.assert_close(grads[f"0.{key}"], right, rtol=1e-7, atol=1e-10)
        assert float(local.loss) == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("rule", [*rules.ALL])
@pytest.mark.parametrize("kind", ["leaky", "diagonal"])
def test_windows_of_a_stack_change_nothing(rule, kind):
    if rule == "predsim":
        pytest.skip("it needs one class for a sample")
    make = Recurrent if kind == "leaky" else Recurrent.diagonal
    trained = []
    for window in (1, 3, STEPS):
        torch.manual_seed(0)
        model = net(make(INPUTS, UNITS, sequence=True), make(UNITS, UNITS, sequence=True))
        settings = {"rule": rule, "epochs": 2, "batch_size": 3, "optimizer": tpsgd.sgd, "lr": 0.1}
        tpsgd.fit(model, sequences(gaps=True), window=window, **settings)
        trained.append(state(model))
    if rule not in ("auxiliary",):  # its batch norm sees a window
        for other in trained[1:]:
            for key, right in trained[0].items():
                torch.testing.assert_close(other[key], right, rtol=1e-8, atol=1e-9)
    assert all(torch.isfinite(t).all() for t in trained[0].values())


def test_numbers_of_steps_are_learned_and_beat_random_layers():
    x, _ = sequences(n=120)
    y = x.cumsum(1).sum(-1)
    scores = {}
    for rule in ("readout-learned", "frozen"):
        model = nn.Sequential(
            seeded(lambda: Recurrent.diagonal(INPUTS, 16, sequence=True)), nn.Linear(16, 1)
        ).double()
        run = tpsgd.fit(model, (x, y), rule=rule, epochs=40, batch_size=20, lr=0.01)
        scores[rule] = tpsgd.evaluate(model, (x, y))
        assert "accuracy" not in str(run) and "R²" in str(run)
    assert scores["readout-learned"] > scores["frozen"] + 0.05, scores


def test_stacked_restarts_are_those_trained_one_by_one():
    settings = {"rule": "readout", "epochs": 2, "batch_size": 3, "lr": 0.01}
    settings["optimizer"] = tpsgd.sgd
    data = sequences()

    def model():
        return net(Recurrent(INPUTS, UNITS, sequence=True))

    together = tpsgd.fit_many(model, data, restarts=2, stacked=True, **settings)
    for i, ours in enumerate(together.models):
        alone = seeded(model, i)
        tpsgd.fit(alone, data, seed=i, **settings)
        for key, right in state(alone).items():
            torch.testing.assert_close(state(ours)[key], right, rtol=1e-9, atol=1e-10)
    with pytest.raises(TpsgdError, match="a block is solved for labels of every position"):
        tpsgd.fit_many(model, data, restarts=2, stacked=True, epochs=1)


def test_the_labels_of_coarser_steps_are_reduced_and_ragged_sequences_refused():
    class Halves(nn.Module):
        """Every second step."""

        def forward(self, x):
            return x[:, ::2]

    class Doubles(nn.Module):
        """Every step twice."""

        def forward(self, x):
            return x.repeat_interleave(2, 1)

    x, y = torch.randn(9, 8, INPUTS).double(), torch.randint(0, CLASSES, (9, 8))
    layer = Recurrent(INPUTS, UNITS, sequence=True)
    model = nn.Sequential(Halves(), layer, Doubles(), nn.Linear(UNITS, CLASSES)).double()
    before = state(model)
    tpsgd.fit(model, (x, y), epochs=1)
    assert not same(before, state(model))
    padded = tpsgd.Padded(x, torch.arange(9) % 8 + 1)
    with pytest.raises(TpsgdError, match="for a label for each step, pass tensors"):
        tpsgd.fit(net(Recurrent(INPUTS, UNITS, sequence=True)), (padded, y), epochs=1)
