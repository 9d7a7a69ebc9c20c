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
