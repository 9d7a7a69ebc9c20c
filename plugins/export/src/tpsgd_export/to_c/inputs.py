"""The header's words on inputs and classes, and `net_scale`, for a net that is written as C."""

import string
from textwrap import wrap

from tpsgd_export.inputs import SampleFormat
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.names import USUAL, named, renamed
from tpsgd_export.to_c.source import IN_FLASH, array, comment, filled, number

LONGEST = 60  # characters of a name
END_OF_FUNCTIONS = "#ifdef __cplusplus\n}\n"  # in net.h


def with_inputs(
    texts: dict[str, str], inputs: SampleFormat, recipe: StepRecipe, name: str = USUAL
) -> dict[str, str]:
    """The files of a net, under its name, with what its inputs and classes mean.

    Names of columns and classes are no names of C, and stay as they are.
    """
    texts = named(texts, name)
    header, program = _comment(inputs, "Classes" if recipe.targets is None else "Numbers"), ""
    if recipe.link:
        left_out = f"The outputs are logits; the model's {recipe.link} is left out."
        header += f"{comment(left_out)}\n\n"
    if inputs.shift:
        what = {"what": "a time step" if recipe.recurrent else "a sample"}
        header += renamed(filled("scale.h", what), name)
        tables = array("float", "net_shift", map(number, inputs.shift), IN_FLASH)
        tables += array("float", "net_scales", map(number, inputs.scale), IN_FLASH)
        count = len(inputs.shift)
        index = "i" if count == recipe.inputs else f"i % {count}u"
        program = renamed(filled("scale.c", {"tables": tables, "index": index}), name)
    if inputs.classes:
        count = max(recipe.outputs, len(inputs.classes))
        words = {"kind": "class" if recipe.targets is None else "number", "count": count}
        words["width"] = width(inputs.classes)
        header += renamed(filled("names.h", words), name)
        program += renamed(filled("names.c", words), name) + c_strings(inputs.classes, count)
    front, end, rest = texts[f"{name}.h"].rpartition(END_OF_FUNCTIONS)
    program = texts[f"{name}.c"] + program
    return texts | {f"{name}.h": front + header + end + rest, f"{name}.c": program}


def _comment(inputs: SampleFormat, labels: str) -> str:
    """The columns with their scaling, and the labels, in a comment of C."""
    lines, scaling = [], list(zip(inputs.shift, inputs.scale, strict=True))
    if scaling and len(scaling) == len(inputs.columns):
        lines.append("Features in their order, with shift and scale:")
        for i, (name, (shift, scale)) in enumerate(zip(inputs.columns, scaling, strict=True)):
            lines.append(f"  x[{i}] {name[:LONGEST]}: {shift:.7g}, {scale:.7g}")
    else:
        if inputs.columns:
            lines += ["Features in their order:", *_listed(inputs.columns)]
        if scaling:
            lines.append("Scaling of the inputs, shift and scale of each feature:")
            lines += wrap(", ".join(f"({a:.7g} {b:.7g})" for a, b in scaling), 94)
    if inputs.classes:
        by = " by their labels" if labels == "Classes" else " of a label"
        lines += [f"{labels}{by}:", *_listed(inputs.classes)]
    return f"{comment(*lines)}\n\n" if lines else ""


def _listed(names: tuple[str, ...]) -> list[str]:
    words = ", ".join(f"{i} {name[:LONGEST]}" for i, name in enumerate(names))
    return wrap(words, 94, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def c_strings(names: tuple[str, ...], count: int) -> str:
    """Names as C has them, in UTF-8, and empty ones for classes that may come."""
    names = (*(name[:LONGEST] for name in names), *[""] * (count - len(names)))
    return "    " + ",\n    ".join(map(c_string, names)) + "};\n"


def width(names: tuple[str, ...]) -> int:
    """Bytes of the longest of some strings of C, its end included."""
    return max((len(name[:LONGEST].encode(errors="replace")) for name in names), default=0) + 1


def c_string(text: str) -> str:
    """A string of C: what is no letter, digit, space or simple sign is written as its bytes."""
    plain = string.ascii_letters + string.digits + " _-.,"
    signs = (chr(b) if chr(b) in plain else f"\\{b:03o}" for b in text.encode(errors="replace"))
    return '"' + "".join(signs) + '"'
