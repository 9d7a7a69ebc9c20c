"""`tpsgd adapt --shift`: accuracy on a shifted domain, before and after learning a few samples."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Console

from tpsgd.cli.options import check, setting
from tpsgd.cli.terminal import grid_of, named_bar, until_interrupted
from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.adapt.recovery import Recovery
    from tpsgd.cli.adapt import Job

SHIFTS = ("grey", "edges", "blur", "noise", "invert", "dim")


@dataclass(frozen=True)
class ShiftOptions:
    """A new domain."""

    TITLE: ClassVar[str] = "New domain"

    shift: str | None = setting(None, f"{', '.join(SHIFTS)}; or several: grey,blur.")
    shots: int | None = setting(None, "Labelled samples per class; default: 10.", min=1)
    replay: int | None = setting(None, "Old samples per class to add; default: 0.", min=0)

    def words(self) -> list[str]:
        """The shifts."""
        words = [word.strip() for word in self.shift.split(",")] if self.shift else []
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

    def in_words(self) -> str:
        """The samples that an adaptor adapts to."""
        old = f" and {self.replay} old ones" if self.replay else ""
        return f"{self.few} labelled samples{old} a class"


def recover(job: "Job", shift: ShiftOptions, epochs: int | None, folder: Path) -> dict[str, Any]:
    """Train every arm, test it on shifted data, adapt it; draw a figure for each shift."""
    from tpsgd import adapt

    (x, y), (x_test, y_test) = job.data.train, job.data.test
    words, replay, shifts = shift.words(), shift.replay or 0, adapt.corruptions.SHIFTS
    chosen = adapt.shots(y, shift.few, job.seed)
    adapt.shots(y, replay, job.seed)  # too few samples are an error before training
    few = {word: shifts[word](x[chosen], first=len(x_test)) for word in words}
    detected: dict[str, Any] = {}

    def rows() -> "Iterator[list[Recovery]]":
        with named_bar() as progress_of:

            def encode(x: Any, y: Any, task: str) -> Any:
                return adapt.encode(job.backbone, (x, y), job.taps, progress=progress_of(task))

            train, test, new = encode(x, y, "features"), encode(x_test, y_test, "test features"), {}
            for word in words:
                shifted = encode(shifts[word](x_test), y_test, f"{word}, test")
                new[word] = adapt.Domain(encode(few[word], y[chosen], word), shifted)
            detected.update(_detect(train, test, new, job.taps[-1], job.seed))
            for i, (name, settings) in enumerate(job.arms.items()):
                yield adapt.recover(
                    job.backbone, train, test, new, {name: _settings(job, settings)},
                    replay=replay, epochs=epochs, seed=job.seed,
                    progress=_counted(progress_of("adapting"), i, len(job.arms)),
                )  # fmt: skip

    arms, interrupted = until_interrupted(rows())
    record = {"shots": shift.few, "replay": replay, "interrupted": interrupted}
    record |= {"after": shift.in_words()}
    recoveries = [row for arm in arms for row in arm]
    return record | {"shifts": _by_shift(words, recoveries, detected, record["after"], folder)}


def _counted(progress: Any, done: int, total: int) -> Any:
    """The progress within one arm as progress over all of them."""
    if progress is None:
        return None
    progress(done, total)
    return lambda _, share: progress(done + share, total)


def _by_shift(
    words: list[str], rows: "list[Recovery]", detected: dict[str, Any], after: str, folder: Path
) -> dict[str, Any]:
    """The record of every shift; draws its figure."""
    from tpsgd.adapt.figures import draw_recovery

    shifts = {}
    for word in words:
        arms = [row for row in rows if row.domain == word]
        shifts[word] = {"arms": [row.as_dict() for row in arms], "detector": detected[word]}
        draw_recovery(arms, folder / f"{word}.png", f"{word}: {after}")
    return shifts


def _settings(job: "Job", arm: dict[str, Any]) -> dict[str, Any]:
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


def show(console: Console, record: dict[str, Any], folder: Path) -> None:
    """Print a table for every shift."""
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
    console.print(f"figures and record.json: {folder}", markup=False)


def _verdict(due: dict[str, Any] | None) -> str:
    if due is None:
        return "too few samples to say whether it is new (190 are enough)"
    verdict = "adaptation is due" if due["due"] else "adaptation is not due"
    shares = f"{due['share_new']:.0%} look new, of known ones {due['expected']:.0%}"
    return f"{verdict} (p {due['p_value']:.2g}): {shares}"
