"""dlADMM: the layers of a net as constraints, all its unknowns improved in turn.

Wang, Yu, Chen & Zhao, "ADMM for Efficient Deep Learning with Global Convergence" (KDD 2019).
Samples are rows, a_0 = x, m_i = a_{i-1} W_i' + b_i, and f is a ReLU or LeakyReLU. The net is given
unknowns of its own, z_i that should equal m_i and a_i that should equal f(z_i). With u, the price
of the last constraint, what is lowered is the augmented Lagrangian

    sum CE(z_L) + <u, z_L - m_L> + rho/2 sum_i |z_i - m_i|^2 + rho/2 sum_{i<L} |a_i - f(z_i)|^2

Our reading, held to the authors' own program by a test: an iteration goes backward (z, b, W of each
layer, then its inputs a, from the last layer to the first), goes forward (a, W, b, z), and ends
with u += rho (z_L - m_L).

| unknown | update                                                                             |
|---------|------------------------------------------------------------------------------------|
| b       | the minimum: b + mean(z - m + u/rho)                                               |
| W, a    | a gradient step on a quadratic bound of curvature theta (tau), doubled until it holds |
| z_i     | the better of the minima on either side of 0                                       |
| z_L     | FISTA (Beck & Teboulle 2009)                                                       |

No derivative passes through more than one layer. What differs from the authors' program:

- The Lagrangian is quadratic in W and in a, so a bound along the step G holds exactly when theta is
  at least rho |a G'|^2 / |G|^2: how often to double is computed, never more than `DOUBLINGS`
  times. Theirs tries one after the other, which rounding can make endless.
- FISTA's step is 2, the longest for which it is proved (the curvature of the cross-entropy of a
  softmax is at most 1/2). Theirs is 4, with which it need not converge.
- u/rho is never formed but for the biases: in float32 it would swallow what it is added to.
- rho begins at 1, not 1e-6, where progress depends on the number of samples and on the scale of the
  initial weights.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.blocks import Block, split
from tpsgd.building import classes_of, count, form_for, sizes_of
from tpsgd.errors import TpsgdError
from tpsgd.fitting import prepared
from tpsgd.losses import cross_entropy
from tpsgd.memory import Meter, available, tensor_bytes
from tpsgd.padded import Padded
from tpsgd.rules import Place
from tpsgd.run import BlockInfo, Epoch, Run, size
from tpsgd.settings import Settings
from tpsgd.sources import Arrays, Form, Stream, first_samples, in_stream, source

DOUBLINGS = 60  # of theta and tau, at most
FISTA = 500  # steps, at most
TOLERANCE = 1e-3  # FISTA ends when a step changes the sum over all samples by less
RISES = 3  # of the loss, one after the other, before rho grows
GROWTH = 10.0  # of rho
SPARE = 7  # arrays of a layer's outputs that an update needs for a moment


@dataclass(frozen=True)
class Steps:
    """The numbers that say how far an update goes; see `fit_dladmm`."""

    rho: float = 1.0
    theta: float = 1.0
    tau: float = 1.0
    fista_step: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise TpsgdError(f"{name} must be a number above 0, got {value!r}")


def fit_dladmm(
    model: nn.Module,
    data: Any,
    *,
    iterations: int = 300,
    rho: float = 1.0,
    theta: float = 1.0,
    tau: float = 1.0,
    max_rho: float | None = None,
    fista_step: float = 2.0,
    seed: int = 0,
    device: torch.device | str | None = None,
    validation: Any = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Train a multilayer perceptron in place by dlADMM, all samples at once; see the module.

    The model begins with the weights it has. After every iteration it holds that iteration's.

    Args:
        model: an `nn.Sequential` of `nn.Linear` with ReLU or LeakyReLU between them, perhaps an
            `nn.Flatten` first; float32 or float64.
        data: as for `tpsgd.fit`, gathered in memory; labels are class indices.
        iterations: each updates every layer twice, from all samples.
        rho: the weight of the constraints.
        theta, tau: the curvatures of the bounds on W and on a before they are doubled. A larger one
            makes for shorter steps where it is more than needed.
        max_rho: multiply rho by 10, up to this, whenever the training loss has risen three times
            running; None leaves rho alone. The published setting is rho=1e-6, max_rho=0.1, with
            weights and biases drawn from a normal distribution of standard deviation 0.1.
        fista_step: the step of the last z's updates; the authors' program takes 4.
        seed: of the order of a `Dataset`'s samples, which only rounding can tell.
        device, validation, callbacks, progress: as for `tpsgd.fit`, an iteration in place of an
            epoch; a callback that returns True ends the run.

    Returns:
        The record, as of `tpsgd.fit_backprop`: an iteration's loss is the mean cross-entropy of the
        net on the training data, `settings["rho_at_end"]` what rho has become.

    Examples:
        >>> import tpsgd
        >>> x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] + x[:, 1] > 0).long()
        >>> model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> run = fit_dladmm(model, (x, y), iterations=100)
        >>> tpsgd.evaluate(model, (x, y)) > 0.9
        True
        >>> run.sample_passes  # 100 samples, 2 layers, 2 updates an iteration
        40000
    """
    started = time.perf_counter()
    steps = Steps(rho, theta, tau, fista_step)
    if not isinstance(iterations, int) or iterations < 1:
        raise TpsgdError(f"iterations must be a whole number, 1 or more, got {iterations!r}")
    if max_rho is not None:
        number = isinstance(max_rho, (int, float))
        if not number or not rho <= max_rho < math.inf:
            raise TpsgdError(
                f"max_rho must be a number, rho ({rho:g}) or more, or None; got {max_rho!r}"
            )
    settings = Settings(
        loss=cross_entropy, epochs=iterations, batch_size=1024, seed=seed, device=device,
        validation=validation, callbacks=callbacks, progress=progress,
    )  # fmt: skip
    blocks = split(model)
    refuse(blocks)
    with prepared([model], settings) as (where, dtype, meter):
        first = first_samples(data)
        if isinstance(first, Padded):
            raise TpsgdError(
                "dlADMM takes samples of one shape, got sequences of different lengths: use "
                "tpsgd.fit with a recurrent layer"
            )
        form = form_for(blocks, first, in_stream(data), settings, where, dtype, 1)
        classes = classes_of(sizes_of(blocks, first, settings, form)[-1][Place.END], blocks[-1])
        run = Run("dladmm", seed, described(settings, steps, max_rho), infos(blocks))
        held_out = None if validation is None else source(validation, form, cross_entropy, classes)
        if isinstance(held_out, Arrays):
            whole_labels(held_out.y)
        samples = source(data, form, cross_entropy, classes, complete=True)
        meter.begin()
        x, labels = gathered(samples, form, blocks, meter)
        began = time.perf_counter()
        run.setup_seconds = began - started
        teach(model, blocks, x, labels, held_out, steps, max_rho, settings, run, meter, began)
        run.seconds = time.perf_counter() - began
        run.peak_bytes, run.kept_bytes = meter.peak(tensor_bytes(model)), meter.kept
    return run


