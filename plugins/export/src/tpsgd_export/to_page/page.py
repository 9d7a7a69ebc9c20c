"""One HTML file with a net that learns in it: the exported C as WebAssembly, and samples."""

import html
import json
import re
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.names import printable, safe
from tpsgd.common.output import check_new
from tpsgd.data.dataset import Data
from tpsgd.data.split import of_every_class
from tpsgd.losses import Loss
from tpsgd.rules import Rule, resolve
from tpsgd.train import simultaneous
from tpsgd_export.exported import Exported
from tpsgd_export.heads.recipe import HeadRecipe, unit_scale
from tpsgd_export.heads.source import sources as head_sources
from tpsgd_export.plain_steps import read_with_plain_scales
from tpsgd_export.recipe import Convolution, StepRecipe, refuse_joined
from tpsgd_export.records import learning_mask
from tpsgd_export.to_c.check import check
from tpsgd_export.to_c.codes import with_codes
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources
from tpsgd_export.to_page import wasm
from tpsgd_export.to_page.samples import PageSamples, chosen, drawing

FOLDER = Path(__file__).with_name("static")
SCRIPTS = (
    "net.js",
    "one_pass.js",
    "trainer.js",
    "sketch.js",
    "features.js",
    "chart.js",
    "learn.js",
)
FILE_BYTES = 260_000  # of the file, for the program and the samples; the rest takes 40,000
LEAST_FOR_SAMPLES = 120_000  # even if the program is large
MOST_FOR_SAMPLES = 180_000
CALIBRATION = 256  # training samples in which readouts measure their features
LARGEST_RATE = 1000
ONE_PASS = 128  # features of the head that learns in one pass
MOST_SLIDERS = 16  # features that can be set by hand


def page(
    model: nn.Module,
    data: Data,
    file: str | Path,
    *,
    rule: Rule | str | Sequence[Rule | str] | None = None,
    lr: float = 0.01,
    optimizer: str = "sgd",
    loss: Loss | None = None,
    spare: int = 3,
    seed: int = 0,
    overwrite: bool = False,
) -> Exported:
    """Write an HTML file in which the model learns, one sample at a time.

    The program in the file is the C of `tpsgd.export.c`, as WebAssembly. The file opens from the
    disk and requests nothing. Writing it needs a compiler for WebAssembly: clang with lld, or the
    package `ziglang`. Before it is written the C is run beside `tpsgd.fit`. Next to the net a head
    that learns from each sample once, that of `tpsgd.export.one_pass`, reads the same samples.

    Args:
        model: as for `tpsgd.export.c`, but not recurrent; the page starts with its weights.
        data: from `tpsgd.data.load`. The page has as many of its samples as fit into about
            300 kB; pixels may get coarser for it.
        file: the page, such as `learns.html`.
        rule: as for `fit`: `readout`, `tpsgd_l2`, `tpsgd_l1`, `drtp` or `frozen`. Default:
            `rules.default()`. Readouts whose scale nobody has set have that of
            `tpsgd.export.c`.
        lr: the learning rate at first; the visitor may change it.
        optimizer: "sgd", "momentum" (0.9) or "adam".
        loss: of the last block, if not the rule's own.
        spare: classes that a visitor may add.
        seed: of the class codes and of the choice of samples.
        overwrite: replace an earlier page.
    """
    path, rule = Path(file), resolve(rule)
    _check(path, data, lr)
    check_new(path, overwrite)
    learning, recipe = read_with_plain_scales(
        model, rule, data.shape, optimizer=optimizer, loss=loss, seed=seed, spare=spare,
        samples=_calibration(data),
    )  # fmt: skip
    refuse_joined(recipe, "a page")
    recipe = with_codes(recipe, "auto")
    outputs, classes = recipe.classes, len(data.classes)
    if outputs != classes:
        raise TpsgdError(f"the model has {outputs} outputs, and the data {classes} classes")
    if recipe.recurrent:
        raise TpsgdError("a recurrent net has no page; tpsgd.export.c writes it as C")
    head = head_sources(page_head(recipe, data, seed))
    program = wasm.compiled(
        {**sources(recipe), "wasm.c": _read("wasm.c"), **head, "one_pass.c": _read("one_pass.c")}
    )
    left = FILE_BYTES - len(program) * 4 // 3
    samples = chosen(data, min(max(left, LEAST_FOR_SAMPLES), MOST_FOR_SAMPLES), seed)
    record = {
        **_net(recipe, lr),
        **_inputs(data, samples),
        "onePass": ONE_PASS,
        "samples": samples.record(),
        "wasm": b64encode(program).decode(),
        "wasmBytes": len(program),
    }
    checked = check(model, recipe, sources(recipe), simultaneous, rule=learning, loss=loss)
    return Exported((write_whole(path, _filled(record).encode()),), checked, memory=layout(recipe))


