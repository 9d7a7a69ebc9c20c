"""An export as a library of the Arduino IDE: three text files and a sketch beside the C."""

from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.source import filled

WORDS = (
    *("net_begin", "net_forward", "net_step", "net_classes", "net_add_class", "net_save"),
    *("net_load", "net_scale"),
)


def as_library(texts: dict[str, str], recipe: StepRecipe, summary: str, ram: int) -> dict[str, str]:
    """The files of a library by their paths; the sketch learns one sample at a time."""
    words = {"summary": summary, "ram": f"{ram:,}", "inputs": recipe.inputs}
    words["scale"] = "net_scale" in texts["net.h"]
    keywords = "".join(f"{word}\tKEYWORD2\n" for word in WORDS if word in texts["net.h"])
    return {f"src/{name}": text for name, text in texts.items()} | {
        "library.properties": filled("library.properties", words),
        "keywords.txt": keywords,
        "README.md": filled("arduino.md", words),
        "examples/learn/learn.ino": filled("sketch.ino", words),
    }
