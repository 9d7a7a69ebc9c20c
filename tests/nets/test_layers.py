"""Closed form = autograd = Table 1, for every rule, block kind, activation and place, in float64.

Table 1 is written out here with nothing but sums and products, the input factor that the printed
table leaves out included:

    W_i  <-  W_i + eta * x_i^T [ d_i * sigma'(z_i) ]        (mean over the batch)
"""

from functools import cache, partial
from itertools import product
from math import ceil, erf, exp, floor, pi, prod, sqrt, tanh

import pytest
import torch
from helpers import quartic, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import tpsgd
from tpsgd import rules
from tpsgd.engine.solvers.equations import inputs_of
from tpsgd.maths.random import Key
from tpsgd.nets import layers
from tpsgd.nets.autograd import Autograd
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.layers import LAYERS, convolution, gives_maps, layer_kind
from tpsgd.objectives import Place, Signal, Site, move
from tpsgd.projections import normal

CLASSES = 3
LABELS = torch.tensor([0, 2, 1, 1, 0])
ERROR = torch.randn(5, CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

# ---- sigma' by its formula, number by number -----------------------------------------------------


def sigmoid(z: float) -> float:
    return 1 / (1 + exp(-z))


def gelu_tanh_slope(z: float) -> float:
    u = sqrt(2 / pi) * (z + 0.044715 * z**3)
    du = sqrt(2 / pi) * (1 + 3 * 0.044715 * z**2)
    return 0.5 * (1 + tanh(u)) + 0.5 * z * (1 - tanh(u) ** 2) * du


ACTIVATIONS = {
    "none": (None, lambda z: 1.0),
    "leaky_relu": (nn.LeakyReLU(0.01), lambda z: 1.0 if z > 0 else 0.01),
    "leaky_relu_falling": (nn.LeakyReLU(-0.3), lambda z: 1.0 if z > 0 else -0.3),
    "relu": (nn.ReLU(), lambda z: 1.0 if z > 0 else 0.0),
    "relu_in_place": (nn.ReLU(inplace=True), lambda z: 1.0 if z > 0 else 0.0),
    "tanh": (nn.Tanh(), lambda z: 1 - tanh(z) ** 2),
    "sigmoid": (nn.Sigmoid(), lambda z: sigmoid(z) * (1 - sigmoid(z))),
    "gelu": (
        nn.GELU(),
        lambda z: 0.5 * (1 + erf(z / sqrt(2))) + z * exp(-z * z / 2) / sqrt(2 * pi),
    ),
    "gelu_tanh": (nn.GELU(approximate="tanh"), gelu_tanh_slope),
    "silu": (nn.SiLU(), lambda z: sigmoid(z) * (1 + z * (1 - sigmoid(z)))),
    "softplus": (nn.Softplus(), sigmoid),
    "softplus_sharp": (
        nn.Softplus(beta=3.0, threshold=2.0),
        lambda z: 1.0 if 3 * z > 2 else sigmoid(3 * z),
    ),
}

# ---- layers, and their gradient x^T dz with loops over the kernel --------------------------------

KINDS = {
    "linear": (lambda: [nn.Linear(4, 6)], (4,)),
    "linear_no_bias": (lambda: [nn.Linear(4, 6, bias=False)], (4,)),
    "linear_on_tokens": (lambda: [nn.Linear(4, 6)], (3, 4)),
    "linear_batchnorm": (lambda: [nn.Linear(4, 6), nn.BatchNorm1d(6)], (4,)),
    "conv1d": (
        lambda: [nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2)],
        (4, 9),
    ),
    "conv1d_same": (lambda: [nn.Conv1d(2, 6, 3, dilation=2, padding="same")], (2, 5)),
    "conv1d_batchnorm": (lambda: [nn.Conv1d(2, 6, 2), nn.BatchNorm1d(6)], (2, 5)),
    "conv2d": (lambda: [nn.Conv2d(2, 6, 3)], (2, 5, 6)),
    "conv2d_all_options": (
        lambda: [
            nn.Conv2d(4, 6, (3, 2), (2, 1), padding=(1, 2), dilation=(1, 2), groups=2, bias=False)
        ],
        (4, 5, 4),
    ),
    "conv2d_same": (lambda: [nn.Conv2d(2, 6, (3, 5), padding="same")], (2, 4, 4)),
    "conv2d_valid": (lambda: [nn.Conv2d(2, 6, 2, padding="valid")], (2, 4, 4)),
    "conv2d_depthwise": (lambda: [nn.Conv2d(3, 6, 3, padding=1, groups=3)], (3, 4, 4)),
    "conv2d_batchnorm": (lambda: [nn.Conv2d(2, 6, 2, bias=False), nn.BatchNorm2d(6)], (2, 4, 4)),
    "conv2d_one_channel": (lambda: [nn.Conv2d(1, 9, 3)], (1, 5, 6)),
    "conv2d_one_channel_all_options": (
        lambda: [nn.Conv2d(1, 6, (3, 2), (2, 1), padding=(1, 2), dilation=(1, 2), bias=False)],
        (1, 5, 4),
    ),
}


