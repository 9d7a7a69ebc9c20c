"""From a `StepRecipe` and labelled calibration samples to a net of integers with its binary points.

A number v with binary point p is v / 2^p. The input's point is the one with the smallest mean
square error on the samples. A rehearsal of the training in float, on the same samples, shows how
large weights and activations become; their points leave room for that.
"""

from dataclasses import dataclass
from math import floor, frexp, log2, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key, splitmix64, streams
from tpsgd_export.recipe import BlockRecipe, Codes, Convolution, Dense, StepRecipe
from tpsgd_export.to_c.memory import fan_in

Array = NDArray[np.generic]
Floats = NDArray[np.float32]
Integers = NDArray[np.int32]

BITS = {"int8": 8, "int16": 16}
ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 1, "tanh": 2}
ACTIVATION_LIMIT = 2047  # TPS_ACTIVATION_LIMIT
TANH_POINT = 11
SUM_LIMIT = (1 << 30) - 1  # TPS_BIAS_LIMIT; also of a sum of products
SUM_POINT = 24  # at most: biases reach 64
LOG_POINT = 12  # TPS_LOG_POINT
SMALLEST_SLOPE = 2.0**-10
MOST_PIXELS = 65_536  # of a map that learns: sums of its derivatives stay in 32 bits
MOST_OF_A_CELL = 32_768  # pixels, likewise
SATURATED = 0.001  # share of the weights of a layer that may be larger than its limit


@dataclass(frozen=True)
class Factor:
    """mantissa / 2^point; the mantissa has 14 bits, or is 0."""

    mantissa: int
    point: int


@dataclass(frozen=True)
class IntegerLayer:
    """A layer in integers, as `tps_int_layer` in kernels/integers/layers.h.

    `inputs` are those of a unit. `codes` has a row for each class: 1 is the code +1, 0 is -1.
    """

    inputs: int
    outputs: int
    weights: Integers
    biases: Integers | None
    limit: int
    activation: int
    weight_point: int
    input_point: int
    output_point: int
    slope: Factor
    gain: Factor
    log_gain: Factor
    codes: NDArray[np.uint8] | None
    learns: bool
    block: BlockRecipe  # whose convolution and pools it has, if any
    cells: tuple[int, int] = (1, 1)  # of a readout: pixels of the smallest, cells of a pixel

    @property
    def size(self) -> int:
        """Its outputs before pools; `outputs` of a convolution are its filters."""
        return self.block.size if isinstance(self.block.layer, Convolution) else self.outputs

    @property
    def sum_point(self) -> int:
        """The binary point of sums of products, and of biases."""
        return self.weight_point + self.input_point


@dataclass(frozen=True)
class IntegerNet:
    """A net of integers; `random` is where its xorshift32 starts."""

    recipe: StepRecipe
    numbers: str  # int8 or int16
    layers: tuple[IntegerLayer, ...]
    signed: bool  # the input: int8, or uint8
    input_point: int
    random: int

    def quantised(self, samples: Tensor | Array) -> Array:
        """Samples as the bytes that `net_step` reads."""
        x = np.asarray(samples, np.float32).reshape(len(samples), -1)
        low, high = input_range(self.signed)
        kind = np.int8 if self.signed else np.uint8
        v = np.nan_to_num(x * np.float32(2.0**self.input_point), posinf=high, neginf=low)
        rounded = np.copysign(np.floor(np.abs(v) + np.float32(0.5)), v)
        return np.clip(rounded, low, high).astype(kind)


