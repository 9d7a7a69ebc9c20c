"""The record of a training run, and the observers that write it and show progress."""

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.common.names import printable, safe
from tpsgd.common.units import columns, size
from tpsgd.engine.learners.learner import validate
from tpsgd.engine.settings import EarlyStopping
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.batches import depth
from tpsgd.maths.kernels.epoch_figures import EpochFigures
from tpsgd.objectives import Signal
from tpsgd.saved import trained
from tpsgd.train import Epoch, EpochEnd, Learner, Observer

LOWER_RATE = "lower its learning rate or bound its activation"
SCALE_INPUTS = (
    "its inputs or targets are too large for its equations: scale them, or raise the penalty"
)
LARGE_INPUT = 1e3  # of a block whose loss broke: the likely reason
COUNTED = "tpsgd.plan counts backprop's memory"


@dataclass(frozen=True)
class BlockInfo:
    """How one block was trained."""

    name: str
    rule: str
    parameters: int
    learning: str  # where its gradients come from, "closed form" or "autograd"; "solved", "frozen"
    scale: float | None = None  # what a calibrated objective multiplies the block's features by


@dataclass
class Run:
    """The record of one training run.

    `sample_passes` counts a sample each time a block learns from it, so that a net of three blocks
    trained for five epochs has the same count under every rule and backprop. `forward_passes`
    counts a sample each time a trained block computes an input of the next block.
    `total_bytes` is the memory that training takes beyond the data set: `peak_bytes`, the model
    included, and `kept_bytes`, the inputs kept for reuse (0: not measured). `resident_bytes` is the
    peak of the whole process, Python, torch and the data set included; 0 where the system does not
    tell.
    `memory_choice` says how `fit` kept its memory below backprop's, or why it could not; `memory`
    is the same without backprop's bytes, which take a moment to count.
    `length` says how long it trained, if that was chosen from the data.
    `hint` is a sentence on a last block that is no better than guessing, usually empty.
    `model` is the model that was trained.
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
    memory: str = field(default="", compare=False)
    length: str = ""
    hint: str = ""
    model: Any = field(default=None, repr=False, compare=False)
    predicting: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)
    backprop: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def predictor(self) -> Any:
        """The model, or the module with its logits that its rule makes of it."""
        return self.model if self.predicting is None else self.predicting(self.model)

    @property
    def memory_choice(self) -> str:
        """`memory`, and what backprop would take, counted when it is first asked for."""
        count, self.backprop = self.backprop, None
        if count is not None:
            self.memory = _joined(self.memory, count())
        return self.memory

    @property
    def loss(self) -> float | None:
        """The last block's last training loss."""
        last = max((e.block for e in self.history), default=0)
        return next((e.loss for e in reversed(self.history) if e.block == last), None)

    @property
    def total_bytes(self) -> int:
        """The memory of training: the peak and the inputs kept for reuse."""
        return self.peak_bytes + self.kept_bytes

    def as_dict(self) -> dict[str, Any]:
        """All of it but the model as plain values, ready for JSON."""
        values = asdict(self.without_model())
        del values["model"], values["predicting"], values["backprop"]
        return values | {"memory_choice": values.pop("memory"), "total_bytes": self.total_bytes}

    def without_model(self) -> "Run":
        """The record alone, which keeps no model in memory; backprop's bytes are not counted."""
        memory = _joined(self.memory, COUNTED if self.backprop else "")
        return replace(self, model=None, predicting=None, backprop=None, memory=memory)

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle has: no functions."""
        functions = {"predicting": None, "backprop": None}
        return vars(self) | functions | {"memory": self.without_model().memory}

    @classmethod
    def of(cls, values: Mapping[str, Any], model: Any = None) -> "Run":
        """The record that `as_dict` made these plain values of."""
        fields = {name: value for name, value in values.items() if name != "total_bytes"}
        fields["memory"] = fields.pop("memory_choice", "")
        fields["blocks"] = [BlockInfo(**block) for block in values["blocks"]]
        fields["history"] = [Epoch(**epoch) for epoch in values["history"]]
        if isinstance(alphas := values["settings"].get("alphas"), dict):  # JSON's keys are text
            numbers = {int(k) if str(k).isdecimal() else k: v for k, v in alphas.items()}
            fields["settings"] = values["settings"] | {"alphas": numbers}
        return cls(**fields, model=model)

    def save(
        self,
        folder: str | Path,
        *,
        classes: Sequence[str] = (),
        inputs: Mapping[str, Any] | None = None,
        factory: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the trained model and this record into a folder, for `tpsgd.load`.

        The tensors go into a safetensors file, everything else into `model.json`. The model may be
        built of torch's and this library's modules in `nn.Sequential`s; it is saved as it is now.

        Args:
            folder: made if it does not exist.
            classes: the names of the classes, in the order of the outputs.
            inputs: what samples look like, `data.inputs` of what `tpsgd.data.load` returned, or
                any plain values, which `tpsgd.load` gives back.
            factory: `FILE.py:FUNCTION`, for a model with modules of your own. The function takes no
                arguments and makes the model; the checksum of its file is stored, and `tpsgd.load`
                asks for the file.
            overwrite: replace a model that the folder holds.

        Examples:
            >>> import tempfile, torch, tpsgd
            >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 2))
            >>> run = tpsgd.fit(model, (x, y), epochs=1)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     _ = run.save(folder, classes=["left", "right"])
            ...     trained = tpsgd.load(folder)
            >>> trained.classes, trained.run.rule
            (('left', 'right'), 'readout-learned')
        """
        if self.model is None:
            raise TpsgdError("this record has no model to save: it was not returned by fit")
        if self.predicting is not None:
            warnings.warn(
                f"a saved model predicts by its last layer, and {self.rule} by something else: "
                "after tpsgd.load use tpsgd.evaluate(trained.model, data, rule=...)",
                stacklevel=2,
            )
        content = {"classes": classes, "inputs": dict(inputs or {}), "run": self.as_dict()}
        return trained.write(folder, self.model, content, factory, overwrite)

    def __str__(self) -> str:
        title = f"{safe(self.rule)}: {self.seconds:.2f} s"
        if self.setup_seconds > 1:
            title += f" after {self.setup_seconds:.1f} s of preparing"
        title += f", {self.sample_passes:,} sample passes, {_memory_in_words(self)}"
        hint = f"hint: {printable(self.hint)}" if self.hint else ""
        notes = printable(self.length), printable(self.memory_choice)
        return "\n".join(filter(None, (title, *notes, columns(_table(self)), hint)))


