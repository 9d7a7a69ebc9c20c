"""Whether two versions of the library train to the same weights, bit for bit.

A refactoring must change no result. This trains a small model for every cell of rule x layers x
order, and for the options of `fit` and its siblings, from fixed seeds on one thread. Of each it
notes the losses and accuracies, and a SHA-256 of every parameter and buffer. Two versions:

    PYTHONPATH=OLD/src python benchmarks/same_weights.py --save old.json
    PYTHONPATH=NEW/src python benchmarks/same_weights.py --against old.json

The second prints a table and every cell that differs, and ends with status 1 if there is one. Run
both on one machine with one torch. A combination that is refused is noted by its error's class.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, Subset, TensorDataset

import tpsgd
from tpsgd import Padded, Place, Recurrent, adapt, augment, inits, projections, ridge, rls, rules

Record = dict[str, str]
Cells = Iterator[tuple[str, Callable[[], Record]]]
Axis = dict[str, dict[str, Any]]  # what each value is called, and the settings it stands for
USUAL = {"epochs": 2, "batch_size": 16, "seed": 3}
TAKES = {"fit_zorb": ["batch_size", "seed", "device"], "fit_dladmm": ["seed", "device"]}  # of USUAL


def memory_arguments(budget: str | None = None, **ways: Any) -> dict:
    """How to hold less: in one argument `memory`, or each way by its own name."""
    if hasattr(tpsgd, "Memory"):
        return {"memory": tpsgd.Memory(**ways) if budget is None else budget}
    return ways if budget is None else {"memory_budget": budget}


def peer(name: str) -> Callable[..., Any]:
    """ZORB or dlADMM, wherever this version has it."""
    return getattr(tpsgd, name) if hasattr(tpsgd, name) else getattr(tpsgd.peers, name)


def zoo(name: str, *sizes: Any, **options: Any) -> list[nn.Module]:
    """A VGG or a ResNet, wherever this version has it."""
    home = getattr(getattr(tpsgd, "zoo", tpsgd), name)
    return [getattr(home, name, home)(*sizes, **options)]


def samples(*shape: int, n: int = 48) -> tuple[Tensor, Tensor]:
    """A cloud of points for each of three classes."""
    draws, y = torch.Generator().manual_seed(0), torch.arange(n) % 3
    centres = torch.randn(3, prod(shape), generator=draws)
    return (centres[y] + torch.randn(n, prod(shape), generator=draws)).view(n, *shape), y


def sequences(tokens: bool = False, padded: bool = False) -> tuple[Any, Tensor]:
    """Five steps of four features or of whole numbers up to 6; or fewer steps."""
    x, y = samples(5) if tokens else samples(5, 4)
    x = (x * 2).long().abs() % 7 if tokens else x
    return Padded.of(cut(x)) if padded else x, y


def cut(x: Tensor) -> list[Tensor]:
    """Sequences of different lengths."""
    return [one[: 1 + i * 3 % len(one)] for i, one in enumerate(x)]


class Residual(nn.ModuleList):
    """x + tanh(W x): a module whose inside the library does not know."""

    def forward(self, x: Tensor) -> Tensor:
        """As said."""
        return x + torch.tanh(self[0](x))


def mlp(activation: Any, *norms: Any, dropout: float = 0.0) -> list[nn.Module]:
    """Three linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((6, 9), (9, 8)):
        layers += [nn.Linear(inputs, outputs), *(norm(outputs) for norm in norms), activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return [*layers, nn.Linear(8, 3)]


def conv2d(norm: Any = nn.BatchNorm2d, **second: Any) -> list[nn.Module]:
    """Two convolutions over pictures of 8 x 8, and a linear layer."""
    first = [nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    rest = [nn.LeakyReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)]
    return [*first, nn.Conv2d(4, 6, **second), *rest]


def recurrent(both_ways: bool = False) -> list[nn.Module]:
    """Two recurrent layers, the second with settings of its own, and a linear one."""
    ways, init = 1 + both_ways, inits.scaled_uniform(1.0, 0.5)
    own = {"leak": 0.5, "activation": nn.Sigmoid, "init": init, "bidirectional": both_ways}
    first = Recurrent(4, 5, sequence=True, bidirectional=both_ways)
    return [first, Recurrent(5 * ways, 6, **own), nn.Linear(6 * ways, 3)]


POINTS, TOKENS = partial(samples, 6), partial(sequences, tokens=True)
PICTURES, COLOURED = partial(samples, 2, 8, 8), partial(samples, 3, 8, 8)
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU)
TORCHS = partial(nn.RNN, 4, 6, 2, batch_first=True)
NETS: dict[str, tuple[Callable[[], Any], Callable[[], list[nn.Module]]]] = {
    **{f"mlp {a.__name__}": (POINTS, partial(mlp, a)) for a in ACTIVATIONS},
    "mlp PReLU": (POINTS, partial(mlp, nn.PReLU, nn.LayerNorm)),
    "mlp batch norm": (POINTS, partial(mlp, nn.ReLU, nn.BatchNorm1d)),
    "mlp dropout": (POINTS, partial(mlp, nn.Tanh, dropout=0.3)),
    "link": (POINTS, lambda: [nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 3), nn.Softmax(1)]),
    "residual": (POINTS, lambda: [
        Residual([nn.Linear(6, 6)]), nn.Tanh(), Residual([nn.Linear(6, 6)]), nn.Linear(6, 3),
    ]),
    "over steps": (sequences, lambda: [nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(25, 3)]),
    "embedding": (TOKENS, lambda: [nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)]),
    "conv1d": (partial(samples, 2, 12), lambda: [
        nn.Conv1d(2, 4, 3), nn.Tanh(), nn.MaxPool1d(2), nn.Conv1d(4, 6, 3, 2, 1, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(18, 3),
    ]),
    "conv2d": (PICTURES, partial(conv2d, kernel_size=3, padding=1)),
    "conv2d groups": (PICTURES, partial(conv2d, nn.Identity, kernel_size=3, stride=2, groups=2)),
    "conv2d same": (PICTURES, partial(conv2d, kernel_size=2, padding="same", bias=False)),
    "recurrent": (sequences, lambda: [Recurrent(4, 6), nn.Linear(6, 3)]),
    "paper's cell": (sequences, lambda: [Recurrent.paper(4, 6), nn.Dropout(0.1), nn.Linear(6, 3)]),
    "stacked": (sequences, recurrent),
    "both ways": (sequences, partial(recurrent, True)),
    "nn.RNN": (sequences, lambda: [TORCHS(), nn.Linear(6, 3)]),
    "nn.RNN dropout": (sequences, lambda: [TORCHS(dropout=0.1), nn.Linear(6, 3)]),
    "tokens": (TOKENS, lambda: [Recurrent(7, 6, activation=nn.GELU), nn.Linear(6, 3)]),
    "padded": (partial(sequences, padded=True), recurrent),
    "padded tokens": (partial(TOKENS, padded=True), lambda: [
        Recurrent(7, 3, bidirectional=True, init="zeros"), nn.Linear(6, 3),
    ]),
    "many samples": (partial(samples, 6, n=4200), partial(mlp, nn.ReLU)),
    "wide": (partial(samples, 900), lambda: [nn.Linear(900, 700), nn.ReLU(), nn.Linear(700, 3)]),
    "large maps": (partial(samples, 3, 32, 32, n=100), lambda: [
        nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(384, 3),
    ]),
    "vgg": (partial(samples, 3, 16, 16, n=8), lambda: zoo("vgg", 8, (3, 16, 16), 3, dense=[64])),
    "resnet": (COLOURED, lambda: zoo("resnet", 18, (3, 8, 8), 3, small=True, width=4)),
}  # fmt: skip
LARGE = ("many samples", "wide", "large maps", "vgg", "resnet")
SMALL = [kind for kind in NETS if kind not in LARGE]
THREE = ("mlp Tanh", "conv2d", "residual", "stacked")  # blocks, of all kinds of gradients
TIMED = ("recurrent", "stacked", "both ways", "nn.RNN", "tokens", "padded", "padded tokens")


