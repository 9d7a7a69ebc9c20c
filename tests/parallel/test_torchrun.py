"""`torchrun --nproc-per-node 2 -m tpsgd train ...`: the ordinary options, results written once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import close

import tpsgd
from tpsgd.cli import torchrun as launch
from tpsgd_parallel.ranks import check_gpus

SECONDS = 300
TRAIN = ("train", "--data", "digits", "--epochs", "2", "--batch-size", "128", "--seed", "1")
DYING = """
import os, torch
from torch import nn

calls = iter(range(10**6))

def die(*_):
    if next(calls) == 20 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)

def make():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    model[1].register_forward_hook(die)
    return model
"""


def begin(folder: Path, *words: str) -> subprocess.Popen:
    """A job of two ranks; `--` keeps the options of torchrun apart from those of tpsgd."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *torchrun, "tpsgd", *words], cwd=folder, **pipes)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The folder, and output and errors of two jobs, which run side by side."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "dying.py").write_text(DYING)
    trained = (*TRAIN, "--model", "mlp:32", "--log", "log.csv", "--checkpoint", "state")
    jobs = {
        "trained": begin(folder, *trained, "--out", "two"),
        "dying": begin(folder, *TRAIN, "--model", "dying.py:make"),
    }
    return folder, {name: job.communicate(timeout=SECONDS) for name, job in jobs.items()}


@pytest.mark.full
def test_two_ranks_train_the_model_of_one_process(outputs, says):
    folder, _ = outputs
    status, _, errors = says(*TRAIN, "--model", "mlp:32", "--out", str(folder / "one"))
    assert (status, errors) == (0, "")
    one, two = (torch.load(folder / name / "model.pt") for name in ("one", "two"))
    close(two, one, rtol=0, atol=1e-6)
    records = [json.loads((folder / name / "run.json").read_text()) for name in ("one", "two")]
    assert records[0]["accuracy"] == pytest.approx(records[1]["accuracy"], abs=0.01)
    assert records[1]["settings"]["parallel"] == "data_parallel"
    assert records[1]["command"].startswith("torchrun --nproc-per-node 2 -m -- tpsgd train --data")


@pytest.mark.full
def test_results_are_written_and_shown_once(outputs):
    folder, texts = outputs
    shown, errors = texts["trained"]
    assert shown.count("test accuracy") == shown.count("saved two") == 1
    assert "tpsgd:" not in errors
    assert len((folder / "log.csv").read_text().splitlines()) == 5  # a head, two blocks, two epochs
    assert (folder / "state" / "checkpoint.json").exists()


@pytest.mark.full
def test_a_rank_that_dies_is_one_sentence(outputs):
    shown, errors = outputs[1]["dying"]
    (sentence,) = [line for line in errors.splitlines() if line.startswith("tpsgd:")]
    assert sentence.startswith("tpsgd: rank 1 died in epoch 2 of block 1: the other ranks")
    assert "test accuracy" not in shown


@pytest.fixture
def a_rank(monkeypatch):
    """The environment that torchrun gives to one of its processes."""

    def become(number: int) -> None:
        values = {"RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return become


@pytest.mark.parametrize("number", [0, 1])
def test_other_commands_are_for_one_process_and_rank_0_says_so(says, a_rank, number):
    a_rank(number)
    text = "tpsgd: plan runs in one process: start it without torchrun, which is for train\n"
    assert says("plan", "--data", "digits") == (2, "", text if number == 0 else "")


def test_the_command_of_ranks_on_two_machines_names_both(a_rank, monkeypatch):
    a_rank(0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "1", "-m", "--", "tpsgd"]
    assert launch.command_words() == words


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    with pytest.raises(tpsgd.TpsgdError, match="4 ranks on this machine need a GPU each, and it"):
        check_gpus("cuda")
    check_gpus("cpu")
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    check_gpus("cuda")
