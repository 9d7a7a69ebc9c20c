"""`tpsgd_fleet.client`: a Flower ClientApp that learns with any rule on its own samples."""

# pyright: reportMissingImports=false

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from tpsgd import losses
from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import evaluate
from tpsgd.engine.fit import fit
from tpsgd.engine.record import Run
from tpsgd.engine.settings import Settings
from tpsgd.rules import resolve
from tpsgd_fleet.calibration import scales_of, with_scales
from tpsgd_fleet.classes import samples_of, shuffled
from tpsgd_fleet.proximal import near_the_server
from tpsgd_fleet.restricted_softmax import restricted_loss
from tpsgd_fleet.ridge_head import moments_of
from tpsgd_fleet.screening import WEIGHT
from tpsgd_fleet.shared_model import MakeModel, arrays_of, fingerprint, load_arrays, make_model

Config = dict[str, Any]
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
    fixed = {"epochs": 5, "method": method, "restricted_softmax": restricted_softmax, **settings}
    device = Device(model, data, test or data, configure or (lambda context: {}), fixed)
    app = ClientApp()
    app.train()(answering(device.train))
    app.train("moments")(answering(device.moments))
    app.evaluate()(answering(device.evaluate))
    return app


def answering(handler: Callable[[Message, Context], RecordDict]) -> Callable[..., Message]:
    """A handler of messages whose mistakes become replies with a sentence."""

    def answer(message: Message, context: Context) -> Message:
        try:
            return Message(handler(message, context), reply_to=message)
        except TpsgdError as error:
            return Message(Error(REFUSED, str(error)), reply_to=message)

    return answer


@dataclass(frozen=True)
class Device:
    """What a client does with each kind of message; the fields are arguments of `client`."""

    model: MakeModel
    data: Callable[[Context], Any]
    test: Callable[[Context], Any]
    configure: Callable[[Context], dict[str, Any]]
    settings: dict[str, Any]

    def train(self, message: Message, context: Context) -> RecordDict:
        """Learn from the samples for a round: the weights, and how it went."""
        key, arrays, config = task_of(message)
        model = self.server_model(arrays, config, context)
        samples = samples_of(self.data(context), config["classes"])
        metrics, scales = {WEIGHT: samples.count, "loss": 0.0, "memory-bytes": 0}, []
        if samples.count:
            data = shuffled(samples.data, config["seed"], config["server-round"])
            run = self.fit(model, data, config, self.settings | self.configure(context))
            metrics |= {"loss": float(run.loss or 0.0), "memory-bytes": run.total_bytes}
            scales = scales_of(run)
        return reply(key, arrays_of(model), metrics, samples.new, scales)

    def fit(self, model: nn.Module, data: Any, config: Config, settings: Config) -> Run:
        """Train with the seed, the calibration and the proximal term of the server."""
        settings = {"progress": False, **settings, "seed": config["seed"]}
        method = settings.pop("method")
        if settings.pop("restricted_softmax"):
            settings["loss"] = restricted_loss(settings.get("loss"), data, len(config["classes"]))
        if scales := config.get("scales"):
            settings["rule"] = with_scales(settings.get("rule"), list(scales))
        if mu := config.get("proximal-mu"):
            settings["optimizer"] = near_the_server(settings.get("optimizer"), mu)
        with warnings.catch_warnings():  # a client need not have samples of every class
            warnings.filterwarnings("ignore", r".* classes have no samples", UserWarning)
            return method(model, data, **settings)

    def moments(self, message: Message, context: Context) -> RecordDict:
        """The sums over all samples that a ridge head is solved from, new classes included."""
        _, arrays, config = task_of(message)
        model, data = self.server_model(arrays, config, context), self.data(context)
        new = samples_of(data, config["classes"]).new
        names = [*config["classes"], *new]
        samples = samples_of(data, names)
        loss = losses.resolve((self.settings | self.configure(context)).get("loss"))
        sums = moments_of(model, samples.data, len(names), loss)
        return reply("moments", sums, {WEIGHT: samples.count}, new)

    def evaluate(self, message: Message, context: Context) -> RecordDict:
        """The accuracy of the server's model on this client's samples."""
        _, arrays, config = task_of(message)
        model = self.server_model(arrays, config, context)
        share, total = accuracy(model, self.test(context), config["classes"])
        return RecordDict({"metrics": MetricRecord({WEIGHT: total, "accuracy": share})})

    def server_model(self, arrays: ArrayRecord, config: Config, context: Context) -> nn.Module:
        """The model with the weights of a message."""
        model = make_model(self.model, context, config["seed"], len(config["classes"]))
        if fingerprint(model) != config.get("frozen", ""):
            raise TpsgdError(
                "the frozen weights, which do not travel, are not those of the server: the model's "
                "function must make the same from torch's seed, or load them from the same file"
            )
        load_arrays(model, arrays)
        return model


def reply(
    key: str, arrays: ArrayRecord, metrics: dict[str, Any], new: list[str], scales: Any = ()
) -> RecordDict:
    """The arrays and metrics of a client, the classes that it announces and its calibration."""
    local = {name: values for name, values in (("new-classes", new), ("scales", scales)) if values}
    records = {"metrics": MetricRecord(metrics), "local": ConfigRecord(local)}
    return RecordDict({key: arrays, **records})


def task_of(message: Message) -> tuple[str, ArrayRecord, Config]:
    """The key of the arrays in a message of `tpsgd_fleet.server`, the arrays, the configuration."""
    records, configs = message.content.array_records, message.content.config_records
    config = {name: value for each in configs.values() for name, value in each.items()}
    if len(records) != 1 or not {"server-round", "seed", "classes"} <= set(config):
        problem = "the server's message lacks weights, a seed or classes"
        raise TpsgdError(f"{problem}: make its app by tpsgd_fleet.server")
    ((key, arrays),) = records.items()
    return key, arrays, config


def accuracy(model: nn.Module, data: Any, classes: list[str]) -> tuple[float, int]:
    """The share of samples that are right, and their number; unknown classes count as wrong."""
    samples = samples_of(data, classes)
    total = len(data[1]) if samples.new else samples.count
    if not total:
        raise TpsgdError("there are no samples to evaluate on")
    right = evaluate(model, samples.data) * samples.count if samples.count else 0.0
    return right / total, total
