"""Optuna chooses the layers, learning rate and rule of an adaptor by held-out accuracy.

    pip install optuna
    python examples/optuna_search.py

`tpsgd_adapt.search` trains a small grid; this searches a larger space. With a storage, such as
`storage="sqlite:///study.db"`, the study can be continued and shared by several machines.
"""

import sys

import torch
from torch import nn

import tpsgd
from tpsgd import adapt, rules

try:
    import optuna
except ImportError:
    sys.exit("this example needs Optuna: pip install optuna")

RULES = {"readout": rules.readout(), "tpsgd-l2": rules.tpsgd_l2(), "drtp": rules.drtp()}
BUDGET = 2 << 20  # bytes: what plans above it is not trained

torch.manual_seed(0)
y = torch.arange(120) % 3
x = 0.5 * torch.rand(120, 3, 8, 8) + 0.3 * torch.eye(3)[y][:, :, None, None]
net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2))  # in place of a pretrained net
encoder = adapt.Backbone(net, {"early": "1", "late": "2"})
train, held_out = adapt.hold_out(adapt.encode(encoder, (x, y)))  # the features, computed once


def accuracy(trial: optuna.Trial) -> float:
    """The held-out accuracy of one choice."""
    tap = trial.suggest_categorical("tap", list(encoder.taps))
    layers = adapt.Layers(
        convs=trial.suggest_int("convs", 0, 1),
        dense=trial.suggest_int("dense", 0, 2),
        filters=trial.suggest_categorical("filters", [4, 8]),
        width=trial.suggest_categorical("width", [16, 32, 64]),
    )
    settings = {
        "rule": RULES[trial.suggest_categorical("rule", list(RULES))],
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "batch_size": 32,
    }
    shape = tuple(train.x[tap].shape[1:])
    plan = tpsgd.plan(layers(shape, 3), shape, others=False, samples=len(train), **settings)
    if plan.peak_bytes > BUDGET:
        raise optuna.TrialPruned
    adaptor = adapt.fit(encoder, train, taps=tap, layers=layers, classes=3, epochs=10, **settings)
    return adaptor.evaluate(held_out)


optuna.logging.set_verbosity(optuna.logging.ERROR)
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(accuracy, n_trials=8)
print(f"best of {len(study.trials)} trials: {study.best_value:.0%} of held-out samples with")
print(", ".join(f"{name} {value}" for name, value in study.best_params.items()))
