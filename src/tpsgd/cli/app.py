"""The command line: words in, library calls out. torch is imported by the commands that need it."""

import io
import json
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from tpsgd import __version__
from tpsgd.cli import adapt as adapted
from tpsgd.cli import plan as planned
from tpsgd.cli import search as searched
from tpsgd.cli.options import (
    SCHEDULES,
    ActivationWord,
    AsJson,
    BatchSize,
    Budget,
    DataWord,
    Device,
    Epochs,
    Head,
    InitWord,
    Leak,
    LossWord,
    MaxTrain,
    ModelWord,
    OnDisk,
    OptimizerWord,
    Rate,
    ScheduleWord,
    Seed,
    SetName,
    Threads,
    Window,
    check,
    head_of,
    load,
    model_for,
    schedule_of,
    settings_of,
    through_time,
)
from tpsgd.cli.terminal import grid_of, held, live_bar, show
from tpsgd.comparison.arms import PEERS, SOURCES, all_words, arm_of, headed, refuse_options, single
from tpsgd.errors import TpsgdError

INTERRUPTED = 130

app = typer.Typer(
    help="Train neural networks without backpropagation.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The built-in data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.command()(planned.plan)
app.command()(searched.search)
app.command()(adapted.adapt)


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
    optimizer: OptimizerWord = None,
    memory_budget: Budget = None,
    max_train: MaxTrain = None,
    on_disk: OnDisk = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for model.pt (a state dict) and run.json.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train one model with one rule and test it."""
    check([rule], schedule, optimizer, memory_budget)
    options = settings_of(epochs, batch_size, lr, loss, device, threads, optimizer, memory_budget)
    samples = load(data, seed, max_train, on_disk)
    factory, recurrent = model_for(samples, model, activation, init, leak)
    options |= through_time(window, model, recurrent)
    head = head_of(head, recurrent)
    refuse_options(rule, optimizer, schedule, lr, loss)
    wanted = schedule and schedule_of(schedule)
    arm = single(rule, wanted, factory, head, lr, options["optimizer"])
    if memory_budget and not arm.budgeted:
        raise TpsgdError(f"--memory-budget is for what fit trains block by block, not for {rule}")
    folder = None if out is None else _usable(out)

    from tpsgd.comparison import compare as comparing
    from tpsgd.comparison import provenance
    from tpsgd.engine.evaluate import evaluate

    with live_bar() as advance:
        made = comparing.train(
            arm, factory, samples.train, seed=seed, **options,
            progress=advance and (lambda done, total: advance(rule, done / total)),
        )  # fmt: skip
    net, run = made.models[0], made.runs[0]
    accuracy = evaluate(net, samples.test)
    record = {"command": _command(), "accuracy": accuracy, **run.as_dict()}
    record["settings"] = {**_named(model, activation, init, leak, head), **run.settings}
    record |= {"data": provenance.describe(samples), "machine": provenance.machine(device)}
    record["versions"] = provenance.versions()
    if folder is not None:
        _keep(folder, net, record)
    if as_json:
        print(json.dumps(record))
        return
    print(run)
    if memory_budget:
        print(held(run, memory_budget))
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
    optimizer: OptimizerWord = None,
    memory_budget: Budget = None,
    max_train: MaxTrain = None,
    on_disk: OnDisk = None,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("tpsgd-report"),
    as_json: AsJson = False,
) -> None:
    """Compare rules with backprop and with frozen hidden layers: a table and a report."""
    given = [] if rules == "all" else [word.strip() for word in rules.split(",")]
    words = list(dict.fromkeys(given))
    check(words, schedule, optimizer, memory_budget)
    options = settings_of(epochs, batch_size, lr, loss, device, threads, optimizer, memory_budget)
    samples = load(data, seed, max_train, on_disk)
    factory, recurrent = model_for(samples, model, activation, init, leak)
    options |= through_time(window, model, recurrent)
    head = head_of(head, recurrent)
    chosen = schedule_of(schedule)
    words = words or all_words(factory, recurrent)
    left_out = [] if given or recurrent else [word for word in PEERS if word not in words]
    arms = [arm_of(word, chosen, factory) for word in words]
    arms = headed(arms, head, factory, lr, options["optimizer"], controls=True)
    folder = _usable(out)

    from tpsgd.comparison import compare as comparing
    from tpsgd.comparison import report

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
    from tpsgd.data import describe
    from tpsgd.units import columns

    print(columns([("name", "train + test", "shape", "classes", "where"), *describe()]))


@data_app.command("fetch")
def data_fetch(name: SetName) -> None:
    """Download a data set, unless it is here."""
    from tpsgd.data import fetch

    print(fetch(name))


@data_app.command("path")
def data_path(name: SetName) -> None:
    """Print the folder of a data set."""
    from tpsgd.data import path

    if (place := path(name)) is None:
        raise TpsgdError(f"{name} is not here; run: tpsgd data fetch {name}")
    print(place)


def _named(
    model: str, activation: str, init: str | None, leak: float | None, head: str
) -> dict[str, str | float]:
    """A model's settings, for the record; an activation that it has none of is not one."""
    cells_only = "rnn:" in model and "+" not in model
    used = None if cells_only else activation
    named = {"model": model, "activation": used, "init": init, "leak": leak}
    named["head"] = None if head == "adam" else head
    return {key: value for key, value in named.items() if value is not None}


def _usable(out: Path) -> Path:
    from tpsgd.files import writable_folder

    return writable_folder(out)


def _keep(folder: Path, model: Any, record: dict[str, Any]) -> None:
    import torch

    from tpsgd.files import write_whole

    file = io.BytesIO()
    torch.save(model.cpu().state_dict(), file)
    write_whole(folder / "model.pt", file.getvalue())
    write_whole(folder / "run.json", json.dumps(record, indent=1).encode())


def _command() -> str:
    return shlex.join(["tpsgd", *sys.argv[1:]])
