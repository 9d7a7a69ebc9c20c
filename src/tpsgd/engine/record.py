"""What a training run leaves behind: its history, cost and settings."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpsgd.units import columns, size


@dataclass(frozen=True)
class Epoch:
    """One block's epoch. Accuracy is known where the block has a classifier."""

    block: int  # counted from 1; 0 is the whole net (backprop)
    epoch: int  # counted from 1
    loss: float
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    seconds: float = 0.0  # since training began


@dataclass(frozen=True)
class BlockInfo:
    """How one block was trained."""

    name: str
    rule: str
    parameters: int
    learning: str  # where its gradients come from, "closed form" or "autograd"; "solved", "frozen"


@dataclass
class Run:
    """The record of one training run.

    `sample_passes` counts a sample each time a block learns from it, so that a net of three blocks
    trained for five epochs has the same count under every rule and backprop. `forward_passes`
    counts the samples pushed through a trained block to make the next one's inputs.
    `peak_bytes` is the most memory held at once beyond the data set, model included;
    `kept_bytes` the inputs kept for reuse, counted apart. `resident_bytes` is what the whole
    process held at most meanwhile, Python, torch and the data set included, where the system says.
    """

    rule: str
    seed: int
    settings: dict[str, Any]
    blocks: list[BlockInfo] = field(default_factory=list)
    history: list[Epoch] = field(default_factory=list)
    seconds: float = 0.0
    setup_seconds: float = 0.0
    sample_passes: int = 0
    forward_passes: int = 0
    peak_bytes: int = 0
    kept_bytes: int = 0
    resident_bytes: int = 0

    @property
    def loss(self) -> float | None:
        """The last block's last training loss."""
        last = max((e.block for e in self.history), default=0)
        return next((e.loss for e in reversed(self.history) if e.block == last), None)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        title = (
            f"{self.rule}: {self.seconds:.2f} s"
            + (f" after {self.setup_seconds:.1f} s of preparing" if self.setup_seconds > 1 else "")
            + f", {self.sample_passes:,} sample passes, "
            f"peak {size(self.peak_bytes)}"
            + (f" + {size(self.kept_bytes)} of kept inputs" if self.kept_bytes else "")
            + (f" (process {size(self.resident_bytes)})" if self.resident_bytes else "")
        )
        rows: list[Sequence[str]] = [
            ("block", "layer", "rule", "parameters", "learning", "epochs", "loss", "accuracy")
        ]
        for number, block in enumerate(self.blocks, 1):
            epochs = [e for e in self.history if e.block in (0, number)]
            last = epochs[-1] if epochs else None
            known = last is not None and last.accuracy is not None
            rows.append(
                (
                    str(number),
                    block.name,
                    block.rule,
                    f"{block.parameters:,}",
                    block.learning,
                    str(len(epochs)),
                    f"{last.loss:.4g}" if last else "-",
                    f"{last.accuracy:.1%}" if last and known else "-",
                )
            )
        return f"{title}\n{columns(rows)}"
