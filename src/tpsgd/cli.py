"""The command line: words in, library calls out. torch is imported by the commands that need it."""

import difflib
import io
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from . import __version__
from .arms import PEERS, SOURCES, all_words, arm_of, headed
from .errors import TpsgdError
from .options import (
    HEADS,
    INITS,
    LOSSES,
    SCHEDULES,
    ActivationWord,
    AsJson,
    BatchSize,
    DataWord,
    Device,
    Epochs,
    Head,
    InitWord,
    Leak,
    LossWord,
    MaxTrain,
    ModelWord,
    Rate,
    ScheduleWord,
    Seed,
    SetName,
    Threads,
    Window,
)
from .terminal import grid_of, live_bar, show

if TYPE_CHECKING:
    from .data import Data
    from .models import Factory

INTERRUPTED = 130

app = typer.Typer(
    help="Train neural networks without backpropagation.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The built-in data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")


def main() -> NoReturn:
    """Run the command line; every mistake of the caller's is one line and exit status 2."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
        sys.exit(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        return _say("interrupted", INTERRUPTED) if code == INTERRUPTED else code or 0
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted", INTERRUPTED)
    except Stopped as stopped:
        return _say(str(stopped), INTERRUPTED)
    except TpsgdError as error:
        return _say(str(error), 2)
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _say(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's complaints have it; help has no text
            raise
        text = error.format_message()  # type: ignore[attr-defined]
        return _say(f"{text} (--help shows what there is)", 2) if text else 0


class Stopped(Exception):
    """Ctrl-C, after what was finished has been kept."""


def _say(text: str, code: int = 0) -> int:
    """One line on standard error."""
    print("tpsgd:", " ".join(text.split()), file=sys.stderr)
    return code


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tpsgd {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Print it.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def train(
    data: DataWord = "digits",
    model: ModelWord = "mlp:256",
    rule: Annotated[str, typer.Option(help="See: tpsgd rules.")] = "readout",
    epochs: Epochs = 10,
    seed: Seed = 0,
    batch_size: BatchSize = 128,
    lr: Rate = None,
    schedule: ScheduleWord = None,
    loss: LossWord = None,
    activation: ActivationWord = "leaky-relu",
    window: Window = None,
    init: InitWord = None,
    leak: Leak = None,
    head: Head = None,
    device: Device = None,
    threads: Threads = None,
    max_train: MaxTrain = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for model.pt (a state dict) and run.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with one rule and test it."""
    _check([rule], schedule)
    options = _options(epochs, batch_size, lr, loss, device, threads)
    samples = _load(data, seed, max_train)
    factory, recurrent = _model(model, samples, activation, init, leak)
    options |= _through_time(window, model, recurrent)
    head = _head(head, recurrent)
    arm = arm_of(rule, _schedule(schedule or SCHEDULES[0]), factory)
    if rule in PEERS and (schedule or lr or loss):
        raise TpsgdError(f"{rule} has no schedule, rate or loss to choose: leave those options out")
    if schedule and arm.rule and arm.rule.head:
        arm = replace(arm, schedule=_schedule(schedule))  # as asked: DFA may refuse it
    (arm,) = headed([arm], head, factory, lr)
    folder = None if out is None else _usable(out)

    from . import compare as comparing
    from .evaluation import evaluate

    with live_bar() as advance:
        made = comparing.train(
            arm, factory, samples.train, seed=seed, **options,
            progress=advance and (lambda done, total: advance(rule, done / total)),
        )  # fmt: skip
    net, run = made.models[0], made.runs[0]
    accuracy = evaluate(net, samples.test)
    record = {"command": _command(), "accuracy": accuracy, **run.as_dict()}
    record["settings"] = {**_named(model, activation, init, leak, head), **run.settings}
    record |= {"data": comparing.describe(samples), "machine": comparing.machine(device)}
    record["versions"] = comparing.versions()
    if folder is not None:
        _keep(folder, net, record)
    if as_json:
        print(json.dumps(record))
        return
    print(run)
    print(f"test accuracy {accuracy:.2%} of {len(samples.test[1]):,} samples ({data})")
    if folder is not None:
        print(f"saved {folder / 'model.pt'} and {folder / 'run.json'}")


