"""Operations and bytes moved per sample: a step of forward-only local rules against backprop's.

    python -m experiments.energy --out results [--only mlp]

What costs energy is arithmetic and moving numbers. Both are counted, operator by operator
(`experiments/operations.py`), in one step of training on a CPU, for each layer and for the forward
pass, the gradients and the optimizer: of every rule as `fit` takes it, all blocks in one pass, and
of backprop as a plain torch loop takes it, both with torch's fused Adam. Picking a batch is
not counted. Under `sequential`, a block's outputs are computed once more when it is passed on. The
counts of linear layers are compared with their closed form, products of inputs and outputs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tpsgd
from experiments.common import Row, program
from experiments.operations import COUNTED, OperationCount
from experiments.rows import Rows, row_arguments
from experiments.scaling import CIFAR
from tpsgd import Recurrent, rules
from tpsgd.nets.cuts.split import split
from tpsgd.train import Net, Step, simultaneous
from tpsgd.zoo.words import cnn, mlp

BATCH = 128
COUNTED_STEP = 3  # optimizers make their state in the first
RULES = [name for name in rules.ALL if name != "random"]  # which takes no step
Make = Callable[[], nn.Module]
MNIST, COLOUR, ROWS = (1, 28, 28), (3, 32, 32), (28, 28)
NETS: dict[str, tuple[tuple[int, ...], Make]] = {
    "mlp": (MNIST, lambda: mlp(MNIST, [256], 10, nn.LeakyReLU)),
    "cnn": (MNIST, lambda: cnn(MNIST, [(16, 5), (16, 5)], 10, nn.LeakyReLU)),
    "cnn, CIFAR-10": (COLOUR, lambda: cnn(COLOUR, [(16, 5), (16, 5)], 10, nn.LeakyReLU)),
    "4 convolutions, 4 dense": (COLOUR, lambda: CIFAR.model(COLOUR, 4, 4)),
    "rnn, rows": (ROWS, lambda: nn.Sequential(Recurrent.paper(28, 512), nn.Linear(512, 10))),
}
SMOKE: dict[str, tuple[tuple[int, ...], Make]] = {
    "mlp": (MNIST, lambda: mlp(MNIST, [32, 16], 10, nn.LeakyReLU)),
    "cnn": ((1, 8, 8), lambda: cnn((1, 8, 8), [(4, 3)], 10, nn.LeakyReLU)),
}


def samples(shape: tuple[int, ...], steps: int) -> tuple[Tensor, Tensor]:
    """Random samples for some steps; their values change no count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * steps, *shape, generator=generator)
    return x, torch.randint(10, (BATCH * steps,), generator=generator)


class CountedOrder:
    """`simultaneous` whose third step is counted, by block and phase."""

    def __init__(self) -> None:
        self.count, self.steps = OperationCount(), 0

    def __call__(self, net: Net) -> None:
        """Take the steps of all blocks, without recordings of them."""
        for i, learner in enumerate(net.learners):
            for owner in (learner, learner.gradient, learner.updater):
                for name in PHASES.keys() & set(dir(owner)):
                    method = self._labelled(getattr(owner, name), (i, PHASES[name]))
                    setattr(owner, name, method)
        net.wrap = lambda step, learners, source: self._counted(step)
        simultaneous(net)

    def _labelled(self, method: Callable[..., Any], label: Any) -> Callable[..., Any]:
        def labelled(*args: Any, **options: Any) -> Any:
            with self.count.label(label):
                return method(*args, **options)

        return labelled

    def _counted(self, step: Step) -> Step:
        def counted(learners: Sequence[Any], batch: Any) -> None:
            self.steps += 1
            if self.steps != COUNTED_STEP:
                return step(learners, batch)
            loaded = batch.load()
            # between blocks: the sign of the net's error, under sDFA
            with self.count, self.count.label((len(learners) - 1, "gradients")):
                step(learners, Loaded(loaded))

        return counted


PHASES = {
    "forward": "forward",
    "output": "forward",
    "error": "gradients",
    "update": "gradients",
    "finish": "gradients",
    "step_optimizer": "optimizer",
}


class Loaded:
    """A batch whose samples were picked before."""

    share, last = 1.0, True

    def __init__(self, samples: tuple[Any, Tensor]) -> None:
        self.samples, self.size = samples, len(samples[1])

    def load(self) -> tuple[Any, Tensor]:
        """The samples."""
        return self.samples


def local_step(make: Make, shape: tuple[int, ...], rule: str) -> OperationCount:
    """A step of all blocks by a rule."""
    order = CountedOrder()
    tpsgd.fit(
        make(), samples(shape, COUNTED_STEP), rule=rules.ALL[rule].make(), epochs=1,
        order=order, batch_size=BATCH, memory=tpsgd.Memory(measure=False),
    )  # fmt: skip
    return order.count


