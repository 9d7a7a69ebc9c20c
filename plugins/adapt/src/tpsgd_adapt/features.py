"""The outputs of a backbone's taps for a data set, computed once and kept."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tpsgd.common.errors import TpsgdError
from tpsgd.data import split
from tpsgd.engine.device import available
from tpsgd.engine.sources.inputs import check_finite, inputs, pair, tensor
from tpsgd.engine.sources.loaders import count_samples, is_stream
from tpsgd.maths.random import Key, shuffled
from tpsgd.nets.precision import without_autocast
from tpsgd_adapt.backbone import Backbone


@dataclass(frozen=True, eq=False)
class Features:
    """The features of every sample at each tap, and the labels. `shape` is that of one sample."""

    x: dict[str, Tensor]
    y: Tensor
    shape: tuple[int, ...]
    made_by: str = ""  # the backbone's fingerprint; empty if unknown

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """The bytes of the features of all taps."""
        return sum(x.nbytes for x in self.x.values())

    def at(self, tap: str) -> tuple[Tensor, Tensor]:
        """The features of one tap and the labels, as `fit` takes them."""
        if tap not in self.x:
            raise TpsgdError(f"there are no features of tap {tap!r}, only of {', '.join(self.x)}")
        return self.x[tap], self.y

    def __getitem__(self, index: Any) -> "Features":
        x = {tap: x[index] for tap, x in self.x.items()}
        return Features(x, self.y[index], self.shape, self.made_by)

    def __add__(self, others: "Features") -> "Features":
        """These samples followed by others."""
        x = {tap: torch.cat([x, others.at(tap)[0].to(x)]) for tap, x in self.x.items()}
        return Features(x, torch.cat([self.y, others.y.to(self.y)]), self.shape, self.made_by)


@torch.no_grad()
@without_autocast()
def encode(
    backbone: Backbone,
    data: Any,
    taps: Sequence[str] | None = None,
    *,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Compute the features of a data set, in one pass for all taps.

    `tpsgd.adapt.fit` takes them in place of the data set. They are stored on the backbone's device
    if they take less than half of its free memory, else on the CPU. `batch_size` samples go through
    the backbone together (by default a few, which takes little memory).

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> features = encode(Backbone(net, ["1"]), (torch.ones(5, 4), torch.zeros(5).long()))
        >>> features.x["1"].shape
        torch.Size([5, 3])
    """
    total, done, labels = count(data), 0, []
    shape: tuple[int, ...] = ()
    features: dict[str, Tensor] = {}
    for x, y in batches(data, batch_size or default_batch(backbone)):
        check_samples(backbone, x)
        outputs = backbone(x, taps)
        if not done:
            shape, features = tuple(x.shape[1:]), _allocate(outputs, total)
        for tap, output in outputs.items():
            features[tap][done : done + len(output)] = output
        labels.append(y)
        done += len(x)
        if progress is not None:
            progress(done, total)
    features = {tap: f[:done] for tap, f in features.items()}
    y = torch.cat(labels).to(next(iter(features.values())).device)
    return Features(features, y, shape, fingerprint(backbone.model))


