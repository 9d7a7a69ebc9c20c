"""New domains: the accuracy that they cost, and how much of it a few labelled samples recover."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tpsgd.common import figures
from tpsgd_adapt.backbone import Backbone
from tpsgd_adapt.features import Features, shots
from tpsgd_adapt.fitting import fit

BARS = (
    ("known domain, before", "known_before", "#9aa5b1"),
    ("new domain, before", "new_before", "#d1495b"),
    ("new domain, after", "new_after", "#2a9d8f"),
    ("known domain, after", "known_after", "#5f6c7b"),
)
LEGEND_WIDTH = 6.8  # inches, in which the legend of the bars fits in one line
REPLAY = 7919  # added to the seed, so that replayed samples are drawn independently of the few


class Domain(NamedTuple):
    """A new domain: a few labelled samples to adapt to it, and others to test on."""

    few: Features
    test: Features


@dataclass(frozen=True)
class Recovery:
    """Accuracy on the known and on a new domain, before and after adapting to the new one."""

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
        """The accuracy on the known domain that adapting has lost."""
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
    """Train adaptors on one domain, adapt each to new domains, and test before and after.

    Args:
        backbone: the frozen one.
        train: the known domain's samples.
        test: samples of it to test on.
        domains: the new ones.
        arms: by name, the arguments of `tpsgd.adapt.fit`; a linear probe is solved again.
        replay: samples per class of the known domain that are added to the few.
        epochs: of adapting, per block; `arms` have those of the first training.
        seed: as everywhere.
        progress: called with (arm and domain, share that is done).
    """
    replayed = train[shots(train.y, replay, seed + REPLAY)] if replay else None
    rows, total = [], len(arms) * (1 + len(domains))
    for arm, options in arms.items():
        before = fit(backbone, train, seed=seed, **options)
        known_before = before.evaluate(test)
        for domain, (few, new) in domains.items():
            if progress is not None:
                progress(f"{arm}, {domain}", (len(rows) + 1) / total)
            samples = few if replayed is None else few + replayed
            again = {**options, "epochs": epochs}
            after = fit(backbone, samples, seed=seed, start=before, **again)
            row = Recovery(
                arm,
                domain,
                known_before=known_before,
                new_before=before.evaluate(new),
                new_after=after.evaluate(new),
                known_after=after.evaluate(test),
                seconds=sum(run.seconds for run in after.runs.values()),
                peak_bytes=max(run.peak_bytes for run in after.runs.values()),
                trained_bytes=after.nbytes,
            )
            rows.append(row)
    return rows


def draw_recovery(rows: Sequence[Recovery], file: Path, title: str) -> Path:
    """Write a PNG file with four bars for each arm."""
    from matplotlib.figure import Figure

    inches = (max(LEGEND_WIDTH, 1.6 + 1.75 * len(rows)), 3.6)
    plot = Figure(figsize=inches, layout="constrained")
    axes = plot.add_subplot()
    width = 0.2
    for i, (label, name, colour) in enumerate(BARS):
        places = [k + (i - 1.5) * width for k in range(len(rows))]
        heights = [100 * getattr(row, name) for row in rows]
        bars = axes.bar(places, heights, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(rows)), [row.arm for row in rows])
    margin = max(0.0, (3 - len(rows)) / 2)  # so that few arms do not get wider bars
    axes.set(xlim=(-0.6 - margin, len(rows) - 0.4 + margin), ylim=(0, 112))
    axes.set(yticks=range(0, 101, 20), ylabel="test accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left", pad=24)
    axes.legend(ncols=4, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0),
                borderaxespad=0.2, columnspacing=1.0, handlelength=1.0)  # fmt: skip
    return figures.write(plot, file)
