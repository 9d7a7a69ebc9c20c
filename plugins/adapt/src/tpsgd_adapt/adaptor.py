"""A frozen backbone with trained layers on its taps: one classifier, to use, save and load.

The saved files describe the backbone by a hash of its weights and by the output of its taps for one
sample of reproducible noise. Other weights are accepted, with a warning, only if the output is
nearly the same (for example of the same backbone in int8).
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import not_a_number
from tpsgd.engine.record import Run
from tpsgd.engine.sources.inputs import inputs, labels
from tpsgd.maths.random import Key
from tpsgd.nets.modes import evaluating
from tpsgd.projections import uniform
from tpsgd.saved import folder as folders
from tpsgd.saved.folder import FolderFormat
from tpsgd_adapt.backbone import Backbone
from tpsgd_adapt.features import (
    Features,
    batches,
    check_samples,
    class_indices,
    count,
    default_batch,
    fingerprint,
    pooled,
)
from tpsgd_adapt.heads import Build, Shapes, from_recipe, recipe
from tpsgd_adapt.quantize import weight_bytes
from tpsgd_adapt.weights import put

CHUNK = 512  # stored features that are evaluated together
SAVED = ("layers", "weights")  # the tensors of an adaptor that `save` writes
ADAPTOR = FolderFormat("adaptor", 2)
ALIKE = 0.1  # relative difference of features up to which a backbone counts as the same one


@dataclass(frozen=True)
class Combination:
    """How the outputs of several taps' layers become one: by a weighted sum."""

    name: str

    def initial(self, taps: int) -> Tensor:
        """The weights before anything is learned."""
        return torch.full((taps,), 1.0 if self.name == "summed" else 1.0 / taps)


summed, averaged, learned = map(Combination, ("summed", "averaged", "learned"))
COMBINATIONS = {c.name: c for c in (summed, averaged, learned)}


