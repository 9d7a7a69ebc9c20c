"""Hints after a run that has learned nothing; what is refused or warned of is in test_errors.py."""

import re
from types import SimpleNamespace

import pytest
import torch
from helpers import mlp, points
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Run, bce, cross_entropy, mse
from tpsgd.engine.record import BlockInfo
from tpsgd.engine.sources.batches import ArraySource, BatchForm
from tpsgd.engine.sources.loaders import LoaderSource
from tpsgd.features.likely_mistakes import hint_for
from tpsgd.targets import CLASSES
from tpsgd.train import Epoch

X, Y = points(n=120)
RARE = torch.tensor([1] + [0] * 99)
HOT = torch.nn.functional.one_hot(Y, 3).double()
FORM = BatchForm(torch.device("cpu"), torch.float32, 16, (0,))
LONGER, LOWER = "train longer .* raise the learning rate$", "lower the learning rate, lr=10$"
SMALL, LARGE = "x has a standard deviation of 0.00", "x reaches .*e.05, scale it to about 1$"

# the last block's losses, its loss function, y, x, and the hint
CASES = {
    "learned": ([1.0, 0.5], cross_entropy, Y, X, ""),
    "learned in the first epoch": ([0.01, 0.02], cross_entropy, Y, X, ""),
    "flat": ([1.2, 1.1], cross_entropy, Y, X, f"1.1, is no better than .* guessing, 1.1: {LONGER}"),
    "one epoch is too early to tell": ([1.2], cross_entropy, Y, X, ""),
    "flat with a rare class": ([0.06, 0.056], cross_entropy, RARE, X, "guessing, 0.056: "),
    "learned a rare class": ([0.06, 0.03], cross_entropy, RARE, X, ""),
    "one class": ([0.1, 0.1], cross_entropy, Y * 0, X, ""),
    "diverged": ([9e5, 2e5], cross_entropy, Y, X, f"2e.05, is far above .*, 1.1: {LOWER}"),
    "diverged in one epoch": ([2e5], cross_entropy, Y, X, LOWER),
    "bytes as labels": ([1.2, 1.1], cross_entropy, Y.byte(), X, LONGER),
    "soft labels": ([1.2, 1.1], cross_entropy, HOT, X, LONGER),
    "mse": ([0.4, 0.33], mse, Y, X, "guessing, 0.333"),
    "mse, learned": ([0.4, 0.3], mse, Y, X, ""),
    "mse, diverged": ([20.0, 2.0], mse, Y, X, LOWER),
    "numbers": ([9.0, 9.0], mse, X[:, :1] / X[:, :1].std() * 3 + 5, X, "guessing, 4.46: train"),
    "several classes": ([2.0, 1.92], bce, HOT, X, "guessing, 1.91: train longer"),
    "small inputs": ([1.1, 1.1], cross_entropy, Y, X * 1e-3, SMALL),
    "small inputs that were learned": ([1.1, 0.5], cross_entropy, Y, X * 1e-3, ""),
    "large inputs": ([500.0, 400.0], cross_entropy, Y, X * 1e5, LARGE),
    "pixels": ([1.1, 1.1], cross_entropy, Y, (X * 20 + 128).byte(), LONGER),
}


def record(losses, learning="closed form"):
    blocks = [BlockInfo(name, "", 1, learning) for name in "ab"]
    hidden = [Epoch(1, 1, 99.0)]  # local losses are of other quantities
    history = hidden + [Epoch(2, i + 1, loss) for i, loss in enumerate(losses)]
    return Run("readout", 0, {"lr": 10}, blocks, history)


@pytest.mark.parametrize("case", CASES)
def test_a_last_block_that_has_learned_nothing_gets_a_hint(case):
    losses, loss, y, x, expected = CASES[case]
    spec = SimpleNamespace(loss=loss, classes=y.shape[1] if y.dim() > 1 else 3, target=CLASSES)
    hint = hint_for(record(losses), ArraySource(x, y, FORM), spec)
    assert re.search(expected, hint) if expected else hint == ""
    assert not hint_for(record(losses, "solved"), ArraySource(x, y, FORM), spec)
    assert not hint_for(record([]), ArraySource(x, y, FORM), spec)


@pytest.mark.parametrize(
    ("losses", "loss", "expected"),
    [
        ([1.2, 1.1], cross_entropy, f"1.1, is no better than .* guessing, 1.1: {LONGER}"),
        ([400.0, 200.0], cross_entropy, f"200, is far above .* guessing, 1.1: {LOWER}"),
        ([1.2, 0.9], cross_entropy, ""),
        ([3.0, 2.1], bce, "guessing, 2.08"),
        ([1.0, 3.0], mse, f"rose from 1 to 3: {LOWER}"),
        ([3.0, 3.0], mse, ""),
    ],
)
def test_the_labels_of_a_loader_are_unknown(losses, loss, expected):
    loader = LoaderSource(DataLoader(TensorDataset(X, Y)), FORM, lambda y: y)
    hint = hint_for(record(losses), loader, SimpleNamespace(loss=loss, classes=3, target=CLASSES))
    assert re.search(expected, hint) if expected else hint == ""


RUNS = {
    "good": (1.0, {"lr": 0.03, "epochs": 6}, ""),
    "a rate of 10": (1.0, {"lr": 10.0, "epochs": 2}, "far above .* lr=10.0"),
    "inputs of 1e-3": (1e-3, {"epochs": 2}, "no better than .* deviation of 0.00"),
}


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("fit", [tpsgd.fit, tpsgd.fit_backprop])
def test_the_hint_is_the_last_line_of_the_record(fit, case):
    scale, settings, expected = RUNS[case]
    run = fit(mlp(6, 8, 3), (X * scale, Y), batch_size=16, **settings)
    *_, last = str(run).splitlines()
    assert run.as_dict()["hint"] == run.hint and Run.of(run.as_dict()).hint == run.hint
    assert re.search(f"^hint: .*{expected}", last) if expected else "hint" not in last
