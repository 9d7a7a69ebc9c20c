"""The step of a net at full speed: a tape on a CPU, a CUDA graph on a GPU."""

import os
from collections.abc import Sequence
from typing import Any

from tpsgd.engine.fast.cuda_graphs import (
    captured,
    library_modules_only,
    step_on_two_streams,
    step_with_optimizers_aside,
    suits_optimizers_aside,
    suits_two_streams,
)
from tpsgd.engine.fast.optimizer_steps import quick_step
from tpsgd.engine.fast.replay import replayed
from tpsgd.train import Source, Step, Wrap, step


def enabled() -> bool:
    """Whether `TPSGD_FAST=0` is not set."""
    return os.environ.get("TPSGD_FAST", "1") != "0"


def quicken(learners: Sequence[Any]) -> None:
    """Let optimizers take their steps by torch's kernels alone."""
    if enabled():
        for learner in learners:
            learner.updater.quick_step = quick_step


def wrapper(learners: Sequence[Any]) -> Wrap:
    """What wraps the steps of these blocks, a whole net."""
    if not enabled():
        return lambda step, learners, source: step
    quicken(learners)
    library_only = all(map(library_modules_only, learners))

    def wrap(take_step: Step, learners: Sequence[Any], source: Source) -> Step:
        if take_step is step and suits_two_streams(learners, source.form):
            take_step = step_on_two_streams
        elif take_step is step and suits_optimizers_aside(learners, source.form):
            take_step = step_with_optimizers_aside
        take_step = replayed(take_step, learners, source, library_only)
        return captured(take_step, learners, source, library_only)

    return wrap
