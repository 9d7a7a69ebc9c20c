"""`--checkpoint` and `--resume`: a run that can be interrupted, and how it goes on."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tpsgd
from tpsgd.cli.options import command_line, setting
from tpsgd.cli.terminal import NOTHING_DONE, Stopped
from tpsgd.errors import TpsgdError

TERMINATED = 143  # the exit status after SIGTERM


@dataclass(frozen=True)
class Resuming:
    """Where the state of training is kept."""

    TITLE = "Checkpoints"

    checkpoint: Path | None = setting(None, "Folder for the state of training after epochs.")  # noqa: RUF009
    resume: bool = setting(False, "Go on from --checkpoint, or begin if it is empty.", "--resume")

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group."""
        if self.checkpoint is None:
            if self.resume:
                raise TpsgdError("--resume goes on from a checkpoint: add --checkpoint FOLDER")
            return {}
        return {"checkpoint": tpsgd.Checkpoint(self.checkpoint, resume=self.resume)}

    def refuse(self, what: str) -> None:
        """Refuse a checkpoint of something that has none."""
        if self.checkpoint is not None:
            raise TpsgdError(f"{what} has no checkpoints: leave --checkpoint out")

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end a run that has a checkpoint with how to go on."""
        if self.checkpoint is None:
            yield
            return
        signals: list[int] = []

        def end(number: int, _: Any) -> None:
            signals.append(number)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, end)
        try:
            yield
        except (KeyboardInterrupt, Stopped) as stopped:
            done = str(stopped) not in ("", NOTHING_DONE)
            reason = str(stopped) if done else f"interrupted {self._position()}".rstrip()
            text = f"{reason}; to go on: {self._command()}"
            raise Stopped(text, *([TERMINATED] if signals else [])) from None
        finally:
            signal.signal(signal.SIGTERM, before)

    def _position(self) -> str:
        from tpsgd.saved.checkpoint import position

        return "" if self.checkpoint is None else position(self.checkpoint)

    def _command(self) -> str:
        return command_line() if self.resume else f"{command_line()} --resume"
