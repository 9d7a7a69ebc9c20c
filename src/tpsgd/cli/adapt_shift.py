"""`tpsgd adapt --shift`: accuracy on a shifted domain, before and after learning a few samples."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tpsgd.cli.adapt_plan import Job
from tpsgd.cli.options import check, listed, setting
from tpsgd.cli.terminal import grid_of, live_bar, until_interrupted
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.adapt.recovery import Recovery

SHIFTS = ("grey", "edges", "blur", "noise", "invert", "dim")


@dataclass(frozen=True)
class NewDomain:
    """A new domain."""

    TITLE = "New domain"

    shift: str | None = setting(None, f"{', '.join(SHIFTS)}; or several: grey,blur.")
    shots: int | None = setting(None, "Labelled samples per class (default: 10).", min=1)
    replay: int | None = setting(None, "Old samples per class to add (default: 0).", min=0)

    def words(self) -> list[str]:
        """The shifts."""
        words = listed(self.shift)
        for word in words:
            check("shift", word, SHIFTS)
        if len(set(words)) < len(words):
            raise TpsgdError(f"--shift {self.shift}: name each shift once")
        if not words and (self.shots is not None or self.replay is not None):
            raise TpsgdError("--shots and --replay go with --shift")
        return words

    @property
    def few(self) -> int:
        """The number of labelled samples per class."""
        return self.shots or 10


def recover(job: Job, domain: NewDomain) -> tuple[dict[str, Any], Callable[[Path], Any]]:
    """Train every arm, test it on shifted data, adapt it: the record, and what draws the figures.

    There is a figure for each shift.
    """
    from tpsgd import adapt

    (x, y), (x_test, y_test) = job.data.train, job.data.test
    words, replay, shifts = domain.words(), domain.replay or 0, adapt.corruptions.SHIFTS
    seed, epochs = job.settings["seed"], job.settings.get("epochs")
    chosen = adapt.shots(y, domain.few, seed)
    adapt.shots(y, replay, seed)  # too few samples are an error before training
    few = {word: shifts[word](x[chosen], first=len(x_test)) for word in words}
    detected: dict[str, Any] = {}

    def rows() -> "Iterator[list[Recovery]]":
        with live_bar() as advance:

            def encode(x: Any, y: Any, task: str) -> Any:
                progress = partial(advance, task)
                return adapt.encode(job.backbone, (x, y), job.taps, progress=progress)

            train, test, new = encode(x, y, "features"), encode(x_test, y_test, "test features"), {}
            for word in words:
                shifted = encode(shifts[word](x_test), y_test, f"{word}, test")
                new[word] = adapt.Domain(encode(few[word], y[chosen], word), shifted)
            detected.update(_detect(train, test, new, job.taps[-1], seed))
            for name, settings in job.arms.items():

                def progress(_: str, share: float, name: str = name) -> None:
                    advance(f"adapting {name}", share, 1.0)

                yield adapt.recover(
                    job.backbone, train, test, new, {name: _settings(job, settings)},
                    replay=replay, epochs=epochs, seed=seed, progress=progress,
                )  # fmt: skip

    arms, interrupted = until_interrupted(rows())
    old = f" and {replay} old ones" if replay else ""
    after = f"{domain.few} labelled samples{old} a class"
    recoveries = [row for arm in arms for row in arm]
    record = {"shots": domain.few, "replay": replay, "interrupted": interrupted, "after": after}
    by_shift = {word: [row for row in recoveries if row.domain == word] for word in words}
    record["shifts"] = {
        word: {"arms": [row.as_dict() for row in rows], "detector": detected[word]}
        for word, rows in by_shift.items()
    }
    return record, partial(_draw, by_shift, after)


def _draw(by_shift: "dict[str, list[Recovery]]", after: str, folder: Path) -> None:
    from tpsgd.adapt.figures import draw_recovery

    for word, rows in by_shift.items():
        draw_recovery(rows, folder / f"{word}.png", f"{word}: {after}")


def _settings(job: Job, arm: dict[str, Any]) -> dict[str, Any]:
    """The settings of `adapt.fit` for one arm; a probe, which is solved, has no epochs."""
    left_out = {"seed", "epochs"} if "optimizer" in arm else {"seed"}
    common = {k: v for k, v in job.settings.items() if k not in left_out}
    return {"taps": job.taps, "classes": job.data.classes} | common | arm


def _detect(train: Any, test: Any, new: dict[str, Any], tap: str, seed: int) -> dict[str, Any]:
    """Whether a detector without labels finds each new domain to be new."""
    from tpsgd.adapt import hold_out, novelty

    seen, held_out = hold_out(train, seed)
    if len(held_out) < 19:  # too few to set a threshold
        return dict.fromkeys(new)
    detector = novelty.mahalanobis(seen.at(tap)[0], seen.y).calibrate(held_out.at(tap)[0])
    scores = detector.score(test.at(tap)[0])
    verdicts = {}
    for word, domain in new.items():
        features = domain.test.at(tap)[0]
        auroc = novelty.auroc(scores, detector.score(features))
        verdicts[word] = detector.due(features)._asdict() | {"auroc": auroc}
    return verdicts


def show(console: Console, record: dict[str, Any], folder: Path | None) -> None:
    """Print a table for every shift, and where the files are if they could be written."""
    for word, shift in record["shifts"].items():
        console.print(f"\n{word}: {_verdict(shift['detector'])}", style="bold", markup=False)
        head = ("arm", "known", f"{word} before", "after", "known after", "forgotten")
        grid = grid_of(*head, numbers=True)
        for row in shift["arms"]:
            values = (row[k] for k in ("known_before", "new_before", "new_after", "known_after"))
            lost = 100 * row["forgotten"]
            grid.add_row(row["arm"], *(f"{v:.1%}" for v in values), f"{lost:.1f} points")
        console.print(grid)
    console.print(f"\nafter: learned from {record['after']}", markup=False)
    if folder is not None:
        console.print(f"figures and record.json: {folder}", markup=False)


def _verdict(due: dict[str, Any] | None) -> str:
    if due is None:
        return "too few samples to say whether it is new (190 are enough)"
    verdict = "adaptation is due" if due["due"] else "adaptation is not due"
    shares = f"{due['share_new']:.0%} look new, {due['expected']:.0%} of known samples do"
    return f"{verdict} (p {due['p_value']:.2g}): {shares}"
