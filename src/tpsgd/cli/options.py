"""The options of the command line, declared once per group, and the values that they name.

A command takes a group as one argument; `grouped` turns the group into its options:

    @grouped
    def train(data: DataOptions, training: TrainingOptions, ...) -> None: ...
"""

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from tpsgd.errors import TpsgdError, suggestion

if TYPE_CHECKING:
    from tpsgd.data import Data
    from tpsgd.engine.settings import Memory
    from tpsgd.zoo.words import Factory

SCHEDULES = ("sequential", "simultaneous")
LOSSES = ("mse", "cross-entropy", "bce")
HEADS = ("adam", "ridge")
OPTIMIZERS = ("adam", "sgd")
PRECISIONS = ("bf16",)
AUGMENT = ("flip", "crop", "cutout", "resized-crop", "jitter")
DATA = (
    "digits, mnist, cifar10, seq-mnist-rows, eeg, tweets, ... (see: tpsgd data list); FILE.npz, "
    "FILE.csv, FILE.py:FUNCTION or a folder of images."
)
MODELS = (
    "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), rnn:512 (units), birnn:512 "
    "(bidirectional), rnn:512,512+256 (a perceptron after the +), paper-rnn:512, torch-rnn:512 or "
    "FILE.py:FUNCTION."
)
RuleWord = Annotated[str, typer.Option("--rule", help="See: tpsgd rules.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its groups instead of the groups themselves."""
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def call(**words: Any) -> None:
        values = {
            name: group(**{field.name: words.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **words)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _parameters(group: Any) -> Iterable[inspect.Parameter]:
    """A parameter for every field of a group; `--help` shows them in a panel of their own."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        kind, option = hints[field.name].__origin__, copy(hints[field.name].__metadata__[0])
        option.rich_help_panel = group.TITLE
        default = inspect.Parameter.empty if field.default is REQUIRED else field.default
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
            annotation=Annotated[kind, option],
        )  # fmt: skip


REQUIRED: Any = object()  # the default of an option that has to be given


def check(kind: str, word: str | None, words: Iterable[str]) -> None:
    """Refuse an unknown word and name the closest one; None is not checked."""
    if word is not None and word not in words:
        raise TpsgdError(f"unknown {kind} {word!r}: {suggestion(word, words)}")


def listed(text: str | None) -> list[str]:
    """The words of `a,b,c`, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(","))) if text else []


@dataclass(frozen=True)
class DataOptions:
    """What to train and to test on."""

    TITLE: ClassVar[str] = "Data"

    data: Annotated[str, typer.Option(help=DATA)] = "digits"
    max_train: Annotated[
        int | None, typer.Option(help="Use only this many training samples.", min=1)
    ] = None
    on_disk: Annotated[
        Path | None, typer.Option(help="Keep the decoded data in this folder, not in memory.")
    ] = None

    def load(self, seed: int = 0) -> "Data":
        """The data set."""
        from tpsgd.data import load

        return load(self.data, seed=seed, max_train=self.max_train, on_disk=self.on_disk)


@dataclass(frozen=True)
class ModelOptions:
    """Which model to train."""

    TITLE: ClassVar[str] = "Model"

    model: Annotated[str, typer.Option(help=MODELS)] = "mlp:256"
    activation: Annotated[
        str, typer.Option(help="leaky-relu, relu, tanh, sigmoid, gelu, silu or softplus.")
    ] = "leaky-relu"
    init: Annotated[
        str | None,
        typer.Option(help="rnn: initial weights: zeros, uniform, scaled-uniform or reservoir."),
    ] = None
    leak: Annotated[
        float | None, typer.Option(help="rnn: the share of the state that a step renews, up to 1.")
    ] = None
    window: Annotated[
        int | None, typer.Option(help="rnn: time steps computed together; more is faster.", min=1)
    ] = None
    head: Annotated[
        str | None,
        typer.Option(help="Last layer: adam, or ridge (closed form; the default for rnn)."),
    ] = None

    def factory_for(self, data: "Data") -> "tuple[Factory, bool]":
        """A factory of models for a data set, and whether the models are recurrent."""
        from tpsgd.files import is_function
        from tpsgd.nets.padded import Padded

        make, recurrent = self.factory(data.shape, len(data.classes), data.vocabulary)
        padded = isinstance(data.train[0], Padded)
        if padded and not recurrent and not is_function(self.model):
            raise TpsgdError(
                f"{self.model} cannot read sequences of different lengths: choose rnn:512"
            )
        return make, recurrent

    def factory(
        self, shape: tuple[int, ...], classes: int, tokens: int | None = None
    ) -> "tuple[Factory, bool]":
        """A factory of models for samples of this shape, and whether the models are recurrent."""
        from tpsgd.zoo.words import factory, is_recurrent

        make = factory(
            self.model, shape, classes, self.activation, tokens=tokens, init=self.init,
            leak=self.leak,
        )  # fmt: skip
        try:
            recurrent = is_recurrent(make())
        except TpsgdError:
            raise
        except Exception as error:  # in the user's file
            raise TpsgdError(f"{self.model} failed with {type(error).__name__}: {error}") from error
        if self.window is not None and not recurrent:
            raise TpsgdError(
                f"--window is for recurrent models such as rnn:512, not for {self.model}"
            )
        return make, recurrent

    def head_of(self, recurrent: bool) -> str:
        """The head that was chosen, or the default one."""
        check("head", self.head, HEADS)
        return self.head or ("ridge" if recurrent else "adam")

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group."""
        return {} if self.window is None else {"window": self.window}

    def record(self, head: str) -> dict[str, Any]:
        """The model as plain values; an activation that it does not have is left out."""
        only_cells = "rnn:" in self.model and "+" not in self.model
        values = {
            "model": self.model,
            "activation": None if only_cells else self.activation,
            "init": self.init,
            "leak": self.leak,
            "head": None if head == "adam" else head,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class TrainingOptions:
    """How to train."""

    TITLE: ClassVar[str] = "Training"

    epochs: Annotated[int | None, typer.Option(help="Epochs per block.", min=1)] = 10
    batch_size: Annotated[int, typer.Option(help="Samples per step.", min=1)] = 128
    lr: Annotated[
        float | None, typer.Option(help="Learning rate (default: Adam 0.001, SGD 0.1).")
    ] = None
    seed: Annotated[int, typer.Option(help="Of weights, class codes and sample order.", min=0)] = 0
    schedule: Annotated[
        str | None, typer.Option(help="sequential, or simultaneous (always so with dfa, sdfa).")
    ] = None
    loss: Annotated[str | None, typer.Option(help=f"Last layer: {', '.join(LOSSES)}.")] = None
    optimizer: Annotated[
        str | None, typer.Option(help="adam, or sgd without momentum, which needs less memory.")
    ] = None
    augment: Annotated[
        str | None,
        typer.Option(
            help="Random changes of images: flip, crop:4, cutout:8, resized-crop, jitter."
        ),
    ] = None
    precision: Annotated[
        str | None, typer.Option(help="bf16: forward and backward in 16 bits.")
    ] = None

    def schedule_of(self, default: Any = None) -> Any:
        """The schedule, or the default."""
        from tpsgd.engine import schedules

        check("schedule", self.schedule, SCHEDULES)
        return getattr(schedules, self.schedule) if self.schedule else default

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` that were chosen in this group, except for the schedule."""
        check("schedule", self.schedule, SCHEDULES)
        check("loss", self.loss, LOSSES)
        check("optimizer", self.optimizer, OPTIMIZERS)
        check("precision", self.precision, PRECISIONS)
        if self.lr is not None and not 0 < self.lr < float("inf"):
            raise TpsgdError(f"--lr must be more than 0, got {self.lr:g}")

        import torch

        from tpsgd import losses
        from tpsgd.engine import optimizers

        settings = {name: getattr(self, name) for name in ("epochs", "batch_size", "lr", "seed")}
        settings |= {
            "loss": self.loss and getattr(losses, self.loss.replace("-", "_")),
            "optimizer": self.optimizer and getattr(optimizers, self.optimizer),
            "precision": self.precision and torch.bfloat16,
            "augment": self.augment and augmentation(self.augment),
        }
        return {name: value for name, value in settings.items() if value is not None}

    def chosen(self) -> list[str]:
        """The options that methods without epochs and batches do not have."""
        names = ("lr", "schedule", "loss", "optimizer", "augment", "precision")
        return [f"--{name}" for name in names if getattr(self, name) is not None]


def augmentation(text: str) -> Any:
    """An augmentation by its words, each with or without a number: flip,crop:4."""
    from tpsgd.engine import augment

    functions = []
    for part in text.split(","):
        word, _, number = part.strip().partition(":")
        check("augmentation", word, AUGMENT)
        if word == "cutout" and not number:
            raise TpsgdError("cutout needs a size in pixels: cutout:8")
        try:
            values = [float(number) if "." in number else int(number)] if number else []
        except ValueError:
            raise TpsgdError(f"{part!r} is no augmentation: write {word} or {word}:4") from None
        functions.append(getattr(augment, word.replace("-", "_"))(*values))
    return functions[0] if len(functions) == 1 else augment.chain(*functions)


@dataclass(frozen=True)
class MemoryOptions:
    """How to save memory."""

    TITLE: ClassVar[str] = "Memory"

    memory: Annotated[
        str | None, typer.Option(help="64MB, 1.5GB: the most to use beyond the data set.")
    ] = None
    reuse: Annotated[
        str | None, typer.Option(help="Keep blocks' inputs: yes, no (recompute), or a folder.")
    ] = None
    micro_batch: Annotated[
        int | None, typer.Option(help="Process this many samples of a batch at a time.", min=1)
    ] = None

    def kept(self) -> bool | Path | None:
        """`reuse` as a value."""
        if self.reuse in (None, "yes", "no"):
            return None if self.reuse is None else self.reuse == "yes"
        folder = Path(self.reuse).expanduser()
        if not folder.is_dir():
            raise TpsgdError(f"--reuse {self.reuse}: write yes, no, or a folder that exists")
        return folder

    def value(self) -> "Memory":
        """The group as a value of the library."""
        from tpsgd.engine.settings import Memory

        return Memory(budget=self.memory, reuse=self.kept(), micro_batch=self.micro_batch)

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group."""
        return {"memory": self.value()}

    def chosen(self) -> list[str]:
        """The options of this group that were given."""
        names = ("memory", "reuse", "micro_batch")
        return [f"--{n.replace('_', '-')}" for n in names if getattr(self, n) is not None]


@dataclass(frozen=True)
class MachineOptions:
    """Where to train."""

    TITLE: ClassVar[str] = "Machine"

    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None
    threads: Annotated[int | None, typer.Option(help="CPU threads.", min=1)] = None

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group; the number of threads is set."""
        import torch

        from tpsgd.engine.device import resolve_device

        resolve_device(self.device or "cpu")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return {"device": self.device}


def settings_of(*groups: Any) -> dict[str, Any]:
    """The settings of `fit` that were chosen in these groups."""
    return {name: value for group in groups for name, value in group.settings().items()}


def command_line() -> str:
    """The command that is running."""
    return shlex.join(["tpsgd", *sys.argv[1:]])


def provenance_of(data: "Data", device: str | None) -> dict[str, Any]:
    """Command, data, machine and versions, for the record."""
    from tpsgd.comparison import provenance

    return {
        "command": command_line(),
        "data": provenance.describe(data),
        "machine": provenance.machine(device),
        "versions": provenance.versions(),
    }
