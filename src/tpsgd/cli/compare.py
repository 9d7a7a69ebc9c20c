"""`tpsgd compare`: several rules, backprop and controls; a table and a report."""

import json
from pathlib import Path
from typing import Annotated

from tpsgd.cli.options import (
    SCHEDULES,
    AsJson,
    DataOptions,
    MachineOptions,
    MemoryOptions,
    ModelOptions,
    TrainingOptions,
    command_line,
    grouped,
    listed,
    option,
    settings_of,
)
from tpsgd.cli.terminal import Stopped, live_bar, show
from tpsgd.files import writable_folder


@grouped
def compare(
    data: DataOptions,
    model: ModelOptions,
    training: TrainingOptions,
    memory: MemoryOptions,
    machine: MachineOptions,
    rules: Annotated[str, option("all, or some: readout,drtp. See: tpsgd rules.")] = "all",
    restarts: Annotated[int, option("Models to train with each rule.", min=1)] = 3,
    out: Annotated[Path, option("Folder for the report.")] = Path("tpsgd-report"),
    as_json: AsJson = False,
) -> None:
    """Compare rules with backprop and with frozen hidden layers: a table and a report."""
    from tpsgd.comparison import report
    from tpsgd.comparison.arms import all_words, arm, entry, with_controls, with_ridge
    from tpsgd.comparison.compare import compare
    from tpsgd.engine.optimizers import adam
    from tpsgd.train import sequential

    words = [] if rules == "all" else listed(rules)
    for word in words:
        entry(word)
    settings = settings_of(training, memory, machine, model)
    samples = data.load(training.seed)
    factory, recurrent = model.factory_for(samples)
    head = model.head_of(recurrent)
    words, left_out = (words, []) if words else all_words(factory)
    schedule = training.schedule_of(sequential)
    arms = with_controls([arm(word, schedule, factory) for word in words])
    if head == "ridge":
        optimizer = settings.get("optimizer", adam)
        arms = [with_ridge(a, factory, training.lr, optimizer) for a in arms]
    folder = writable_folder(out)
    notes = {"schedule": training.schedule or SCHEDULES[0], "left_out": left_out}
    with live_bar() as advance:
        record = compare(
            samples, factory, arms, restarts=restarts, command=command_line(),
            notes=model.record(head) | notes,
            progress=advance and (lambda record, arm, share: advance(arm.name, share, record)),
            each=lambda record: report.save(record, folder), **settings,
        )  # fmt: skip
    if not record.finished:
        raise Stopped("interrupted before the first training run finished; nothing was written")
    page = report.write(record, folder)
    if as_json:
        print(json.dumps({**record.as_dict(), "report": str(page)}))
    else:
        show(record, page)
    if record.interrupted:
        count = f"{record.finished} of {record.asked} training runs"
        raise Stopped(f"interrupted; {count} are in {folder}")
