"""A search that can be interrupted: its finished training runs, in trials.jsonl."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

from tpsgd.errors import TpsgdError
from tpsgd.saved.checkpoint import Checkpoint, readable, refuse_to_replace
from tpsgd.saved.json_lines import JsonLines
from tpsgd.training.run_identity import check_same_run

FILE = "trials.jsonl"
Key = Mapping[str, Any]  # the rule, the values and the seed of a training run


class FinishedTrials:
    """Finished training runs by rule, values and seed, in a file if there is a checkpoint.

    The first line of the file is what a search that goes on must have in common with this one.
    """

    def __init__(self, checkpoint: Checkpoint | None, identity: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.results: dict[str, tuple[float, float]] = {}
        if checkpoint is None:
            return
        self.lines = JsonLines(checkpoint.folder / FILE)
        identity = json.loads(json.dumps(identity, default=str))
        if not self.lines.objects:
            self.lines.add({"identity": identity})
            return
        if not checkpoint.resume:
            refuse_to_replace(checkpoint.folder, "the trials of a search")
        self._read(checkpoint, identity)

    def _read(self, checkpoint: Checkpoint, identity: dict[str, Any]) -> None:
        head, *trials = self.lines.objects
        if head is None or None in trials:
            raise TpsgdError(
                f"{self.lines.file} was edited or damaged, or is of another version of tpsgd: name "
                "another folder"
            )
        with readable(checkpoint.folder):
            check_same_run(checkpoint.folder, head["identity"], identity)
            for trial in filter(None, trials):
                result = float(trial["accuracy"]), float(trial["seconds"])
                self.results[_text(trial["key"])] = result

    def get(self, key: Key) -> tuple[float, float] | None:
        """The accuracy and the seconds of a run that has finished; None if it has not."""
        return self.results.get(_text(key))

    def settings(self, key: Key) -> dict[str, Any]:
        """The setting of `fit` that lets a run be interrupted."""
        return {} if self.checkpoint is None else {"checkpoint": self._folder(key)}

    def keep(self, key: Key, accuracy: float, seconds: float) -> None:
        """Write the result of a run down; its checkpoint is not needed any more."""
        if self.checkpoint is None:
            return
        self.lines.add({"key": key, "accuracy": accuracy, "seconds": seconds})
        self._folder(key).remove()

    def settings_of_test(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The same setting for the test of the values that were chosen."""
        if self.checkpoint is None:
            return {}
        code = zlib.crc32(_text(chosen).encode())
        return {"checkpoint": self.checkpoint.within(f"test-{code:08x}")}

    def _folder(self, key: Key) -> Checkpoint:
        assert self.checkpoint is not None
        words = [key["rule"], *(f"{k} {v}" for k, v in key["values"].items())]
        return self.checkpoint.within(" ".join([*words, f"seed {key['seed']}"]))


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
