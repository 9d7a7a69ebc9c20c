"""An export as a library: of the Arduino IDE with two sketches, or as a module of Zephyr."""

from tpsgd.common.errors import TpsgdError
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.to_c.names import USUAL, renamed
from tpsgd_export.to_c.source import filled, summary

WORDS = (
    *("net_begin", "net_forward", "net_predict", "net_step", "net_step_part", "net_classes"),
    *("net_add_class", "net_best", "net_save", "net_load", "net_save_to", "net_load_from"),
    "net_scale",
)
WINDOW = 8  # samples that a sketch of a sensor's window has at least


def check_library(files: str, recipe: StepRecipe, floats: bool, name: str) -> None:
    """Refuse what a library cannot have."""
    if files == "zephyr" and name == USUAL:
        raise TpsgdError(
            "files='zephyr' needs a name=, such as 'gait': Zephyr's own net_core.h has a NET_OK"
        )
    if files == "arduino" and (recipe.recurrent or recipe.batch > 1 or not floats):
        raise TpsgdError(
            "files='arduino' has a sketch that learns one sample at a time, in floats: export a "
            "net that is not recurrent, with batch=1 and numbers='float32', or plain files"
        )


def as_library(
    files: str, texts: dict[str, str], recipe: StepRecipe, ram: int, name: str = USUAL
) -> dict[str, str]:
    """The files of a library by their paths; the C lies in `src`."""
    words = {"summary": summary(recipe), "ram": f"{ram:,}", "inputs": recipe.inputs}
    words |= {"library": f"tpsgd_{name}", "upper": name.upper()}
    own = _of_arduino if files == "arduino" else _of_zephyr
    sources = {f"src/{file}": text for file, text in texts.items()}
    return sources | {
        path: renamed(text, name)
        for path, text in own(texts[f"{name}.h"], recipe, words, name).items()
    }


def _of_arduino(header: str, recipe: StepRecipe, words: dict, name: str) -> dict[str, str]:
    names = [word for word in WORDS if f"{renamed(word, name)}(" in header]
    named = recipe.targets is None and renamed("net_class_names", name) in header
    words |= {
        "named": named,
        "scale": "net_scale" in names,
        "of_numbers": recipe.targets is not None,
        "outputs": recipe.outputs,
        "best": "NAME(best)" if named else "best",
        "label": "NAME(label)" if named else "label",
    }
    texts = {
        "library.properties": filled("library.properties", words),
        "keywords.txt": "".join(f"{word}\tKEYWORD2\n" for word in names),
        "README.md": filled("arduino.md", words),
        "examples/learn/learn.ino": filled("sketch.ino", words),
    }
    channels, length = recipe.shape if len(recipe.shape) == 2 else (1, recipe.inputs)
    if recipe.targets is None and length >= WINDOW:
        words |= {"channels": channels, "length": length, "every": max(1, length // 2)}
        texts["examples/window/window.ino"] = filled("window.ino", words)
    return texts


def _of_zephyr(header: str, recipe: StepRecipe, words: dict, name: str) -> dict[str, str]:
    return {
        "zephyr/module.yml": filled("zephyr_module.txt", words),
        "CMakeLists.txt": filled("zephyr_cmake.txt", words),
        "Kconfig": filled("zephyr_kconfig.txt", words),
        "README.md": filled("zephyr.md", words),
    }
