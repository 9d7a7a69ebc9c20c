"""`study`: a search beyond the grid, by Optuna, which several processes or machines can share.

Akiba, Sano, Yanase, Ohta & Koyama, "Optuna: A Next-generation Hyperparameter Optimization
Framework" (2019); its sampler, TPE: Bergstra et al. (2011).
"""

import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpsgd.adapt.backbone import Backbone
from tpsgd.adapt.heads import Layers
from tpsgd.adapt.trials import Judge, Tell, judge, named
from tpsgd.engine.fit import fit as fit_locally
from tpsgd.engine.record import Run
from tpsgd.errors import TpsgdError
from tpsgd.memory.plan import short
from tpsgd.rules import Rule, tpsgd_l2
from tpsgd.units import as_bytes, columns, size


@dataclass(frozen=True)
class Space:
    """What may be chosen; a kind with one value is not searched."""

    convs: Sequence[int] = (0, 1, 2)
    dense: Sequence[int] = (0, 1, 2)
    filters: Sequence[int] = (16, 32, 64)
    kernel: Sequence[int] = (3, 5)
    width: Sequence[int] = (64, 128, 256, 512)
    batch_size: Sequence[int] = (32, 64, 128)
    lr: tuple[float, float] = (1e-4, 1e-2)  # from, to; on a scale of logarithms


@dataclass(frozen=True)
class Tried:
    """One trial of a study. `why` is what Optuna pruned or failed it for."""

    number: int
    state: str
    choices: dict[str, Any]
    accuracy: float | None = None
    planned_bytes: int | None = None
    why: str = ""

    @property
    def layers(self) -> Layers:
        """The layers that were chosen."""
        own = {k: v for k, v in self.choices.items() if k in vars(Layers())}
        return Layers(**{"convs": 0, "dense": 0, **own})

    def __str__(self) -> str:
        chosen = {k: f"{v:.2g}" if isinstance(v, float) else v for k, v in self.choices.items()}
        return f"trial {self.number} ({', '.join(f'{k} {v}' for k, v in chosen.items())})"


@dataclass(frozen=True)
class Study:
    """A study as it stands, with all that other processes have added to it."""

    name: str
    trials: tuple[Tried, ...]
    memory_budget: int | None = None

    def best(self) -> Tried:
        """The most accurate trial that is finished."""
        known = [t for t in self.trials if t.accuracy is not None]
        if not known:
            raise TpsgdError(f"no trial of study {self.name!r} has been trained to its end")
        return max(known, key=lambda t: (t.accuracy or 0.0, -(t.planned_bytes or 0)))

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        trials = [vars(t) for t in self.trials]
        return {"name": self.name, "trials": trials, "memory_budget": self.memory_budget}

    def __str__(self) -> str:
        head = ("trial", "tap", "layers", "batch", "lr", "rule", "planned", "held-out")
        failed = [f"trial {t.number} failed: {t.why}" for t in self.trials if t.state == "fail"]
        table = columns([head, *map(_cells, self.trials)])
        return "\n".join([table, *(textwrap.fill(line, 80) for line in failed)])


def study(
    backbone: Backbone,
    data: Any,
    *,
    taps: str | Sequence[str],
    trials: int,
    space: Space = Space(),  # noqa: B008 (a frozen value)
    rules: Sequence[Rule] = (tpsgd_l2(),),
    storage: Any = None,
    name: str = "tpsgd",
    memory_budget: str | int | None = None,
    method: Callable[..., Run] = fit_locally,
    classes: int | Sequence[str] | None = None,
    held_out: float = 0.2,
    seed: int = 0,
    progress: Tell | None = None,
    **options: Any,
) -> Study:
    """Let Optuna choose tap, layers, rule, learning rate and batch size by held-out accuracy.

    Args:
        backbone: as for `search`, like `data`, `taps`, `method`, `classes` and `held_out`.
        trials: how many the study is to have in all, those that are in the storage included; a
            few more where several processes end at once.
        space: what may be chosen.
        rules: which may be chosen, by their names.
        storage: "sqlite:///FILE" or another address that Optuna knows, a path (its journal file),
            or a storage of its own; in memory if None.
        name: of the study in its storage. The same name goes on with it, from any process.
        memory_budget: what plans above it is pruned and not trained.
        seed: of the split, the weights and the choices. Processes that share a study should differ
            in it, or they begin with the same choices: the split is always that of seed 0.
        options: as for `fit`: epochs, ...

    Needs Optuna: pip install tpsgd[search].
    """
    optuna = _library()
    names = [taps] if isinstance(taps, str) else list(taps)
    by_name = {rule.name: rule for rule in rules}
    _check(backbone, names, trials, rules, by_name, space)
    limit = None if memory_budget is None else as_bytes(memory_budget)
    known = judge(
        backbone, data, names, classes=classes, method=method, options=options, held_out=held_out,
        seed=0, tell=progress,
    )  # fmt: skip
    found = _opened(optuna, storage, name)
    _check_same(found, known, names, space, by_name)
    done = len(_ended(found.trials))
    found.sampler = optuna.samplers.TPESampler(seed=seed + 7919 * done, constant_liar=True)

    def told(*_: Any) -> None:
        if progress is not None:
            progress("trials", min(trials, len(_ended(found.trials))), trials)

    if done < trials:
        wish = _objective(optuna, known, names, space, by_name, limit, seed)
        kinds = tuple(state for state in optuna.trial.TrialState if state.is_finished())
        enough = optuna.study.MaxTrialsCallback(trials, states=kinds)
        found.optimize(wish, n_trials=trials - done, callbacks=[told, enough], catch=(TpsgdError,))
    return Study(name, tuple(map(_tried, found.trials)), limit)


