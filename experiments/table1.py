"""Table 1 of the paper, checked: the step that `fit` takes against the printed formula in numpy.

    python -m experiments.table1 --out results

A net of random weights takes one step of plain gradient descent on random samples. Its change by
`fit`, whose derivatives are written out, is compared with the formula of the table in numpy and
with autograd on the local loss of the table's second column. The printed formulas leave out the
input factor x_i^T and the mean over the batch; both are written out here. A difference is the
largest one of any weight or bias, relative to the largest change. With DFA, sDFA and DRTP the
paper also says how their signals are related: e_drtp = (1 + e_sdfa) / 2 = y*.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tpsgd
from experiments.common import Row, program
from experiments.rows import Rows, row_arguments
from tpsgd import rules
from tpsgd.projections import Key, normal
from tpsgd.train import simultaneous

Array = NDArray[Any]
ETA, WIDTHS = 0.1, (12, 16, 14, 5)
SAMPLES = 40
RULES = {name: rules.ALL[name].make for name in ("dfa", "sdfa", "drtp", "tpsgd-l1", "tpsgd-l2")}
# Table 1, last column: d_i, by which w_i changes as eta x_i^T [ d_i * sigma'(z_i) ]
PRINTED: dict[str, Callable[[Array, Array, Array, Array], Array]] = {
    "dfa": lambda P, y_star, y_N, y: (y_star - y_N) @ P,
    "sdfa": lambda P, y_star, y_N, y: np.sign(y_star - y_N) @ P,
    "drtp": lambda P, y_star, y_N, y: y_star @ P,
    "tpsgd-l1": lambda P, y_star, y_N, y: np.sign(y_star @ P - y),
    "tpsgd-l2": lambda P, y_star, y_N, y: y_star @ P - y,
}
# Table 1, second column: J_i, half of it for l2; DFA, sDFA and DRTP lower -<y_i, P_i s>
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tpsgd-l1": lambda y, target: (target - y).abs().sum(),
    "tpsgd-l2": lambda y, target: (target - y).square().sum() / 2,
}
ACTIVATIONS: dict[str, tuple[type[nn.Module], Callable[[Array], Array], Any]] = {
    "tanh": (nn.Tanh, np.tanh, lambda z: 1 - np.tanh(z) ** 2),
    "sigmoid": (
        nn.Sigmoid,
        lambda z: 1 / (1 + np.exp(-z)),
        lambda z: np.exp(-z) / (1 + np.exp(-z)) ** 2,
    ),
    "leaky-relu": (
        nn.LeakyReLU,
        lambda z: np.where(z > 0, z, 0.01 * z),
        lambda z: np.where(z > 0, 1.0, 0.01),
    ),
}


def net(activation: str, seed: int) -> nn.Sequential:
    """Two hidden layers and a linear one, of random weights in float64."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, units in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, units), ACTIVATIONS[activation][0]()]
    return nn.Sequential(*layers[:-1]).double()


def step_of_fit(model: nn.Sequential, rule: str, x: Tensor, labels: Tensor, seed: int) -> Any:
    """The change of every weight and bias by one step of `fit`, and where it came from."""
    before = [p.detach().clone() for p in model.parameters()]
    run = tpsgd.fit(
        model, (x, labels), rule=RULES[rule](), order=simultaneous, epochs=1, seed=seed,
        batch_size=len(x), optimizer=torch.optim.SGD, lr=ETA, loss=tpsgd.cross_entropy,
    )  # fmt: skip
    after = [p.detach() for p in model.parameters()]
    return [(b - a).numpy() for a, b in zip(before, after, strict=True)], run


def printed(
    weights: list[Array], rule: str, activation: str, x: Array, labels: Array, seed: int
) -> list[Array]:
    """The change of every hidden weight and bias by the formula of Table 1."""
    _, sigma, derivative = ACTIVATIONS[activation]
    y_star, inputs, z = np.eye(WIDTHS[-1])[labels], [x], []
    for W, b in zip(weights[::2], weights[1::2], strict=True):
        z.append(inputs[-1] @ W.T + b)
        inputs.append(sigma(z[-1]))
    exponentials = np.exp(z[-1] - z[-1].max(1, keepdims=True))
    y_N = exponentials / exponentials.sum(1, keepdims=True)
    changes = []
    for i, width in enumerate(WIDTHS[1:-1]):
        P = normal()((width,), WIDTHS[-1], Key(seed=seed, block=i)).double().numpy()
        delta = PRINTED[rule](P, y_star, y_N, inputs[i + 1]) * derivative(z[i]) / len(x)
        changes += [ETA * delta.T @ inputs[i], ETA * delta.sum(0)]
    return changes


