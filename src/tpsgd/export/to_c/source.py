"""A feed-forward recipe as C: `net.h`, `net.c` and the kernels that it needs, in `tpsgd.h`.

The kernels in `kernels/` are written by hand. What is written here is tables of constants, the
declarations, and calls.
"""

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from textwrap import wrap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpsgd.export.recipe import BlockRecipe, Codes, Convolution, Diagonal, LocalLoss, Recipe
from tpsgd.export.records import fingerprint, learning_mask
from tpsgd.export.to_c.memory import MOMENTS, Layout, fan_in, gains, layout, pixels
from tpsgd.names import SIGNS, safe
from tpsgd.projections import make_tables

FRAGMENTS = (
    *("numbers", "codes", "optimizers", "blocks", "maps", "losses", "step", "records"),
    *("cells", "diagonal", "sequences"),
)
ONLY_FOR = {  # fragments that few nets need
    "maps": "convolutions",
    "cells": "sequences",
    "diagonal": "diagonal",
    "sequences": "sequences",
}
LICENCE = "/* Written by tpsgd.export for its user, who may do with it what they like. */"
ERRORS = ("OK", "BAD_INPUT", "BAD_RATE", "BAD_LABEL", "DIVERGED", "NO_SPACE", "BAD_RECORD")


def sources(recipe: Recipe) -> dict[str, str]:
    """The files of a net by their names."""
    places = layout(recipe)
    return {
        "net.h": _header(recipe, places),
        "net.c": _program(recipe, places),
        "tpsgd.h": kernels(recipe),
    }


def kernels(recipe: Recipe) -> str:
    """One header with the kernels that the net needs."""
    switches = [f"#define TPS_WITH_{name.upper()}" for name in sorted(needs(recipe))]
    if recipe.optimizer != "sgd":
        switches.append(f"#define TPS_{recipe.optimizer.upper()}")
    chosen = needs(recipe)
    fragments = [f for f in FRAGMENTS if f not in ONLY_FOR or ONLY_FOR[f] in chosen]
    texts = {
        name: files("tpsgd.export.to_c").joinpath(f"kernels/{name}.h").read_text()
        for name in fragments
    }
    if "quantiles" in needs(recipe):
        texts["codes"] = _quantiles() + texts["codes"]
    guard = ["#ifndef TPSGD_H", "#define TPSGD_H", "", *switches, ""]
    return "\n".join([LICENCE, *guard, *texts.values(), "#endif", ""])


def needs(recipe: Recipe) -> set[str]:
    """The kernels that are left out unless a block needs them."""
    chosen = set()
    for block in recipe.blocks:
        chosen |= {block.activation} & {"tanh", "sigmoid"}
        if isinstance(block.layer, Convolution):
            chosen.add("convolutions")
        if block.recurrent:
            chosen |= {"sequences", "diagonal" if isinstance(block.layer, Diagonal) else "cells"}
        if block.pools:
            chosen.add("pools")
        if block.local:
            chosen.add("readout" if block.local.name == "readout" else "targets")
            if block.local.codes.distribution == "normal":
                chosen.add("quantiles")
            if block.local.learned:
                chosen.add("learned_codes")
        if "bce" in (recipe.loss, block.local and block.local.loss):
            chosen.add("sigmoid")
    return chosen


def _quantiles() -> str:
    """Normal quantiles of k / 4096 from k = 2048 on; the others follow by symmetry."""
    table = make_tables()[2048:].tolist()
    return array("int32_t", "tps_quantiles", map(str, table)) + "\n"


def number(value: float) -> str:
    """A float32 as C writes it, exactly.

    Examples:
        >>> number(0.1), number(3), number(1e-30)
        ('0.1f', '3.0f', '1e-30f')
    """
    return f"{np.float32(value)!s}f"


