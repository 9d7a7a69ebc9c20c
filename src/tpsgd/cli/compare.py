"""`tpsgd compare`: several rules, backprop and controls; a table and a report."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import tpsgd
from tpsgd.cli import options
from tpsgd.cli.options import AsJson, Overwrite, option
from tpsgd.cli.resuming import Resuming
from tpsgd.cli.terminal import NOTHING_DONE, Stopped, live_bar, show, write_then_show
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import writable_folder, write_whole
from tpsgd.common.output import check_new, output_folder, write_or_rescue

if TYPE_CHECKING:
    from tpsgd.comparison.compare import Comparison
    from tpsgd.engine.arm import Arm


@options.grouped
def compare(
    data: options.DataOptions,
    model: options.Model,
    training: options.Compared,
    memory: options.MemoryOptions,
    machine: options.Machine,
    resuming: Resuming,
    rules: Annotated[str, option("all, or some: drtp,FILE.py:NAME. See: tpsgd rules.")] = "all",
    restarts: Annotated[int, option("Models to train with each rule.", min=1)] = 3,
    equal: Annotated[
        Literal["passes", "reads", "seconds"],
        option("Equal for all rules: epochs per block, reads of the data, or seconds."),
    ] = "passes",
    seconds: Annotated[
        float | None,
        option("--equal seconds: the time of each run (default: that of the slowest)."),
    ] = None,
    out: Annotated[Path, option("Folder for the report.")] = Path("tpsgd-report"),
    latex: Annotated[Path | None, option("FILE.tex: the table for a paper.")] = None,
    csv: Annotated[Path | None, option("FILE.csv: a line for each rule.")] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Compare rules with backprop and with frozen hidden layers: a table and a report.

    If one of them fails, the others go on, and the exit status is 1.
    """
    from tpsgd.comparison import arms
    from tpsgd.rules import scale_of

    places = {"out": out, "latex": latex, "csv": csv, "checkpoint": resuming.checkpoint}
    options.keep_apart(data.data, model.model, **places)
    named = [] if rules == "all" else list(dict.fromkeys(options.listed(rules)))
    for word in named:
        arms.entry(word)
    settings = options.settings_of(training, memory, machine, model, resuming)
    samples = data.load(training.seed)
    settings = training.complete(settings, samples.shape, samples.targets)
    factory, head = model.factory_for(samples)
    words, left_out = (named, []) if named else arms.all_words(factory)
    settings["order"] = training.chosen_order
    compared = [arms.arm(word, settings["order"], factory) for word in words]
    if (scale := training.readout_scale) is not None:
        compared = [arms.scaled(a, scale) if scale_of(a.rule) else a for a in compared]
    compared = arms.with_controls(compared)
    if head == "ridge":
        compared = [arms.with_ridge(arm, factory, settings) for arm in compared]
    settings |= {"restarts": restarts, "equal": equal, "seconds": seconds}
    settings["command"] = options.command_line()
    settings["notes"] = model.record(head) | {"left_out": left_out}

    def show_json(record: "Comparison", page: Path | None) -> None:
        print(json.dumps({**record.as_dict(), "report": page and str(page)}), flush=True)

    if latex is not None and latex == csv:
        raise TpsgdError("--latex and --csv name the same file")
    for file in filter(None, (latex, csv)):
        writable_folder(file.parent)
        check_new(file, overwrite)
    again, printed = overwrite or resuming.goes_on, show_json if as_json else show
    with resuming.interruptible():
        record = report_on(out, again, printed, samples, factory, compared, **settings)
    if latex is not None:
        write_whole(latex, record.to_latex().encode())
    if csv is not None:
        write_whole(csv, record.to_csv().encode())
    if any(result.error for result in record.results):
        raise typer.Exit(1)


def report_on(
    out: Path, overwrite: bool, printed: Callable[..., None], *args: Any, **settings: Any
) -> "Comparison":
    """Compare, write the report to a folder, print the record; Ctrl-C ends with what is there.

    A progress bar shows the results so far, and `results.json` has them after every run.
    """
    from tpsgd.comparison import report

    def save(record: "Comparison") -> None:
        with suppress(OSError):  # a full disk: the end of the comparison tries again, and says so
            report.save(record, folder)

    with output_folder(out, report.FILES, overwrite) as folder:
        with live_bar() as advance:

            def progress(record: "Comparison", arm: "Arm", share: float) -> None:
                advance(arm.name, share, 1.0)

            record = tpsgd.compare(*args, progress=progress, each=save, **settings)
        if not record.finished:
            raise Stopped(NOTHING_DONE)
        write = partial(write_or_rescue, partial(report.write, record), folder)
        write_then_show(write, partial(printed, record))
        if record.interrupted:
            count = f"{record.finished} of {record.asked} training runs"
            raise Stopped(f"interrupted; {count} are in {folder}")
    return record
