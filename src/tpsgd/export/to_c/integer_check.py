"""A net of integers in C, compiled for this machine, and its accuracy beside that of floats."""

import copy
import ctypes
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd.engine.optimizers import sgd
from tpsgd.errors import TpsgdError
from tpsgd.export.to_c.compiled import FLAGS, compiled_library, compiler
from tpsgd.export.to_c.integer_scales import IntegerNet
from tpsgd.export.to_c.integer_source import integer_source
from tpsgd.maths.random import Key, permutation
from tpsgd.train import simultaneous
from tpsgd.training.evaluate import evaluate
from tpsgd.training.fit import fit

EPOCHS = 5
MOST = 1000  # samples of the check
WORSE = 0.05  # accuracy that integers may lose there
DRIVER = r"""
#include "net.h"
static net_state state;
static net_arena arena;
void begin(void) { net_begin(&state); }
int epoch(const net_input *x, const uint16_t *labels, const int32_t *order, int count, int rate,
          int blocks)
{
    int i;
    for (i = 0; i < count; i++)
        if (net_step(&state, &arena, x + order[i] * NET_INPUT, labels + order[i], (uint16_t)rate,
                     (uint32_t)blocks, 0)) return 1;
    return 0;
}
int right(const net_input *x, const uint16_t *labels, int count)
{
    int i, c, best, sum = 0;
    int32_t z[NET_CLASSES];
    for (i = 0; i < count; i++) {
        net_forward(&state, &arena, x + i * NET_INPUT, z);
        for (c = 1, best = 0; c < (int)net_classes(&state); c++) best = z[c] > z[best] ? c : best;
        sum += best == labels[i];
    }
    return sum;
}
"""


class CompiledIntegers:
    """The C of a net of integers, which learns whole epochs.

    `nearest` rounds to the nearest integer instead of at random: a control, which learns less.
    """

    def __init__(self, net: IntegerNet, nearest: bool = False) -> None:
        self.net, self.blocks = net, (1 << len(net.layers)) - 1
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (integer_source(net) | {"probe.c": DRIVER}).items():
                Path(folder, name).write_text(text, encoding="utf-8")
            flags = (*FLAGS, "-DTPS_ROUND_TO_NEAREST") if nearest else FLAGS
            self.library: Any = compiled_library(Path(folder), flags=flags)
        self.library.begin()

    def learn(self, x: Tensor, labels: Tensor, rate: float, epochs: int, seed: int = 0) -> None:
        """Some epochs, each in another order, that of `fit` with this seed."""
        samples, classes = self.net.quantised(x), labels.numpy().astype(np.uint16)
        for epoch in range(epochs):
            drawn = torch.cat(list(permutation(len(samples), Key(seed, 0, epoch))))
            order = drawn.numpy().astype(np.int32)
            addresses = [_address(a) for a in (samples, classes, order)]
            fraction = min(round(rate * 65536), 65535)  # NET_RATE
            if self.library.epoch(*addresses, len(order), fraction, self.blocks):
                raise TpsgdError(f"the exported net refused a step at the rate {rate:g}")

    def accuracy(self, x: Tensor, labels: Tensor) -> float:
        """The share of samples that are classified correctly."""
        samples, classes = self.net.quantised(x), labels.numpy().astype(np.uint16)
        right = self.library.right(_address(samples), _address(classes), len(samples))
        return right / len(samples)


def _address(values: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def check_integers(
    model: nn.Module, net: IntegerNet, x: Tensor, labels: Tensor, rate: float, **options: Any
) -> str:
    """Learn the calibration samples in integers and with `fit` in floats; say how many are right.

    Integers that lose more than a few points are refused. `options` are the rule and the seed.
    """
    if compiler() is None:
        return "not run: there is no C compiler here (install gcc or clang, or pip's ziglang)"
    x, labels = x[:MOST], labels[:MOST]
    integers = CompiledIntegers(net)
    integers.learn(x, labels, rate, EPOCHS)
    floats = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(
            floats, (x, labels), lr=rate, epochs=EPOCHS, batch_size=1, optimizer=sgd,
            schedule=simultaneous, progress=False, **options,
        )  # fmt: skip
    ours, theirs = integers.accuracy(x, labels), evaluate(floats, (x, labels))
    if ours < theirs - WORSE:
        raise TpsgdError(
            f"in {net.numbers} the net gets {ours:.1%} of your samples right after {EPOCHS} "
            f"epochs, in float32 {theirs:.1%}: nothing was written; export it with int16 or "
            "float32"
        )
    return (
        f"run beside tpsgd.fit on {len(x):,} of your samples, {EPOCHS} epochs: {ours:.1%} of them "
        f"right, float32 {theirs:.1%}"
    )
