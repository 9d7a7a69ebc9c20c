"""`Rehearsal`: a few earlier samples, bounded in bytes, to learn from again.

A class-balanced reservoir (Chrysakis & Moens, "Online Continual Learning from Imbalanced Data",
2020): while there is room, every sample is stored. After that, a sample of a class that does not
have the most samples here replaces a random one of the class that has; a sample of the largest
class replaces one of its own class with the probability stored / seen. So every class ends with
about equally many samples, and those of a class are a random choice of all that came.
"""

from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.units import as_bytes, size
from tpsgd.saved.expected import check_number


class Rehearsal:
    """Earlier samples of a stream, in a bounded number of bytes: `Rehearsal("100KB")`.

    Samples are stored as they are passed to `partial_fit`, so bytes (uint8) take a quarter of the
    memory of floats. All memory is taken when the first sample comes.

    Args:
        memory: "100KB", or bytes: the most that samples and labels may take.
        balanced: every class gets the same share; otherwise every sample that came is stored with
            the same probability (a plain reservoir).
        replayed: earlier samples in a step, for each new one.
        seed: of the random choices.

    Examples:
        >>> buffer = Rehearsal("1KB")
        >>> buffer.add(torch.zeros(500, 20, dtype=torch.uint8), torch.arange(500) % 5)
        >>> len(buffer), buffer.nbytes, buffer.counts()
        (36, 1008, {0: 7, 1: 7, 2: 7, 3: 7, 4: 8})
    """

    def __init__(
        self, memory: str | int, *, balanced: bool = True, replayed: float = 1.0, seed: int = 0
    ) -> None:
        self.limit, self.balanced, self.replayed = as_bytes(memory), balanced, replayed
        if not isinstance(replayed, (int, float)) or not 0 < replayed < 1000:
            raise TpsgdError(f"replayed must be a number above 0, got {replayed!r}")
        self.random = torch.Generator().manual_seed(seed)
        self.x, self.y, self.stored = torch.empty(0), torch.empty(0, dtype=torch.long), 0
        self.seen: dict[int, int] = {}  # of each class, all samples that came

    def __len__(self) -> int:
        return self.stored

    @property
    def nbytes(self) -> int:
        """The bytes of the memory that is taken, whether samples fill it or not."""
        return self.x.nbytes + self.y.nbytes

    def counts(self) -> dict[int, int]:
        """How many samples of each class are stored."""
        counts = enumerate(self.y[: self.stored].bincount().tolist())
        return {label: count for label, count in counts if count}

    def check(self, x: Any, rows: bool = False) -> None:
        """Refuse samples that cannot be stored; `rows`: they have other labels than a class."""
        if not isinstance(x, Tensor):
            raise TpsgdError(
                "a rehearsal buffer stores samples of one tensor and one shape: pad sequences, and "
                "leave rehearsal out for models of several inputs"
            )
        if rows:
            raise TpsgdError(
                "a rehearsal buffer stores class labels, one for each sample: leave rehearsal out "
                "for numbers, soft labels, and labels of every step or pixel"
            )
        if (nbytes := _bytes_of_sample(x)) > self.limit:
            room = f"no room for a single sample of {size(nbytes)}"
            raise TpsgdError(f"a rehearsal buffer of {size(self.limit)} has {room}")
        new, stored = (f"shape {tuple(t.shape[1:])} in {t.dtype}" for t in (x, self.x))
        if len(self.x) and new != stored:
            raise TpsgdError(f"the rehearsal buffer has samples of {stored}, not of {new}")

    def add(self, x: Tensor, y: Tensor) -> None:
        """Store samples, or some of them in the place of others."""
        self.check(x, y.is_floating_point())
        if not len(self.x):
            room = self.limit // _bytes_of_sample(x)
            self.x = x.new_empty(room, *x.shape[1:])
            self.y = torch.empty(room, dtype=torch.long)
        for sample, label in zip(x, y.tolist(), strict=True):
            self.seen[label] = self.seen.get(label, 0) + 1
            if (place := self._place(label)) is not None:
                self.x[place], self.y[place] = sample, label

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Different random samples, at most as many as are stored."""
        chosen = torch.randperm(self.stored, generator=self.random)[:count]
        return self.x[chosen.to(self.x.device)], self.y[chosen]

    def mixed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """New samples with earlier ones after them."""
        if not self.stored:
            return x, y
        earlier, their_labels = self.draw(round(self.replayed * len(y)))
        return torch.cat([x, earlier]), torch.cat([y.long(), their_labels.to(y.device)])

    def state_dict(self) -> dict[str, Any]:
        """What is stored, and the state of the random choices."""
        return {
            "x": self.x.clone(), "y": self.y.clone(), "stored": self.stored,
            "seen": dict(self.seen), "random": self.random.get_state(),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned."""
        x, y, seen = state["x"], state["y"], dict(state["seen"])
        if x.nbytes + y.nbytes > self.limit:
            raise TpsgdError(f"the stored samples take more than {size(self.limit)}")
        stored = check_number("stored", state["stored"], least=0, whole=True)
        if len(x) != len(y) or stored > len(x) or not set(y[:stored].tolist()) <= seen.keys():
            raise TpsgdError("the stored samples and labels do not belong together")
        for label, count in seen.items():
            check_number("seen", min(label, count), least=0, whole=True)
        self.x, self.y, self.stored, self.seen = x.clone(), y.long().clone(), stored, seen
        self.random.set_state(state["random"])

    def _place(self, label: int) -> int | None:
        """Where a new sample of a class goes, if anywhere."""
        if self.stored < len(self.x):
            self.stored += 1
            return self.stored - 1
        if not self.balanced:
            place = self._below(sum(self.seen.values()))
            return place if place < self.stored else None
        counts = self.counts()
        largest, own = max(counts.values()), counts.get(label, 0)
        if own < largest:
            largest_classes = [c for c, n in counts.items() if n == largest]
            label = largest_classes[self._below(len(largest_classes))]
        elif self._below(self.seen[label]) >= own:
            return None
        places = (self.y == label).nonzero().flatten()
        return int(places[self._below(len(places))])

    def _below(self, bound: int) -> int:
        return int(torch.randint(bound, (), generator=self.random))


def _bytes_of_sample(x: Tensor) -> int:
    return x[0].numel() * x.itemsize + torch.long.itemsize