def integer_net(
    recipe: StepRecipe,
    samples: Tensor | Array,
    labels: Tensor | Array,
    numbers: str = "int8",
    *,
    rate: float = 2.0**-7,
    epochs: int = 1,
) -> IntegerNet:
    """A recipe's net in int8 or int16, with binary points for these samples.

    Args:
        recipe: of dense layers that learn by `readout` with binary codes, or not at all, and a
            cross-entropy at the end; sgd, batch 1.
        samples: inputs like those that the net will learn from, a few hundred or more.
        labels: their classes.
        numbers: of the weights: int8 or int16.
        rate: the learning rate of the rehearsal.
        epochs: over the samples, in the rehearsal.
    """
    _refuse(recipe, numbers)
    x, y = _calibration(recipe, samples, labels)
    if not (0 < rate < 1 and epochs >= 1):
        raise TpsgdError(f"rate must be between 0 and 1 and epochs at least 1: {rate}, {epochs}")
    signed = bool((x < 0).any())
    point = _input_point(x, signed)
    layers, at = [], point
    for i, block in enumerate(_rehearsed(recipe, x, y, rate, epochs)):
        widest = ACTIVATION_LIMIT if i else input_range(signed)[1] + 1
        layers.append(_layer(block, BITS[numbers], at, widest))
        at = layers[-1].output_point
    start = int(streams(Key(recipe.seed, len(layers)), [0]))
    return IntegerNet(recipe, numbers, tuple(layers), signed, point, start % 2**32 or 1)


def input_range(signed: bool) -> tuple[int, int]:
    """The smallest and the largest input."""
    return (-128, 127) if signed else (0, 255)


def factor(value: float) -> Factor:
    """A number over 0 as a mantissa of 14 bits and a binary point."""
    if not value:
        return Factor(0, 0)
    exponent = frexp(value)[1]
    mantissa = round(value * 2.0 ** (14 - exponent))
    return Factor(mantissa, 14 - exponent) if mantissa < 1 << 14 else Factor(1 << 13, 13 - exponent)


def _refuse(recipe: StepRecipe, numbers: str) -> None:
    if numbers not in BITS:
        raise TpsgdError(f"numbers must be int8 or int16, got {numbers!r}")
    if recipe.optimizer != "sgd" or recipe.batch != 1:
        raise TpsgdError(
            f"integers learn by plain sgd, one sample at a time; not by {recipe.optimizer} in "
            f"batches of {recipe.batch}"
        )
    if recipe.backprop:
        raise TpsgdError(f"{numbers} learns by readout; backprop is exported as float32")
    for block in recipe.blocks:
        who = f"block {block.number + 1} ({block.name})"
        if not isinstance(block.layer, (Dense, Convolution)):
            raise TpsgdError(
                f"{who}: a net of integers has dense layers and convolutions only; export floats"
            )
        if block.activation not in ACTIVATIONS:
            raise TpsgdError(
                f"{who}: {block.activation} needs floats; ReLU, LeakyReLU, Tanh do not"
            )
        if block.activation == "leaky_relu" and not SMALLEST_SLOPE <= block.slope <= 1:
            raise TpsgdError(f"{who}: a slope of {block.slope:g} is outside of 2^-10 to 1")
        local = block.local
        if local and (local.name != "readout" or local.loss != "cross_entropy"):
            raise TpsgdError(
                f"{who}: integers learn by readout with cross_entropy only (int8 weights under "
                "other rules lose many points); use readout, or export floats"
            )
        if local and (local.codes.distribution != "binary" or local.learned):
            raise TpsgdError(
                f"{who}: integers take fixed codes of +1 and -1, which need no multiplication; use "
                "rules.readout(projection=tpsgd.projections.binary()) (--rule readout)"
            )
    if recipe.loss != "cross_entropy":
        raise TpsgdError(f"a net of integers ends in cross_entropy; {recipe.loss} needs floats")


def _calibration(
    recipe: StepRecipe, samples: Tensor | Array, labels: Tensor | Array
) -> tuple[Floats, NDArray[np.int64]]:
    """Calibration samples as rows of float32, with their classes."""
    x, y = np.asarray(samples, np.float32), np.asarray(labels).ravel()
    if x.ndim < 2 or prod(x.shape[1:]) != recipe.inputs or not len(x):
        raise TpsgdError(
            f"calibration needs samples of {recipe.inputs} numbers, got shape {x.shape}"
        )
    if not np.isfinite(x).all():
        raise TpsgdError("calibration samples have numbers that are not finite")
    check_classes(y, len(x), recipe.classes)
    return x.reshape(len(x), -1), y.astype(np.int64)


