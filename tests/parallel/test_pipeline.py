"""A pipeline of 2 and of 4 processes learns what `simultaneous` learns in one."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import same
from parallel import pipeline_cases as cases

import tpsgd
from tpsgd_parallel import handover
from tpsgd_parallel.handover import BatchFormat
from tpsgd_parallel.stages import IN_FLIGHT

RANK = Path(cases.__file__)
SECONDS = 300  # a job that hangs fails; a busy machine is slow


def launched(count: int, folder: Path, names: tuple[str, ...]) -> list[dict]:
    """What each of `count` ranks writes about these cases; a job that hangs is ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sources = [Path(module.__file__ or "").parents[1] for module in (tpsgd, handover)]
    paths = os.pathsep.join(map(str, [RANK.parents[1], *sources]))
    job = subprocess.Popen(
        [sys.executable, str(RANK), str(folder), str(count), str(port), ";".join(names)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        errors = job.communicate(timeout=SECONDS)[1].decode()
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the ranks wait for one another
        raise
    files = [folder / f"{rank}.pt" for rank in range(count)]
    assert all(file.exists() for file in files), errors
    return [torch.load(file, weights_only=False) for file in files]


OTHERS = tuple(name for name in cases.CASES if name not in cases.ON_TWO_RANKS)
JOBS = {
    "two_stages": (2, cases.ON_TWO_RANKS),
    "two_stages_and_other_cases": (2, OTHERS),
    "four_stages": (4, cases.ON_FOUR_RANKS),
}
FOUR = pytest.param("four_stages", marks=pytest.mark.full)
two = pytest.mark.parametrize("ranks", ["two_stages"], indirect=True)
four = pytest.mark.parametrize("ranks", [FOUR], indirect=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A checkpoint that one process has left after two epochs."""
    folder = tmp_path_factory.mktemp("one")
    cases.train_and_copy(folder, order=tpsgd.simultaneous)
    return folder / "after two epochs"


def ran(name):
    """A fixture that runs a job: what its ranks write, and the folder that they work in."""

    @pytest.fixture(scope="session", name=name)
    def run(tmp_path_factory, checkpoint):
        count, names = JOBS[name]
        folder = tmp_path_factory.mktemp("ranks")
        shutil.copytree(checkpoint, folder / checkpoint.name)
        return launched(count, folder, names), folder

    return run


two_stages, more_of_two_stages, four_stages = map(ran, JOBS)


@pytest.fixture
def ranks(request):
    """The job that the test names."""
    return request.getfixturevalue(request.param)


def without_seconds(record):
    return [{k: v for k, v in epoch.items() if k != "seconds"} for epoch in record["history"]]


@cache
def in_one_process(name):
    run = cases.train(name, order=tpsgd.simultaneous)
    return run.model.state_dict(), run.as_dict()


def assert_equal_to_one_process(name, result):
    (model, record), (expected, alone) = result, in_one_process(name)
    assert same(model, expected), name
    assert without_seconds(record) == without_seconds(alone)
    for entry in ("blocks", "sample_passes", "forward_passes"):
        assert record[entry] == alone[entry]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        pytest.param(
            job, name, id=f"{job}-{name}", marks=[pytest.mark.full] * (job != "two_stages")
        )
        for job, (_, names) in JOBS.items()
        for name in names
    ],
    indirect=["ranks"],
)
def test_ranks_learn_what_one_process_learns(ranks, name):
    for results in ranks[0]:
        assert_equal_to_one_process(name, results[name])


@pytest.mark.parametrize("ranks", ["two_stages", FOUR], indirect=True)
def test_ranks_go_on_from_a_checkpoint_of_one_process(ranks):
    for results in ranks[0]:
        assert_equal_to_one_process(cases.CHECKPOINTED, results["resumed"])


@two
def test_callbacks_of_rank_0_are_told_of_the_epochs_of_all_blocks(ranks):
    first, second = ranks[0]
    history = without_seconds(first["resumed"][1])
    assert first["told"] == [(e["epoch"], e["block"]) for e in history if e["epoch"] <= 2]
    assert second["told"] == [] and max(block for _, block in first["told"]) == 4


@two
def test_one_process_goes_on_from_a_checkpoint_of_two_ranks(ranks):
    folder = ranks[1] / "left" / "after two epochs"
    run = cases.resume(folder, order=tpsgd.simultaneous)
    result = run.model.state_dict(), run.as_dict()
    assert_equal_to_one_process(cases.CHECKPOINTED, result)


@two
def test_no_more_batches_than_allowed_wait_for_a_slow_rank(ranks):
    waiting, figures = ranks[0][0]["flights"]
    assert max(waiting) == IN_FLIGHT and len(waiting) > 10 * IN_FLIGHT
    first, second = figures["utilisation"]
    assert first < second <= 1  # the first rank has to wait for the second
    assert figures["busy_seconds"][0] == pytest.approx(first * figures["seconds"])


@two
def test_no_batch_is_sent_once_all_blocks_have_stopped(ranks):
    batches, epochs, calibration = 4, 3, 1
    assert ranks[0][0]["sends"] == batches * epochs + calibration


@four
def test_the_plan_shares_the_blocks_out(ranks):
    _, record = ranks[0][0]["cnn"]
    pipeline = record["settings"]["pipeline"]
    assert pipeline["stages"] == [1, 1, 1, 1] and len(pipeline["peak_bytes"]) == 4
    assert max(pipeline["peak_bytes"]) == record["peak_bytes"] > min(pipeline["peak_bytes"]) > 0
    assert record["settings"]["order"] == "simultaneous"


@two
def test_ranks_take_the_bytes_that_were_planned(ranks):
    make, _, _ = cases.CASES["wide"]
    plan = tpsgd.plan(make(), (64,), ranks=2, samples=50, batch_size=16, others=False)
    measured = ranks[0][0]["wide"][1]["settings"]["pipeline"]
    assert plan.pipeline is not None and plan.pipeline.stages == measured["stages"]
    planned = [rank.peak_bytes for rank in plan.pipeline.ranks]
    assert measured["peak_bytes"] == pytest.approx(planned, rel=0.02)


REASONS = {
    "dfa": "dfa cannot learn in a pipeline",
    "sequential": "sequential trains one after another",
    "too few blocks": "needs a block for each of them, and this model has 1",
    "stages": "stages=[2, 1] must be",
    "recurrent": "recurrent layers read the one before step by step",
    "shuffled loader": "give arrays or a Dataset",
    "shuffled batches": "give arrays or a Dataset",
    "ridge": "ridge() cannot solve a block in a pipeline",
    "backprop": "backprop is no pipeline",
    "other epochs": "every rank must have the same epochs: rank 0 has 2, rank 1 has 3",
    "other batches": "every rank must have the same batch_size: rank 0 has 16, rank 1 has 8",
    "other stages": "the same parallel: rank 0 has pipeline [2, 2], rank 1 has pipeline",
    "other validation": "the same number of samples (validation data): rank 0 has 16, rank 1 has",
    "other labels": "every rank must have the same training data: rank 0 has",
}


@two
def test_what_cannot_learn_in_a_pipeline_is_refused_in_one_sentence(ranks):
    for results in ranks[0]:
        assert set(results["refusals"]) == set(REASONS)
        for name, sentence in results["refusals"].items():
            assert REASONS[name] in sentence and "\n" not in sentence


@four
def test_a_rank_that_dies_is_named_by_the_others(ranks):
    for rank in (0, 1, 3):
        sentence = (ranks[1] / f"{rank}.txt").read_text()
        assert sentence.startswith("rank 2 died in epoch 1") and "\n" not in sentence


@two
def test_the_command_line_trains_in_a_pipeline(ranks, says, tmp_path):
    folders = ranks[1] / "command", tmp_path / "one"
    assert says(*cases.COMMAND, str(folders[1]), "--order", "simultaneous")[0] == 0
    assert same(*(torch.load(folder / "model.pt") for folder in folders))
    record = json.loads((folders[0] / "run.json").read_text())
    assert record["settings"]["parallel"] == "pipeline"
    status, _, errors = says(*cases.COMMAND, str(folders[1]), "--pipeline")
    assert status == 2 and "--pipeline needs the processes that torchrun starts" in errors


def test_one_process_alone_is_refused():
    with pytest.raises(tpsgd.TpsgdError, match="parallel needs the ranks that torchrun starts"):
        cases.train("readout", parallel=tpsgd.pipeline())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4, 2), (5, 2, 3)])
def test_a_batch_arrives_in_its_number_format_and_memory_format(shape, dtype):
    x = torch.arange(torch.tensor(shape).prod()).view(shape).to(dtype)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    format = pickle.loads(pickle.dumps(BatchFormat.of(x)))
    y = format.empty(len(x), x.device)
    sent, arriving = format.flat(x), format.flat(y)
    assert sent.is_contiguous() and arriving.is_contiguous() and arriving.shape == sent.shape
    arriving.copy_(sent)
    assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype is y.dtype
