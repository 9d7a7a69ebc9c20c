"""Exported C against `tpsgd.fit`, before it is left on disk."""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tpsgd.common.errors import TpsgdError
from tpsgd.data.split import of_every_class
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.fast.wrapper import wrapper
from tpsgd.engine.learners.optimizers import adam, make_optimizer, sgd
from tpsgd.engine.run import run_training
from tpsgd.engine.settings import Memory, Settings
from tpsgd.features.extensions import features_of
from tpsgd.features.target_scaling import StandardisedTargets
from tpsgd.losses import resolve as resolve_loss
from tpsgd.maths.random import Key, permutation
from tpsgd.nets.cuts.split import LAYERS
from tpsgd.objectives import Objective, Site
from tpsgd.rules import Rule, resolve
from tpsgd.train import sequential, simultaneous
from tpsgd_export.block_rows import DROPOUT, LayerRow, cut, rows_of
from tpsgd_export.read_model import norms_of
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.compiled import FLAGS, compiler, run_program
from tpsgd_export.to_c.integer_scales import IntegerNet
from tpsgd_export.to_c.source import number, read_text

STEPS = 8
SEQUENCE = 6  # time steps of a sequence
LR = {"sgd": 0.01, "momentum": 0.003, "adam": 0.001}
STEEP = 1000
TIMES = 8.0  # of torch's own distance from float64
ROUNDING = 1e-5  # of the largest weight: a distance that is none
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adam": adam,
}
NOT_RUN = "not run: there is no C compiler here (install gcc or clang, or pip's ziglang)"
OF_ADAM = (
    "some gradients of this model may cancel to zero, of which rounding is all that is left, and "
    "adam divides it by its own size; take optimizer='momentum', or report it, with the model"
)
EPOCHS = 5  # of integers
MOST = 1000  # samples that integers learn
WORSE = 0.05  # accuracy that integers may lose there
LEAST = 0.5  # accuracy below which a net is of no use, whatever floats reach


class Distances(NamedTuple):
    """The largest difference of a weight from those that `fit` learns in float64."""

    ours: float  # of the C program
    torchs: float  # of `fit` in float32
    largest: float  # weight

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding."""
        return self.ours <= max(TIMES * self.torchs, ROUNDING * self.largest)


def check(
    model: nn.Module, recipe: StepRecipe, texts: dict[str, str], order: Any, **options: Any
) -> str:
    """Run the C of a recipe beside `fit`, and say in a sentence how far they are apart.

    `options` are the rule and the loss of `fit`. Without a C compiler nothing runs.
    """
    if compiler() is None:
        return NOT_RUN
    apart = distances(model, recipe, texts, order, **options)
    if not apart.equal:
        hint = OF_ADAM if recipe.optimizer == "adam" else "please report it, with the model"
        raise TpsgdError(
            f"the C program learned other weights than tpsgd.fit, {apart.ours:.1e} away from them, "
            f"and nothing was written: {hint}"
        )
    return (
        f"run beside tpsgd.fit for {STEPS} steps: weights {apart.ours:.0e} from float64, torch's "
        f"float32 {apart.torchs:.0e}"
    )


def distances(
    model: nn.Module,
    recipe: StepRecipe,
    texts: dict[str, str],
    order: Any,
    steps: int = STEPS,
    flags: Sequence[str] = FLAGS,
    **options: Any,
) -> Distances:
    """How far the C program and `fit` in float32 are from `fit` in float64 after some steps."""
    x, labels = samples(recipe, steps)
    learned = _learned_by_c(texts, recipe, order, x, labels, flags)
    exact, rounded = (
        trained(model, recipe, x.to(dtype), labels, order=order, **options)
        for dtype in (torch.float64, torch.float32)
    )
    ours, theirs = (float((w.double() - exact).abs().max()) for w in (learned, rounded))
    return Distances(ours, theirs, float(exact.abs().max()))


def samples(recipe: StepRecipe, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Random samples for some steps, with every class among their labels if they are enough."""
    count = steps * recipe.batch
    sequence = (SEQUENCE,) if recipe.recurrent else ()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *sequence, recipe.inputs, generator=generator, dtype=torch.float32)
    x = x.view(count, *sequence, *recipe.shape)
    if recipe.targets is None:
        return x, torch.arange(count) % max(2, recipe.classes)
    numbers = torch.randn(count, recipe.classes, generator=generator, dtype=torch.float64)
    return x, (numbers * recipe.targets.scale + recipe.targets.shift).float()


def _rate(recipe: StepRecipe) -> float:
    """The learning rate; squared errors of numbers that a readout reads are so steep as STEEP."""
    readouts = any(block.local and block.local.name == "readout" for block in recipe.blocks)
    steep = recipe.targets is not None and readouts and recipe.optimizer != "adam"
    return LR[recipe.optimizer] / (STEEP if steep else 1)


