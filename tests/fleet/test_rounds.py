"""Rounds of training: Flower averages, and every client learns what `fit` would."""

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import average, client, context, message, net, run, same, samples
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx

import tpsgd
from tpsgd import TpsgdError, fleet, rules
from tpsgd_fleet.calibration import combined
from tpsgd_fleet.shared_model import arrays_of

RULES = {
    "readout": rules.readout(), "tpsgd-l2": rules.tpsgd_l2(), "frozen": rules.frozen(),
    "dfa": rules.dfa(), "default": None,
}  # fmt: skip


def initial(model=net, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model()


@pytest.mark.parametrize("word", RULES)
def test_one_client_and_one_round_are_fit(word):
    data, chosen = samples(), {"rule": RULES[word]} if RULES[word] else {}
    report, _ = run(client([data], **chosen), [data], rounds=1, seed=3)
    expected = initial(seed=3)
    tpsgd.fit(expected, data, epochs=2, batch_size=16, seed=3, **chosen)
    assert same(report.model, expected)


def test_clients_may_learn_by_backprop_to_compare():
    data = samples()
    app = client([data], method=tpsgd.fit_backprop)
    report, _ = run(app, [data], rounds=1)
    expected = initial()
    tpsgd.fit_backprop(expected, data, epochs=2, batch_size=16)
    assert same(report.model, expected)


def test_clients_are_averaged_by_their_numbers_of_samples():
    clients = [samples(30, seed=1), samples(90, seed=2)]
    report, _ = run(client(clients), clients, rounds=1)
    nets = [initial(), initial()]
    for each, data in zip(nets, clients, strict=True):
        tpsgd.fit(each, data, epochs=2, batch_size=16)
    for mean, a, b in zip(*(m.parameters() for m in (report.model, *nets)), strict=True):
        torch.testing.assert_close(mean, 0.25 * a + 0.75 * b, rtol=0, atol=1e-6)


def test_the_second_round_sees_the_samples_in_another_order_and_the_same_codes():
    data = samples()
    report, desk = run(client([data]), [data], rounds=2)
    expected = initial()
    first = tpsgd.fit(expected, data, epochs=2, batch_size=16)
    scale = first.blocks[0].scale
    order = torch.cat(list(tpsgd.maths.random.permutation(60, tpsgd.maths.random.Key(0, -1, 2))))
    assert order.tolist() != list(range(60))
    shuffled = data[0][order], data[1][order]
    settings = {"rule": rules.readout(learned=True, scale=scale), "epochs": 2, "batch_size": 16}
    tpsgd.fit(expected, shuffled, **settings)
    assert same(report.model, expected, 1e-6)
    assert {config["seed"] for config in desk.configs} == {0}


def test_all_clients_share_one_calibration_from_the_second_round_on():
    clients = [(3 * samples(30, seed=1)[0], samples(30)[1]), samples(60, seed=2)]
    scales = []
    for data in clients:
        scales.append(tpsgd.fit(initial(), data, epochs=2, batch_size=16).blocks[0].scale)
    report, desk = run(client(clients), clients, rounds=2)
    assert scales[0] != pytest.approx(scales[1], rel=0.05)
    expected = combined([([scales[0], 0.0], 30), ([scales[1], 0.0], 60)])
    assert report.scales == pytest.approx(expected)
    sent = [config.get("scales") for config in desk.configs]
    assert sent == [None, None, report.scales, report.scales]


def test_the_shared_scale_is_the_calibrated_objective():
    data, nets = samples(), [initial(), initial()]
    run_of = tpsgd.fit(nets[0], data, epochs=2, batch_size=16)
    app = client([data])
    scales = [run_of.blocks[0].scale, 0.0]
    reply = app(message(arrays_of(nets[1]), scales=scales), context(0))
    learned = reply.content["arrays"]["0.weight"].numpy()
    torch.testing.assert_close(torch.from_numpy(learned), nets[0][0].weight.detach())


def test_fedprox_pulls_towards_the_weights_of_the_server():
    data, mu = samples(), 0.7

    def linear(context=None):
        return nn.Sequential(nn.Linear(6, 3))

    app = client([data], linear, optimizer=tpsgd.sgd, epochs=2, batch_size=60)
    report, _ = run(app, [data], linear, strategy=average(FedProx, proximal_mu=mu), rounds=3)
    expected = initial(linear)
    for _ in range(3):
        server = [p.detach().clone() for p in expected.parameters()]
        for _ in range(2):
            loss = nn.functional.cross_entropy(expected(data[0]), data[1])
            pairs = zip(expected.parameters(), server, strict=True)
            loss = loss + mu / 2 * sum((p - q).square().sum() for p, q in pairs)
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            with torch.no_grad():
                for p, g in zip(expected.parameters(), gradients, strict=True):
                    p -= 0.1 * g
    assert same(report.model, expected, 1e-6)


def test_fedprox_counts_in_every_step():
    data, mu = samples(), 5.0

    def linear(context=None):
        return nn.Sequential(nn.Linear(6, 3))

    app = client([data], linear, epochs=20, lr=0.1)
    far, near = (
        run(app, [data], linear, strategy=strategy, rounds=1)[0]
        for strategy in (average(), average(FedProx, proximal_mu=mu))
    )
    start = initial(linear)[0].weight
    moved = [(r.model[0].weight - start).norm() for r in (far, near)]
    assert moved[1] < moved[0] / 2


def test_fedadam_takes_its_own_step_on_the_server():
    data = samples()
    report, _ = run(client([data]), [data], strategy=average(FedAdam, eta=0.01), rounds=1)
    start, learned = initial(), initial()
    tpsgd.fit(learned, data, epochs=2, batch_size=16)
    delta = learned[0].weight - start[0].weight
    m, v = (1 - 0.9) * delta, (1 - 0.99) * delta.square()
    eta = 0.01 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)
    expected = start[0].weight + eta * m / (v.sqrt() + 1e-3)
    torch.testing.assert_close(report.model[0].weight, expected, rtol=1e-4, atol=1e-6)


