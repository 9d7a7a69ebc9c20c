"""The paper in fifty lines: tpSGD on a perceptron, in plain torch.

    W_i  <-  W_i + eta * x_i^T [ d_i * sigma'(z_i) ],     d_i from Table 1

Every hidden layer has a target of its own: row c of a fixed random matrix P_i is the target for all
samples of class c. A layer is trained, frozen, and its outputs become the next layer's inputs. No
gradient leaves a layer, so no activations have to be stored for a backward pass.
`tests/docs/test_paper.py` holds this program equal to `tpsgd.fit`.
"""

import torch
from torch import Tensor

import tpsgd
from tpsgd.projections import Key, normal

# Table 1: where a hidden layer's output y should go, given its target t = P y*
DIRECTION = {
    "tpsgd-l2": lambda y, t: t - y,
    "tpsgd-l1": lambda y, t: (t - y).sign(),
    "drtp": lambda y, t: t,
    "frozen": lambda y, t: torch.zeros_like(y),  # the control: hidden layers stay random
}
Layers = list[tuple[Tensor, Tensor]]  # weight (outputs, inputs) and bias of each layer


def train(layers: Layers, x: Tensor, labels: Tensor, rule: str, eta=0.05, epochs=5, batch=32):
    """The paper's order: train a layer, freeze it, pass its outputs on to the next."""
    y_star = torch.eye(len(layers[-1][1]))  # one-hot labels: the last layer's targets
    for i, (W, b) in enumerate(layers):
        last = i == len(layers) - 1
        P = None if last else normal()((len(b),), len(y_star), Key(seed=0, block=i))
        for _ in range(epochs):
            for x_i, label in zip(x.split(batch), labels.split(batch), strict=True):
                z = x_i @ W.T + b
                y = z if last else torch.tanh(z)
                d = y_star[label] - y if last else DIRECTION[rule](y, P[label])
                delta = (d if last else d * (1 - y * y)) / len(x_i)  # times sigma'(z)
                W += eta * delta.T @ x_i
                b += eta * delta.sum(0)
        x = torch.tanh(x @ W.T + b)  # frozen: the next layer's inputs


def predict(layers: Layers, x: Tensor) -> Tensor:
    """The class with the largest output."""
    for W, b in layers[:-1]:
        x = torch.tanh(x @ W.T + b)
    return (x @ layers[-1][0].T + layers[-1][1]).argmax(1)


if __name__ == "__main__":
    digits = tpsgd.data.load("digits")
    (x, y), (x_test, y_test) = digits.train, digits.test
    for rule in DIRECTION:
        torch.manual_seed(0)
        sizes = [(64, 128), (128, 128), (128, 10)]
        layers = [(torch.randn(n, m) / m**0.5, torch.zeros(n)) for m, n in sizes]
        train(layers, x.flatten(1), y, rule, epochs=15)
        accuracy = (predict(layers, x_test.flatten(1)) == y_test).float().mean()
        print(f"{rule:10} {accuracy:.1%} of the test digits")
