"""C of a net that learns in integers: net.h, net.c and the kernels, from an `IntegerNet`.

The numbers of the layers lie in flash; the weights, the biases and the state of the random numbers
in `net_state`. RAM is a constant that the compiler checks.
"""

import struct
from collections.abc import Iterable, Iterator
from itertools import accumulate
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from tpsgd_export.integer_records import CLASSES, RANDOM, RecordRow, packed_head
from tpsgd_export.recipe import Convolution
from tpsgd_export.records import fingerprint, learning_mask
from tpsgd_export.to_c.integer_scales import BITS, IntegerLayer, IntegerNet, input_range
from tpsgd_export.to_c.memory import MemoryMap
from tpsgd_export.to_c.source import (
    ERRORS,
    IN_FLASH,
    LICENCE,
    NEAR,
    error_codes,
    filled,
    read_text,
    row,
)

WIDTH = 96  # of a line of numbers
TOGETHER, BYTES = 8, 1024  # filters that learn together, and bytes of their derivatives, at most


class IntegerPlaces(NamedTuple):
    """Offsets of each layer's weights, biases and outputs, how many there are, and bytes."""

    weights: tuple[int, ...]
    biases: tuple[int, ...]
    outputs: tuple[int, ...]
    weight_count: int
    bias_count: int
    padded_weights: int  # up to a whole number of words
    padded_outputs: int  # of hidden layers, in pairs
    weight_bytes: int
    state_bytes: int  # biases, random state and number of classes, weights
    arena_bytes: int  # errors of the classes, and the outputs of two layers
    lines: int  # numbers of maps that are laid out one after another
    record_bytes: int  # a saved net: its head, weights, biases, CRC