def teach(
    model: nn.Module,
    blocks: list[Block],
    x: Tensor,
    labels: Tensor,
    held_out: Arrays | Stream | None,
    steps: Steps,
    max_rho: float | None,
    settings: Settings,
    run: Run,
    meter: Meter,
    began: float,
) -> None:
    """Iterate, write the weights into the model, keep the record."""
    layers = [block.layer for block in blocks]
    weights: list[Any] = [layer.weight for layer in layers]
    biases: list[Any] = [layer.bias for layer in layers]
    own = [*weights, *(b for b in biases if b is not None)]
    iterations, losses = settings.epochs, []
    assert isinstance(iterations, int)
    passes = 2 * len(blocks) * len(labels)  # in an iteration
    with meter.watch():
        p = begin(weights, biases, x, labels, slopes(blocks))
    for number in range(1, iterations + 1):
        with meter.watch(number == 1):
            iterate(p, steps)
            loss, accuracy = figures(p)
        if not math.isfinite(loss):
            raise TpsgdError(
                f"the loss became {loss} in iteration {number}, the model keeps the weights from "
                "before it: raise rho, or scale the inputs"
            )
        # in one call: an interruption finds the weights of a whole iteration
        with torch.no_grad():
            torch._foreach_copy_(own, p.parameters())  # type: ignore[attr-defined]
        losses.append(loss)
        run.sample_passes += passes
        if settings.progress is not None:
            settings.progress(run.sample_passes, passes * iterations)
        checks = (None, None) if held_out is None else measured(model, held_out)
        record = Epoch(0, number, loss, accuracy, *checks, time.perf_counter() - began)
        run.history.append(record)
        if any([callback(record) is True for callback in settings.callbacks]):
            break
        if max_rho is not None and risen(losses):
            steps = replace(steps, rho=min(GROWTH * steps.rho, max_rho))
    run.settings["rho_at_end"] = steps.rho


