"""Why a client's reply is refused: one broken update would spoil the average of all others."""

# pyright: reportMissingImports=false

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from tpsgd.common.errors import shortened
from tpsgd_fleet.classes import LONGEST

WEIGHT = "num-examples"
TINY, HUGE = 1e-30, 1e30  # of a calibration: their inverse squares are numbers, too
MOST_NEW = 1000  # classes that one reply may announce

Check = Callable[[RecordDict], str | None]  # what is wrong with a reply, or None


def refusal(message: Message, checks: Iterable[Check]) -> str | None:
    """Why a reply cannot be used, by the first check that says so, or None."""
    if message.has_error():
        reason = str(message.error.reason).strip().splitlines() or ["for no reason"]
        return f"its app failed: {shortened(reason[-1], 300)}"  # the last line of a traceback
    try:
        return next(filter(None, (check(message.content) for check in checks)), None)
    except Exception as error:  # whatever strange bytes may raise
        return f"its reply cannot be read: {shortened(error)}"


def metrics_of(content: RecordDict) -> dict[str, Any]:
    """The only metric record of a reply."""
    (metrics,) = content.metric_records.values()
    return dict(metrics)


def arrays_in(content: RecordDict) -> ArrayRecord:
    """The only array record of a reply."""
    (arrays,) = content.array_records.values()
    return arrays


def has_metrics(*expected: str) -> Check:
    """Exactly these metrics and the number of samples, each a finite number."""

    def problem(content: RecordDict) -> str | None:
        if (count := len(content.metric_records)) != 1:
            return f"it has {count} metric records, not 1"
        metrics, names = metrics_of(content), sorted([*expected, WEIGHT])
        if sorted(metrics) != names:
            return f"its metrics are {sorted(metrics)}, not {names}"
        for name, value in metrics.items():
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                return f"its {name} is {shortened(value)}"
        if (samples := metrics[WEIGHT]) < 0 or samples != int(samples):
            return f"it says that it has {samples} samples"
        return None if samples or announced(content) else "it has no samples"

    return problem


def has_arrays(shapes: Mapping[str, Iterable[int]]) -> Check:
    """Exactly these arrays, of these shapes, of finite numbers."""

    def problem(content: RecordDict) -> str | None:
        if (count := len(content.array_records)) != 1:
            return f"it has {count} array records, not 1"
        arrays = arrays_in(content)
        if strange := sorted(set(arrays) ^ set(shapes)):
            return f"it has other arrays than it was sent: {shortened(', '.join(strange))}"
        for name, array in arrays.items():
            values, shape = array.numpy(), tuple(shapes[name])  # as stored, not as announced
            if values.shape != shape:
                return f"{name} has the shape {values.shape}, not {shape}"
            if values.dtype.kind not in "fiu":
                return f"{name} is an array of {values.dtype}"
            with np.errstate(over="ignore"):  # 1e300 is finite, but not in a model's float32
                if not np.isfinite(values.astype(np.float32)).all():
                    return f"{name} has NaN or infinity"
        return None

    return problem


def announces_well(content: RecordDict) -> str | None:
    """The names of new classes are different short texts, the scales of a calibration numbers."""
    names, scales = announced(content), measured_scales(content)
    if len(set(names)) < len(names):
        return "it announces a class twice"
    if len(names) > MOST_NEW or not all(isinstance(n, str) and len(n) <= LONGEST for n in names):
        return f"it announces {len(names)} classes, whose names must be short texts"
    if not all(isinstance(s, float) and (s == 0 or TINY < s < HUGE) for s in scales):
        return f"its scales are {shortened(scales)}"
    return None


def announced(content: RecordDict, name: str = "new-classes") -> list[Any]:
    """The new classes that a reply announces, or another list of its own."""
    values = content.config_records.get("local", {}).get(name, [])
    if not isinstance(values, list):
        raise TypeError(f"{name} is no list")
    return values


def measured_scales(content: RecordDict) -> list[float]:
    """The constants of a client's calibration, one per block."""
    return announced(content, "scales")
