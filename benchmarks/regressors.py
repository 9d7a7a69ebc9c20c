"""TPSGDRegressor against its controls on three of scikit-learn's sets: R² of held-out folds.

    python benchmarks/regressors.py --out results/regressors.json

One hidden layer of 256 ReLUs, Adam at 1e-3, batches of 128, 60 epochs, five folds with two seeds.
The controls have random hidden layers: `frozen` with a last layer by Adam, `frozen, ridge` with one
by ridge regression, its penalty chosen by cross-validation inside the training folds.
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from classifiers import write_result
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.metrics import r2_score
from sklearn.model_selection import KFold
from sklearn.neural_network import MLPRegressor
from sklearn.preprocessing import StandardScaler
from threadpoolctl import threadpool_limits

import tpsgd

EPOCHS, BATCH, WIDTH, FOLDS, SEEDS = 60, 128, 256, 5, 2
RULES = ("readout", "dfa", "tpsgd-l2", "frozen")


def sets() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Samples and targets; of the digits, the right half of an image from the left half."""
    images = load_digits().images / 16
    left, right = images[:, :, :4].reshape(-1, 32), images[:, :, 4:].reshape(-1, 32)
    return {
        "diabetes": load_diabetes(return_X_y=True),
        "friedman1": make_friedman1(2000, noise=1.0, random_state=1),
        "digits, right half": (left[:, left.std(0) > 0.05], right[:, right.std(0) > 0.05]),
    }


def ridge() -> RidgeCV:
    """Ridge regression whose penalty is chosen on the training samples."""
    return RidgeCV(np.logspace(-2, 4, 13))


def predictions(X: Any, y: Any, X_test: Any, seed: int) -> dict[str, np.ndarray]:
    """What every regressor says about the held-out samples; y is standardised."""
    local = {"epochs": EPOCHS, "batch_size": BATCH, "tol": None, "random_state": seed}
    arms: dict[str, Any] = {rule: tpsgd.TPSGDRegressor((WIDTH,), rule, **local) for rule in RULES}
    arms["MLPRegressor"] = MLPRegressor(
        hidden_layer_sizes=(WIDTH,), batch_size=BATCH, max_iter=EPOCHS, tol=0.0, alpha=0.0,
        n_iter_no_change=EPOCHS + 1, random_state=seed,
    )  # fmt: skip
    arms["ridge"] = ridge()
    targets = {name: arm.fit(X, y).predict(X_test) for name, arm in arms.items()}
    with torch.no_grad():
        layers = arms["frozen"].model_[:3]
        features, held_out = (layers(torch.from_numpy(x)).numpy() for x in (X, X_test))
    return targets | {"frozen, ridge": ridge().fit(features, y).predict(held_out)}


def measure(X: np.ndarray, y: np.ndarray) -> dict[str, list[float]]:
    """R² of every regressor, for each fold and seed."""
    scores: dict[str, list[float]] = {}
    for train, test in KFold(FOLDS, shuffle=True, random_state=1).split(X):
        scale_x, scale_y = StandardScaler(), StandardScaler()
        x, x_test = scale_x.fit_transform(X[train]), scale_x.transform(X[test])
        rows = y.reshape(len(y), -1)
        t, t_test = scale_y.fit_transform(rows[train]), scale_y.transform(rows[test])
        for seed in range(SEEDS):
            target = t[:, 0] if t.shape[1] == 1 else t
            for name, values in predictions(x, target, x_test, seed).items():
                value = r2_score(
                    t_test, values.reshape(t_test.shape), multioutput="variance_weighted"
                )
                scores.setdefault(name, []).append(value)
    return scores


def main() -> None:
    """Measure all sets, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", ConvergenceWarning)  # MLPRegressor warns after its last epoch
    torch.set_num_threads(1)
    arms: dict[str, Any] = {}
    with threadpool_limits(1):
        for name, (X, y) in sets().items():
            arms[name] = measure(X, y)
            for arm, scores in arms[name].items():
                print(f"{name}, {arm}: {np.mean(scores):.3f} ± {np.std(scores):.3f}", flush=True)
    settings = {"hidden": [WIDTH], "epochs": EPOCHS, "folds": FOLDS, "seeds": SEEDS}
    write_result(arguments.out, "regressors", "", settings, arms)


if __name__ == "__main__":
    main()