def places(net: IntegerNet) -> IntegerPlaces:
    """Offsets and bytes of a net; layers that do not learn take no RAM."""
    weights = [layer.weights.size * layer.learns for layer in net.layers]
    biases = [0 if la.biases is None else la.biases.size * la.learns for la in net.layers]
    hidden = [layer.size for layer in net.layers[:-1]]
    lines = max(map(_lines, net.layers))
    lines += lines % 2
    even, odd = (max(hidden[first::2], default=0) for first in (0, 1))
    size, weight_count, bias_count = BITS[net.numbers] // 8, sum(weights), sum(biases)
    padded_weights = weight_count + -weight_count % (4 // size)
    padded_outputs = even + odd + (even + odd) % 2
    return IntegerPlaces(
        tuple(accumulate([0, *weights[:-1]])),
        tuple(accumulate([0, *biases[:-1]])),
        tuple(even * (i % 2) for i in range(len(hidden))),
        *(weight_count, bias_count, padded_weights, padded_outputs, size),
        state_bytes=4 * bias_count + 8 + size * padded_weights,
        arena_bytes=4 * net.recipe.outputs + 2 * (lines + padded_outputs),
        lines=lines,
        record_bytes=len(record_head(net)) + 4 + size * weight_count + 4 * bias_count,
    )


def _lines(layer: IntegerLayer) -> int:
    """Numbers that a convolution lays out: what a filter reads; d of maps, and their inputs."""
    of = layer.block.layer
    if not isinstance(of, Convolution):
        return 0
    pixels = layer.size // layer.outputs
    return max(layer.inputs, (_together(layer) + 1) * pixels * layer.learns)


def _together(layer: IntegerLayer) -> int:
    """Filters of a group whose derivatives are in RAM at the same time."""
    of = layer.block.layer
    assert isinstance(of, Convolution)
    most = BYTES // (2 * layer.size // layer.outputs)
    return min(TOGETHER, of.filters // of.groups, max(1, most if most < 4 else most // 4 * 4))


def integer_layout(net: IntegerNet) -> MemoryMap:
    """The bytes of a net by what they hold."""
    at = places(net)
    ram = {
        "weights": at.weight_bytes * at.padded_weights,
        "biases": 4 * at.bias_count,
        "random state, number of classes": 8,
        "arena: errors of the classes, outputs": at.arena_bytes,
    }
    products = sum(layer.weights.size for layer in net.layers)
    pixels = [layer.size // layer.outputs for layer in net.layers]
    sums = [la.weights.size * n * (1 + la.learns) for la, n in zip(net.layers, pixels, strict=True)]
    codes = sum(-(-layer.codes.size // 8) for layer in net.layers if layer.codes is not None)
    flash = {"initial weights": products * at.weight_bytes + 4 * at.bias_count, "codes": codes}
    return MemoryMap(ram, flash, sum(sums))


def record_head(net: IntegerNet) -> bytes:
    """What the records of a net begin with; the classes and the random state are 0."""
    rows = [
        RecordRow(la.inputs, la.outputs, int(la.biases is not None), la.weight_point, la.sum_point)
        for la in net.layers
        if la.learns
    ]
    recipe, bits = net.recipe, BITS[net.numbers]
    return packed_head(fingerprint(recipe), learning_mask(recipe), recipe.outputs, bits, rows)


def integer_source(net: IntegerNet) -> dict[str, str]:
    """The files of a net that learns in integers, by their names."""
    words = _words(net, places(net))
    maps = any(isinstance(b.layer, Convolution) for b in net.recipe.blocks)
    names = ["flash", "integers/rows", "integers/layers", *["integers/maps"] * maps]
    texts = (read_text(f"kernels/{name}.h") for name in names)
    kernels = "\n".join(["#include <stdint.h>", "", *texts, "#endif", ""])
    best = {"number": "int32_t", "input": "net_input", "recurrent": False}
    words["best"] = filled("best.h", best)
    words["records"] = filled("records.h", {"forgotten": ""})
    return {
        "net.h": filled("integer_net.h", words),
        "net.c": "".join(
            filled(f"{name}.c", words)
            for name in ("integer_net", "bytes", "integer_lasting", "records")
        ),
        "tpsgd.h": f"#ifndef TPSGD_H\n#define TPSGD_H\n\n{kernels}",
    }


def _words(net: IntegerNet, at: IntegerPlaces) -> dict[str, Any]:
    """What the frames are filled with."""
    recipe, layers = net.recipe, net.layers
    head = [number for (number,) in struct.iter_unpack("<I", record_head(net))]
    low, high = input_range(net.signed)
    forward, step = _steps(net, at)
    return at._asdict() | {
        "licence": LICENCE,
        "errors": error_codes(ERRORS),
        "sizes": "-".join(map(str, [recipe.inputs, *(layer.size for layer in layers)])),
        "numbers": net.numbers,
        "kind": "int8_t" if net.signed else "uint8_t",
        "rule": recipe.rule,
        "inputs": recipe.inputs,
        "input_point": net.input_point,
        "scale": float(2**net.input_point),
        "low": low,
        "high": high,
        "outputs": recipe.outputs,
        "classes": recipe.classes,
        "blocks": len(layers),
        "all_blocks": f"{(1 << len(layers)) - 1}u",
        "hidden": len(layers) > 1,
        "parameters": at.weight_count + at.bias_count,
        "logit_point": layers[-1].sum_point,
        "ram": at.state_bytes + at.arena_bytes,
        "far": integer_layout(net).flash_bytes > NEAR,
        "tables": "".join(f"{table}\n" for table in _tables(net)),
        "rows": ",\n".join(f"    {_row(i, layer)}" for i, layer in enumerate(layers)),
        "first": _first_values(net),
        "random": net.random,
        "forward": forward,
        "step": step,
        "head": _table("uint32_t", "net_head", head, "u", IN_FLASH),
        "words": len(head),
        "class_word": CLASSES,
        "random_word": RANDOM,
        "loops": _loaded_weights(net, at),
    }


def _tables(net: IntegerNet) -> Iterator[str]:
    """The codes of all layers, and the weights of those that do not learn."""
    for i, layer in enumerate(net.layers):
        if layer.codes is not None:
            bits = np.packbits(layer.codes.ravel(), bitorder="little")
            bits = np.append(bits, np.uint8(0))  # tps_bits reads a byte more
            yield _table("uint8_t", f"net_codes_{i}", bits, place=IN_FLASH)
        yield from _tables_of_maps(i, layer)
        if not layer.learns:
            kind, weights = f"{net.numbers}_t", layer.weights.ravel()
            yield _table(kind, f"net_weights_{i}", weights, place=IN_FLASH)
            if layer.biases is not None:
                yield _table("int32_t", f"net_biases_{i}", layer.biases, place=IN_FLASH)


def _tables_of_maps(i: int, layer: IntegerLayer) -> Iterator[str]:
    """The sizes of a convolution, and of its pools."""
    of, block = layer.block.layer, layer.block
    if not isinstance(of, Convolution):
        return
    pools = [
        row(f"TPS_POOL_{p.kind.upper()}", p.channels, *p.size, *p.out, *p.kernel, *p.stride)
        for p in block.pools
    ]
    if pools:
        yield f"static const tps_int_window net_pools_{i}[{len(pools)}] = {row(*pools)};"
    grid = (block.local and block.local.grid) or of.out
    fields = row(
        *(of.channels, *of.size, *of.out, *of.kernel, *of.stride, *of.padding, *of.dilation),
        *(
            of.groups,
            *grid,
            *layer.cells,
            _together(layer),
            len(pools),
            f"net_pools_{i}" if pools else "0",
        ),
    )
    yield f"static const struct tps_int_maps net_maps_{i} = {fields};"


def _table(kind: str, name: str, values: Iterable[int], suffix: str = "", place: str = "") -> str:
    numbers = [f"{int(v)}{suffix}" for v in values]
    lines = "\n    ".join(wrap(", ".join(numbers), WIDTH))
    place = place and f" {place}"
    return f"static const {kind} {name}[{len(numbers)}]{place} = {{\n    {lines}}};\n"


def _row(i: int, layer: IntegerLayer) -> str:
    factors = (row(f.mantissa, f.point) for f in (layer.slope, layer.gain, layer.log_gain))
    return row(
        *(layer.inputs, layer.outputs, layer.limit * layer.learns, layer.activation),
        *(layer.weight_point, layer.input_point, layer.output_point, *factors),
        "0" if layer.codes is None else f"net_codes_{i}",
        f"&net_maps_{i}" if isinstance(layer.block.layer, Convolution) else "0",
    )


def _first_values(net: IntegerNet) -> str:
    """The weights and the biases that learn, as the model came with them."""
    learned = [layer for layer in net.layers if layer.learns]
    weights = np.concatenate([layer.weights.ravel() for layer in learned])
    biases = [layer.biases for layer in learned if layer.biases is not None]
    text = _table(f"{net.numbers}_t", "net_weights_at_first", weights, place=IN_FLASH)
    if biases:
        numbers = np.concatenate(biases)
        text += "\n" + _table("int32_t", "net_biases_at_first", numbers, place=IN_FLASH)
    return text


def _steps(net: IntegerNet, at: IntegerPlaces) -> tuple[str, str]:
    """Inference and the training step: one call after another."""
    forward, step = [], []
    last = len(net.layers) - 1
    for i, layer in enumerate(net.layers):
        maps, pools = False, ""
        source = f"net_units(a->y + {at.outputs[i - 1]})" if i else "net_bytes(x)"
        call = f"(&net_layers[{i}], {_weights_and_biases(i, layer, at)}, {source}, "
        if i == last:
            forward.append(f"    tps_int_logits{call}s->classes, logits);")
            outputs_of = f"    tps_int_logits{call}s->classes, a->e);"
            kernel, outputs = "tps_int_learn_head", ""
        else:
            maps = isinstance(layer.block.layer, Convolution)
            name = "convolve" if maps else "forward"
            outputs_of = f"    tps_int_{name}{call}a->y + {at.outputs[i]}{', a->lines' * maps});"
            kernel, outputs = "tps_int_learn_hidden", f"a->y + {at.outputs[i]}, "
            if maps:
                kernel = "tps_int_learn_maps"
            forward.append(outputs_of)
            if layer.block.pools:
                pools = f"    tps_int_pool(&net_maps_{i}, a->y + {at.outputs[i]});"
                forward.append(pools)
        step.append(f"    case {i}:\n    {outputs_of}")
        if layer.learns:
            step.append(
                f"        if (blocks & UINT32_C({1 << i}))\n"
                f"            value = {kernel}{call}{outputs}s->classes,\n"
                f"                *labels, rate, a->e, {'a->lines, ' * maps}&s->random);"
            )
        if layer.block.pools:
            step.append(f"    {pools}")
        step.append("        break;")
    return "\n".join(forward), "\n".join(step)


def _weights_and_biases(i: int, layer: IntegerLayer, at: IntegerPlaces) -> str:
    """Where they lie."""
    weights, biases = f"net_weights_{i}", f"net_biases_{i}"
    if layer.learns:
        weights, biases = f"s->weights + {at.weights[i]}", f"s->biases + {at.biases[i]}"
    return f"{weights}, {'0' if layer.biases is None else biases}"


def _loaded_weights(net: IntegerNet, at: IntegerPlaces) -> str:
    """Loops that read the weights of a record, each within its layer's limit."""
    size = at.weight_bytes
    return "\n".join(
        f"    for (i = {start}; i < {start + layer.weights.size}; i++)\n"
        f"        s->weights[i] = (TPS_WEIGHT)tps_within(tps_signed(tps_next(in, {size}), {size}), "
        f"\n            net_layers[{i}].limit);"
        for i, (layer, start) in enumerate(zip(net.layers, at.weights, strict=True))
        if layer.learns
    )
