"""Random layers in float32 as `fit` trains them, against float64 autograd in channels-first format.

    python benchmarks/fuzz_layers.py --cases 2000
    python benchmarks/fuzz_layers.py --cases 200 --units default avx2 sse41 --threads 1 2

A case is a net of a random layer (Conv1d, Conv2d, Linear, a residual block, a recurrent or diagonal
layer), an activation and a classifier, and one step of plain SGD by a random rule: the change of
the weights is the gradient. The reference hides every layer in a module that the library does not
know, so that autograd computes its gradients; recurrent layers, whose gradients are not autograd's,
are compared with themselves in float64. Cases run in child processes, with vector units as an older
CPU has them (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY): a child that dies, or is silent for a
minute, has found a bad case. The exit status is 1 if there is any.
"""

import argparse
import copy
import json
import os
import queue
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tpsgd
from tpsgd import rules
from tpsgd.engine import device
from tpsgd.zoo.resnet import Residual

UNITS = {
    "default": {},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
}
TOLERANCE = 2e-4  # of the largest entry of a gradient
NEAR_KINKS = 5e-2  # in a residual block, where rounding may carry a number across ReLU's kink
SILENCE = 60  # seconds without a case
CLASSES = 3
RULES = (
    rules.readout,
    lambda: rules.readout(learned=True),
    rules.tpsgd_l2,
    rules.drtp,
    rules.dfa,
)
PADDING = ("zeros", "zeros", "zeros", "zeros", "circular", "reflect")
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU)


class Unknown(nn.Module):
    """A layer that the library does not know, with its activation: autograd, channels first."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.inside = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """One module after another."""
        for module in self.inside:
            x = module(x)
        return x


class UnknownLinear(nn.Linear):
    """A linear layer that autograd trains, because its type is not torch's own."""


@dataclass
class Case:
    """A layer with its activation, what follows it, and how they learn."""

    layer: list[nn.Module]
    after: list[nn.Module]
    x: Tensor
    rule: Any
    text: str
    recurrent: bool = False
    tolerance: float = TOLERANCE


def draw(seed: int) -> Case:
    """A random case, the same for the same seed."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    samples, activation = chance.randint(1, 33), chance.choice(ACTIVATIONS)()
    kind = chance.choices(
        ("conv2d", "conv1d", "linear", "residual", "recurrent", "diagonal"), (12, 3, 2, 2, 1, 1)
    )[0]
    if kind in ("recurrent", "diagonal"):
        layer, shape = _recurrent(chance, kind)
        modules, rule = [layer], rules.readout()
    else:
        layer, shape = {"linear": _linear, "residual": _residual}.get(kind, _convolution)(
            chance, kind
        )
        modules, rule = [layer, activation], chance.choice(RULES)()
    norm = kind == "residual"
    x = torch.randn(max(2, samples) if norm else samples, *shape)
    if x.dim() == 4 and chance.random() < 0.5:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        features = copy.deepcopy(layer)(x[:2]).flatten(1).shape[1]
    flatten = [] if kind in ("recurrent", "diagonal") else [nn.Flatten()]
    after = [*flatten, nn.Linear(features, CLASSES)]
    text = f"{layer} {type(activation).__name__} {tuple(x.shape)} {rule.name}"
    tolerance = NEAR_KINKS if norm else TOLERANCE
    return Case(modules, after, x, rule, " ".join(text.split()), not flatten, tolerance)


def _convolution(chance: random.Random, kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    make, dims = (nn.Conv1d, 1) if kind == "conv1d" else (nn.Conv2d, 2)
    while True:
        groups = chance.choice((1, 1, 1, 2, 3))
        inputs, outputs = (groups * chance.randint(1, 20 // groups) for _ in range(2))
        if chance.random() < 0.1:  # depthwise
            groups, outputs = inputs, inputs * chance.choice((1, 2))
        kernel = [chance.choice((1, 1, 2, 3, 5)) for _ in range(dims)]
        kernel = kernel[:1] * dims if chance.random() < 0.7 else kernel
        stride, padding, dilation = (
            [chance.choice(values) for _ in range(dims)]
            for values in ((1, 1, 2, 3), (0, 0, 1, 2), (1, 1, 2))
        )
        if chance.random() < 0.2:  # 1 x 1, which libraries treat as a product of matrices
            kernel, padding, groups = [1] * dims, [0] * dims, 1
        sizes = [chance.randint(3, 17) for _ in range(dims)]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if all(n + 2 * p > r for n, p, r in zip(sizes, padding, reach, strict=True)):
            options = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), groups)
            bias, mode = chance.random() < 0.8, chance.choice(PADDING)
            return make(inputs, outputs, *options, bias, mode), (inputs, *sizes)


def _linear(chance: random.Random, kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    inputs = chance.randint(1, 40)
    tokens = (chance.randint(1, 5),) if chance.random() < 0.3 else ()
    return nn.Linear(inputs, chance.randint(1, 40)), (*tokens, inputs)


def _residual(chance: random.Random, kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, width = chance.randint(1, 20), chance.randint(1, 20)
    shape = (inputs, chance.randint(3, 12), chance.randint(3, 12))
    return Residual(inputs, width, chance.choice((1, 2, 2, 3))), shape


def _recurrent(chance: random.Random, kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, units, steps = chance.randint(1, 9), chance.randint(1, 20), chance.randint(1, 20)
    if kind == "diagonal":
        # a layer norm of one unit leaves nothing to compare
        return tpsgd.Recurrent.diagonal(inputs, max(2, units)), (steps, inputs)
    both = chance.random() < 0.5
    return tpsgd.Recurrent(inputs, units, bidirectional=both), (steps, inputs)


def difference(case: Case) -> float:
    """The largest difference between the gradients, in units of what is tolerated.

    Blocks learn simultaneously, so that the classifier reads what the first step has not changed.
    """
    labels = torch.arange(len(case.x)) % CLASSES
    fast = nn.Sequential(*case.layer, *case.after)
    slow = copy.deepcopy(fast).double()
    count = len(case.layer)
    if type(slow[0]) is nn.Linear:
        slow[0].__class__ = UnknownLinear
    elif not case.recurrent:
        slow = nn.Sequential(Unknown(*slow[:count]), *slow[count:])
    before = [p.detach().double() for p in fast.parameters()]
    options: dict[str, Any] = {"optimizer": tpsgd.sgd, "lr": 1.0, "epochs": 1, "batch_size": 64}
    options |= {"rule": case.rule, "order": tpsgd.simultaneous}
    options["blocks"] = [1, 1]  # a depthwise convolution by itself, too
    tpsgd.fit(fast, (case.x, labels), **options)
    tpsgd.fit(slow, (case.x.double().contiguous(), labels), **options)
    worst = 0.0
    for start, p, q in zip(before, fast.parameters(), slow.parameters(), strict=True):
        ours, reference = p.detach() - start, q.detach() - start
        size = max(float(reference.abs().max()), float(start.abs().max()) * 1e-2, 1e-3)
        error = float((ours - reference).abs().max()) / size
        worst = max(worst, error if error == error else float("inf"))
    return worst / case.tolerance


def child(start: int, count: int, threads: int) -> None:
    """Print a line for every case before and after it ran."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    device.WORTH_SHARING = 0  # so that small layers are shared among the threads too
    for seed in range(start, start + count):
        print(json.dumps([seed, None]), flush=True)
        try:
            result: float | str = difference(draw(seed))
        except Exception as error:  # a case like any other: the next one runs in this process too
            result = f"{type(error).__name__}: {error}"
        print(json.dumps([seed, result]), flush=True)


