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

from tpsgd.engine.optimizers import adam, sgd
from tpsgd.engine.settings import Memory
from tpsgd.errors import TpsgdError
from tpsgd.export.recipe import BlockRecipe, Recipe
from tpsgd.export.to_c.cell_source import cell_sources
from tpsgd.export.to_c.compiled import FLAGS, MEASURED, compiler, run_program
from tpsgd.export.to_c.source import number, sources
from tpsgd.nets.blocks import split
from tpsgd.objectives import Objective, Site
from tpsgd.rules import Rule
from tpsgd.train import sequential
from tpsgd.training.fit import fit

STEPS = 8
SEQUENCE = 6  # time steps of a sequence
LR = {"sgd": 0.01, "momentum": 0.003, "adam": 0.001}
TIMES = 8.0  # of torch's own distance from float64
ROUNDING = 1e-5  # of the largest weight: a distance that is none
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "momentum": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adam": adam,
}
MAIN = """
#include <stdio.h>
#include "net.h"
#define COUNT {count}
#define RATE {rate}
static net_state state;
static net_arena arena;
static float x[COUNT], loss[NET_BLOCKS];
static uint16_t labels[NET_BATCH];
static int step(uint32_t blocks)
{{
{step}}}
int main(int count, char **files)
{{
    FILE *in = fopen(files[count - 2], "rb"), *out = fopen(files[count - 1], "wb");
    uint32_t blocks;
    int error = 0;
    net_begin(&state);
    while (!error && fread(&blocks, 4, 1, in) == 1) {{
        if (fread(x, 4, COUNT, in) != COUNT || fread(labels, 2, NET_BATCH, in) != NET_BATCH)
            return 100;
        error = step(blocks);
    }}
    return fwrite(state.weights, 4, NET_PARAMS, out) != NET_PARAMS || fclose(out) ? 100 : error;
}}
"""
STEP = """    return net_step(&state, &arena, x, labels, RATE, blocks, loss);
"""
READ = """    int i, error = {measured};
    while (error == {measured}) {{
        net_start(&arena);
        for (i = 0, error = 0; !error && i < COUNT; i += NET_INPUT)
            error = net_read(&state, &arena, x + i, labels[0], blocks);
        if (!error) error = net_finish(&state, &arena, labels[0], RATE, blocks, loss);
    }}
    return error;
"""
OF_ADAM = (
    "some gradients of this model may cancel to zero, of which rounding is all that is left, and "
    "adam divides it by its own size; take optimizer='momentum', or report it, with the model"
)


class Distances(NamedTuple):
    """The largest difference of a weight from those that `fit` learns in float64."""

    ours: float  # of the C program
    torchs: float  # of `fit` in float32
    largest: float  # weight

    @property
    def equal(self) -> bool:
        """Whether the difference is rounding."""
        return self.ours <= max(TIMES * self.torchs, ROUNDING * self.largest)


def check(model: nn.Module, recipe: Recipe, schedule: Any, **options: Any) -> str:
    """Run the C of a recipe beside `fit`, and say in a sentence how far they are apart.

    `options` are the rule and the loss of `fit`. Without a C compiler nothing runs.
    """
    if compiler() is None:
        return "not run: there is no C compiler here (install gcc or clang, or pip's ziglang)"
    recipe = unmeasured(recipe)
    texts = (cell_sources if recipe.recurrent else sources)(recipe)
    apart = distances(model, recipe, texts, schedule, **options)
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
    recipe: Recipe,
    texts: dict[str, str],
    schedule: Any,
    steps: int = STEPS,
    flags: Sequence[str] = FLAGS,
    **options: Any,
) -> Distances:
    """How far the C program and `fit` in float32 are from `fit` in float64 after some steps."""
    x, labels = samples(recipe, steps)
    learned = run(texts, recipe, schedule, x, labels, flags)
    exact, rounded = (
        trained(model, recipe, x.to(dtype), labels, schedule=schedule, **options)
        for dtype in (torch.float64, torch.float32)
    )
    ours, theirs = (float((w.double() - exact).abs().max()) for w in (learned, rounded))
    return Distances(ours, theirs, float(exact.abs().max()))


def unmeasured(recipe: Recipe) -> Recipe:
    """The recipe with gains that its first batch measures, as `fit` does."""
    return replace(recipe, blocks=tuple(map(_unmeasured, recipe.blocks)))


