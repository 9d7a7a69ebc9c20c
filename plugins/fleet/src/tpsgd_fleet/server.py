"""`tpsgd_fleet.server`: a Flower ServerApp around one of Flower's strategies."""

# pyright: reportMissingImports=false

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.solvers import Ridge
from tpsgd.nets.new_classes import outputs_of
from tpsgd_fleet.client import accuracy
from tpsgd_fleet.report import Report
from tpsgd_fleet.ridge_head import solvable_layer, solve_head
from tpsgd_fleet.shared_model import (
    MakeModel,
    arrays_of,
    fingerprint,
    head_arrays,
    load_arrays,
    make_model,
)
from tpsgd_fleet.strategy import LocalLearning


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
    """A Flower app that lets clients of `tpsgd_fleet.client` learn one model together.

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
    check(strategy, rounds, head)
    fixed: dict[str, Any] = dict(
        strategy=strategy, rounds=rounds, seed=seed, classes=classes, evaluate=evaluate, head=head,
        timeout=timeout, finish=finish,
    )  # fmt: skip
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, context, model, **(fixed | (configure(context) if configure else {})))

    return app


def check(strategy: Any, rounds: Any, head: Any) -> None:
    """Refuse settings with which no round could begin."""
    if strategy is not None and not isinstance(strategy, Strategy):
        name = type(strategy).__name__
        raise TpsgdError(f"strategy must be one of Flower's, such as FedAvg(), got {name}")
    if head is not None and not isinstance(head, Ridge):
        raise TpsgdError("head must be tpsgd.ridge(), or None for a head that is averaged")
    if not isinstance(rounds, int) or rounds < (0 if head else 1):
        raise TpsgdError(f"rounds must be 1 or more (0 with head=tpsgd.ridge()), got {rounds!r}")


def run(
    grid: Grid, context: Context, make: MakeModel, *, strategy: Any, rounds: int, seed: int,
    classes: Any, evaluate: Any, head: Any, timeout: float, finish: Any,
) -> None:  # fmt: skip
    """All rounds; `finish` is called with the report."""
    check(strategy, rounds, head)
    model = make_model(make, context, seed)
    outputs = outputs_of(model)
    names = [str(name) for name in classes or range(outputs)]
    if (count := len(set(names))) != outputs:
        raise TpsgdError(f"the model has {outputs} outputs, but there are {count} class names")
    inner = FedAvg() if strategy is None else deepcopy(strategy)
    learning = LocalLearning(inner, names, head_arrays(model), seed, fingerprint(model))
    learning.timeout = f"{timeout:g} s"
    report, samples = Report(model, names), evaluate(context) if evaluate else None

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord:
        load_arrays(model, arrays, len(learning.classes))
        share, _ = accuracy(model, samples, learning.classes)
        target: Any = learning.rounds[-1] if number else report
        target.accuracy = share
        return MetricRecord({"accuracy": share})

    if head:
        solvable_layer(model)  # refused before the rounds
    arrays, measured = arrays_of(model), measure if evaluate else None
    result = learning.start(grid, arrays, rounds, timeout, evaluate_fn=measured)
    load_arrays(model, result.arrays or arrays, len(learning.classes))
    if head:
        solve_head(grid, model, learning, head.alpha, timeout)
        if measured:
            measured(learning.rounds[-1].number, arrays_of(model))
    report.classes, report.rounds = learning.classes, learning.rounds
    report.scales = learning.scales
    if finish:
        finish(report)
