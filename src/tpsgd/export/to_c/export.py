"""`export.c`: a training step as C files in a folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tpsgd.errors import TpsgdError
from tpsgd.export.exported import Exported
from tpsgd.export.read_model import read_model
from tpsgd.export.to_c.cell_memory import cell_layout
from tpsgd.export.to_c.cell_source import cell_sources
from tpsgd.export.to_c.check import check
from tpsgd.export.to_c.codes import check_kind, with_binary_codes, with_codes
from tpsgd.export.to_c.memory import Layout, layout
from tpsgd.export.to_c.source import sources
from tpsgd.files import write_whole
from tpsgd.losses import Loss
from tpsgd.output import output_folder
from tpsgd.rules import Rule, readout
from tpsgd.train import simultaneous
from tpsgd.units import as_bytes, size


def c(
    model: nn.Module,
    folder: str | Path,
    *,
    shape: Sequence[int],
    rule: Rule | Sequence[Rule] | None = None,
    batch: int = 1,
    optimizer: str = "sgd",
    codes: str = "auto",
    schedule: Callable[..., Any] = simultaneous,
    ram: str | int | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    samples: Tensor | None = None,
    spare: int = 0,
    overwrite: bool = False,
) -> Exported:
    """Write a model and its training step as C99: no heap, no library, all bytes set beforehand.

    The folder gets `net.h`, which explains what can be called, `net.c` and `tpsgd.h`. Before they
    are written they are compiled and run beside `tpsgd.fit`, if there is a C compiler.

    Args:
        model: as for `fit`: Linear, Conv1d, Conv2d; ReLU, LeakyReLU, Tanh, Sigmoid; pools and
            Flatten; recurrent layers. A batch norm of a layer that does not learn is folded.
        folder: where the files go.
        shape: of one sample; of sequences (steps, inputs), of which any number may come.
        rule: as for `fit`: `readout`, `tpsgd_l2`, `tpsgd_l1`, `drtp` or `frozen`.
        batch: samples of a step.
        optimizer: "sgd", "momentum" (0.9) or "adam".
        codes: class codes by "hash" or from "flash"; "auto": from flash if they are few; "binary":
            codes of -1 and +1 by hash, whatever the rule's.
        schedule: how the check trains; on the device, the caller says which blocks learn.
        ram: a budget such as "16KB", for the weights, the optimizer and the arena.
        seed: of the class codes.
        loss: of the last block, if not the rule's own.
        samples: inputs to calibrate readouts with; without them, the first batch does it.
        spare: classes that may come later.
        overwrite: replace an earlier export.

    Examples:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Linear(32, 10))
        >>> exported = c(model, tempfile.mkdtemp(), shape=(64,), ram="16KB")
        >>> exported.memory.ram_bytes
        9856
    """
    check_kind(codes)
    rule = readout() if rule is None else rule
    rule = with_binary_codes(rule) if codes == "binary" else rule
    recipe = read_model(
        model, rule, shape, batch=batch, optimizer=optimizer, loss=loss, seed=seed, spare=spare,
        samples=samples,
    )  # fmt: skip
    recipe = with_codes(recipe, codes)
    memory = (cell_layout if recipe.recurrent else layout)(recipe)
    _keep_within(ram, memory)
    texts = (cell_sources if recipe.recurrent else sources)(recipe)
    with output_folder(Path(folder), tuple(texts), overwrite) as path:
        checked = check(model, recipe, schedule, rule=rule, loss=loss)
        paths = [write_whole(path / name, text.encode()) for name, text in texts.items()]
    return Exported(tuple(paths), checked, memory=memory)


def _keep_within(ram: str | int | None, memory: Layout) -> None:
    if ram is None or memory.ram_bytes <= as_bytes(ram):
        return
    amounts = ", ".join(f"{name} {count:,} B" for name, count in memory.ram.items())
    raise TpsgdError(
        f"the net needs {memory.ram_bytes:,} B of RAM ({amounts}), and ram={size(as_bytes(ram))} "
        f"is {as_bytes(ram):,} B: take fewer units, a smaller batch or optimizer='sgd'"
    )