def _unmeasured(block: BlockRecipe) -> BlockRecipe:
    local = block.local
    return replace(block, local=replace(local, gain=0.0)) if local and local.target else block


def run(
    texts: dict[str, str],
    recipe: Recipe,
    schedule: Any,
    x: Tensor,
    labels: Tensor,
    flags: Sequence[str] = FLAGS,
) -> Tensor:
    """The weights and class codes that the C program learns from the samples in their order."""
    learning = [1 << block.number for block in recipe.blocks if block.learns]
    batches = list(zip(x.split(recipe.batch), labels.split(recipe.batch), strict=True))
    steps = [
        np.uint32(mask).tobytes() + batch.numpy().tobytes() + label.numpy().astype("u2").tobytes()
        for mask in (learning if schedule is sequential else [sum(learning)])
        for batch, label in batches
    ]
    main = MAIN.format(
        step=READ.format(measured=MEASURED) if recipe.recurrent else STEP,
        count=batches[0][0].numel(), rate=number(LR[recipe.optimizer]),
    )  # fmt: skip
    written = run_program(texts, main, b"".join(steps), flags)
    weights = torch.frombuffer(bytearray(written), dtype=torch.float32)
    values, place, last = [], 0, recipe.blocks[-1]
    for block in (b for b in recipe.blocks if b.learns):
        for p in block.parameters.values():
            rows = weights[place : place + p.numel()].view(p.shape)
            values.append(rows[: recipe.classes] if block is last else rows)
            place += p.numel()
    for block in recipe.blocks:
        count = recipe.outputs * block.learned_codes
        values.append(weights[place : place + count].view(recipe.outputs, -1)[: recipe.classes])
        place += count
    return torch.cat([v.flatten() for v in values])


def samples(recipe: Recipe, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Random samples for some steps, with every class among their labels if they are enough."""
    count = steps * recipe.batch
    generator = torch.Generator().manual_seed(1)
    steps_of_sequences = (SEQUENCE,) if recipe.recurrent else ()
    sizes = count, *steps_of_sequences, recipe.inputs
    x = torch.randn(sizes, generator=generator, dtype=torch.float32)
    x = x.view(count, *steps_of_sequences, *recipe.shape)
    classes = 2 if recipe.classes == 1 else recipe.classes
    return x, torch.arange(count).remainder(classes)


def without_norms(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model with the norms of frozen layers folded into their weights, as in the recipe."""
    norms = []
    for block, record in zip(split(model), recipe.blocks, strict=True):
        if block.between:
            norms += block.between
            block.layer.weight = nn.Parameter(record.parameters["weight"], requires_grad=False)
            block.layer.bias = nn.Parameter(record.parameters["bias"], requires_grad=False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if any(child is norm for norm in norms):
                setattr(module, name, nn.Identity())
    return model


def trained(
    model: nn.Module, recipe: Recipe, x: Tensor, labels: Tensor, *, rule: Any, **options: Any
) -> Tensor:
    """The weights and class codes that `fit` learns from the samples in their order."""
    codes: dict[int, Tensor] = {}
    rule = (
        keeping_codes(rule, codes)
        if isinstance(rule, Rule)
        else [keeping_codes(each, codes) for each in rule]
    )
    net = without_norms(copy.deepcopy(model), recipe).to(x.dtype)
    loader = DataLoader(TensorDataset(x, labels), batch_size=recipe.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(
            net, loader, rule=rule, epochs=1, lr=LR[recipe.optimizer], seed=recipe.seed,
            optimizer=OPTIMIZERS[recipe.optimizer], progress=False,
            memory=Memory(reuse=False),  # later blocks get the samples in their order, too
            **options,
        )  # fmt: skip
    blocks = [block for block, r in zip(split(net), recipe.blocks, strict=True) if r.learns]
    parameters = [p.detach().flatten() for b in blocks for p in b.layer.parameters()]
    return torch.cat([*parameters, *(P.detach().flatten() for P in codes.values())])


def keeping_codes(rule: Rule, codes: dict[int, Tensor]) -> Rule:
    """The rule; the class codes that its blocks learn are put into `codes`, in their order."""
    make = rule.objective
    if make is None:
        return rule

    def objective(site: Site) -> Objective:
        drawn = make(site)
        if drawn.learned:
            codes[site.key.block] = drawn.tensors[0]
        return drawn

    return replace(rule, objective=objective)
