"""What the core tests share: small data, small models, and ways to look at a model."""

import os
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tpsgd import Memory, Padded, Place, losses, projections, rules

# On tensors this small, threads only wait for one another; `make units` also tries two.
torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))


def points(n: int = 48, features: int = 6, classes: int = 3, seed: int = 0, apart: float = 2.0):
    """Gaussian clouds, one per class, that a linear layer can tell apart; (x, y)."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=g) * apart
    y = torch.arange(n) % classes
    return centres[y] + torch.randn(n, features, generator=g), y


def images(n: int = 32, channels: int = 2, size: int = 6, classes: int = 3, seed: int = 0):
    """As `points`, shaped as images."""
    x, y = points(n, channels * size * size, classes, seed, apart=1.0)
    return x.view(n, channels, size, size), y


def sequences(n: int = 12, steps: int = 5, features: int = 4, classes: int = 3, seed: int = 0):
    """As `points`, a step after another, in float64."""
    x, y = points(n, steps * features, classes, seed, apart=1.0)
    return x.view(n, steps, features).double(), y


def tokens(n: int = 12, steps: int = 5, kinds: int = 7, classes: int = 3, seed: int = 0):
    """Sequences of whole numbers, of which each class has its own favourites."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return (2 * y[:, None] + torch.randint(0, kinds // 2, (n, steps), generator=g)) % kinds, y


def ragged(x: Tensor) -> Padded:
    """The same sequences, cut to lengths from 1 to all steps, in no order."""
    lengths = 1 + (torch.arange(len(x)) * 3 + 4) % x.shape[1]
    return Padded(x.clone(), lengths)


def install_package(folder, name: str, groups: dict[str, dict[str, str]]) -> None:
    """A distribution with these entry points in a folder, for `monkeypatch.syspath_prepend`."""
    about = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\n{n} = {v}" for group, points in groups.items() for n, v in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))


def seeded(make, seed: int = 0) -> nn.Module:
    """The module that `make` builds from this seed, leaving the global generator alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def mlp(*widths: int, activation=nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Linear layers of these widths with an activation after each but the last."""

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), activation()]
        return nn.Sequential(*layers[:-1])

    return seeded(make, seed)


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of a model's parameters and buffers."""
    return {
        name: t.detach().clone()
        for name, t in model.state_dict().items()
        if not isinstance(t, nn.UninitializedParameter)
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def close(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-9, atol: float = 1e-11):
    """Assert that two sets of named tensors are equal up to rounding."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def folded(**settings) -> dict:
    """Settings of `fit`, those that save memory (reuse=, slices=, budget=, ...) as memory=."""
    names = settings.keys() & {field.name for field in fields(Memory)}
    memory = Memory(**{name: settings.pop(name) for name in names})
    return settings | {"memory": memory} if names else settings


def fixed(codes: dict[int, Tensor]) -> projections.Projection:
    """A projection with given codes per block (counted from 0)."""

    def rows(key, classes, shape, device):
        assert tuple(codes[key.block].shape[1:]) == shape
        return codes[key.block][classes].clone()

    return projections.Projection("fixed", rows)


def quartic(y: Tensor, target: Tensor) -> Tensor:
    """A loss that the library does not know: sum (y - t)^4 over units, mean over the batch."""
    return (y - target).pow(4).sum() / len(y)


def with_full(values, full) -> list:
    """Parameters of a test; those in `full` only for make test-all."""
    return [pytest.param(v, marks=[pytest.mark.full] * (v in full)) for v in values]


LOCAL = {
    "tpsgd_l1": rules.tpsgd_l1,
    "tpsgd_l2": rules.tpsgd_l2,
    "tpsgd": lambda *a, **k: rules.tpsgd(quartic, *a, **k),
    "drtp": rules.drtp,
    # with a scale by hand: calibration has tests of its own, in engine/test_calibration.py
    "readout": lambda *a, **k: rules.readout(False, *a, **({"scale": 4.0} | k)),
    "readout_learned": lambda *a, **k: rules.readout(True, *a, **({"scale": 4.0} | k)),
}
LOCKED = {"dfa": rules.dfa, "sdfa": rules.sdfa}
DRAWN = LOCAL | LOCKED  # every rule with a projection
PLACES = list(Place)
LOSSES = [losses.mse, losses.cross_entropy, losses.bce]


class Residual(nn.Module):
    """x + W tanh(V x): a module whose inside the library does not know."""

    def __init__(self, width: int):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Probe(nn.Module):
    """Hands its input on and keeps what `look` says about it."""

    def __init__(self, look):
        super().__init__()
        self.look, self.seen = look, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.look(x))
        return x


class Wall(nn.Module):
    """Hands its input on, and refuses to let a gradient back."""

    def forward(self, x: Tensor) -> Tensor:
        return _Wall.apply(x)


class _Wall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        raise AssertionError("a gradient crossed from one block into another")


def leaves(output: Tensor) -> Iterator[Tensor]:
    """Every leaf that a graph reaches from its output."""
    todo, done = [output.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [following for following, _ in node.next_functions]


def distance(a: nn.Module, b: nn.Module) -> float:
    """The largest difference between two models' weights and statistics."""
    one, other = state(a), state(b)
    return max(float((one[k].double() - other[k].double()).abs().max()) for k in one)
