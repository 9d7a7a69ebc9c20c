"""A recurrent recipe as C: a net that reads one time step at a time, and learns meanwhile.

What differs from a feed-forward net is its face (`net_start`, `net_read`, `net_finish`, and without
learning `net_look`, `net_logits`) and a table of recurrent layers. Weights, records and classes are
those of `source`; the kernels are `cells.h`, `diagonal.h` and `sequences.h`.
"""

from collections.abc import Iterator

from tpsgd.export.recipe import BlockRecipe, Cell, Diagonal, Recipe
from tpsgd.export.to_c.cell_memory import CellLayout, cell_layout
from tpsgd.export.to_c.memory import gains
from tpsgd.export.to_c.source import (
    ERRORS,
    LICENCE,
    block_row,
    block_tables,
    error_codes,
    initial_numbers,
    kernels,
    lasting_functions,
    number,
    state_members,
    summary,
    weight_places,
)

ANSWERS = (*ERRORS, "MEASURED", "BAD_ORDER")


def cell_sources(recipe: Recipe) -> dict[str, str]:
    """The files of a recurrent net by their names."""
    places = cell_layout(recipe)
    return {
        "net.h": _header(recipe, places),
        "net.c": _program(recipe, places),
        "tpsgd.h": kernels(recipe),
    }


def _header(recipe: Recipe, places: CellLayout) -> str:
    """The declarations: sizes, the two structs and what can be called."""
    return _HEADER.format(
        licence=LICENCE,
        summary=summary(recipe),
        places=weight_places(recipe),
        codes=error_codes(ANSWERS),
        inputs=recipe.inputs,
        classes=recipe.outputs,
        blocks=len(recipe.blocks),
        params=recipe.learned,
        numbers=recipe.learned + gains(recipe),
        all_blocks=f"{(1 << len(recipe.blocks)) - 1}u",
        ram=places.ram_bytes,
        arena=places.arena,
        members=state_members(recipe),
    )


_HEADER = """{licence}
/* {summary} */
#ifndef NET_H
#define NET_H

#include <stdint.h>

#define NET_INPUT {inputs} /* numbers of a time step */
#define NET_CLASSES {classes} /* at most */
#define NET_BATCH 1 /* sequence at a time, of any number of steps */
#define NET_BLOCKS {blocks}
#define NET_ALL_BLOCKS {all_blocks}
#define NET_PARAMS {params}
#define NET_RECORD_BYTES (24ul + 4ul * {numbers}ul)
#define NET_RAM_BYTES {ram} /* of net_state and net_arena, however long a sequence is */

/* What a function returns */
{codes}

#ifndef TPS_PROGRESS
#define TPS_PROGRESS
typedef struct {{ /* how far a sequence has been read */
    uint32_t mode, steps, label, blocks, error, measures;
}} tps_progress;
#endif

/* Weights, which can be read and written between sequences:
{places} */
typedef struct {{
    {members}
}} net_state;

typedef struct {{ /* of one sequence: nothing in it lasts */
    float numbers[{arena}];
    float loss[NET_BLOCKS];
    tps_progress progress;
}} net_arena;

/* A compiler refuses this line if the bytes are not those that were planned. */
typedef char net_ram_is_as_planned[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {{
#endif

/* The weights that the model came with. Call it first. */
void net_begin(net_state *s);

/* A sequence begins. Call it before the first time step, also after an error. */
void net_start(net_arena *a);

/* Learn from a sequence: net_read for each time step, as soon as its NET_INPUT numbers are there,
 * then net_finish, which moves the weights. The label is from 0 on; bit i of `blocks`: block i + 1
 * learns; NET_ALL_BLOCKS: all. Both are the same in all calls for a sequence. `loss` gets a number
 * for every block.
 * Numbers that are not finite, a rate below 0 and a label that is no class are refused: the error
 * stays until net_start, and the weights stay as they were. NET_DIVERGED: a number left the range,
 * and no block learned. NET_BAD_ORDER: net_look and net_read in one sequence, or no net_start.
 * NET_MEASURED: a readout first measures the size of its states over a whole sequence. The weights
 * stay as they were; read the same sequence again, or go on with the next. */
int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks);
int net_finish(net_state *s, net_arena *a, uint16_t label, float lr, uint32_t blocks, float *loss);

/* Read a time step without learning, and the logits after the steps so far (while learning, too):
 * as many as there are classes now. */
int net_look(const net_state *s, net_arena *a, const float *x);
int net_logits(const net_state *s, net_arena *a, float *logits);

/* How many classes there are now, and one more, up to NET_CLASSES: NET_NO_SPACE. The new class
 * changes no output of the others. */
uint32_t net_classes(const net_state *s);
int net_add_class(net_state *s);

/* The weights as NET_RECORD_BYTES bytes with a checksum, for flash, a card or Python
 * (tpsgd.export.read_weights), and back; a record of another net, or a damaged one, is refused. */
void net_save(const net_state *s, uint8_t *record);
int net_load(net_state *s, const uint8_t *record);

#ifdef __cplusplus
}}
#endif
#endif
"""


def _program(recipe: Recipe, places: CellLayout) -> str:
    """The constants of the net, and the functions of the header."""
    tables, rows, layers = [], [], []
    for block, weight, slot in _placed(recipe):
        tables += block_tables(block)
        if block.recurrent:
            rows.append(_row(block, places, weight, slot))
            layers.append(_layer(block, places, weight))
            tables += _diagonal(block, places)
        else:
            rows.append(block_row(recipe, block, places, weight, slot))
    return _PROGRAM.format(
        licence=LICENCE,
        tables="\n".join([*tables, initial_numbers(recipe)]),
        rows=",\n".join(rows),
        layers=",\n".join(layers),
        recurrent=len(layers),
        params=recipe.learned,
        scratch=places.scratch,
        dz=places.dz,
        logits=places.logits,
        arena=places.arena,
        moments="s->moments" if recipe.optimizer != "sgd" else "0",
        ticks="s->ticks" if recipe.optimizer == "adam" else "0",
        gains=f"s->weights + {recipe.learned}",
        lasting=lasting_functions(recipe),
    )


