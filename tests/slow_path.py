"""Training as one would write it first: autograd of each block's loss, torch's optimizers.

The oracle of `fit`: it shares with it the cut into blocks, the definition of each objective's loss
(except readout's, which is written anew), the class codes and the order of samples, and none of
what makes a step fast.
"""

import math
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

import tpsgd
from tpsgd import Recurrent
from tpsgd.maths.random import Key, permutation
from tpsgd.objectives import Objective, Place, Signal, Site, output
from tpsgd.projections import normal
from tpsgd.rules import CELLS, SCALE

ADAM = partial(torch.optim.Adam, lr=1e-3, foreach=False)


def outputs(block, x):
    """A block's values before and after its activation, and at its end."""
    values = {}
    modules = list(block.modules)
    before = modules.index(block.layer) + len(block.between)
    after = before + (block.activation is not None)
    for i, module in enumerate(modules):
        x = module(x)
        values |= {Place.BEFORE: x} if i == before else {}
        values |= {Place.AFTER: x} if i == after else {}
    return values | {Place.END: x}


class SlowBlock:
    """A block, its objective and its optimizer."""

    def __init__(self, block, x, rule, loss, last, classes, seed, optimizer):
        self.block, self.rule, self.last = block, rule, last
        self.at = Place.END if last else rule.at
        shape = tuple(outputs(block, x[:2])[self.at].shape[1:])
        self.objective = Objective(lambda y, s: y.sum())
        key, maps = Key(seed, block.key), block.maps and len(shape) > 1
        self.learns = last or rule.objective is not None
        if last:
            self.objective = output(loss)
        elif self.learns:
            site = Site(shape, classes, key, maps=maps, loss=loss, dtype=x.dtype)
            self.objective = rule.objective(site)
        if self.learns and not last and rule.name.startswith("readout"):
            self.objective = written_anew(site, self.objective.learned)
        self.tensors = [t.clone() for t in self.objective.tensors]
        learned = self.tensors if self.objective.learned else []
        self.calibrates = self.learns and not last and rule.name.startswith("readout")
        self.params = [*block.named_parameters().values(), *learned]
        for p in self.params:
            p.requires_grad_(True)
        self.optimizer = optimizer(self.params) if self.learns and self.params else None

    def learn(self, x, s):
        """One step on the local loss of a batch."""
        y = outputs(self.block, x.detach())[self.at]
        loss = self.objective.loss(y, s, *self.tensors)
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        self.optimizer.step()
        return float(loss.detach())

    def calibrate(self, x):
        """Divide readout's scale by the root mean square of the features in the first batch."""
        if not self.calibrates:
            return
        with torch.no_grad(), statistics_restored(self.block):
            f = self.objective.loss.features(outputs(self.block, x)[self.at])
        self.objective.loss.scale.div_(f.square().mean().sqrt())


def written_anew(site, learned):
    """Readout's loss with nothing of the library but the class codes."""
    side = int(CELLS**0.5) if site.maps else 1
    grid = [min(side, n) for n in site.shape[1:]] if site.maps else []
    d = site.shape[0] * math.prod(grid)
    units = site.shape[0] if site.maps else d
    scale = torch.tensor(SCALE / (units * d) ** 0.5, dtype=site.dtype)

    def features_of(y):
        return (F.adaptive_avg_pool2d(y, grid) if grid else y).flatten(1)

    def loss(y, s, P):
        return F.cross_entropy(features_of(y) @ P.T * scale, s)

    loss.features, loss.scale = features_of, scale
    return Objective(loss, None, (site.draw(normal(), (d,)),), learned)


def error(y, labels, loss):
    """Minus the derivative of each sample's loss with respect to the net's output."""
    y = y.detach().requires_grad_()
    (dy,) = torch.autograd.grad(loss.value(y, labels) * len(y), y)
    return -dy


def slow_fit(
    model, data, rule, order, loss=None, optimizer=ADAM, epochs=2, batch_size=8, seed=0
):  # fmt: skip
    """What `fit` does, as plainly as possible; the last block's loss of every batch."""
    x, y = data
    loss, classes = loss or rule.loss, int(y.max()) + 1
    model.train()
    assert not any(isinstance(m, (Recurrent, nn.Dropout)) for m in model.modules())
    blocks, inputs = [], x
    cut = tpsgd.split(model)
    for block in cut:
        last = block is cut[-1]
        with torch.no_grad():  # in evaluation mode: batch norm must not see these samples
            model.eval()
            made = SlowBlock(block, inputs, rule, loss, last, classes, seed, optimizer)
            inputs = outputs(block, inputs)[Place.END]
            model.train()
        blocks.append(made)
    for b in blocks:
        for module in b.block.modules:
            module.train(b.learns)
    stages = [[b] for b in blocks] if order is tpsgd.sequential else [blocks]
    frozen, losses = [], []
    for stage in stages:
        order = torch.cat(list(permutation(len(x), Key(seed, stage[0].block.key, 0))))
        _calibrate(stage, frozen, x[order[:batch_size]])
        for epoch in range(epochs):
            order = torch.cat(list(permutation(len(x), Key(seed, stage[0].block.key, epoch))))
            for index in order.split(batch_size):
                values, labels = x[index], y[index]
                with torch.no_grad():
                    for b in frozen:
                        values = outputs(b.block, values)[Place.END]
                losses.append(_step(stage, values, labels, rule, loss))
        for b in stage:
            for module in b.block.modules:
                module.eval()
        frozen += stage
    return losses


@contextmanager
def statistics_restored(block):
    """Leave no trace in the block's batch norms."""
    tracked = [m for m in block.modules if isinstance(m, nn.BatchNorm2d)]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in tracked]
    yield
    for module, state in zip(tracked, before, strict=True):
        module.load_state_dict(state)


@torch.no_grad()
def _calibrate(stage, frozen, x):
    """The first batch through the net as it is before the stage learns."""
    for b in frozen:
        x = outputs(b.block, x)[Place.END]
    for b in stage:
        b.calibrate(x)
        with statistics_restored(b.block):
            x = outputs(b.block, x)[Place.END]


def _step(stage, x, labels, rule, loss):
    """Every block of a stage learns from a batch, each from the same weights of the others."""
    inputs, signal = [], labels
    for b in stage:
        inputs.append(x)
        with torch.no_grad(), statistics_restored(b.block) if b.learns else nullcontext():
            x = outputs(b.block, x)[Place.END]  # learning computes it again, which counts
    if rule.signal is not Signal.LABEL:
        signal = error(x, labels, loss)
        signal = signal.sign() if rule.signal is Signal.ERROR_SIGN else signal
    losses = [0.0]
    for b, x in zip(stage, inputs, strict=True):
        if b.learns:
            losses.append(b.learn(x, labels if b.last else signal))
    return losses[-1]
