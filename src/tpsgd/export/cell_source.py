"""The C program of a recurrent net: tables of its layers and codes, and a face of eleven functions.

A sequence is read one time step at a time, so no buffer holds it:

    net_start(&arena);
    for each time step: net_read(&state, &arena, x, label, blocks);
    net_finish(&state, &arena, label, rate, blocks, loss);

The kernels (`kernels/cells.h`, `diagonal.h`, `sequences.h`) are written by hand.
"""

from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor

from tpsgd.export.cell_memory import CellMemory, Places, cell_memory
from tpsgd.export.recipe import BlockRecipe, Cell, Codes, Diagonal, Recipe
from tpsgd.projections import make_tables

LOCALS = {"readout": "TPS_READOUT", "l2": "TPS_L2", "l1": "TPS_L1", "inner": "TPS_INNER"}
LINE = 100  # characters


def fragments(recipe: Recipe) -> list[str]:
    """The kernels that a recurrent net needs, in their order."""
    names = ["numbers", "codes", "optimizers", "blocks", "losses", "step", "records", "cells"]
    diagonal = any(isinstance(block.layer, Diagonal) for block in recipe.blocks)
    return [*names, *(["diagonal"] if diagonal else []), "sequences"]


def switches(recipe: Recipe) -> list[str]:
    """The macros that choose what of the kernels is compiled."""
    layers = [type(block.layer) for block in recipe.blocks]
    locals_ = [block.local for block in recipe.blocks if block.local is not None]
    activations = {block.activation for block in recipe.blocks}
    losses = {recipe.loss, *(local.loss for local in locals_ if local.name == "readout")}
    chosen = {
        "TPS_WITH_CELLS": Cell in layers,
        "TPS_WITH_DIAGONAL": Diagonal in layers,
        "TPS_WITH_READOUT": any(local.name == "readout" for local in locals_),
        "TPS_WITH_TARGETS": any(local.name != "readout" for local in locals_),
        "TPS_WITH_TANH": "tanh" in activations,
        "TPS_WITH_SIGMOID": "sigmoid" in activations or "bce" in losses,
        "TPS_WITH_QUANTILES": any(local.codes.distribution == "normal" for local in locals_),
        "TPS_ADAM": recipe.optimizer == "adam",
        "TPS_MOMENTUM": recipe.optimizer == "momentum",
    }
    return [name for name, needed in chosen.items() if needed]


def cell_source(recipe: Recipe, name: str = "net") -> dict[str, str]:
    """The files of a recurrent net's program, by their names: a header, the net, the kernels."""
    memory = cell_memory(recipe)
    return {
        f"{name}.h": header(recipe, memory, name),
        f"{name}.c": source(recipe, memory, name),
        "tpsgd.h": kernels(recipe),
    }


def kernels(recipe: Recipe) -> str:
    """The kernels as one header."""
    folder = files("tpsgd.export") / "kernels"
    parts = [(folder / f"{name}.h").read_text(encoding="utf-8") for name in fragments(recipe)]
    if "TPS_WITH_QUANTILES" in switches(recipe):
        quantiles = make_tables()[2048:].tolist()
        table = _array("int32_t", "tps_quantiles", (str(q) for q in quantiles))
        parts.insert(1, f"/* Normal quantiles of k / 4096 from the middle on, times 65536 */\n{table}")
    text = "\n".join(parts)
    return f"#ifndef TPSGD_H\n#define TPSGD_H\n\n{text}\n#endif\n"


# ---- the header ----------------------------------------------------------------------------------


def header(recipe: Recipe, memory: CellMemory, name: str) -> str:
    """Sizes, the two structures and the functions of a net."""
    sizes = {
        "INPUT": recipe.inputs, "CLASSES": recipe.outputs, "BLOCKS": len(recipe.blocks),
        "PARAMS": memory.weights, "NUMBERS": memory.numbers, "ARENA": memory.arena,
        "RAM_BYTES": memory.ram, "RECORD_BYTES": memory.record_bytes,
    }  # fmt: skip
    upper = name.upper()
    defines = "\n".join(f"#define {upper}_{key} {value}" for key, value in sizes.items())
    layers = "\n".join(f" *   {block.number + 1}. {block.name}" for block in recipe.blocks)
    text = HEADER.replace("@LAYERS@", layers).replace("@SIZES@", defines)
    text = text.replace("@RULE@", recipe.rule).replace("@OPTIMIZER@", recipe.optimizer)
    return text.replace("NET", upper).replace("net_", f"{name}_")


