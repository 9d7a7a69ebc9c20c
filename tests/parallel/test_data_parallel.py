"""Two and four ranks, with gloo on this machine, against one process with the whole batches."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import close, mlp, points, ragged, same, sequences
from parallel.cases import (
    CASES,
    MLP,
    OF_SAMPLES_TOGETHER,
    ON_FOUR_RANKS,
    ON_TWO_RANKS,
    POINTS,
    TO_RESUME,
)
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import tpsgd
from tpsgd import Memory, Recurrent, TpsgdError
from tpsgd.engine.solvers.least_squares import MomentSums
from tpsgd_parallel import ranks as ranks_module
from tpsgd_parallel.ranks import Ranks
from tpsgd_parallel.shares import span

RANK = Path(__file__).with_name("rank.py")
SECONDS = 300  # a job that hangs fails; a busy machine is slow


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launched(count: int, folder: Path, *words: str) -> subprocess.Popen:
    """A job of some ranks."""
    command = [sys.executable, str(RANK), str(folder), str(count), str(free_port()), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe, session = subprocess.PIPE, {"start_new_session": True}
    return subprocess.Popen(command, env=environment, stderr=pipe, **session)


def checkpoint_of_one(folder: Path) -> None:
    """A checkpoint from the middle of a run in one process."""

    def copy(epoch):
        if (epoch.block, epoch.epoch) == (2, 2):
            shutil.copytree(folder / "whole of one", folder / "of one")

    checkpoint = tpsgd.Checkpoint(folder / "whole of one", every=0)
    TO_RESUME.train(checkpoint=checkpoint, callbacks=[copy])


@cache
def alone(name: str) -> tuple:
    """The weights and the record of one process."""
    return CASES[name].train()


OTHERS = [name for name in CASES if name not in ON_TWO_RANKS]
JOBS = {
    "two_ranks": (2, ON_TWO_RANKS, "1", "dies"),
    "two_ranks_and_other_cases": (2, OTHERS, "1", "dies"),
    "four_ranks": (4, ON_FOUR_RANKS, "2", "raises"),
}
FOUR = pytest.param("four_ranks", marks=pytest.mark.full)
two = pytest.mark.parametrize("job", ["two_ranks"], indirect=True)
four = pytest.mark.parametrize("job", [FOUR], indirect=True)
each_count = pytest.mark.parametrize("job", ["two_ranks", FOUR], indirect=True)


def ran(name: str):
    """A fixture that runs a job: what every rank has, its last words, and the job's folder."""

    @pytest.fixture(scope="session", name=name)
    def run(tmp_path_factory):
        count, names, failing, failure = JOBS[name]
        folder = tmp_path_factory.mktemp("ranks")
        checkpoint_of_one(folder)
        job = launched(count, folder, ";".join(names), failing, failure)
        for case in set(names) & set(CASES):
            alone(case)  # while the ranks train
        return results_of(job, folder, count)

    return run


two_ranks, more_of_two_ranks, four_ranks = map(ran, JOBS)


@pytest.fixture
def job(request):
    """The job that the test names."""
    return request.getfixturevalue(request.param)


def results_of(job: subprocess.Popen, folder: Path, count: int) -> tuple:
    """What every rank has, its last words, and the folder of the job."""
    try:
        errors = job.communicate(timeout=SECONDS)[1].decode()
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the ranks wait for one another
        raise
    assert (folder / "0.pt").exists(), errors
    ranks = [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(count)]
    words = [file.read_text() if file.exists() else "" for file in last_words(folder, count)]
    return ranks, words, folder


def last_words(folder: Path, count: int) -> list[Path]:
    return [folder / f"{r}.txt" for r in range(count)]


def agree(ranks, name, weights, record, rtol=1e-9, atol=1e-10):
    """Every rank has the same model and record, and they are those of one process."""
    first, run = ranks[0]["results"][name]
    for other in ranks[1:]:
        theirs, record_of_theirs = other["results"][name]
        assert same(theirs, first)
        assert record_of_theirs == run
    close(first, weights, rtol=rtol, atol=atol)
    assert len(run["history"]) == len(record.history)
    for a, b in zip(run["history"], record.history, strict=True):
        assert (a["block"], a["epoch"]) == (b.block, b.epoch)
        assert (a["accuracy"], a["val_accuracy"]) == (b.accuracy, b.val_accuracy)
        assert a["loss"] == pytest.approx(b.loss, rel=1e-5)
        assert a["r2"] == (b.r2 and pytest.approx(b.r2, rel=1e-5))
        assert a["val_loss"] == (b.val_loss and pytest.approx(b.val_loss, rel=1e-5))
    assert run["sample_passes"] == record.sample_passes
    assert run["forward_passes"] == record.forward_passes
    for a, b in zip(run["blocks"], record.blocks, strict=True):
        assert a["scale"] == (b.scale and pytest.approx(b.scale, rel=1e-6))


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(job, name, id=f"{job}-{name}", marks=[pytest.mark.full] * (job != "two_ranks"))
        for job, (_, names, _, _) in JOBS.items()
        for name in names
        if name in CASES and name != "float32"
    ],
    indirect=["job"],
)
def test_ranks_learn_what_one_process_learns(job, name):
    weights, record = alone(name)
    untrained = CASES[name]._replace(settings={"epochs": 0}).train()[0]
    assert not same(weights, untrained)
    agree(job[0], name, weights, record)


