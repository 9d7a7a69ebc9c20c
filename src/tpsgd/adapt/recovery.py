"""Shifted domains: what they cost, and what a few labelled samples of them win back."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tpsgd.adapt.adaptor import Adaptor
from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.features import Features, shots
from tpsgd.adapt.fitting import fit

OTHERS = 7919  # added to the seed: others than those the few may be made of


class Domain(NamedTuple):
    """A new domain: a few labelled samples to adapt to it, and others to test on."""

    few: Features
    test: Features


@dataclass(frozen=True)
class Recovery:
    """One arm's accuracy on the known and on a new domain, before and after it met the new one."""

    arm: str
    domain: str
    known_before: float
    new_before: float
    new_after: float
    known_after: float
    seconds: float  # of adapting
    peak_bytes: int
    trained_bytes: int

    @property
    def forgotten(self) -> float:
        """What adapting lost on the known domain."""
        return self.known_before - self.known_after

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"forgotten": self.forgotten}


def recover(
    backbone: Backbone,
    train: Features,
    test: Features,
    domains: Mapping[str, Domain],
    arms: Mapping[str, Mapping[str, Any]],
    *,
    replay: int = 0,
    epochs: int | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> list[Recovery]:
    """Train every arm on one domain, test it on others, adapt it to each, and test both again.

    Args:
        backbone: the frozen one.
        train: the known domain's samples.
        test: samples of it to test on.
        domains: the new ones.
        arms: a name, and what `tpsgd.adapt.fit` takes; a linear probe is solved anew.
        replay: samples per class of the known domain that are learned again among the few.
        epochs: of adapting, per block, as for `fit`; `arms` may have those of the first training.
        seed: as everywhere.
        progress: called with (what is being done, the share that is done).
    """
    again = train[shots(train.y, replay, seed + OTHERS)] if replay else None
    rows, total = [], len(arms) * (1 + len(domains))
    for name, options in arms.items():
        first = fit(backbone, train, seed=seed, **options)
        before = first.evaluate(test)
        later = {**options, "epochs": epochs}
        for word, (few, new) in domains.items():
            if progress is not None:
                progress(f"{name}, {word}", (len(rows) + 1) / total)
            met = few if again is None else few + again
            then = fit(backbone, met, seed=seed, start=first, **later)
            rows.append(_row(name, word, before, first, then, test, new))
    return rows


def _row(
    arm: str,
    domain: str,
    before: float,
    first: Adaptor,
    then: Adaptor,
    test: Features,
    new: Features,
) -> Recovery:
    runs = then.runs.values()
    return Recovery(
        arm,
        domain,
        before,
        first.evaluate(new),
        then.evaluate(new),
        then.evaluate(test),
        sum(run.seconds for run in runs),
        max(run.peak_bytes for run in runs),
        then.nbytes,
    )
