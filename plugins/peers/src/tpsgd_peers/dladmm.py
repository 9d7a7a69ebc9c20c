"""`fit_dladmm`: train a multilayer perceptron by alternating updates on all samples; see `admm`."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import size
from tpsgd.engine.assemble import count as count_parameters
from tpsgd.engine.device import available
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.engine.run import training_context
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources.batches import ArraySource, BatchForm
from tpsgd.engine.sources.inputs import check_values
from tpsgd.engine.sources.loaders import LoaderSource, as_source, is_stream
from tpsgd.engine.spec import request, specify
from tpsgd.losses import cross_entropy
from tpsgd.maths.kernels.torch_internals import internal
from tpsgd.memory.meter import Meter, tensor_bytes
from tpsgd.nets.blocks import Block, hooked, overwriting
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.padded import Padded
from tpsgd.rules import frozen
from tpsgd.train import Epoch
from tpsgd_peers.admm import Problem, StepSizes, begin, iterate, outputs
from tpsgd_peers.settings import check_data, peer_settings

RISES = 3  # in a row, of the loss, before rho grows
GROWTH = 10.0  # of rho
TEMPORARY = 7  # arrays of a layer's outputs that an update allocates
_TAKES = ("seed", "device", "validation", "callbacks", "progress")


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
    **settings: Any,
) -> Run:
    """Train a multilayer perceptron in place by dlADMM, on all samples together; see `peers.admm`.

    Training starts from the model's weights. After every iteration the model has that iteration's.

    Args:
        model: an `nn.Sequential` of `nn.Linear` with ReLU or LeakyReLU between them, perhaps an
            `nn.Flatten` first; float32 or float64.
        data: as for `tpsgd.fit`, gathered in memory; labels are class indices.
        iterations: each updates every layer twice, from all samples.
        rho: the weight of the constraints.
        theta: the curvature of the bound on W before it is doubled. If it is larger than needed,
            steps are shorter.
        tau: the same for the bound on a.
        max_rho: multiply rho by 10, up to this value, whenever the training loss has risen three
            times in a row; None keeps rho. The published setting is rho=1e-6, max_rho=0.1, with
            weights and biases drawn from a normal distribution of standard deviation 0.1.
        fista_step: step size of the updates of the last z; the authors' program has 4.
        **settings: `seed`, `device`, `validation`, `callbacks` and `progress`, as for `tpsgd.fit`;
            an iteration counts as an epoch. The seed orders the samples of a `Dataset`, which
            changes rounding errors only.

    Returns:
        The record, as of `tpsgd.fit_backprop`: the loss of an iteration is the mean cross-entropy
        of the net on the training data; `settings["rho_at_end"]` is the last rho.

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
    steps = StepSizes(rho, theta, tau, fista_step, max_rho)
    if not isinstance(iterations, int) or iterations < 1:
        raise TpsgdError(f"iterations must be a whole number, 1 or more, got {iterations!r}")
    chosen = peer_settings(
        "fit_dladmm", settings, _TAKES, loss=cross_entropy, epochs=iterations, batch_size=1024
    )
    first, blocks = check_data("dlADMM", data), layers_of(model)
    check_model(blocks)
    with training_context([model], chosen, overwriting(model, blocks)) as device:
        if isinstance(first, Padded):
            raise TpsgdError(
                "dlADMM takes samples of one shape, got sequences of different lengths: use "
                "tpsgd.fit with a recurrent layer"
            )
        asked = request([model], data, frozen(), chosen)
        net = specify(asked, first, is_stream(data), device, check_values)
        form, held_out = net.form, None
        if chosen.validation is not None:
            held_out = as_source(chosen.validation, form, cross_entropy, net.classes)
        if isinstance(held_out, ArraySource):
            class_indices(held_out.y)
        source = as_source(data, form, cross_entropy, net.classes, complete=True)
        run = Run("dladmm", chosen.seed, described(chosen, steps), model=model)
        for block in blocks:
            parameters = count_parameters(block.named_parameters())
            run.blocks.append(BlockInfo(str(block), "dladmm", parameters, "alternating updates"))
        layers: list[Any] = [block.layer for block in blocks]
        slopes = [float(getattr(b.activation, "negative_slope", 0.0)) for b in blocks[:-1]]
        with Meter(device) as meter:
            x, labels = gathered(source, layers, form, meter)
            for module in blocks[0].prologue:
                x = module(x)
            run.setup_seconds = time.perf_counter() - started
            meter.computing(True)
            p = begin([m.weight for m in layers], [m.bias for m in layers], x, labels, slopes)
            train(model, p, steps, held_out, chosen, run, meter)
    run.peak_bytes, run.kept_bytes = meter.peak(tensor_bytes(model)), meter.kept_bytes
    return run