@two
def test_single_precision_agrees_to_a_millionth(job):
    agree(job[0], "float32", *alone("float32"), rtol=0, atol=1e-6)


@two
@pytest.mark.parametrize("name", OF_SAMPLES_TOGETHER)
def test_losses_of_samples_together_are_those_of_micro_batches(job, name):
    ranks = job[0]
    weights, run = ranks[0]["results"][name]
    memory = Memory(measure=False, micro_batch=6)
    expected, record = OF_SAMPLES_TOGETHER[name].train(memory=memory)
    whole, _ = OF_SAMPLES_TOGETHER[name].train()
    statistics = {k for k in weights if "running" in k or "num_batches" in k}
    close(*({k: t for k, t in w.items() if k not in statistics} for w in (weights, expected)))
    assert any(not torch.allclose(weights[k], whole[k]) for k in weights if k not in statistics)
    assert same(ranks[1]["results"][name][0], weights)  # statistics, too
    assert all(bool(weights[k].isfinite().all()) for k in statistics)
    assert run["history"][-1]["loss"] == pytest.approx(record.history[-1].loss, rel=1e-5)


@each_count
def test_a_checkpoint_goes_on_with_another_number_of_ranks(job):
    ranks, _, folder = job
    weights, record = TO_RESUME.train()
    agree(ranks, "resumed", weights, record)
    agree(ranks, "interrupted", weights, record)
    checkpoint = tpsgd.Checkpoint(folder / "of ranks", every=0, resume=True)
    trained_before = []
    resumed, run = TO_RESUME.train(checkpoint=checkpoint, callbacks=[trained_before.append])
    assert len(trained_before) < len(run.history)  # it did go on
    close(resumed, weights, rtol=1e-9, atol=1e-10)


@each_count
def test_a_callback_of_rank_0_stops_a_block_on_all_ranks(job):
    weights, record = TO_RESUME.train(callbacks=[lambda epoch: epoch.block == 1])
    assert [e.block for e in record.history] == [1, 2, 2, 2, 3, 3, 3]
    agree(job[0], "stopped by rank 0", weights, record)


@each_count
def test_all_ranks_recompute_inputs_if_one_has_no_memory_for_them(job):
    agree(job[0], "unequal memory", *alone("loader, recomputed"))


@each_count
def test_rank_0_alone_shows_progress_and_calls_callbacks(job):
    first, *others = job[0]
    assert first["shown"]
    assert all(rank["shown"] == [] for rank in others)


REASONS = {
    "checkpoint": "the same setting of checkpoint: rank 0 has a folder, rank 1 has none",
    "loader": "the DataLoader gives rank 1 other samples than rank 0",
    "batches": "every rank must have the same batch_size: rank 0 has 15, rank 1 has 10",
}


@each_count
def test_ranks_that_differ_are_refused_and_can_train_afterwards(job):
    weights, _ = TO_RESUME.train()
    for rank in job[0]:
        assert set(rank["refusals"]) == set(REASONS)
        for name, sentence in rank["refusals"].items():
            assert REASONS[name] in sentence and "\n" not in sentence
        close(rank["results"]["after refusals"], weights, rtol=1e-9, atol=1e-10)


@two
def test_dropout_drops_other_outputs_on_every_rank(job):
    first, second = (rank["results"]["dropped"] for rank in job[0])
    assert not torch.equal(first, second)


@two
def test_a_rank_that_dies_is_named(job):
    assert job[1] == ["rank 1 died in epoch 2: the other ranks cannot go on without it", ""]


@four
def test_a_rank_that_raises_is_named_with_its_reason(job):
    others = "rank 2 failed in epoch 2: ValueError: broken on purpose"
    assert job[1] == [others, others, "its own error: broken on purpose", others]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 5, 7, 128])
@pytest.mark.parametrize("least", [1, 2])
def test_the_shares_of_all_ranks_are_a_batch(count, size, least):
    shares = [span(size, Ranks(r, count, None), least) for r in range(count)]  # type: ignore[arg-type]
    indices = [list(range(size))[share] for share in shares]
    assert [i for index in indices for i in index] == list(range(size))
    sizes = [len(index) for index in indices]
    assert all(n == 0 or n >= min(least, size) for n in sizes)
    assert max(sizes) - min(n for n in sizes if n) <= 1