_PROGRAM = """{licence}
#include "net.h"
#include "tpsgd.h"

{tables}
static const tps_block blocks_of_net[NET_BLOCKS] = {{
{rows}}};

static const tps_layer layers[{recurrent}] = {{
{layers}}};

static tps_reader reader_of(const net_state *s, net_arena *a)
{{
    tps_net head = {{blocks_of_net + {recurrent}, NET_BLOCKS - {recurrent}, 1, 0, {params}, 0, {dz},
                    {logits}}};
    tps_reader r = {{layers, {recurrent}, {scratch}, {{0, 0, 0, 0, 0, 0, 0, 0}}}};
    r.head = head;
    r.head.classes = net_classes(s);
    r.head.arena = a->numbers;
    return r;
}}

void net_start(net_arena *a)
{{
    tps_start(a->numbers, {arena}, &a->progress, a->loss, NET_BLOCKS);
}}

int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks)
{{
    tps_reader r = reader_of(s, a);
    return tps_read(&r, s->weights, {gains}, x, label, blocks, &a->progress, a->loss);
}}

int net_finish(net_state *s, net_arena *a, uint16_t label, float lr, uint32_t blocks, float *loss)
{{
    tps_reader r = reader_of(s, a);
    uint32_t i;
    int answer = tps_finish(&r, s->weights, {moments}, {ticks}, {gains}, label, lr, blocks,
                            &a->progress, a->loss);
    for (i = 0; i < NET_BLOCKS; i++) loss[i] = answer ? 0.0f : a->loss[i];
    return answer;
}}

int net_look(const net_state *s, net_arena *a, const float *x)
{{
    tps_reader r = reader_of(s, a);
    return tps_look(&r, s->weights, x, &a->progress, a->loss);
}}

int net_logits(const net_state *s, net_arena *a, float *logits)
{{
    tps_reader r = reader_of(s, a);
    return tps_logits(&r, s->weights, &a->progress, logits);
}}

{lasting}"""


def _placed(recipe: Recipe) -> Iterator[tuple[BlockRecipe, int, int | None]]:
    """Every block, where its weights begin if they learn, and the slot of its measured gain."""
    weight = slot = 0
    for block in recipe.blocks:
        measured = bool(block.local and block.local.target)
        yield block, weight if block.learns else 0, slot if measured else None
        weight += block.weights if block.learns else 0
        slot += measured


def _row(block: BlockRecipe, places: CellLayout, weight: int, slot: int | None) -> str:
    """A recurrent block's entry in the table of blocks: a unit is one number."""
    i, layer, local = block.number, block.layer, block.local
    measured = (number(local.gain), number(local.target)) if local else ("1.0f", "0.0f")
    fields = [
        *(layer.inputs, layer.outputs, 1, layer.inputs),
        *(weight, _place(block, weight, "cells.0.bias_x")),
        *("0" if block.learns else f"fixed{i}", places.outputs[i], layer.outputs),
        f"TPS_{block.activation.upper()}",
        f"TPS_{local.name.upper()}" if local else "TPS_FROZEN",
        f"TPS_{local.loss.upper()}" if local else "TPS_CROSS_ENTROPY",
        *(0, number(block.slope), 0, 0, f"&codes{i}" if local else "0"),
        *(1, 1, 1, 1, *measured, "TPS_NOWHERE" if slot is None else slot),
    ]
    return f"    /* {block.name} */\n    {{{', '.join(map(str, fields))}}}"


def _layer(block: BlockRecipe, places: CellLayout, weight: int) -> str:
    """An entry in the table of recurrent layers."""
    i, layer = block.number, block.layer
    codes = block.local.codes if block.local else None
    per_step = codes is not None and codes.per_step
    key = (codes.seed, codes.block) if codes is not None and per_step else (0, 0)
    fields = [
        f"blocks_of_net + {i}",
        *(_place(block, weight, "cells.0.weight_h"), _place(block, weight, "cells.0.bias_h")),
        *(block.weights, places.sizes[i].get("sums", 0), places.places[i].get("sums", 0)),
        *(number(layer.leak) if isinstance(layer, Cell) else "1.0f", int(per_step)),
        *(f"UINT64_C({n})" for n in key),
        f"&diagonal{i}" if isinstance(layer, Diagonal) else "0",
    ]
    return f"    {{{', '.join(map(str, fields))}}}"


def _place(block: BlockRecipe, weight: int, name: str) -> str | int:
    """Where a parameter lies among the weights."""
    for other, p in block.parameters.items():
        if other == name:
            return weight
        weight += p.numel()
    return "TPS_NOWHERE"


def _diagonal(block: BlockRecipe, places: CellLayout) -> list[str]:
    """What a diagonal layer's entry points to."""
    layer, here = block.layer, places.places[block.number]
    if not isinstance(layer, Diagonal):
        return []
    fields = [
        *(layer.states, f"TPS_{layer.loss_at.upper()}", int(len(block.shape) == 2)),
        *(here["x"], here["h"], here.get("traces", "TPS_NOWHERE"), here["lambda"]),
        here.get("mean", "TPS_NOWHERE"),
    ]
    row = ", ".join(map(str, fields))
    return [f"static const tps_diagonal diagonal{block.number} = {{{row}}};"]
