"""The options of the command line, declared once per group, and the values that they name.

A command takes a group as one argument; `grouped` turns the group into its options:

    @grouped
    def train(data: options.DataOptions, training: options.Training, ...) -> None: ...
"""

import inspect
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tpsgd
from tpsgd.cli.terminal import waiting
from tpsgd.cli.torchrun import command_words
from tpsgd.common.errors import TpsgdError, suggestion

if TYPE_CHECKING:
    from tpsgd.zoo.words import Factory

ORDERS = ("sequential", "simultaneous")
SCALES = ("none", "standard", "minmax")  # `data.scaling.METHODS`, which imports torch
IMPUTE = ("none", "mean", "median")  # `data.scaling.IMPUTE`
LOSSES = ("mse", "cross-entropy", "bce")
INITS = ("zeros", "uniform", "scaled-uniform", "reservoir")
RECIPES = ("deep",)
MOST_THREADS = 64  # that a machine with fewer cores may try
AUGMENT = ("flip", "crop", "cutout", "resized-crop", "jitter")
DATA = (
    "digits, mnist, cifar10, seq-mnist-rows, eeg, tweets, ... (see: tpsgd data list); FILE.npz, "
    "FILE.csv, FILE.tsv, FILE.py:FUNCTION or a folder of images."
)
MODELS = (
    "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), vgg:8, vgg:11 or vgg:16 (ReLU and "
    "batch norm after every layer but the last), rnn:512 (units), birnn:512 "
    "(bidirectional), rnn:512,512+256 (a perceptron after the +), paper-rnn:512, torch-rnn:512, "
    "lru:256,256 (diagonal recurrences that remember for long) or "
    "FILE.py:FUNCTION."
)


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a single command: `name: Annotated[type, option("Its help.")] = default`."""
    return typer.Option(*names, help=help, **more)


def setting(default: Any, help: str, *names: str, choices: Iterable[str] = (), **more: Any) -> Any:
    """An option of a group: `name: type = setting(default, "Its help.")`."""
    if choices:
        more["callback"] = one_of(choices)
    return field(default=default, metadata={"option": option(help, *names, **more)})


def one_of(choices: Iterable[str]) -> Callable[..., str | None]:
    """A callback of an option that refuses all other words."""

    def callback(parameter: typer.CallbackParam, word: str | None) -> str | None:
        if word is not None:
            check(str(parameter.name), word, choices)
        return word

    return callback


def check(kind: str, word: str, words: Iterable[str]) -> None:
    """Refuse an unknown word and name the closest one."""
    if word not in words:
        raise TpsgdError(f"unknown {kind} {word!r}: {suggestion(word, words)}")


RuleWord = Annotated[str, option("A rule; see: tpsgd rules.", "--rule")]
Overwrite = Annotated[bool, option("Replace the results of an earlier run.", "--overwrite")]
AsJson = Annotated[bool, option("Print one JSON object and nothing else.", "--json")]


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
            name: group(**{f.name: words.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **words)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call


def _parameters(group: Any) -> Iterable[inspect.Parameter]:
    """A parameter for every option of a group; `--help` shows the group as a panel."""
    for f in fields(group):
        declared = f.metadata["option"]
        declared.rich_help_panel = group.TITLE
        default = inspect.Parameter.empty if f.default is MISSING else f.default
        hint = Annotated[f.type, declared]
        yield inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )


def listed(text: str | None) -> list[str]:
    """The words of `a,b,c`."""
    return [word.strip() for word in text.split(",")] if text else []


def chosen(group: Any) -> list[str]:
    """The options of a group that were given and that have no default, not even one in words."""
    free = [f for f in fields(group) if f.default is None]
    names = [f.name for f in free if not isinstance(f.metadata["option"].show_default, str)]
    return [f"--{n.replace('_', '-')}" for n in names if getattr(group, n) is not None]


def changed(group: Any) -> list[str]:
    """The options of a group whose values are not their defaults."""
    names = [f.name for f in fields(group) if getattr(group, f.name) != f.default]
    return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True)
class Unscaled:
    """Samples to train and to test on, as they are stored."""

    TITLE = "Data"

    data: str = setting("digits", DATA)
    max_train: int | None = setting(None, "Use only this many training samples.", min=1)
    on_disk: Path | None = setting(None, "Keep the decoded data in this folder, not in memory.")  # noqa: RUF009

    def load(self, seed: int = 0) -> "tpsgd.data.Data":
        """The data set."""
        return self._load(seed, scale="none")

    def _load(self, seed: int, **choices: Any) -> "tpsgd.data.Data":
        choices |= {"max_train": self.max_train, "on_disk": self.on_disk}
        with waiting(f"reading {self.data}"):
            return tpsgd.data.load(self.data, seed=seed, **choices)


@dataclass(frozen=True)
class DataOptions(Unscaled):
    """What to train and to test on."""

    scale: str | None = setting(
        None,
        "Features of tables and series: none, standard or minmax, with statistics of the training "
        "samples.",
        choices=SCALES,
        show_default="standard for .csv, else none",
    )
    label: str | None = setting(
        None, "FILE.csv: the label column.", show_default="label, y, class, target, or the last"
    )
    drop: str | None = setting(None, "FILE.csv: columns to leave out: id,time.")
    impute: str | None = setting(
        None, "FILE.csv: fill blank cells by the mean or median of the training samples, or none.",
        choices=IMPUTE,
    )  # fmt: skip

    def load(self, seed: int = 0) -> "tpsgd.data.Data":
        """The data set."""
        columns = {"label": self.label, "drop": self.drop or (), "impute": self.impute}
        return self._load(seed, scale=self.scale, **columns)


@dataclass(frozen=True)
class Model:
    """Which model to train."""

    TITLE = "Model"

    model: str = setting("mlp:256", MODELS)
    activation: str = setting(
        "leaky-relu", "leaky-relu, relu, tanh, sigmoid, gelu, silu, softplus."
    )
    init: str | None = setting(None, f"rnn: initial weights: {', '.join(INITS)}.", choices=INITS)
    leak: float | None = setting(None, "rnn: the share of the state that a step renews, up to 1.")
    window: int | None = setting(None, "rnn: time steps computed together; more is faster.", min=1)
    head: str | None = setting(
        None, "Last layer: adam, or ridge, solved by least squares (rnn: the default).",
        choices=("adam", "ridge"),
    )  # fmt: skip

    def factory_for(self, data: "tpsgd.data.Data") -> "tuple[Factory, str]":
        """`factory` for a data set."""
        padded = isinstance(data.train[0], tpsgd.Padded)
        return self.factory(data.shape, len(data.classes), data.vocabulary, padded)

    def factory(
        self, shape: tuple[int, ...], classes: int, tokens: int | None = None, padded: bool = False
    ) -> "tuple[Factory, str]":
        """A factory of models for samples of this shape, and how their last layer learns."""
        from tpsgd.common.files import is_function
        from tpsgd.zoo.words import factory, is_recurrent

        cells = {"init": self.init, "leak": self.leak}
        make = factory(self.model, shape, classes, self.activation, tokens=tokens, **cells)
        if is_recurrent(make()):
            return make, self.head or "ridge"
        if self.window is not None:
            raise TpsgdError(
                f"--window is for recurrent models such as rnn:512, not for {self.model}"
            )
        if padded and not is_function(self.model):
            raise TpsgdError(
                f"{self.model} cannot read sequences of different lengths: choose rnn:512"
            )
        return make, self.head or "adam"

    def check_head(self, order: Any) -> None:
        """Refuse a solved last layer that was asked for where no block is ever finished."""
        if self.head == "ridge" and order is tpsgd.simultaneous:
            raise TpsgdError(
                "--head ridge solves the last layer once those before it have learned: choose "
                "--order sequential"
            )

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group."""
        return {} if self.window is None else {"window": self.window}

    def record(self, head: str) -> dict[str, Any]:
        """The model as plain values; an activation that it does not have is left out."""
        only_cells = ("rnn:" in self.model or "lru:" in self.model) and "+" not in self.model
        fixed = only_cells or self.model.startswith("vgg:")
        values = {
            "model": self.model,
            "activation": None if fixed else self.activation,
            "init": self.init,
            "leak": self.leak,
            "head": None if head == "adam" else head,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class Training:
    """How to train."""

    TITLE = "Training"

    epochs: int | None = setting(10, "Epochs per block.", min=1)
    batch_size: int = setting(128, "Samples per step.", min=1)
    lr: float | None = setting(None, "Learning rate (default: Adam 0.001, SGD 0.1).")
    seed: int = setting(0, "Seed of weights, class codes and sample order.", min=0, max=2**63 - 1)
    order: str | None = setting(
        None, "sequential or simultaneous (default: by the net and the rule).", choices=ORDERS
    )
    loss: str | None = setting(None, f"Last layer: {', '.join(LOSSES)}.", choices=LOSSES)
    optimizer: str | None = setting(
        None, "adam, or sgd without momentum, which needs less memory.", choices=("adam", "sgd")
    )
    augment: str | None = setting(
        None, "Images: flip, crop:4, cutout:8, resized-crop, jitter; or several: flip,crop:4."
    )
    blocks: str | None = setting(
        None, "Blocks of several layers: how many, or the layers of each: 2,2,4 (1: backprop)."
    )
    precision: str | None = setting(
        None, "bf16: forward and backward in 16 bits.", choices=("bf16",)
    )

    @property
    def chosen_order(self) -> Any:
        """The order that was chosen, if any."""
        return getattr(tpsgd, self.order) if self.order else None

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` that were chosen in this group, except for the order."""
        import torch

        from tpsgd.engine.learners import optimizers
        from tpsgd.engine.settings import LARGEST_RATE

        if isinstance(self.lr, float) and not 0 < self.lr <= LARGEST_RATE:
            raise TpsgdError(
                f"--lr must be more than 0 and at most {LARGEST_RATE}, got {self.lr:g}"
            )

        settings = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "seed": self.seed,
            "loss": self.loss and getattr(tpsgd, self.loss.replace("-", "_")),
            "optimizer": self.optimizer and getattr(optimizers, self.optimizer),
            "blocks": self.blocks and block_numbers(self.blocks),
            "precision": self.precision and torch.bfloat16,
            "augment": self.augment and augmentation(self.augment),
        }
        return {name: value for name, value in settings.items() if value is not None}


@dataclass(frozen=True)
class FromScratch(Training):
    """How to train a whole model: by options, by a recipe, or by both; options go first."""

    epochs: int | None = setting(
        None, "Epochs per block.", show_default="by the data, or the recipe's", min=1
    )
    batch_size: int | None = setting(  # type: ignore[assignment]
        None, "Samples per step.", show_default="by the data, or the recipe's", min=1
    )
    recipe: str | None = setting(
        None,
        "deep, for images: --order simultaneous, Adam 0.001 with a rate that rises for a fifth "
        "of the steps and falls to 0, 12 epochs, batches of 64, flips and mirrored shifts, bf16 on "
        "a GPU. Options that you give replace the recipe's.",
        choices=RECIPES,
    )
    readout_scale: float | None = setting(
        None, "readout: its scale, after calibration (12); see: tpsgd search."
    )

    @property
    def chosen_order(self) -> Any:
        """The order that was chosen, or that of the recipe."""
        order = super().chosen_order
        return tpsgd.simultaneous if self.recipe and order is None else order

    def complete(self, settings: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
        """Settings that were chosen, and the recipe's or the default for all others."""
        if self.recipe is None:
            return settings
        from tpsgd.zoo import recipes

        recipe = recipes.ALL[self.recipe].settings(shape, settings.get("device"))
        del recipe["order"]  # the arm has `chosen_order`
        if "optimizer" in settings:
            del recipe["lr"]  # it is Adam's
        return recipe | settings


def rate_or_search(word: str) -> float | str:
    """A learning rate, or the word `search`."""
    try:
        return word if word == "search" else float(word)
    except ValueError:
        raise TpsgdError(f"--lr takes a number such as 0.003, or search, got {word!r}") from None


@dataclass(frozen=True)
class Compared(FromScratch):
    """How to train each of several rules."""

    lr: Any = setting(  # noqa: RUF009
        None,
        "Learning rate (default: Adam 0.001, SGD 0.1); search: one for each rule, backprop and "
        "controls too, by the same short runs on held-out training samples.",
        parser=rate_or_search,
        metavar="RATE|search",
    )


def block_numbers(text: str) -> int | list[int]:
    """A number of blocks, 4, or the number of layers in each, 2,2,2,4."""
    words = listed(text)
    if not words or not all(re.fullmatch(r"[1-9]\d{0,5}", word, re.ASCII) for word in words):
        raise TpsgdError(
            f"--blocks {text}: write a number of blocks, 4, or the number of layers in each, 2,2,4"
        )
    numbers = [int(word) for word in words]
    return numbers if "," in text else numbers[0]


def augmentation(text: str) -> Any:
    """An augmentation by its words, each with or without a number: flip,crop:4."""
    functions = []
    for item in listed(text):
        word, _, number = item.partition(":")
        check("augmentation", word, AUGMENT)
        if word == "cutout" and not number:
            raise TpsgdError("cutout needs a size in pixels: cutout:8")
        try:
            values = [float(number) if "." in number else int(number)] if number else []
        except ValueError:
            raise TpsgdError(f"{item!r} is no augmentation: write {word} or {word}:4") from None
        functions.append(getattr(tpsgd.augment, word.replace("-", "_"))(*values))
    return functions[0] if len(functions) == 1 else tpsgd.augment.chain(*functions)


@dataclass(frozen=True)
class MemoryOptions:
    """How to save memory."""

    TITLE = "Memory"

    memory: str | None = setting(
        None,
        "64MB, 1.5GB: the most to use beyond the data set; low: as little as is reasonable; "
        "fast: keep blocks' inputs. By default no more than backprop would use.",
    )
    reuse: str | None = setting(
        None, "Keep blocks' inputs: yes, no (recompute), or in files in a folder (with --memory: "
        "only if nothing else fits).",
    )  # fmt: skip
    micro_batch: int | None = setting(None, "Samples of a batch in memory at a time.", min=1)

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group."""
        reuse: Any = {"yes": True, "no": False}.get(str(self.reuse), self.reuse)
        if isinstance(reuse, str):
            reuse = Path(reuse).expanduser()
            if not reuse.is_dir():
                raise TpsgdError(f"--reuse {self.reuse}: write yes, no, or a folder that exists")
        memory = tpsgd.Memory.of(self.memory)
        return {"memory": replace(memory, reuse=reuse, micro_batch=self.micro_batch)}


@dataclass(frozen=True)
class Machine:
    """Where to train."""

    TITLE = "Machine"

    device: str | None = setting(None, "cpu, cuda, cuda:1, ...")
    threads: int | None = setting(None, "CPU threads, at most; small nets take one.", min=1)

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` in this group; the number of threads is set."""
        import torch

        from tpsgd.engine.device import resolve_device

        resolve_device(self.device or "cpu")
        cores = os.cpu_count() or 1
        if self.threads is not None and self.threads > max(MOST_THREADS, cores):
            raise TpsgdError(
                f"--threads {self.threads} is too much for {cores} CPU cores: leave it out, or "
                f"choose at most {max(MOST_THREADS, cores)}"
            )
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return {"device": self.device}


def keep_apart(*inputs: str | Path | None, **outputs: Path | None) -> None:
    """Refuse results in place of the data, or of a user's file, that a command reads."""
    from tpsgd.common.files import path_in
    from tpsgd.common.output import check_apart
    from tpsgd.data.registry import DATASETS

    words = [str(word) for word in inputs if word is not None]
    check_apart([path_in(word) for word in words if word not in DATASETS], **outputs)


def warn_of_loss(training: Training, data: "tpsgd.data.Data") -> None:
    """Warn of `bce`, which is for several labels per sample, on data with one class per sample."""
    if training.loss == "bce" and len(data.classes) > 2:
        warnings.warn(
            f"--loss bce asks yes or no for each of {len(data.classes)} classes and learns slowly, "
            "though a sample has one class: leave it out, or choose --loss cross-entropy",
            stacklevel=2,
        )


def settings_of(*groups: Any) -> dict[str, Any]:
    """The settings of `fit` that were chosen in these groups."""
    return {name: value for group in groups for name, value in group.settings().items()}


def command_line() -> str:
    """The command that is running."""
    return shlex.join([*command_words(), *sys.argv[1:]])


def provenance_of(data: "tpsgd.data.Data", device: str | None) -> dict[str, Any]:
    """Command, data, machine and versions, for the record."""
    from tpsgd.comparison import provenance

    return {
        "command": command_line(),
        "data": provenance.describe(data),
        "machine": provenance.machine(device),
        "versions": provenance.versions(),
    }