@app.command()
def compare(
    data: DataWord = "digits",
    model: ModelWord = "mlp:256",
    rules: Annotated[str, typer.Option(help="all, or some: readout,drtp. See: tpsgd rules.")] = (
        "all"
    ),
    epochs: Epochs = 10,
    restarts: Annotated[int, typer.Option(help="Models to train with each rule.", min=1)] = 3,
    seed: Seed = 0,
    batch_size: BatchSize = 128,
    lr: Rate = None,
    schedule: ScheduleWord = None,
    loss: LossWord = None,
    activation: ActivationWord = "leaky-relu",
    window: Window = None,
    init: InitWord = None,
    leak: Leak = None,
    head: Head = None,
    device: Device = None,
    threads: Threads = None,
    max_train: MaxTrain = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("tpsgd-report"),
    as_json: AsJson = False,
) -> None:
    """Compare rules with backprop and with frozen hidden layers: a table and a report."""
    given = [] if rules == "all" else [word.strip() for word in rules.split(",")]
    words = list(dict.fromkeys(given))
    _check(words, schedule)
    options = _options(epochs, batch_size, lr, loss, device, threads)
    samples = _load(data, seed, max_train)
    factory, recurrent = _model(model, samples, activation, init, leak)
    options |= _through_time(window, model, recurrent)
    head = _head(head, recurrent)
    chosen = _schedule(schedule or SCHEDULES[0])
    words = words or all_words(factory, recurrent)
    left_out = [] if given or recurrent else [word for word in PEERS if word not in words]
    arms = [arm_of(word, chosen, factory) for word in words]
    arms = headed(arms, head, factory, lr, controls=True)
    folder = _usable(out)

    from . import compare as comparing
    from . import report

    with live_bar() as advance:
        record = comparing.compare(
            samples, factory, arms, restarts=restarts, seed=seed, **options,
            notes=_named(model, activation, init, leak, head)
            | {"schedule": schedule or SCHEDULES[0], "left_out": left_out},
            command=_command(),
            progress=advance and (lambda record, arm, share: advance(arm.name, share, record)),
            each=lambda record: report.save(record, folder),
        )  # fmt: skip
    if not record.finished:
        raise Stopped("interrupted before the first training finished; nothing was written")
    page = report.write(record, folder)
    if as_json:
        print(json.dumps({**record.as_dict(), "report": str(page)}))
    else:
        show(record, page)
    if record.interrupted:
        raise Stopped(f"interrupted; {record.finished} of {record.asked} trainings are in {folder}")


@app.command()
def rules() -> None:
    """List the rules."""
    grid = grid_of("rule", "what it does", "projects", "source")
    for word, source in SOURCES.items():
        arm = arm_of(word)
        projected = arm.rule.signal.value if arm.rule and arm.rule.objective else "nothing"
        projected = "the label" if word == "zorb" else projected  # through the net itself
        grid.add_row(word, arm.about, projected, source)
    Console().print(grid)


@data_app.command("list")
def data_list() -> None:
    """List the built-in data sets and where they lie."""
    from .data import describe
    from .run import columns

    print(columns([("name", "train + test", "shape", "classes", "where"), *describe()]))


@data_app.command("fetch")
def data_fetch(name: SetName) -> None:
    """Download a data set, unless it is here."""
    from .data import fetch

    print(fetch(name))


@data_app.command("path")
def data_path(name: SetName) -> None:
    """Print the folder of a data set."""
    from .data import path

    if (place := path(name)) is None:
        raise TpsgdError(f"{name} is not here; run: tpsgd data fetch {name}")
    print(place)