def train(
    model: nn.Module,
    p: Problem,
    steps: StepSizes,
    held_out: ArraySource | LoaderSource | None,
    settings: Settings,
    run: Run,
    meter: Meter,
) -> None:
    """Iterate, write the weights into the model, and record every iteration."""
    began, losses = time.perf_counter(), []
    iterations, parameters = settings.epochs, list(model.parameters())
    assert isinstance(iterations, int)
    passes = 2 * len(p.W) * len(p.labels)  # in an iteration
    for number in range(1, iterations + 1):
        iterate(p, steps)
        loss, accuracy = loss_and_accuracy(p)
        meter.computing(False)  # the first iteration has shown what all of them need
        if not math.isfinite(loss):
            raise TpsgdError(
                f"the loss became {loss} in iteration {number}, the model keeps the weights from "
                "before it: raise rho, or scale the inputs"
            )
        # in one call, so that an interruption leaves the weights of a whole iteration
        with torch.no_grad():
            copy = internal("_foreach_copy_")
            (copy or _copy_each)(parameters, p.parameters())
        losses.append(loss)
        run.sample_passes += passes
        if callable(settings.progress):
            settings.progress(run.sample_passes, passes * iterations)
        on_held_out = (None, None) if held_out is None else measured(model, held_out)
        record = Epoch(0, number, loss, accuracy, *on_held_out, time.perf_counter() - began)
        run.history.append(record)
        if any([callback(record) is True for callback in settings.callbacks]):
            break
        last = losses[-RISES - 1 :]
        rising = len(last) > RISES and all(a < b for a, b in pairwise(last))
        if rising and steps.max_rho is not None:
            steps = replace(steps, rho=min(GROWTH * steps.rho, steps.max_rho))
    run.settings["rho_at_end"] = steps.rho
    run.seconds = time.perf_counter() - began