def array(kind: str, name: str, values: Iterable[str]) -> str:
    """A constant array, a few numbers on each line."""
    values = list(values)
    lines = [", ".join(values[i : i + 8]) for i in range(0, len(values), 8)]
    body = ",\n    ".join(lines)
    return f"static const {kind} {name}[{len(values)}] = {{\n    {body}}};\n"


def floats(name: str, tensors: Iterable[Tensor]) -> str:
    """A constant array of the numbers of some tensors."""
    numbers = torch.cat([t.detach().flatten().float() for t in tensors])
    return array("float", name, map(number, numbers.numpy()))


def _header(recipe: Recipe, places: Layout) -> str:
    """The declarations of a feed-forward net."""
    sizes = {"inputs": "of a sample", "batch": f"{recipe.batch} /* samples of a step */"}
    arena = f"typedef struct {{ float numbers[{places.arena}]; }} net_arena; {SCRATCH}"
    return header(recipe, places, ERRORS, sizes | {"arena": arena, "learning": _LEARNING})


def header(recipe: Recipe, places: Layout, errors: Iterable[str], words: Mapping[str, str]) -> str:
    """The declarations: sizes, the two structs and what can be called.

    `words` say what NET_INPUT and NET_BATCH are, and have the arena and the functions that learn.
    """
    return _HEADER.format(
        licence=LICENCE,
        summary=comment(*wrap(summary(recipe), 94)),
        places=comment("Weights, which can be read and written:", *weight_places(recipe)),
        codes=error_codes(errors),
        numbers_in=recipe.inputs,
        classes=recipe.outputs,
        blocks=len(recipe.blocks),
        params=recipe.learned,
        numbers=recipe.learned + gains(recipe),
        all_blocks=f"{(1 << len(recipe.blocks)) - 1}u",
        ram=places.ram_bytes,
        members=state_members(recipe),
        **words,
    )


def error_codes(names: Iterable[str]) -> str:
    """What a function can return."""
    return "\n".join(f"#define NET_{name} {i}" for i, name in enumerate(names))


def state_members(recipe: Recipe) -> str:
    """What lasts between steps."""
    count = gains(recipe)
    note = " /* the last ones: measured gains of readouts */" if count else ""
    members = [f"float weights[{recipe.learned + count}];{note}"]
    if moments := MOMENTS[recipe.optimizer] * recipe.learned:
        members.append(f"float moments[{moments}];")
    if recipe.optimizer == "adam":
        members.append(f"float ticks[{2 * len(recipe.blocks)}];")
    if recipe.spare:
        members.append("uint32_t classes; /* that have come so far */")
    return "\n    ".join(members)


SCRATCH = "/* scratch: nothing in it lasts */"
_HEADER = """{licence}
{summary}
#ifndef NET_H
#define NET_H

#include <stdint.h>

#define NET_INPUT {numbers_in} /* numbers {inputs} */
#define NET_CLASSES {classes} /* at most */
#define NET_BATCH {batch}
#define NET_BLOCKS {blocks}
#define NET_ALL_BLOCKS {all_blocks}
#define NET_PARAMS {params}
#define NET_RECORD_BYTES (24ul + 4ul * {numbers}ul)
#define NET_RAM_BYTES {ram} /* of net_state and net_arena */

/* What a function returns */
{codes}

{places}
typedef struct {{
    {members}
}} net_state;

{arena}

/* A compiler refuses this line if the bytes are not those that were planned. */
typedef char net_ram_is_as_planned[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {{
#endif

/* The weights that the model came with. Call it first. */
void net_begin(net_state *s);

{learning}
/* How many classes there are now, and one more, up to NET_CLASSES: NET_NO_SPACE. The new class
 * changes no output of the others. */
uint32_t net_classes(const net_state *s);
int net_add_class(net_state *s);

/* The weights as NET_RECORD_BYTES bytes with a checksum, for flash, a card or Python
 * (tpsgd.export.read_weights), and back; a record of another net, or a damaged one, is refused.
 * The record has no moments: after net_load the optimizer begins anew. */
void net_save(const net_state *s, uint8_t *record);
int net_load(net_state *s, const uint8_t *record);

#ifdef __cplusplus
}}
#endif
#endif
"""
_LEARNING = """/* Logits of one sample, as many as there are classes now. */
int net_forward(const net_state *s, net_arena *a, const float *x, float *logits);

/* Learn from NET_BATCH samples, one after another in x, and their labels, from 0 on. Bit i of
 * `blocks`: block i + 1 learns; NET_ALL_BLOCKS: all. `loss` gets a number for every block.
 * Numbers that are not finite or above 1e9, a rate below 0 or above 1,000, and a label that is no
 * class are refused, and the weights stay as they were. NET_DIVERGED: a block's output left that
 * range, and neither it nor a later block learned. */
int net_step(net_state *s, net_arena *a, const float *x, const uint16_t *labels, float lr,
             uint32_t blocks, float *loss);
"""


