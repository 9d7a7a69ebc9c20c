"""A client's cross-entropy leaves out the classes that the client has no samples of."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import client, context, message, net, run, same, samples

import tpsgd
from tpsgd_fleet.restricted_softmax import restricted_to
from tpsgd_fleet.shared_model import arrays_of

TWO_CLASSES = samples(60, classes=2)  # of the model's three


def initial():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return net()


def test_the_loss_is_the_cross_entropy_of_the_other_logits():
    logits = torch.randn(7, 5, requires_grad=True)
    labels = torch.tensor([1, 4, 3, 1, 1, 4, 3])
    loss = restricted_to(labels, 5)
    expected = F.cross_entropy(logits[:, [1, 3, 4]], torch.tensor([0, 2, 1, 0, 0, 2, 1]))
    (gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss.value(logits, labels), expected)
    torch.testing.assert_close(loss.grad(logits.detach(), labels) / 7, gradient)


@pytest.mark.filterwarnings("ignore:.* classes have no samples")
@pytest.mark.parametrize("method", [tpsgd.fit, tpsgd.fit_backprop])
def test_a_round_is_fit_with_the_restricted_loss(method):
    app = client([TWO_CLASSES], method=method, restricted_softmax=True)
    report, _ = run(app, [TWO_CLASSES], rounds=1)
    expected = initial()
    method(expected, TWO_CLASSES, epochs=2, batch_size=16, loss=restricted_to(TWO_CLASSES[1], 3))
    assert not report.rounds[0].refused and same(report.model, expected)


def test_the_row_of_an_absent_class_does_not_change():
    start = initial()[2].weight
    rows = {}
    for restricted in (True, False):
        app = client([TWO_CLASSES], restricted_softmax=restricted)
        rows[restricted] = run(app, [TWO_CLASSES], rounds=2)[0].model[2].weight
    assert torch.equal(rows[True][2], start[2]) and not torch.equal(rows[False][2], start[2])
    assert not torch.equal(rows[True][0], start[0])


def test_a_client_with_one_class_sends_the_weights_of_the_server():
    x, y = samples(60)
    data = x[y == 1], y[y == 1]
    report, _ = run(client([data], restricted_softmax=True), [data], rounds=1)
    assert same(report.model, initial())


def test_all_classes_are_the_ordinary_loss():
    data = samples(60)
    reports = [
        run(client([data], restricted_softmax=r), [data], rounds=2)[0] for r in (True, False)
    ]
    assert same(reports[0].model, reports[1].model)


def test_a_run_can_choose_it():
    app = client([TWO_CLASSES], configure=lambda context: {"restricted_softmax": True})
    report, _ = run(app, [TWO_CLASSES], rounds=1)
    assert torch.equal(report.model[2].weight[2], initial()[2].weight[2])


@pytest.mark.parametrize(
    "data, settings, words",
    [
        (TWO_CLASSES, {"loss": tpsgd.bce}, "needs loss=tpsgd.cross_entropy, got bce"),
        ((TWO_CLASSES[0], torch.eye(3)[TWO_CLASSES[1]]), {}, "a class for each sample"),
    ],
)
def test_other_losses_and_labels_are_refused(data, settings, words):
    app = client([data], restricted_softmax=True, **settings)
    assert words in app(message(arrays_of(net())), context(0)).error.reason
