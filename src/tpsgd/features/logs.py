"""Logs of training: callbacks of `fit` that write a line, or figures, after every epoch of a block.

    fit(model, data, callbacks=[tpsgd.logs.csv("log.csv")])

`csv` and `json_lines` need nothing else; `tensorboard` and `mlflow` need these packages. Where
several runs share the callbacks, as in `compare`, each run has the callback that `of_run` returns:
its rows have the arm and the seed, and TensorBoard and MLflow have a folder or a run for each.
"""

import json
import math
import os
import warnings
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.output import check_new
from tpsgd.saved.checkpoint import Checkpoint
from tpsgd.train import Epoch

HEADER = ",".join(field.name for field in fields(Epoch)) + "\n"
OF_RUNS, NO_RUN = "arm,seed," + HEADER, ",,"


class FileLog:
    """A log in a text file: a line per block and epoch, in the file as soon as it is known.

    A disk that is full does not end the training: there is one warning, and the `error` is kept.
    """

    def __init__(
        self, file: str | Path, *, append: bool = False, overwrite: bool = False, json: bool = False
    ) -> None:
        self.path, self._json, self._run = Path(file).expanduser(), json, ""
        self._errors: list[OSError] = []  # of all runs that share the file
        self._before: list[Epoch] | None = None  # a resumed run: the epochs of its record
        if not append:
            check_new(self.path, overwrite)
        try:
            if append and self.path.exists():
                content = self.path.read_bytes()
                os.truncate(self.path, content.rfind(b"\n") + 1)  # a kill may cut a line off
                self._run = NO_RUN if content.startswith(OF_RUNS.encode()) else ""
            with self.path.open("a" if append else "w", encoding="utf-8") as stream:
                stream.write("" if json or stream.tell() else HEADER)
        except OSError as error:
            reason = error.strerror or error
            raise TpsgdError(f"cannot write the log {file} ({reason})") from error

    @property
    def error(self) -> OSError | None:
        """Why the file is not written any further, if it is not."""
        return self._errors[0] if self._errors else None

    def of_run(self, arm: str, seed: int) -> "FileLog":
        """The log of one of several runs: its lines begin with the arm and the seed.

        A run that was interrupted at the end of the file is replaced.
        """
        log, name = copy(self), " ".join(arm.split())
        log._before = []
        if self._json:
            log._run = json.dumps({"arm": name, "seed": seed})[1:-1] + ", "
            return log
        name = '"' + name.replace('"', '""') + '"' if set(name) & set('",') else name
        log._run = f"{name},{seed},"
        if self._run != NO_RUN:
            if self.path.exists() and self.path.read_text(encoding="utf-8") != HEADER:
                raise TpsgdError(f"the log {self.path} has no arms and seeds: name another file")
            write_whole(self.path, OF_RUNS.encode())
            self._run = NO_RUN
        return log

    def line(self, epoch: Epoch) -> str:
        """The line of an epoch; JSON has null for NaN and infinity."""
        values = vars(epoch)
        if not self._json:
            row = ",".join("" if value is None else str(value) for value in values.values())
            return f"{self._run}{row}\n"
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in values.items()}
        return "{" + self._run + json.dumps(finite)[1:] + "\n"

    def __call__(self, epoch: Epoch) -> None:
        if self.error is not None:
            return
        try:
            if self._before is not None:
                self._drop_from(epoch, self._before)
            with self.path.open("a", encoding="utf-8", newline="") as stream:
                stream.write(self.line(epoch))
        except OSError as error:
            self._errors.append(OSError(error.errno, error.strerror, str(self.path)))
            problem = f"the log {self.path} is not written any further ({error.strerror})"
            warnings.warn(f"{problem}; training goes on", stacklevel=2)

    def resumed(self, history: list[Epoch]) -> None:
        """The run goes on from a checkpoint with these epochs; lines of later ones are replaced."""
        self._before = history

    def _drop_from(self, epoch: Epoch, before: list[Epoch]) -> None:
        """Drop what the interrupted run wrote about this epoch and those after it."""
        self._before = None
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        of_run = "{" * self._json + self._run
        others = [i for i, line in enumerate(lines) if not line.startswith(of_run)]
        first = max(others, default=-1) + 1  # the lines of this run are the last of the file
        start = ",".join(self.line(epoch).removeprefix(of_run).split(",")[:2]) + ","
        same = [i for i in range(first, len(lines)) if lines[i].startswith(of_run + start)]
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


class TensorBoard:
    """Figures of blocks in a folder of TensorBoard; each of several runs has a folder in it."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]
        except ImportError as error:
            raise TpsgdError("for TensorBoard, run: pip install tensorboard") from error
        self.folder, self._open = Path(folder), SummaryWriter
        self._writers: dict[Path, Any] = {}  # at most one, of all runs

    def of_run(self, arm: str, seed: int) -> "TensorBoard":
        """The same in the folder of one of several runs."""
        board = copy(self)
        board.folder = Checkpoint(self.folder).within(f"{arm} seed {seed}").folder
        return board

    def write(self, values: dict[str, float], block: int, epoch: int) -> None:
        """Write the figures of a block after an epoch."""
        if self.folder not in self._writers:
            while self._writers:
                self._writers.popitem()[1].close()
            self._writers[self.folder] = self._open(str(self.folder))
        writer = self._writers[self.folder]
        for name, value in values.items():
            writer.add_scalar(f"{name}/block {block}", value, epoch)
        writer.flush()

    def __call__(self, epoch: Epoch) -> None:
        self.write(_figures(epoch), epoch.block, epoch.epoch)


def tensorboard(folder: str | Path) -> TensorBoard:
    """A callback of `fit` that writes the figures of every block for TensorBoard.

    Args:
        folder: of the event files, as for `tensorboard --logdir`.
    """
    return TensorBoard(folder)


class MLflow:
    """Figures of blocks as metrics of MLflow's active run, or of a run in it."""

    def __init__(self, client: Any, name: str = "") -> None:
        self._client, self._name, self._id = client, name, None

    def of_run(self, arm: str, seed: int) -> "MLflow":
        """The same in a run of its own, inside the active one if there is one."""
        return MLflow(self._client, f"{arm} seed {seed}")

    def __call__(self, epoch: Epoch) -> None:
        metrics = {f"block{epoch.block}_{k}": v for k, v in _figures(epoch).items()}
        if not self._name:
            self._client.log_metrics(metrics, step=epoch.epoch)
            return
        which = {"run_id": self._id} if self._id else {"run_name": self._name}
        with self._client.start_run(nested=True, **which) as run:
            self._id = run.info.run_id
            self._client.log_metrics(metrics, step=epoch.epoch)


def mlflow() -> MLflow:
    """A callback of `fit` that logs the figures of every block as metrics of MLflow's active run.

    Without an active run, MLflow starts one.
    """
    try:
        import mlflow as client  # type: ignore[import-not-found]
    except ImportError as error:
        raise TpsgdError("for logs in MLflow, run: pip install mlflow") from error
    return MLflow(client)


def _figures(epoch: Epoch) -> dict[str, float]:
    names = ("loss", "accuracy", "val_loss", "val_accuracy")
    return {name: value for name in names if (value := getattr(epoch, name)) is not None}