def _known(kind: str, word: str, words: Iterable[str]) -> None:
    """Refuse a word that is not there, and name the closest that is."""
    words = list(words)
    if word not in words:
        close = difflib.get_close_matches(word.lower(), words, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(words)}"
        raise TpsgdError(f"unknown {kind} {word!r}: {hint}")


def _check(words: Iterable[str], schedule: str | None) -> None:
    """Refuse rules and schedules that there are not, before anything is loaded."""
    for word in words:
        _known("rule", word, SOURCES)
    if schedule is not None:
        _known("schedule", schedule, SCHEDULES)


def _head(word: str | None, recurrent: bool) -> str:
    """The head that was asked for, or the one that such models get."""
    word = word or ("ridge" if recurrent else "adam")
    _known("head", word, HEADS)
    return word


def _schedule(word: str) -> Any:
    from . import schedules

    return getattr(schedules, word)


def _options(
    epochs: int,
    batch_size: int,
    lr: float | None,
    loss: str | None,
    device: str | None,
    threads: int | None,
) -> dict[str, Any]:
    """What `fit` takes, from words."""
    if lr is not None and not 0 < lr < float("inf"):
        raise TpsgdError(f"--lr must be more than 0, got {lr:g}")
    if loss is not None:
        _known("loss", loss, LOSSES)

    import torch

    from . import losses
    from .fitting import usable

    usable(device or "cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    value = None if loss is None else getattr(losses, loss.replace("-", "_"))
    return dict(epochs=epochs, batch_size=batch_size, lr=lr, loss=value, device=device)


def _through_time(window: int | None, model: str, recurrent: bool) -> dict[str, Any]:
    """What `fit` takes for recurrent models."""
    if window is not None and not recurrent:
        raise TpsgdError(f"--window is for recurrent models such as rnn:512, not for {model}")
    return {} if window is None else {"window": window}


def _named(
    model: str, activation: str, init: str | None, leak: float | None, head: str
) -> dict[str, str | float]:
    """A model's settings, for the record; an activation that it has none of is not one."""
    cells_only = "rnn:" in model and "+" not in model
    used = None if cells_only else activation
    named = {"model": model, "activation": used, "init": init, "leak": leak}
    named["head"] = None if head == "adam" else head
    return {key: value for key, value in named.items() if value is not None}


def _load(data: str, seed: int, max_train: int | None) -> "Data":
    from .data import load

    return load(data, seed=seed, max_train=max_train)


def _model(
    word: str, samples: "Data", activation: str, init: str | None, leak: float | None
) -> "tuple[Factory, bool]":
    """A factory of models for these samples, and whether they are recurrent."""
    if init is not None:
        _known("init", init, INITS)

    from .models import factory, is_own, is_recurrent
    from .padded import Padded

    make = factory(
        word, samples.shape, len(samples.classes), activation, tokens=samples.vocabulary,
        init=init, leak=leak,
    )  # fmt: skip
    try:
        recurrent = is_recurrent(make())
    except TpsgdError:
        raise
    except Exception as error:  # in the caller's own file
        raise TpsgdError(f"{word} failed with {type(error).__name__}: {error}") from error
    if isinstance(samples.train[0], Padded) and not recurrent and not is_own(word):
        raise TpsgdError(f"{word} cannot read sequences of different lengths: choose rnn:512")
    return make, recurrent


def _usable(out: Path) -> Path:
    from .report.files import usable

    return usable(out)


def _keep(folder: Path, model: Any, record: dict[str, Any]) -> None:
    import torch

    from .report.files import write_whole

    file = io.BytesIO()
    torch.save(model.cpu().state_dict(), file)
    write_whole(folder / "model.pt", file.getvalue())
    write_whole(folder / "run.json", json.dumps(record, indent=1).encode())


def _command() -> str:
    return shlex.join(["tpsgd", *sys.argv[1:]])
