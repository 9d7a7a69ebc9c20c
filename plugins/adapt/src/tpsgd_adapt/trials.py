"""Trials of a search for layers: planned memory, score and held-out accuracy of layers on a tap."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tpsgd.common.errors import TpsgdError
from tpsgd.comparison.trials import Progress, Task, TrialResult, split_rows, task_of_arm
from tpsgd.engine.arm import Arm
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.fit import fit_backprop
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.record import Run
from tpsgd.engine.restarts import make_model
from tpsgd.engine.settings import Settings
from tpsgd.engine.solvers import ridge
from tpsgd.engine.sources.inputs import labels, tensor
from tpsgd.features.run_identity import MAY_DIFFER, checksum
from tpsgd.losses import cross_entropy
from tpsgd.memory.plan import plan
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.modes import evaluating
from tpsgd.rules import default, resolve
from tpsgd_adapt.backbone import Backbone
from tpsgd_adapt.features import Features, class_indices, encode, fingerprint
from tpsgd_adapt.fitting import BATCH, check_origin, epochs_for, name_classes
from tpsgd_adapt.heads import Layers, Probe, recipe
from tpsgd_adapt.quantize import weight_bytes

SCORED = 128  # samples, as in the article
RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
OF_A_PROBE = ("batch_size", "device")  # the settings that a linear probe takes
REFUSED = {
    "validation": "a search has no validation: it holds out samples itself",
    "checkpoint": "a search keeps its finished trials in folder=: leave checkpoint out",
    "augment": "augment changes the images: their features cannot be kept",
}


@torch.no_grad()
def activation_overlap(model: nn.Module, x: Tensor) -> float | None:
    """How well an untrained model tells samples apart: log |det K|, higher is better.

    K_ij is the number of rectifier units (ReLU, LeakyReLU, PReLU; active where their input is above
    0) that are active for both samples i and j, or inactive for both. -inf where K is singular: two
    samples with the same code, or fewer units than samples. None without a rectifier. See Mellor,
    Turner, Storkey & Crowley, "Neural Architecture Search without Training" (2021).

    Examples:
        >>> two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])  # K = [[2, 1], [1, 2]]
        >>> round(math.exp(activation_overlap(nn.Sequential(nn.ReLU()), two)))
        3
    """
    rectifiers = [m for m in model.modules() if isinstance(m, RECTIFIERS)]
    if not rectifiers:
        return None
    K = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)

    def count(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        signs = (args[0].flatten(1) > 0).float().mul_(2).sub_(1)  # 1 is active, -1 is not
        K.add_((signs.shape[1] + signs @ signs.T).double(), alpha=0.5)

    hooks = [m.register_forward_pre_hook(count) for m in rectifiers]
    try:
        with evaluating(model):
            model(x.clone())  # a module may write into its input
    finally:
        for hook in hooks:
            hook.remove()
    if int(torch.linalg.matrix_rank(K, hermitian=True)) < len(K):
        return -math.inf
    return float(torch.linalg.slogdet(K).logabsdet)


@dataclass
class Candidate(TrialResult):
    """Layers on a tap, their cost and their results.

    Attributes:
        planned_bytes: the peak of training, without features and kept inputs.
        score: see `activation_overlap`; None without a rectifier.
        skipped: why it was not trained, or "failed".
    """

    tap: str
    layers: Layers | Probe
    trainable_bytes: int
    planned_bytes: int
    score: float | None
    skipped: str = ""

    @property
    def control(self) -> bool:
        """Whether it is a linear probe."""
        return isinstance(self.layers, Probe)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        score = None if self.score == -math.inf else self.score  # JSON has no infinity
        plain = {"layers": recipe(self.layers), "score": score}
        return asdict(self) | plain | {"accuracy": self.accuracy, "std": self.std}

    def __str__(self) -> str:
        if isinstance(self.layers, Probe):
            return f"{self.tap}, linear probe"
        return f"{self.tap}, {self.layers.convs} convolutional and {self.layers.dense} dense layers"


@dataclass(frozen=True, eq=False)
class LayerTrials:
    """Samples to train on, held-out samples, and how layers are trained on their features.

    `arm` has the rule, `settings` are the other settings of `fit`; `identity` is what a search that
    goes on must have in common with this one, as plain values.
    """

    train: Features
    held_out: Features
    classes: tuple[str, ...]
    device: torch.device
    arm: Arm
    settings: dict[str, Any]
    seed: int
    identity: dict[str, Any]

    def arm_of(self, tap: str, layers: Layers | Probe) -> tuple[Arm, dict[str, Any]]:
        """The arm that trains layers on a tap, and its settings; a probe is solved and has few."""
        if not isinstance(layers, Probe):
            return replace(self.arm, name=tap), self.settings
        settings = {k: v for k, v in self.settings.items() if k in OF_A_PROBE}
        return Arm(tap, default(), optimizer=ridge()), settings | {"epochs": 1}

    def make(self, tap: str, layers: Layers | Probe) -> nn.Sequential:
        """The layers for a tap, with torch's initial weights."""
        return layers(tuple(self.train.x[tap].shape[1:]), len(self.classes)).to(self.device)

    def candidate(self, tap: str, layers: Layers | Probe) -> Candidate:
        """Layers on a tap with their planned memory and their score, before any training."""
        arm, settings = self.arm_of(tap, layers)
        head, x = make_model(partial(self.make, tap, layers), self.seed), self.train.x[tap]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
        some = x[order[:SCORED].sort().values.to(x.device)]
        score = activation_overlap(head, some.to(self.device))
        planned = planned_peak(arm, head, x, settings)
        return Candidate(tap, layers, weight_bytes(head), planned, score)

    def task(self, row: Candidate, restarts: int) -> Task[Candidate]:
        """How a row is trained; a probe once."""
        tap, layers = row.tap, row.layers
        arm, settings = self.arm_of(tap, layers)
        held_out = self.held_out.x[tap], class_indices(self.held_out.y)
        runs = 1 if row.control else restarts
        task = task_of_arm(
            arm, recipe(layers) or {}, (self.train.at(tap), held_out),
            partial(self.make, tap, layers), runs, settings | {"seed": self.seed},
        )  # fmt: skip
        counts = "probe" if isinstance(layers, Probe) else f"{layers.convs}+{layers.dense}"
        return Task(row, f"{tap} {counts}", task.key, task.seeds, task.train)