HEADER = """/* A recurrent net that learns while it reads (@RULE@, @OPTIMIZER@):
@LAYERS@
 * This file is written by tpsgd, and yours. No heap, no library, no global variable.
 *
 * A sequence, one time step of NET_INPUT numbers at a time:
 *     net_start(&arena); net_read(...) for each step; net_finish(...).
 * Without learning: net_start(&arena); net_look(...) for each step; net_logits(...).
 * Bit i of `blocks`: block i + 1 learns. Label and blocks are the same at every step of a sequence. */
#ifndef NET_H
#define NET_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

@SIZES@
#define NET_ALL 0xFFFFFFFFu /* blocks */

enum {
    NET_OK,
    NET_BAD_INPUT,  /* not a number, or too large */
    NET_BAD_RATE,
    NET_BAD_LABEL,
    NET_DIVERGED,   /* a number has grown beyond use */
    NET_NO_SPACE,   /* for another class */
    NET_BAD_RECORD,
    NET_MEASURED,   /* the sequence has set the size of the local losses: it can be read again */
    NET_BAD_ORDER   /* of calls; or another label or other blocks within a sequence */
};

#ifndef TPS_PROGRESS
#define TPS_PROGRESS
typedef struct { /* how far a sequence has been read */
    uint32_t mode, steps, label, blocks, error, measures;
} tps_progress;
#endif

typedef struct {
    float numbers[NET_NUMBERS]; /* weights, then what the optimizer and the local losses remember */
    uint32_t classes;           /* how many there are now */
} net_state;

typedef struct {
    float numbers[NET_ARENA];
    float loss[NET_BLOCKS];
    tps_progress progress;
} net_arena;

/* The bytes that were planned */
typedef char net_planned_bytes[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

void net_begin(net_state *s); /* the weights that the model came with */
void net_start(net_arena *a); /* a sequence begins */

/* Every error leaves the weights as they were, and stays until net_start. */
int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks);
int net_finish(net_state *s, net_arena *a, uint16_t label, float rate, uint32_t blocks, float *loss);
int net_look(const net_state *s, net_arena *a, const float *x);
int net_logits(const net_state *s, net_arena *a, float *logits); /* after the steps so far */

int net_add_class(net_state *s);
float *net_weights(net_state *s); /* NET_PARAMS numbers */
void net_save(const net_state *s, uint8_t *record); /* NET_RECORD_BYTES bytes, with a checksum */
int net_load(net_state *s, const uint8_t *record);

#ifdef __cplusplus
}
#endif
#endif
"""

# ---- the net -------------------------------------------------------------------------------------


def source(recipe: Recipe, memory: CellMemory, name: str) -> str:
    """The tables of a net, and its functions."""
    defines = "\n".join(f"#define {switch}" for switch in switches(recipe))
    layers = sum(block.recurrent for block in recipe.blocks)
    text = SOURCE.replace("@SWITCHES@", defines).replace("@TABLES@", _tables(recipe, memory))
    values = {
        "LAYERS": layers, "SCRATCH": memory.scratch, "DZ": memory.dz, "LOGITS": memory.logits,
        "MOMENTS": memory.weights, "TICKS": memory.weights + memory.moments,
        "GAINS": memory.weights + memory.moments + memory.ticks,
        "CLASSES": recipe.classes, "FINGERPRINT": f"0x{fingerprint(recipe):08X}u",
    }  # fmt: skip
    for key, value in values.items():
        text = text.replace(f"@{key}@", f"{value}" if key == "FINGERPRINT" else f"{value}u")
    return text.replace("NET", name.upper()).replace("net_", f"{name}_").replace("@H@", name)


