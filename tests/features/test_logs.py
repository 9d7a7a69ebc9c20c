"""Logs: a line per block and epoch as soon as it is known; what happens when the disk is full."""

import csv
import errno
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from helpers import mlp, points

import tpsgd
from tpsgd import TpsgdError, logs

DATA = points()


def train(*callbacks, **settings):
    return tpsgd.fit(mlp(6, 8, 3), DATA, epochs=2, callbacks=list(callbacks), **settings)


def test_a_csv_file_has_a_row_per_block_and_epoch(tmp_path):
    run = train(logs.csv(tmp_path / "log.csv"), validation=DATA)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [(int(r["block"]), int(r["epoch"])) for r in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert [float(r["loss"]) for r in rows] == [e.loss for e in run.history]
    assert [float(r["val_accuracy"]) for r in rows] == [e.val_accuracy for e in run.history]


def test_json_lines_hold_the_same_values(tmp_path):
    run = train(logs.json_lines(tmp_path / "log.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines == [vars(epoch) for epoch in run.history]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_line_is_in_the_file_before_the_next_epoch(tmp_path, name):
    counts = []
    file = tmp_path / name
    train(logs.file(file), lambda _: counts.append(len(file.read_text().splitlines())))
    assert counts == [c + name.endswith("csv") for c in (1, 2, 3, 4)]


def test_json_has_no_nan(tmp_path):
    log = logs.json_lines(tmp_path / "log.jsonl")
    log(tpsgd.engine.record.Epoch(1, 1, float("nan"), val_loss=float("inf")))
    values = json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=pytest.fail)
    assert values["loss"] is None and values["val_loss"] is None


def test_a_file_that_exists_is_refused_or_replaced_or_continued(tmp_path):
    file = tmp_path / "log.csv"
    train(logs.csv(file))
    with pytest.raises(TpsgdError, match=r"log.csv is already there.*--overwrite"):
        logs.csv(file)
    assert len(file.read_text().splitlines()) == 5
    train(logs.csv(file, append=True))
    lines = file.read_text().splitlines()
    assert len(lines) == 9 and sum(line.startswith("block") for line in lines) == 1
    train(logs.csv(file, overwrite=True))
    assert len(file.read_text().splitlines()) == 5


class Killed(Exception):
    """The run ends, as if the process had been killed."""


def rows_of(file):
    lines = file.read_text().splitlines()
    if file.suffix == ".jsonl":
        return [(row["block"], row["epoch"]) for row in map(json.loads, lines)]
    return [(int(row["block"]), int(row["epoch"])) for row in csv.DictReader(lines)]


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize("every", [0, 1e9], ids=["checkpoints", "no checkpoint"])
@pytest.mark.parametrize("place", [(1, 2), (2, 2)], ids=str)
def test_epochs_that_are_trained_again_are_in_the_log_once(tmp_path, name, every, place):
    file, saved = tmp_path / name, tpsgd.Checkpoint(tmp_path / "run", every=every)

    def interrupt(epoch):
        if (epoch.block, epoch.epoch) == place:
            raise Killed

    train(logs.file(file))  # an earlier run, which stays
    with pytest.raises(Killed):
        train(logs.file(file, append=True), interrupt, checkpoint=saved)
    with file.open("a") as stream:
        stream.write('{"block": 2, "ep' if "json" in name else "2,1,0.4")  # cut off by a kill
    resumed = tpsgd.Checkpoint(saved.folder, every=every, resume=True)
    run = train(logs.file(file, append=True), checkpoint=resumed)
    assert rows_of(file) == 2 * [(1, 1), (1, 2), (2, 1), (2, 2)]
    train(logs.file(file, append=True), checkpoint=resumed)  # it is finished: nothing to add
    assert rows_of(file)[4:] == [(e.block, e.epoch) for e in run.history]


def test_lines_of_another_run_stay(tmp_path):
    file, saved = tmp_path / "log.csv", tpsgd.Checkpoint(tmp_path / "run", every=0)

    def interrupt(epoch):
        if epoch.block == 2:
            raise Killed

    with pytest.raises(Killed):
        train(interrupt, checkpoint=saved)  # without a log
    train(logs.file(file))
    resumed = tpsgd.Checkpoint(saved.folder, resume=True)
    train(logs.file(file, append=True), checkpoint=resumed)
    assert rows_of(file) == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 1), (2, 2)]


