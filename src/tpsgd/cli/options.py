"""The options of the command line, declared once per group, and the values that they name.

A command takes a group as one argument; `grouped` turns the group into its options:

    @grouped
    def train(data: options.DataOptions, training: options.Training, ...) -> None: ...
"""

import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

import tpsgd
from tpsgd.cli.terminal import waiting
from tpsgd.cli.torchrun import command_words
from tpsgd.common.errors import TpsgdError

if TYPE_CHECKING:
    from torch import nn

    from tpsgd.zoo.words import Factory

MOST_THREADS = max(64, os.cpu_count() or 1)
DATA = (
    "digits, mnist, cifar10, seq-mnist-rows, eeg, tweets, ... (see: tpsgd data list); FILE.npz, "
    "FILE.csv, FILE.tsv, FILE.py:FUNCTION or a folder of images."
)
MODELS = (
    "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), vgg:8, vgg:11 or vgg:16 (ReLU and "
    "batch norm after every layer but the last), vit:8x192 (layers x width), rnn:512 (units), "
    "birnn:512 "
    "(bidirectional), rnn:512,512+256 (a perceptron after the +), paper-rnn:512, torch-rnn:512, "
    "lru:256,256 (diagonal recurrences that remember for long) or "
    "FILE.py:FUNCTION."
)


def option(help: str, *names: str, **more: Any) -> Any:
    """An option of a single command: `name: Annotated[type, option("Its help.")] = default`."""
    return typer.Option(*names, help=help, **more)


def setting(default: Any, help: str, *names: str, choices: Iterable[str] = (), **more: Any) -> Any:
    """An option of a group: `name: type = setting(default, "Its help.")`."""
    metadata = {"option": option(help, *names, **more), "choices": tuple(choices)}
    return field(default=default, metadata=metadata)


RuleWord = Annotated[str, option("A rule, or FILE.py:FUNCTION; see: tpsgd rules.", "--rule")]
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
        declared, choices = f.metadata["option"], f.metadata["choices"]
        declared.rich_help_panel = group.TITLE
        default = inspect.Parameter.empty if f.default is MISSING else f.default
        kind: Any = cast(Any, Literal)[choices] | None if choices else f.type
        hint = Annotated[kind, declared]
        yield inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
        )


def listed(text: str | None) -> list[str]:
    """The words of `a,b,c`."""
    return [word.strip() for word in text.split(",")] if text else []


def fields_of(text: str) -> dict[str, list[Any]]:
    """The values of `features=64,256 share=0,0.5 at=none`, by name: as JSON has them, or words."""
    lists: dict[str, list[Any]] = {}
    for word in text.split():
        name, sign, values = word.partition("=")
        if not (name.isidentifier() and sign and values) or name in lists:
            raise TpsgdError(f"--fields takes NAME=VALUES, each name once, not {word!r}")
        lists[name] = [_plain(value) for value in listed(values)]
    return lists


def _plain(word: str) -> Any:
    """A number, true, false or null; any other word is text."""
    try:
        return json.loads(word)
    except ValueError:
        return word


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

    def load(self, seed: int = 0, **choices: Any) -> "tpsgd.data.Data":
        """The data set; the choices are further arguments of `tpsgd.data.load`."""
        choices = {"scale": "none", "max_train": self.max_train, "on_disk": self.on_disk} | choices
        with waiting(f"reading {self.data}"):
            return tpsgd.data.load(self.data or "digits", seed=seed, **choices)


@dataclass(frozen=True)
class DataOptions(Unscaled):
    """What to train and to test on."""

    scale: str | None = setting(
        None,
        "Features of tables and series: none, standard or minmax.",
        show_default="standard for .csv, else none",
    )
    task: str | None = setting(
        None,
        "Labels are classes, or numbers to predict.",
        choices=("classification", "regression"),
        show_default="classification",
    )
    label: str | None = setting(
        None,
        "FILE.csv: the label column; of --task regression, perhaps several: price,area.",
        show_default="label, y, class, target, or the last",
    )
    drop: str | None = setting(None, "FILE.csv: columns to leave out: id,time.")
    impute: str | None = setting(
        None, "FILE.csv: fill blank cells by the mean or median of the training samples, or none."
    )

    def load(self, seed: int = 0, **choices: Any) -> "tpsgd.data.Data":
        """The data set; the choices replace those of the options."""
        names = ("scale", "label", "impute", "task")
        columns = {name: getattr(self, name) for name in names} | {"drop": self.drop or ()}
        return super().load(seed, **(columns | choices))