SOURCE = """#include "@H@.h"

@SWITCHES@
#include "tpsgd.h"

@TABLES@
/* What the numbers of a state are, and where the kernels find them */
static tps_reader net_reader(const net_state *s, net_arena *a)
{
    tps_reader r;
    r.layers = net_layers;
    r.count = @LAYERS@;
    r.scratch = @SCRATCH@;
    r.head.blocks = net_blocks + @LAYERS@;
    r.head.count = NET_BLOCKS - @LAYERS@;
    r.head.batch = 1;
    r.head.classes = s->classes;
    r.head.params = NET_PARAMS;
    r.head.arena = a->numbers;
    r.head.dz = @DZ@;
    r.head.logits = @LOGITS@;
    return r;
}

void net_begin(net_state *s)
{
    uint32_t i;
    for (i = 0; i < NET_PARAMS; i++) s->numbers[i] = net_first[i];
    for (; i < NET_NUMBERS; i++) s->numbers[i] = 0.0f;
    s->classes = @CLASSES@;
}

void net_start(net_arena *a)
{
    tps_start(a->numbers, NET_ARENA, &a->progress, a->loss, NET_BLOCKS);
}

int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks)
{
    tps_reader r = net_reader(s, a);
    return tps_read(&r, s->numbers, s->numbers + @GAINS@, x, label, blocks, &a->progress, a->loss);
}

int net_finish(net_state *s, net_arena *a, uint16_t label, float rate, uint32_t blocks, float *loss)
{
    tps_reader r = net_reader(s, a);
    uint32_t i;
    int error = tps_finish(&r, s->numbers, s->numbers + @MOMENTS@, s->numbers + @TICKS@,
                           s->numbers + @GAINS@, label, rate, blocks, &a->progress, a->loss);
    for (i = 0; i < NET_BLOCKS && !error; i++) loss[i] = a->loss[i];
    return error;
}

int net_look(const net_state *s, net_arena *a, const float *x)
{
    tps_reader r = net_reader(s, a);
    return tps_look(&r, s->numbers, x, &a->progress, a->loss);
}

int net_logits(const net_state *s, net_arena *a, float *logits)
{
    tps_reader r = net_reader(s, a);
    return tps_logits(&r, s->numbers, &a->progress, logits);
}

int net_add_class(net_state *s)
{
    if (s->classes >= NET_CLASSES) return NET_NO_SPACE;
    s->classes++;
    return NET_OK;
}

float *net_weights(net_state *s) { return s->numbers; }

void net_save(const net_state *s, uint8_t *record)
{
    tps_save(record, @FINGERPRINT@, s->classes, s->numbers, NET_NUMBERS);
}

int net_load(net_state *s, const uint8_t *record)
{
    return tps_load(record, @FINGERPRINT@, &s->classes, NET_CLASSES, s->numbers, NET_NUMBERS);
}
"""


def fingerprint(recipe: Recipe) -> int:
    """A number that differs for nets whose weights do not fit one another."""
    blocks = [(block.layer, block.learns, block.activation) for block in recipe.blocks]
    return crc32(repr((blocks, recipe.outputs, recipe.optimizer, recipe.seed)).encode())


def _tables(recipe: Recipe, memory: CellMemory) -> str:
    """The weights, the class codes and the blocks as C."""
    learned = [block for block in recipe.blocks if block.learns]
    fixed = [block for block in recipe.blocks if not block.learns]
    texts = [_array("float", "net_first", _weights(learned))]
    if fixed:
        texts.append(_array("float", "net_fixed", _weights(fixed)))
    texts += [
        _codes(block.number, block.local.codes) for block in recipe.blocks if block.local is not None
    ]
    rows = ",\n".join(_block(places, recipe) for places in memory.blocks)
    texts.append(f"static const tps_block net_blocks[] = {{\n{rows}}};\n")
    recurrent = [places for places in memory.blocks if places.block.recurrent]
    for places in recurrent:
        if isinstance(places.layer, Diagonal):
            texts.append(_diagonal(places))
    rows = ",\n".join(_layer(places) for places in recurrent)
    texts.append(f"static const tps_layer net_layers[] = {{\n{rows}}};\n")
    return "\n".join(texts)


def _weights(blocks: Iterable[BlockRecipe]) -> Iterable[str]:
    for block in blocks:
        for p in block.parameters.values():
            yield from _floats(p)


def _codes(number: int, codes: Codes) -> str:
    """The class codes of a block."""
    fields: dict[str, Any] = {
        "distribution": f"TPS_{codes.distribution.upper()}", "size": codes.size,
        "std": _float(codes.std), "filters": codes.filters,
    }  # fmt: skip
    text = ""
    if codes.table is not None:
        text = _array("float", f"net_codes_{number}_table", _floats(codes.table))
        fields["table"] = f"net_codes_{number}_table"
    elif codes.streams:
        starts = (_integer(start) for start in codes.streams)
        text = _array("uint64_t", f"net_codes_{number}_streams", starts)
        fields["streams"] = f"net_codes_{number}_streams"
    return f"{text}static const tps_codes net_codes_{number} = {_struct(fields)};\n"


