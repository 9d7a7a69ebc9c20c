"""What `tpsgd adapt` is to train, and the memory that it will need."""

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console

import tpsgd
from tpsgd.cli.terminal import waiting
from tpsgd.common.units import as_bytes, size

if TYPE_CHECKING:
    from tpsgd.adapt import Backbone


@dataclass(frozen=True)
class Job:
    """What is to be trained, as values."""

    backbone: "Backbone"
    taps: tuple[str, ...]
    data: "tpsgd.data.Data"
    settings: dict[str, Any]  # of `adapt.fit`, for all arms
    arms: dict[str, dict[str, Any]]  # more settings for each arm; the first is the chosen rule

    @property
    def memory(self) -> "tpsgd.Memory":
        """The memory settings."""
        return self.settings["memory"]

    @property
    def streamed(self) -> bool:
        """Whether the backbone runs again in every epoch instead of once."""
        in_memory = self.memory.budget is None and self.memory.reuse in (None, True)
        return not in_memory or "augment" in self.settings


def planned(job: Job) -> dict[str, Any]:
    """The planned bytes; those of the layers are the largest of all taps."""
    from tpsgd.adapt import quantize

    (x, y), (_, y_test) = job.data.train, job.data.test
    plan: dict[str, Any] = {"backbone_bytes": quantize.weight_bytes(job.backbone.model)}
    if job.memory.budget is not None:
        return plan | {"memory_budget": as_bytes(job.memory.budget)}
    with waiting("planning"):
        shapes = job.backbone.shapes(x, job.taps)
        plan["samples"] = 0 if job.streamed else len(y) + len(y_test)
        plan["features_bytes"] = plan["samples"] * 4 * sum(map(prod, shapes.values()))
        try:
            taps = [_rehearsed(job, tap, shape) for tap, shape in shapes.items()]
        except (RuntimeError, TypeError, ValueError):  # a backbone that needs actual numbers
            return plan | {"layers": None}
    return plan | {"layers": max(taps, key=lambda tap: tap["peak_bytes"] + tap["kept_bytes"])}


def _rehearsed(job: Job, tap: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The planned bytes of training one tap's layers, with the first arm and with backprop."""
    from torch import nn

    from tpsgd.adapt.backbone import Tap
    from tpsgd.adapt.fitting import epochs_for

    arm, x = next(iter(job.arms.values())), job.data.train[0]
    model, dtype = arm["layers"](shape, len(job.data.classes)), None
    memory = job.memory
    if job.streamed:
        model, shape, dtype = nn.Sequential(Tap(job.backbone, tap), *model), x.shape[1:], x.dtype
        memory = replace(memory, reuse=memory.reuse or False)  # the features are not in memory
    names = ("batch_size", "optimizer", "loss", "precision", "rule", "order")
    chosen = {name: value for name, value in (job.settings | arm).items() if name in names}
    epochs = epochs_for(len(x), chosen["batch_size"], job.settings.get("epochs"))
    plan_of_tap = tpsgd.plan(
        model.to(job.backbone.device), tuple(shape), samples=len(x), dtype=dtype, epochs=epochs,
        memory=memory, **chosen,
    )  # fmt: skip
    line, backprop = plan_of_tap.lines[0], plan_of_tap["backprop"]
    line = line if "rule" in arm else backprop
    sizes = {"peak_bytes": line.peak, "kept_bytes": line.kept, "backprop_bytes": backprop.peak}
    return {"tap": tap, **sizes}


def show(plan: dict[str, Any], rule: str) -> None:
    """Print the planned bytes."""
    console = Console(highlight=False)
    backbone = size(plan["backbone_bytes"])
    if "memory_budget" in plan:
        budget = size(plan["memory_budget"])
        console.print(f"in memory: at most {budget}, including the backbone's {backbone}")
        return
    features = f"features of {plan['samples']:,} samples {size(plan['features_bytes'])}"
    console.print(
        f"in memory: backbone {backbone}, {features if plan['samples'] else 'no features'}"
    )
    peak = "unknown, this backbone cannot be rehearsed"
    if (layers := plan["layers"]) is not None:
        peak = f"{rule} {size(layers['peak_bytes'])}"
        peak += f" + {size(layers['kept_bytes'])}" if layers["kept_bytes"] else ""
        peak += "" if rule == "backprop" else f", backprop {size(layers['backprop_bytes'])}"
    console.print(f"planned peak of training: {peak}")