def _objective(
    optuna: Any,
    known: Judge,
    taps: list[str],
    space: Space,
    rules: dict[str, Rule],
    limit: int | None,
    seed: int,
) -> Callable[[Any], float]:
    """The held-out accuracy of what a trial chooses."""

    def worth(trial: Any) -> float:
        tap, layers, more = _choices(trial, known, taps, space, rules)
        one = replace(known, options=known.options | more, seed=seed)
        planned = one.planned(tap, one.head(tap, layers), layers)
        trial.set_user_attr("planned_bytes", planned)
        if limit is not None and (planned is None or planned > limit):
            needs = "its bytes are not known" if planned is None else f"plans {size(planned)}"
            trial.set_user_attr("why", f"{needs}, above the budget of {size(limit)}")
            raise optuna.TrialPruned
        return one.trial(tap, layers, seed).accuracy

    def wish(trial: Any) -> float:
        try:
            return worth(trial)
        except TpsgdError as error:
            trial.set_user_attr("why", str(error))
            raise

    return wish


def _choices(
    trial: Any, known: Judge, taps: list[str], space: Space, rules: dict[str, Rule]
) -> tuple[str, Layers, dict[str, Any]]:
    """What a trial chooses: only what plays a part in it."""

    def one(name: str, values: Sequence[Any]) -> Any:
        return trial.suggest_categorical(name, list(values))

    tap = one("tap", taps)
    maps = known.train.x[tap].dim() > 2
    chosen = {"convs": one("convs", space.convs) if maps else 0, "dense": one("dense", space.dense)}
    if chosen["convs"]:
        chosen |= {"filters": one("filters", space.filters), "kernel": one("kernel", space.kernel)}
    if chosen["dense"]:
        chosen |= {"width": one("width", space.width)}
    more: dict[str, Any] = {"batch_size": one("batch_size", space.batch_size)}
    more |= {"lr": trial.suggest_float("lr", *space.lr, log=True)}
    if known.method is fit_locally:
        more |= {"rule": rules[one("rule", list(rules))]}
    return tap, Layers(**chosen), more


def _check(
    backbone: Backbone, taps: list[str], trials: int, rules: Any, by_name: Any, space: Space
) -> None:
    for tap in taps:
        backbone.path(tap)
    if not isinstance(trials, int) or trials < 1:
        raise TpsgdError(f"trials must be a whole number, 1 or more, got {trials!r}")
    low, high = space.lr
    if not all(map(len, vars(space).values())) or not 0 < low <= high:
        raise TpsgdError(f"a space needs a value of each kind, and rates above 0: {space}")
    if not rules or len(by_name) < len(rules):
        raise TpsgdError(f"give one rule or more, of different names: {[r.name for r in rules]}")


def _check_same(found: Any, known: Judge, taps: list[str], space: Space, rules: Any) -> None:
    """Refuse to go on with a study of other data or choices."""
    key = known.key(taps[0], Layers(), 0)
    given = {k: v for k, v in key.items() if k not in ("tap", "layers", "data")}
    given |= {k: named(v) for k, v in vars(space).items()} | {"taps": taps}
    given |= {"rules": named(list(rules.values())), "data": known.digest}
    before = found.user_attrs.get("given")
    if before is None:
        found.set_user_attr("given", given)
        return
    if other := [k for k in {**given, **before} if given.get(k) != before.get(k)]:
        raise TpsgdError(
            f"study {found.study_name!r} has other {', '.join(other)}: choose another name for "
            "this one, or give what it was begun with"
        )


def _opened(optuna: Any, storage: Any, name: str) -> Any:
    """The study in its storage; where a path is given, that is Optuna's own journal."""
    place = storage
    if isinstance(storage, Path) or (isinstance(storage, str) and "://" not in storage):
        file = Path(storage).expanduser()
        if not file.parent.is_dir():
            raise TpsgdError(f"cannot keep a study in {file}: there is no folder {file.parent}")
        journal = optuna.storages.journal.JournalFileBackend(str(file))
        place = optuna.storages.JournalStorage(journal)
    for wait in (0.2, 1.0, 0.0):
        try:
            return optuna.create_study(
                storage=place, study_name=name, direction="maximize", load_if_exists=True
            )
        except Exception as error:  # of whatever library opens the address
            if not wait or type(error).__name__ != "OperationalError":
                why = str(error).splitlines()[0]
                raise TpsgdError(f"cannot open the study in {storage}: {why}") from error
            time.sleep(wait)  # another process may be making its tables


def _ended(trials: Sequence[Any]) -> list[Any]:
    return [t for t in trials if t.state.is_finished()]


def _tried(trial: Any) -> Tried:
    notes = trial.user_attrs
    return Tried(
        trial.number, trial.state.name.lower(), dict(trial.params), trial.value,
        notes.get("planned_bytes"), notes.get("why", ""),
    )  # fmt: skip


def _cells(t: Tried) -> tuple[str, ...]:
    """A row of the table."""
    c = {"tap": "-", "batch_size": "-", "rule": "-", "lr": 0.0, **t.choices}
    convs = [f"{c['convs']}x{c['filters']}x{c['kernel']}"] if c.get("convs") else []
    dense = [f"{c['dense']}x{c['width']}"] if c.get("dense") else []
    found = t.state if t.accuracy is None else f"{100 * t.accuracy:.1f}"
    made = ", ".join(convs + dense) or "linear"
    middle = (made, str(c["batch_size"]), f"{c['lr']:.1e}", c["rule"][:10])
    return (str(t.number), c["tap"][-10:], *middle, short(t.planned_bytes or 0), found)


def _library() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise TpsgdError("a study needs Optuna: pip install tpsgd[search]") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