def page_head(recipe: StepRecipe, data: Data, seed: int) -> HeadRecipe:
    """The head that learns in one pass next to the net, on features of the samples themselves."""
    return HeadRecipe(
        recipe.inputs, ONE_PASS, recipe.classes, recipe.spare, seed=seed % (1 << 32),
        scale=unit_scale(recipe.inputs, ONE_PASS, _calibration(data)),
    )  # fmt: skip


def _calibration(data: Data) -> torch.Tensor:
    """Training samples of all classes."""
    return torch.as_tensor(data.train[0][of_every_class(data.train[1], CALIBRATION)])


def _check(path: Path, data: Any, lr: Any) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise TpsgdError(f"a page is a file such as learns.html, not {path}")
    if not path.parent.is_dir():
        raise TpsgdError(f"cannot write {path}: there is no folder {path.parent}")
    if not isinstance(data, Data):
        raise TpsgdError(f"data must be a data set of tpsgd.data.load, not {type(data).__name__}")
    if data.targets or data.train[1].dim() > 1:
        raise TpsgdError(
            "a page learns a class for each sample: numbers, and labels of steps or pixels, have "
            "none; tpsgd.export.c writes numbers as C"
        )
    if not isinstance(lr, (int, float)) or not 0 < lr <= LARGEST_RATE:
        raise TpsgdError(f"lr must be above 0 and at most {LARGEST_RATE:,}, got {lr}")


def _net(recipe: StepRecipe, lr: float) -> dict[str, Any]:
    """The net in plain values: sizes, masks of the blocks that learn, first layer."""
    mask = learning_mask(recipe)
    head = 1 << recipe.blocks[-1].number
    sizes = [recipe.inputs, *(block.pooled for block in recipe.blocks[:-1]), recipe.classes]
    return {
        "rule": recipe.rule,
        "loss": recipe.loss,
        "optimizer": recipe.optimizer,
        "layers": [f"{n:,}" for n in sizes],
        "lr": lr,
        "spare": recipe.spare,
        "mask": mask,
        "head": mask & head if mask != head else 0,
        "hidden": _first_weights(recipe),
    }


def _first_weights(recipe: StepRecipe) -> dict[str, int] | None:
    """Where the weights of the first layer lie, if they look like small grey pictures."""
    block, *later = recipe.blocks
    layer, (channels, *space) = block.layer, recipe.shape
    if not later or len(space) != 2 or channels != 1 or not block.learns:
        return None
    if isinstance(layer, Convolution):
        return {"units": layer.filters, "rows": layer.kernel[0], "columns": layer.kernel[1]}
    return {"units": layer.outputs, "rows": space[0], "columns": space[1]}


def _inputs(data: Data, samples: PageSamples) -> dict[str, Any]:
    """What a sample looks like, and how a visitor may change it."""
    grey = len(data.shape) == 3 and data.shape[0] == 1
    columns = data.inputs.get("columns") or [f"x{i + 1}" for i in range(samples.train[0].shape[1])]
    scaling = data.inputs.get("scaling", {})
    few = len(data.shape) == 1 and data.shape[0] <= MOST_SLIDERS
    kind = "draw" if grey else "picture" if len(data.shape) == 3 else "table" if few else "series"
    return {
        "name": safe(Path(data.name).stem),
        "classes": [printable(name) for name in data.classes],
        "shape": list(data.shape),
        "kind": kind,
        "noun": "digit" if list(data.classes) == list("0123456789") else "picture",
        "drawing": drawing(samples.numbers(samples.train[0]), data.shape) if grey else None,
        "columns": [printable(name) for name in columns] if few else [],
        "shift": scaling.get("shift", [0.0]) if few else [0.0],
        "scale": scaling.get("scale", [1.0]) if few else [1.0],
    }


def _read(name: str) -> str:
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


def _filled(record: dict[str, Any]) -> str:
    """The template with the style, the scripts and the record in it."""
    values = {
        "title": html.escape(f"{record['name']}: a neural net that learns in this page"),
        "style": _read("style.css"),
        "record": json.dumps(record, separators=(",", ":")).replace("<", "\\u003c"),
        "script": "\n".join(map(_read, SCRIPTS)),
    }
    template = _read("template.html")
    return re.sub(r"<!--(\w+)-->|/\*(\w+)\*/", lambda m: values[m[1] or m[2]], template)