def by_autograd(
    model: nn.Sequential, rule: str, x: Tensor, labels: Tensor, seed: int
) -> list[Array]:
    """The same by autograd on the local loss of each layer."""
    y_star = torch.eye(WIDTHS[-1], dtype=x.dtype)[labels]
    error = y_star - model(x).softmax(1).detach()
    signal = {"dfa": error, "sdfa": error.sign()}.get(rule, y_star)
    changes = []
    for i, width in enumerate(WIDTHS[1:-1]):
        P = normal()((width,), WIDTHS[-1], Key(seed=seed, block=i)).double()
        y, target = model[2 * i : 2 * i + 2](x), signal @ P
        loss = LOSSES.get(rule, lambda y, target: -(y * target).sum())(y, target) / len(x)
        grads = torch.autograd.grad(loss, list(model[2 * i].parameters()))
        changes += [-ETA * grad.numpy() for grad in grads]
        x = y.detach()
    return changes


def largest(ours: list[Array], theirs: list[Array]) -> float:
    """The largest difference between changes, relative to the largest change."""
    gaps = [np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)]
    return float(max(gaps) / max(np.abs(b).max() for b in theirs))


def compare(rule: str, activation: str, seed: int) -> Row:
    """One step of one net: the differences between the three ways to compute it."""
    model, generator = net(activation, seed), torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
    labels = torch.randint(WIDTHS[-1], (SAMPLES,), generator=generator)
    weights = [p.detach().numpy().copy() for p in model.parameters()]
    formula = printed(weights, rule, activation, x.numpy(), labels.numpy(), seed)
    traced = by_autograd(model, rule, x, labels, seed)
    changes, run = step_of_fit(model, rule, x, labels, seed)
    hidden = changes[:-2]  # the last layer has no projection
    return {
        "fit_and_formula": largest(hidden, formula),
        "fit_and_autograd": largest(hidden, traced),
        "learning": [block.learning for block in run.blocks[:-1]],
        "largest_change": float(max(np.abs(c).max() for c in hidden)),
    }


def signals_related(seed: int) -> float:
    """The largest difference between (1 + sign(y* - y_N)) / 2 and y*, for y_N in (0, 1)."""
    generator = np.random.default_rng(seed)
    y_N = generator.uniform(1e-6, 1 - 1e-6, (1000, 10))
    y_star = np.eye(10)[generator.integers(10, size=1000)]
    return float(np.abs((1 + np.sign(y_star - y_N)) / 2 - y_star).max())


def measure(rows: Rows, rule: str, activation: str, seeds: list[int]) -> None:
    """The row of one rule under one activation."""

    def compute() -> Row:
        each = [compare(rule, activation, seed) for seed in seeds]
        names = "fit_and_formula", "fit_and_autograd"
        return {name: max(row[name] for row in each) for name in names} | {"each": each}

    settings = {"rule": rule, "activation": activation, "seeds": seeds}
    row = rows.measure(f"{rule}, {activation}", settings, compute)
    if row is not None:
        formula, autograd = row["fit_and_formula"], row["fit_and_autograd"]
        gaps = f"formula {formula:.1e}  autograd {autograd:.1e}"
        print(f"{rule:9} {activation:11} {gaps}", flush=True)


def main() -> None:
    """Compare every rule under every activation."""
    parser = row_arguments(__doc__, restarts=25)
    parser.add_argument("--only", nargs="+", choices=list(RULES), default=list(RULES))
    options = parser.parse_args()
    options.device = "cpu"  # numpy has no other
    settings = {"widths": WIDTHS, "samples": SAMPLES, "eta": ETA, "dtype": "float64"}
    rows = Rows("table1", options, settings)
    seeds = list(range(2 if options.smoke else options.restarts))
    rows.record["drtp_from_sdfa"] = max(map(signals_related, seeds))
    for rule in options.only:
        for activation in ACTIVATIONS:
            measure(rows, rule, activation, seeds)


if __name__ == "__main__":
    program(main)
