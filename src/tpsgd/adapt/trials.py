"""What layers on a tap are worth: a plan and a score before training, held-out accuracy after."""

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import Features, encode, fingerprint
from tpsgd.adapt.fitting import BATCH, epochs_for, fit, probe
from tpsgd.adapt.heads import Layers, Probe, recipe
from tpsgd.adapt.naswot import activation_overlap
from tpsgd.data.split import stratified
from tpsgd.engine.backprop import fit_backprop
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.inputs import labels, tensor
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.errors import TpsgdError
from tpsgd.memory.plan import plan
from tpsgd.memory.rehearse import Backprop, Inputs, rehearse
from tpsgd.rules import Rule
from tpsgd.solvers import ridge

SCORED = 128  # samples, as in the article
UNDECIDING = ("device", "progress", "callbacks", "seed")  # or said apart
OWN = ("combine", "keep", "validation")  # arguments of `adapt.fit` that are not for a search
Tell = Callable[[str, float, float], None]


@dataclass(frozen=True)
class Trial:
    """What one training of one configuration has shown."""

    accuracy: float  # on the held-out samples
    seconds: float
    peak_bytes: int


@dataclass(frozen=True, eq=False)
class Judge:
    """Samples to learn from and others to judge by, and how layers are trained."""

    backbone: Backbone
    train: Features
    held: Features
    classes: tuple[str, ...]
    method: Callable[..., Run] = fit_locally
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    digest: str = ""  # of backbone and samples

    def head(self, tap: str, layers: Layers | Probe) -> nn.Sequential:
        """The layers as training begins with them."""
        with torch.random.fork_rng([]):
            torch.manual_seed(self.seed)
            made = layers(tuple(self.train.x[tap].shape[1:]), len(self.classes))
        return made.to(self.backbone.device)

    def planned(self, tap: str, head: nn.Sequential, layers: Layers | Probe) -> int | None:
        """The peak bytes of training; None where a method of the caller's own trains."""
        shape, samples, known = tuple(self.train.x[tap].shape[1:]), len(self.train), self.options
        if isinstance(layers, Probe):
            known = self._solving() | {"optimizer": ridge(), "epochs": 1}
        elif self.method is fit_backprop:
            how, settings = Backprop(**_taken(known, Backprop)), Settings(**_taken(known, Settings))
            return rehearse(head, Inputs(shape, samples=samples), how, settings).peak
        elif self.method is not fit_locally:
            return None
        found = plan(head, shape, samples=samples, others=False, **_taken(known, plan))
        return found.lines[0].peak

    def score(self, tap: str, head: nn.Sequential) -> float | None:
        """The activation overlap of the layers on a few of the samples."""
        x = self.train.x[tap]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed))
        some = x[order[:SCORED].sort().values.to(x.device)]
        return activation_overlap(head, some.to(self.backbone.device))

    def trial(self, tap: str, layers: Layers | Probe, seed: int, tell: Any = None) -> Trial:
        """Train once and look at the held-out samples."""
        known: dict[str, Any] = dict(taps=tap, classes=self.classes, seed=seed, progress=tell)
        if isinstance(layers, Probe):
            made = probe(self.backbone, self.train, **known, **self._solving())
        else:
            known |= {"layers": layers, "method": self.method, **self.options}
            made = fit(self.backbone, self.train, **known)
        run = made.runs[tap]
        return Trial(made.evaluate(self.held), run.seconds, run.peak_bytes)

    def key(self, tap: str, layers: Layers | Probe, seed: int) -> dict[str, Any]:
        """Everything that decides a trial, as plain values. A lambda has no name of its own."""
        from tpsgd import __version__

        given = inspect.signature(self.method).parameters.items()
        known = {n: p.default for n, p in given if p.default not in (None, p.empty)}
        known |= {"method": self.method, **self.options}
        known = self._solving() if isinstance(layers, Probe) else known
        known = {k: v for k, v in known.items() if v is not None and k not in UNDECIDING}
        return {
            "tap": tap,
            "layers": recipe(layers),
            "classes": len(self.classes),
            **{k: named(known[k]) for k in sorted(known)},
            "seed": seed,
            "split": self.seed,
            "samples": len(self.train),
            "held_out": len(self.held),
            "data": self.digest,
            "version": __version__,
        }

    def _solving(self) -> dict[str, Any]:
        """The options that a probe takes."""
        return {k: v for k, v in self.options.items() if k in ("batch_size", "device")}


