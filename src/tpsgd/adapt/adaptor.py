"""A frozen backbone with trained layers on its taps: one classifier, to use, save and load."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.adapt import files
from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import Features, batches, check_images, default_batch
from tpsgd.adapt.heads import Build, from_recipe, recipe
from tpsgd.adapt.quantize import weight_bytes
from tpsgd.engine.inputs import check_finite, inputs, labels
from tpsgd.engine.record import Run
from tpsgd.errors import TpsgdError
from tpsgd.nets.modes import evaluating
from tpsgd.units import size

CHUNK = 512  # stored features that are evaluated together


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
        return [head(features[tap]) for tap, head in self.heads.items()]

    @torch.no_grad()
    def predict(self, x: Any, *, batch_size: int | None = None) -> Tensor:
        """The class of each sample, as an index into `classes`."""
        x = inputs(x)
        if not len(x):
            raise TpsgdError("the data is empty: there are no samples")
        with evaluating(self):
            parts = x.split(batch_size or default_batch(self.backbone))
            return torch.cat([self(self._checked(part)).argmax(1) for part in parts])

    @torch.no_grad()
    def evaluate(self, data: Any, *, batch_size: int | None = None) -> float:
        """The share of samples that are classified correctly; `data` may be `Features`."""
        right = total = 0
        with evaluating(self):
            for features, y in self.features_of(data, batch_size):
                right += int((self.from_features(features).argmax(1) == _indices(y)).sum())
                total += len(y)
        if not total:
            raise TpsgdError("the data is empty: there is nothing to evaluate on")
        return right / total

    def features_of(
        self, data: Any, batch_size: int | None = None
    ) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Each batch's features by tap, and its labels, on the adaptor's device."""
        device, classes = self.weights.device, len(self.classes)
        if isinstance(data, Features):
            for start in range(0, len(data), CHUNK):
                part = data[start : start + CHUNK]
                x = {tap: part.at(tap)[0].to(device) for tap in self.taps}
                yield x, labels(part.y, None, classes).to(device)
            return
        for x, y in batches(data, batch_size or default_batch(self.backbone)):
            features = self.backbone(self._checked(x), self.taps)
            yield features, labels(y, None, classes).to(device)

    def _checked(self, x: Tensor) -> Tensor:
        """Samples like those of the training, or an error."""
        if tuple(x.shape[1:]) != tuple(self.shape):
            raise TpsgdError(
                f"the adaptor was trained on samples of shape {tuple(self.shape)}, these have "
                f"{tuple(x.shape[1:])}"
            )
        check_finite(x)
        check_images(self.backbone, x)
        return x

    def save(self, folder: str | Path) -> Path:
        """Write `adaptor.safetensors` and `adaptor.json`: the layers, and what they belong to."""
        taps = {
            tap: {"module": self.backbone.taps[tap], "shape": self.tap_shapes[tap]}
            for tap in self.taps
        }
        description = {
            "taps": taps,
            "shape": self.shape,
            "classes": self.classes,
            "layers": recipe(self.build),
            "combine": self.combine.name,
            "seed": self.seed,
            "training": {tap: run.settings for tap, run in self.runs.items()},
        }
        return files.write(Path(folder), self.backbone, description, self.tensors())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name."""
        tensors = {
            f"{i}.{name}": value
            for i, head in enumerate(self.layers)
            for name, value in head.state_dict(keep_vars=True).items()
        }
        return tensors | {"weights": self.weights}

    def __str__(self) -> str:
        parts = ", ".join(f"{tap} {self.tap_shapes[tap]}" for tap in self.taps)
        return (
            f"adaptor on {self.backbone.name} at {parts}: {self.build}, {len(self.classes)} "
            f"classes, {size(self.nbytes)}"
        )


def load(folder: str | Path, backbone: Backbone, layers: Build | None = None) -> Adaptor:
    """Load a saved adaptor onto the backbone that it belongs to.

    Args:
        folder: what `Adaptor.save` wrote.
        backbone: must have the same taps, with the same outputs.
        layers: the function that made the layers, if it was not `Layers` or `Probe`.
    """
    description, tensors = files.read(Path(folder))
    try:
        files.check_taps(folder, backbone, description)
        shapes = {tap: tuple(entry["shape"]) for tap, entry in description["taps"].items()}
        shape, classes = tuple(description["shape"]), list(description["classes"])
        build = layers if description["layers"] is None else from_recipe(description["layers"])
        combine = COMBINATIONS[description["combine"]]
        if not all(isinstance(n, int) and n > 0 for s in (shape, *shapes.values()) for n in s):
            raise TypeError("a shape must be whole numbers above 0")
    except (KeyError, TypeError, AttributeError) as error:
        reason = "there is no" if isinstance(error, KeyError) else "a value makes no sense:"
        raise TpsgdError(f"{folder}/adaptor.json is not whole: {reason} {error}") from error
    if build is None:
        raise TpsgdError(f"{folder} has layers that a function made: pass that function as layers=")
    heads = {tap: build(shapes[tap], len(classes)) for tap in shapes}
    adaptor = Adaptor(
        backbone, heads, classes, build=build, shape=shape, tap_shapes=shapes, combine=combine,
        seed=description.get("seed", 0),
    )  # fmt: skip
    _fill(folder, adaptor.tensors(), tensors)
    files.check_outputs(folder, backbone, description, tensors)
    return adaptor.to(backbone.device).eval()


@torch.no_grad()
def _fill(folder: Any, own: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    """Copy the stored tensors, if all of them are there and fit."""
    for name, value in own.items():
        shape = tuple(stored[name].shape) if name in stored else None
        if shape != tuple(value.shape):
            problem = "missing" if shape is None else f"of shape {shape}"
            raise TpsgdError(
                f"the adaptor in {folder} does not fit its layers: {name} should have shape "
                f"{tuple(value.shape)}, it is {problem}"
            )
    for name, value in own.items():
        value.copy_(stored[name])


@torch.no_grad()
def fit_weights(adaptor: Adaptor, data: Any) -> None:
    """Learn the weights of the taps: least squares of held-out labels on the taps' outputs.

    Outputs are centred over classes first, because only their differences matter.
    """
    columns, targets = [], []
    with evaluating(adaptor):
        for features, y in adaptor.features_of(data):
            outputs = torch.stack(adaptor.outputs(features))
            hot = torch.zeros_like(outputs[0])
            hot.scatter_(1, y.long()[:, None], 1.0) if y.dim() == 1 else hot.copy_(y)
            columns.append((outputs - outputs.mean(2, keepdim=True)).flatten(1).T.double())
            targets.append((hot - hot.mean(1, keepdim=True)).flatten().double())
    A, b = torch.cat(columns), torch.cat(targets)
    G = A.T @ A
    ridge = 1e-6 * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype, device=G.device)
    adaptor.weights.copy_(torch.linalg.solve(G + ridge, A.T @ b))


def _indices(y: Tensor) -> Tensor:
    return y.argmax(1) if y.is_floating_point() else y