@dataclass
class Outcome:
    """What one setting of vector units and threads came to."""

    units: str
    threads: int
    cases: int = 0
    worst: float = 0.0
    bad: dict[int, str] = field(default_factory=dict)  # by seed: what happened


def run(units: str, threads: int, seeds: Sequence[int]) -> Iterator[Outcome]:
    """Run these cases in child processes; yields the outcome so far after every case."""
    outcome, start, end = Outcome(units, threads), seeds[0], seeds[-1] + 1
    while start < end:
        running = start
        for seed, error in _lines(units, threads, start, end - start):
            running = seed
            if error is None:
                continue
            outcome.cases += 1
            if isinstance(error, str):
                outcome.bad[seed] = error
            elif error > 1:
                outcome.bad[seed] = f"gradients differ by {error:.1g} times what is tolerated"
            else:
                outcome.worst = max(outcome.worst, error)
            start = seed + 1
            yield outcome
        if start < end:  # the child has died, or hangs
            outcome.cases, outcome.bad[running] = outcome.cases + 1, "the process died or hung"
            start = running + 1
            yield outcome


def _lines(units: str, threads: int, start: int, count: int) -> Iterator[tuple[int, Any]]:
    command = [sys.executable, __file__, "--child", str(start), str(count), str(threads)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | UNITS[units] | {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"},
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while line := lines.get(timeout=SILENCE):
            yield tuple(json.loads(line))
    except queue.Empty:
        return
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()  # type: ignore[union-attr]


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="in each setting")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--units", nargs="+", choices=UNITS, default=["default", "avx2"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--child", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    from rich.progress import Progress

    outcomes, seeds = [], range(options.first, options.first + options.cases)
    with Progress() as progress:
        for units in options.units:
            for threads in options.threads:
                task = progress.add_task(f"{units}, {threads} threads", total=len(seeds))
                for outcome in run(units, threads, seeds):
                    progress.update(task, completed=outcome.cases)
                outcomes.append(outcome)
    print(f"{'vector units':14}{'threads':>8}{'cases':>8}{'worst':>10}{'bad':>6}")
    for o in outcomes:
        print(f"{o.units:14}{o.threads:>8}{o.cases:>8}{o.worst:>10.2f}{len(o.bad):>6}")
        for seed, reason in o.bad.items():
            print(f"  case {seed}: {reason}: {draw(seed).text}")
    sys.exit(any(o.bad for o in outcomes))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    main()
