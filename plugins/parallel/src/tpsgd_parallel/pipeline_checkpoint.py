"""A checkpoint of a pipeline: rank 0 writes the states of all ranks' blocks as one.

The file is that of `simultaneous` in one process, so that a run may go on with other stages, on
fewer or more ranks, or in one process.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpsgd.saved.checkpoint import Checkpoint
from tpsgd_parallel.on_rank import RankCheckpoint

ELSEWHERE = {  # the state of a block that another rank trains
    "mean_square": None, "penalty": None, "tensors": [], "optimizer": None, "batches": None,
    "patience": None,
}  # fmt: skip


@dataclass(frozen=True)
class PipelineCheckpoint(RankCheckpoint):
    """A checkpoint that all ranks write together: `every` is 0, and rank 0 says when it is time."""

    pipeline: Any = None
    seconds: float = 0.0  # that pass at least between two checkpoints
    written: list[float] = field(default_factory=lambda: [time.monotonic()])

    @classmethod
    def of_pipeline(cls, checkpoint: Checkpoint, pipeline: Any) -> "PipelineCheckpoint":
        """The same checkpoint, on a rank of a pipeline."""
        folder, every, resume = checkpoint.folder, checkpoint.every, checkpoint.resume
        return cls(folder, 0.0, resume, pipeline.ranks, pipeline, every)

    def open(self) -> dict[str, Any] | None:
        """The state that rank 0 reads, without what other ranks need."""
        state = super().open()
        if state is None or not state["stages"]:
            return state
        span = self.pipeline.spans()[self.ranks.number]
        for i, learner in enumerate(state["stages"][-1]["learners"]):
            if i not in span:
                learner.update(ELSEWHERE)
        record = state["record"]
        if not self.ranks.first:  # which tells callbacks of the epochs of all blocks
            record["history"] = [e for e in record["history"] if e["block"] - 1 in span]
            record["sample_passes"] = record["forward_passes"] = 0
        return state

    def write(self, state: dict[str, Any]) -> None:
        """Let rank 0 replace the checkpoint, if it is time, by the states of all ranks' blocks."""
        *ended, stage = state["stages"]
        over = not any(learner["learning"] for learner in stage["learners"])
        due = over or time.monotonic() - self.written[0] >= self.seconds
        if not self.ranks.from_first(due):
            return
        self.pipeline.spread_weights()
        each = self.ranks.from_all((stage["learners"], state["record"]))
        self.written[0] = time.monotonic()
        spans = self.pipeline.spans()
        learners = [each[rank][0][i] for rank, span in enumerate(spans) for i in span]
        joined = {
            "stages": [*ended, stage | {"learners": learners}],
            "record": joined_record([record for _, record in each], spans),
        }
        super().write(state | joined | ({"position": "finished"} if over else {}))


def joined_record(records: Sequence[Mapping[str, Any]], spans: Sequence[range]) -> dict[str, Any]:
    """Rank 0's record with the epochs and passes of all ranks, as one process would write it."""
    pairs = zip(records, spans, strict=True)
    history = [e for record, span in pairs for e in record["history"] if e["block"] - 1 in span]
    history.sort(key=lambda epoch: (epoch["epoch"], epoch["block"]))
    passes = {
        name: sum(record[name] for record in records)
        for name in ("sample_passes", "forward_passes")
    }
    return {**records[0], **passes, "history": history}
