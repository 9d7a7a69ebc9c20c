"""`tpsgd adapt`: train layers on a frozen backbone."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, RuleWord, option, setting
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.rule_list import DEFAULT
from tpsgd.cli.terminal import Stopped, grid_of, live_bar, until_interrupted, write_then_show
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import write_whole
from tpsgd.common.output import output_folder, write_or_rescue
from tpsgd.common.units import as_bytes, size

if TYPE_CHECKING:
    from tpsgd_adapt import Adaptor, Backbone

IMAGES = "A folder of images, one subfolder per class (FOLDER@160 resizes), imagenette, FILE.npz."
BACKBONES = (
    "vgg11, vgg16, vgg11-bn, vgg16-bn, resnet18, resnet34, or FILE.py:FUNCTION, which returns a "
    "module."
)
RECORD = "record.json"
COMBINE = ("summed", "averaged", "learned")


@dataclass(frozen=True)
class Images(options.Unscaled):
    """Images to train and to test on."""

    data: str = setting(MISSING, IMAGES)


@dataclass(frozen=True)
class BackboneAtTaps:
    """The frozen net, and where its features are read."""

    TITLE = "Backbone"

    backbone: str = setting("vgg16", BACKBONES)
    weights: Path | None = setting(None, "FILE.pth, .safetensors or .npz with torchvision's names.")  # noqa: RUF009
    taps: str | None = setting(None, "pool5, or several: pool4,pool5.", "--tap", "--taps")
    quantize: str | None = setting(
        None, "Make the backbone smaller: bf16 or int8.", choices=("bf16", "int8")
    )

    def load(self, machine: options.Machine) -> "tuple[Backbone, tuple[str, ...]]":
        """The backbone on its device, and the taps; by default the last one."""
        from tpsgd import adapt

        taps = tuple(options.listed(self.taps))
        if len(set(taps)) < len(taps):
            raise TpsgdError(f"--tap {self.taps}: name each tap once")
        device = machine.settings()["device"] or "cpu"
        net = adapt.backbone(self.backbone, self.weights, taps)
        if self.quantize is not None:
            light = getattr(adapt.quantize, self.quantize)(net.model)
            net = net.like(light, f"{net.name} in {self.quantize}")
        return net.to(device), taps or tuple(net.taps)[-1:]


@dataclass(frozen=True)
class AdaptorLayers:
    """The layers on each tap."""

    TITLE = "Adaptor"

    convs: int = setting(1, "Number of convolutions.", min=0)
    dense: int = setting(1, "Number of hidden dense layers.", min=0)
    combine: str = setting(
        "averaged", f"Outputs of several taps: {', '.join(COMBINE)}.", choices=COMBINE
    )


@dataclass(frozen=True)
class LayerTraining:
    """How to train layers on features."""

    TITLE = "Training"

    epochs: int | None = setting(
        None, "Epochs per block.", show_default="8, more for few samples", min=1
    )
    batch_size: int | None = setting(None, "Samples per step.", show_default="32", min=1)
    lr: float | None = setting(None, "Learning rate.", show_default="0.001")
    seed: int = setting(0, "Seed of weights, class codes and sample order.", min=0, max=2**63 - 1)

    def settings(self, batch_size: int | None = 32) -> dict[str, Any]:
        """The settings of `fit` that were chosen, and a batch size by default."""
        size: Any = self.batch_size or batch_size
        return options.Training(self.epochs, size, self.lr, self.seed).settings()


@dataclass(frozen=True)
class Job:
    """What is to be trained; with a memory budget, the backbone runs again in every epoch."""

    backbone: "Backbone"
    taps: tuple[str, ...]
    data: "tpsgd.data.Data"
    settings: dict[str, Any]  # of `adapt.fit`, for all arms
    arms: dict[str, dict[str, Any]]  # more settings for each arm; the first is the chosen rule
    budget: str | None


@options.grouped
def adapt(
    data: Images,
    backbone: BackboneAtTaps,
    adaptor: AdaptorLayers,
    training: LayerTraining,
    machine: options.Machine,
    resuming: Resuming,
    rule: RuleWord = DEFAULT,
    memory: Annotated[
        str | None, option("64MB, 1.5GB: the most to use, with the backbone, beyond the data set.")
    ] = None,
    no_controls: Annotated[
        bool, option("Leave backprop and a frozen adaptor out.", "--no-controls")
    ] = False,
    out: Annotated[Path, option("Folder for the adaptor and the record.")] = Path("tpsgd-adaptor"),
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train an adaptor on a frozen backbone, with backprop, a frozen one and a linear probe."""
    arms = _arms(rule, adaptor, controls=not no_controls and not memory)
    read = (data.data, backbone.backbone, backbone.weights)
    options.keep_apart(*read, out=out, checkpoint=resuming.checkpoint)
    checkpoints = resuming.settings()
    if find_spec("safetensors") is None:  # before training, not after it
        raise TpsgdError("to save and load adaptors, run: pip install safetensors")
    if memory and rule == "backprop":
        raise TpsgdError("backprop takes no --memory: leave it out")
    settings = training.settings() | {"combine": tpsgd.adapt.COMBINATIONS[adaptor.combine]}
    settings |= {"memory": memory} if memory else {}
    again = overwrite or resuming.goes_on
    with resuming.interruptible(), output_folder(out, ("adaptor.json", RECORD), again) as folder:
        net, taps = backbone.load(machine)
        job = Job(net, taps, data.load(training.seed), settings, arms, memory)
        planned = _planned(job)
        if not as_json:
            _show_plan(planned, rule)
        results, trained = _fit(job, folder, checkpoints)
        record = {"planned": planned, **results, "backbone": net.name, "taps": list(taps)}
        record |= {"backbone_bytes": planned["backbone_bytes"], "quantize": backbone.quantize}
        record |= {"out": str(folder), **options.provenance_of(job.data, machine.device)}

        def write(folder: Path) -> Path:
            trained.save(folder)
            return write_whole(folder / RECORD, json.dumps(record, indent=1).encode()).parent

        write_then_show(
            partial(write_or_rescue, write, folder), partial(_show, record, job, as_json)
        )
        if record["interrupted"]:
            done = f"{len(record['arms'])} of {len(arms)} training runs are done"
            raise Stopped(f"interrupted; {done}; {rule}'s adaptor and {RECORD} are in {folder}")


