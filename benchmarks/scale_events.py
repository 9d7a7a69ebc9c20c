"""A small event simulation: every resource, a core or a link, does its tasks in their order."""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Name = Any  # hashable


@dataclass(frozen=True)
class Task:
    """Some seconds of work for a resource, after other tasks.

    A task may take a share of a second resource while it runs: a message takes the core's time
    where no hardware carries it.
    """

    name: Name
    resource: Name
    seconds: float
    after: tuple[Name, ...] = ()
    slows: Name = None
    share: float = 0.0


@dataclass
class Running:
    """A task that has begun, and the seconds that it still takes at full speed."""

    task: Task
    left: float


def simulate(tasks: Iterable[Task]) -> dict[Name, float]:
    """When each task ends.

    Examples:
        >>> compute = [Task("a", "core", 2.0), Task("b", "core", 3.0)]
        >>> message = Task("send a", "link", 4.0, after=("a",))
        >>> simulate([*compute, message, Task("c", "core", 1.0, after=("send a",))])
        {'a': 2.0, 'b': 5.0, 'send a': 6.0, 'c': 7.0}
    """
    queues: dict[Name, deque[Task]] = {}
    for task in tasks:
        queues.setdefault(task.resource, deque()).append(task)
    running: dict[Name, Running] = {}
    ends: dict[Name, float] = {}
    now = 0.0
    while queues or running:
        _begin(queues, running, ends)
        speeds = _speeds(running)
        now += _advance(running, speeds)
        for resource in [r for r, work in running.items() if work.left <= 0.0]:
            ends[running.pop(resource).task.name] = now
    return ends


def _begin(
    queues: dict[Name, deque[Task]], running: dict[Name, Running], ends: dict[Name, float]
) -> None:
    """Begin the tasks that are next on an idle resource and wait for nothing."""
    for resource in [r for r in queues if r not in running]:
        queue = queues[resource]
        if all(name in ends for name in queue[0].after):
            task = queue.popleft()
            running[resource] = Running(task, task.seconds)
            if not queue:
                del queues[resource]
    if not running:
        raise ValueError(f"tasks wait for each other: {[str(q[0].name) for q in queues.values()]}")


def _speeds(running: dict[Name, Running]) -> dict[Name, float]:
    speeds = dict.fromkeys(running, 1.0)
    for work in running.values():
        if work.task.share and work.task.slows in speeds:
            slowed = speeds[work.task.slows] - work.task.share
            speeds[work.task.slows] = max(0.0, slowed)
    return speeds


def _advance(running: dict[Name, Running], speeds: dict[Name, float]) -> float:
    """Work until a task ends: the seconds that this takes."""
    seconds = {r: work.left / speeds[r] if speeds[r] else math.inf for r, work in running.items()}
    step = min(seconds.values())
    for resource, work in running.items():
        ended = seconds[resource] <= step * (1 + 1e-12)
        work.left = 0.0 if ended else work.left - step * speeds[resource]
    return step
