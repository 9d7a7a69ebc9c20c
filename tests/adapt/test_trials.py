"""The score of untrained layers, rank correlation, and the judge of trials."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import images, points, same, seeded, state
from scipy.stats import spearmanr
from torch import nn

import tpsgd
from tpsgd import Memory, TpsgdError, losses, rules
from tpsgd_adapt import Backbone, Features, Layers, Probe
from tpsgd_adapt.search import spearman
from tpsgd_adapt.trials import activation_overlap, layer_trials

SCIPY: Any = spearmanr


def signs(*codes: str) -> torch.Tensor:
    """Samples whose units are on and off as written."""
    return torch.tensor([[1.0 if unit == "1" else -1.0 for unit in code] for code in codes])


def test_three_samples_by_hand():
    # K = [[3, 2, 1], [2, 3, 0], [1, 0, 3]], whose determinant is 27 - 12 - 3
    found = activation_overlap(nn.Sequential(nn.ReLU()), signs("110", "100", "011"))
    assert found == pytest.approx(math.log(12))


@pytest.mark.parametrize(
    "rectifier", [nn.ReLU, partial(nn.ReLU, inplace=True), nn.LeakyReLU, nn.PReLU]
)
def test_every_rectifier_by_direct_counting(rectifier):
    layers = (nn.Conv2d(2, 5, 3), rectifier(), nn.Flatten(), nn.Linear(80, 30), rectifier())
    net: Any = seeded(lambda: nn.Sequential(*layers, nn.Linear(30, 3)))
    x, _ = images(7)
    with torch.no_grad():
        first = net[0](x).flatten(1)
        second = net[3](net[1](first.clone()))
    codes = torch.cat([first, second], 1) > 0
    K = np.array(
        [
            [sum(p == q for p, q in zip(a, b, strict=True)) for b in codes.tolist()]
            for a in codes.tolist()
        ]
    )
    assert activation_overlap(net, x) == pytest.approx(math.log(np.linalg.det(K.astype(float))))


def test_samples_with_one_code_make_it_singular():
    assert activation_overlap(nn.Sequential(nn.ReLU()), signs("110", "011", "110")) == -math.inf


def test_dependent_codes_make_it_singular():
    # all four codes of two units: the first and last rows of K add up to the other two's sum
    assert activation_overlap(nn.Sequential(nn.ReLU()), signs("00", "01", "10", "11")) == -math.inf


@pytest.mark.parametrize(
    "net", [nn.Sequential(nn.Linear(6, 3)), nn.Sequential(nn.Linear(6, 3), nn.Tanh())]
)
def test_without_rectifiers_there_is_no_score(net):
    assert activation_overlap(net, torch.randn(4, 6)) is None


def test_the_model_is_left_as_it_was():
    net = nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Dropout(0.5), nn.ReLU())
    net[2].eval()
    before, x = state(net), torch.randn(5, 6)
    assert activation_overlap(net, x) == activation_overlap(net, x)
    assert same(before, state(net)) and net.training and not net[2].training
    assert not any(module._forward_pre_hooks for module in net)


def test_hooks_go_when_the_model_fails():
    net = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))
    with pytest.raises(RuntimeError):
        activation_overlap(net, torch.randn(4, 6))
    assert not net[0]._forward_pre_hooks


def test_rank_correlation_with_ties_is_scipys():
    g = np.random.default_rng(0)
    for _ in range(20):
        a, b = g.integers(0, 5, 9).tolist(), g.normal(size=9).tolist()
        assert spearman(a, b) == pytest.approx(SCIPY(a, b).statistic)
    assert spearman([-math.inf, 1.0, 2.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)


@pytest.mark.parametrize(
    "pairs", [([1, 2], [2, 1]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [5, 5, 5]), ([], [])]
)
def test_nothing_to_correlate(pairs):
    assert spearman(*pairs) is None


NET: Any = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU()))


def known(n: int = 60, held_out: float = 0.2, seed: int = 0, data=None, **options) -> Any:
    """A judge of layers on a small net's features."""
    data = images(n) if data is None else data
    method = options.pop("method", tpsgd.fit)
    options = {"epochs": 1, "batch_size": 16, **options}
    return layer_trials(
        Backbone(NET, {"maps": "1"}), data, ["maps"], classes=None, method=method, settings=options,
        held_out=held_out, seed=seed,
    )  # fmt: skip


def trained(trials: Any, layers: Any) -> dict[str, Any]:
    """The result of one training run."""
    return trials.task(trials.candidate("maps", layers), 1).train(0, {})