def taps(layer, x: Tensor):
    """For each kernel offset, the inputs that it meets at every output position."""
    k, s, d = layer.kernel_size, layer.stride, layer.dilation
    if isinstance(layer.padding, str):
        same = layer.padding == "same"
        pads = [d[i] * (k[i] - 1) // 2 if same else 0 for i in range(len(k))]
    else:
        pads = layer.padding
    padded = x.new_zeros(*x.shape[:2], *(n + 2 * p for n, p in zip(x.shape[2:], pads, strict=True)))
    padded[(..., *(slice(p, p + n) for n, p in zip(x.shape[2:], pads, strict=True)))] = x
    outs = [(padded.shape[2 + i] - d[i] * (k[i] - 1) - 1) // s[i] + 1 for i in range(len(k))]
    for offset in product(*map(range, k)):
        where = [
            slice(o * d[i], o * d[i] + s[i] * (outs[i] - 1) + 1, s[i]) for i, o in enumerate(offset)
        ]
        yield offset, padded[(..., *where)]


def layer_output(layer, x: Tensor) -> Tensor:
    """z = x W + b, in sums."""
    w = layer.weight.detach()
    if isinstance(layer, nn.Linear):
        z = torch.einsum("n...i,oi->n...o", x, w)
        return z if layer.bias is None else z + layer.bias.detach()
    z, groups = 0, layer.groups
    for offset, part in taps(layer, x):
        one = w[(..., *offset)]
        z = z + torch.cat(
            [
                torch.einsum("nc...,oc->no...", p, o)
                for p, o in zip(part.chunk(groups, 1), one.chunk(groups, 0), strict=True)
            ],
            1,
        )
    if layer.bias is not None:
        z = z + layer.bias.detach().view(-1, *[1] * (z.dim() - 2))
    return z


def layer_gradient(layer, x: Tensor, dz: Tensor) -> dict[str, Tensor]:
    """x^T dz, and the sum of dz for the bias."""
    if isinstance(layer, nn.Linear):
        found = {"weight": torch.einsum("n...o,n...i->oi", dz, x)}
        return found if layer.bias is None else found | {"bias": dz.flatten(0, -2).sum(0)}
    dw, groups = torch.zeros_like(layer.weight), layer.groups
    for offset, part in taps(layer, x):
        dw[(..., *offset)] = torch.cat(
            [
                torch.einsum("no...,nc...->oc", d, p)
                for d, p in zip(dz.chunk(groups, 1), part.chunk(groups, 1), strict=True)
            ]
        )
    return {"weight": dw} if layer.bias is None else {"weight": dw, "bias": per_channel(dz)}


def per_channel(t: Tensor) -> Tensor:
    return t.transpose(0, 1).flatten(1).sum(1)


class BatchNorm:
    """Batch normalisation over the channels (dimension 1), forward and back by the formula."""

    def __init__(self, norm, out: Tensor):
        self.norm, self.count = norm, out.numel() // out.shape[1]
        self.like = (1, -1, *[1] * (out.dim() - 2))
        mean = per_channel(out).view(self.like) / self.count
        var = per_channel((out - mean) ** 2).view(self.like) / self.count
        self.inverse = 1 / (var + norm.eps).sqrt()
        self.hat = (out - mean) * self.inverse
        self.gamma = norm.weight.detach().view(self.like)
        self.z = self.gamma * self.hat + norm.bias.detach().view(self.like)

    def gradient(self, dz: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        dgamma, dbeta = per_channel(dz * self.hat), per_channel(dz)
        rest = dz - (dbeta.view(self.like) + self.hat * dgamma.view(self.like)) / self.count
        return {"weight": dgamma, "bias": dbeta}, self.gamma * self.inverse * rest


# ---- d_i of Table 1 ------------------------------------------------------------------------------


def projected(P: Tensor, s: Tensor) -> Tensor:
    """P s: the sum over classes of each class's code times its share of the signal."""
    rows = s if s.is_floating_point() else torch.eye(CLASSES, dtype=P.dtype)[s]
    return torch.einsum("nc,c...->n...", rows, P)


def cells(y: Tensor, grid) -> list[tuple]:
    """The pixels of each cell of a grid over feature maps, as slices."""
    if not grid:
        return []
    sides = [
        [slice(floor(i * n / g), ceil((i + 1) * n / g)) for i in range(g)]
        for n, g in zip(y.shape[2:], grid, strict=True)
    ]
    return list(product(*sides))


def readout_d(y: Tensor, s: Tensor, *_: Tensor, P: Tensor, grid) -> Tensor:
    """(y* - p) P / sqrt(d), handed back to the pixels that each cell averages."""
    spots = cells(y, grid)
    f = torch.stack([y[(..., *spot)].flatten(2).mean(2) for spot in spots], 2) if grid else y
    f = f.flatten(1)
    root = sqrt(f.shape[1]) / 2  # the scale of the logits is 2 here
    logits = torch.einsum("nf,cf->nc", f, P) / root
    p = logits.exp() / logits.exp().sum(1, keepdim=True)
    wish = torch.einsum("nc,cf->nf", torch.eye(CLASSES, dtype=y.dtype)[s] - p, P) / root
    if not grid:
        return wish.view(y.shape)
    wish, d = wish.view(len(y), y.shape[1], -1), torch.zeros_like(y)
    for i, spot in enumerate(spots):
        size = d[(..., *spot)].flatten(2).shape[2]
        d[(..., *spot)] += (wish[:, :, i] / size).view(*wish.shape[:2], *[1] * len(spot))
    return d


def grid_of(shape, features: int):
    """The finest equal grid with at most `features` numbers, one cell at least."""
    side = 1
    while shape[0] * (side + 1) ** (len(shape) - 1) <= features:
        side += 1
    return tuple(min(side, n) for n in shape[1:])


TABLE = {
    "dfa": (rules.dfa, lambda y, s, P: projected(P, s)),
    "sdfa": (rules.sdfa, lambda y, s, P: projected(P, s)),
    "drtp": (rules.drtp, lambda y, s, P: projected(P, s)),
    "tpsgd_l1": (rules.tpsgd_l1, lambda y, s, P: (projected(P, s) - y).sign()),
    "tpsgd_l2": (rules.tpsgd_l2, lambda y, s, P: projected(P, s) - y),
    "tpsgd": (
        lambda at: rules.tpsgd(quartic, at=at),
        lambda y, s, P: 4 * (projected(P, s) - y) ** 3,
    ),
}
READOUTS = {"readout": 2048, "readout_cells": 24, "readout_mean": 1}  # features
SIGNALS = {Signal.LABEL: LABELS, Signal.ERROR: ERROR, Signal.ERROR_SIGN: ERROR.sign()}


@cache
def ways(shape, maps: bool, at: Place) -> list:
    """Every rule at a place: (name, objective, signal, d_i)."""
    return list(_ways(shape, maps, at))


def _ways(shape, maps: bool, at: Place):
    site = Site(shape, CLASSES, Key(seed=5, block=1), maps, dtype=torch.float64)
    for name, (make, d) in TABLE.items():
        rule = make(at=at)
        yield name, rule.objective(site), SIGNALS[rule.signal], d
    for name, features in READOUTS.items():
        grid = grid_of(shape, features) if maps else None
        P = site.draw(normal(), (shape[0] * prod(grid) if grid else prod(shape),))
        for learned in (False, True):  # learned codes belong to cells, others may be of pixels
            rule = rules.readout(at=at, features=features, scale=2.0, learned=learned)
            d = partial(readout_d, P=P, grid=grid)
            yield f"{name} {learned}", rule.objective(site), LABELS, d


# ---- the tests -----------------------------------------------------------------------------------


def make_block(kind: str, activation: str, place: Place):
    """A hidden block of this kind, cut out of a model, and its input."""
    layers, shape = KINDS[kind]
    act, slope = ACTIVATIONS[activation]
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, kind)))
        modules = [*layers(), *([] if act is None else [act])]
        x = torch.randn(5, *shape, dtype=torch.float64)
        for norm in modules[1:2]:
            if isinstance(norm, nn.modules.batchnorm._BatchNorm):
                nn.init.normal_(norm.weight, 1.0, 0.3)
                nn.init.normal_(norm.bias)
    model = nn.Sequential(*modules, nn.Flatten(), nn.LazyLinear(CLASSES)).double()
    model(x)
    block = layers_of(model)[0]
    block.train(True)
    assert block.closed_form(place)
    return block, x, slope


