"""`tpsgd adapt --shift`: adaptors on shifted pictures, before and after they learn from a few."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from tpsgd.cli.terminal import grid_of, named_bar

if TYPE_CHECKING:
    from tpsgd.adapt.recovery import Recovery
    from tpsgd.cli.adapt import Wanted

T = TypeVar("T")


def recovered(
    wanted: "Wanted", words: list[str], shots: int, replay: int, epochs: int | None, folder: Path
) -> dict[str, Any]:
    """Every arm on the data, on shifted data, and adapted to it; a picture for each shift."""
    from tpsgd import adapt
    from tpsgd.adapt import corruptions as shifts
    from tpsgd.adapt import recovery as domains
    from tpsgd.adapt.features import shots as some

    (x, y), (x_test, y_test) = wanted.data.train, wanted.data.test
    chosen = some(y, shots, wanted.seed)
    some(y, replay, wanted.seed)  # too few are refused now, not after an hour
    few = {word: shifts.SHIFTS[word](x[chosen], first=len(x_test)) for word in words}
    detected: dict[str, Any] = {}

    def trained() -> "Iterator[list[Recovery]]":
        with named_bar() as tell:

            def encode(x: Any, y: Any, what: str) -> Any:
                return adapt.encode(wanted.backbone, (x, y), wanted.taps, progress=tell(what))

            train, test, new = encode(x, y, "features"), encode(x_test, y_test, "test features"), {}
            for word in words:
                shifted = encode(shifts.SHIFTS[word](x_test), y_test, f"{word}, test")
                new[word] = domains.Domain(encode(few[word], y[chosen], word), shifted)
            detected.update(_detected(train, test, new, wanted.taps[-1], wanted.seed))
            for i, (name, arm) in enumerate(wanted.arms.items()):
                yield domains.recover(
                    wanted.backbone, train, test, new, {name: _options(wanted, arm)},
                    replay=replay, epochs=epochs, seed=wanted.seed,
                    progress=_counted(tell("adapting"), i, len(wanted.arms)),
                )  # fmt: skip

    arms, interrupted = until_interrupted(trained())
    found = {"shots": shots, "replay": replay, "interrupted": interrupted}
    rows = [row for arm in arms for row in arm]
    return found | {"shifts": _by_shift(words, rows, detected, _few(shots, replay), folder)}


def until_interrupted(rows: Iterator[T]) -> tuple[list[T], bool]:
    """What there is until it ends or Ctrl-C ends it, and whether that was so."""
    kept: list[T] = []
    try:
        for row in rows:
            kept.append(row)  # one by one: an interrupt leaves those before it
    except KeyboardInterrupt:
        if not kept:
            from tpsgd.cli.app import Stopped

            text = "interrupted before the first training was done; nothing was written"
            raise Stopped(text) from None
        return kept, True
    return kept, False


def _counted(told: Any, done: int, total: int) -> Any:
    """A progress within one arm as one over all of them."""
    if told is None:
        return None
    told(done, total)
    return lambda _, share: told(done + share, total)


def _by_shift(
    words: list[str], rows: "list[Recovery]", detected: dict[str, Any], after: str, folder: Path
) -> dict[str, Any]:
    """The record of every shift; its picture is drawn."""
    from tpsgd.comparison.report.recovery import draw

    found = {}
    for word in words:
        mine = [row for row in rows if row.domain == word]
        found[word] = {"arms": [row.as_dict() for row in mine], "detector": detected[word]}
        draw(mine, folder / f"{word}.png", f"{word}: {after}")
    return found


def _options(wanted: "Wanted", arm: dict[str, Any]) -> dict[str, Any]:
    left_out = {"seed", "epochs"} if "optimizer" in arm else {"seed"}  # solved: one pass
    own = {k: v for k, v in wanted.fitting.items() if k not in left_out}
    return {"taps": wanted.taps, "classes": wanted.data.classes} | own | arm


def _detected(train: Any, test: Any, new: dict[str, Any], tap: str, seed: int) -> dict[str, Any]:
    """What a detector says about each new domain that has seen no label of it."""
    from tpsgd.adapt import novelty
    from tpsgd.adapt.fitting import hold_out

    part, held = hold_out(train, seed)
    if len(held) < 19:  # too few to set a threshold by
        return dict.fromkeys(new)
    detector = novelty.mahalanobis(part.at(tap)[0], part.y).calibrate(held.at(tap)[0])
    clean = detector.score(test.at(tap)[0])
    found = {}
    for word, domain in new.items():
        features = domain.test.at(tap)[0]
        auroc = novelty.auroc(clean, detector.score(features))
        found[word] = detector.due(features)._asdict() | {"auroc": auroc}
    return found


def _few(shots: int, replay: int) -> str:
    old = f" and {replay} old ones" if replay else ""
    return f"{shots} labelled samples{old} a class"


def show(console: Console, record: dict[str, Any], folder: Path) -> None:
    """A table for every shift."""
    for word, found in record["shifts"].items():
        _show_verdict(console, word, found["detector"])
        grid = grid_of("arm", "known", f"{word} before", "after", "known after", "forgotten")
        for column in grid.columns[1:]:
            column.justify = "right"
        for row in found["arms"]:
            values = (row[k] for k in ("known_before", "new_before", "new_after", "known_after"))
            lost = 100 * row["forgotten"]
            grid.add_row(row["arm"], *(f"{v:.1%}" for v in values), f"{lost:.1f} points")
        console.print(grid)
    after = _few(record["shots"], record["replay"])
    console.print(f"\nafter: learned from {after}", markup=False)
    console.print(f"pictures and record.json: {folder}", markup=False)


def _show_verdict(console: Console, word: str, due: dict[str, Any] | None) -> None:
    if due is None:
        console.print(
            f"\n{word}: too few samples to say whether it is new (190 would)", style="bold"
        )
        return
    verdict = "adaptation is due" if due["due"] else "adaptation is not due"
    shares = f"{due['share_new']:.0%} look new, of known ones {due['expected']:.0%}"
    line = f"\n{word}: {verdict} (p {due['p_value']:.2g}): {shares}"
    console.print(line, style="bold", markup=False)
