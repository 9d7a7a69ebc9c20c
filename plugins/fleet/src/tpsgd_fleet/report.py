"""What happened in the rounds: bytes, accuracy, memory, and the updates that were refused."""

from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from tpsgd.common.units import columns


@dataclass
class Round:
    """One round of messages.

    Attributes:
        number: from 1; the round that solves a ridge head comes last.
        clients: how many were asked.
        sent_bytes: from the server to all of them together.
        received_bytes: from all of them to the server.
        refused: the reason for each client, by its node id, whose update was not used.
        memory_bytes: the largest memory that training took on a client (`run.total_bytes`).
        loss: the mean training loss of the last block, weighted by samples.
        accuracy: of the averaged model on the server's data, 0..1, if it has any.
        new_classes: names that were announced in this round.
    """

    number: int
    clients: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    memory_bytes: int = 0
    loss: float | None = None
    accuracy: float | None = None
    new_classes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """The result of a fleet's training: the model, its classes and the record of all rounds.

    Attributes:
        model: with the weights of the last round.
        classes: the names of its outputs.
        rounds: in their order.
        scales: the constants that calibrated objectives share, one per block.
        accuracy: of the initial model, before the first round.
    """

    model: nn.Module
    classes: list[str]
    rounds: list[Round] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    accuracy: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """All of it but the model as plain values, ready for JSON."""
        rounds = [asdict(each) for each in self.rounds]
        values = {"classes": self.classes, "scales": self.scales, "accuracy": self.accuracy}
        return {**values, "rounds": rounds}

    def __str__(self) -> str:
        head = ["round", "clients", "refused", "bytes sent", "bytes received", "memory"]
        counts = (
            (r.number, r.clients, len(r.refused), r.sent_bytes, r.received_bytes, r.memory_bytes)
            for r in self.rounds
        )
        lines = [[f"{count:,}" for count in row] for row in counts]
        if any(r.accuracy is not None for r in self.rounds):
            shares = ["" if r.accuracy is None else f"{r.accuracy:.1%}" for r in self.rounds]
            head.append("accuracy")
            lines = [[*line, share] for line, share in zip(lines, shares, strict=True)]
        return columns([head, *lines])