def table_1(block, x: Tensor, slope, at: Place):
    """y at a place, and a function from d_i to minus the update of Table 1 (the gradient)."""
    layer = block.layer
    norm = BatchNorm(block.between[0], layer_output(layer, x)) if block.between else None
    z = norm.z if norm else layer_output(layer, x)
    y = z if block.activation is None else block.activation(z.clone())
    sigma = torch.ones_like(z)
    if at is not Place.BEFORE:
        sigma = torch.tensor([slope(v) for v in z.flatten().tolist()], dtype=z.dtype).view_as(z)

    def gradient(d: Tensor) -> dict[str, Tensor]:
        dz, found = -d.view_as(z) * sigma / len(x), {}
        if norm:
            own, dz = norm.gradient(dz)
            found = {f"1.{k}": v for k, v in own.items()}
        return found | {f"0.{k}": v for k, v in layer_gradient(layer, x, dz).items()}

    return {Place.BEFORE: z, Place.AFTER: y, Place.END: y.flatten(1)}[at], gradient


def assert_close(found: Tensor, wanted: Tensor, *what):
    """Equal up to rounding; torch.testing's version of it takes longer than the step."""
    assert found.shape == wanted.shape, what
    assert (found - wanted).abs().max() <= 1e-10 * max(1.0, float(wanted.abs().max())), what