def test_mistakes_in_the_name(tmp_path):
    with pytest.raises(TpsgdError, match=r"a log is FILE.csv or FILE.jsonl, not .*log.txt"):
        logs.file(tmp_path / "log.txt")
    with pytest.raises(TpsgdError, match=r"cannot write the log .*No such file"):
        logs.csv(tmp_path / "nowhere" / "log.csv")


def test_a_full_disk_does_not_end_the_training(tmp_path, monkeypatch):
    log, real = logs.csv(tmp_path / "log.csv"), Path.open

    def full(self, mode="r", *args, **options):
        if "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(UserWarning, match=r"is not written any further \(No space left") as caught:
        run = train(log)
    assert len(run.history) == 4 and len(caught) == 1
    assert log.error is not None and log.error.errno == errno.ENOSPC


# ---- several runs with one log -------------------------------------------------------------------

ONCE = {"epochs": 2, "batch_size": 16, "restarts": 2}


def net():
    return mlp(6, 8, 3)


def compared(*callbacks, arms=("drtp",), **settings):
    pair = (DATA, DATA)
    return tpsgd.compare(pair, net, arms, callbacks=list(callbacks), **(ONCE | settings))


def runs_of(file):
    """Block and epoch of the rows, by arm and seed, in the order of the file."""
    text, runs = file.read_text().splitlines(), {}
    rows = map(json.loads, text) if file.suffix == ".jsonl" else csv.DictReader(text)
    for row in rows:
        runs.setdefault((row["arm"], int(row["seed"])), []).append(
            (int(row["block"]), int(row["epoch"]))
        )
    return runs


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_rows_of_a_comparison_have_the_arm_and_the_seed(tmp_path, name):
    arm = tpsgd.Arm('drtp, "wide"', tpsgd.rules.drtp())
    record = compared(logs.file(tmp_path / name), arms=[arm])
    expected = {
        (r.arm.name, run.seed): [(e.block, e.epoch) for e in run.history]
        for r in record.results
        for run in r.runs
    }
    assert len(expected) == 6 and runs_of(tmp_path / name) == expected


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize("every", [0, 1e9], ids=["checkpoints", "no checkpoint"])
def test_a_resumed_comparison_has_each_row_once(tmp_path, name, every):
    file, count = tmp_path / name, 0
    compared(logs.file(file), arms=["drtp"], restarts=1)  # another one, which stays
    before = file.read_text()

    def interrupt(epoch):
        nonlocal count
        count += 1
        if count == 7:  # in the third arm's first block
            raise KeyboardInterrupt

    folder, arms = tmp_path / "saved", {"arms": ["dfa", "drtp"], "restarts": 1, "seed": 5}
    began = tpsgd.Checkpoint(folder, every=every)
    record = compared(logs.file(file, append=True), interrupt, checkpoint=began, **arms)
    assert record.interrupted
    resumed = tpsgd.Checkpoint(folder, every=every, resume=True)
    record = compared(logs.file(file, append=True), checkpoint=resumed, **arms)
    assert file.read_text().startswith(before)
    rows = {run: rows for run, rows in runs_of(file).items() if run[1] == 5}
    assert rows == {
        (r.arm.name, 5): [(e.block, e.epoch) for e in r.runs[0].history] for r in record.results
    }


def test_a_log_of_a_run_alone_is_no_log_of_several(tmp_path):
    file = tmp_path / "log.csv"
    train(logs.csv(file))
    before = file.read_text()
    with pytest.raises(TpsgdError, match=r"log.csv has no arms and seeds: name another file"):
        compared(logs.csv(file, append=True))
    assert file.read_text() == before
    log = logs.csv(tmp_path / "of several.csv")
    compared(log)
    train(log)
    train(logs.csv(log.path, append=True))
    *_, last = csv.DictReader(log.path.read_text().splitlines())
    assert (last["arm"], last["seed"], last["block"], last["epoch"]) == ("", "", "2", "2")


def test_restarts_searches_and_taps_have_rows_of_their_own(tmp_path):
    file = tmp_path / "many.csv"
    tpsgd.fit_many(net, DATA, rule="drtp", callbacks=[logs.csv(file)], **ONCE)
    assert [*runs_of(file)] == [("drtp", 0), ("drtp", 1)]
    tpsgd.search(
        (DATA, DATA), net, "drtp", rates=[0.01, 0.1], callbacks=[logs.csv(tmp_path / "s.csv")],
        epochs=1, batch_size=16,
    )  # fmt: skip
    names = {arm for arm, _ in runs_of(tmp_path / "s.csv")}
    assert {"drtp", "drtp rate 0.01", "drtp rate 0.1", "backprop rate 0.1", "frozen"} <= names
    adapt = pytest.importorskip("tpsgd_adapt")
    taps = adapt.Backbone(mlp(6, 8, 8), ["1", "2"])
    log = logs.csv(tmp_path / "taps.csv")
    adapt.fit(taps, DATA, taps=["1", "2"], epochs=1, callbacks=[log])
    assert {arm for arm, _ in runs_of(log.path)} == {"1", "2"}


def test_a_callback_without_runs_is_called_as_it_is():
    epochs = []
    compared(epochs.append, restarts=1)
    assert len(epochs) == 8


# ---- TensorBoard and MLflow, which stand-ins play ------------------------------------------------


def test_tensorboard_gets_every_figure(monkeypatch):
    calls = []

    class Writer:
        def __init__(self, folder):
            calls.append(folder)

        def add_scalar(self, *values):
            calls.append(values)

        def flush(self):
            calls.append("flush")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    run = train(logs.tensorboard("runs/1"))
    first = run.history[0]
    assert calls[:2] == ["runs/1", ("loss/block 1", first.loss, 1)]
    assert ("accuracy/block 2", run.history[-1].accuracy, 2) in calls
    assert calls.count("flush") == 4 and not any("val" in str(call) for call in calls)


def test_mlflow_gets_every_figure(monkeypatch):
    calls = []
    client = SimpleNamespace(log_metrics=lambda values, step: calls.append((values, step)))
    monkeypatch.setitem(sys.modules, "mlflow", client)
    run = train(logs.mlflow())
    last = run.history[-1]
    assert calls[-1] == ({"block2_loss": last.loss, "block2_accuracy": last.accuracy}, 2)
    assert len(calls) == 4


def test_each_run_of_a_comparison_has_a_folder_of_tensorboard(monkeypatch):
    writers, closed = {}, []

    def writer(folder):
        scalars = writers.setdefault(folder, [])

        def add(*values):
            scalars.append(values)

        return SimpleNamespace(
            add_scalar=add, flush=lambda: None, close=lambda: closed.append(folder)
        )

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    log = logs.tensorboard("runs")
    compared(log)
    folders = [f"runs/{arm}-seed-{s}" for s in (0, 1) for arm in ("backprop", "drtp", "frozen")]
    assert [Path(folder).as_posix() for folder in writers] == folders
    assert closed == [*writers][:-1] and all(writers.values())
    train(log)
    assert [*writers][-1] == "runs"


def test_each_run_of_a_comparison_is_one_of_mlflow(monkeypatch):
    active, rows, names = [], [], []

    class Started:
        def __init__(self, nested, run_name=None, run_id=None):
            assert nested
            names.extend([run_name] * (run_name is not None))
            self.info = SimpleNamespace(run_id=run_id or run_name)

        def __enter__(self):
            active.append(self.info.run_id)
            return self

        def __exit__(self, *_):
            active.pop()

    def log_metrics(values, step):
        rows.append((active[-1], step))

    client = SimpleNamespace(log_metrics=log_metrics, start_run=Started)
    monkeypatch.setitem(sys.modules, "mlflow", client)
    compared(logs.mlflow(), restarts=1)
    assert names == ["backprop seed 0", "drtp seed 0", "frozen seed 0"]
    drtp = [step for name, step in rows if name == "drtp seed 0"]
    assert drtp == [1, 2, 1, 2] and not active


@pytest.mark.parametrize(
    ("make", "package", "name"),
    [
        (lambda: logs.tensorboard("x"), "tensorboard", "torch.utils.tensorboard"),
        (logs.mlflow, "mlflow", "mlflow"),
    ],
)
def test_a_missing_package_is_one_sentence(monkeypatch, make, package, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TpsgdError, match=f"run: pip install {package}$"):
        make()
