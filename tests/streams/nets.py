"""What the tests of streams share: digits, small nets, and many calls of `partial_fit`."""

import torch
from torch import nn

import tpsgd
from tpsgd import Recurrent

X, Y = tpsgd.data.load("digits").train
X = X.float()


def mlp(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs))


def cnn(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, outputs)
    )


def recurrent(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(1, 2), Recurrent(8, 32), nn.Linear(32, outputs))


def normed(outputs=10):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1),
        nn.Linear(16, outputs),
    )  # fmt: skip


def learn(stream, samples=300, size=25, start=0):
    for i in range(start, start + samples, size):
        stream.partial_fit(X[i : i + size], Y[i : i + size])
    return stream


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(before, after):
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
