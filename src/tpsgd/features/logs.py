"""Logs of training: callbacks of `fit` that write a line, or figures, after every epoch of a block.

    fit(model, data, callbacks=[tpsgd.logs.csv("log.csv")])

`csv` and `json_lines` need nothing else; `tensorboard` and `mlflow` need these packages.
"""

import json
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.output import check_new
from tpsgd.train import Epoch

HEADER = ",".join(field.name for field in fields(Epoch)) + "\n"


class FileLog:
    """A log in a text file: a line per block and epoch, in the file as soon as it is known.

    A disk that is full does not end the training: there is one warning, and the `error` is kept.
    """

    def __init__(
        self, file: str | Path, *, append: bool = False, overwrite: bool = False, json: bool = False
    ) -> None:
        self.path, self.line = Path(file).expanduser(), _json_line if json else _row
        self.error: OSError | None = None
        self._before: list[Epoch] | None = None  # a resumed run: the epochs of its record
        if not append:
            check_new(self.path, overwrite)
        try:
            if append and self.path.exists():
                content = self.path.read_bytes()
                os.truncate(self.path, content.rfind(b"\n") + 1)  # a kill may cut a line off
            with self.path.open("a" if append else "w", encoding="utf-8") as stream:
                stream.write("" if json or stream.tell() else HEADER)
        except OSError as error:
            reason = error.strerror or error
            raise TpsgdError(f"cannot write the log {file} ({reason})") from error

    def __call__(self, epoch: Epoch) -> None:
        if self.error is not None:
            return
        try:
            if self._before is not None:
                self._drop_from(epoch, self._before)
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(self.line(epoch))
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self.path))
            problem = f"the log {self.path} is not written any further ({error.strerror})"
            warnings.warn(f"{problem}; training goes on", stacklevel=2)

    def resumed(self, history: list[Epoch]) -> None:
        """The run goes on from a checkpoint with these epochs; lines of later ones are replaced."""
        self._before = history

    def _drop_from(self, epoch: Epoch, before: list[Epoch]) -> None:
        """Drop what the interrupted run wrote about this epoch and those after it."""
        self._before = None
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        block_and_epoch = self.line(epoch).split(",")[:2]
        same = [i for i, line in enumerate(lines) if line.split(",")[:2] == block_and_epoch]
        if same and (not before or lines[same[-1] - 1] == self.line(before[-1])):
            write_whole(self.path, "".join(lines[: same[-1]]).encode())


def csv(file: str | Path, *, append: bool = False, overwrite: bool = False) -> FileLog:
    """A callback of `fit` that writes a row per block and epoch into a CSV file.

    Args:
        file: the file; one that exists is refused.
        append: add to a file that exists, for a run that is continued. If it goes on from a
            checkpoint, the lines of epochs that are trained again are replaced.
        overwrite: replace a file that exists.

    Examples:
        >>> import tempfile, torch, tpsgd
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = tpsgd.logs.csv(f"{folder}/log.csv")
        ...     _ = tpsgd.fit(model, (x, y), epochs=2, callbacks=[log])
        ...     lines = Path(f"{folder}/log.csv").read_text().splitlines()
        >>> lines[0], len(lines)
        ('block,epoch,loss,accuracy,val_loss,val_accuracy,seconds,r2,val_r2', 3)
    """
    return FileLog(file, append=append, overwrite=overwrite)


def json_lines(file: str | Path, *, append: bool = False, overwrite: bool = False) -> FileLog:
    """A callback of `fit` that writes a JSON object per block and epoch, each on its line.

    The arguments are those of `csv`.
    """
    return FileLog(file, append=append, overwrite=overwrite, json=True)


def file(file: str | Path, *, append: bool = False, overwrite: bool = False) -> FileLog:
    """`csv` or `json_lines`, by the file's name: FILE.csv or FILE.jsonl."""
    suffix = Path(file).suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise TpsgdError(f"a log is FILE.csv or FILE.jsonl, not {str(file)!r}")
    return FileLog(file, append=append, overwrite=overwrite, json=suffix == ".jsonl")


def tensorboard(folder: str | Path) -> Callable[[Epoch], None]:
    """A callback of `fit` that writes the figures of every block for TensorBoard.

    Args:
        folder: of the event files, as for `tensorboard --logdir`.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
    except ImportError as error:
        raise TpsgdError("for logs in TensorBoard, run: pip install tensorboard") from error
    writer = SummaryWriter(str(folder))

    def log(epoch: Epoch) -> None:
        for name, value in _figures(epoch).items():
            writer.add_scalar(f"{name}/block {epoch.block}", value, epoch.epoch)
        writer.flush()

    return log


def mlflow() -> Callable[[Epoch], None]:
    """A callback of `fit` that logs the figures of every block as metrics of MLflow's active run.

    Without an active run, MLflow starts one.
    """
    try:
        import mlflow as client  # type: ignore[import-not-found]
    except ImportError as error:
        raise TpsgdError("for logs in MLflow, run: pip install mlflow") from error

    def log(epoch: Epoch) -> None:
        metrics = {f"block{epoch.block}_{k}": v for k, v in _figures(epoch).items()}
        client.log_metrics(metrics, step=epoch.epoch)

    return log


def _figures(epoch: Epoch) -> dict[str, float]:
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return {name: value for name in names if (value := getattr(epoch, name)) is not None}


def _row(epoch: Epoch) -> str:
    return ",".join("" if value is None else str(value) for value in vars(epoch).values()) + "\n"


def _json_line(epoch: Epoch) -> str:
    """A JSON object; NaN and infinity are null."""
    values = {k: v if v is None or math.isfinite(v) else None for k, v in vars(epoch).items()}
    return json.dumps(values) + "\n"