def backprop_step(make: Make, shape: tuple[int, ...]) -> OperationCount:
    """A step of a plain torch loop; a hook says to which block a backward operator belongs."""
    model, counter = make(), OperationCount()
    blocks = split(model)
    optimizers = [torch.optim.Adam(b.layer.parameters(), fused=True) for b in blocks]
    x, labels = (t.split(BATCH) for t in samples(shape, COUNTED_STEP))
    for number in range(COUNTED_STEP):
        if number < COUNTED_STEP - 1:
            cross_entropy(model(x[number]), labels[number]).backward()
        else:
            with counter:
                _pass(counter, blocks, x[number], labels[number])
        for i, optimizer in enumerate(optimizers):
            if number < COUNTED_STEP - 1:
                optimizer.step()
            else:
                with counter, counter.label((i, "optimizer")):
                    optimizer.step()
            optimizer.zero_grad()
    return counter


def _pass(counter: OperationCount, blocks: Sequence[Any], x: Tensor, labels: Tensor) -> None:
    """Forward and backward through the blocks of a net."""

    def enter(i: int, gradient: Tensor) -> None:
        counter.current = (i, "gradients")

    for i, block in enumerate(blocks):
        for module in block.modules:
            with counter.label((i, "forward")):
                x = module(x)
            if x.requires_grad:
                x.register_hook(partial(enter, i))
    with counter.label((len(blocks) - 1, "gradients")):
        loss = cross_entropy(x, labels)
        loss.backward()
    counter.current = None


def per_sample(counter: OperationCount) -> Row:
    """Counts per sample: in total, by phase and by layer; and how often each operator ran."""
    row: Row = {name: 0.0 for name in COUNTED} | {"phases": {}, "layers": []}
    for (layer, phase), counts in counter.counts.items():
        while len(row["layers"]) <= layer:
            row["layers"].append({})
        for places in (row["phases"], row["layers"][layer]):
            place = places.setdefault(phase, dict.fromkeys(COUNTED, 0.0))
            for name, number in counts.items():
                place[name] += number / BATCH
        for name, number in counts.items():
            row[name] += number / BATCH
    row["bytes"] = row["read"] + row["written"]
    return row | {"operators": counter.operators}


def linear_layers(row: Row, model: nn.Module) -> list[Row]:
    """Backprop's multiply-adds in linear layers: as counted, and inputs times outputs."""
    checks = []
    for i, block in enumerate(split(model)):
        if isinstance(block.layer, nn.Linear):
            counted = [
                row["layers"][i][phase]["multiply_adds"] for phase in ("forward", "gradients")
            ]
            products = block.layer.in_features * block.layer.out_features
            expected = [products, products * (2 if i else 1)]  # no gradient of the net's input
            checks.append({"block": i + 1, "counted": counted, "closed_form": expected})
    return checks


def main() -> None:
    """Count a step of every rule and of backprop on every net."""
    parser = row_arguments(__doc__, restarts=1)
    parser.add_argument("--only", choices=list(NETS))
    parser.add_argument("--arms", nargs="+", choices=["backprop", *RULES])
    options = parser.parse_args()
    options.device = "cpu"
    nets = SMOKE if options.smoke else NETS
    rows = Rows("energy", options, {"batch_size": BATCH, "optimizer": "Adam", "dtype": "float32"})
    for name in [options.only] if options.only in nets else list(nets):
        for arm in options.arms or ["backprop", *RULES]:
            measure(rows, name, *nets[name], arm)


def measure(rows: Rows, name: str, shape: tuple[int, ...], make: Make, arm: str) -> None:
    """The row of one arm on one net."""
    entry = rules.ALL.get(arm)
    if "rnn" in name and entry is not None and not entry.recurrent:
        return

    def compute() -> Row:
        torch.manual_seed(0)
        blocks = {"blocks": [str(block) for block in split(make())]}
        if entry is not None:
            return per_sample(local_step(make, shape, arm)) | blocks
        row = per_sample(backprop_step(make, shape))
        return row | blocks | {"linear_layers": linear_layers(row, make())}

    row = rows.measure(f"{name}, {arm}", {"net": name, "arm": arm, "shape": list(shape)}, compute)
    base = rows.rows.get(f"{name}, backprop")
    if row is not None and base is not None:
        row |= {f"{k}_ratio": row[k] / base[k] for k in ("multiply_adds", "bytes")}
        rows.save()
        figures = [
            f"{row[k]:12,.0f} (x{row[f'{k}_ratio']:.2f})" for k in ("multiply_adds", "bytes")
        ]
        print(f"{name:24} {arm:16} {figures[0]} multiply-adds {figures[1]} bytes", flush=True)


if __name__ == "__main__":
    program(main)