def _learned_by_c(
    texts: dict[str, str],
    recipe: StepRecipe,
    order: Any,
    x: Tensor,
    labels: Tensor,
    flags: Sequence[str],
) -> Tensor:
    """The weights and class codes that the C program learns from the samples in their order."""
    learning = [1 << block.number for block in recipe.blocks if block.learns]
    batches = list(zip(x.split(recipe.batch), labels.split(recipe.batch), strict=True))
    kind = "f4" if recipe.targets else "u2"
    steps = [
        np.uint32(mask).tobytes() + batch.numpy().tobytes() + label.numpy().astype(kind).tobytes()
        for mask in (learning if order is sequential else [sum(learning)])
        for batch, label in batches
    ]
    rate, count = number(_rate(recipe)), batches[0][0].numel()
    defined = f"#define COUNT {count}\n#define RATE {rate}\n"
    defined += "#define SEQUENCES\n" * recipe.recurrent
    main = defined + read_text("templates/trial.c")
    written = run_program(texts, main, b"".join(steps), flags)
    shapes = [
        (p.shape, block is recipe.blocks[-1])
        for block in recipe.rows
        if block.learns
        for p in block.parameters.values()
    ]
    shapes += [((recipe.outputs, b.learned_codes), True) for b in recipe.blocks if b.learned_codes]
    weights = torch.frombuffer(bytearray(written), dtype=torch.float32)
    each = weights.split([torch.Size(shape).numel() for shape, _ in shapes])
    return torch.cat(
        [
            numbers.view(shape)[: recipe.classes if by_class else None].flatten()
            for numbers, (shape, by_class) in zip(each, shapes, strict=True)
        ]
    )


def trained(
    model: nn.Module, recipe: StepRecipe, x: Tensor, labels: Tensor, *, rule: Any, **options: Any
) -> Tensor:
    """The weights and class codes that `fit` learns from the samples in their order."""
    codes: dict[int, Tensor] = {}
    net = as_in(recipe, copy.deepcopy(model)).to(x.dtype)
    if recipe.targets is not None:
        labels = recipe.targets(labels)
    loader = DataLoader(TensorDataset(x, labels), batch_size=recipe.batch)
    if recipe.backprop:
        _by_backprop(net, loader, recipe)
        return torch.cat([p.detach().flatten() for p in net.parameters() if p.requires_grad])
    _fit(
        net, loader, rule=keeping_codes(rule, codes), epochs=1, lr=_rate(recipe),
        seed=recipe.seed, optimizer=OPTIMIZERS[recipe.optimizer],
        memory=Memory(reuse=False),  # later blocks get the samples in their order, too
        blocks=_cut_of(recipe), **options,
    )  # fmt: skip
    pairs = zip(_rows(net, recipe), recipe.rows, strict=True)
    parameters = [p for row, r in pairs if r.learns for p in row.block.layer.parameters()]
    return torch.cat([p.detach().flatten() for p in (*parameters, *codes.values())])


def _by_backprop(model: nn.Module, batches: Any, recipe: StepRecipe) -> None:
    """A plain loop with autograd; the last layer's activation, if there is one, is left out."""
    if recipe.link:
        assert isinstance(model, nn.Sequential)
        model = model[:-1]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(OPTIMIZERS[recipe.optimizer], parameters, _rate(recipe))
    loss = resolve_loss(recipe.loss)
    assert loss is not None
    for x, labels in batches:
        optimizer.zero_grad()
        loss.value(model(x), labels).backward()
        optimizer.step()


