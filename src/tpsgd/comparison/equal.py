"""What all arms of a comparison have in equal amounts: sample passes, reads of the data, or time.

With *n* epochs per block and *b* blocks, a net trained block by block reads the training samples
*n b* times; one whose blocks learn together, and backprop, read them *n* times. A block learns from
each sample *n* times in both: sample passes are equal, and that is what equal epochs mean.

At equal reads, every arm reads the samples as often as the arm that reads them most; at equal
seconds, every arm has the same time. Both follow from a short run of each arm: it shows which
blocks learn, and how long an epoch takes. The loop is not changed: an arm gets its number of
epochs, and a callback that stops a block when its time is over.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.engine.arm import Arm
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.train import Epoch

AMOUNTS = ("passes", "reads", "seconds")
TIMED_EPOCHS = 2  # the first epoch also has one-time costs; the second shows what each more takes
MORE = 100  # times the epochs that should fit into the time: the time ends them


@dataclass(frozen=True)
class Allowance:
    """The epochs of an arm, if not those that all share; and until when each block may learn.

    `seconds` are those of the arm, `ends` those after which a block with a number ends before.
    """

    epochs: int | list[int] | None = None
    seconds: float | None = None
    ends: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Allowance":
        """The allowance that `asdict` has made plain; in JSON, keys are words."""
        ends = {int(block): float(end) for block, end in values["ends"].items()}
        return cls(values["epochs"], values["seconds"], ends)

    def deadline(self, epoch: Epoch) -> bool:
        """Whether the time of a block is over."""
        if self.seconds is None:
            return False
        return epoch.seconds >= self.ends.get(epoch.block, self.seconds)

    def within(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of `fit` with this allowance."""
        limits: dict[str, Any] = {} if self.epochs is None else {"epochs": self.epochs}
        if self.seconds is not None:
            limits["callbacks"] = [*settings.get("callbacks", ()), self.deadline]
        return {**settings, **limits}


@dataclass(frozen=True)
class LearningStage:
    """Blocks that learn at the same time: all, or one of them; a solved block takes one epoch."""

    block: int  # counted from 1; 0: all
    solved: bool
    epoch: float  # seconds that each more epoch takes
    end: float  # seconds after which the short run had finished it


def check(equal: str, seconds: float | None, epochs: Any) -> None:
    """Refuse an unknown word, and amounts that do not belong together."""
    if equal not in AMOUNTS:
        raise TpsgdError(f"equal cannot be {equal!r}: {suggestion(str(equal), AMOUNTS)}")
    if not isinstance(epochs, int):
        raise TpsgdError(
            "a comparison needs one number of epochs, not a list for the blocks: backprop has none"
        )
    if seconds is not None and equal != "seconds":
        raise TpsgdError(f"seconds={seconds} needs equal='seconds', not {equal!r}")
    if seconds is not None and not 0 < seconds < math.inf:
        raise TpsgdError(f"the seconds of each arm must be more than 0, got {seconds!r}")


def stages(run: Run | None) -> list[LearningStage]:
    """The stages of a short run, in their order; none if nothing learned, or no epochs count."""
    if run is None or not run.history:
        return []
    joint = run.settings.get("order") != "sequential" or run.history[0].block == 0
    ends: dict[int, list[float]] = {}
    for epoch in run.history:
        ends.setdefault(0 if joint else epoch.block, []).append(epoch.seconds)
    plan = []
    for block, seconds in ends.items():
        solved = block > 0 and run.blocks[block - 1].learning == "solved"
        each = 0.0 if solved else max(seconds) - min(seconds)
        plan.append(LearningStage(block, solved, each, max(seconds)))
    return plan


def allowances(
    arms: Sequence[Arm],
    runs: Sequence[Run | None],
    equal: str,
    seconds: float | None,
    common: Settings,
) -> tuple[dict[str, Any], dict[str, Allowance]]:
    """What is equal, for the record, and what each arm may use, by its name."""
    names, epochs = [a.name for a in arms], common.epochs
    if equal == "passes" or not isinstance(epochs, int):
        return {}, {name: Allowance() for name in names}
    runs = [run if a.epochs is None else None for run, a in zip(runs, arms, strict=True)]
    if equal == "reads":
        amount, each = equal_reads(runs, epochs)
    else:
        amount, each = equal_seconds(runs, epochs, seconds, common.lr_schedule is not None)
    return {equal: amount}, dict(zip(names, each, strict=True))


def equal_reads(runs: Sequence[Run | None], epochs: int) -> tuple[int, list[Allowance]]:
    """The reads of the arm that reads most, and an allowance for every arm to read as often.

    Runs are those of each arm on a few samples, with one epoch; None for an arm that has no epochs
    or its own number of them.
    """
    plans = [stages(run) for run in runs]
    most = max((sum(1 if s.solved else epochs for s in plan) for plan in plans), default=0)
    allowed = []
    for run, plan in zip(runs, plans, strict=True):
        free = [stage.block for stage in plan if not stage.solved]
        if run is None or not free:
            allowed.append(Allowance())
            continue
        each, more = divmod(most - (len(plan) - len(free)), len(free))
        longer = free[len(free) - more :]  # blocks with one epoch more
        epochs_of_blocks = [each + (n in longer) for n in range(1, len(run.blocks) + 1)]
        allowed.append(Allowance(epochs_of_blocks if free[0] else each))
    return most, allowed


def equal_seconds(
    runs: Sequence[Run | None], epochs: int, seconds: float | None, exactly: bool = False
) -> tuple[float, list[Allowance]]:
    """The seconds of each arm, and its allowance; by default, the time of the slowest arm.

    Runs are those of each arm on all samples, with `TIMED_EPOCHS`. The time of more epochs follows
    from that of the last. In training block by block, all blocks get the same number of epochs, and
    each must end when they would be done. An arm may turn out faster than its short run, so the
    number of epochs is many times what should fit, and time ends the run; `exactly`: it is what
    should fit, for learning rates that follow the number of epochs.
    """
    timed = [(run.seconds if run else 0.0, stages(run)) for run in runs]
    each = [sum(stage.epoch for stage in plan) for _, plan in timed]  # seconds of an epoch
    if seconds is None:
        more = epochs - TIMED_EPOCHS
        seconds = max((s + more * e for (s, p), e in zip(timed, each, strict=True) if p), default=0)
        if not seconds:
            raise TpsgdError("no arm has epochs to take its time from: name a number of seconds")
    allowed = []
    for (short, plan), epoch in zip(timed, each, strict=True):
        if not epoch:
            allowed.append(Allowance(None, seconds))
            continue
        more, spent = (seconds - short) / epoch, 0.0  # epochs that fit beyond the short run
        ends: dict[int, float] = {}
        for stage in plan:
            spent += stage.epoch
            if stage.block:
                ends[stage.block] = stage.end + more * spent
        count = (1 if exactly else MORE) * (TIMED_EPOCHS + more)
        allowed.append(Allowance(max(1, math.ceil(count)), seconds, ends))
    return seconds, allowed
