"""A budget of RAM that cannot be kept: the advice is for this net, and makes it smaller."""

import re

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd.common.errors import TpsgdError


def mlp(width: int = 5) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def cnn(side: int = 12) -> nn.Module:
    kept = ((side - 2) // 2) ** 2 * 2
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(kept, 3)
    return nn.Sequential(*layers)


def refusal(folder, model, **settings) -> tuple[int, list[str]]:
    """The bytes that a net needs, and the advice."""
    with pytest.raises(TpsgdError) as caught:
        tpsgd.export.c(model, folder, ram="64", **settings)
    match = re.search(r"needs ([\d,]+) B of RAM .* is 64 B: take (.*)$", str(caught.value))
    assert match
    return int(match[1].replace(",", "")), re.split(", | or ", match[2])


BATCH, SGD = "a smaller batch", "optimizer='sgd'"
CODES = "rule='readout' (its class codes are fixed)"
SMALLER = {
    BATCH: {"batch": 1},
    SGD: {"optimizer": "sgd"},
    CODES: {"rule": "readout"},
    "fewer units": {"model": mlp(4)},
    "smaller inputs": {"model": cnn(8), "shape": (1, 8, 8)},
}
CASES = {
    "plain": ({"rule": "readout"}, ["fewer units"]),
    "codes that learn": ({}, [CODES, "fewer units"]),
    "batch": ({"rule": "readout", "batch": 4}, [BATCH, "fewer units"]),
    "optimizer": ({"rule": "tpsgd-l2", "optimizer": "adam"}, [SGD, "fewer units"]),
    "all": ({"batch": 2, "optimizer": "momentum"}, [BATCH, SGD, CODES, "fewer units"]),
    "maps": (
        {"model": cnn(), "shape": (1, 12, 12), "rule": "readout"},
        ["smaller inputs", "an earlier stride", "fewer filters"],
    ),
    "large last layer": (
        {"model": cnn(), "shape": (1, 12, 12), "rule": "readout", "optimizer": "adam"},
        [SGD, "fewer filters", "units"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_advice_fits_the_net_and_makes_it_smaller(case, tmp_path):
    torch.manual_seed(0)
    settings, expected = CASES[case]
    settings = {"model": mlp(), "shape": (6,), **settings}
    count, ways = refusal(tmp_path, **settings)
    assert ways == expected
    for way in set(ways) & set(SMALLER):
        assert refusal(tmp_path, **{**settings, **SMALLER[way]})[0] < count
    assert not list(tmp_path.iterdir())