def comment(*lines: str) -> str:
    """A comment of C. All names get into the C through here: nothing in them can end it."""
    return "/* " + "\n * ".join(safe(line, SIGNS + "[]") for line in lines) + " */"


def summary(recipe: Recipe) -> str:
    layers = ", ".join(block.name for block in recipe.blocks)
    return safe(f"{recipe.rule}, {recipe.optimizer}, loss {recipe.loss}: {layers}")


def weight_places(recipe: Recipe) -> list[str]:
    lines, place = [], 0
    for block in (b for b in recipe.blocks if b.learns):
        for name, p in block.parameters.items():
            shape = " x ".join(map(str, p.shape))
            lines.append(f"weights[{place}]: block {block.number + 1}, {name}, {shape}")
            place += p.numel()
    for block in (b for b in recipe.blocks if b.learned_codes):
        shape = f"{recipe.outputs} x {block.learned_codes}"
        lines.append(f"weights[{place}]: block {block.number + 1}, class codes that learn, {shape}")
        place += recipe.outputs * block.learned_codes
    return lines


def _program(recipe: Recipe, places: Layout) -> str:
    """The constants of the net, and the functions of the header."""
    tables, rows = [], []
    for block, at in lasting_places(recipe):
        tables += block_tables(block)
        rows.append(block_row(recipe, block, places, at))
    return _PROGRAM.format(
        licence=LICENCE,
        tables="\n".join([*tables, initial_numbers(recipe)]),
        rows=",\n".join(rows),
        params=recipe.learned,
        count=len(recipe.blocks),
        batch=recipe.batch,
        dz=places.dz,
        logits=places.logits,
        moments="s->moments" if recipe.optimizer != "sgd" else "0",
        ticks="s->ticks" if recipe.optimizer == "adam" else "0",
        gains=f"s->weights + {recipe.learned}",
        lasting=lasting_functions(recipe),
    )


_PROGRAM = """{licence}
#include "net.h"
#include "tpsgd.h"

{tables}
static const tps_block blocks[NET_BLOCKS] = {{
{rows}}};

static tps_net net_of(float *arena, uint32_t classes)
{{
    tps_net net = {{blocks, {count}, {batch}, 0, {params}, 0, {dz}, {logits}}};
    net.classes = classes;
    net.arena = arena;
    return net;
}}

int net_forward(const net_state *s, net_arena *a, const float *x, float *logits)
{{
    tps_net net = net_of(a->numbers, net_classes(s));
    return tps_forward(&net, s->weights, x, logits);
}}

int net_step(net_state *s, net_arena *a, const float *x, const uint16_t *labels, float lr,
             uint32_t learns, float *loss)
{{
    tps_net net = net_of(a->numbers, net_classes(s));
    return tps_step(&net, s->weights, {moments}, {ticks}, {gains}, x, labels, lr, learns, loss);
}}

{lasting}"""


class LastingPlaces(NamedTuple):
    """Where the numbers of a block lie that last between steps."""

    weight: int  # 0, if the block does not learn
    gain: int | str  # the slot of a measured gain, or TPS_NOWHERE
    codes: int | str  # of class codes that learn, or TPS_NOWHERE