class Adaptor(nn.Module):
    """Layers on the taps of a frozen backbone, which together give one number per class.

    `adaptor(x)` takes what the backbone takes (images as bytes, or as numbers from 0 to 1). `save`
    writes the layers without the backbone.

    Attributes:
        heads: the layers of each tap.
        weights: the weight of each tap in the sum.
        classes: their names.
        runs: the record of each tap's training.
    """

    def __init__(
        self,
        backbone: Backbone,
        build: Build,
        tap_shapes: Shapes,
        classes: Sequence[str],
        shape: tuple[int, ...],
        combine: Combination = averaged,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            heads = {tap: build(shape, len(classes)) for tap, shape in tap_shapes.items()}
        for head in heads.values():
            if not isinstance(head, nn.Sequential):
                raise TpsgdError(f"layers must make an nn.Sequential, made {type(head).__name__}")
        self.backbone, self.taps, self.classes = backbone, tuple(heads), tuple(map(str, classes))
        self.layers = nn.ModuleList(heads.values())  # a list, because a tap's name may have dots
        self.build, self.shape, self.tap_shapes = build, shape, tap_shapes
        self.combine, self.seed = combine, seed
        self.register_buffer("weights", combine.initial(len(heads)))
        self.weights: Tensor
        self.runs: dict[str, Run] = {}
        self.to(backbone.device)

    @property
    def heads(self) -> dict[str, nn.Module]:
        """The layers of each tap."""
        return dict(zip(self.taps, self.layers, strict=True))

    @property
    def nbytes(self) -> int:
        """The bytes of the layers' weights, without the backbone's."""
        return weight_bytes(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """One number per class for each sample."""
        return self.from_features(self.backbone(x, self.taps))

    def from_features(self, features: dict[str, Tensor]) -> Tensor:
        """One number per class, from the features of a batch at each tap."""
        weighted = [w * y for w, y in zip(self.weights, self.outputs(features), strict=True)]
        return torch.stack(weighted).sum(0)

    def outputs(self, features: dict[str, Tensor]) -> list[Tensor]:
        """The output of each tap's layers."""
        return [
            head(features[tap].to(next(head.parameters()).dtype))
            for tap, head in self.heads.items()
        ]

    def stream_reader(self) -> Any:
        """How its layers read the samples of a `tpsgd.Stream`."""
        from tpsgd_adapt.stream_reader import AdaptorReader

        return AdaptorReader(self)

    @torch.no_grad()
    def predict(self, x: Any, *, batch_size: int | None = None) -> Tensor:
        """The class of each sample, as an index into `classes`."""
        x = inputs(x)
        if not len(x):
            raise TpsgdError("the data is empty: there are no samples")
        with evaluating(self):
            pieces = x.split(batch_size or default_batch(self.backbone))
            return torch.cat([self(self._checked(piece)).argmax(1) for piece in pieces])

    @torch.no_grad()
    def evaluate(self, data: Any, *, batch_size: int | None = None) -> float:
        """The share of samples that are classified correctly; `data` may be `Features`."""
        hits = []
        with evaluating(self):
            for features, y in self.features_of(data, batch_size):
                out = self.from_features(features)
                if out.isnan().any():
                    raise not_a_number(self)
                hits.append(out.argmax(1) == class_indices(y))
        return float(torch.cat(hits).double().mean())

    def features_of(
        self, data: Any, batch_size: int | None = None
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Each batch's features by tap, and its labels, on the adaptor's device."""
        device, classes = self.weights.device, len(self.classes)
        if isinstance(data, Features):
            for start in range(0, count(data), CHUNK):
                piece = data[start : start + CHUNK]
                x = {tap: piece.at(tap)[0].to(device) for tap in self.taps}
                yield x, labels(piece.y, None, classes).to(device)
            return
        for x, y in batches(data, batch_size or default_batch(self.backbone)):
            features = self.backbone(self._checked(x), self.taps)
            yield features, labels(y, None, classes).to(device)

    def _checked(self, x: Tensor) -> Tensor:
        """The samples, if they are like those of the training."""
        check_samples(self.backbone, x)
        if (shape := tuple(x.shape[1:])) != self.shape:
            trained = f"the adaptor was trained on samples of shape {self.shape}"
            raise TpsgdError(f"{trained}, these have {shape}")
        return x

    def save(self, folder: str | Path) -> Path:
        """Write the layers, and their description into `adaptor.json`, each file completely."""
        backbone, taps = self.backbone, self.backbone.taps
        description = {
            "backbone": backbone.name,
            "backbone_sha256": fingerprint(backbone.model),
            "preprocessing": {"mean": backbone.mean, "std": backbone.std},
            "taps": {t: {"module": taps[t], "shape": self.tap_shapes[t]} for t in self.taps},
            "shape": self.shape,
            "classes": self.classes,
            "layers": recipe(self.build),
            "combine": self.combine.name,
            "seed": self.seed,
            "training": {tap: run.settings for tap, run in self.runs.items()},
        }
        tensors = {k: v for k, v in self.state_dict().items() if k.split(".")[0] in SAVED}
        tensors |= _reference_outputs(backbone, description)
        return folders.write(ADAPTOR, Path(folder), description, tensors)


def load(folder: str | Path, backbone: Backbone, layers: Build | None = None) -> Adaptor:
    """Load a saved adaptor onto the backbone that it belongs to.

    Args:
        folder: what `Adaptor.save` wrote.
        backbone: must have the same taps, with the same outputs.
        layers: the function that made the layers, if it was not `Layers` or `Probe`.
    """
    description, tensors = folders.read(ADAPTOR, Path(folder))
    try:
        _check_backbone(folder, backbone, description, tensors)
        shapes = {tap: tuple(entry["shape"]) for tap, entry in description["taps"].items()}
        shape, classes = tuple(description["shape"]), list(description["classes"])
        build = layers if description["layers"] is None else from_recipe(description["layers"])
        combine, seed = COMBINATIONS[description["combine"]], description["seed"]
    except (KeyError, TypeError, AttributeError) as error:
        reason = "there is no" if isinstance(error, KeyError) else "a value makes no sense:"
        raise TpsgdError(f"the adaptor in {folder} is not whole: {reason} {error}") from error
    if build is None:
        raise TpsgdError(f"{folder} has layers that a function made: pass that function as layers=")
    adaptor = Adaptor(backbone, build, shapes, classes, shape, combine, seed)
    put(adaptor, tensors, needed=SAVED)
    return adaptor.eval()


def _check_backbone(
    folder: Any, backbone: Backbone, description: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Refuse a backbone whose taps give other features than the adaptor was trained on."""
    adaptor = f"the adaptor in {folder}"
    modules = {tap: entry["module"] for tap, entry in description["taps"].items()}
    if not modules.items() <= backbone.taps.items():
        taps = f"this backbone has the taps {backbone.taps}"
        raise TpsgdError(f"{adaptor} reads the taps {modules}, {taps}")
    trained = {k: tuple(v) for k, v in description["preprocessing"].items()}
    if trained != (scale := {"mean": backbone.mean, "std": backbone.std}):
        images = f"images scaled by {trained}, the backbone scales them by {scale}"
        raise TpsgdError(f"{adaptor} was trained on {images}")
    expected = {tap: tuple(entry["shape"]) for tap, entry in description["taps"].items()}
    shapes = backbone.shapes(torch.zeros(1, *description["shape"]), list(expected))
    if shapes != expected:
        taps = f"taps of shape {expected}, this backbone's have {shapes}"
        raise TpsgdError(f"{adaptor} was trained on {taps}: it is another one")
    gaps = []
    for name, output in _reference_outputs(backbone, description).items():
        stored = tensors[name].to(output.device)
        gaps.append(float((output - stored).norm() / stored.norm().clamp(min=1e-12)))
    if not all(gap <= ALIKE for gap in gaps):
        gap = f"the features of this one differ by {max(gaps):.0%} from those it was trained on"
        raise TpsgdError(f"{adaptor} belongs to another backbone: {gap}")
    if description.get("backbone_sha256") != fingerprint(backbone.model):
        warnings.warn(
            f"the backbone's weights are not those that {adaptor} was trained on, but its features "
            f"are within {max(gaps):.1%} of them",
            stacklevel=3,
        )


def _reference_outputs(backbone: Backbone, description: dict[str, Any]) -> dict[str, Tensor]:
    """Each tap's output for noise that is the same on every machine, averaged over space."""
    x = uniform(3**-0.5)(tuple(description["shape"]), 1, Key(0, 0), "cpu").abs()  # from 0 to 1
    outputs = backbone(x.to(backbone.device), list(description["taps"]))
    return {f"probe.{i}": pooled(y)[0] for i, y in enumerate(outputs.values())}


@torch.no_grad()
def fit_weights(adaptor: Adaptor, data: Any) -> None:
    """Learn the weights of the taps: least squares of held-out labels on the taps' outputs.

    Outputs are centred over classes first, because only their differences matter.
    """
    columns, targets = [], []
    with evaluating(adaptor):
        for features, y in adaptor.features_of(data):
            outputs = torch.stack(adaptor.outputs(features))
            hot = y if y.dim() == 2 else F.one_hot(y.long(), len(adaptor.classes))
            hot = hot.to(outputs)
            columns.append((outputs - outputs.mean(2, keepdim=True)).flatten(1).T.double())
            targets.append((hot - hot.mean(1, keepdim=True)).flatten().double())
    A, b = torch.cat(columns), torch.cat(targets)
    G = A.T @ A
    ridge = 1e-6 * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype, device=G.device)
    adaptor.weights.copy_(torch.linalg.solve(G + ridge, A.T @ b))
