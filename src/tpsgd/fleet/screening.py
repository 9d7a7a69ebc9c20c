"""Why a client's reply is refused: one broken update would spoil the average of all others."""

# pyright: reportMissingImports=false

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from tpsgd.errors import shortened
from tpsgd.fleet.classes import LONGEST

WEIGHT = "num-examples"
TRAIN_METRICS = {WEIGHT, "loss", "memory-bytes"}
EVALUATE_METRICS = {WEIGHT, "accuracy"}
TINY, HUGE = 1e-30, 1e30  # of a calibration: their inverse squares are numbers, too
MOST_NEW = 1000  # classes that one reply may announce

Shapes = Mapping[str, tuple[int, ...]]
Check = Callable[[RecordDict], str | None]  # what is wrong with a reply, or None


def shapes_of(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a message."""
    return {name: tuple(array.shape) for name, array in arrays.items()}


def why_refused(message: Message, checks: Iterable[Check]) -> str | None:
    """Why a reply cannot be used, by the first check that says so, or None."""
    if message.has_error():
        reason = str(message.error.reason).strip().splitlines() or ["for no reason"]
        return f"its app failed: {shortened(reason[-1], 300)}"  # the last line of a traceback
    try:
        return next(filter(None, (check(message.content) for check in checks)), None)
    except Exception as error:  # whatever strange bytes may raise
        return f"its reply cannot be read: {shortened(error)}"


def why_silent(nodes: Iterable[int], replies: Iterable[Message], timeout: str) -> dict[int, str]:
    """The clients that were asked and have not answered, with the reason."""
    answered = {message.metadata.src_node_id for message in replies}
    return {node: f"no reply within {timeout}" for node in nodes if node not in answered}


def has_metrics(expected: set[str]) -> Check:
    """Exactly these metrics, each a finite number, for a number of samples that can be."""
    return lambda content: _metric_problem(content, expected)


def has_arrays(shapes: Shapes) -> Check:
    """Exactly these arrays, of these shapes, of finite numbers."""
    return lambda content: _array_problem(content, shapes)


def _metric_problem(content: RecordDict, expected: set[str]) -> str | None:
    if len(content.metric_records) != 1:
        return f"it has {len(content.metric_records)} metric records, not 1"
    metrics: Any
    (metrics,) = content.metric_records.values()
    if set(metrics) != expected:
        return f"its metrics are {sorted(metrics)}, not {sorted(expected)}"
    for name, value in metrics.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"its {name} is {shortened(value)}"
    if metrics[WEIGHT] < 0 or metrics[WEIGHT] != int(metrics[WEIGHT]):
        return f"it says that it has {metrics[WEIGHT]} samples"
    if not metrics[WEIGHT] and not announced(content):
        return "it has no samples"
    return None


def _array_problem(content: RecordDict, shapes: Shapes) -> str | None:
    if len(content.array_records) != 1:
        return f"it has {len(content.array_records)} array records, not 1"
    (arrays,) = content.array_records.values()
    if set(arrays) != set(shapes):
        strange = sorted(set(arrays) ^ set(shapes))
        return f"it has other arrays than it was sent: {shortened(', '.join(strange))}"
    for name, array in arrays.items():
        values = array.numpy()  # what is stored, whatever the message says of it
        if tuple(values.shape) != tuple(shapes[name]):
            return f"{name} has the shape {tuple(values.shape)}, not {tuple(shapes[name])}"
        if values.dtype.kind not in "fiu":
            return f"{name} is an array of {values.dtype}"
        with np.errstate(over="ignore"):  # 1e300 is finite, but not in a model's float32
            if not np.isfinite(values.astype(np.float32)).all():
                return f"{name} has NaN or infinity"
    return None


def announces_well(content: RecordDict) -> str | None:
    """The names of new classes are different short texts, the scales of a calibration numbers."""
    names = announced(content)
    if len(set(names)) < len(names):
        return "it announces a class twice"
    if len(names) > MOST_NEW or not all(isinstance(n, str) and len(n) <= LONGEST for n in names):
        return f"it announces {len(names)} classes, whose names must be short texts"
    scales = measured_scales(content)
    if not all(isinstance(s, float) and (s == 0 or TINY < s < HUGE) for s in scales):
        return f"its scales are {shortened(scales)}"
    return None


def announced(content: RecordDict) -> list[str]:
    """The new classes that a reply announces."""
    return _of_local(content, "new-classes")


def measured_scales(content: RecordDict) -> list[float]:
    """The constants of a client's calibration, one per block."""
    return _of_local(content, "scales")


def _of_local(content: RecordDict, name: str) -> list[Any]:
    values = content.config_records.get("local", {}).get(name, [])
    if not isinstance(values, list):
        raise TypeError(f"{name} is no list")
    return values