def recorded(models: Iterable[nn.Module], runs: Iterable[Any], scores: Iterable[float]) -> Record:
    """Every number that training has left: figures as they are, tensors by their bytes."""
    record: Record = {}
    for r, run in enumerate(runs):
        for i, e in enumerate(run.history):
            figures = (e.loss, e.accuracy, e.val_loss, e.val_accuracy)
            exact = (repr(None if v is None else float(v)) for v in figures)
            record[f"run {r}, line {i}"] = f"block {e.block}, epoch {e.epoch}: {', '.join(exact)}"
    record |= {f"score {i}": repr(float(score)) for i, score in enumerate(scores)}
    for m, model in enumerate(models):
        for name, t in (*model.named_parameters(), *model.named_buffers()):
            plain = t.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            record[f"model {m}, {name}, {t.dtype} {[*t.shape]}"] = sha256(plain).hexdigest()
    return record


def trained(
    kind: str, method: Any = tpsgd.fit, form: Any = None, prepare: Any = None, **settings: Any
) -> Record:
    """A net after training. `form`: how samples come; `prepare`: what is done to the model."""
    (x, y), model = NETS[kind][0](), nn.Sequential(*NETS[kind][1]())
    if prepare:
        prepare(model)
    if "validation" in settings:
        settings["validation"] = x[:20], y[:20]
    usual = {k: USUAL[k] for k in USUAL if k in TAKES.get(method.__name__, USUAL)}
    run = method(model, form(x, y) if form else (x, y), **(usual | settings))
    return recorded([model], [run], [tpsgd.evaluate(model, (x, y))])