def assert_same(found, wanted, *what):
    assert found.keys() == wanted.keys(), what
    for name in wanted:
        assert_close(found[name], wanted[name], name, *what)


@pytest.mark.cover(2)
@pytest.mark.parametrize("place", Place, ids=lambda p: p.name)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_closed_form_is_autograd_is_table_1(kind, activation, place):
    block, x, slope = make_block(kind, activation, place)
    params = block.named_parameters()
    y, table_gradient = table_1(block, x, slope, place)
    maps = block.maps and y.dim() > 2
    outputs = block.outputs(x)
    seen, end = outputs[place], outputs[Place.END].detach()
    for name, objective, s, d in ways(tuple(y.shape[1:]), maps, place):
        table = table_gradient(d(y, s, *objective.tensors))
        assert_close(seen, y, name)
        loss = objective.loss(seen, s, *objective.tensors)
        auto = torch.autograd.grad(loss, list(params.values()), retain_graph=True)
        auto = dict(zip(params, auto, strict=True))
        assert_same(auto, table, name, "autograd against Table 1")
        engines = [Autograd(block, place, objective), ClosedForm(block, place, objective, False)]
        engines.append(ClosedForm(block, place, objective, in_place=True))
        with torch.no_grad():
            for engine in engines:
                saved = engine.forward(params, x)
                local, (grads,) = engine.gradients(params, saved, s, objective.tensors)
                assert_same(grads, table, name, engine)
                assert_close(objective.loss_of(local, s), loss.detach(), name, engine)
                assert_close(engine.output(saved), end, name, engine)


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith("conv2d")])
@pytest.mark.parametrize("activation", ["none", "leaky_relu", "tanh", "gelu"])
def test_memory_layout_does_not_change_the_gradient(kind, activation):
    for place in Place:
        block, x, _ = make_block(kind, activation, place)
        params = block.named_parameters()
        shape = tuple(block.outputs(x)[place].shape[1:])

        def turn(t):
            return t.to(memory_format=torch.channels_last) if t.dim() == 4 else t

        with torch.no_grad():
            for name, objective, s, _ in ways(shape, len(shape) > 1, place):
                plain = ClosedForm(block, place, objective, in_place=False)
                turned = ClosedForm(block, place, move(objective, turn), in_place=True)
                wanted = plain.gradients(params, plain.forward(params, x), s, objective.tensors)
                tensors = turned.objective.tensors
                found = turned.gradients(params, turned.forward(params, turn(x)), s, tensors)
                assert_same(*(next(iter(way[1])) for way in (found, wanted)), name, place)
                losses = [objective.loss_of(way[0], s) for way in (found, wanted)]
                assert_close(*losses, name, place)


