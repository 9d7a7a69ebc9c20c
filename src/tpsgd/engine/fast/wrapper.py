"""The step of a net at full speed: a tape on a CPU, a CUDA graph on a GPU."""

import os
from collections.abc import Sequence
from typing import Any

from tpsgd.engine.fast.cuda_graphs import beside, can_update_beside, captured, library_modules_only
from tpsgd.engine.fast.optimizer_steps import quick_step, together
from tpsgd.engine.fast.replay import replayed
from tpsgd.train import Source, Step, Wrap


def enabled() -> bool:
    """Whether `TPSGD_FAST=0` is not set."""
    return os.environ.get("TPSGD_FAST", "1") != "0"


def quicken(learners: Sequence[Any]) -> None:
    """Let optimizers take their steps by torch's kernels alone."""
    if enabled():
        for learner in learners:
            learner.quick_step = quick_step


def wrapper(learners: Sequence[Any]) -> Wrap:
    """What wraps the steps of these blocks, a whole net."""
    if not enabled():
        return lambda step, learners, source: step
    quicken(learners)
    library_only = all(map(library_modules_only, learners))

    def wrap(step: Step, learners: Sequence[Any], source: Source) -> Step:
        if len(learners) > 1 and source.form.device.type == "cuda":
            small = can_update_beside(learners, source.form)
            step = beside(step, source.form.device) if small else together(step)
        step = replayed(step, learners, source, library_only)
        return captured(step, learners, source, library_only)

    return wrap
