"""A net of integers in C, compiled for this machine, and its accuracy beside that of floats."""

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tpsgd.engine.optimizers import sgd
from tpsgd.errors import TpsgdError
from tpsgd.export.to_c.compiled import FLAGS, compiler, run_program
from tpsgd.export.to_c.integer_scales import IntegerNet
from tpsgd.export.to_c.integer_source import integer_source
from tpsgd.maths.random import Key, permutation
from tpsgd.train import simultaneous
from tpsgd.training.evaluate import evaluate
from tpsgd.training.fit import fit

EPOCHS = 5
MOST = 1000  # samples of the check
WORSE = 0.05  # accuracy that integers may lose there
Samples = tuple[Tensor, Tensor]
MAIN = """
#include <stdio.h>
#include "net.h"
static net_state state;
static net_arena arena;
static net_input x[NET_INPUT];
static uint16_t label;
static int32_t logits[NET_CLASSES];
static int sample(FILE *in)
{{
    return fread(x, sizeof x, 1, in) == 1 && fread(&label, 2, 1, in) == 1;
}}
int main(int count, char **files)
{{
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    int i, c, best, error, right = 0;
    net_begin(&state);
    for (i = 0; i < {steps}; i++) {{
        if (!sample(in)) return 100;
        if ((error = net_step(&state, &arena, x, &label, {rate}, NET_ALL_BLOCKS, 0))) return error;
    }}
    while (sample(in)) {{
        net_forward(&state, &arena, x, logits);
        for (c = 1, best = 0; c < (int)net_classes(&state); c++)
            best = logits[c] > logits[best] ? c : best;
        right += best == label;
    }}
    return fprintf(out, "%d", right) < 0 || fclose(out) ? 100 : 0;
}}
"""


def accuracy_in_integers(
    net: IntegerNet, train: Samples, test: Samples, rate: float, epochs: int, seed: int = 0,
    nearest: bool = False,
) -> float:  # fmt: skip
    """The share of test samples that the C program gets right after some epochs.

    Each epoch has another order, that of `fit` with this seed. `nearest` rounds to the nearest
    integer instead of at random: a control, which learns less.
    """
    rows, tests = (_rows(net, *samples) for samples in (train, test))
    orders = [torch.cat(list(permutation(len(rows), Key(seed, 0, e)))) for e in range(epochs)]
    content = b"".join([*(rows[order].tobytes() for order in orders), tests.tobytes()])
    fraction = min(round(rate * 65536), 65535)  # NET_RATE
    main = MAIN.format(steps=epochs * len(rows), rate=fraction)
    flags = (*FLAGS, "-DTPS_ROUND_TO_NEAREST") if nearest else FLAGS
    return int(run_program(integer_source(net), main, content, flags)) / len(tests)


def _rows(net: IntegerNet, x: Tensor, labels: Tensor) -> Any:
    """Samples as bytes, a row each, with their labels at the end."""
    classes = labels.numpy().astype(np.uint16)[:, None].view(np.uint8)
    return np.concatenate([net.quantised(x).view(np.uint8), classes], 1)


def check_integers(
    model: nn.Module, net: IntegerNet, x: Tensor, labels: Tensor, rate: float, **options: Any
) -> str:
    """Learn the calibration samples in integers and with `fit` in floats; say how many are right.

    Integers that lose more than a few points are refused. `options` are the rule and the seed.
    """
    if compiler() is None:
        return "not run: there is no C compiler here (install gcc or clang, or pip's ziglang)"
    x, labels = x[:MOST], labels[:MOST]
    ours = accuracy_in_integers(net, (x, labels), (x, labels), rate, EPOCHS)
    floats = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(
            floats, (x, labels), lr=rate, epochs=EPOCHS, batch_size=1, optimizer=sgd,
            schedule=simultaneous, progress=False, **options,
        )  # fmt: skip
    theirs = evaluate(floats, (x, labels))
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
