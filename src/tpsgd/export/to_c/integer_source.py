"""C of a net that learns in integers: net.h, net.c and the kernels, from an `IntegerNet`.

The numbers of the layers lie in flash; the weights, the biases and the state of the random numbers
in `net_state`. RAM is a constant that the compiler checks.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from itertools import accumulate
from textwrap import wrap

import numpy as np

from tpsgd.export.integer_records import CLASSES, RANDOM, Row, packed_head
from tpsgd.export.records import fingerprint, learning_mask
from tpsgd.export.to_c.integer_scales import BITS, Factor, IntegerLayer, IntegerNet
from tpsgd.export.to_c.memory import Layout
from tpsgd.export.to_c.source import ERRORS, LICENCE, error_codes

WIDTH = 96  # of a line of numbers


@dataclass(frozen=True)
class Places:
    """Offsets of each layer's weights, biases and outputs, how many there are, and bytes."""

    weights: tuple[int, ...]
    biases: tuple[int, ...]
    outputs: tuple[int, ...]
    weight_count: int
    bias_count: int
    output_count: int
    weight_bytes: int
    classes: int
    head_bytes: int  # of a record

    @property
    def state_bytes(self) -> int:
        """Biases, random state and number of classes, then the weights up to a multiple of 4."""
        return 4 * self.bias_count + 8 + self.weight_bytes * self.padded_weights

    @property
    def padded_weights(self) -> int:
        """The weights, and what fills the last word."""
        each = 4 // self.weight_bytes
        return -(-self.weight_count // each) * each

    @property
    def padded_outputs(self) -> int:
        """The outputs of hidden layers, in pairs."""
        return self.output_count + self.output_count % 2

    @property
    def arena_bytes(self) -> int:
        """Errors of the classes, and the outputs of two layers."""
        return 4 * self.classes + 2 * self.padded_outputs

    @property
    def record_bytes(self) -> int:
        """A saved net: its head, weights, biases, CRC."""
        return self.head_bytes + 4 + self.weight_count * self.weight_bytes + 4 * self.bias_count


def places(net: IntegerNet) -> Places:
    """Offsets and bytes of a net; layers that do not learn take no RAM."""
    learned = [layer if layer.learns else None for layer in net.layers]
    weights = [0 if layer is None else layer.weights.size for layer in learned]
    biases = [
        0 if layer is None or layer.biases is None else layer.biases.size for layer in learned
    ]
    hidden = [layer.outputs for layer in net.layers[:-1]]
    even = max(hidden[::2], default=0)
    odd = max(hidden[1::2], default=0)
    return Places(
        _starts(weights), _starts(biases), tuple(even * (i % 2) for i in range(len(hidden))),
        sum(weights), sum(biases), even + odd, BITS[net.numbers] // 8, net.recipe.outputs,
        len(record_head(net)),
    )  # fmt: skip


def integer_layout(net: IntegerNet) -> Layout:
    """The bytes of a net by what they hold."""
    at = places(net)
    weights = at.weight_bytes * at.padded_weights
    learned = [layer for layer in net.layers if layer.learns]
    codes = sum(-(-layer.codes.size // 8) for layer in net.layers if layer.codes is not None)
    products = [layer.weights.size for layer in net.layers]
    ram = {
        "weights": weights,
        "biases": 4 * at.bias_count,
        "random state, number of classes": at.state_bytes - weights - 4 * at.bias_count,
        "arena: errors of the classes, outputs": at.arena_bytes,
    }
    flash = {"initial weights": sum(products) * at.weight_bytes + 4 * at.bias_count, "codes": codes}
    operations = sum(products) + sum(layer.weights.size for layer in learned)
    return Layout((), 0, 0, at.arena_bytes, ram, flash, operations)


def integer_source(net: IntegerNet) -> dict[str, str]:
    """The files of a net that learns in integers, by their names."""
    at = places(net)
    program = [_constants(net), _begin(net), _steps(net, at), _records(net, at)]
    return {"net.h": _header(net, at), "net.c": "\n".join(program), "tpsgd.h": _kernels()}


def record_head(net: IntegerNet) -> bytes:
    """What the records of a net begin with; the classes and the random state are 0."""
    rows = [
        Row(la.inputs, la.outputs, int(la.biases is not None), la.weight_point, la.sum_point)
        for la in net.layers
        if la.learns
    ]
    recipe = net.recipe
    return packed_head(
        fingerprint(recipe), learning_mask(recipe), recipe.outputs, BITS[net.numbers], rows
    )


def _starts(sizes: list[int]) -> tuple[int, ...]:
    return tuple(accumulate([0, *sizes[:-1]]))


def _kernels() -> str:
    fragment = files("tpsgd.export.to_c").joinpath("kernels/integer.h").read_text(encoding="utf-8")
    return f"#ifndef TPSGD_H\n#define TPSGD_H\n\n#include <stdint.h>\n\n{fragment}\n#endif\n"


def _header(net: IntegerNet, at: Places) -> str:
    recipe, layers = net.recipe, net.layers
    kind = "int8_t" if net.signed else "uint8_t"
    biases = f"    int32_t biases[{at.bias_count}];\n" if at.bias_count else ""
    outputs = f"    int16_t y[{at.padded_outputs}];\n" if at.padded_outputs else ""
    sizes = "-".join(str(n) for n in [layers[0].inputs, *(layer.outputs for layer in layers)])
    return _HEADER.format(
        licence=LICENCE, codes=error_codes(ERRORS), all_blocks=f"{(1 << len(layers)) - 1}u",
        sizes=sizes, kind=kind, biases=biases, outputs=outputs, at=at, numbers=net.numbers,
        rule=recipe.rule, inputs=layers[0].inputs, input_point=net.input_point,
        classes=recipe.outputs, blocks=len(layers), parameters=at.weight_count + at.bias_count,
        logit_point=layers[-1].sum_point, ram=at.state_bytes + at.arena_bytes,
    )  # fmt: skip


def _constants(net: IntegerNet) -> str:
    """The layers as constants."""
    text = [
        LICENCE,
        _NO_LIBC,
        f"#define TPS_WEIGHT {net.numbers}_t",
        f"#define TPS_INPUT {'int8_t' if net.signed else 'uint8_t'}",
        '#include "net.h"\n#include "tpsgd.h"\n',
    ]
    kind, layers = f"{net.numbers}_t", net.layers
    for i, layer in enumerate(layers):
        if layer.codes is not None:
            bits = np.packbits(layer.codes.ravel(), bitorder="little")
            text.append(_table("uint8_t", f"net_codes_{i}", bits))
        if not layer.learns:
            text.append(_table(kind, f"net_weights_{i}", layer.weights.ravel()))
            if layer.biases is not None:
                text.append(_table("int32_t", f"net_biases_{i}", layer.biases))
    rows = ",\n".join(_row(i, layer) for i, layer in enumerate(layers))
    text.append(f"static const tps_int_layer net_layers[NET_BLOCKS] = {{\n{rows}}};\n")
    return "\n".join(text)


def _row(i: int, layer: IntegerLayer) -> str:
    points = f"{layer.weight_point}, {layer.input_point}, {layer.output_point}"
    factors = ", ".join(_factor(f) for f in (layer.slope, layer.gain, layer.log_gain))
    codes = "0" if layer.codes is None else f"net_codes_{i}"
    numbers = f"{layer.inputs}, {layer.outputs}, {layer.limit}, {layer.activation}"
    return f"    {{{numbers}, {points}, {factors}, {codes}}}"


def _factor(f: Factor) -> str:
    return f"{{{f.mantissa}, {f.point}}}"


def _table(kind: str, name: str, values: Iterable[int], suffix: str = "") -> str:
    numbers = [f"{int(v)}{suffix}" for v in values]
    lines = "\n    ".join(wrap(", ".join(numbers), WIDTH))
    return f"static const {kind} {name}[{len(numbers)}] = {{\n    {lines}}};\n"


def _begin(net: IntegerNet) -> str:
    learned = [layer for layer in net.layers if layer.learns]
    weights = np.concatenate([layer.weights.ravel() for layer in learned])
    biases = [layer.biases for layer in learned if layer.biases is not None]
    text = _table(f"{net.numbers}_t", "net_weights_at_first", weights)
    copy = ""
    if biases:
        text += "\n" + _table("int32_t", "net_biases_at_first", np.concatenate(biases))
        copy = "    for (i = 0; i < NET_BIASES; i++) s->biases[i] = net_biases_at_first[i];\n"
    low, high = (-128, 127) if net.signed else (0, 255)
    return f"""{text}
void net_begin(net_state *s)
{{
    uint32_t i;
    for (i = 0; i < NET_WEIGHTS; i++) s->weights[i] = net_weights_at_first[i];
    for (; i < sizeof s->weights / sizeof s->weights[0]; i++) s->weights[i] = 0;
{copy}    s->random = UINT32_C({net.random});
    s->classes = {net.recipe.classes};
}}

void net_quantise(const float *values, net_input *x)
{{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++) {{
        float v = values[i] * {float(2**net.input_point)!r}f;
        int32_t n = v >= {high}.0f ? {high} : v <= {low}.0f ? {low} : 0;
        if (v >= 0.0f && v < {high}.0f) n = (int32_t)(v + 0.5f);
        if (v > {low}.0f && v < 0.0f) n = -(int32_t)(0.5f - v);
        x[i] = (net_input)n;
    }}
}}

uint32_t net_classes(const net_state *s)
{{
    return s->classes;
}}

int net_add_class(net_state *s)
{{
    if (s->classes >= NET_CLASSES) return NET_NO_SPACE;
    s->classes++;
    return NET_OK;
}}
"""


def _steps(net: IntegerNet, at: Places) -> str:
    """Inference and the training step: one call after another."""
    forward, step = [], []
    last = len(net.layers) - 1
    for i, layer in enumerate(net.layers):
        source = f"net_units(a->y + {at.outputs[i - 1]})" if i else "net_bytes(x)"
        w, b = _memory(i, layer, at)
        call = f"(&net_layers[{i}], {w}, {b}, {source}, "
        if i == last:
            forward.append(f"    tps_int_logits{call}s->classes, logits);")
            step.append(f"    tps_int_logits{call}s->classes, a->e);")
        else:
            y = f"a->y + {at.outputs[i]}"
            forward.append(f"    tps_int_forward{call}{y});")
            step.append(f"    tps_int_forward{call}{y});")
        if layer.learns:
            outputs = "" if i == last else f"a->y + {at.outputs[i]}, "
            kernel = "tps_int_learn_head" if i == last else "tps_int_learn_hidden"
            step.append(
                f"    if (blocks & UINT32_C({1 << i})) {{\n"
                f"        value = {kernel}{call}{outputs}s->classes,\n"
                "            *labels, rate, a->e, &s->random);\n"
                f"        if (loss) loss[{i}] = value;\n    }}"
            )
    units = _UNITS if last else ""
    unused = "" if last else "    (void)a;\n"
    return _STEPS.format(
        units=units, unused=unused, forward="\n".join(forward), step="\n".join(step)
    )


def _memory(i: int, layer: IntegerLayer, at: Places) -> tuple[str, str]:
    """Where the weights and the biases of a layer lie."""
    if not layer.learns:
        return f"net_weights_{i}", "0" if layer.biases is None else f"net_biases_{i}"
    biases = "0" if layer.biases is None else f"s->biases + {at.biases[i]}"
    return f"s->weights + {at.weights[i]}", biases


def _records(net: IntegerNet, at: Places) -> str:
    """`net_save` and `net_load`."""
    loops, size = "", at.weight_bytes
    for i, layer in enumerate(net.layers):
        if layer.learns:
            start = at.weights[i]
            loops += (
                f"    for (i = {start}; i < {start + layer.weights.size}; i++, p += {size})\n"
                f"        s->weights[i] = (TPS_WEIGHT)tps_clip(tps_get_signed(p, {size}), "
                f"net_layers[{i}].limit);\n"
            )
    put = get = ""
    if at.bias_count:
        put = "    for (i = 0; i < NET_BIASES; i++) p = tps_put(p, (uint32_t)s->biases[i], 4);\n"
        get = (
            "    for (i = 0; i < NET_BIASES; i++, p += 4)\n"
            "        s->biases[i] = tps_clip(tps_get_signed(p, 4), TPS_BIAS_LIMIT);\n"
        )
    words = [number for (number,) in struct.iter_unpack("<I", record_head(net))]
    return _RECORDS.format(
        size=size, put=put, get=get, loops=loops, head=_table("uint32_t", "net_head", words, "u"),
        words=len(words), start=at.head_bytes, classes=4 * CLASSES, random=4 * RANDOM,
        least=net.recipe.classes,
    )  # fmt: skip


_NO_LIBC = """#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns") /* loops stay loops: no memcpy */
#endif"""

_HEADER = """{licence}
/* {sizes}, learns in {numbers} by {rule}, one sample a step.
 *
 * Functions, errors and their numbers are those of a net of floats, but for these:
 * - An input is a net_input, {kind}: v stands for v / 2^NET_INPUT_POINT. net_quantise computes
 *   it, and saturates numbers that are out of range. Every input is valid: no NET_BAD_INPUT.
 * - The rate is a whole number of 65,536ths. NET_RATE(0.01) computes it while compiling, and
 *   saturates at 65535; rates that round to 0, or are no number, become 0: NET_BAD_RATE.
 * - A logit z stands for z / 2^NET_LOGIT_POINT, a loss for loss / 2^NET_LOSS_POINT nats.
 * - Weights saturate: no NET_DIVERGED. Those in net_state are integers.
 * The RAM is sizeof(net_state) + sizeof(net_arena) = NET_RAM_BYTES. */
#ifndef NET_H
#define NET_H

#include <stdint.h>

#define NET_INPUT {inputs} /* numbers of a sample */
#define NET_INPUT_POINT {input_point}
#define NET_CLASSES {classes} /* at most */
#define NET_BATCH 1 /* samples of a step */
#define NET_BLOCKS {blocks}
#define NET_ALL_BLOCKS {all_blocks}
#define NET_PARAMS {parameters}
#define NET_WEIGHTS {at.weight_count}
#define NET_BIASES {at.bias_count}
#define NET_LOGIT_POINT {logit_point}
#define NET_LOSS_POINT 12
#define NET_RAM_BYTES {ram} /* of net_state and net_arena */
#define NET_RECORD_BYTES {at.record_bytes}ul
#define NET_RATE(rate) \\
    ((uint16_t)((rate) > 0.0 ? (rate) < 0.99999 ? (rate) * 65536.0 + 0.5 : 65535.0 : 0.0))

/* What a function returns */
{codes}

typedef {kind} net_input;

typedef struct {{
{biases}    uint32_t random;  /* the state of xorshift32, never 0 */
    uint32_t classes; /* how many there are now */
    {numbers}_t weights[{at.padded_weights}];
}} net_state;

typedef struct {{
    int32_t e[NET_CLASSES];
{outputs}}} net_arena;

typedef char net_ram_is_as_planned[sizeof(net_state) + sizeof(net_arena) == NET_RAM_BYTES ? 1 : -1];

#ifdef __cplusplus
extern "C" {{
#endif

/* The weights that the model came with. Call it first. */
void net_begin(net_state *s);

/* Numbers to inputs, rounded and saturated; the only function with floats. NaN becomes 0. */
void net_quantise(const float *values, net_input *x);

/* Logits of one sample, as many as there are classes now. */
int net_forward(const net_state *s, net_arena *a, const net_input *x, int32_t *logits);

/* Learn from a sample and its label, from 0 on. Bit i of `blocks`: block i + 1 learns;
 * NET_ALL_BLOCKS: all. `loss` gets a number for every block, or is 0. A rate of 0 and a label that
 * is no class are refused, and the weights stay as they were. */
int net_step(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
             uint16_t rate, uint32_t blocks, int32_t *loss);

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

_UNITS = """
static tps_source net_units(const int16_t *y)
{
    tps_source source;
    source.bytes = 0;
    source.units = y;
    return source;
}
"""

_STEPS = """static tps_source net_bytes(const net_input *x)
{{
    tps_source source;
    source.bytes = x;
    source.units = 0;
    return source;
}}
{units}
int net_forward(const net_state *s, net_arena *a, const net_input *x, int32_t *logits)
{{
{unused}{forward}
    return NET_OK;
}}

int net_step(net_state *s, net_arena *a, const net_input *x, const uint16_t *labels,
             uint16_t rate, uint32_t blocks, int32_t *loss)
{{
    uint32_t i;
    int32_t value;
    if (!rate) return NET_BAD_RATE;
    if (*labels >= s->classes) return NET_BAD_LABEL;
    for (i = 0; loss && i < NET_BLOCKS; i++) loss[i] = 0;
{step}
    return NET_OK;
}}
"""

_RECORDS = """{head}
void net_save(const net_state *s, uint8_t *record)
{{
    uint32_t i;
    uint8_t *p = record;
    for (i = 0; i < {words}; i++) p = tps_put(p, net_head[i], 4);
    tps_put(record + {classes}, s->classes, 4);
    tps_put(record + {random}, s->random, 4);
    for (i = 0; i < NET_WEIGHTS; i++) p = tps_put(p, (uint32_t)s->weights[i], {size});
{put}    tps_put(p, ~tps_int_crc(UINT32_C(0xFFFFFFFF), record, NET_RECORD_BYTES - 4), 4);
}}

int net_load(net_state *s, const uint8_t *record)
{{
    uint32_t i, classes = tps_get(record + {classes}, 4), random = tps_get(record + {random}, 4);
    const uint8_t *p = record + {start};
    for (i = 0; i < {words}; i++)
        if (i != {classes} / 4 && i != {random} / 4 && tps_get(record + 4 * i, 4) != net_head[i])
            return NET_BAD_RECORD;
    if (!random || classes < {least} || classes > NET_CLASSES
        || tps_get(record + NET_RECORD_BYTES - 4, 4)
            != (uint32_t)~tps_int_crc(UINT32_C(0xFFFFFFFF), record, NET_RECORD_BYTES - 4))
        return NET_BAD_RECORD;
{loops}{get}    s->classes = classes;
    s->random = random;
    return NET_OK;
}}
"""
