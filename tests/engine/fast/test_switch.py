"""`TPSGD_FAST=0`: the plain steps train the weights that tapes and fused steps train."""

import pytest
import torch
from helpers import close, state
from test_matrix import BLOCKS, ORDERS, RULES, build

import tpsgd
from tpsgd.common.errors import TpsgdError


@pytest.mark.cover(2)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("word", [word for word in RULES if word != "tpsgd"])
def test_plain_steps_train_the_same(word, kind, order, monkeypatch):
    data, make = BLOCKS[kind]
    x, y = data()
    weights = []
    for fast in ("1", "0"):
        monkeypatch.setenv("TPSGD_FAST", fast)
        model = build(make, x)
        settings = {"order": ORDERS[order], "epochs": 12, "batch_size": 8}
        try:
            tpsgd.fit(model, (x, y), rule=word, progress=False, **settings)
        except TpsgdError:
            pytest.skip("it needs the net's output")
        weights.append(state(model))
    close(*weights, rtol=1e-4, atol=1e-5)


def test_the_switch_leaves_tapes_out(monkeypatch, tapes):
    model = build(BLOCKS["linear"][1], BLOCKS["linear"][0]()[0])
    data = BLOCKS["linear"][0]()
    settings = {"epochs": 12, "batch_size": 8, "progress": False}
    tpsgd.fit(model, data, **settings)
    recorded = len(tapes)
    monkeypatch.setenv("TPSGD_FAST", "0")
    tpsgd.fit(model, data, **settings)
    assert recorded and len(tapes) == recorded
    assert torch.isfinite(model[0].weight).all()
