"""Training runs that have finished, in a file: a comparison or a search repeats none of them."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tpsgd.common.errors import TpsgdError, reason
from tpsgd.features.run_identity import check_same_run
from tpsgd.saved.checkpoint import Checkpoint, readable, refuse_to_replace
from tpsgd.saved.folder import JsonLines

FAILURES = (TpsgdError, RuntimeError, MemoryError)  # of an arm: a GPU without memory left, say
TRIALS, COMPARISON = "trials.jsonl", "comparison.jsonl"
Key = Mapping[str, Any]  # what tells a run from others, such as its rule, its values and its seed
Values = dict[str, Any]


class FinishedRuns:
    """Results by key, in a file of the checkpoint's folder; none if there is no checkpoint.

    The first line of the file is the identity of the comparison or the search: what one that goes
    on must have in common with it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        identity: Values,
        file: str = TRIALS,
        content: str = "the trials of a search",
    ) -> None:
        self.checkpoint, self.identity = checkpoint, _plain(identity)
        self.folder = Path() if checkpoint is None else checkpoint.folder
        self._results: dict[str, Values] = {}
        if checkpoint is None:
            return
        self._lines = JsonLines(self.folder / file)
        lines: list[Any] = self._lines.objects
        if lines and not checkpoint.resume:
            refuse_to_replace(self.folder, content)
        if not lines:
            self._lines.add({"identity": self.identity})
            return
        if None in lines:
            raise TpsgdError(
                f"{self._lines.file} was edited or damaged, or is of another version of tpsgd: "
                "name another folder"
            )
        with readable(self.folder):
            first, *others = lines
            check_same_run(self.folder, first["identity"], self.identity)
            self._results = {_text(values.pop("key")): values for values in others}

    def get(self, key: Key) -> Values | None:
        """The result of a run that has finished; None if it has not."""
        return self._results.get(_text(key))

    def add(self, key: Key, values: Values) -> None:
        """Write the result of a run down; its own checkpoint is not needed any more."""
        if self.checkpoint is None:
            return
        self._results[_text(key)] = values
        self._lines.add({"key": key, **values})
        for checkpoint in self.settings(key).values():
            checkpoint.remove()

    def check_same(self, key: Key, values: Values) -> None:
        """Refuse values that differ from those that were added under this key, or add them."""
        if (before := self.get(key)) is None:
            self.add(key, _plain(values))
        else:
            check_same_run(self.folder, before, _plain(values))

    def settings(self, key: Key) -> dict[str, Checkpoint]:
        """The setting of `fit` that lets a run be interrupted, if its key has a rule and values."""
        if self.checkpoint is None or "values" not in key:
            return {}
        words = [key["rule"], *(f"{k} {v}" for k, v in key["values"].items())]
        return {"checkpoint": self.checkpoint.within(" ".join([*words, f"seed {key['seed']}"]))}

    def train_missing(
        self,
        key: Key,
        seeds: Iterable[int],
        train: Callable[[int, Values], Values],
        report: Callable[[int], None] | None = None,
    ) -> tuple[list[Values], str | None]:
        """The results with all seeds, and None; or those before training failed, and why it did.

        `train(seed, settings)` is called where there is no result yet, `report` after each seed.
        """
        results: list[Values] = []
        for seed in seeds:
            with_seed = {**key, "seed": seed}
            if (result := self.get(with_seed)) is None:
                try:
                    result = train(seed, self.settings(with_seed))
                except FAILURES as error:
                    return results, reason(error)
                self.add(with_seed, result)
            results.append(result)
            if report is not None:
                report(len(results))
        return results, None


def _plain(values: Any) -> Any:
    """Values as JSON has them."""
    return json.loads(json.dumps(values, default=str))


def _text(key: Any) -> str:
    return json.dumps(key, sort_keys=True)
