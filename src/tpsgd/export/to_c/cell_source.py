"""A recurrent recipe as C: a net that reads one time step at a time, and learns meanwhile.

What differs from a feed-forward net is its face (`net_start`, `net_read`, `net_finish`, and without
learning `net_look`, `net_logits`) and a table of recurrent layers. Weights, records and classes are
those of `source`; the kernels are `cells.h`, `diagonal.h` and `sequences.h`.
"""

from tpsgd.export.recipe import BlockRecipe, Cell, Diagonal, Recipe
from tpsgd.export.to_c.cell_memory import CellLayout, cell_layout
from tpsgd.export.to_c.source import (
    ERRORS,
    LICENCE,
    LastingPlaces,
    block_row,
    block_tables,
    comment,
    header,
    initial_numbers,
    kernels,
    lasting_functions,
    lasting_places,
    number,
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
    """The declarations of a recurrent net."""
    words = {
        "inputs": "of a time step",
        "batch": "1 /* sequence at a time, of any number of steps */",
        "arena": _ARENA.format(arena=places.arena),
        "learning": _LEARNING,
    }
    return header(recipe, places, ANSWERS, words)


_ARENA = """#ifndef TPS_PROGRESS
#define TPS_PROGRESS
typedef struct {{ /* how far a sequence has been read */
    uint32_t mode, steps, label, blocks, error, measures;
}} tps_progress;
#endif

typedef struct {{ /* of one sequence, however long it is: nothing in it lasts */
    float numbers[{arena}];
    float loss[NET_BLOCKS];
    tps_progress progress;
}} net_arena;"""
_LEARNING = """/* A sequence begins. Call it before the first time step, also after an error. */
void net_start(net_arena *a);

/* Learn from a sequence: net_read for each time step, as soon as its NET_INPUT numbers are there,
 * then net_finish, which moves the weights. The label is from 0 on; bit i of `blocks`: block i + 1
 * learns; NET_ALL_BLOCKS: all. Both are the same in all calls for a sequence. `loss` gets a number
 * for every block.
 * Numbers that are not finite or above 1e9, a rate below 0 or above 1,000, and a label that is no
 * class are refused: the error stays until net_start, and the weights stay as they were.
 * NET_DIVERGED: a number left that range, and no block learned. NET_BAD_ORDER: net_look and
 * net_read in one sequence, or no net_start.
 * NET_MEASURED: a readout first measures the size of its states over a whole sequence. The weights
 * stay as they were; read the same sequence again, or go on with the next. */
int net_read(const net_state *s, net_arena *a, const float *x, uint16_t label, uint32_t blocks);
int net_finish(net_state *s, net_arena *a, uint16_t label, float lr, uint32_t blocks, float *loss);

/* Read a time step without learning, and the logits after the steps so far (while learning, too):
 * as many as there are classes now. */
int net_look(const net_state *s, net_arena *a, const float *x);
int net_logits(const net_state *s, net_arena *a, float *logits);
"""


def _program(recipe: Recipe, places: CellLayout) -> str:
    """The constants of the net, and the functions of the header."""
    tables, rows, layers = [], [], []
    for block, at in lasting_places(recipe):
        tables += block_tables(block)
        if block.recurrent:
            rows.append(_row(block, places, at))
            layers.append(_layer(block, places, at.weight))
            tables += _diagonal(block, places)
        else:
            rows.append(block_row(recipe, block, places, at))
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


def _row(block: BlockRecipe, places: CellLayout, at: LastingPlaces) -> str:
    """A recurrent block's entry in the table of blocks: a unit is one number."""
    i, layer, local = block.number, block.layer, block.local
    measured = (number(local.gain), number(local.target)) if local else ("1.0f", "0.0f")
    fields = [
        *(layer.inputs, layer.outputs, 1, layer.inputs),
        *(at.weight, _place(block, at.weight, "cells.0.bias_x")),
        *("0" if block.learns else f"fixed{i}", places.outputs[i], layer.outputs),
        f"TPS_{block.activation.upper()}",
        f"TPS_{local.name.upper()}" if local else "TPS_FROZEN",
        f"TPS_{local.loss.upper()}" if local else "TPS_CROSS_ENTROPY",
        *(0, number(block.slope), 0, 0, f"&codes{i}" if local else "0"),
        *(1, 1, 1, 1, *measured, at.gain, at.codes),
    ]
    return f"    {comment(block.name)}\n    {{{', '.join(map(str, fields))}}}"


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
