"""A frozen backbone with trained layers on its taps: one classifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import Features, batches, check_pictures, few_at_once
from tpsgd.adapt.heads import Build
from tpsgd.engine.inputs import check_finite, inputs, labels
from tpsgd.engine.learner import hits
from tpsgd.engine.meter import tensor_bytes
from tpsgd.engine.record import Run
from tpsgd.errors import TpsgdError
from tpsgd.units import size


@dataclass(frozen=True)
class Combination:
    """How several taps become one answer: a weighted sum of what their layers say."""

    name: str

    def start(self, taps: int) -> Tensor:
        """The weights before anything is learned."""
        return torch.full((taps,), 1.0 if self.name == "summed" else 1.0 / taps)


summed, averaged, learned = map(Combination, ("summed", "averaged", "learned"))
COMBINATIONS = {c.name: c for c in (summed, averaged, learned)}


class Adaptor(nn.Module):
    """Layers on the taps of a frozen backbone, which together give one number per class.

    `adaptor(x)` takes what the backbone takes (pictures as bytes, or numbers from 0 to 1).
    Only its layers are its own: `save` writes them and not the backbone.

    Attributes:
        heads: the layers of each tap.
        weights: what each tap counts.
        classes: their names.
        runs: the record of each tap's training, by tap.
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
        self.layers = nn.ModuleList(heads.values())  # a tap's name may have dots
        self.build, self.shape, self.tap_shapes = build, shape, tap_shapes
        self.combine, self.seed = combine, seed
        self.register_buffer("weights", combine.start(len(heads)))
        self.weights: Tensor
        self.runs: dict[str, Run] = {}

    @property
    def heads(self) -> dict[str, nn.Module]:
        """The layers of each tap."""
        return dict(zip(self.taps, self.layers, strict=True))

    @property
    def nbytes(self) -> int:
        """What is its own: the layers' weights."""
        return tensor_bytes(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        """One number per class for each sample."""
        return self.from_features(self.backbone(x, self.taps))

    def from_features(self, heard: dict[str, Tensor]) -> Tensor:
        """The same from what the taps have said."""
        said = [head(heard[tap]) for tap, head in self.heads.items()]
        return torch.stack([w * y for w, y in zip(self.weights, said, strict=True)]).sum(0)

    @torch.no_grad()
    def predict(self, x: Any, *, at_once: int | None = None) -> Tensor:
        """The class of each sample, as an index into `classes`."""
        x, at_once = inputs(x), at_once or few_at_once(self.backbone)
        if not len(x):
            raise TpsgdError("the data is empty: there are no samples")
        with _evaluating(self):
            parts = x.split(at_once)
            return torch.cat([self(self._checked(part)).argmax(1) for part in parts])

    @torch.no_grad()
    def evaluate(self, data: Any, *, at_once: int | None = None) -> float:
        """The share of samples that it gets right; `data` may be `Features`."""
        right = seen = 0
        with _evaluating(self):
            for out, y in self._answers(data, at_once or few_at_once(self.backbone)):
                y = labels(y, None, len(self.classes)).to(out.device)
                right, seen = right + hits(out, y, several=False), seen + len(y)
        if not seen:
            raise TpsgdError("the data is empty: there is nothing to evaluate on")
        return int(right) / seen

    def _answers(self, data: Any, at_once: int) -> Any:
        if isinstance(data, Features):
            for start in range(0, len(data), 512):
                part = data[start : start + 512]
                own = self.weights.device
                yield self.from_features({t: part.at(t)[0].to(own) for t in self.taps}), part.y
            return
        for x, y in batches(data, at_once):
            yield self(self._checked(x)), y

    def _checked(self, x: Tensor) -> Tensor:
        """Samples as it was trained on, or a sentence that says what is wrong with them."""
        if tuple(x.shape[1:]) != tuple(self.shape):
            raise TpsgdError(
                f"the adaptor was trained on samples of shape {tuple(self.shape)}, these have "
                f"{tuple(x.shape[1:])}"
            )
        check_finite(x)
        check_pictures(self.backbone, x)
        return x

    def save(self, folder: str | Path) -> Path:
        """Write `adaptor.safetensors` and `adaptor.json`: the layers, and what they fit on."""
        from tpsgd.adapt.files import save

        return save(self, Path(folder))

    def __str__(self) -> str:
        parts = ", ".join(f"{tap} {self.tap_shapes[tap]}" for tap in self.taps)
        return (
            f"adaptor on {self.backbone.name} at {parts}: {self.build}, {len(self.classes)} "
            f"classes, {size(self.nbytes)}"
        )


class _evaluating:
    """Evaluation mode for a while."""

    def __init__(self, module: nn.Module) -> None:
        self.modes = [(m, m.training) for m in module.modules()]
        self.module = module

    def __enter__(self) -> None:
        self.module.eval()

    def __exit__(self, *_: Any) -> None:
        for module, mode in self.modes:
            module.training = mode


@torch.no_grad()
def fit_weights(adaptor: Adaptor, held_out: Features | Any) -> None:
    """What each tap counts: least squares of the held-out labels on what the taps say.

    Numbers are centred over classes first, since only their differences decide.
    """
    columns, targets = [], []
    with _evaluating(adaptor):
        for said, y in _said(adaptor, held_out):
            known = labels(y, None, len(adaptor.classes)).to(said.device)
            hot = torch.zeros_like(said[0])
            hot.scatter_(1, known.long()[:, None], 1.0) if known.dim() == 1 else hot.copy_(known)
            columns.append((said - said.mean(2, keepdim=True)).flatten(1).T.double())
            targets.append((hot - hot.mean(1, keepdim=True)).flatten().double())
    A, b = torch.cat(columns), torch.cat(targets)
    G = A.T @ A
    ridge = 1e-6 * G.diagonal().mean() * torch.eye(len(G), dtype=G.dtype, device=G.device)
    adaptor.weights.copy_(torch.linalg.solve(G + ridge, A.T @ b))


def _said(adaptor: Adaptor, data: Any) -> Any:
    """What every tap says about each batch, (taps, samples, classes), and its labels."""
    parts: Any = (
        batches(data, few_at_once(adaptor.backbone)) if not isinstance(data, Features) else None
    )
    if parts is None:
        chunks = (data[i : i + 512] for i in range(0, len(data), 512))
        parts = ((part.x, part.y) for part in chunks)
    for x, y in parts:
        heard = x if isinstance(x, dict) else adaptor.backbone(x, adaptor.taps)
        own = adaptor.weights.device
        yield torch.stack([h(heard[t].to(own)) for t, h in adaptor.heads.items()]), y