def _allocate(outputs: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Memory for the features of all samples: on the CPU if the device has too little."""
    need = samples * sum(prod(y.shape[1:]) for y in outputs.values()) * 4
    device = next(iter(outputs.values())).device
    device = device if need < available(device) / 2 else torch.device("cpu")
    if need > available(device):
        problem = f"the features of {samples:,} samples take {need:,} bytes, more than there is"
        raise TpsgdError(f"{problem}: set memory=tpsgd.Memory(reuse=False), or give fewer samples")
    return {tap: torch.empty((samples, *y.shape[1:]), device=device) for tap, y in outputs.items()}


def default_batch(backbone: Backbone) -> int:
    """How many samples go through a backbone together by default: few, as they take memory."""
    return 64 if backbone.device.type == "cuda" else 8


def batches(data: Any, batch_size: int) -> Iterator[tuple[Any, Tensor]]:
    """Samples and labels in batches, in order, unchanged; a `DataLoader` has its own batches."""
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size)
    if isinstance(data, DataLoader):
        pairs: Iterable[Any] = map(pair, data)
    else:
        samples, classes = inputs(pair(data)[0]), tensor(data[1], "y")
        if len(samples) != len(classes):
            raise TpsgdError(f"x has {len(samples):,} samples but y has {len(classes):,} labels")
        slices = (slice(i, i + batch_size) for i in range(0, len(samples), batch_size))
        pairs = ((samples[piece], classes[piece]) for piece in slices)
    x = None
    for x, y in pairs:
        yield inputs(x), tensor(y, "y")
    if x is None:
        raise TpsgdError("the data is empty: there are no samples")


def check_samples(backbone: Backbone, x: Any) -> None:
    """Refuse NaN, and images with numbers below 0 or up to 255."""
    if not isinstance(x, Tensor):  # which the backbone refuses
        return
    check_finite(x)
    if not backbone.mean or not x.is_floating_point():
        return
    least, most = x.aminmax()
    if least < 0 or most > 16:
        bounds = f"these go from {least:g} to {most:g}: divide them by 255, or give bytes"
        raise TpsgdError(f"images must be bytes (uint8), or numbers from 0 to 1; {bounds}")


def count(data: Any) -> int:
    """The number of samples; at least one."""
    samples = len(data) if isinstance(data, Features) else count_samples(data)
    if not samples:
        raise TpsgdError("the data is empty, or does not say how many samples it has")
    return samples


def hold_out(data: Any, seed: int = 0) -> tuple[Any, Any]:
    """Split `(x, y)` or `Features`: nine tenths of each class, and the rest."""
    if not isinstance(data, Features) and is_stream(data):
        raise TpsgdError("learned weights of taps need held-out data: give validation=")
    x, y = (data, data.y) if isinstance(data, Features) else map(tensor, data, ("x", "y"))
    mask = split.hold_out(class_indices(y).cpu().numpy(), -(-len(y) // 10), seed)
    train = torch.from_numpy(mask).to(y.device)
    if isinstance(x, Features):
        return x[train], x[~train]
    return (x[train], y[train]), (x[~train], y[~train])


def shots(y: Any, per_class: int, seed: int = 0) -> Tensor:
    """The indices of this many samples of every class, chosen by the seed.

    Examples:
        >>> y = torch.tensor([0, 0, 0, 1, 1])
        >>> y[shots(y, 2)]
        tensor([0, 0, 1, 1])
    """
    classes = class_indices(tensor(y, "y")).cpu()
    if classes.is_floating_point() or not len(classes) or classes.min() < 0:
        raise TpsgdError("y must be classes, whole numbers from 0, of one sample or more")
    chosen = []
    for c in range(int(classes.max()) + 1):
        members = (classes == c).nonzero().flatten()
        if len(members) < per_class:
            raise TpsgdError(f"class {c} has {len(members)} samples, fewer than {per_class}")
        order = shuffled(len(members), [Key(seed, c)], members.device)[0]
        chosen.append(members[order[:per_class]])
    return torch.cat(chosen)


def class_indices(y: Tensor) -> Tensor:
    """Labels as class indices: of rows, the index of the largest entry."""
    return y.argmax(1) if y.dim() == 2 else y


def pooled(x: Tensor) -> Tensor:
    """Features averaged over tokens (n, tokens, d) or space (n, c, h, w); vectors (n, d) stay."""
    return x if x.dim() == 2 else x.mean(1 if x.dim() == 3 else tuple(range(2, x.dim())))


def fingerprint(model: nn.Module) -> str:
    """A hash of a model's weights: names, types, shapes and bytes."""
    sha = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            sha.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            for piece in value.detach().contiguous().view(-1).split(1 << 20):
                sha.update(piece.cpu().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