@dataclass
class Problem:
    """The unknowns of a net of L layers and what they are held to."""

    W: list[Tensor]  # (outputs, inputs) each
    b: list[Tensor | None]
    a: list[Tensor]  # each layer's inputs, (samples, inputs); the first are the data
    z: list[Tensor]  # what each layer should give, (samples, outputs)
    m: list[Tensor]  # what it does give, a W' + b
    u: Tensor  # the price of z_L - m_L
    labels: Tensor
    slopes: list[float]  # of the hidden layers' activations, below 0

    @property
    def last(self) -> int:
        """The number of the last layer, counted from 0."""
        return len(self.W) - 1

    def parameters(self) -> list[Tensor]:
        """All weights, then all biases."""
        return [*self.W, *(b for b in self.b if b is not None)]

    def force(self, i: int, rho: float) -> Tensor:
        """Minus the derivative of the Lagrangian with respect to m_i."""
        pull = rho * (self.z[i] - self.m[i])
        return pull.add_(self.u) if i == self.last else pull


@torch.no_grad()
def begin(
    W: list[Tensor], b: list[Tensor | None], x: Tensor, labels: Tensor, slopes: list[float]
) -> Problem:
    """Unknowns that agree with the net, but for z_L: 1 for the true class, -1 for the others."""
    a, m = [x], []
    for i, (weight, bias) in enumerate(zip(W, b, strict=True)):
        m.append(F.linear(a[i], weight, bias))
        if i < len(slopes):
            a.append(activated(m[i], slopes[i]))
    z_last = torch.full_like(m[-1], -1.0).scatter_(1, labels[:, None], 1.0)
    u = torch.zeros_like(z_last)
    return Problem(list(W), list(b), a, [*m[:-1], z_last], m, u, labels, slopes)


@torch.no_grad()
def iterate(p: Problem, steps: Steps) -> None:
    """One iteration: a sweep backward, a sweep forward, the price."""
    for i in reversed(range(len(p.W))):
        p.m[i] = F.linear(p.a[i], p.W[i], p.b[i])  # afresh: rounding errors do not add up
        improve_z(p, i, steps)
        improve_b(p, i, steps)
        improve_W(p, i, steps)
        if i > 0:
            improve_a(p, i, steps)
    for i in range(len(p.W)):
        if i > 0:
            improve_a(p, i, steps)
        improve_W(p, i, steps)
        improve_b(p, i, steps)
        improve_z(p, i, steps)
    p.u = p.u + steps.rho * (p.z[-1] - p.m[-1])


def improve_b(p: Problem, i: int, steps: Steps) -> None:
    """The bias that minimises the Lagrangian."""
    if (bias := p.b[i]) is not None:
        more = p.force(i, steps.rho).mean(0) / steps.rho
        p.b[i] = bias + more
        p.m[i] = p.m[i] + more