def restarted(kind: str, **settings: Any) -> Record:
    """Two restarts of a net."""
    data, layers = NETS[kind]
    settings = USUAL | {"restarts": 2} | settings
    many = tpsgd.fit_many(lambda: nn.Sequential(*layers()), data(), **settings)
    return recorded(many.models, many.runs, many.evaluate(data()))


def adapted(kind: str, **settings: Any) -> Record:
    """An adaptor or a probe on a backbone's pictures, or on features that were kept."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU())
    backbone = adapt.Backbone(net, taps=["1", "3"], mean=[0.5] * 3, std=[0.2] * 3)
    x, y = COLOURED()
    data = adapt.encode(backbone, (x.sigmoid(), y)) if "features" in kind else (x.sigmoid(), y)
    layers = partial(adapt.fit, layers=adapt.Layers(filters=4, kernel=3, width=8), **USUAL)
    adaptor = (adapt.probe if "probe" in kind else layers)(backbone, data, **settings)
    return recorded([adaptor], adaptor.runs.values(), [adaptor.evaluate(data)])


def grid(group: str, kinds: Iterable[str], *axes: Axis, train: Any = trained) -> Cells:
    """A cell for every kind of net and every value of each axis."""
    for kind, *labels in product(kinds, *axes):
        chosen = [axis[label] for axis, label in zip(axes, labels, strict=True)]
        settings = {key: value for part in chosen for key, value in part.items()}
        yield " | ".join((group, kind, *labels)), partial(train, kind, **settings)


def values_of(setting: str, values: dict[str, Any]) -> Axis:
    """The values of one setting, as an axis."""
    return {label: {setting: value} for label, value in values.items()}


ORDERS = values_of("order", {f.__name__: f for f in (tpsgd.sequential, tpsgd.simultaneous)})
TOGETHER = ORDERS["simultaneous"]
TARGETS = {"l2": rules.tpsgd_l2, "l1": rules.tpsgd_l1, "drtp": rules.drtp}
TARGETS["any loss"] = partial(rules.tpsgd, F.smooth_l1_loss)
DRAWN = TARGETS | {"dfa": rules.dfa, "sdfa": rules.sdfa, "readout": rules.readout}
DRAWN["learned"] = partial(rules.readout, learned=True)
UNDRAWN = {"predsim": rules.predsim, "frozen": rules.frozen, "untrained": rules.untrained}
UNDRAWN["no convolution"] = partial(rules.predsim, convolve=False)
RULES = values_of("rule", {name: make() for name, make in (DRAWN | UNDRAWN).items()})
MAIN = {f"{rule}, sequential": RULES[rule] for rule in ("l2", "learned")}
MAIN |= {f"{rule}, at once": RULES[rule] | TOGETHER for rule in ("l1", "dfa", "predsim")}
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS = {
    "sgd": tpsgd.sgd,
    "momentum": MOMENTUM,
    "AdamW": partial(torch.optim.AdamW, weight_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.02),
    "two rates": tpsgd.two_rates(x=0.5, h=0.05),
    "one each": [tpsgd.sgd, torch.optim.Adam, MOMENTUM],
    "ridge head": [MOMENTUM, torch.optim.Adam, ridge()],
}
COURSES = {
    "early stopping": {"early_stopping": tpsgd.EarlyStopping(1, 0.05), "epochs": 6},
    "validation": {"validation": True, "early_stopping": tpsgd.EarlyStopping(1), "epochs": 6},
    "falling rates": {"lr_schedule": partial(ExponentialLR, gamma=0.5), "epochs": 3},
    "callbacks": {"callbacks": [lambda e: e.block == 1 and e.epoch == 2], "epochs": 3},
    "rates and epochs": {"lr": [0.1, 0.0, 0.01], "epochs": [2, 1, 3]},
    "a last batch of one": {"batch_size": 47},
    "bfloat16": {"precision": torch.bfloat16},
    "bfloat16 model": {"prepare": nn.Module.bfloat16},
    "float64 model": {"prepare": nn.Module.double},
    "frozen layer": {"prepare": lambda model: model[0].requires_grad_(False)},
}
WAYS = {
    "kept": memory_arguments(reuse=True),
    "again": memory_arguments(reuse=False),
    "in a file": memory_arguments(reuse=tempfile.gettempdir()),
    "pieces": memory_arguments(micro_batch=5),
    "slices": memory_arguments(slices=3),
    "all": memory_arguments(reuse=False, micro_batch=5, slices=3),
}
BUDGETS = {"conv2d": "72KB", "stacked": "24KB", "wide": "8MB", "residual": "1GB"}
FORMS = {
    "numpy": lambda x, y: (x.numpy(), y.numpy()),
    "dataset": lambda x, y: Subset(TensorDataset(x, y), range(len(y))),
    "loader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=11),
    "shuffled": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=11, shuffle=True),
}
RAGGED = {
    "packed": lambda x, y: (pack_sequence(cut(x), enforce_sorted=False), y),
    "dataset of any length": lambda x, y: Subset([*zip(cut(x), y, strict=True)], range(len(y))),
}
LABELS = {
    "indices": lambda x, y: (x, y),
    "soft": lambda x, y: (x, F.one_hot(y, 3) * 0.9 + 0.1 / 3),
    "several": lambda x, y: (x, (torch.arange(len(y))[:, None] >> torch.arange(3) & 1).float()),
}
CHANGES = {
    "moved": augment.chain(augment.flip(), augment.crop(2), augment.cutout(3)),
    "scaled": augment.chain(augment.resized_crop(), augment.jitter(), augment.crop(1, True)),
    "own": lambda x: x.flip(-1),
}


def of_rules() -> Cells:
    """Rules and their variants."""
    yield from grid("rules", SMALL, RULES, ORDERS)
    yield from grid("large", LARGE, MAIN)
    codes = [getattr(projections, p) for p in ("uniform", "binary", "orthogonal", "per_filter")]
    each = product(DRAWN.items(), codes)
    drawn = {f"{name}, {code.__name__}": make(projection=code(2.0)) for (name, make), code in each}
    yield from grid("projections", THREE, values_of("rule", drawn), {"at once": TOGETHER})
    seen = {f"{n}, {place.name}": make(at=place) for n, make in DRAWN.items() for place in Place}
    yield from grid("places", THREE, values_of("rule", seen), ORDERS)
    options = ({"features": 12}, {"standardise": True}, {"features": 5, "standardise": True})
    deep = {f"{n}, {option}": make(**option) for n, make in TARGETS.items() for option in options}
    deep["readout of 5"] = rules.readout(features=5, scale=2.0)
    deep["predsim of 5"] = rules.predsim(share=0.6, features=5)
    deep["one each"] = [rules.drtp(), rules.readout(True), rules.frozen(tpsgd.mse)]
    yield from grid("variants", (*THREE, "mlp batch norm"), values_of("rule", deep), ORDERS)


def of_options() -> Cells:
    """What `fit` takes beside a rule and an order."""
    yield from grid("optimizers", THREE, values_of("optimizer", OPTIMIZERS), MAIN)
    linear = values_of("rule", {"l2": rules.tpsgd_l2(at=Place.BEFORE), "frozen": rules.frozen()})
    solvers = {solver.__name__: solver for solver in (ridge(), ridge(0.1), ridge(0.0), rls())}
    kinds = ("mlp Tanh", "over steps", "conv1d", "stacked", "padded", "wide", "large maps")
    yield from grid("solvers", kinds, linear, values_of("optimizer", solvers), ORDERS)
    yield from grid("courses", THREE, COURSES, MAIN)
    losses = {loss.name: loss for loss in (tpsgd.mse, tpsgd.cross_entropy, tpsgd.bce)}
    yield from grid("losses", THREE, values_of("loss", losses), values_of("form", LABELS), MAIN)
    yield from grid("memory", (*THREE, "mlp batch norm", "padded"), WAYS, MAIN)
    for kind, budget in BUDGETS.items():
        yield from grid("memory", [kind], {budget: memory_arguments(budget=budget)}, MAIN)
    some = {way: WAYS[way] for way in ("again", "pieces")}
    yield from grid("window", TIMED, values_of("window", {"2": 2}), some, MAIN)
    yield from grid("augment", ("conv2d",), values_of("augment", CHANGES), some, MAIN)
    yield from grid("data", THREE, values_of("form", FORMS), MAIN)
    yield from grid("data", ("stacked", "nn.RNN"), values_of("form", RAGGED), MAIN)


def of_siblings() -> Cells:
    """The other ways to train."""
    train = partial(trained, method=tpsgd.fit_backprop)
    ways = {"plain": {}, "pieces": memory_arguments(micro_batch=5)}
    ways |= {"checkpoint": {"segments": True}, "two segments": {"segments": 2}}
    ways |= {name: COURSES[name] for name in ("validation", "bfloat16", "float64 model")}
    ways |= values_of("augment", CHANGES)
    yield from grid("backprop", LARGE, {"plain": {}}, train=train)
    yield from grid("backprop", SMALL, ways, train=train)
    again = memory_arguments(reuse=False)
    ways = {"plain": {}, "unscaled": {"unscale": True}, "ridge": {"alpha": 0.1, **again}}
    kinds = (*SMALL[:4], "mlp dropout", "over steps", "large maps")
    yield from grid("zorb", kinds, ways, train=partial(trained, method=peer("fit_zorb")))
    ways = {"plain": {}, "rho": {"rho": 1e-3, "max_rho": 0.1, "validation": True}}
    train = partial(trained, method=peer("fit_dladmm"), iterations=8)
    yield from grid("dladmm", SMALL[:2], ways, train=train)
    ways = values_of("stacked", {"together": True, "one by one": False})
    yield from grid("restarts", ("over steps", *TIMED[:5]), ways, MAIN, train=restarted)
    more = {name: COURSES[name] for name in ("falling rates", "rates and epochs")}
    more |= {"backprop": {"backprop": True}, "ridge head": {"optimizer": OPTIMIZERS["ridge head"]}}
    kinds = ("mlp Tanh", "stacked")
    yield from grid("restarts", kinds, ways, RULES | more, ORDERS, train=restarted)
    streamed = memory_arguments(reuse=False) if hasattr(tpsgd, "Memory") else {"keep": False}
    ways = {"plain": {}, "two taps": {"taps": ["1", "3"]}, "streamed": streamed} | MAIN
    ways |= {c.name: {"taps": ["1", "3"], "combine": c} for c in (adapt.summed, adapt.learned)}
    ways |= {"1 GB": memory_arguments(budget="1GB"), "backprop": {"method": tpsgd.fit_backprop}}
    yield from grid("adapt", ("adaptor", "adaptor on features"), ways, train=adapted)
    yield from grid("adapt", ("probe", "probe on features"), {"plain": {}}, train=adapted)


def record_of(train: Callable[[], Record]) -> Record:
    """A cell's record, or the class of its error."""
    torch.manual_seed(0)
    try:
        return train()
    except Exception as error:
        return {"error": type(error).__name__}