def _copy_each(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for t, value in zip(into, values, strict=True):
        t.copy_(value)


@torch.no_grad()
def loss_and_accuracy(p: Problem) -> tuple[float, float]:
    """The net's mean cross-entropy and accuracy; waits for the GPU."""
    y = outputs(p)
    right = (y.argmax(1) == p.labels).sum()
    loss, right = torch.stack([F.cross_entropy(y, p.labels), right.to(y)]).tolist()
    return loss, right / len(y)


@torch.no_grad()
def measured(model: nn.Module, held_out: ArraySource | LoaderSource) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of the model on held-out data."""
    sums, samples = [], 0
    for batch in held_out.batches():
        x, labels = batch.load()
        y, samples = model(x), samples + len(labels)
        right = (y.argmax(1) == class_indices(labels)).sum()
        sums.append(torch.stack([F.cross_entropy(y, labels, reduction="sum"), right.to(y)]))
    if not samples:
        raise TpsgdError("the validation data is empty: it gave no batch")
    loss, right = torch.stack(sums).double().sum(0).tolist()
    return loss / samples, right / samples


def gathered(
    source: ArraySource | LoaderSource, layers: list[Any], form: BatchForm, meter: Meter
) -> tuple[Tensor, Tensor]:
    """All inputs and labels of a source, on the device; too many samples are refused."""
    if isinstance(source, ArraySource):
        check_room(source.samples, layers, form)
        x, y = form(source.x), source.y.to(form.device)
    else:
        batches, count = [], 0
        for batch in source.batches(0, 0):
            count += batch.size
            check_room(max(count, source.samples), layers, form)
            batches.append(batch.load())
        if not batches:
            raise TpsgdError("the data is empty: the loader gives no batch")
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    if not isinstance(source, ArraySource) or x is not source.x:
        meter.kept(x.nbytes, 0)
    return x, class_indices(y)


def class_indices(labels: Tensor) -> Tensor:
    """The labels, if they are class indices."""
    if labels.is_floating_point():
        raise TpsgdError(
            f"dlADMM needs class indices, whole numbers of shape (samples,), got float labels "
            f"{tuple(labels.shape)}: take their argmax(1), or use tpsgd.fit"
        )
    return labels.long()


def planned_bytes(samples: int, widths: list[int], itemsize: int) -> int:
    """Peak memory of training, without the data and the model.

    Each layer has z, a and m (the last one u instead of a); an update allocates a few more arrays.

    Examples:
        >>> planned_bytes(60_000, [784, 256, 10], itemsize=4) >> 20
        595
    """
    state = 3 * sum(widths[1:]) + TEMPORARY * max(widths[1:])
    weights = 4 * sum(a * b + b for a, b in pairwise(widths))
    return itemsize * (samples * state + weights)


def check_room(samples: int, layers: list[Any], form: BatchForm) -> None:
    """Refuse what would not fit in memory."""
    widths = [layers[0].in_features, *(layer.out_features for layer in layers)]
    need, free = planned_bytes(samples, widths, form.dtype.itemsize), available(form.device)
    if need > free:
        raise TpsgdError(
            f"dlADMM holds every layer's values for all {samples:,} samples, about {size(need)}, "
            f"and {size(free)} are free on {form.device}: use fewer samples, narrower layers or "
            "another device"
        )


def check_model(blocks: list[Block]) -> None:
    """An error that says why dlADMM cannot train a model, if it cannot."""
    for block in blocks:
        name = f"block {block.index + 1} ({block})"
        if odd := misfit(block, block is blocks[-1]):
            raise TpsgdError(
                "dlADMM knows nn.Linear layers, ReLU or LeakyReLU between them and nn.Flatten "
                f"before the first, but {name} has {odd}: use tpsgd.fit or tpsgd.fit_backprop"
            )
        if any(not p.requires_grad for p in block.layer.parameters()):
            raise TpsgdError(
                f"{name} is frozen, and dlADMM trains all layers together: call "
                "requires_grad_(True) on it, or compute its outputs and train the rest on those"
            )
        if any(hooked(module) for module in block.modules):
            raise TpsgdError(f"{name} has hooks, which dlADMM would pass by: remove them")
    layer: Any = blocks[-1].layer
    if layer.out_features < 2:
        raise TpsgdError("dlADMM needs one output per class, and the last layer has 1: give it 2")
    if layer.weight.dtype not in (torch.float32, torch.float64):
        kind = layer.weight.dtype
        raise TpsgdError(f"dlADMM computes in float32 or float64, not in {kind}: model.float()")


def misfit(block: Block, last: bool) -> str | None:
    """The first thing in a block that dlADMM does not know."""
    for module in block.modules:
        if module is block.layer:
            fits = type(module) is nn.Linear
        elif module is block.activation:
            fits = type(module) in (nn.ReLU, nn.LeakyReLU) and not last
        else:
            fits = type(module) is nn.Flatten and module in block.prologue and block.index == 0
        if not fits:
            return type(module).__name__
    return "no activation" if block.activation is None and not last else None


def described(settings: Settings, steps: StepSizes) -> dict[str, Any]:
    """The settings as plain values, for the record."""
    record = settings.describe("dladmm", cross_entropy)
    shared = ("rule", "loss", "seed", "device", "validation", "threads", "torch")
    return {name: record[name] for name in shared} | {"iterations": settings.epochs} | vars(steps)