@dataclass(frozen=True)
class Model:
    """Which model to train."""

    TITLE = "Model"

    model: str = setting("mlp:256", MODELS)
    activation: str = setting("leaky-relu", "Or relu, tanh, sigmoid, gelu, silu, softplus.")
    init: str | None = setting(
        None, "rnn: initial weights: zeros, uniform, scaled-uniform or reservoir."
    )
    leak: float | None = setting(None, "rnn: the share of the state that a step renews, up to 1.")
    loss_at: str | None = setting(
        None, "lru: where in time the local loss looks; a device learns by last or every.",
        choices=("mean", "last", "every"), show_default="mean",
    )  # fmt: skip
    window: int | None = setting(None, "rnn: time steps computed together; more is faster.", min=1)
    head: str | None = setting(
        None, "Last layer; ridge: by least squares (rnn: the default).", choices=("adam", "ridge")
    )

    def factory_for(self, data: "tpsgd.data.Data") -> "tuple[Factory, str]":
        """`factory` for a data set."""
        return self.factory(data.shape, len(data.classes or data.targets), data.vocabulary)

    def factory(
        self, shape: tuple[int, ...], classes: int, tokens: int | None = None
    ) -> "tuple[Factory, str]":
        """A factory of models for samples of this shape, and how their last layer learns."""
        from tpsgd.zoo.words import factory

        cells = {"init": self.init, "leak": self.leak, "loss_at": self.loss_at}
        make = factory(self.model, shape, classes, self.activation, tokens=tokens, **cells)
        return make, self.head_of(make())

    def head_of(self, model: "nn.Module") -> str:
        """How the last layer of a model learns: adam or ridge."""
        from tpsgd.zoo.words import is_recurrent

        return self.head or ("ridge" if is_recurrent(model) else "adam")

    def settings(self) -> dict[str, Any]:
        return {} if self.window is None else {"window": self.window}

    def record(self, head: str) -> dict[str, Any]:
        """The model as plain values; an activation that it does not have is left out."""
        only_cells = ("rnn:" in self.model or "lru:" in self.model) and "+" not in self.model
        fixed = only_cells or self.model.startswith("vgg:")
        values = {"model": self.model, "activation": None if fixed else self.activation}
        values |= {"init": self.init, "leak": self.leak, "loss_at": self.loss_at}
        values |= {"head": None if head == "adam" else head}
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
        None, "Default: by the net and the rule.", choices=("sequential", "simultaneous")
    )
    optimizer: str | None = setting(
        None,
        "Adam; plain SGD, which needs less memory; or SGD with Nesterov's momentum of 0.9.",
        choices=("adam", "sgd", "momentum"),
    )
    weight_decay: float | None = setting(None, "Weight decay of matrices: SGD 5e-4, Adam 0.05.")
    clip: float | None = setting(None, "The largest norm of a block's gradients.")
    blocks: str | None = setting(
        None,
        "How many blocks (1: backprop), the layers of each: 2,2,4, auto, or layers: one each.",
        show_default="FILE.py:FUNCTION: auto; else one for each layer",
    )
    split_points: str | None = setting(
        None, "Modules that begin a block, in place of --blocks: layer2,layer3.1."
    )
    no_split: str | None = setting(None, "Modules or classes that stay inside a block.")

    @property
    def chosen_order(self) -> Any:
        """The order that was chosen, if any."""
        return getattr(tpsgd, self.order) if self.order else None

    def settings(self) -> dict[str, Any]:
        """The settings of `fit` that were chosen in this group, except for the order."""
        from tpsgd.engine.learners import optimizers
        from tpsgd.engine.settings import LARGEST_RATE

        if isinstance(self.lr, float) and not 0 < self.lr <= LARGEST_RATE:
            raise TpsgdError(f"--lr must be more than 0, at most {LARGEST_RATE}, got {self.lr:g}")
        settings = {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "seed": self.seed,
            "optimizer": self.optimizer and getattr(optimizers, self.optimizer),
            "weight_decay": self.weight_decay,
            "clip": self.clip,
            "blocks": self.blocks and block_numbers(self.blocks),
            "split_points": listed(self.split_points) or None,
            "no_split": listed(self.no_split) or None,
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
        "For images: simultaneous, a rate that rises and falls to 0, flips and shifts, bf16 on a "
        "GPU; deep: Adam, for VGGs; residual: SGD, for ResNets; vit: AdamW, for transformers. "
        "Other options replace the recipe's; another optimizer has neither its rate nor its decay.",
        choices=("deep", "residual", "vit"),
    )
    readout_scale: float | None = setting(
        None, "readout: its scale, after calibration (12); see: tpsgd search."
    )
    loss: str | None = setting(
        None, "--task regression: the loss.", choices=("mse", "l1", "huber"), show_default="mse"
    )

    @property
    def chosen_order(self) -> Any:
        order = super().chosen_order
        return tpsgd.simultaneous if self.recipe and order is None else order

    def complete(
        self, settings: dict[str, Any], shape: tuple[int, ...], targets: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Settings that were chosen, and the recipe's or the default for all others.

        Targets, the columns of numbers to predict, have a loss.
        """
        if self.loss and not targets:
            raise TpsgdError("--loss is for numbers: add --task regression, or leave it out")
        settings = settings | ({"loss": self.loss or "mse"} if targets else {})
        if self.recipe is None:
            return settings
        from tpsgd.engine.learners import optimizers
        from tpsgd.zoo import recipes

        recipe = recipes.ALL[self.recipe].settings(shape, settings.get("device"))
        del recipe["order"]  # the arm has `chosen_order`
        suited = recipe["optimizer"] or optimizers.adam
        if settings.get("optimizer", suited) is not suited:
            del recipe["lr"], recipe["weight_decay"]  # they suit the recipe's optimizer
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


def block_numbers(text: str) -> int | list[int] | str:
    """A number of blocks, 4, the number of layers in each, 2,2,2,4, or a word."""
    if text in ("auto", "layers"):
        return text
    words = listed(text)
    if not words or not all(re.fullmatch(r"[1-9]\d{0,5}", word, re.ASCII) for word in words):
        raise TpsgdError(
            f"--blocks {text}: write a number of blocks, 4, the number of layers in each, 2,2,4, "
            "auto or layers"
        )
    numbers = [int(word) for word in words]
    return numbers if "," in text else numbers[0]


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
        None, "Keep blocks' inputs: yes, no (recompute), or in files in this folder."
    )
    micro_batch: int | None = setting(None, "Samples of a batch in memory at a time.", min=1)

    def settings(self) -> dict[str, Any]:
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
    threads: int | None = setting(
        None, "CPU threads, at most; small nets take one.", min=1, max=MOST_THREADS
    )

    def settings(self) -> dict[str, Any]:
        import torch

        from tpsgd.engine.device import resolve_device

        resolve_device(self.device or "cpu")
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