def test_a_budget_is_kept_and_reported():
    data = samples(300)
    budget, fast = (
        run(client([data], memory=memory), [data], rounds=1)[0].rounds[0].memory_bytes
        for memory in ("16KB", "fast")
    )
    assert 0 < budget < fast and budget <= 16 * 1024


def test_bytes_are_those_of_the_weights_that_may_learn():
    def half_frozen(context=None):
        model = net()
        model[0].requires_grad_(False)
        return model

    clients = [samples(seed=1), samples(seed=2)]
    bytes_sent = []
    for model in (net, half_frozen):
        app = client(clients, model, rule=rules.frozen())
        report, _ = run(app, clients, model, rounds=1)
        bytes_sent.append(report.rounds[0].sent_bytes)
        assert same(report.model[0], initial(model)[0])
    numbers = [6 * 8 + 8 + 8 * 3 + 3, 8 * 3 + 3]
    headers = [bytes_sent[i] - 2 * 4 * numbers[i] for i in (0, 1)]
    assert headers == [2 * 4 * 128, 2 * 2 * 128]  # of numpy's format


def test_clients_measure_the_accuracy_on_their_own_samples():
    data = samples(90)
    seen = []

    class Watched(FedAvg):
        def aggregate_evaluate(self, server_round, replies):
            seen.extend(replies)
            return super().aggregate_evaluate(server_round, replies)

    least = {"min_train_nodes": 1, "min_available_nodes": 1, "min_evaluate_nodes": 1}
    report, _ = run(client([data], epochs=20, lr=0.02), [data], strategy=Watched(**least), rounds=1)
    (reply,) = seen
    assert reply.content["metrics"]["accuracy"] == tpsgd.evaluate(report.model, data) > 0.8


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: client([], seed=3), "the seed is the server's"),
        (lambda: client([], rule="drpt"), "did you mean 'drtp'"),
        (lambda: client([], epoch=3), "did you mean 'epochs'"),
        (lambda: fleet.server(net, rounds=0), "rounds must be 1 or more"),
        (lambda: fleet.server(net, strategy=FedAdam), "such as FedAvg"),
        (lambda: fleet.server(net, head=tpsgd.ridge), r"head must be tpsgd.ridge\(\)"),
        (lambda: run(client([]), [], classes=["a", "b"], rounds=1), "3 outputs, but there are 2"),
    ],
)
def test_mistakes_are_one_sentence(make, words):
    with pytest.raises(TpsgdError, match=words):
        make()