def planned_peak(arm: Arm, head: nn.Module, x: Tensor, settings: dict[str, Any]) -> int:
    """The peak bytes of training a model on these samples by an arm."""
    shape, samples = tuple(x.shape[1:]), len(x)
    own = {"order": arm.order, "optimizer": arm.optimizer, "lr": arm.lr}
    settings = settings | {name: value for name, value in own.items() if value is not None}
    if arm.backprop:
        checked = Settings.of("fit_backprop", settings)
        return rehearse(head, Inputs(shape, samples=samples), Backprop(), checked).peak
    return plan(head, shape, rule=arm.rule, samples=samples, others=False, **settings).lines[0].peak


def layer_trials(
    backbone: Backbone,
    data: Any,
    taps: Sequence[str],
    *,
    classes: int | Sequence[str] | None,
    method: Callable[..., Run],
    settings: dict[str, Any],
    held_out: float,
    seed: int,
    progress: Progress | None = None,
) -> LayerTrials:
    """Compute the features of a data set, and hold out a share of every class."""
    if method not in (fit_locally, fit_backprop):
        raise TpsgdError("a search plans memory: its method is tpsgd.fit or tpsgd.fit_backprop")
    if refused := next((name for name in REFUSED if name in settings), None):
        raise TpsgdError(REFUSED[refused])
    settings = settings | {"batch_size": settings.get("batch_size") or BATCH}
    rule = resolve(settings.pop("rule", None))
    checked = Settings.of("adapt.search", settings)
    own = {name: settings.pop(name, None) for name in ("order", "optimizer", "lr")}
    arm = Arm("layers", None if method is fit_backprop else rule, **own)  # type: ignore[arg-type]
    features = data
    if not isinstance(data, Features):
        report = progress and partial(progress, "features")
        features = encode(backbone, data, taps, progress=report)
    check_origin(backbone, features)
    names = name_classes(classes, features)
    y = class_indices(labels(features.y, None, len(names)))
    features = replace(features, x={tap: features.at(tap)[0] for tap in taps})
    train, test = (features[rows] for rows in split_rows(y, held_out, seed))
    arrays = not isinstance(data, (Features, Dataset, DataLoader))
    x = tensor(data[0], "x") if arrays else features.x[taps[0]]
    settings["epochs"] = epochs_for(len(train), settings["batch_size"], checked.epochs)
    checked = replace(checked, epochs=settings["epochs"], seed=seed)
    values = checked.describe("", checked.loss or cross_entropy)
    values |= {name: value for name, value in arm.describe().items() if value}
    identity = {k: v for k, v in values.items() if v is not None and k not in MAY_DIFFER} | {
        "method": method.__name__,
        "classes": len(names),
        "samples": len(train),
        "held_out": len(test),
        "backbone": fingerprint(backbone.model),
        "training data": checksum(x, features.y),
    }
    return LayerTrials(train, test, names, backbone.device, arm, settings, seed, identity)
