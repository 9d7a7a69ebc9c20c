"""Trials of a search: planned memory, score and held-out accuracy of layers on a tap."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tpsgd import __version__
from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import Features, class_indices, digest, encode, fingerprint
from tpsgd.adapt.fitting import BATCH, epochs_for, fit, make_heads, name_classes, probe
from tpsgd.adapt.heads import Layers, Probe, recipe
from tpsgd.common.errors import TpsgdError
from tpsgd.data.split import hold_out
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.fit import fit_backprop
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.engine.solvers import ridge
from tpsgd.engine.sources.inputs import labels, tensor
from tpsgd.memory.plan import plan
from tpsgd.memory.rehearse import Inputs, rehearse
from tpsgd.nets.modes import evaluating
from tpsgd.rules import Rule

SCORED = 128  # samples, as in the article
RECTIFIERS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
NOT_IN_KEY = ("device", "progress", "callbacks", "seed")  # the seed has its own entry
OF_A_PROBE = ("batch_size", "device")
Progress = Callable[[str, float, float], None]


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


@dataclass(frozen=True)
class Candidate:
    """Layers on a tap, their cost and their results.

    Attributes:
        planned_bytes: the peak of training, without features and kept inputs.
        score: see `activation_overlap`; None without a rectifier.
        accuracies: on the held-out samples, one per restart; empty if it was not trained.
        peak_bytes: as measured.
        skipped: why it was not trained.
    """

    tap: str
    layers: Layers | Probe
    trainable_bytes: int
    planned_bytes: int
    score: float | None
    accuracies: tuple[float, ...] = ()
    seconds: float | None = None
    peak_bytes: int | None = None
    skipped: str = ""
    error: str = ""

    @property
    def control(self) -> bool:
        """Whether it is a linear probe."""
        return isinstance(self.layers, Probe)

    @property
    def accuracy(self) -> float | None:
        """The mean over restarts."""
        return fmean(self.accuracies) if self.accuracies else None

    @property
    def std(self) -> float:
        """The standard deviation over restarts."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0

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

    `settings` are those of `adapt.fit`, the rule included.
    """

    backbone: Backbone
    train: Features
    held_out: Features
    classes: tuple[str, ...]
    method: Callable[..., Run] = fit_locally
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    digest: str = ""  # of backbone and samples

    def head(self, tap: str, layers: Layers | Probe) -> nn.Sequential:
        """The layers with their initial weights."""
        shape, device = tuple(self.train.x[tap].shape[1:]), self.backbone.device
        return make_heads(layers, {tap: shape}, len(self.classes), self.seed, device)[tap]

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
        """Train once and classify the held-out samples: accuracy, seconds and peak_bytes."""
        options = self._settings(layers) | {"taps": tap, "classes": self.classes, "seed": seed}
        if isinstance(layers, Probe):
            adaptor = probe(self.backbone, self.train, **options)
        else:
            options |= {"layers": layers, "method": self.method}
            adaptor = fit(self.backbone, self.train, **options)
        run = adaptor.runs[tap]
        accuracy = adaptor.evaluate(self.held_out)
        return {"accuracy": accuracy, "seconds": run.seconds, "peak_bytes": run.peak_bytes}

    def key(self, tap: str, layers: Layers | Probe, seed: int) -> dict[str, Any]:
        """Everything that decides a trial, as plain values.

        Functions of the user go by their names: after a change inside one, use another folder.
        """
        settings = self._settings(layers)
        if not isinstance(layers, Probe):
            settings["method"] = self.method
        names = [k for k, v in settings.items() if v is not None and k not in NOT_IN_KEY]
        return {
            "tap": tap,
            "layers": recipe(layers),
            "classes": len(self.classes),
            **{k: named(settings[k]) for k in sorted(names)},
            "seed": seed,
            "split": self.seed,
            "samples": len(self.train),
            "held_out": len(self.held_out),
            "data": self.digest,
            "version": __version__,
        }

    def _settings(self, layers: Layers | Probe) -> dict[str, Any]:
        """The settings for these layers; a probe takes few of them."""
        few = isinstance(layers, Probe)
        return {k: v for k, v in self.settings.items() if not few or k in OF_A_PROBE}


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
    if "validation" in settings:
        raise TpsgdError("a search has no validation: it holds out samples itself")
    if "checkpoint" in settings:
        raise TpsgdError("a search keeps its finished trials in folder=: leave checkpoint out")
    if not 0 < held_out < 1:
        raise TpsgdError(f"held_out must be a share between 0 and 1, got {held_out!r}")
    settings = settings | {"batch_size": settings.get("batch_size") or BATCH}
    Settings.of("adapt.search", {k: v for k, v in settings.items() if k != "rule"})
    whole = data
    if not isinstance(data, Features):
        report = progress and partial(progress, "features")
        whole = encode(backbone, data, taps, progress=report)
    names, origin = name_classes(classes, whole), _digest(backbone, data, whole)
    y = class_indices(labels(whole.y, None, len(names))).cpu().numpy()
    mask = torch.from_numpy(hold_out(y, held_out, seed)).to(whole.y.device)
    features = replace(whole, x={tap: whole.at(tap)[0] for tap in taps})
    train, test = features[mask], features[~mask]
    settings["epochs"] = epochs_for(len(train), settings["batch_size"], settings.get("epochs"))
    return Judge(backbone, train, test, names, method, settings, seed, origin)


def _digest(backbone: Backbone, data: Any, features: Features) -> str:
    """A hash of the backbone and the samples, or of the features if there are no arrays.

    Features differ a little from machine to machine, and so does their hash.
    """
    arrays = not isinstance(data, (Features, Dataset, DataLoader))
    x = {"x": tensor(data[0], "x")} if arrays else features.x
    return f"{fingerprint(backbone.model)[:16]} {digest({**x, 'y': features.y})[:16]}"


def named(value: Any) -> Any:
    """A value as plain JSON: a rule by its options, a function by its qualified name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [named(v) for v in value]
    if isinstance(value, Rule):
        return str(value)
    if isinstance(value, partial):
        arguments = [*value.args, *value.keywords.items()]
        return f"{named(value.func)}({', '.join(str(named(v)) for v in arguments)})"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return str(name or getattr(value, "name", value))