def settings_of_rule(word: str) -> dict[str, Any]:
    """The settings of `adapt.fit` that train by a rule or by backprop; other words are refused."""
    from tpsgd.comparison.arms import entry

    rule = entry(word).make()
    if word == "backprop":
        return {"method": tpsgd.fit_backprop}
    if not isinstance(rule, tpsgd.rules.Rule) or not rule.head:
        raise TpsgdError(f"an adaptor is trained by a rule or by backprop, not by {word}")
    return {"rule": rule}


def _arms(rule: str, adaptor: AdaptorLayers, controls: bool) -> dict[str, dict[str, Any]]:
    """The settings of the rule, of the controls, and of a linear probe."""
    layers = tpsgd.adapt.Layers(adaptor.convs, adaptor.dense)
    words = dict.fromkeys([rule, *(("backprop", "frozen") if controls else ())])
    arms = {word: {"layers": layers, **settings_of_rule(word)} for word in words}
    solved = {"layers": tpsgd.adapt.Probe(), "optimizer": tpsgd.ridge(), "lr": None}
    return arms | {"linear probe": solved}


def _planned(job: Job) -> dict[str, Any]:
    """The planned bytes; those of the layers are the largest of all taps."""
    (x, y), (_, y_test) = job.data.train, job.data.test
    plan: dict[str, Any] = {"backbone_bytes": tpsgd.adapt.quantize.weight_bytes(job.backbone.model)}
    if job.budget is not None:
        return plan | {"memory_budget": as_bytes(job.budget)}
    shapes = job.backbone.shapes(x, job.taps)
    plan["samples"] = len(y) + len(y_test)
    plan["features_bytes"] = plan["samples"] * 4 * sum(map(prod, shapes.values()))
    taps = [_rehearsed(job, tap, shape) for tap, shape in shapes.items()]
    return plan | {"layers": max(taps, key=lambda tap: tap["peak_bytes"] + tap["kept_bytes"])}