def improve_W(p: Problem, i: int, steps: Steps) -> None:
    """W + G / theta, G = (rho (z - m) + u)' a."""
    G, norm = direction(p.force(i, steps.rho).mT @ p.a[i])
    along = p.a[i] @ G.mT
    length = norm / doubled(steps.theta, steps.rho * along.square().sum())
    p.W[i] = p.W[i] + length * G
    p.m[i] = p.m[i] + along.mul_(length)


def improve_a(p: Problem, i: int, steps: Steps) -> None:
    """The inputs of layer i: a + G / tau, G = (rho (z - m) + u) W - rho (a - f(z before))."""
    rho, y = steps.rho, activated(p.z[i - 1], p.slopes[i - 1])
    G, norm = direction(p.force(i, rho) @ p.W[i] - rho * (p.a[i] - y))
    along = G @ p.W[i].mT
    length = norm / doubled(steps.tau, rho * (1 + along.square().sum()))
    p.a[i] = p.a[i] + length * G
    p.m[i] = p.m[i] + along.mul_(length)


def improve_z(p: Problem, i: int, steps: Steps) -> None:
    """The z of layer i that minimises the Lagrangian."""
    if i < p.last:
        p.z[i] = hidden_z(p.m[i], p.a[i + 1], p.slopes[i])
    else:
        p.z[i] = output_z(p.z[i], p.m[i], p.u, p.labels, steps)


def direction(G: Tensor) -> tuple[Tensor, Tensor]:
    """G divided by its length, and the length."""
    norm = torch.linalg.vector_norm(G)
    return G / norm.clamp(min=torch.finfo(G.dtype).tiny), norm


def doubled(first: float, needed: Tensor) -> Tensor:
    """`first`, doubled until it is no less than `needed`, but `DOUBLINGS` times at most."""
    return first * 2 ** (needed / first).log2().ceil().clamp(0, DOUBLINGS)


def hidden_z(m: Tensor, a: Tensor, slope: float) -> Tensor:
    """The z that minimises (z - m)^2 + (a - f(z))^2, element by element.

    Below 0 f(z) = slope z, above f(z) = z: each side has its minimum, (m + slope a)/(1 + slope^2)
    and (m + a)/2, or 0 where that lies on the other side. The lower of the two is the answer.
    """

    def value(z: Tensor, y: Tensor) -> Tensor:
        return (z - m).square() + (a - y).square()

    below = ((m + slope * a) / (1 + slope**2)).clamp(max=0)
    above = ((m + a) / 2).clamp(min=0)
    return torch.where(value(below, slope * below) > value(above, above), above, below)


def output_z(
    z: Tensor,
    m: Tensor,
    u: Tensor,
    labels: Tensor,
    steps: Steps,
    most: int = FISTA,
    tolerance: float = TOLERANCE,
) -> Tensor:
    """The z that minimises sum CE(z) + <u, z - m> + rho/2 |z - m|^2, by FISTA from a given z.

    A gradient step on the cross-entropy, then the exact answer to the rest, from a point thrown a
    little further along the last move.
    """
    rho, eta = steps.rho, steps.fista_step
    moved, k, before = z, 1.0, None
    for _ in range(most):
        d = z - m
        value = F.cross_entropy(z, labels, reduction="none") + ((u + rho / 2 * d) * d).sum(1)
        # the difference sample by sample, then the sum: float32 can tell it
        if before is not None and (value - before).sum().abs() < tolerance:
            break
        before, was = value, moved
        moved = (rho * m - u + z / eta - cross_entropy.grad(z, labels)) / (rho + 1 / eta)
        k, k_was = (1 + math.sqrt(1 + 4 * k * k)) / 2, k
        z = moved + (k_was - 1) / k * (moved - was)
    return z


def lagrangian(p: Problem, rho: float) -> Tensor:
    """What the updates of W, b, a and z lower; see the module."""
    gaps = [z - m for z, m in zip(p.z, p.m, strict=True)]
    hidden = zip(p.a[1:], p.z[:-1], p.slopes, strict=True)
    gaps += [a - activated(z, slope) for a, z, slope in hidden]
    held = rho / 2 * torch.stack([gap.square().sum() for gap in gaps]).sum()
    return F.cross_entropy(p.z[-1], p.labels, reduction="sum") + (p.u * gaps[p.last]).sum() + held


