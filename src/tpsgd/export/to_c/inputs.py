"""The header's words on inputs and classes, and `net_scale`, for a net that is written as C."""

from textwrap import wrap

from tpsgd.export.inputs import Inputs
from tpsgd.export.recipe import Recipe
from tpsgd.export.to_c.source import array, comment, number

LONGEST = 60  # characters of a name
END_OF_FUNCTIONS = "#ifdef __cplusplus\n}\n"  # in net.h

_DECLARATION = """/* x <- (x - shift) / scale for the NET_INPUT numbers of {what}, in place: from
 * numbers as they are measured to numbers as the model was trained on. Call it before any function
 * that reads x. */
void net_scale(float *x);

"""
_FUNCTION = """
void net_scale(float *x)
{{
    uint32_t i;
    for (i = 0; i < NET_INPUT; i++)
        x[i] = (x[i] - net_shift[{i}]) / net_scales[{i}];
}}
"""


def with_inputs(texts: dict[str, str], inputs: Inputs, recipe: Recipe) -> dict[str, str]:
    """The files of a net with what its inputs and classes mean."""
    header, program = _comment(inputs), ""
    if recipe.link:
        left_out = f"The outputs are logits; the model's {recipe.link} is left out."
        header += f"{comment(left_out)}\n\n"
    if inputs.shift:
        header += _DECLARATION.format(what="a time step" if recipe.recurrent else "a sample")
        tables = [
            array("float", name, map(number, values))
            for name, values in (("net_shift", inputs.shift), ("net_scales", inputs.scale))
        ]
        count = len(inputs.shift)
        index = "i" if count == recipe.inputs else f"i % {count}u"
        program = "\n" + "".join(tables) + _FUNCTION.format(i=index)
    front, end, rest = texts["net.h"].rpartition(END_OF_FUNCTIONS)
    return texts | {"net.h": front + header + end + rest, "net.c": texts["net.c"] + program}


def _comment(inputs: Inputs) -> str:
    """The columns with their scaling, and the classes, in a comment of C."""
    lines = []
    many = len(inputs.shift) == len(inputs.columns)
    if inputs.columns and inputs.shift and many:
        lines.append("Inputs in their order, with shift and scale:")
        rows = zip(inputs.columns, inputs.shift, inputs.scale, strict=True)
        lines += [
            f"  x[{i}] {name[:LONGEST]}: {shift:.7g}, {scale:.7g}"
            for i, (name, shift, scale) in enumerate(rows)
        ]
    elif inputs.columns:
        lines += ["Inputs in their order:", *_listed(inputs.columns)]
    if inputs.shift and not (inputs.columns and many):
        lines.append("Scaling of the inputs, shift and scale of each feature:")
        pairs = zip(inputs.shift, inputs.scale, strict=True)
        lines += wrap(", ".join(f"({a:.7g} {b:.7g})" for a, b in pairs), 94)
    if inputs.classes:
        lines += ["Classes by their labels:", *_listed(inputs.classes)]
    return f"{comment(*lines)}\n\n" if lines else ""


def _listed(names: tuple[str, ...]) -> list[str]:
    words = ", ".join(f"{i} {name[:LONGEST]}" for i, name in enumerate(names))
    return wrap(words, 94, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
