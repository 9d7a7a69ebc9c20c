"""`tpsgd.fleet.server`: a Flower ServerApp around one of Flower's strategies."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from tpsgd.errors import TpsgdError, suggestion
from tpsgd.fleet.client import accuracy
from tpsgd.fleet.moments import solvable_layer
from tpsgd.fleet.report import Report
from tpsgd.fleet.ridge_round import solve_head
from tpsgd.fleet.shared_model import (
    MakeModel,
    arrays_of,
    fingerprint,
    grow_and_load,
    head_arrays,
    make_model,
)
from tpsgd.fleet.strategy import LocalLearning
from tpsgd.solvers import Ridge
from tpsgd.streams.new_classes import outputs_of

OPTIONS = ("strategy", "rounds", "seed", "classes", "evaluate", "head", "timeout", "finish")


def server(
    model: MakeModel,
    *,
    strategy: Strategy | None = None,
    rounds: int = 3,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    evaluate: Callable[[Context], Any] | None = None,
    head: Any = None,
    timeout: float = 3600.0,
    finish: Callable[[Report], Any] | None = None,
    configure: Callable[[Context], dict[str, Any]] | None = None,
) -> ServerApp:
    """A Flower app that lets clients of `tpsgd.fleet.client` learn one model together.

    Args:
        model: `context -> nn.Module`; the same function as the clients'.
        strategy: one of Flower's: `FedAvg()` (the default), `FedProx(proximal_mu=0.1)`, `FedAdam()`
            ... How many clients take part, and how many must be there, are its settings.
        rounds: of training; 0 with `head=tpsgd.ridge()` solves the head alone.
        seed: of the class codes, the initial weights and the order of samples.
        classes: the names of the model's outputs; default: "0", "1" ... New names that clients
            announce are added.
        evaluate: `context -> (x, y)`: samples of the server, for the accuracy after every round.
        head: `tpsgd.ridge()`: after the rounds, one more in which all clients send moments, from
            which the last layer is solved, as if all samples were in one place.
        timeout: seconds to wait for the clients of a round. The round goes on without the others.
        finish: called with the `Report` at the end: the model, its classes, bytes and accuracy of
            all rounds, and which updates were refused.
        configure: `context -> ` any of these settings, for those that `flwr run --run-config`
            chooses.

    Examples:
        >>> from torch import nn
        >>> def net(context):
        ...     return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> app = server(net, strategy=FedAvg(fraction_train=0.5), rounds=10)
    """
    fixed = dict(
        strategy=strategy, rounds=rounds, seed=seed, classes=classes, evaluate=evaluate, head=head,
        timeout=timeout, finish=finish,
    )  # fmt: skip
    check(fixed)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context, model, fixed | check(configure(context) if configure else {}))

    return app


def check(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings, or an error that says what is wrong with them."""
    for name in settings:
        if name not in OPTIONS:
            raise TpsgdError(f"fleet.server has no setting {name!r}: {suggestion(name, OPTIONS)}")
    strategy, head = settings.get("strategy"), settings.get("head")
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TpsgdError(
            "strategy must be one of flwr.serverapp.strategy, such as FedAvg(), got "
            f"{type(strategy).__name__}"
        )
    if head is not None and not isinstance(head, Ridge):
        raise TpsgdError("head must be tpsgd.ridge(), or None for a head that is averaged")
    rounds = settings.get("rounds", 1)
    if not isinstance(rounds, int) or rounds < (0 if head else 1):
        raise TpsgdError(f"rounds must be 1 or more (0 with head=tpsgd.ridge()), got {rounds!r}")
    return settings


def run(grid: Grid, context: Context, make: MakeModel, settings: dict[str, Any]) -> Report:
    """All rounds: the report, which `finish` is called with."""
    model = make_model(make, context, settings["seed"])
    names = [str(name) for name in settings["classes"] or range(outputs_of(model))]
    if len(set(names)) != outputs_of(model):
        raise TpsgdError(
            f"the model has {outputs_of(model)} outputs, but there are {len(set(names))} different "
            "names of classes"
        )
    inner = FedAvg() if settings["strategy"] is None else deepcopy(settings["strategy"])
    seed, frozen = settings["seed"], fingerprint(model)
    strategy = LocalLearning(inner, names, head_arrays(model), seed, frozen)
    strategy.timeout = f"{settings['timeout']:g} s"
    report = Report(model, names)
    measure = measured(report, strategy, settings["evaluate"], context)
    arrays = arrays_of(model)
    if settings["head"] is not None:
        solvable_layer(model)  # refused before the rounds
    evaluate = None if settings["evaluate"] is None else measure
    result = strategy.start(
        grid, arrays, settings["rounds"], settings["timeout"], evaluate_fn=evaluate
    )
    grow_and_load(model, result.arrays or arrays, len(strategy.classes))
    if settings["head"] is not None:
        solve_head(grid, model, strategy, settings["head"].alpha, settings["timeout"])
        measure(strategy.rounds[-1].number, arrays_of(model))
    report.classes, report.rounds, report.scales = (
        strategy.classes,
        strategy.rounds,
        strategy.scales,
    )
    if settings["finish"] is not None:
        settings["finish"](report)
    return report


def measured(
    report: Report, strategy: LocalLearning, data: Callable[[Context], Any] | None, context: Context
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """What Flower calls after every round: the accuracy on the server's samples, if it has any."""
    samples = None if data is None else data(context)

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if samples is None:
            return None
        grow_and_load(report.model, arrays, len(strategy.classes))
        share, _ = accuracy(report.model, samples, strategy.classes)
        target: Any = strategy.rounds[-1] if number else report
        target.accuracy = share
        return MetricRecord({"accuracy": share})

    return measure
