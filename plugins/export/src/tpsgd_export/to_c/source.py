"""A recipe as C: `net.h`, `net.c` and the kernels that it needs, in `tpsgd.h`.

The kernels in `kernels/` and the frames in `templates/` are written by hand; tables of constants
and what fills the frames are written here. A feed-forward net learns from samples (`net_step`). A
recurrent net reads one time step at a time, and learns meanwhile (`net_start`, `net_read`,
`net_finish`, and without learning `net_look`, `net_logits`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from itertools import accumulate
from math import prod
from string import Template
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.names import SIGNS, safe
from tpsgd.projections import make_tables
from tpsgd_export.recipe import (
    BlockRecipe,
    CellLayer,
    Codes,
    Convolution,
    DiagonalLayer,
    StepRecipe,
)
from tpsgd_export.records import fingerprint, learning_mask
from tpsgd_export.to_c.lifetimes import has_own_pool, places_of_rows
from tpsgd_export.to_c.memory import (
    CODES,
    GAIN,
    MOMENTS,
    MemoryMap,
    fan_in,
    layout,
    pixels,
    summed,
)

FRAGMENTS = (
    *("numbers", "flash", "codes", "optimizers", "blocks", "maps", "small", "losses"),
    "step",
    *("cells", "diagonal", "sequences", "carry", "backprop", "rows"),
)
ONLY_FOR = {  # fragments that few nets need
    "maps": "convolutions",
    "small": "small",
    "cells": "sequences",
    "diagonal": "diagonal",
    "sequences": "sequences",
    "carry": "carry",
    "backprop": "backprop",
    "rows": "rows",
}
LICENCE = "/* Written by tpsgd.export for its user, who may do with it what they like. */"
ERRORS = ("OK", "BAD_INPUT", "BAD_RATE", "BAD_LABEL", "DIVERGED", "NO_SPACE", "BAD_RECORD")
SEQUENCE_ERRORS = (*ERRORS, "MEASURED", "BAD_ORDER")
FORGOTTEN = """
 * A record has no moments: after it the optimizer begins anew."""
NOWHERE = "TPS_NOWHERE"
NEAR = (
    60_000  # bytes of constants in the flash that an AVR reads, besides what a program puts there
)
IN_FLASH = "TPS_IN_FLASH"  # of a table: on an AVR it takes no RAM
FEW_BLOCKS = 4  # up to which each is compiled with its constants: faster, and more code
CONDITION = re.compile(r"@(?P<no>!?)(?P<word>\w+) ")  # of a line of a template


def sources(recipe: StepRecipe) -> dict[str, str]:
    """The files of a net by their names."""
    words = _words(recipe, layout(recipe))
    best = {"number": "float", "input": "float", "recurrent": recipe.recurrent}
    words["best"] = "" if recipe.targets else filled("best.h", best)
    words["records"] = filled("records.h", {"forgotten": FORGOTTEN})
    name = "read" if recipe.recurrent else "learn"
    programs = [
        "rows.c" if recipe.joined else f"{name}.c",
        *["classes.c"] * (recipe.targets is None),
    ]
    programs += ["bytes.c", "lasting.c", "records.c"]
    return {
        "net.h": filled("net.h", words | {"functions": filled(f"{name}.h", words)}),
        "net.c": "".join(filled(program, words) for program in programs),
        "tpsgd.h": kernels(recipe),
    }


def read_text(path: str) -> str:
    """A file of this package."""
    return files("tpsgd_export.to_c").joinpath(path).read_text(encoding="utf-8")


def filled(template: str, words: Mapping[str, Any]) -> str:
    """A file of `templates/` with its $words replaced.

    A line that begins with `@word ` is left out if the word is 0 or empty, with `@!word ` if not.
    """
    lines = []
    for line in read_text(f"templates/{template}").splitlines(keepends=True):
        keeps = True
        while condition := CONDITION.match(line):
            keeps = keeps and bool(words[condition["word"]]) != bool(condition["no"])
            line = line[condition.end() :]
        lines += [line] * keeps
    return Template("".join(lines)).substitute(words)


def kernels(recipe: StepRecipe) -> str:
    """One header with the kernels that the net needs."""
    chosen = _needs(recipe)
    switches = [f"#define TPS_WITH_{name.upper()}" for name in sorted(chosen)]
    switches.append(
        f"#define TPS_CELLS {cells_of_a_map(recipe)} /* of a readout's grid, at most */"
    )
    if recipe.optimizer != "sgd":
        switches.append(f"#define TPS_{recipe.optimizer.upper()}")
    names = [name for name in FRAGMENTS if ONLY_FOR.get(name, "") in {"", *chosen}]
    texts = {name: read_text(f"kernels/{name}.h") for name in names}
    if "quantiles" in chosen:  # of k / 4096 from k = 2048 on; the others follow by symmetry
        table = map(str, make_tables()[2048:].tolist())
        texts["codes"] = array("int32_t", "tps_quantiles", table, IN_FLASH) + "\n" + texts["codes"]
    guard = ["#ifndef TPSGD_H", "#define TPSGD_H", "", *switches, ""]
    return "\n".join([LICENCE, *guard, *texts.values(), "#endif", ""])


def cells_of_a_map(recipe: StepRecipe) -> int:
    """The largest number of features that a readout has of a unit: cells of a grid, or one."""
    return max([1, *(prod(b.local.grid or (1,)) for b in recipe.blocks if b.local)])


def has_constants(recipe: StepRecipe) -> bool:
    """Whether the functions of each block are compiled with its constants."""
    return not recipe.recurrent and not recipe.joined and len(recipe.blocks) <= FEW_BLOCKS


def _needs(recipe: StepRecipe) -> set[str]:
    """The kernels that are left out unless a block needs them."""
    chosen = {"numbers"} if recipe.targets else set()
    if has_constants(recipe):
        chosen.add("constants")
    if recipe.backprop:
        chosen |= {"carry", "backprop"}
    if recipe.joined:
        chosen.add("rows")
    if any(block.inner and block.learns for block in recipe.blocks):
        chosen.add("carry")
    if recipe.joined and any(has_own_pool(recipe, row) for row in recipe.rows):
        chosen.add("unpool")
    for block in recipe.rows:
        chosen |= {block.activation} & {"tanh", "sigmoid"}
        if isinstance(block.layer, Convolution):
            chosen.add("convolutions")
        if block.recurrent:
            chosen |= {
                "sequences",
                "diagonal" if isinstance(block.layer, DiagonalLayer) else "cells",
            }
        if block.pools:
            chosen.add("pools")
        if block.scales is not None:
            chosen.add("small")
        if block.local:
            chosen.add("readout" if block.local.name == "readout" else "targets")
            if block.local.codes.distribution == "normal":
                chosen.add("quantiles")
            if block.local.learned:
                chosen.add("learned_codes")
        if "bce" in (recipe.loss, block.local and block.local.loss):
            chosen.add("sigmoid")
    return chosen


def number(value: float) -> str:
    """A float32 as C writes it, exactly.

    Examples:
        >>> number(0.1), number(3), number(1e-30)
        ('0.1f', '3.0f', '1e-30f')
    """
    return f"{np.float32(value)!s}f"


def array(kind: str, name: str, values: Iterable[str], place: str = "") -> str:
    """A constant array; with `place` IN_FLASH out of the RAM of an AVR."""
    values = list(values)
    lines = [", ".join(values[i : i + 8]) for i in range(0, len(values), 8)]
    body = ",\n    ".join(lines)
    place = place and f" {place}"
    return f"static const {kind} {name}[{len(values)}]{place} = {{\n    {body}}};\n"


def floats(name: str, tensors: Iterable[Tensor], place: str = "") -> str:
    """A constant array of the numbers of some tensors."""
    numbers = torch.cat([t.detach().flatten().float() for t in tensors])
    return array("float", name, map(number, numbers.numpy()), place)


def comment(*lines: str) -> str:
    """A comment of C. All names get into the C through here: nothing in them can end it."""
    return "/* " + "\n * ".join(safe(line, SIGNS + "[]") for line in lines) + " */"


def row(*fields: Any) -> str:
    """The fields of a struct."""
    return f"{{{', '.join(map(str, fields))}}}"


def error_codes(names: Iterable[str]) -> str:
    """What a function can return."""
    return "\n".join(f"#define NET_{name} {i}" for i, name in enumerate(names))


def summary(recipe: StepRecipe) -> str:
    """Rule, optimizer, loss and layers in a line."""
    layers = ", ".join(block.name for block in recipe.blocks)
    return safe(f"{recipe.rule}, {recipe.optimizer}, loss {recipe.loss}: {layers}")


def _weight_places(recipe: StepRecipe, memory: MemoryMap) -> Iterator[str]:
    pairs = zip(recipe.rows, memory.lasting, strict=True)
    learned = [(row, at) for row, at in pairs if row.learns]
    shapes = [(r, at, name, p.shape) for r, at in learned for name, p in r.parameters.items()]
    shapes += [
        (r, at, CODES, (recipe.outputs, r.learned_codes)) for r, at in learned if r.learned_codes
    ]
    for row, at, name, shape in shapes:
        sizes = " x ".join(map(str, shape))
        layer = "" if not recipe.blocks[row.number].inner else f"{row.name.partition(':')[0]} "
        yield f"weights[{at[name]}]: block {row.number + 1}, {layer}{name}, {sizes}"
    if recipe.targets:
        yield "The last block gives numbers that are standardised:"
        for i, (a, b) in enumerate(zip(recipe.targets.shift, recipe.targets.scale, strict=True)):
            yield f"number {i}: mean {a:.7g}, deviation {b:.7g}"


def _words_of_net(recipe: StepRecipe, memory: MemoryMap) -> dict[str, Any]:
    """What the frames are filled with, but for the functions of each block."""
    tables, rows, layers = [], [], []
    for i, block in enumerate(recipe.rows):
        tables += _block_tables(i, block, memory)
        rows.append(f"    {comment(block.name)}\n    {_block_row(recipe, i, block, memory)}")
        if block.recurrent:
            layers.append(f"    {_layer_row(block, memory)}")
    measured = [b.local.gain for b in recipe.blocks if b.local and b.local.target]
    weights = [p for row in recipe.rows if row.learns for p in row.parameters.values()]
    targets, lasting = recipe.targets, recipe.learned + len(measured)
    units = torch.stack([targets.shift, targets.scale]) if targets else torch.tensor([])
    tables.append(floats("initial", [*weights, torch.tensor(measured), units], IN_FLASH))
    draw = f"    tps_draw_codes(&codes{{}}, {recipe.outputs}u, s->weights + {{}});"
    drawn = [draw.format(i, at[CODES]) for i, at in enumerate(memory.lasting) if CODES in at]
    adam, count = recipe.optimizer == "adam", len(recipe.blocks)
    counts = [len(block.rows) for block in recipe.blocks]
    return {
        "licence": LICENCE,
        "summary": comment(*wrap(summary(recipe), 94)),
        "places": comment(
            "Weights, which can be read and written:", *_weight_places(recipe, memory)
        ),
        "errors": error_codes(SEQUENCE_ERRORS if recipe.recurrent else ERRORS),
        "recurrent": recipe.recurrent,
        "inputs": recipe.inputs,
        "outputs": recipe.outputs,
        "classes": recipe.classes,
        "classes_now": f"{recipe.outputs}u" if targets else "net_classes(s)",
        "spare": recipe.spare,
        "batch": recipe.batch,
        "blocks": count,
        "all_blocks": f"{(1 << count) - 1}u",
        "parameters": recipe.parameters,
        "codes": recipe.learned - recipe.parameters,
        "params": recipe.learned,
        "gains": len(measured),
        "gains_at": f"s->weights + {recipe.learned}",
        "means": lasting,
        "of_numbers": targets is not None,
        "label": "float" if targets else "uint16_t",
        "numbers": lasting + units.numel(),
        "initial": recipe.parameters + len(measured) + units.numel(),
        "draw_codes": "\n".join(drawn),
        "moments": MOMENTS[recipe.optimizer] * recipe.learned,
        "moments_at": "0" if recipe.optimizer == "sgd" else "s->moments",
        "ticks": 2 * count * adam,
        "ticks_at": "s->ticks" if adam else "0",
        "part_ticks": "s->ticks + 2 * i" if adam else "0",
        "tables": "\n".join(tables),
        "rows": ",\n".join(rows),
        "joined": recipe.joined,
        "layer_rows": len(rows),
        "row_places": ",\n".join(_row_places(recipe, memory)),
        "first_rows": ", ".join(map(str, accumulate(counts, initial=0))),
        "layers": ",\n".join(layers),
        "layer_count": len(layers),
        "ram": memory.ram_bytes,
        "scratch": memory.scratch,
        "dz": memory.dz,
        "logits": memory.logits,
        "arena": memory.arena,
        "far": memory.flash_bytes > NEAR,
        "fingerprint": f"0x{fingerprint(recipe):08X}u",
        "mask": f"{learning_mask(recipe)}u",
    }


def _words(recipe: StepRecipe, memory: MemoryMap) -> dict[str, Any]:
    """What the frames are filled with."""
    words, numbers = _words_of_net(recipe, memory), range(len(recipe.blocks))
    words |= {"constants": has_constants(recipe), "backprop": recipe.backprop}
    cases = {
        "outputs_of_blocks": "return net_outputs_{}(s, a, x, samples);",
        "passes_of_blocks": "return net_pass_{}(s, a, x, labels, lr, learns, loss);",
        "backs_of_blocks": "net_back_{}(s, a, x, lr, learns); break;",
    }
    for name, call in cases.items():
        words[name] = "\n".join(f"    case {i}: {call.format(i)}" for i in numbers)
    each = [filled("block.c", words | {"block": i}) for i in numbers]
    return words | {"functions_of_blocks": "\n".join(each)}


def _block_tables(i: int, block: BlockRecipe, memory: MemoryMap) -> Iterator[str]:
    """The constants that row i, a block or a layer of one, points to."""
    layer = block.layer
    if isinstance(layer, Convolution):
        sizes = (layer.channels, *layer.size, *layer.out, *layer.kernel)
        fields = row(*sizes, *layer.stride, *layer.padding, *layer.dilation, layer.groups)
        yield f"static const tps_convolution convolution{i} = {fields};"
    if block.pools:
        rows = row(
            *(
                row(f"TPS_POOL_{p.kind.upper()}", p.channels, *p.size, *p.out, *p.kernel, *p.stride)
                for p in block.pools
            )
        )
        yield f"static const tps_pool pools{i}[{len(block.pools)}] = {rows};"
    if block.local:
        yield from _code_tables(i, block.local.codes)
    fixed = dict(block.parameters) if not block.learns else {}
    if block.scales is not None:
        rows = fixed.pop("weight").flatten(1) / block.scales[:, None]
        weights = map(str, rows.round().int().flatten().tolist())
        yield array("int8_t", f"small{i}", weights, IN_FLASH)
        yield floats(f"scales{i}", [block.scales], IN_FLASH)
    if fixed:
        yield floats(f"fixed{i}", fixed.values(), IN_FLASH)
    if isinstance(layer, DiagonalLayer):
        names = ("x", "h", "traces", "lambda", "mean")
        at = [memory.blocks[i].get(name, NOWHERE) for name in names]
        feeds = int(len(block.shape) == 2)
        fields = row(layer.states, f"TPS_{layer.loss_at.upper()}", feeds, *at)
        yield f"static const tps_diagonal diagonal{i} = {fields};"


def _code_tables(i: int, codes: Codes) -> Iterator[str]:
    streams = table = bits = "0"  # as with codes of every time step
    if codes.distribution == "bits" and codes.table is not None:
        bits = f"bits{i}"
        words = (f"0x{word:08X}u" for word in packed(codes.table))
        yield array("uint32_t", bits, words, IN_FLASH)
    elif codes.table is not None:
        table = f"codes_of_classes{i}"
        yield floats(table, [codes.table], IN_FLASH)
    elif codes.streams:
        streams = f"streams{i}"
        words = (f"UINT64_C(0x{s:016X})" for s in codes.streams)
        yield array("uint64_t", streams, words, "TPS_ROWS_IN_FLASH")
    kind = f"TPS_{codes.distribution.upper()}"
    fields = row(kind, codes.size, streams, table, number(codes.std), codes.filters, bits)
    yield f"static const tps_codes codes{i} = {fields};"


def packed(codes: Tensor) -> list[int]:
    """The signs of numbers as bits of words, the lowest first: 1 where they are over 0."""
    signs = np.packbits((codes.flatten() > 0).numpy(), bitorder="little").tobytes()
    return np.frombuffer(signs.ljust(-(-len(signs) // 4) * 4, b"\0"), "<u4").tolist()


def _block_row(recipe: StepRecipe, i: int, block: BlockRecipe, memory: MemoryMap) -> str:
    """Entry i of the table of blocks; a unit of a recurrent one is one number."""
    layer, local = block.layer, block.local
    shape = (layer.outputs,) if block.recurrent else block.shape
    rows, columns = (1, *shape[1:])[-2:] if len(shape) > 1 else (1, 1)
    last = "head" if block is recipe.blocks[-1] else "hidden"
    kind = local.name if local else last if block.learns else "frozen"
    loss = local.loss if local else recipe.loss
    at = dict(memory.lasting[i])
    if block.scales is not None:
        at = {"weight": 0} | ({"bias": 0} if "bias" in at else {})
    return row(
        *(layer.inputs, layer.filters if isinstance(layer, Convolution) else layer.outputs),
        *(pixels(block), fan_in(block), next(iter(at.values()))),
        at.get("cells.0.bias_x" if block.recurrent else "bias", NOWHERE),
        f"fixed{i}" if not block.learns and (block.scales is None or "bias" in at) else "0",
        *(memory.blocks[i]["output"], layer.outputs if block.recurrent else block.pooled),
        *(f"TPS_{word.upper()}" for word in (block.activation, kind)),
        "TPS_L1_LOSS" if loss == "l1" else f"TPS_{loss.upper()}",
        *(len(block.pools), number(block.slope)),
        f"&convolution{i}" if isinstance(layer, Convolution) else "0",
        f"pools{i}" if block.pools else "0",
        f"&codes{i}" if local else "0",
        *(rows, columns, *((local and local.grid) or (1, 1))),
        *(number(local.gain if local else 1.0), number(local.target if local else 0.0)),
        *(at.get(GAIN, NOWHERE), at.get(CODES, NOWHERE)),
        *(("0", "0", 0) if block.scales is None else (f"small{i}", f"scales{i}", memory.scratch)),
        *[int(block.added is not None)] * recipe.joined,
    )


def _row_places(recipe: StepRecipe, memory: MemoryMap) -> Iterator[str]:
    """The entries of the table of what each layer reads and writes."""
    for each in places_of_rows(recipe, memory.blocks) if recipe.joined else ():
        errors = each.error, each.error_of_x, each.error_of_added
        yield f"    {row(each.x, each.added, each.pooled, *errors, each.clears)}"


def _layer_row(block: BlockRecipe, memory: MemoryMap) -> str:
    """An entry in the table of recurrent layers."""
    at = memory.lasting[block.number]
    layer, codes = block.layer, block.local.codes if block.local else None
    per_step = codes is not None and codes.per_step
    key = (codes.seed, codes.block) if codes and per_step else (0, 0)
    return row(
        f"blocks_of_net + {block.number}",
        *(at.get(name, NOWHERE) for name in ("cells.0.weight_h", "cells.0.bias_h")),
        *(block.weights, summed(block), memory.blocks[block.number].get("sums", 0)),
        *(number(layer.leak if isinstance(layer, CellLayer) else 1.0), int(per_step)),
        *(f"UINT64_C({n})" for n in key),
        f"&diagonal{block.number}" if isinstance(layer, DiagonalLayer) else "0",
    )
