"""Ranks with GPUs: NCCL between those that have one each, gloo between two that share one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import close
from parallel.cases import CASES
from parallel.test_data_parallel import free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

RANK = Path(__file__).with_name("gpu_rank.py")
SECONDS = 120  # a job that hangs fails
NAMES = [
    "readout sequential", "readout simultaneous", "drtp simultaneous", "dfa", "cnn readout",
    "rnn readout", "adam", "micro-batches", "validation", "loader", "ridge head", "backprop",
]  # fmt: skip
GATHERED = ["ridge of few samples", "rls head"]  # rows, which gloo does not gather on GPUs
PIPELINES = [f"pipeline: {name}" for name in ("readout simultaneous", "cnn readout", "adam")]


def trained(folder: Path, count: int, names: list[str], backend: str = "", **more: str) -> list:
    """The weights of every rank."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
    place |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    words = [sys.executable, str(RANK), str(folder), backend, ";".join(names)]
    ranks = [
        subprocess.Popen(words, env=os.environ | place | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(count)
    ]
    try:
        assert [rank.wait(SECONDS) for rank in ranks] == [0] * count
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"{r}.pt") for r in range(count)]


def agrees(weights: dict, name: str) -> None:
    """The weights are those of one process without ranks, on the same GPU."""
    alone, _ = CASES[name.rpartition(": ")[2]].train(device="cuda")
    close(weights, {key: t.cpu() for key, t in alone.items()}, rtol=1e-9, atol=1e-10)


def test_nccl_sums_for_ranks_with_a_gpu_each(tmp_path):
    count, names = torch.cuda.device_count(), NAMES + GATHERED
    names = names + PIPELINES if count < 3 else names  # the nets have few blocks
    ranks = trained(tmp_path, count, names)
    for backend, results in ranks:
        assert "cuda:nccl" in backend
        for name in names:
            agrees(results[name], name)


def test_two_ranks_share_a_gpu_with_gloo(tmp_path):
    for _, results in trained(tmp_path, 2, NAMES, "gloo", CUDA_VISIBLE_DEVICES="0"):
        for name in NAMES:
            agrees(results[name], name)
