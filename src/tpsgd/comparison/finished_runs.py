"""A comparison that can be interrupted: its allowances, and the records of finished runs."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tpsgd.comparison.equal import Allowance
from tpsgd.comparison.results import Result
from tpsgd.engine.record import Run
from tpsgd.saved import folder as folders
from tpsgd.saved.checkpoint import Checkpoint, readable, refuse_to_replace
from tpsgd.saved.folder import Layout
from tpsgd.training.arm import Arm
from tpsgd.training.confusion import Confusion
from tpsgd.training.run_identity import check_same_run

COMPARISON = Layout("comparison", 1)


class FinishedRuns:
    """The finished runs of a comparison by arm and seed, in a folder if there is a checkpoint.

    Attributes:
        amount: what all arms have in equal amounts, for the record: {"seconds": 1.5}.
        allowances: what each arm may use, by its name; empty if the comparison begins.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, identity: dict[str, Any], arms: Sequence[Arm]
    ) -> None:
        self.checkpoint = checkpoint
        self.identity = _plain(identity)
        self.arms: dict[str, Any] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.amount: dict[str, Any] = {}
        self.allowances: dict[str, Allowance] = {}
        if checkpoint is None:
            return
        described = {arm.name: _plain(arm.describe()) for arm in arms}
        if folders.holds(COMPARISON, checkpoint.folder):
            if not checkpoint.resume:
                refuse_to_replace(checkpoint.folder, "a comparison")
            self._read(checkpoint.folder, described)
        self.arms |= described

    def _read(self, folder: Path, arms: dict[str, Any]) -> None:
        """Read what an earlier process has left, if its comparison was the same."""
        description, _ = folders.read(COMPARISON, folder)
        with readable(folder):
            check_same_run(folder, description["identity"], self.identity)
            self.arms, self.runs = dict(description["arms"]), dict(description["runs"])
            for name in arms.keys() & self.arms.keys():
                pair = (
                    {f"{k} of {name}": v for k, v in d[name].items()} for d in (self.arms, arms)
                )
                check_same_run(folder, *pair)
            self.amount = dict(description["amount"])
            stored = description["allowances"].items()
            self.allowances = {name: Allowance.of(values) for name, values in stored}

    def begin(self, amount: dict[str, Any], allowances: dict[str, Allowance]) -> None:
        """Note what each arm may use, before the first is trained."""
        self.amount, self.allowances = amount, self.allowances | allowances
        self._write()

    def restore(self, result: Result, seed: int) -> bool:
        """Put a run that has finished into a result; whether there is one."""
        if self.checkpoint is None or (values := self.runs.get(_key(result, seed))) is None:
            return False
        with readable(self.checkpoint.folder):
            run, accuracy = Run.of(values["run"]), float(values["accuracy"])
            matrices = [Confusion(tuple(map(tuple, m["counts"])), tuple(m["classes"]))
                        for m in values["confusion"]]  # fmt: skip
        result.runs.append(run)
        result.accuracies.append(accuracy)
        result.confusions += matrices
        return True

    def settings(self, result: Result, seed: int) -> dict[str, Any]:
        """The setting of `fit` that lets a run be interrupted."""
        if self.checkpoint is None:
            return {}
        return {"checkpoint": self.checkpoint.within(_key(result, seed))}

    def keep(self, result: Result, seed: int) -> None:
        """Write the last run of a result down; its checkpoint is not needed any more."""
        if self.checkpoint is None or result.error is not None:
            return
        values = {"accuracy": result.accuracies[-1], "run": result.runs[-1].as_dict()}
        last = result.confusions[-1:]  # none of samples that have several labels
        values["confusion"] = [{"counts": m.counts, "classes": m.classes} for m in last]
        self.runs[_key(result, seed)] = values
        self._write()
        self.checkpoint.within(_key(result, seed)).remove()

    def _write(self) -> None:
        if self.checkpoint is None:
            return
        description = {
            "identity": self.identity,
            "arms": self.arms,
            "amount": self.amount,
            "allowances": {name: asdict(a) for name, a in self.allowances.items()},
            "runs": self.runs,
        }
        folders.write(COMPARISON, Path(self.checkpoint.folder), description, {})


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON has them."""
    return json.loads(json.dumps(values, default=str))


def _key(result: Result, seed: int) -> str:
    return f"{result.arm.name} seed {seed}"
