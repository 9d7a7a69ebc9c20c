"""How recurrent cells begin: reaches, zeros, spectral radii."""

import pytest
import torch
from helpers import seeded
from torch import nn

from tpsgd import Recurrent, TpsgdError
from tpsgd.nets import inits
from tpsgd.nets.inits import spectral_radius


def made(init, inputs=40, hidden=50):
    """W_X and W_H of a fresh cell; its biases are zero."""
    one = seeded(lambda: Recurrent(inputs, hidden, init=init)).cells[0]
    assert not one.bias_x.any() and not one.bias_h.any()
    return one.weight_x.detach(), one.weight_h.detach()


def radius(weight):
    return float(torch.linalg.eigvals(weight.double()).abs().max())


def test_zeros():
    assert not any(w.any() for w in made(inits.zeros()))
    layer = Recurrent.paper(3, 4, init=inits.zeros())
    assert torch.equal(layer(torch.randn(2, 5, 3)), torch.full((2, 4), 0.5))


@pytest.mark.parametrize(
    ("init", "reaches"),
    [
        (inits.uniform(), (0.01, 0.01)),
        (inits.uniform(0.5), (0.5, 0.5)),
        (inits.scaled_uniform(), (1.0, 0.1)),
        (inits.scaled_uniform(3.0, 0.4), (3.0, 0.4)),
        (inits.reservoir(x=0.2), (0.2, None)),
        (inits.reservoir(), (3 * 32 / 40, None)),  # there are 40 features
    ],
)
def test_reaches(init, reaches):
    for weight, reach in zip(made(init), reaches, strict=True):
        if reach is not None:
            assert 0.97 * reach < weight.abs().max() <= reach
            assert abs(weight.mean()) < 0.05 * reach
            assert float(weight.std()) == pytest.approx(reach / 3**0.5, rel=0.05)


@pytest.mark.parametrize("wanted", [0.5, 0.9, 1.3])
@pytest.mark.parametrize("hidden", [1, 2, 7, 64, 200])
def test_a_reservoirs_spectral_radius(hidden, wanted):
    W_H = made(inits.reservoir(wanted), hidden=hidden)[1]
    assert radius(W_H) == pytest.approx(wanted, rel=0.01)


MATRICES = {
    "normal": lambda n: torch.randn(n, n),
    "symmetric": lambda n: torch.randn(n, n) + torch.randn(n, n).T,
    "a rotation": lambda n: torch.linalg.qr(torch.randn(n, n))[0],
    "large": lambda n: 1e8 * torch.randn(n, n),
    "small": lambda n: 1e-12 * torch.randn(n, n),
    "half precision": lambda n: torch.randn(n, n).half(),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("n", [1, 3, 30, 128])
def test_the_spectral_radius_is_the_largest_eigenvalue(kind, n):
    with torch.random.fork_rng():
        torch.manual_seed(n)
        weight = MATRICES[kind](n)
    held = weight.clone()
    assert spectral_radius(weight) == pytest.approx(radius(weight), rel=0.01)
    assert torch.equal(weight, held)


def test_the_spectral_radius_of_nothing_is_zero():
    assert spectral_radius(torch.zeros(4, 4)) == 0.0
    assert spectral_radius(torch.tensor([[0.0, 1.0], [0.0, 0.0]])) == 0.0


def test_numbers_come_from_torchs_generator():
    for init in (inits.uniform(), inits.scaled_uniform(), inits.reservoir()):
        first, again = made(init), made(init)
        assert all(map(torch.equal, first, again))
        other = seeded(lambda init=init: Recurrent(40, 50, init=init), 1).cells[0]
        assert not torch.equal(other.weight_x, first[0])


def test_the_two_directions_begin_differently():
    layer = Recurrent(4, 6, bidirectional=True)
    assert not torch.equal(layer.cells[0].weight_h, layer.cells[1].weight_h)


def test_filling_weights_that_learn():
    weights = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 3))]
    inits.reservoir()(*weights)
    assert all(w.requires_grad and w.grad_fn is None and w.all() for w in weights)


def test_inits_have_names():
    assert all(map(torch.equal, made("scaled-uniform"), made(inits.scaled_uniform())))
    assert not Recurrent(3, 4, init="zeros").cells[0].weight_h.any()
    with pytest.raises(TpsgdError, match="unknown init 'ones': choose zeros, uniform"):
        Recurrent(3, 4, init="ones")