def _block(places: Places, recipe: Recipe) -> str:
    """A block as the kernels describe it."""
    block, layer, local = places.block, places.layer, places.block.local
    last = block.number == len(recipe.blocks) - 1
    loss = recipe.loss if last or local is None else local.loss
    fields: dict[str, Any] = {
        "inputs": layer.inputs, "units": layer.outputs, "pixels": 1, "fan_in": layer.inputs,
        "weight": places.weight, "bias": _bias(places, "bias", "cells.0.bias_x"),
        "output": places.arena["output"], "pooled": layer.outputs,
        "activation": f"TPS_{block.activation.upper()}", "slope": _float(block.slope),
        "local": _local(block, last), "loss": f"TPS_{loss.upper()}",
        "rows": 1, "columns": 1, "grid_rows": 1, "grid_columns": 1,
        "slot": "TPS_NOWHERE" if places.slot is None else places.slot,
    }  # fmt: skip
    if not block.learns:
        fields["fixed"] = "net_fixed"
    if local is not None:
        fields |= {"gain": _float(local.gain), "target": _float(local.target)}
        fields["codes"] = f"&net_codes_{block.number}"
    return f"    /* {block.number + 1}. {block.name} */\n    {_struct(fields)}"


def _local(block: BlockRecipe, last: bool) -> str:
    if not block.learns:
        return "TPS_FROZEN"
    return "TPS_HEAD" if last or block.local is None else LOCALS[block.local.name]


def _bias(places: Places, *names: str) -> str | int:
    """Where a bias lies among the weights; parameters lie in their order."""
    at = places.weight
    for name, p in places.block.parameters.items():
        if name in names:
            return at
        at += p.numel()
    return "TPS_NOWHERE"


def _layer(places: Places) -> str:
    """A recurrent layer as the kernels describe it."""
    block, layer, local = places.block, places.layer, places.block.local
    codes = None if local is None else local.codes
    fields: dict[str, Any] = {
        "block": f"net_blocks + {block.number}", "params": block.weights,
        "summed": places.count.get("sums", 0), "sums": places.arena.get("sums", "TPS_NOWHERE"),
    }  # fmt: skip
    if isinstance(layer, Cell):
        fields |= {
            "weight_h": places.weight + layer.outputs * layer.inputs,
            "bias_h": _bias(places, "cells.0.bias_h"), "leak": _float(layer.leak),
        }  # fmt: skip
    else:
        fields["diagonal"] = f"&net_diagonal_{block.number}"
    if codes is not None and codes.per_step:
        fields |= {
            "per_step": 1, "seed": _integer(codes.seed), "key": _integer(codes.block),
        }  # fmt: skip
    return f"    {_struct(fields)}"


def _diagonal(places: Places) -> str:
    layer, arena = places.layer, places.arena
    fields: dict[str, Any] = {
        "states": layer.states, "loss_at": f"TPS_{layer.loss_at.upper()}",
        "feeds": int(len(places.block.shape) == 2), "x": arena["x"], "h": arena["h"],
        "traces": arena.get("traces", "TPS_NOWHERE"), "lambda": arena["lambda"],
        "mean": arena.get("mean", "TPS_NOWHERE"),
    }  # fmt: skip
    return f"static const tps_diagonal net_diagonal_{places.block.number} = {_struct(fields)};\n"


# ---- C as text -----------------------------------------------------------------------------------


def _struct(fields: Mapping[str, Any]) -> str:
    """An initialiser by the names of its fields."""
    words = [f".{name} = {value}" for name, value in fields.items()]
    return "{" + _wrapped(words, "     ") + "}"


def _array(kind: str, name: str, values: Iterable[str]) -> str:
    """A constant array."""
    return f"static const {kind} {name}[] = {{\n    {_wrapped(values, '    ')}}};\n"


def _wrapped(words: Iterable[str], indent: str) -> str:
    """Words with commas between them, in lines."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + len(word) > LINE - 6:
            lines.append(line)
            line = ""
        line += f"{', ' if line else ''}{word}"
    return f",\n{indent}".join([*lines, line])


def _floats(values: Tensor) -> Iterable[str]:
    return (_float(v) for v in values.flatten().tolist())


def _float(value: float) -> str:
    """A float32 so that the compiler reads the same bits."""
    text = f"{np.float32(value):.9g}"
    return f"{text}f" if any(c in text for c in ".e") else f"{text}.0f"


def _integer(value: int) -> str:
    return f"UINT64_C(0x{value % 2**64:016X})"
