"""An export as a library of the Arduino IDE: three text files and a sketch beside the C."""

from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.names import USUAL, renamed
from tpsgd_export.to_c.source import filled

WORDS = (
    *("net_begin", "net_forward", "net_step", "net_classes", "net_add_class", "net_save"),
    *("net_load", "net_scale"),
)


def as_library(
    texts: dict[str, str], recipe: StepRecipe, summary: str, ram: int, name: str = USUAL
) -> dict[str, str]:
    """The files of a library by their paths; the sketch learns one sample at a time."""
    header, own = texts[f"{name}.h"], [renamed(word, name) for word in WORDS]
    words = {"summary": summary, "ram": f"{ram:,}", "inputs": recipe.inputs}
    words["scale"] = renamed("net_scale", name) in header
    words["library"] = f"tpsgd_{name}"
    keywords = "".join(f"{word}\tKEYWORD2\n" for word in own if word in header)
    return {f"src/{file}": text for file, text in texts.items()} | {
        "library.properties": renamed(filled("library.properties", words), name),
        "keywords.txt": keywords,
        "README.md": renamed(filled("arduino.md", words), name),
        "examples/learn/learn.ino": renamed(filled("sketch.ino", words), name),
    }