def test_samples_are_learned_from_or_judged_by():
    x, y = images(60)
    found = known(data=(x + 10 * torch.arange(60.0).view(-1, 1, 1, 1), y))
    assert (len(found.train), len(found.held_out), len(found.classes)) == (48, 12, 3)
    assert torch.bincount(found.held_out.y).tolist() == [4, 4, 4]
    both = torch.cat([found.train.x["maps"], found.held_out.x["maps"]])
    assert len({tuple(sample.flatten().tolist()) for sample in both}) == 60


def test_features_that_were_given_stay_whole():
    given = Features({"maps": torch.randn(60, 4, 6, 6)}, images(60)[1], (2, 6, 6))
    found = known(data=given)
    assert given.x["maps"].shape == (60, 4, 6, 6) and len(found.train) == 48


def test_what_is_planned_is_what_is_held():
    found, layers = known(rule=rules.tpsgd_l2()), Layers(0, 0)
    trial = trained(found, layers)
    assert found.candidate("maps", layers).planned_bytes == trial["peak_bytes"]
    assert 0 <= trial["accuracy"] <= 1 and trial["seconds"] > 0


def test_backprop_is_planned_as_backprop():
    layers, local = Layers(1, 1, 3, 3, 8), known(rule=rules.tpsgd_l2())
    found = known(method=tpsgd.fit_backprop, loss=losses.mse)
    planned = found.candidate("maps", layers).planned_bytes
    assert planned == pytest.approx(trained(found, layers)["peak_bytes"], rel=1e-3)
    assert planned > local.candidate("maps", layers).planned_bytes
    in_pieces = known(method=tpsgd.fit_backprop, memory=Memory(micro_batch=4))
    assert in_pieces.candidate("maps", layers).planned_bytes < planned


def test_the_score_is_that_of_the_layers_at_the_start():
    found, layers = known(), Layers(1, 0, 3, 3)
    torch.manual_seed(0)
    score = activation_overlap(layers((4, 6, 6), 3), found.train.x["maps"])
    assert found.candidate("maps", layers).score == score
    assert found.candidate("maps", Probe()).score is None


@pytest.mark.parametrize(
    "other",
    [
        {"epochs": 2},
        {"batch_size": 8},
        {"lr": 0.1},
        {"rule": rules.tpsgd_l2(features=8)},
        {"rule": rules.tpsgd_l2(at=tpsgd.Place.BEFORE)},
        {"optimizer": tpsgd.ridge(0.1)},
        {"method": tpsgd.fit_backprop},
        {"n": 57},
        {"seed": 1},
        {"held_out": 0.3},
        {"data": (images(60)[0] * 1.1, images(60)[1])},
        {"data": (images(60)[0], images(60)[1].flip(0))},
    ],
)
def test_a_search_is_another_with_every_setting_that_changes_the_result(other):
    assert known().identity == known().identity != known(**other).identity


def test_a_search_is_another_with_another_backbone_but_not_on_another_device():
    one = known().identity
    assert known(device="cpu").identity == one
    with torch.no_grad():
        NET[0].weight[0, 0, 0, 0] += 1e-4
    try:
        assert known().identity != one
    finally:
        with torch.no_grad():
            NET[0].weight[0, 0, 0, 0] -= 1e-4


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"held_out": 0.0}, "held_out must be a share between 0 and 1"),
        ({"held_out": 1.5}, "held_out must be a share between 0 and 1"),
        ({"data": (images(4)[0], torch.tensor([0, 1, 2, 3])), "held_out": 0.5}, "too few"),
        ({"data": (images(6)[0], torch.tensor([0, 1, 0, 1, 0, -1]))}, "-1"),
        ({"data": (images(6)[0], torch.rand(6))}, "float labels must be rows"),
        ({"validation": images(9)}, "a search has no validation"),
        ({"augment": tpsgd.augment.flip()}, "augment changes the images"),
        ({"keep": True}, "adapt.search has no argument 'keep'"),
    ],
)
def test_what_cannot_be_judged_is_refused(given, said):
    with pytest.raises(TpsgdError, match=said):
        known(**given)


def test_rows_of_labels_are_split_by_their_largest():
    x, y = points(40, 6, 4)
    rows = nn.functional.one_hot(y, 4).float()
    net = Backbone(nn.Sequential(nn.Linear(6, 6)), {"all": "0"})
    found = layer_trials(
        net, (x, rows), ["all"], classes=None, method=tpsgd.fit, settings={}, held_out=0.2, seed=0
    )
    assert len(found.classes) == 4 and found.held_out.y.sum(0).tolist() == [2, 2, 2, 2]