def activated(z: Tensor, slope: float) -> Tensor:
    """ReLU, or LeakyReLU where there is a slope."""
    return F.leaky_relu(z, slope) if slope else z.clamp(min=0)


def outputs(p: Problem) -> Tensor:
    """What the net itself gives, its own activations in place of the unknowns."""
    y = p.m[0]
    for i in range(1, len(p.W)):
        y = F.linear(activated(y, p.slopes[i - 1]), p.W[i], p.b[i])
    return y


@torch.no_grad()
def figures(p: Problem) -> tuple[float, float]:
    """The net's mean cross-entropy and accuracy; this is where a GPU is waited for."""
    y = outputs(p)
    right = (y.argmax(1) == p.labels).sum()
    loss, right = torch.stack([F.cross_entropy(y, p.labels), right.to(y)]).tolist()
    return loss, right / len(y)


def risen(losses: Sequence[float]) -> bool:
    """Whether the loss has risen three times running.

    Examples:
        >>> risen([9, 1, 2, 3, 4]), risen([1, 2, 2, 3])
        (True, False)
    """
    last = losses[-RISES - 1 :]
    return len(last) > RISES and all(x < y for x, y in pairwise(last))


@torch.no_grad()
def measured(model: nn.Module, held_out: Arrays | Stream) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of the model on held-out data."""
    sums, seen = [], 0
    for x, labels in held_out.batches():
        y, seen = model(x), seen + len(labels)
        right = (y.argmax(1) == whole_labels(labels)).sum()
        sums.append(torch.stack([F.cross_entropy(y, labels, reduction="sum"), right.to(y)]))
    if not seen:
        raise TpsgdError("the validation data is empty: it gave no batch")
    loss, right = torch.stack(sums).double().sum(0).tolist()
    return loss / seen, right / seen


@torch.no_grad()
def gathered(
    samples: Arrays | Stream, form: Form, blocks: list[Block], meter: Meter
) -> tuple[Tensor, Tensor]:
    """All inputs, (samples, features), and labels on the device, if training on them would fit."""
    free = room(form.device)
    if isinstance(samples, Arrays):
        x, labels = samples.x, samples.y
        ready = x.dtype == form.dtype and x.device == form.device
        check_room(len(labels), blocks, form, free, copies=not ready)
        x, labels = form(x), whole_labels(labels.to(form.device))
    else:
        ready, xs, ys, seen = False, [], [], 0
        for part, y in samples.batches(0, 0):
            seen += len(y)
            check_room(max(seen, samples.samples), blocks, form, free, copies=True)
            xs.append(part)
            ys.append(whole_labels(y))
        if not seen:
            raise TpsgdError("the data is empty: the loader gives no batch")
        x, labels = torch.cat(xs), torch.cat(ys)
    if not ready:
        meter.keep(x.nbytes)
    for module in blocks[0].prologue:
        x = module(x)
    return x, labels


def whole_labels(labels: Tensor) -> Tensor:
    """The labels, if they are class indices."""
    if labels.is_floating_point():
        raise TpsgdError(
            f"dlADMM needs class indices, whole numbers of shape (samples,), got float labels "
            f"{tuple(labels.shape)}: take their argmax(1), or use tpsgd.fit"
        )
    return labels


def planned_bytes(samples: int, widths: list[int], itemsize: int, copies: bool) -> int:
    """What training on so many samples holds at its peak, the model left out.

    Each layer has z, a and m (the last one u in place of a); an update needs a few more for a
    moment. `copies`: the data too, twice while a loader's batches are put together.

    Examples:
        >>> planned_bytes(60_000, [784, 256, 10], itemsize=4, copies=False) >> 20
        595
    """
    state = 3 * sum(widths[1:]) + SPARE * max(widths[1:])
    data = widths[0] if copies else 0
    weights = 4 * sum(a * b + b for a, b in pairwise(widths))
    return itemsize * (samples * (data + max(data, state)) + weights)


def check_room(samples: int, blocks: list[Block], form: Form, free: int, copies: bool) -> None:
    """Refuse what would not fit in memory."""
    layers: list[Any] = [block.layer for block in blocks]
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    need = planned_bytes(samples, widths, form.dtype.itemsize, copies)
    if need > free:
        raise TpsgdError(
            f"dlADMM holds every layer's values for all {samples:,} samples, about {size(need)}, "
            f"and {size(free)} are free on {form.device}: use fewer samples, narrower layers or "
            "another device"
        )


def room(device: torch.device) -> int:
    """Free bytes, those that torch keeps for itself included."""
    free = available(device)
    if device.type == "cuda":
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free


def slopes(blocks: list[Block]) -> list[float]:
    """The slope below 0 of each hidden layer's activation."""
    return [float(getattr(block.activation, "negative_slope", 0.0)) for block in blocks[:-1]]


