"""A frozen backbone with trained layers on its taps: one classifier, to use, save and load."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.adapt import files
from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import (
    Features,
    batches,
    check_samples,
    class_indices,
    count,
    default_batch,
)
from tpsgd.adapt.heads import Build, from_recipe, recipe
from tpsgd.adapt.quantize import weight_bytes
from tpsgd.adapt.weights import put
from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import not_a_number
from tpsgd.engine.record import Run
from tpsgd.engine.sources.inputs import inputs, labels
from tpsgd.nets.modes import evaluating
from tpsgd.saved import folder as folders

CHUNK = 512  # stored features that are evaluated together
SAVED = ("layers", "weights")  # what `save` writes of an adaptor


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
        heads: dict[str, nn.Sequential],
        classes: Sequence[str],
        *,
        build: Build,
        shape: tuple[int, ...],
        tap_shapes: dict[str, tuple[int, ...]],
        combine: Combination = averaged,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.backbone, self.taps, self.classes = backbone, tuple(heads), tuple(map(str, classes))
        self.layers = nn.ModuleList(heads.values())  # a list, because a tap's name may have dots
        self.build, self.shape, self.tap_shapes = build, shape, tap_shapes
        self.combine, self.seed = combine, seed
        self.register_buffer("weights", combine.initial(len(heads)))
        self.weights: Tensor
        self.runs: dict[str, Run] = {}

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
        """Write the layers, and into `adaptor.json` what they belong to."""
        modules, shapes = self.backbone.taps, self.tap_shapes
        description = {
            "taps": {t: {"module": modules[t], "shape": shapes[t]} for t in self.taps},
            "shape": self.shape,
            "classes": self.classes,
            "layers": recipe(self.build),
            "combine": self.combine.name,
            "seed": self.seed,
            "training": {tap: run.settings for tap, run in self.runs.items()},
        }
        tensors = {k: v for k, v in self.state_dict().items() if k.split(".")[0] in SAVED}
        return files.write(Path(folder), self.backbone, description, tensors)


def load(folder: str | Path, backbone: Backbone, layers: Build | None = None) -> Adaptor:
    """Load a saved adaptor onto the backbone that it belongs to.

    Args:
        folder: what `Adaptor.save` wrote.
        backbone: must have the same taps, with the same outputs.
        layers: the function that made the layers, if it was not `Layers` or `Probe`.
    """
    description, tensors = folders.read(files.ADAPTOR, Path(folder))
    try:
        files.check_backbone(folder, backbone, description, tensors)
        shapes = {tap: tuple(entry["shape"]) for tap, entry in description["taps"].items()}
        shape, classes = tuple(description["shape"]), list(description["classes"])
        build = layers if description["layers"] is None else from_recipe(description["layers"])
        combine, seed = COMBINATIONS[description["combine"]], description["seed"]
    except (KeyError, TypeError, AttributeError) as error:
        reason = "there is no" if isinstance(error, KeyError) else "a value makes no sense:"
        raise TpsgdError(f"the adaptor in {folder} is not whole: {reason} {error}") from error
    if build is None:
        raise TpsgdError(f"{folder} has layers that a function made: pass that function as layers=")
    heads = {tap: build(shapes[tap], len(classes)) for tap in shapes}
    adaptor = Adaptor(
        backbone, heads, classes, build=build, shape=shape, tap_shapes=shapes, combine=combine,
        seed=seed,
    )  # fmt: skip
    put(adaptor, tensors, needed=SAVED)
    return adaptor.to(backbone.device).eval()


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
