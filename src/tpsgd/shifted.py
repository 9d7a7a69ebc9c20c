"""`tpsgd adapt --shift`: adaptors on shifted pictures, before and after they learn from a few."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from .terminal import grid_of, named_bar

if TYPE_CHECKING:
    from .adapted import Wanted


def recovered(
    wanted: "Wanted", words: list[str], shots: int, replay: int, epochs: int, folder: Path
) -> dict[str, Any]:
    """Every arm on the data, on shifted data, and adapted to it; a picture for each shift."""
    from . import adapt
    from .adapt import domains, shifts
    from .adapt.features import shots as some
    from .report.recovery import draw

    (x, y), (x_test, y_test) = wanted.data.train, wanted.data.test
    chosen, new = some(y, shots, wanted.seed), {}
    with named_bar() as tell:

        def encode(x: Any, y: Any, what: str) -> Any:
            return adapt.encode(wanted.backbone, (x, y), wanted.taps, progress=tell(what))

        train, test = encode(x, y, "features"), encode(x_test, y_test, "test features")
        for word in words:
            shift = shifts.SHIFTS[word]
            few = encode(shift(x[chosen]), y[chosen], word)
            new[word] = domains.Domain(few, encode(shift(x_test), y_test, f"{word}, test"))
        told = tell("adapting")
        rows = domains.recover(
            wanted.backbone, train, test, new,
            {name: _options(wanted, arm) for name, arm in wanted.arms.items()},
            replay=replay, epochs=2 * epochs, seed=wanted.seed,
            progress=told and (lambda _, share: told(share, 1)),
        )  # fmt: skip
    found: dict[str, Any] = {"shots": shots, "replay": replay, "shifts": {}}
    detected = _detected(train, test, new, wanted.taps[-1], wanted.seed)
    for word in words:
        mine = [row for row in rows if row.domain == word]
        arms = [row.as_dict() for row in mine]
        found["shifts"][word] = {"arms": arms, "detector": detected[word]}
        draw(mine, folder / f"{word}.png", f"{word}: {shots} labelled samples a class")
    return found


def _options(wanted: "Wanted", arm: dict[str, Any]) -> dict[str, Any]:
    left_out = {"seed", "epochs"} if "optimizer" in arm else {"seed"}  # solved: one pass
    own = {k: v for k, v in wanted.fitting.items() if k not in left_out}
    return {"taps": wanted.taps, "classes": wanted.data.classes} | own | arm


def _detected(train: Any, test: Any, new: dict[str, Any], tap: str, seed: int) -> dict[str, Any]:
    """What a detector says about each new domain that has seen no label of it."""
    from .adapt import novelty
    from .adapt.training import tenth

    part, held = tenth(train, seed)
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
    replay = record["replay"]
    among = f", {replay} old ones a class among them" if replay else ""
    console.print(f"\nafter: {record['shots']} labelled samples a class of the new domain{among}")
    console.print(f"pictures and record.json: {folder}", markup=False)


def _show_verdict(console: Console, word: str, due: dict[str, Any] | None) -> None:
    if due is None:
        console.print(f"\n{word}: too few samples to say whether it is new", style="bold")
        return
    verdict = "adaptation is due" if due["due"] else "adaptation is not due"
    console.print(
        f"\n{word}: {due['share_new']:.0%} of samples look new, of known ones "
        f"{due['expected']:.0%}: {verdict}",
        style="bold",
        markup=False,
    )