def refuse(blocks: list[Block]) -> None:
    """Say why a model is not one that dlADMM can train, if it is not."""
    instead = "train this model with tpsgd.fit or tpsgd.fit_backprop"
    for block in blocks:
        who, last = f"block {block.index + 1} ({block})", block is blocks[-1]
        other = misfit(block, last)
        if other is not None:
            raise TpsgdError(
                "dlADMM knows nn.Linear layers, ReLU or LeakyReLU between them and nn.Flatten "
                f"before the first, but {who} has {type(other).__name__}: {instead}"
            )
        if block.activation is None and not last:
            raise TpsgdError(
                f"{who} has no activation, and dlADMM needs ReLU or LeakyReLU after every layer "
                "but the last: add one"
            )
        if any(not p.requires_grad for p in block.layer.parameters()):
            raise TpsgdError(
                f"{who} is frozen, and dlADMM trains all layers at once: call "
                "requires_grad_(True) on it, or compute its outputs and train the rest on those"
            )
        if not block.closed_form(Place.BEFORE) or set(dict(block.layer.named_parameters())) - {
            "weight",
            "bias",
        }:
            raise TpsgdError(f"{who} has hooks, which dlADMM would pass by: remove them")
    layer: Any = blocks[-1].layer
    if layer.out_features < 2:
        raise TpsgdError(
            "dlADMM tells classes apart by one output each, and the last layer has 1: give it 2 "
            "for a yes-or-no question"
        )
    if layer.weight.dtype not in (torch.float32, torch.float64):
        raise TpsgdError(
            f"dlADMM computes in float32 or float64, and the model is in {layer.weight.dtype}: "
            "call model.float()"
        )


def misfit(block: Block, last: bool) -> nn.Module | None:
    """The first module of a block that dlADMM does not know."""
    known: set[type[nn.Module]] = set() if last else {nn.ReLU, nn.LeakyReLU}
    before: set[type[nn.Module]] = {nn.Flatten} if block.index == 0 else set()
    for module in block.modules:
        if module is block.layer:
            fits = type(module) is nn.Linear
        elif module is block.activation:
            fits = type(module) in known
        else:
            fits = type(module) in before and module in block.prologue
        if not fits:
            return module
    return None


def infos(blocks: list[Block]) -> list[BlockInfo]:
    """How each layer is trained, for the record."""
    return [
        BlockInfo(str(b), "dladmm", count(b.named_parameters()), "alternating updates")
        for b in blocks
    ]


def described(settings: Settings, steps: Steps, max_rho: float | None) -> dict[str, Any]:
    """The settings as plain values, for the record."""
    every = settings.describe("dladmm", cross_entropy)
    shared = ("rule", "loss", "seed", "device", "validation", "threads", "torch")
    own = {"iterations": settings.epochs, **vars(steps), "max_rho": max_rho}
    return {name: every[name] for name in shared} | own