def verdict(old: Record, new: Record) -> str:
    """What is wrong with a cell: the first value that differs, figures before tensors."""
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        was, now = (str(record.get(changed[0]))[:90] for record in (old, new))
        return f"{len(changed)} of {len(old)} values, first {changed[0]}: {was} -> {now}"
    return "" if new.get("error") in (None, "TpsgdError") else f"raised {new['error']}"


def main() -> None:
    """Train every cell, and save the records or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--save", type=Path, metavar="FILE", help="write the records")
    choice.add_argument("--against", type=Path, metavar="FILE", help="compare with these")
    parser.add_argument("--only", default="", metavar="WORDS", help="cells with this in their name")
    parser.add_argument("--device", help="train there: cuda, ...; by default on the CPU")
    wanted = parser.parse_args()
    USUAL.update({"device": wanted.device} if wanted.device else {})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"tpsgd in {Path(tpsgd.__file__).parent}, torch {torch.__version__}", flush=True)
    cells = [c for c in (*of_rules(), *of_options(), *of_siblings()) if wanted.only in c[0]]
    old = json.loads(wanted.against.read_text()) if wanted.against else None
    records, problems, tallies = {}, [], defaultdict(Counter)
    started = time.perf_counter()
    for i, (name, train) in enumerate(cells, 1):
        print(f"\r{i} of {len(cells)}: {name:.70}".ljust(90), end="", file=sys.stderr, flush=True)
        record = records[name] = record_of(train)
        problem = verdict(record if old is None else old.get(name, {}), record)
        problems += [f"{name}: {problem}"] if problem else []
        tally = {"cells": 1, "refused": "error" in record, "wrong": bool(problem)}
        tallies[name.partition(" |")[0]].update(tally)
    if wanted.save:
        wanted.save.write_text(json.dumps(records, indent=1))
    problems += [f"{n}: not trained" for n in old or () if wanted.only in n and n not in records]
    tallies["all"] = sum(tallies.values(), Counter())
    print(f"\n{'':12}{'cells':>8}{'refused':>8}{'wrong':>8}")
    for group, tally in tallies.items():
        print(f"{group:12}{tally['cells']:8}{tally['refused']:8}{tally['wrong']:8}")
    print(f"{time.perf_counter() - started:.0f} seconds", *problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