def _memory_in_words(run: Run) -> str:
    words = f"memory {size(run.total_bytes)}" if run.peak_bytes else "memory not measured"
    kept = f"peak {size(run.peak_bytes)} + kept inputs {size(run.kept_bytes)}"
    process = f"process {size(run.resident_bytes)}" if run.resident_bytes else ""
    details = _joined(kept if run.kept_bytes else "", process)
    return f"{words} ({details})" if details else words


def _table(run: Run) -> list[Sequence[str]]:
    """A row for each block of a run."""
    numbers = "targets" in run.settings
    names = "block", "layer", "rule", "parameters", "learning", "epochs", "loss"
    rows: list[Sequence[str]] = [(*names, "R²" if numbers else "accuracy")]
    for number, block in enumerate(run.blocks, 1):
        epochs = [e for e in run.history if e.block in (0, number)]
        loss = f"{epochs[-1].loss:.4g}" if epochs else "-"
        last = epochs[-1] if epochs else None
        shown = "-" if last is None or last.accuracy is None else f"{last.accuracy:.1%}"
        shown = f"{last.r2:.3f}" if last is not None and last.r2 is not None else shown
        info = block.name, block.rule, f"{block.parameters:,}", block.learning
        rows.append((str(number), *info, str(len(epochs)), loss, shown))
    return rows


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def of_run(settings: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """The settings of one of several runs; callbacks that tell runs apart have a method `of_run`.

    Each such callback is replaced by the one that this method returns.
    """
    if not settings.get("callbacks"):
        return {**settings, "seed": seed}
    own = [f.of_run(arm, seed) if hasattr(f, "of_run") else f for f in settings["callbacks"]]
    return {**settings, "seed": seed, "callbacks": own}


class Recorder(Observer):
    """Writes every epoch into the runs, calls the callbacks and stops blocks early."""

    def __init__(
        self,
        runs: list[Run],
        callbacks: Sequence[Callable[[Epoch], Any]] = (),
        restore: Callable[[EpochEnd], str] = lambda _: "",
    ) -> None:
        self.runs, self.callbacks = runs, callbacks  # one run, or one per stacked restart
        self.restore = restore  # puts the last good weights back, and says which they are
        self.began = time.perf_counter()
        self.patience: dict[Learner, Patience] = {}

    def started(self, learner: Learner) -> None:
        self.patience.pop(learner, None)

    def computed(self, samples: int, blocks: int) -> None:
        """Count samples that went through frozen blocks."""
        for run in self.runs:
            run.forward_passes += samples * blocks

    def epoch(self, end: EpochEnd) -> set[Learner]:
        """Write the epoch down; return the blocks whose callback or early stopping says stop."""
        learning: list[Any] = [x for x in end.learners if x.learning]
        for run in self.runs:
            run.sample_passes += end.samples * sum(x.layers for x in learning)
        self.computed(end.samples, depth(end.source))
        figures = {x: x.figures.collect(end.samples) for x in learning}
        checks: dict[Any, EpochFigures] = {}
        if end.validation is not None:
            samples = validate(end.learners, end.validation, end.net.observers)
            checked = [x for x in learning if x.signal is Signal.LABEL]
            checks = {x: x.figures.collect(samples) for x in checked}
        seconds = time.perf_counter() - self.began
        stopping = set()
        for x in learning:
            if self._write(x, end, figures[x], checks.get(x), seconds):
                stopping.add(x)
        return stopping | self._out_of_patience(end, figures | checks)

    def _write(
        self,
        learner: Any,
        end: EpochEnd,
        figures: EpochFigures,
        check: EpochFigures | None,
        seconds: float,
    ) -> bool:
        """One block's epoch, for every restart; whether a callback stops the block."""
        stop, number = False, learner.block.index + 1
        for r, run in enumerate(self.runs):
            record = Epoch(
                block=0 if learner.whole_net else number,
                epoch=end.number + 1,
                loss=figures.losses[r],
                accuracy=figures.accuracies[r] if figures.accuracies else None,
                val_loss=check.losses[r] if check else None,
                val_accuracy=check.accuracies[r] if check and check.accuracies else None,
                seconds=seconds,
                r2=figures.fits[r] if figures.fits else None,
                val_r2=check.fits[r] if check and check.fits else None,
            )
            run.history.append(record)
            if any([callback(record) is True for callback in self.callbacks]):
                stop = True
            if not math.isfinite(record.loss + (record.val_loss or 0.0)):
                raise self._broken(learner, record, end)
        return stop

    def _broken(self, learner: Any, record: Epoch, end: EpochEnd) -> TpsgdError:
        """What happened, the likely reason, and which weights the model has now."""
        on_validation = math.isfinite(record.loss)
        loss = record.val_loss if on_validation else record.loss
        weights, advice = self.restore(end), ""
        if (size := _largest_input(end)) > LARGE_INPUT:
            advice = f"its inputs reach {size:.2g}: scale them to about 1"
        problem = broken_loss(learner, f"{loss} in epoch {record.epoch}", advice)
        return TpsgdError(_joined(f"the {'validation ' * on_validation}{problem}", weights))

    def _out_of_patience(self, end: EpochEnd, values: dict[Any, EpochFigures]) -> set[Learner]:
        """Blocks whose loss has not improved for long enough."""
        losses = {x: sum(figures.losses) for x, figures in values.items()}
        last, stopping = end.learners[-1], set()
        for learner in losses:
            rule = learner.settings.early_stopping
            if rule is None:
                continue
            follows_output = learner.signal is not Signal.LABEL and last in losses
            patience = self.patience.setdefault(learner, Patience(rule))
            if patience.spent(losses[last if follows_output else learner]):
                stopping.add(learner)
        return stopping


def broken_loss(learner: Any, loss: Any, advice: str = "") -> str:
    """A loss that is not a number, and what to do about it."""
    if isinstance(learner.settings.optimizer, SOLVERS):
        advice = SCALE_INPUTS
    block = f"block {learner.block.index + 1} ({learner.block})"
    return f"loss of {block} became {loss}: {advice or LOWER_RATE}"


@torch.no_grad()
def _largest_input(end: EpochEnd) -> float:
    """The largest number that the first of these blocks reads in a batch; 0 if it reads none."""
    for batch in end.source.batches():
        x, _ = batch.load()
        x = getattr(x, "data", x)
        real = isinstance(x, Tensor) and x.is_floating_point() and x.numel() > 0
        return float(x.abs().max()) if real else 0.0
    return 0.0


class Patience:
    """Early stopping's memory of one block."""

    def __init__(self, rule: EarlyStopping) -> None:
        self.rule, self.best, self.waited = rule, math.inf, 0

    def spent(self, loss: float) -> bool:
        """Whether the block has waited long enough for a loss better than its best."""
        better = loss < self.best - self.rule.min_delta
        self.best, self.waited = (loss, 0) if better else (self.best, self.waited + 1)
        return self.waited >= self.rule.patience


class Progress(Observer):
    """Calls `progress(sample passes done, total)` every few batches."""

    def __init__(
        self, progress: Callable[[int, int], None], learners: Sequence[Any], samples: int
    ) -> None:
        self.progress, self.done, self.batches = progress, 0, 0
        self.total = samples * sum(x.layers * x.epochs for x in learners)

    def batch(self, learners: Sequence[Any], batch: Any) -> None:
        """Count the samples of a batch, once for every layer that learned from it."""
        if not learners:
            return
        self.done += batch.size * sum(x.layers for x in learners if x.learning)
        if self.batches % 8 == 0:
            self.progress(self.done, self.total)
        self.batches += 1

    def epoch(self, end: EpochEnd) -> set[Learner]:
        self.batches = 0
        self.progress(self.done, self.total)
        return set()
