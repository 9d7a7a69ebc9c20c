"""What `tpsgd adapt` will hold, said before it trains."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from tpsgd.cli.terminal import waiting
from tpsgd.units import as_bytes, size

if TYPE_CHECKING:
    from tpsgd.cli.adapt import Wanted


def planned(wanted: "Wanted", more: int) -> dict[str, Any]:
    """The bytes that will be held; of several taps' layers, those of the largest.

    `more` is how many samples' features are kept beside those of the data itself.
    """
    from math import prod

    from tpsgd.adapt.quantize import weight_bytes

    (x, y), (_, y_test) = wanted.data.train, wanted.data.test
    found: dict[str, Any] = {"backbone_bytes": weight_bytes(wanted.backbone.model)}
    if budget := wanted.fitting.get("memory_budget"):
        return found | {"memory_budget": as_bytes(budget)}
    with waiting("planning"):
        shapes = wanted.backbone.shapes(x, wanted.taps)
        found["samples"] = 0 if wanted.streamed else len(y) + len(y_test) + more
        found["features_bytes"] = found["samples"] * 4 * sum(map(prod, shapes.values()))
        try:
            each = [_rehearsed(wanted, tap, shape) for tap, shape in shapes.items()]
        except (RuntimeError, TypeError, ValueError):  # a backbone that cannot run without numbers
            return found | {"layers": None}
    return found | {"layers": max(each, key=lambda one: one["peak_bytes"] + one["kept_bytes"])}


def _rehearsed(wanted: "Wanted", tap: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What training one tap's layers will hold, by the first arm and by backprop."""
    from torch import nn

    from tpsgd.adapt.backbone import Tap
    from tpsgd.adapt.fitting import epochs_for
    from tpsgd.engine.settings import Settings
    from tpsgd.memory.plan import plan
    from tpsgd.memory.rehearse import Backprop, Inputs, rehearse

    arm, x = next(iter(wanted.arms.values())), wanted.data.train[0]
    model, inputs = arm["layers"](shape, len(wanted.data.classes)), Inputs(shape, samples=len(x))
    if wanted.streamed:
        model = nn.Sequential(Tap(wanted.backbone, tap), *model)
        inputs = Inputs(tuple(x.shape[1:]), x.dtype, len(x))
    device, batch = wanted.backbone.device, wanted.fitting["batch_size"]
    model = model.to(device)
    other = rehearse(model, inputs, Backprop(), Settings(batch_size=batch, epochs=1)).peak
    found = {"tap": tap, "peak_bytes": other, "kept_bytes": 0, "backprop_bytes": other}
    if "rule" not in arm:
        return found
    keep = wanted.fitting.get("keep")
    line = plan(
        model, inputs.shape, batch, arm["rule"], schedule=arm["schedule"], samples=len(x),
        epochs=epochs_for(len(x), batch, wanted.fitting["epochs"]), dtype=inputs.dtype, reuse=keep,
        others=False,
    ).lines[0]  # fmt: skip
    return found | {"peak_bytes": line.peak, "kept_bytes": line.kept}


def foretell(planned: dict[str, Any], rule: str) -> None:
    """Say what will be held, before it is."""
    console = Console(highlight=False)
    backbone = size(planned["backbone_bytes"])
    if "memory_budget" in planned:
        budget = size(planned["memory_budget"])
        console.print(f"to be held: at most {budget}, the backbone's {backbone} among them")
        return
    features = f"features of {planned['samples']:,} samples {size(planned['features_bytes'])}"
    shown = features if planned["samples"] else "no features"
    console.print(f"to be held: backbone {backbone}, {shown}")
    if (layers := planned["layers"]) is None:
        console.print("planned peak of training: unknown, this backbone cannot be rehearsed")
        return
    kept = f" + {size(layers['kept_bytes'])}" * bool(layers["kept_bytes"])
    beside = "" if rule == "backprop" else f", backprop {size(layers['backprop_bytes'])}"
    console.print(f"planned peak of training: {rule} {size(layers['peak_bytes'])}{kept}{beside}")
