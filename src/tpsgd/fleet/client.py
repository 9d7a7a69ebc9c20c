"""`tpsgd.fleet.client`: a Flower ClientApp that learns with any rule on its own samples."""

# pyright: reportMissingImports=false

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.errors import TpsgdError
from tpsgd.fleet import moments
from tpsgd.fleet.calibration import scales_of, with_scales
from tpsgd.fleet.classes import in_order_of, samples_of
from tpsgd.fleet.proximal import near_the_server
from tpsgd.fleet.restricted_softmax import restricted_loss
from tpsgd.fleet.screening import WEIGHT
from tpsgd.fleet.shared_model import MakeModel, arrays_of, fingerprint, load_arrays, make_model
from tpsgd.rules import resolve
from tpsgd.training.evaluate import evaluate
from tpsgd.training.fit import fit

REFUSED = 100  # Flower's codes of errors are smaller


def client(
    model: MakeModel,
    data: Callable[[Context], Any],
    *,
    test: Callable[[Context], Any] | None = None,
    method: Callable[..., Run] = fit,
    restricted_softmax: bool = False,
    configure: Callable[[Context], dict[str, Any]] | None = None,
    **settings: Any,
) -> ClientApp:
    """A Flower app of a device that learns with any rule, on samples that never leave it.

    In every round it takes the weights of the server, trains with `tpsgd.fit` and sends its weights
    back. Optimizers, and class codes that learn, start anew in every round. A mistake in the
    settings or the data is sent to the server as one sentence; the round goes on without this
    client.

    Args:
        model: `context -> nn.Module`; the same function as the server's.
        data: `context -> (x, y)`, the device's own samples, as for `tpsgd.fit`. Labels are class
            indices or names; those that the server does not know are announced as new classes.
            `context.node_config["partition-id"]` numbers the clients of a simulation. It is called
            in every round.
        test: `context -> (x, y)`, for Flower's federated evaluation; default: `data`.
        method: `tpsgd.fit`, or `tpsgd.fit_backprop` to compare with.
        restricted_softmax: leave the classes that the device has no samples of out of the
            cross-entropy, on the last block and in the local classifiers of `readout`. For devices
            with few classes.
        configure: `context -> ` more settings, `method` and `restricted_softmax` included, for
            those that `flwr run --run-config` chooses.
        **settings: those of `tpsgd.fit`: `rule`, `epochs`, `batch_size`, `memory="64MB"` ... The
            seed is the server's, and a round has 5 epochs by default.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> def net(context):
        ...     return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> def samples(context):
        ...     return torch.randn(64, 8), torch.arange(64) % 2
        >>> app = client(net, samples, epochs=1, memory="1MB")
    """
    if "seed" in settings:
        raise TpsgdError("the seed is the server's, the same for all clients: leave out seed=")
    resolve(settings.get("rule"))
    Settings.of("fleet.client", {k: v for k, v in settings.items() if k != "rule"})
    settings = {"epochs": 5, **settings}
    settings |= {"method": method, "restricted_softmax": restricted_softmax}
    device = Device(model, data, test or data, configure or (lambda _: {}), settings)
    app = ClientApp()
    for register, handler in (
        (app.train(), device.train),
        (app.train("moments"), device.moments),
        (app.evaluate(), device.evaluate),
    ):
        register(answering(handler))
    return app


def answering(handler: Callable[[Message, Context], RecordDict]) -> Callable[..., Message]:
    """A handler of messages whose mistakes become replies with a sentence."""

    def answer(message: Message, context: Context) -> Message:
        try:
            return Message(handler(message, context), reply_to=message)
        except TpsgdError as error:
            return Message(Error(REFUSED, str(error)), reply_to=message)

    return answer


