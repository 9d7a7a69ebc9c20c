"""`--checkpoint` and `--resume`: a run that can be interrupted, and how it goes on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tpsgd
from tpsgd.cli.options import command_line, setting
from tpsgd.cli.terminal import NOTHING_DONE, Stopped
from tpsgd.common.errors import TpsgdError

TERMINATED = 143  # the exit status after SIGTERM
RECORDS = ("checkpoint.json", "comparison.jsonl", "trials.jsonl")  # of runs that have begun


@dataclass(frozen=True)
class Resuming:
    """Where the state of training is kept."""

    TITLE = "Checkpoints"

    checkpoint: Path | None = setting(None, "Folder for the state of training after epochs.")  # noqa: RUF009
    resume: bool = setting(
        False,
        "Go on from --checkpoint, or begin if it is empty; a finished run takes more --epochs.",
        "--resume",
    )

    def settings(self) -> dict[str, Any]:
        if self.checkpoint is None:
            if self.resume:
                raise TpsgdError("--resume goes on from a checkpoint: add --checkpoint FOLDER")
            return {}
        return {"checkpoint": tpsgd.Checkpoint(self.checkpoint, resume=self.resume)}

    @property
    def goes_on(self) -> bool:
        """Whether there is a run to go on with, whose results are replaced by more complete ones.

        A run that only begins must not replace the results of another.
        """
        if self.checkpoint is None or not self.resume:
            return False
        folder = self.checkpoint.expanduser()
        places = [f"{below}{name}" for name in RECORDS for below in ("", "*/", "*/*/")]
        return any(next(folder.glob(place), None) for place in places)  # an adaptor's: arm/tap

    @contextmanager
    def interruptible(self, otherwise: str = "") -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end a run that can go on with how to do that.

        The folder of the checkpoint is for this process alone in the meantime. `otherwise` says
        how a run goes on that has no checkpoint; "": it does not.
        """
        if self.checkpoint is None and not otherwise:
            yield
            return
        claimed: Any = nullcontext()
        if self.checkpoint is not None:
            claimed = tpsgd.Checkpoint(self.checkpoint).claimed()
        with terminable() as signals, claimed:
            try:
                yield
            except (KeyboardInterrupt, Stopped) as stopped:
                text = self._how_to_go_on(str(stopped), otherwise)
                raise Stopped(text, *([TERMINATED] if signals else [])) from None

    def _how_to_go_on(self, reason: str, otherwise: str) -> str:
        """Where the run was interrupted, what is saved of it, and the command that goes on."""
        from tpsgd.saved.checkpoint import BEGUN, position

        nothing_done = reason in ("", NOTHING_DONE)
        if self.checkpoint is None:
            return f"{'interrupted' if nothing_done else reason}; {otherwise}"
        folder = self.checkpoint.expanduser()
        positions = [position(file.parent) for file in folder.glob("**/checkpoint.json")]
        trials = next(folder.glob("**/trials.jsonl"), None)
        if nothing_done and trials is None and not {*positions} - {BEGUN}:
            return f"interrupted before its first checkpoint; nothing was saved of it in {folder}"
        command = command_line() if self.resume else f"{command_line()} --resume"
        where = f"interrupted {position(folder)}".rstrip() if nothing_done else reason
        return f"{where}; to go on: {command}"


@contextmanager
def terminable() -> Iterator[list[int]]:
    """Let SIGTERM end what runs as Ctrl-C does; the list has its number if it came."""
    signals: list[int] = []

    def end(number: int, _: Any) -> None:
        signals.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield signals
    finally:
        signal.signal(signal.SIGTERM, before)
