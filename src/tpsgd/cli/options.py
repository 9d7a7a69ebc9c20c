"""The options of the command line, the words that they take, and what those words mean.

torch is imported when a word becomes a value, not when it is checked.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpsgd.comparison.arms import SOURCES
from tpsgd.errors import TpsgdError
from tpsgd.units import as_bytes

if TYPE_CHECKING:
    from tpsgd.data import Data
    from tpsgd.zoo.words import Factory

SCHEDULES = ("sequential", "simultaneous")
LOSSES = ("mse", "cross-entropy", "bce")
HEADS = ("adam", "ridge")
OPTIMIZERS = ("adam", "sgd")
INITS = ("zeros", "uniform", "scaled-uniform", "reservoir")

OWN_DATA = (
    "digits, mnist, cifar10, seq-mnist-rows, eeg, tweets, ... (see: tpsgd data list); FILE.npz, "
    "FILE.csv, FILE.py:FUNCTION or a folder"
)
MODELS = (
    "mlp:256,256 (widths), cnn:16x5,16x5 (filters x kernel), rnn:512 (units), birnn:512 (both "
    "ways), rnn:512,512+256 (a perceptron after the +), paper-rnn:512, torch-rnn:512 or "
    "FILE.py:FUNCTION."
)
DataWord = Annotated[str, typer.Option("--data", help=f"{OWN_DATA} of images.")]
ModelWord = Annotated[str, typer.Option("--model", help=MODELS)]
Epochs = Annotated[int, typer.Option(help="Passes over the data, per block.", min=1)]
Seed = Annotated[int, typer.Option(help="Of weights, projections and sample order.", min=0)]
BatchSize = Annotated[int, typer.Option(help="Samples per step.", min=1)]
Rate = Annotated[
    float | None,
    typer.Option(help="Learning rate; if not given, the optimizer's own: Adam 1e-3, SGD 0.1."),
]
OptimizerWord = Annotated[
    str | None,
    typer.Option("--optimizer", help="adam (the default) or sgd, plain, which keeps no state."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        help="64MB, 1.5GB: the most that training may hold beyond the data set. Slower where "
        "little is left.",
    ),
]
OnDisk = Annotated[
    Path | None,
    typer.Option("--on-disk", help="Folder to decode the data set into, where memory is short."),
]
ScheduleWord = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="sequential (the default) or simultaneous (DFA and sDFA: always).",
    ),
]
LossWord = Annotated[
    str | None, typer.Option("--loss", help=f"Of the last block: {', '.join(LOSSES)}.")
]
ActivationWord = Annotated[
    str,
    typer.Option(
        "--activation",
        help="leaky-relu, relu, tanh, sigmoid, gelu, silu, softplus; after recurrent layers, the "
        "perceptron's.",
    ),
]
Window = Annotated[
    int | None, typer.Option(help="Recurrent: time steps read together; more is faster.", min=1)
]
InitWord = Annotated[
    str | None, typer.Option("--init", help=f"Recurrent: initial weights: {', '.join(INITS)}.")
]
Leak = Annotated[
    float | None,
    typer.Option(help="rnn: and birnn: the share of the state that a step renews, up to 1."),
]
Head = Annotated[
    str | None,
    typer.Option(help="The last layer: adam, or ridge, in closed form (recurrent nets: ridge)."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", min=1)]
MaxTrain = Annotated[int | None, typer.Option(help="Use that many training samples.", min=1)]
SetName = Annotated[
    str, typer.Argument(metavar="NAME", help="digits, mnist, seq-mnist-rows, ...; see: list.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def known(kind: str, word: str, words: Iterable[str]) -> None:
    """Refuse a word that is not there, and name the closest that is."""
    words = list(words)
    if word not in words:
        close = difflib.get_close_matches(word.lower(), words, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(words)}"
        raise TpsgdError(f"unknown {kind} {word!r}: {hint}")


def check(
    rules: Iterable[str], schedule: str | None, optimizer: str | None, budget: str | None
) -> None:
    """Refuse words that there are not, before anything is loaded."""
    for word in rules:
        known("rule", word, SOURCES)
    if schedule is not None:
        known("schedule", schedule, SCHEDULES)
    if optimizer is not None:
        known("optimizer", optimizer, OPTIMIZERS)
    if budget is not None:
        as_bytes(budget)


def head_of(word: str | None, recurrent: bool) -> str:
    """The head that was asked for, or the one that such models get."""
    word = word or ("ridge" if recurrent else "adam")
    known("head", word, HEADS)
    return word


def schedule_of(word: str | None) -> Any:
    """A schedule by its word."""
    from tpsgd.engine import schedules

    return getattr(schedules, word or SCHEDULES[0])


def optimizer_of(word: str | None) -> Any:
    """An optimizer's factory by its word."""
    from tpsgd.engine import optimizers

    return getattr(optimizers, word or OPTIMIZERS[0])


def settings_of(
    epochs: int,
    batch_size: int,
    lr: float | None,
    loss: str | None,
    device: str | None,
    threads: int | None,
    optimizer: str | None,
    budget: str | None,
) -> dict[str, Any]:
    """What `fit` takes, from words."""
    if lr is not None and not 0 < lr < float("inf"):
        raise TpsgdError(f"--lr must be more than 0, got {lr:g}")
    if loss is not None:
        known("loss", loss, LOSSES)

    import torch

    from tpsgd import losses
    from tpsgd.engine.device import resolve_device

    resolve_device(device or "cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    value = None if loss is None else getattr(losses, loss.replace("-", "_"))
    return dict(
        epochs=epochs, batch_size=batch_size, lr=lr, loss=value, device=device,
        optimizer=optimizer_of(optimizer), memory_budget=budget,
    )  # fmt: skip


def through_time(window: int | None, model: str, recurrent: bool) -> dict[str, Any]:
    """What `fit` takes for recurrent models."""
    if window is not None and not recurrent:
        raise TpsgdError(f"--window is for recurrent models such as rnn:512, not for {model}")
    return {} if window is None else {"window": window}


def load(data: str, seed: int, max_train: int | None, on_disk: Path | None) -> "Data":
    """A data set by its word."""
    from tpsgd.data import load

    return load(data, seed=seed, max_train=max_train, on_disk=on_disk)


def model_for(
    samples: "Data", word: str, activation: str, init: str | None, leak: float | None
) -> "tuple[Factory, bool]":
    """A factory of models for these samples, and whether they are recurrent."""
    from tpsgd.nets.padded import Padded
    from tpsgd.zoo.words import is_own

    made = model_of(
        word, samples.shape, len(samples.classes), activation, samples.vocabulary, init, leak
    )
    if isinstance(samples.train[0], Padded) and not made[1] and not is_own(word):
        raise TpsgdError(f"{word} cannot read sequences of different lengths: choose rnn:512")
    return made


def model_of(
    word: str,
    shape: tuple[int, ...],
    classes: int,
    activation: str,
    tokens: int | None = None,
    init: str | None = None,
    leak: float | None = None,
) -> "tuple[Factory, bool]":
    """A factory of models for samples of this shape, and whether they are recurrent."""
    if init is not None:
        known("init", init, INITS)

    from tpsgd.zoo.words import factory, is_recurrent

    make = factory(word, shape, classes, activation, tokens=tokens, init=init, leak=leak)
    try:
        return make, is_recurrent(make())
    except TpsgdError:
        raise
    except Exception as error:  # in the caller's own file
        raise TpsgdError(f"{word} failed with {type(error).__name__}: {error}") from error