class Device:
    """What a client does with each kind of message."""

    def __init__(
        self,
        model: MakeModel,
        data: Callable[[Context], Any],
        test: Callable[[Context], Any],
        configure: Callable[[Context], dict[str, Any]],
        settings: dict[str, Any],
    ) -> None:
        self.model, self.data, self.test = model, data, test
        self.configure, self.settings = configure, settings

    def train(self, message: Message, context: Context) -> RecordDict:
        """Learn from the samples for a round: the weights, and how it went."""
        task = Task.of(message)
        model = self.server_model(task, context)
        samples = samples_of(self.data(context), task.classes)
        metrics, local = {WEIGHT: samples.count, "loss": 0.0, "memory-bytes": 0}, {}
        if samples.count:
            data = in_order_of(samples, task.seed, task.number)
            run = self.fit(model, data, task, self.settings | self.configure(context))
            metrics |= {"loss": float(run.loss or 0.0), "memory-bytes": run.total_bytes}
            local["scales"] = scales_of(run)
        local["new-classes"] = samples.new
        return RecordDict(
            {
                task.key: arrays_of(model),
                "metrics": MetricRecord(metrics),
                "local": ConfigRecord({name: each for name, each in local.items() if each}),
            }
        )

    def fit(self, model: nn.Module, data: Any, task: "Task", settings: dict[str, Any]) -> Run:
        """Train with the seed, the calibration and the proximal term of the server."""
        settings = {"progress": False, **settings, "seed": task.seed}
        method = settings.pop("method")
        if settings.pop("restricted_softmax"):
            settings["loss"] = restricted_loss(settings.get("loss"), data, len(task.classes))
        if task.scales:
            settings["rule"] = with_scales(settings.get("rule"), task.scales)
        if task.mu:
            settings["optimizer"] = near_the_server(settings.get("optimizer"), task.mu)
        with warnings.catch_warnings():  # a client need not have samples of every class
            warnings.filterwarnings("ignore", r".* classes have no samples", UserWarning)
            return method(model, data, **settings)

    def moments(self, message: Message, context: Context) -> RecordDict:
        """The sums over all samples that a ridge head is solved from, new classes included."""
        task, data = Task.of(message), self.data(context)
        model = self.server_model(task, context)
        new = samples_of(data, task.classes).new
        names = [*task.classes, *new]
        samples = samples_of(data, names)
        loss = (self.settings | self.configure(context)).get("loss")
        sums = moments.moments_of(model, samples.data, len(names), loss)
        return RecordDict(
            {
                "moments": moments.as_arrays(sums),
                "metrics": MetricRecord({WEIGHT: samples.count}),
                "local": ConfigRecord({"new-classes": new} if new else {}),
            }
        )

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """The accuracy of the server's model on this client's samples."""
        task = Task.of(message)
        model = self.server_model(task, context)
        share, total = accuracy(model, self.test(context), task.classes)
        return RecordDict({"metrics": MetricRecord({WEIGHT: total, "accuracy": share})})

    def server_model(self, task: "Task", context: Context) -> nn.Module:
        """The model with the weights of a message."""
        model = make_model(self.model, context, task.seed, len(task.classes))
        if fingerprint(model) != task.frozen:
            raise TpsgdError(
                "the frozen weights, which do not travel, are not those of the server: the model's "
                "function must make the same from torch's seed, or load them from the same file"
            )
        load_arrays(model, task.arrays)
        return model


class Task(NamedTuple):
    """What a message of `tpsgd.fleet.server` asks for."""

    key: str  # of the arrays
    arrays: ArrayRecord
    number: int  # of the round, from 1
    seed: int
    classes: list[str]
    scales: list[float]  # of the calibration, one per block; empty in the first round
    mu: float  # the weight of FedProx's term
    frozen: str  # the fingerprint of the weights that do not travel

    @classmethod
    def of(cls, message: Message) -> "Task":
        """The task of a message, or an error that says what is missing in it."""
        try:
            ((key, arrays),) = message.content.array_records.items()
            (record,) = message.content.config_records.values()
        except ValueError:
            raise TpsgdError("a message must have one array record and one config record") from None
        config: dict[str, Any] = dict(record)
        if missing := {"server-round", "seed", "classes"} - set(config):
            names = ", ".join(sorted(missing))
            raise TpsgdError(f"the server sent no {names}: make its app by tpsgd.fleet.server")
        shared = config["server-round"], config["seed"], list(config["classes"])
        scales, mu = list(config.get("scales", [])), config.get("proximal-mu", 0.0)
        return cls(key, arrays, *shared, scales, mu, config.get("frozen", ""))


def accuracy(model: nn.Module, data: Any, classes: list[str]) -> tuple[float, int]:
    """The share of samples that are right, and their number; unknown classes count as wrong."""
    samples = samples_of(data, classes)
    total = len(data[1]) if samples.new else samples.count
    if not total:
        raise TpsgdError("there are no samples to evaluate on")
    right = evaluate(model, samples.data) * samples.count if samples.count else 0.0
    return right / total, total