def lasting_places(recipe: Recipe) -> Iterator[tuple[BlockRecipe, LastingPlaces]]:
    """Every block, and where its numbers lie: weights, then codes that learn, then gains."""
    weight, slot, codes = 0, 0, recipe.parameters
    for block in recipe.blocks:
        measured = bool(block.local and block.local.target)
        yield (
            block,
            LastingPlaces(
                weight if block.learns else 0,
                slot if measured else "TPS_NOWHERE",
                codes if block.learned_codes else "TPS_NOWHERE",
            ),
        )
        weight += block.weights if block.learns else 0
        slot += measured
        codes += recipe.outputs * block.learned_codes


def initial_numbers(recipe: Recipe) -> str:
    """The weights that learn and the gains, as the model came with them."""
    parameters = [p for block in recipe.blocks if block.learns for p in block.parameters.values()]
    gain = [
        torch.tensor([block.local.gain])
        for block in recipe.blocks
        if block.local and block.local.target
    ]
    return floats("initial", [*parameters, *gain])


def lasting_functions(recipe: Recipe) -> str:
    """The functions for what lasts: begin, classes, save and load."""
    return _LASTING.format(
        numbers=recipe.learned + gains(recipe),
        initial=_initial(recipe),
        classes="s->classes" if recipe.spare else f"{recipe.classes}u",
        forget=_forget(recipe),
        add=_add_class(recipe),
        fingerprint=f"0x{fingerprint(recipe):08X}u",
        mask=f"{learning_mask(recipe)}u",
        begun=f"    s->classes = {recipe.classes}u;\n" if recipe.spare else "",
        loaded="    s->classes = classes;\n" if recipe.spare else "",
        least=recipe.classes,
    )


_LASTING = """/* The optimizer begins anew. */
static void net_forget(net_state *s)
{{
{forget}}}

void net_begin(net_state *s)
{{
    uint32_t i;
{initial}{begun}    net_forget(s);
}}

uint32_t net_classes(const net_state *s)
{{
    (void)s;
    return {classes};
}}

{add}
void net_save(const net_state *s, uint8_t *record)
{{
    const uint32_t head[3] = {{{fingerprint}, {mask}, NET_CLASSES}};
    tps_save(record, head, net_classes(s), s->weights, {numbers});
}}

int net_load(net_state *s, const uint8_t *record)
{{
    const uint32_t head[3] = {{{fingerprint}, {mask}, NET_CLASSES}};
    uint32_t classes = tps_load(record, head, {least}, s->weights, {numbers});
    if (!classes) return NET_BAD_RECORD;
{loaded}    net_forget(s);
    return NET_OK;
}}
"""


def _initial(recipe: Recipe) -> str:
    """How the numbers get their first values: codes that learn are drawn."""
    parameters, behind = recipe.parameters, recipe.learned - recipe.parameters
    count = parameters + gains(recipe)
    place = f"i < {parameters}u ? i : i + {behind}u" if behind else "i"
    lines = [f"for (i = 0; i < {count}u; i++) s->weights[{place}] = initial[i];"]
    for block, at in lasting_places(recipe):
        if block.learned_codes:
            lines.append(
                f"tps_draw_codes(&codes{block.number}, NET_CLASSES, s->weights + {at.codes});"
            )
    return "".join(f"    {line}\n" for line in lines)


def _forget(recipe: Recipe) -> str:
    members = {"sgd": (), "momentum": ("moments",), "adam": ("moments", "ticks")}
    lines = [
        f"for (i = 0; i < sizeof s->{name} / sizeof(float); i++) s->{name}[i] = 0.0f;"
        for name in members[recipe.optimizer]
    ]
    lines = ["uint32_t i;", *lines] if lines else ["(void)s;"]
    return "".join(f"    {line}\n" for line in lines)