def judge(
    backbone: Backbone,
    data: Any,
    taps: Sequence[str],
    *,
    classes: int | Sequence[str] | None,
    method: Callable[..., Run],
    options: dict[str, Any],
    held_out: float,
    seed: int,
    tell: Tell | None = None,
) -> Judge:
    """Features of the data at each tap, a share of the samples held out."""
    if clash := [name for name in OWN if name in options]:
        raise TpsgdError(f"a search has no {clash[0]}: it keeps features and holds out its own")
    told = tell and (lambda done, total: tell("features", done, total))
    given = isinstance(data, Features)
    whole = data if given else encode(backbone, data, taps, progress=told)
    y, digest = whole.y, _digest(backbone, data, whole)
    if classes is None:
        classes = y.shape[1] if y.dim() == 2 else int(y.max()) + 1
    names = tuple(map(str, range(classes) if isinstance(classes, int) else classes))
    mask = _mask(labels(y, None, len(names)), held_out, seed).to(y.device)
    parts: tuple[dict[str, Tensor], ...] = ({}, {})
    for tap in taps:
        full = whole.at(tap)[0] if given else whole.x.pop(tap)  # whose memory is then free
        for part, m in zip(parts, (mask, ~mask), strict=True):
            part[tap] = full[m.to(full.device)].contiguous()  # as a plan takes them to be
    train, held = (Features(parts[i], y[m], whole.shape) for i, m in enumerate((mask, ~mask)))
    size = options.get("batch_size") or BATCH
    epochs = epochs_for(len(train), size, options.get("epochs"))
    known = options | {"batch_size": size, "epochs": epochs}
    return Judge(backbone, train, held, names, method, known, seed, digest)


def named(value: Any) -> Any:
    """A value for a key: plain, and the same in every process."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [named(v) for v in value]
    if isinstance(value, Rule):
        return f"{value.name}: {value.options}, {value.at.value}, {value.loss.name}"
    if isinstance(value, partial):
        given = [*value.args, *value.keywords.items()]
        return f"{named(value.func)}({', '.join(str(named(v)) for v in given)})"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if "<" in str(name):  # made inside a function: one name for many
        return f"{name} {_written(value)}"
    return str(name or getattr(value, "name", value))


def _written(function: Any) -> str:
    """What a function without a name of its own does, and with which values."""
    code = getattr(function, "__code__", None)
    held = [named(cell.cell_contents) for cell in function.__closure__ or ()] if code else []
    plain = [c for c in code.co_consts if isinstance(c, (int, float, str))] if code else []
    what = (code.co_code, code.co_names, plain, held, function.__defaults__) if code else function
    return hashlib.sha256(repr(what).encode()).hexdigest()[:12]


def _mask(y: Tensor, held_out: float, seed: int) -> Tensor:
    """Which samples to learn from, the shares of the classes kept."""
    if not 0 < held_out < 1:
        raise TpsgdError(f"held_out must be a share between 0 and 1, got {held_out!r}")
    known = (y.argmax(1) if y.dim() == 2 else y).cpu().numpy()
    mask = torch.from_numpy(stratified(known, len(y) - max(1, round(held_out * len(y))), seed))
    if not set(known[~mask]) <= set(known[mask]):
        raise TpsgdError(
            f"{len(y):,} samples are too few to hold out {held_out:.0%} of them: give at least two "
            "of each class"
        )
    return mask


def _digest(backbone: Backbone, data: Any, whole: Features) -> str:
    """A name for backbone and samples: of the samples themselves where they are arrays.

    Features given in their place differ a little from machine to machine, and so does their name.
    """
    own = hashlib.sha256(fingerprint(backbone.model).encode())
    raw = not isinstance(data, (Features, Dataset, DataLoader))
    parts = [tensor(data[0], "x")] if raw else list(whole.x.values())
    for x in (*parts, whole.y):
        own.update(f"{x.dtype} {tuple(x.shape)}".encode())
        for part in x.detach().split(256):
            own.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return own.hexdigest()[:16]


def _taken(options: dict[str, Any], by: Callable[..., Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in inspect.signature(by).parameters}
