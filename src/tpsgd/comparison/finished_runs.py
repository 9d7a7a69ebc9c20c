"""A comparison that can be interrupted: the records of runs that have finished."""

import json
from pathlib import Path
from typing import Any

from tpsgd.comparison.results import Result
from tpsgd.engine.record import Run
from tpsgd.saved import folder as folders
from tpsgd.saved.checkpoint import Checkpoint, readable, refuse_to_replace
from tpsgd.saved.folder import Layout
from tpsgd.training.confusion import Confusion
from tpsgd.training.run_identity import check_same_run

COMPARISON = Layout("comparison", 1)


class FinishedRuns:
    """The finished runs of a comparison by arm and seed, in a folder if there is a checkpoint."""

    def __init__(self, checkpoint: Checkpoint | None, identity: dict[str, Any]) -> None:
        self.checkpoint = checkpoint
        self.identity = json.loads(json.dumps(identity, default=str))
        self.runs: dict[str, dict[str, Any]] = {}
        if checkpoint is None or not folders.holds(COMPARISON, checkpoint.folder):
            return
        folder = checkpoint.folder
        if not checkpoint.resume:
            refuse_to_replace(folder, "a comparison")
        description, _ = folders.read(COMPARISON, folder)
        with readable(folder):
            check_same_run(folder, description["identity"], self.identity)
            self.runs = dict(description["runs"])

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
        description = {"identity": self.identity, "runs": self.runs}
        folders.write(COMPARISON, Path(self.checkpoint.folder), description, {})
        self.checkpoint.within(_key(result, seed)).remove()


def _key(result: Result, seed: int) -> str:
    return f"{result.arm.name} seed {seed}"