def _rehearsed(job: Job, tap: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The planned bytes of training one tap's layers, with the first arm and with backprop."""
    from tpsgd_adapt.fitting import epochs_for

    arm, samples = next(iter(job.arms.values())), len(job.data.train[1])
    model = arm["layers"](shape, len(job.data.classes)).to(job.backbone.device)
    batch_size = job.settings["batch_size"]
    epochs = epochs_for(samples, batch_size, job.settings.get("epochs"))
    chosen = {"rule": arm["rule"]} if "rule" in arm else {}
    plan = tpsgd.plan(model, shape, samples=samples, epochs=epochs, batch_size=batch_size, **chosen)
    backprop = plan["backprop"]
    line = plan.lines[0] if chosen else backprop
    sizes = {"peak_bytes": line.peak, "kept_bytes": line.kept, "backprop_bytes": backprop.peak}
    return {"tap": tap, **sizes}


def _show_plan(plan: dict[str, Any], rule: str) -> None:
    backbone = size(plan["backbone_bytes"])
    if "memory_budget" in plan:
        budget = size(plan["memory_budget"])
        print(f"in memory: at most {budget}, including the backbone's {backbone}")
        return
    features = f"features of {plan['samples']:,} samples {size(plan['features_bytes'])}"
    layers = plan["layers"]
    peak = f"{rule} {size(layers['peak_bytes'])}"
    peak += f" + {size(layers['kept_bytes'])}" if layers["kept_bytes"] else ""
    peak += "" if rule == "backprop" else f", backprop {size(layers['backprop_bytes'])}"
    print(f"in memory: backbone {backbone}, {features}\nplanned peak of training: {peak}")


def _fit(job: Job, folder: Path, checkpoints: dict[str, Any]) -> "tuple[dict[str, Any], Adaptor]":
    """Train all arms, with checkpoints if asked for: the record, and the adaptor of the first."""
    from tpsgd import adapt

    train: Any = job.data.train
    test: Any = job.data.test
    adaptors: list[Adaptor] = []

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal train, test
        with live_bar() as advance:
            if job.budget is None:
                encode = partial(adapt.encode, job.backbone, taps=job.taps)
                train = encode(train, progress=partial(advance, "features"))
                test = encode(test, progress=partial(advance, "test features"))
            for name, settings in job.arms.items():

                def progress(tap: str, done: int, total: int, name: str = name) -> None:
                    advance(f"{name}, {tap}", done, total)

                adaptor = adapt.fit(
                    job.backbone, train, taps=job.taps, classes=job.data.classes,
                    progress=progress, **(job.settings | settings),
                    **{key: value.within(name) for key, value in checkpoints.items()},
                )  # fmt: skip
                if not adaptors:
                    adaptors.append(adaptor)
                    with suppress(OSError, TpsgdError):  # a full disk: the end tries again
                        adaptor.save(folder)
                runs = list(adaptor.runs.values())
                row = {
                    "arm": name,
                    "accuracy": None,
                    "trained_bytes": adaptor.nbytes,
                    "peak_bytes": max(run.peak_bytes for run in runs),
                    "kept_bytes": max(run.kept_bytes for run in runs),
                    "seconds": sum(run.seconds for run in runs),
                    "settings": runs[0].settings,
                }
                yield row  # in the record even if the test is interrupted
                row["accuracy"] = adaptor.evaluate(test)

    arms, interrupted = until_interrupted(rows())
    features = 0 if job.budget else train.nbytes + test.nbytes
    record = {"arms": arms, "features_bytes": features, "adaptor": str(folder)}
    return record | {"interrupted": interrupted}, adaptors[0]


def _show(record: dict[str, Any], job: Job, as_json: bool, folder: Path | None) -> None:
    """Print the tables, and where the files are if they could be written."""
    if as_json:
        print(json.dumps(record), flush=True)
        return
    console = Console(highlight=False)
    heading = f"{record['backbone']} ({size(record['backbone_bytes'])}, frozen)"
    heading += f" at {' and '.join(job.taps)}: {job.data.name}"
    console.print(heading, style="bold", markup=False)
    grid = grid_of("arm", "test accuracy", "trained", "peak", "seconds", numbers=True)
    for row in record["arms"]:
        inputs = f" + {size(row['kept_bytes'])}" if row["kept_bytes"] else ""
        accuracy = "-" if row["accuracy"] is None else f"{row['accuracy']:.2%}"
        sizes = (size(row["trained_bytes"]), size(row["peak_bytes"]) + inputs)
        grid.add_row(row["arm"], accuracy, *sizes, f"{row['seconds']:.1f}")
    console.print(grid)
    features = size(record["features_bytes"])
    which = "including the backbone" if job.budget else f"without the features ({features})"
    console.print(f"peak: training the layers, + kept inputs; {which}")
    if job.budget:
        console.print("within a memory budget, backprop and a frozen adaptor are not trained")
    if folder is not None:
        saved = f"{record['arms'][0]['arm']}'s adaptor and record.json"
        console.print(f"{saved}: {folder}", markup=False)