@pytest.mark.parametrize("bias", [True, False])
def test_pooled_sums_are_the_sums_of_all_samples(bias):
    torch.manual_seed(0)
    x, y = 100 + torch.randn(50, 6).double(), torch.randn(50, 3).double()
    whole = MomentSums(x, y, bias)
    whole.add(x, y)
    parts = [MomentSums(x, y, bias) for _ in range(3)]
    parts[0].add(x[:20], y[:20])
    parts[1].add(x[20:], y[20:])  # the third has no samples
    pool(parts)
    for sums in parts:
        close(vars(tensors(sums)), vars(tensors(whole)), rtol=1e-9)
        assert sums.count == 50
        torch.testing.assert_close(sums.solve(0.1).weight, whole.solve(0.1).weight)


def tensors(sums):
    class Tensors:
        pass

    out = Tensors()
    out.__dict__ = {k: t for k, t in vars(sums).items() if isinstance(t, torch.Tensor)}
    return out


def pool(parts) -> None:
    """Pool sums in threads, one for each, that meet wherever a total is taken."""
    import threading

    barrier, values = threading.Barrier(len(parts)), {}

    def total(rank):
        def add_up(tensor):
            values[rank] = tensor.clone()
            barrier.wait()
            tensor.copy_(sum(values[r] for r in range(len(parts))))
            barrier.wait()
            return tensor

        return add_up

    threads = [threading.Thread(target=sums.pool, args=(total(r),)) for r, sums in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def one_rank(monkeypatch):
    """The environment of a job with a single rank, which this process leaves again."""
    values = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    yield
    ranks_module._leave()


def test_one_rank_is_a_job_too(one_rank):
    case = CASES["readout sequential"]
    close(case.train(parallel=tpsgd.data_parallel())[0], case.train()[0])


def test_waiting_for_each_sum_gives_the_same_weights(one_rank):
    case = CASES["readout simultaneous"]
    overlapped, _ = case.train(parallel=tpsgd.data_parallel())
    assert same(case.train(parallel=tpsgd.data_parallel(overlap=False))[0], overlapped)


def test_sequences_of_different_lengths_are_refused(one_rank):
    model = nn.Sequential(Recurrent(4, 6), nn.Linear(6, 3)).double()
    x, y = sequences(12)
    with pytest.raises(TpsgdError, match="different lengths cannot be cut into the shares"):
        tpsgd.fit(model, (ragged(x), y), parallel=tpsgd.data_parallel())


def test_a_loader_that_shares_out_its_samples_is_refused(one_rank):
    data = TensorDataset(*POINTS())
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(TpsgdError, match="the same batches, without a DistributedSampler"):
        loader = DataLoader(data, 10, sampler=sampler)
        tpsgd.fit(MLP().double(), loader, parallel=tpsgd.data_parallel())
    with pytest.raises(TpsgdError, match="the same batches, without a DistributedSampler"):
        loader = DataLoader(data, batch_sampler=BatchSampler(sampler, 10, False))
        tpsgd.fit(MLP().double(), loader, parallel=tpsgd.data_parallel())


def test_a_budget_is_refused(one_rank):
    with pytest.raises(TpsgdError, match="a memory budget is planned for one process"):
        tpsgd.fit(MLP(), points(), memory="1MB", parallel=tpsgd.data_parallel())


def test_a_signal_of_the_whole_net_is_refused(one_rank):
    family = pytest.importorskip("tpsgd_family")
    with pytest.raises(
        TpsgdError, match="the rule's signal is the error of the whole net's output"
    ):
        tpsgd.fit(
            mlp(6, 8, 3), points(), rule=family.feedback_alignment(), epochs=1,
            parallel=tpsgd.data_parallel(),
        )  # fmt: skip


def test_stacked_restarts_are_refused(one_rank):
    with pytest.raises(TpsgdError, match="one model at a time"):
        tpsgd.fit_many(
            lambda: mlp(6, 8, 3), points(), restarts=2, stacked=True,
            parallel=tpsgd.data_parallel(),
        )  # fmt: skip


def test_a_process_without_torchrun_is_told_how_to_start(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(TpsgdError, match="torchrun --nproc-per-node 2"):
        tpsgd.fit(MLP().double(), POINTS(), parallel=tpsgd.data_parallel())


def test_a_setting_that_is_no_way_to_share_is_refused():
    with pytest.raises(TpsgdError, match="parallel must be tpsgd"):
        tpsgd.fit(MLP().double(), POINTS(), parallel="data")  # type: ignore[arg-type]