def check_classes(y: NDArray[Any], samples: int, classes: int) -> None:
    """Refuse labels that are no class, or more or fewer than the samples."""
    numbers = y.dtype.kind in "buif"
    wrong = y[~((y >= 0) & (y < classes))] if numbers else y
    if len(wrong):
        problem = repr(wrong.tolist()[0])
    elif len(y) != samples:
        problem = f"{len(y)} labels for {samples} samples"
    else:
        return
    raise TpsgdError(
        f"labels must have a class from 0 to {classes - 1} for each of the samples, got {problem}"
    )


def _input_point(x: Floats, signed: bool) -> int:
    """The binary point with the smallest mean square error of rounding and saturation."""

    def error(point: int) -> float:
        scaled = x * 2.0**point
        rounded = np.clip(scaled.round(), *input_range(signed))
        return float(np.square(rounded - scaled).mean()) / 4.0**point

    point = min(range(16), key=error)
    if error(point) > 0.01 * float(np.square(x).mean()):
        raise TpsgdError(
            f"inputs up to {np.abs(x).max():.3g} do not fit into 8 bits; divide them by a number"
        )
    return point


def code_bits(codes: Codes) -> NDArray[np.uint8]:
    """A row of bits for each class: 1 where its code is +1."""
    signed = [[s - 2**64 if s >= 2**63 else s] for s in codes.streams]
    hashes = splitmix64(torch.arange(codes.size), torch.tensor(signed))
    return (hashes < 0).numpy().astype(np.uint8)


def _rehearsed(
    recipe: StepRecipe, x: Floats, labels: NDArray[np.int64], rate: float, epochs: int
) -> "list[_FloatBlock]":
    """The blocks after they have learned from the samples in float."""
    blocks, y = [], x
    for block in recipe.blocks:
        kind = _FloatMaps if isinstance(block.layer, Convolution) else _FloatBlock
        blocks.append(kind(block, y))
        y = blocks[-1].output(y)
    order = np.random.default_rng(recipe.seed)
    with np.errstate(invalid="ignore"):  # OpenBLAS computes on unused lanes of short vectors
        for i in (i for _ in range(epochs) for i in order.permutation(len(x))):
            y = x[i]
            for block in blocks:
                y = block.step(y, labels[i], np.float32(rate))
    return blocks


class _FloatBlock:
    """A block that learns in float32, and how large its numbers become.

    `gain` is the factor of its logits; a calibrated readout measures the samples for it.
    """

    def __init__(self, block: BlockRecipe, samples: Floats) -> None:
        self.block, self.largest_output = block, 0.0
        self.slope = np.float32(1.0 if block.activation == "none" else block.slope)
        self.W = block.parameters["weight"].numpy().copy()
        self.W0 = np.abs(self.W)
        bias = block.parameters.get("bias")
        self.b = None if bias is None else bias.numpy().copy()
        self.gain, self.P = 1.0, None
        if local := block.local:
            rms = float(np.sqrt(np.square(self.output(samples)).mean())) or 1.0
            gain = local.target / rms if local.target else local.gain
            self.gain = gain * local.codes.std
            signs = code_bits(local.codes).astype(np.float32) * 2 - 1
            self.P = signs * np.float32(self.gain)

    def output(self, x: Floats) -> Floats:
        """Of one sample, or of several."""
        z = x @ self.W.T
        if self.b is not None:
            z = z + self.b
        return np.tanh(z) if self.block.activation == "tanh" else np.where(z > 0, z, self.slope * z)

    def step(self, x: Floats, label: int, rate: np.float32) -> Floats:
        """Forward, update, and the output from before the update."""
        y = self.output(x)
        self.largest_output = max(self.largest_output, float(np.abs(y).max()))
        if self.block.learns:
            logits = y if self.P is None else self.P @ y
            e = np.exp(logits - logits.max())
            e /= e.sum()
            e[label] -= 1
            dz = e if self.P is None else (e @ self.P) * self._derivative(y)
            self.W -= np.outer(rate * dz, x)
            if self.b is not None:
                self.b -= rate * dz
        return y

    def _derivative(self, y: Floats) -> Floats:
        if self.block.activation == "tanh":
            return 1 - y * y
        return np.where(y > 0, np.float32(1), self.slope)

    def largest_weight(self) -> float:
        """The size of the largest weights at the beginning and at the end, but for a few."""
        return max(float(np.quantile(np.abs(W), 1 - SATURATED)) for W in (self.W0, self.W))


