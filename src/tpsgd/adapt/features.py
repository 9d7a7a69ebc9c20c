"""What a backbone's taps say about a data set, computed once and kept."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tpsgd.adapt.backbone import Backbone
from tpsgd.engine.device import available
from tpsgd.engine.inputs import check_finite, inputs, pair, tensor
from tpsgd.errors import TpsgdError
from tpsgd.maths.random import Key, shuffled

Progress = Callable[[int, int], None]
AT_ONCE = 8  # samples through a backbone on a CPU; on a GPU eight times as many


@dataclass(frozen=True, eq=False)
class Features:
    """The features of every sample at each tap, and the labels. `shape` is one sample's own."""

    x: dict[str, Tensor]
    y: Tensor
    shape: tuple[int, ...]
    made_by: str = ""  # the backbone's fingerprint, if it is known

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """All features together."""
        return sum(x.nbytes for x in self.x.values())

    def at(self, tap: str) -> tuple[Tensor, Tensor]:
        """Features and labels, as `fit` takes them."""
        if tap not in self.x:
            raise TpsgdError(f"no features of tap {tap!r} were kept: {', '.join(self.x)}")
        return self.x[tap], self.y

    def __getitem__(self, index: Any) -> "Features":
        """Some of the samples."""
        return Features(
            {tap: x[index] for tap, x in self.x.items()}, self.y[index], self.shape, self.made_by
        )

    def __add__(self, others: "Features") -> "Features":
        """These samples and others."""
        joined = {tap: torch.cat([x, others.at(tap)[0].to(x)]) for tap, x in self.x.items()}
        return Features(joined, torch.cat([self.y, others.y.to(self.y)]), self.shape, self.made_by)


@torch.no_grad()
def encode(
    backbone: Backbone,
    data: Any,
    taps: Sequence[str] | None = None,
    *,
    at_once: int | None = None,
    progress: Progress | None = None,
) -> Features:
    """Compute the features of a data set once, in one pass for all taps.

    They are kept in memory, where the backbone computes if they fit there twice. `tpsgd.adapt.fit`
    takes them in place of the data set, as often as you like. `at_once` samples go through the
    backbone together: fewer hold less, and by default they are few on a CPU.

    Examples:
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> known = encode(Backbone(net, ["1"]), (torch.ones(5, 4), torch.zeros(5).long()))
        >>> known.x["1"].shape
        torch.Size([5, 3])
    """
    total, kept, labels, done = count(data), {}, [], 0
    at_once = at_once or few_at_once(backbone)
    shape: tuple[int, ...] = ()
    for x, y in batches(data, at_once):
        check_pictures(backbone, x)
        heard = backbone(x, taps)
        if not done:
            shape = tuple(x.shape[1:])
            kept = _room(heard, total)
        for tap, f in heard.items():
            if done + len(f) > total:
                raise TpsgdError(f"the data gives more than the {total:,} samples it announced")
            kept[tap][done : done + len(f)] = f
        labels.append(y)
        done += len(x)
        if progress is not None:
            progress(done, total)
    if not done:
        raise TpsgdError("the data is empty: there are no samples")
    y = torch.cat(labels)
    places = {tap: f[:done] for tap, f in kept.items()}
    y = y.to(next(iter(places.values())).device)
    return Features(places, y, shape, fingerprint(backbone.model))


def few_at_once(backbone: Backbone) -> int:
    """How many samples go through a backbone together, unless somebody says."""
    return AT_ONCE * (8 if backbone.device.type == "cuda" else 1)


def fingerprint(model: nn.Module) -> str:
    """A hash of the weights' names, kinds, shapes and bytes."""
    known = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            known.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            known.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return known.hexdigest()


def shots(y: Any, per_class: int, seed: int = 0) -> Tensor:
    """The indices of so many samples of every class, chosen by the seed.

    Examples:
        >>> y = torch.tensor([0, 0, 0, 1, 1])
        >>> y[shots(y, 2)]
        tensor([0, 0, 1, 1])
    """
    known = tensor(y, "y").cpu()
    known = known.argmax(1) if known.dim() == 2 else known
    chosen = []
    for c in range(int(known.max()) + 1):
        mine = (known == c).nonzero().flatten()
        if len(mine) < per_class:
            raise TpsgdError(f"class {c} has {len(mine)} samples, fewer than the {per_class} asked")
        order = shuffled(len(mine), [Key(seed, c)], mine.device)[0]
        chosen.append(mine[order[:per_class]])
    return torch.cat(chosen)


def batches(data: Any, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples and labels as they were given, a few at a time, in order."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, Dataset):
        data = DataLoader(data, at_once)
    if isinstance(data, DataLoader):
        for batch in data:
            x, y = pair(batch)
            yield _checked(inputs(x)), tensor(y, "y")
        return
    x, y = pair(data)
    x, y = inputs(x), tensor(y, "y")
    if len(x) != len(y):
        raise TpsgdError(f"x has {len(x):,} samples but y has {len(y):,} labels")
    for start in range(0, len(x), at_once):
        yield _checked(x[start : start + at_once]), y[start : start + at_once]


def count(data: Any) -> int:
    """How many samples there are."""
    from tpsgd.engine.batches import count_samples

    samples = len(data) if isinstance(data, Features) else count_samples(data)
    if not samples:
        raise TpsgdError("the data is empty, or does not say how many samples it has")
    return samples


def check_pictures(backbone: Backbone, x: Tensor) -> None:
    """Refuse pictures in numbers up to 255, which nobody has divided."""
    if not backbone.mean or not x.is_floating_point() or not x.numel():
        return
    if float(x.min()) < 0:
        raise TpsgdError(
            f"pictures must be bytes (uint8), or numbers from 0 to 1; these go down to "
            f"{float(x.min()):g}: give them as they are, the backbone scales them itself"
        )
    if float(x.max()) > 16:
        raise TpsgdError(
            "pictures must be bytes (uint8), or numbers from 0 to 1; these go up to "
            f"{float(x.max()):g}: divide them by 255"
        )


def _checked(x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise TpsgdError("a backbone takes samples of one shape, not sequences of any length")
    check_finite(x)
    return x


def _room(heard: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
    """Space for all features, in one place: on the CPU where a GPU has too little."""
    need = samples * sum(prod(f.shape[1:]) for f in heard.values()) * 4
    device = next(iter(heard.values())).device
    device = device if need < available(device) / 2 else torch.device("cpu")
    if need > available(device):
        raise TpsgdError(
            f"the features of {samples:,} samples take {need:,} bytes, more than there is: give "
            "fewer samples, tap a deeper module, or let adapt.fit compute them again, keep=False"
        )
    return {tap: torch.empty((samples, *f.shape[1:]), device=device) for tap, f in heard.items()}
