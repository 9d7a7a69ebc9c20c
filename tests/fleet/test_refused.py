"""One broken client does not harm the round: its update is refused, and the log says why."""

import logging
import re
from dataclasses import asdict

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import average, client, context, message, net, run, same, samples, with_array
from flwr.app import Array, ConfigRecord, Error, Message, MetricRecord
from flwr.serverapp.strategy import FedAdam

import tpsgd
from tpsgd_fleet.shared_model import arrays_of

CLIENTS = [samples(30, seed=i) for i in range(3)]


def changed(record, **values):
    def change(reply):
        reply.content[record].update(values)
        return reply

    return change


def without(record, name=None):
    def change(reply):
        if name is None:
            del reply.content[record]
        else:
            del reply.content[record][name]
        return reply

    return change


def torn(reply):
    reply.content["arrays"]["0.weight"].data = b"\x93NUMPY torn"
    return reply


def lying(reply):
    reply.content["arrays"]["0.weight"].data = Array(np.zeros(3)).data
    return reply


def failed(reply):
    return Message(metadata=reply.metadata, error=Error(1, "out of memory"))


BROKEN = {
    "NaN": (with_array("0.weight", np.full((8, 6), np.nan, "float32")), "0.weight has NaN"),
    "infinity": (with_array("2.bias", np.array([0, np.inf, 0.0])), "2.bias has NaN or infinity"),
    "too large": (with_array("2.bias", np.array([0, 1e300, 0])), "2.bias has NaN or infinity"),
    "shape": (with_array("0.weight", np.zeros((8, 5))), r"shape \(8, 5\), not \(8, 6\)"),
    "broadcast": (with_array("0.bias", np.zeros(())), r"shape \(\), not \(8,\)"),
    "text": (with_array("0.bias", np.array(["a"] * 8)), "an array of <U1"),
    "missing": (without("arrays", "2.bias"), "other arrays than it was sent: 2.bias"),
    "more": (with_array("3.bias", np.zeros(1)), "other arrays than it was sent: 3.bias"),
    "torn": (torn, "cannot be read"),
    "lying": (lying, r"shape \(3,\), not \(8, 6\)"),
    "no arrays": (without("arrays"), "0 array records"),
    "no metrics": (without("metrics"), "0 metric records"),
    "other metrics": (changed("metrics", pressure=1.0), "its metrics are .*pressure"),
    "loss": (changed("metrics", loss=float("nan")), "its loss is nan"),
    "no samples": (changed("metrics", **{"num-examples": 0}), "it has no samples"),
    "fewer": (changed("metrics", **{"num-examples": -5}), "it says that it has -5 samples"),
    "scales": (changed("local", scales=[float("nan"), 0.0]), "its scales are"),
    "tiny scales": (changed("local", scales=[1e-200, 0.0]), "its scales are"),
    "classes": (changed("local", **{"new-classes": ["x" * 1000]}), "short texts"),
    "twice": (changed("local", **{"new-classes": ["a", "a"]}), "announces a class twice"),
    "no list": (changed("local", **{"new-classes": 3}), "cannot be read"),
    "failed": (failed, "its app failed: out of memory"),
    "silent": (None, "no reply within 7 s"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_update_is_refused_and_the_others_are_averaged(case, caplog):
    change, reason = BROKEN[case]
    with caplog.at_level(logging.WARNING, "flwr"):
        report, _ = run(client(CLIENTS), CLIENTS, broken={1: change}, rounds=1, timeout=7)
    expected, _ = run(client(CLIENTS[::2]), CLIENTS[::2], rounds=1)
    assert same(report.model, expected.model)
    assert list(report.rounds[0].refused) == [1]
    assert re.search(reason, report.rounds[0].refused[1])
    assert re.search(f"refused: node 1 in round 1: .*{reason}", caplog.text)
    assert asdict(report.rounds[0])["refused"] == report.rounds[0].refused


def test_a_refused_update_does_not_reach_the_calibration():
    report, _ = run(client(CLIENTS), CLIENTS, broken={1: BROKEN["NaN"][0]}, rounds=1)
    expected, _ = run(client(CLIENTS[::2]), CLIENTS[::2], rounds=1)
    assert report.scales == expected.scales


def test_a_round_without_any_usable_update_leaves_the_weights_as_they_are():
    change = BROKEN["NaN"][0]
    report, _ = run(client(CLIENTS), CLIENTS, broken={i: change for i in range(3)}, rounds=2)
    torch.manual_seed(0)
    assert same(report.model, net()) and len(report.rounds[1].refused) == 3


def test_a_mistake_on_a_client_is_its_reason():
    clients = [CLIENTS[0], (CLIENTS[1][0], CLIENTS[1][1][:-1]), CLIENTS[2]]
    report, _ = run(client(clients), clients, rounds=1)
    assert report.rounds[0].refused == {1: "its app failed: x has 30 samples, but y has 29 labels"}


@pytest.mark.parametrize(
    "case, reason",
    [
        (with_array("xx", np.full(36, np.nan), "moments"), "xx has NaN"),
        (with_array("xx", np.full(36, -1.0), "moments"), "sums of squares below 0"),
        (with_array("xy", np.zeros((8, 2)), "moments"), r"shape \(8, 2\), not \(8, 3\)"),
        (with_array("count", np.array([2]), "moments"), "over 2 rows, but .* 30 samples"),
        (changed("local", **{"new-classes": ["2"]}), "'2', which is no new class"),
        (None, "no reply within"),
    ],
)
def test_broken_moments_are_refused(case, reason):
    settings = {"rounds": 0, "head": tpsgd.ridge(1e-3)}
    report, _ = run(client(CLIENTS), CLIENTS, broken={1: case}, **settings)
    expected, _ = run(client(CLIENTS[::2]), CLIENTS[::2], **settings)
    assert re.search(reason, report.rounds[0].refused[1])
    assert same(report.model, expected.model, 1e-6)


def test_other_frozen_weights_than_the_server_s_are_refused():
    calls = []

    def model(context=None):
        if calls:
            torch.rand(1)  # the server calls first: then the seed makes other weights
        calls.append(1)
        layers = net()
        layers[0].requires_grad_(False)
        return layers

    app = client(CLIENTS, model, rule=tpsgd.rules.frozen())
    report, _ = run(app, CLIENTS, model, rounds=1)
    assert len(report.rounds[0].refused) == 3
    assert "frozen weights, which do not travel" in report.rounds[0].refused[0]


def test_messages_of_another_server_are_answered_by_a_sentence():
    asked = message(arrays_of(net()))
    asked.content["config"] = ConfigRecord({"server-round": 1})
    reply = client(CLIENTS)(asked, context(0))
    assert reply.error.reason.endswith("make its app by tpsgd_fleet.server")


def test_fedadam_is_not_harmed_either():
    broken = {1: BROKEN["NaN"][0]}
    report, _ = run(client(CLIENTS), CLIENTS, broken=broken, strategy=average(FedAdam), rounds=2)
    assert all(torch.isfinite(p).all() for p in report.model.parameters())
    assert MetricRecord({"loss": report.rounds[1].loss})["loss"] < 2.0