class _FloatMaps(_FloatBlock):
    """A convolution that learns in float32."""

    def __init__(self, block: BlockRecipe, samples: Floats) -> None:
        self.block, self.largest_output, layer = block, 0.0, block.layer
        assert isinstance(layer, Convolution)
        shape = layer.filters, layer.channels // layer.groups, *layer.kernel
        self.weight = block.parameters["weight"].clone().view(shape)
        self.W0 = np.abs(self.weight.numpy().reshape(layer.filters, -1))
        bias = block.parameters.get("bias")
        self.bias = None if bias is None else bias.clone()
        self.gain, self.codes = 1.0, None
        if local := block.local:
            maps = torch.cat([self._activated(x) for x in torch.tensor(samples).split(256)])
            rms = float(self._features(maps).square().mean().sqrt()) or 1.0
            self.gain = (local.target / rms if local.target else local.gain) * local.codes.std
            signs = code_bits(local.codes).astype(np.float32) * 2 - 1
            self.codes = torch.tensor(signs * np.float32(self.gain))

    @property
    def W(self) -> Floats:
        return self.weight.numpy().reshape(len(self.weight), -1)

    def _activated(self, x: Tensor) -> Tensor:
        layer, kind = self.block.layer, self.block.activation
        assert isinstance(layer, Convolution)
        maps = x.reshape(-1, layer.channels, *layer.size)
        options = layer.stride, layer.padding, layer.dilation, layer.groups
        z = functional.conv2d(maps, self.weight, self.bias, *options)
        slope = 1.0 if kind == "none" else self.block.slope
        return z.tanh() if kind == "tanh" else functional.leaky_relu(z, slope)

    def _features(self, maps: Tensor) -> Tensor:
        local = self.block.local
        grid = local.grid if local else None
        return (functional.adaptive_avg_pool2d(maps, grid) if grid else maps).flatten(1)

    def _pooled(self, maps: Tensor) -> Floats:
        for pool in self.block.pools:
            if pool.kind == "cells":
                maps = functional.adaptive_avg_pool2d(maps, pool.out)
            else:
                of = functional.max_pool2d if pool.kind == "max" else functional.avg_pool2d
                maps = of(maps, pool.kernel, pool.stride)
        return maps.flatten(1).numpy()

    @torch.no_grad()
    def output(self, x: Floats) -> Floats:
        batches = torch.tensor(x).split(256)
        return np.concatenate([self._pooled(self._activated(each)) for each in batches])

    def step(self, x: Floats, label: int, rate: np.float32) -> Floats:
        learned = [p for p in (self.weight, self.bias) if p is not None and self.block.learns]
        with torch.enable_grad():
            for p in learned:
                p.requires_grad_(True)
            maps = self._activated(torch.tensor(x)[None])
            if self.codes is not None:
                logits = self._features(maps) @ self.codes.T
                loss = functional.cross_entropy(logits, torch.tensor([label]))
                gradients = torch.autograd.grad(loss, learned)
                for p, g in zip(learned, gradients, strict=True):
                    p.requires_grad_(False).sub_(float(rate) * g)
        maps = maps.detach()
        self.largest_output = max(self.largest_output, float(maps.abs().max()))
        return self._pooled(maps)[0]