@pytest.mark.parametrize("kind", ["linear_batchnorm", "conv1d_batchnorm", "conv2d_batchnorm"])
def test_batch_norm_keeps_its_running_statistics_as_the_module_does(kind):
    (block, x, _), (twin, _, _) = (make_block(kind, "relu", Place.AFTER) for _ in range(2))
    engine = ClosedForm(block, Place.AFTER, None)
    for step in range(3):
        with torch.no_grad():
            engine.forward(block.named_parameters(), x + step)
            twin(x + step)
    ours, theirs = block.between[0].state_dict(), twin.between[0].state_dict()
    assert ours["num_batches_tracked"] == theirs["num_batches_tracked"] == 4  # one when made
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["linear_batchnorm", "conv2d_batchnorm"])
def test_batch_norm_in_evaluation_mode_uses_its_running_statistics(kind):
    block, x, _ = make_block(kind, "tanh", Place.AFTER)
    block.train(False)
    before = {k: v.clone() for k, v in block.between[0].state_dict().items()}
    engine = ClosedForm(block, Place.AFTER, None)
    with torch.no_grad():
        found = engine.output(engine.forward(block.named_parameters(), x))
    torch.testing.assert_close(found, block(x), rtol=1e-12, atol=1e-12)
    assert all(torch.equal(v, before[k]) for k, v in block.between[0].state_dict().items())


def test_the_parameters_given_are_used_instead_of_the_modules():
    block, x, _ = make_block("linear", "tanh", Place.AFTER)
    own = {k: torch.randn_like(p) for k, p in block.named_parameters().items()}
    engine = ClosedForm(block, Place.AFTER, None)
    with torch.no_grad():
        found = engine.forward(own, x).y
    torch.testing.assert_close(found, torch.tanh(x @ own["0.weight"].T + own["0.bias"]))


# ---- another kind of layer -----------------------------------------------------------------------


def volumes(norm: bool) -> nn.Sequential:
    between = [nn.BatchNorm3d(4)] if norm else []
    convolution = nn.Conv3d(2, 4, (2, 3, 2), (1, 2, 1), (1, 0, 1), dilation=(1, 1, 2), groups=2)
    modules = [convolution, *between, nn.Tanh(), nn.Flatten(), nn.Linear(128, CLASSES)]
    return seeded(lambda: nn.Sequential(*modules).double())


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch norm"])
def test_one_entry_gives_another_layer_kind_its_closed_form(norm, monkeypatch):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 3, 5, 4, generator=g, dtype=torch.float64)
    y = torch.arange(6) % CLASSES
    by_autograd, closed = volumes(norm), volumes(norm)
    closed.load_state_dict(by_autograd.state_dict())
    settings = {"rule": rules.readout(features=16), "optimizer": tpsgd.sgd, "lr": 0.1}
    settings |= {"epochs": 3, "batch_size": 3, "blocks": [1, 1]}
    run = tpsgd.fit(by_autograd, (x, y), **settings)
    assert run.blocks[0].learning == "autograd"
    monkeypatch.setitem(LAYERS, nn.Conv3d, convolution(F.conv3d))
    run = tpsgd.fit(closed, (x, y), **settings)
    assert run.blocks[0].learning == "closed form"
    before = volumes(norm)[0].weight
    assert not torch.allclose(closed[0].weight, before, atol=1e-4)
    for name, found in closed.state_dict().items():
        torch.testing.assert_close(found, by_autograd.state_dict()[name], rtol=1e-8, atol=1e-10)