def _add_class(recipe: Recipe) -> str:
    lines = ["(void)s;", "return NET_NO_SPACE;"]
    if recipe.spare:
        full = "if (s->classes >= NET_CLASSES) return NET_NO_SPACE;"
        lines = [full, "s->classes++;", "return NET_OK;"]
    body = "\n    ".join(lines)
    return f"int net_add_class(net_state *s)\n{{\n    {body}\n}}\n"


def block_tables(block: BlockRecipe) -> list[str]:
    """The constants that a block's row points to."""
    i, texts = block.number, []
    if isinstance(block.layer, Convolution):
        numbers = ", ".join(map(str, _convolution(block.layer)))
        texts.append(f"static const tps_convolution convolution{i} = {{{numbers}}};")
    if block.pools:
        rows = ", ".join(
            f"{{TPS_POOL_{p.kind.upper()}, {p.channels}, "
            + ", ".join(map(str, (*p.size, *p.out, *p.kernel, *p.stride)))
            + "}"
            for p in block.pools
        )
        texts.append(f"static const tps_pool pools{i}[{len(block.pools)}] = {{{rows}}};")
    if block.local:
        texts += _codes(i, block.local.codes)
    if not block.learns:
        texts.append(floats(f"fixed{i}", block.parameters.values()))
    return texts


def _convolution(layer: Convolution) -> tuple[int, ...]:
    sizes = (layer.channels, *layer.size, *layer.out, *layer.kernel)
    return (*sizes, *layer.stride, *layer.padding, *layer.dilation, layer.groups)


def _codes(i: int, codes: Codes) -> list[str]:
    texts = []
    if codes.table is not None:
        texts.append(floats(f"codes_of_classes{i}", [codes.table]))
        streams, table = "0", f"codes_of_classes{i}"
    elif codes.streams:
        hashes = (f"UINT64_C(0x{s:016X})" for s in codes.streams)
        texts.append(array("uint64_t", f"streams{i}", hashes))
        streams, table = f"streams{i}", "0"
    else:
        streams, table = "0", "0"  # every time step has its own
    numbers = f"TPS_{codes.distribution.upper()}, {codes.size}, {streams}, {table}"
    row = f"{{{numbers}, {number(codes.std)}, {codes.filters}}}"
    return [*texts, f"static const tps_codes codes{i} = {row};"]


def block_row(recipe: Recipe, block: BlockRecipe, places: Layout, at: LastingPlaces) -> str:
    """A block's entry in the table of blocks."""
    i, last = block.number, block.number == len(recipe.blocks) - 1
    weight, bias = block.parameters["weight"], block.parameters.get("bias")
    units = weight.shape[0]
    local = block.local
    kind = "HEAD" if last and block.learns else local.name.upper() if local else "FROZEN"
    loss = (local.loss if local else recipe.loss).upper()
    rows, columns = (1, *block.shape[1:])[-2:] if len(block.shape) > 1 else (1, 1)
    grid = (local.grid or (1, 1)) if local else (1, 1)
    fields = [
        *(block.layer.inputs, units, pixels(block), fan_in(block)),
        *(at.weight, "TPS_NOWHERE" if bias is None else at.weight + weight.numel()),
        *("0" if block.learns else f"fixed{i}", places.outputs[i], block.pooled),
        *(f"TPS_{block.activation.upper()}", f"TPS_{kind}", f"TPS_{loss}", len(block.pools)),
        number(block.slope),
        f"&convolution{i}" if isinstance(block.layer, Convolution) else "0",
        f"pools{i}" if block.pools else "0",
        f"&codes{i}" if local else "0",
        *(rows, columns, *grid),
        *(*_gain(local), at.gain, at.codes),
    ]
    return f"    {comment(block.name)}\n    {{{', '.join(map(str, fields))}}}"


def _gain(local: LocalLoss | None) -> tuple[str, str]:
    return (number(local.gain), number(local.target)) if local else ("1.0f", "0.0f")