def _cells(block: BlockRecipe) -> tuple[int, int]:
    """Pixels of the smallest cell that a readout averages, and cells of a pixel at most."""
    grid = block.local.grid if block.local else None
    if grid is None or not isinstance(block.layer, Convolution):
        return 1, 1
    least, overlap = [], []
    for size, count in zip(block.layer.out, grid, strict=True):
        cuts = [(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]
        least.append(min(end - first for first, end in cuts))
        overlap.append(max(sum(a <= n < b for a, b in cuts) for n in range(size)))
    return prod(least), prod(overlap)


def _refuse_large_maps(who: str, pixels: int, of_a_cell: int) -> None:
    """Maps whose sums over pixels, or over the smallest cell of a readout, leave 32 bits."""
    if pixels > MOST_PIXELS or of_a_cell > MOST_OF_A_CELL:
        raise TpsgdError(
            f"{who}: a map of {pixels:,} pixels, {of_a_cell:,} of them in the smallest cell of its "
            f"readout, does not learn in integers ({MOST_PIXELS:,} and {MOST_OF_A_CELL:,} at "
            "most); take a larger stride, or export floats"
        )


def _layer(rehearsed: _FloatBlock, bits: int, input_point: int, widest: int) -> IntegerLayer:
    """A block in integers; `widest` is the size of its largest input."""
    block, gain = rehearsed.block, rehearsed.gain
    layer, who = block.layer, f"block {block.number + 1} ({block.name})"
    inputs, cells = fan_in(block), _cells(block)
    if block.learns and isinstance(layer, Convolution):
        _refuse_large_maps(who, prod(layer.out), cells[0])
    limit = min((1 << (bits - 1)) - 1, SUM_LIMIT // (inputs * widest) - 1)  # weights: -limit - 1 on
    if limit < 63 or inputs > 65535:
        raise TpsgdError(
            f"{who}: sums over {inputs} inputs leave 32 bits; make it narrower, or export floats"
        )
    weight_point = min(_point(limit, rehearsed.largest_weight()), SUM_POINT - input_point)
    sum_point = weight_point + input_point
    output_point = min(_point(ACTIVATION_LIMIT, rehearsed.largest_output), sum_point)
    if block.activation == "tanh":
        output_point = TANH_POINT
    logits_at = output_point if block.local is not None else sum_point
    log_gain = factor(gain * log2(np.e) * 2.0 ** (LOG_POINT - logits_at))
    if not 0 <= log_gain.point <= 40:
        raise TpsgdError(
            f"{who}: logits with a gain of {gain:.3g} on outputs up to "
            f"{rehearsed.largest_output:.3g} do not fit into integers; take a smaller rate=, or "
            "leave scale= of the readout to its calibration"
        )
    slope = 1.0 if block.activation in ("none", "tanh") else block.slope
    bias = block.parameters.get("bias")
    return IntegerLayer(
        inputs, layer.filters if isinstance(layer, Convolution) else layer.outputs,
        _integers(block.parameters["weight"], weight_point, limit),
        None if bias is None else _integers(bias, sum_point, SUM_LIMIT), limit,
        ACTIVATIONS[block.activation], weight_point, input_point, output_point, factor(slope),
        factor(gain * cells[1] / cells[0]), log_gain,
        None if block.local is None else code_bits(block.local.codes), block.learns, block, cells,
    )  # fmt: skip


def _point(limit: int, size: float) -> int:
    """The largest binary point at which numbers of this size stay within the limit."""
    return max(0, floor(log2(limit / max(size, 2.0**-20))))


def _integers(values: Tensor, point: int, limit: int) -> Integers:
    scaled = np.floor(values.double().numpy() * 2.0**point + 0.5)
    return np.clip(scaled, -limit, limit).astype(np.int32)