def test_a_kind_is_of_an_exact_type_and_settings_that_it_supports():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    assert layer_kind(nn.Linear(2, 3)) is LAYERS[nn.Linear]
    assert layer_kind(Doubled(2, 3)) is None and not gives_maps(Doubled(2, 3))
    assert layer_kind(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")) is None
    assert layer_kind(nn.Tanh()) is None and gives_maps(nn.Sequential(nn.Conv1d(1, 1, 1)))


# ---- small convolutions as products of matrices ------------------------------------------------

ONE_CHANNEL = {
    "plain": {},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": (1, 0)},
    "dilation": {"dilation": (1, 2)},
    "same": {"padding": "same", "dilation": 2},
    "no bias": {"bias": False},
    "all": {"stride": (1, 3), "padding": (2, 1), "dilation": (2, 1), "bias": False},
}


def columns_made(monkeypatch) -> list:
    """A list that grows by an entry whenever a convolution is computed by columns."""
    made, columns = [], layers._columns
    monkeypatch.setattr(layers, "_columns", lambda *args: made.append(args) or columns(*args))
    return made


def last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", ONE_CHANNEL.values(), ids=ONE_CHANNEL)
def test_columns_give_the_convolution_and_its_gradient(options, dtype, samples, monkeypatch):
    layer, made = (
        seeded(lambda: nn.Conv2d(1, 10, 3, **options)).to(dtype),
        columns_made(monkeypatch),
    )
    x, kind = last(torch.randn(samples, 1, 9, 8, dtype=dtype)), layer_kind(layer)
    z = layer(x)
    dz = torch.randn_like(z)
    z.backward(dz)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    with torch.no_grad():
        found = kind.forward(layer, x, weight, bias)
        grad = kind.weight_gradient(layer, x, dz, weight, None)
        some = kind.weight_gradient(layer, x, dz, weight, slice(3, 7))
    assert len(made) == 3
    close = {} if dtype == torch.float64 else {"atol": 1e-4, "rtol": 1e-5}  # sums of 288 terms
    torch.testing.assert_close(found, z, **close)
    torch.testing.assert_close(grad, layer.weight.grad, **close)
    torch.testing.assert_close(some, layer.weight.grad[3:7], **close)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert grad.stride() == weight.stride()  # an optimizer can take it as it is


NOT_BY_COLUMNS = {
    "two channels": (lambda: nn.Conv2d(2, 32, 3), last(torch.randn(2, 2, 8, 8))),
    "groups": (lambda: nn.Conv2d(2, 32, 3, groups=2), last(torch.randn(2, 2, 8, 8))),
    "few filters": (lambda: nn.Conv2d(1, 8, 3), last(torch.randn(2, 1, 8, 8))),
    "channels first": (lambda: nn.Conv2d(1, 16, 3), torch.randn(2, 1, 8, 8)),
    "bfloat16": (lambda: nn.Conv2d(1, 16, 3), last(torch.randn(2, 1, 8, 8)).bfloat16()),
    "large maps": (lambda: nn.Conv2d(1, 16, 3), last(torch.randn(10, 1, 32, 32))),
}


@pytest.mark.parametrize(("make", "x"), NOT_BY_COLUMNS.values(), ids=NOT_BY_COLUMNS)
def test_other_convolutions_stay_convolutions(make, x, monkeypatch):
    layer, made = make().to(x.dtype), columns_made(monkeypatch)
    kind, weight = layer_kind(layer), layer.weight.detach()
    with torch.no_grad():
        z = kind.forward(layer, x, weight, layer.bias)
        kind.weight_gradient(layer, x, z, weight, None)
        assert torch.equal(z, layer(x)) and not made


def test_a_net_learns_by_columns_what_it_learns_by_convolutions(monkeypatch):
    data = torch.randn(40, 1, 8, 8), torch.arange(40) % CLASSES
    models = [seeded(lambda: nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(1024, CLASSES)
    )) for _ in range(2)]  # fmt: skip
    for model, limit in zip(models, (0, layers.COLUMNS), strict=True):
        monkeypatch.setattr(layers, "COLUMNS", limit)
        made = columns_made(monkeypatch)
        tpsgd.fit(model, data, rule=rules.readout(), epochs=2, batch_size=16)
        assert bool(made) is bool(limit)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_columns_are_in_the_memory_plan(monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 9, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9 * 36, CLASSES))
    data = torch.randn(64, 1, 8, 8), torch.arange(64) % CLASSES
    options = {"rule": rules.drtp(), "batch_size": 32, "epochs": 1}
    made = columns_made(monkeypatch)
    plan = tpsgd.plan(model, (1, 8, 8), samples=64, others=False, **options)
    assert made
    assert plan.peak_bytes == tpsgd.fit(model, data, **options).peak_bytes


def test_grouped_convolutions_are_neither_sliced_nor_solved():
    kind = layer_kind(nn.Conv2d(4, 4, 3, groups=2))
    assert kind is not None and not kind.dense(nn.Conv2d(4, 4, 3, groups=2))
    assert kind.dense(nn.Conv2d(4, 4, 3)) and inputs_of(nn.Conv2d(4, 4, 3)) == 36


@pytest.mark.parametrize("kind", ["linear", "linear_on_tokens", "conv1d_same", "conv2d_same"])
def test_the_equations_of_a_layer_give_its_output(kind):
    block, x, _ = make_block(kind, "none", Place.BEFORE)
    layer, record = block.layer, layer_kind(block.layer)
    rows = record.equations(layer, x)
    assert rows.shape[-1] == inputs_of(layer)
    z = rows @ layer.weight.flatten(1).T + layer.bias
    z = z.mT.unflatten(2, layer(x).shape[2:]) if record.maps else z
    torch.testing.assert_close(z, layer(x))
