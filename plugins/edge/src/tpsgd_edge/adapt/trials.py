"""Trials of a search for layers: planned memory, score and held-out accuracy of layers on a tap."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tpsgd.common.errors import TpsgdError
from tpsgd.comparison.trials import Progress, Task, TrialResult, measured, split_rows
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.fit import fit_backprop
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings, listed, name_of
from tpsgd.engine.solvers import ridge
from tpsgd.engine.sources.inputs import labels, tensor
from tpsgd.features.run_identity import MAY_DIFFER, checksum
from tpsgd.losses import cross_entropy
from tpsgd.memory.plan import plan
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.modes import evaluating
from tpsgd_edge.adapt.backbone import Backbone
from tpsgd_edge.adapt.features import Features, class_indices, encode, fingerprint
from tpsgd_edge.adapt.fitting import BATCH, epochs_for, fit, name_classes, probe
from tpsgd_edge.adapt.heads import Layers, Probe, make_heads, recipe
from tpsgd_edge.adapt.quantize import weight_bytes

SCORED = 128  # samples, as in the article
RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
OF_A_PROBE = ("batch_size", "device")  # the settings that a linear probe takes
REFUSED = {
    "validation": "a search has no validation: it holds out samples itself",
    "checkpoint": "a search keeps its finished trials in folder=: leave checkpoint out",
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
class Judge:
    """Samples to train on, held-out samples to judge by, and how layers are trained.

    `settings` are those of `adapt.fit`, the rule included; `identity` is what a search that goes on
    must have in common with this one, as plain values.
    """

    backbone: Backbone
    train: Features
    held_out: Features
    classes: tuple[str, ...]
    method: Callable[..., Run] = fit_locally
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    identity: dict[str, Any] = field(default_factory=dict)

    def candidate(self, tap: str, layers: Layers | Probe) -> Candidate:
        """Layers on a tap with their planned memory and their score, before any training."""
        shape = tuple(self.train.x[tap].shape[1:])
        head = make_heads(layers, {tap: shape}, len(self.classes), self.seed, self.backbone.device)[
            tap
        ]
        planned, score = self.planned(tap, head, layers), self.score(tap, head)
        return Candidate(tap, layers, weight_bytes(head), planned, score)

    def planned(self, tap: str, head: nn.Sequential, layers: Layers | Probe) -> int:
        """The peak bytes of training."""
        shape, samples = tuple(self.train.x[tap].shape[1:]), len(self.train)
        settings = self._settings(layers)
        if isinstance(layers, Probe):
            settings |= {"optimizer": ridge(), "epochs": 1}
        elif self.method is fit_backprop:
            checked = Settings.of("fit_backprop", settings)
            return rehearse(head, Inputs(shape, samples=samples), Backprop(), checked).peak
        return plan(head, shape, samples=samples, others=False, **settings).lines[0].peak

    def score(self, tap: str, head: nn.Sequential) -> float | None:
        """The activation overlap of the layers on a few of the samples."""
        x = self.train.x[tap]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
        some = x[order[:SCORED].sort().values.to(x.device)]
        return activation_overlap(head, some.to(self.backbone.device))

    def trial(self, tap: str, layers: Layers | Probe, seed: int) -> dict[str, Any]:
        """Train once and classify the held-out samples."""
        options = self._settings(layers) | {"taps": tap, "classes": self.classes, "seed": seed}
        if isinstance(layers, Probe):
            adaptor = probe(self.backbone, self.train, **options)
        else:
            options |= {"layers": layers, "method": self.method}
            adaptor = fit(self.backbone, self.train, **options)
        return measured(adaptor.runs[tap], adaptor.evaluate(self.held_out))

    def task(self, row: Candidate, restarts: int) -> Task[Candidate]:
        """How a row is trained; a probe, which is solved, once."""
        layers: Any = row.layers
        label = f"{row.tap} {'probe' if row.control else f'{layers.convs}+{layers.dense}'}"
        seeds = range(self.seed, self.seed + (1 if row.control else restarts))
        key = {"tap": row.tap, "layers": recipe(layers)}
        return Task(row, label, key, seeds, lambda seed, _: self.trial(row.tap, layers, seed))

    def _settings(self, layers: Layers | Probe) -> dict[str, Any]:
        probed = isinstance(layers, Probe)
        return {k: v for k, v in self.settings.items() if not probed or k in OF_A_PROBE}


def judge(
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
) -> Judge:
    """Compute the features of a data set, and hold out a share of every class."""
    if method not in (fit_locally, fit_backprop):
        raise TpsgdError("a search plans memory: its method is tpsgd.fit or tpsgd.fit_backprop")
    if refused := next((name for name in REFUSED if name in settings), None):
        raise TpsgdError(REFUSED[refused])
    settings = settings | {"batch_size": settings.get("batch_size") or BATCH}
    checked = Settings.of("adapt.search", {k: v for k, v in settings.items() if k != "rule"})
    features = data
    if not isinstance(data, Features):
        report = progress and partial(progress, "features")
        features = encode(backbone, data, taps, progress=report)
    names = name_classes(classes, features)
    y = class_indices(labels(features.y, None, len(names)))
    features = replace(features, x={tap: features.at(tap)[0] for tap in taps})
    train, test = (features[rows] for rows in split_rows(y, held_out, seed))
    arrays = not isinstance(data, (Features, Dataset, DataLoader))
    x = tensor(data[0], "x") if arrays else features.x[taps[0]]
    settings["epochs"] = epochs_for(len(train), settings["batch_size"], checked.epochs)
    values = replace(checked, epochs=settings["epochs"], seed=seed).describe(
        "", checked.loss or cross_entropy
    )
    identity = {k: v for k, v in values.items() if v is not None and k not in MAY_DIFFER} | {
        "rule": [str(rule) for rule in listed(settings.get("rule"))],
        "optimizer": [getattr(o, "name", name_of(o)) for o in listed(checked.optimizer)],
        "method": method.__name__,
        "classes": len(names),
        "samples": len(train),
        "held_out": len(test),
        "backbone": fingerprint(backbone.model),
        "training data": checksum(x, features.y),
    }
    return Judge(backbone, train, test, names, method, settings, seed, identity)