def _fit(model: nn.Module, data: Any, *, rule: Any, **options: Any) -> None:
    """`tpsgd.fit` without a standardisation of its own: labels that are numbers have been."""
    settings = Settings.of("fit", options | {"progress": False})
    features = [f for f in features_of(settings) if not isinstance(f, StandardisedTargets)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_training([model], data, resolve(rule), settings, features, wrapper)


def _cut_of(recipe: StepRecipe) -> Any:
    """The `blocks` of `fit` for the blocks of a recipe."""
    return list(recipe.counts) or LAYERS


def _rows(model: nn.Module, recipe: StepRecipe) -> list[LayerRow]:
    """The layers of a model in the order of the recipe's rows."""
    return [row for block in cut(model, _cut_of(recipe)) for row in rows_of(block)]


def as_in(recipe: StepRecipe, model: nn.Module) -> nn.Module:
    """The model as it is exported: norms folded, weights of a byte rounded, without dropout."""
    left_out: list[nn.Module] = [m for m in model.modules() if isinstance(m, DROPOUT)]
    rows = _rows(model, recipe)
    for row, record in zip(rows, recipe.rows, strict=True):
        norms = norms_of(row.block)
        left_out += norms
        if norms or record.scales is not None:
            for name, values in record.parameters.items():
                p = nn.Parameter(values.clone(), requires_grad=record.learns)
                setattr(row.block.layer, name, p)
    if recipe.targets is not None:
        for name, p in rows[-1].block.layer.named_parameters():
            p.data.copy_(recipe.blocks[-1].parameters[name])
    for module in list(model.modules()):
        for name, child in module.named_children():
            if any(child is other for other in left_out):
                setattr(module, name, nn.Identity())
    return model


def keeping_codes(rule: Any, codes: dict[int, Tensor]) -> Any:
    """The rule, or rules; the class codes that blocks learn are put into `codes`, in order."""
    if not isinstance(rule, Rule):
        return [keeping_codes(each, codes) for each in rule]
    make = rule.objective
    if make is None:
        return rule

    def objective(site: Site) -> Objective:
        drawn = make(site)
        if drawn.learned:
            codes[site.key.block] = drawn.tensors[0]
        return drawn

    return replace(rule, objective=objective)


Labelled = tuple[Tensor, Tensor]


def check_integers(
    model: nn.Module,
    net: IntegerNet,
    texts: dict[str, str],
    labelled: Labelled,
    rate: float,
    least: float = LEAST,
    **options: Any,
) -> str:
    """Learn the calibration samples in integers and with `fit` in floats; say how many are right.

    Integers that lose more than a few points are refused, and so are those that are right on fewer
    samples than `least`, or than the most frequent class has. `options` are the rule and the seed.
    """
    if compiler() is None:
        return NOT_RUN
    some = of_every_class(labelled[1], MOST)
    x, labels = (values[some] for values in labelled)
    ours = accuracy_in_integers(net, texts, (x, labels), (x, labels), rate, EPOCHS)
    floats = as_in(net.recipe, copy.deepcopy(model))
    _fit(
        floats, (x, labels), lr=rate, epochs=EPOCHS, batch_size=1, optimizer=sgd,
        order=simultaneous, blocks="layers", **options,
    )  # fmt: skip
    theirs = evaluate(floats, (x, labels))
    most = float(labels.bincount().max()) / len(labels)
    if ours < max(least, most, theirs - WORSE):
        raise TpsgdError(_refusal(net.numbers, (ours, theirs), rate, least, most))
    return (
        f"run beside tpsgd.fit on {len(x):,} of your samples, {EPOCHS} epochs at the rate "
        f"{rate:g}: {ours:.1%} of them right, float32 {theirs:.1%}"
    )


def _refusal(
    numbers: str, right: tuple[float, float], rate: float, least: float, most: float
) -> str:
    """Why a net of integers is not written, and what to do; `right`: integers, then floats."""
    ours, theirs = right
    result = (
        f"in {numbers} the net gets {ours:.1%} of your samples right after {EPOCHS} epochs at the "
        f"rate {rate:g}, in float32 {theirs:.1%}"
    )
    floor = f"least={least:.1%}" if least >= most else f"one class alone has {most:.1%}"
    if theirs < max(least, most):
        return (
            f"{result}, and {floor}: nothing was written; floats are too poor at this rate, too: "
            "choose another rate= or scale (rules.readout(scale=...)), train the model further, or "
            "lower least="
        )
    if ours < theirs - WORSE:
        wider = "int16 or float32" if numbers == "int8" else "float32"
        return f"{result}: nothing was written; choose another rate=, or export it with {wider}"
    return (
        f"{result}, and {floor}: nothing was written; train the model further, choose another "
        "rate=, or lower least="
    )


def accuracy_in_integers(
    net: IntegerNet,
    texts: dict[str, str],
    train: Labelled,
    test: Labelled,
    rate: float,
    epochs: int,
    seed: int = 0,
    nearest: bool = False,
) -> float:
    """The share of test samples that the C program gets right after some epochs.

    Each epoch has another order, that of `fit` with this seed. `nearest` rounds to the nearest
    integer instead of at random: a control, which learns less.
    """
    rows, tests = (_as_bytes(net, *labelled) for labelled in (train, test))
    orders = [torch.cat(list(permutation(len(rows), Key(seed, 0, e)))) for e in range(epochs)]
    content = b"".join([*(rows[order].tobytes() for order in orders), tests.tobytes()])
    fraction = min(round(rate * 65536), 65535)  # NET_RATE
    defined = f"#define STEPS {epochs * len(rows)}\n#define RATE {fraction}\n"
    flags = (*FLAGS, "-DTPS_ROUND_TO_NEAREST") if nearest else FLAGS
    main = defined + read_text("templates/integer_trial.c")
    return int(run_program(texts, main, content, flags)) / len(tests)


def _as_bytes(net: IntegerNet, x: Tensor, labels: Tensor) -> Any:
    """Samples as bytes, a row each, with their labels at the end."""
    classes = labels.numpy().astype(np.uint16)[:, None].view(np.uint8)
    return np.concatenate([net.quantised(x).view(np.uint8), classes], 1)
