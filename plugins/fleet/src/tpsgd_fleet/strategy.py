"""`LocalLearning`: one of Flower's strategies, and what clients that learn locally need.

Sampling and averaging are the strategy's own (FedAvg, FedProx, FedAdam ...). Around it:

- every message has the seed of the class codes, the names of the classes and, from the second round
  on, the constants of the calibration: the blocks of all clients learn the same objectives;
- replies that would spoil the average are left out, and the log says why;
- classes that clients announce get a row of zeros in the last layer after the round.
"""

# pyright: reportMissingImports=false

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from tpsgd_fleet import screening
from tpsgd_fleet.calibration import combined
from tpsgd_fleet.report import Round
from tpsgd_fleet.screening import WEIGHT, metrics_of
from tpsgd_fleet.shared_model import with_rows

log = logging.getLogger("flwr")


class LocalLearning(Strategy):
    """A strategy of Flower for clients made by `tpsgd_fleet.client`.

    Args:
        strategy: samples clients and averages their updates: `FedAvg()`, `FedProx(...)` ...
        classes: the names of the model's outputs.
        head: the names of the arrays with a row for each class.
        seed: of the class codes, the model's initial weights and the order of samples.
        frozen: the fingerprint of the weights that do not travel.

    Attributes:
        rounds: what happened in each round.
        scales: the constants of the calibration; empty before the first round, and for rules
            without one.
    """

    def __init__(
        self,
        strategy: Strategy,
        classes: list[str],
        head: set[str],
        seed: int = 0,
        frozen: str = "",
    ) -> None:
        self.strategy, self.classes, self.head = strategy, list(classes), head
        self.seed, self.frozen = seed, frozen
        self.rounds: list[Round] = []
        self.scales: list[float] = []
        self.timeout = "the time limit"
        self.sent = ArrayRecord()  # in this round
        self.asked: list[int] = []  # the node ids of this round

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Local learning: seed %s, %s classes", self.seed, len(self.classes))
        self.strategy.summary()

    def shared(self) -> dict[str, Any]:
        """What every message's configuration has, so that all clients mean the same."""
        settings = {"seed": self.seed, "classes": self.classes, "frozen": self.frozen}
        return settings | ({"scales": self.scales} if self.scales else {})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a round."""
        config.update(self.shared())
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.open_round(server_round, arrays, messages)
        return messages

    def open_round(self, number: int, arrays: ArrayRecord, messages: list[Message]) -> None:
        """Begin the record of a round whose messages are ready to be sent."""
        self.sent, self.asked = arrays, [m.metadata.dst_node_id for m in messages]
        self.rounds.append(Round(number, len(messages), sum(map(array_bytes, messages))))

    def screened(self, replies: Iterable[Message], *checks: screening.Check) -> list[Message]:
        """The replies that can be used; the log and the record have the reasons for the others."""
        record, by_node = self.rounds[-1], {m.metadata.src_node_id: m for m in replies}
        record.received_bytes += sum(map(array_bytes, by_node.values()))
        silent = set(self.asked) - set(by_node)
        refused = {node: f"no reply within {self.timeout}" for node in self.asked if node in silent}
        for node, message in by_node.items():
            if reason := screening.refusal(message, checks):
                refused[node] = reason
        for node, reason in refused.items():
            log.warning("refused: node %s in round %s: %s", node, record.number, reason)
        record.refused = refused
        return [by_node[node] for node in sorted(by_node) if node not in refused]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The strategy's average of the usable replies, with rows for new classes."""
        usable = self.screened(
            replies,
            screening.has_metrics("loss", "memory-bytes"),
            screening.has_arrays({name: array.shape for name, array in self.sent.items()}),
            screening.announces_well,
        )
        learned = [m for m in usable if metrics_of(m.content)[WEIGHT] > 0]
        arrays, metrics = self.strategy.aggregate_train(server_round, learned)
        record = self.rounds[-1]
        if metrics is not None:
            record.loss = float(metrics["loss"])  # type: ignore[arg-type]
            record.memory_bytes = max(int(metrics_of(m.content)["memory-bytes"]) for m in learned)
        if not self.scales:
            self.scales = shared_scales(learned)
        names = (name for m in usable for name in screening.announced(m.content))
        record.new_classes = sorted(set(names) - set(self.classes))
        if record.new_classes:
            arrays = self.with_classes(self.sent if arrays is None else arrays, record.new_classes)
        return arrays, metrics

    def with_classes(self, arrays: ArrayRecord, names: list[str]) -> ArrayRecord:
        """The arrays with a row of zeros for each new class; so has the strategy's state."""
        log.info("new classes: %s", ", ".join(names))
        self.classes = [*self.classes, *names]
        rows = len(self.classes)
        for state in vars(self.strategy).values():  # the moments of FedAdam, for example
            if isinstance(state, dict) and self.head <= set(state):
                state.update({name: with_rows(np.asarray(state[name]), rows) for name in self.head})
        grown = {name: Array(with_rows(arrays[name].numpy(), rows)) for name in self.head}
        return ArrayRecord({name: grown.get(name, array) for name, array in arrays.items()})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages that ask clients for the accuracy on their own samples."""
        config.update(self.shared())
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The strategy's mean of the usable accuracies."""
        usable, checks = [], [screening.has_metrics("accuracy")]
        for message in replies:
            if reason := screening.refusal(message, checks):
                node = message.metadata.src_node_id
                log.warning("evaluation of node %s is left out: %s", node, reason)
            else:
                usable.append(message)
        return self.strategy.aggregate_evaluate(server_round, usable)


def shared_scales(replies: list[Message]) -> list[float]:
    """One calibration, of the clients that measured the most common number of blocks."""
    contents = [message.content for message in replies]
    pairs = [(screening.measured_scales(c), int(metrics_of(c)[WEIGHT])) for c in contents]
    lengths = [len(scales) for scales, _ in pairs]
    common = max(lengths, key=lengths.count, default=0)
    return combined(pair for pair in pairs if len(pair[0]) == common)


def array_bytes(message: Message) -> int:
    """The bytes of a message's arrays; its few numbers and names are not counted."""
    records = message.content.array_records.values() if message.has_content() else ()
    return sum(len(array.data) for arrays in records for array in arrays.values())
