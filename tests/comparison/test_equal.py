"""Arms with equal reads of the data or equal time, in place of equal epochs per block."""

import json
from dataclasses import asdict

import pytest
import torch

import tpsgd
from tpsgd import rules
from tpsgd.comparison import equal
from tpsgd.comparison.arms import arm
from tpsgd.comparison.compare import compare
from tpsgd.comparison.report import table
from tpsgd.data import Data
from tpsgd.engine.arm import Arm
from tpsgd.engine.record import BlockInfo, Run
from tpsgd.train import Epoch
from tpsgd.zoo import words as models


@pytest.fixture
def data() -> Data:
    """Two classes, told apart by the first of six numbers."""
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Data("two", (x[:40], y[:40]), (x[40:], y[40:]), ("0", "1"), (6,), "")


FACTORY = models.factory("mlp:5,4", (6,), 2)


def epochs_of(record) -> dict[str, dict[int, int]]:
    """The number of epochs of each block, by arm."""
    runs = {r.arm.name: r.runs[0].history for r in record.results}
    return {
        name: {
            block: sum(e.block == block for e in history) for block in {e.block for e in history}
        }
        for name, history in runs.items()
    }


def test_equal_passes_are_equal_epochs_per_block(data):
    record = compare(data, FACTORY, ["readout"], restarts=1, epochs=2, batch_size=16)
    assert epochs_of(record) == {
        "backprop": {0: 2}, "readout": {1: 2, 2: 2, 3: 2}, "frozen": {3: 2},
    }  # fmt: skip
    assert record.settings["equal"] == "passes" and "reads" not in record.settings


def test_equal_reads_give_every_arm_the_epochs_of_all_blocks(data):
    arms = ["readout", "dfa", "random", "zorb", "elm"]
    record = compare(data, FACTORY, arms, restarts=2, epochs=2, batch_size=16, equal="reads")
    counts = epochs_of(record)
    assert counts["backprop"] == {0: 6} and counts["readout"] == {1: 2, 2: 2, 3: 2}
    assert counts["dfa"] == {1: 6, 2: 6, 3: 6} and counts["frozen"] == {3: 6}
    assert counts["random"] == {} and counts["elm"] == {3: 1}
    assert record.settings["reads"] == 6
    assert table.effort(record) == "equal reads of the data: 6 each, restarts: 2"
    said = next(line for line in table.remarks(record) if line.startswith("epochs of the blocks"))
    assert "backprop 6" in said and "readout 2+2+2" in said and "zorb" not in said
    assert str(record).endswith("equal reads of the data: 6 each, restarts: 2")
    assert json.loads(json.dumps(record.as_dict()))["settings"]["equal"] == "reads"


def test_reads_that_cannot_be_shared_equally_go_to_the_last_blocks():
    """One arm solves its head and so has an odd number of reads; another trains it."""
    solved = run("sequential", ["closed form", "closed form", "solved"])
    trained = run("sequential", ["frozen", "closed form", "closed form"])
    reads, allowances = equal.equal_reads([solved, trained, run("simultaneous", ["autograd"])], 3)
    assert reads == 7
    assert [a.epochs for a in allowances] == [[3, 3, 3], [3, 3, 4], 7]


def test_an_arm_with_its_own_epochs_keeps_them(data):
    mine = Arm("mine", rules.readout(), epochs=1)
    record = compare(data, FACTORY, [mine, "drtp"], restarts=1, epochs=2, equal="reads")
    assert epochs_of(record)["mine"] == {1: 1, 2: 1, 3: 1}
    assert epochs_of(record)["backprop"] == {0: 6}


def test_one_solved_head_among_recurrent_nets(data):
    x, y = data.train
    steps = Data("s", (x[:, :, None], y), (x[:, :, None], y), ("0", "1"), (6, 1), "")
    make = models.factory("rnn:4", (6, 1), 2)
    record = compare(
        steps, make, [arm("readout"), arm("reservoir", factory=make)], restarts=1, epochs=3,
        equal="reads",
    )  # fmt: skip
    counts = epochs_of(record)
    assert (counts["backprop"], counts["readout"]) == ({0: 4}, {1: 3, 2: 1})
    assert counts["reservoir"] == {2: 1}


def run(order: str, learning: list[str], each: float = 1.0, setup: float = 0.5) -> Run:
    """A short run of two epochs per block, each of `each` seconds; the first has `setup` more."""
    blocks = [BlockInfo(str(i), "", 1, how) for i, how in enumerate(learning)]
    history, now = [], 0.0
    groups = [[i] for i in range(len(blocks))] if order == "sequential" else [range(len(blocks))]
    for group in groups:
        if blocks[group[0]].learning == "frozen":
            continue
        for number in range(1, 2 if blocks[group[0]].learning == "solved" else 3):
            now += each + setup * (number == 1)
            history += [Epoch(i + 1, number, 0.0, seconds=now) for i in group]
    return Run("", 0, {"order": order}, blocks, history, seconds=now)


def test_seconds_become_epochs_and_deadlines():
    one = run("sequential", ["closed form"] * 2)  # 5 s: 0.5 + 2, 0.5 + 2
    together = run("simultaneous", ["autograd"] * 2, each=0.5)  # 1.5 s: 0.5 + 1
    seconds, (slow, fast, none) = equal.equal_seconds([one, together, None], 4, None, exactly=True)
    assert seconds == 9.0  # two blocks of 0.5 + 4 s
    assert (slow.epochs, fast.epochs, none.epochs) == (4, 17, None)
    assert not slow.deadline(Epoch(1, 3, 0.0, seconds=4.4))
    assert slow.deadline(Epoch(1, 4, 0.0, seconds=4.5))
    assert not slow.deadline(Epoch(2, 3, 0.0, seconds=8.9))
    assert slow.deadline(Epoch(2, 4, 0.0, seconds=9.0))
    assert not fast.deadline(Epoch(1, 16, 0.0, seconds=8.9))
    assert fast.deadline(Epoch(2, 17, 0.0, seconds=9.0)) and none.deadline(
        Epoch(0, 1, 0.0, seconds=9)
    )
    assert equal.equal_seconds([one], 4, None)[1][0].epochs == 400  # in case it turns out faster
    _, (little,) = equal.equal_seconds([one], 4, 0.1)
    assert little.epochs == 1  # one epoch at least
    assert equal.equal_seconds([one], 4, 4.9, exactly=True)[1][0].epochs == 2


def test_progress_at_equal_seconds_is_that_of_the_clock(data):
    shares = []
    compare(
        data, FACTORY, [], restarts=1, epochs=2, equal="seconds", seconds=0.2,
        progress=lambda record, arm, share: shares.append(share),
    )  # fmt: skip
    assert shares == sorted(shares) and 0.9 < shares[-1] <= 1


def test_the_epochs_of_an_allowance_join_the_callbacks_of_the_user():
    mine = print
    allowance = equal.Allowance(3, 1.5, {1: 0.5})
    settings = allowance.within({"callbacks": [mine], "lr": 0.1})
    assert settings == {"callbacks": [mine, allowance.deadline], "lr": 0.1, "epochs": 3}
    assert equal.Allowance.of(json.loads(json.dumps(asdict(allowance)))) == allowance
    assert equal.Allowance().within({"lr": 0.1}) == {"lr": 0.1}


@pytest.mark.full
def test_arms_stop_when_their_time_is_over(data):
    record = compare(
        data, FACTORY, ["readout", "dfa", "elm"], restarts=1, epochs=2, equal="seconds", seconds=0.5
    )
    for result in record.results:
        if result.arm.name != "elm":
            assert result.runs[0].seconds > 0.45, result.arm.name
            assert max(e.epoch for e in result.runs[0].history) > 2
    counts = epochs_of(record)
    assert len(counts["readout"]) == 3 and counts["elm"] == {3: 1}
    assert table.effort(record) == "equal time: 0.5 s each, restarts: 1"


def test_by_default_the_slowest_arm_sets_the_time(data):
    record = compare(data, FACTORY, ["readout"], restarts=1, epochs=20, equal="seconds")
    seconds = record.settings["seconds"]
    assert seconds > 0
    assert all(r.runs[0].seconds > 0.5 * seconds for r in record.results)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"equal": "time"}, "equal cannot be 'time': choose from passes, reads, seconds"),
        ({"epochs": [1, 2, 3], "lr": "search"}, "one number of epochs, not a list"),
        ({"equal": "reads", "epochs": [1, 2, 3]}, "one number of epochs, not a list"),
        ({"seconds": 3.0}, "seconds=3.0 needs equal='seconds', not 'passes'"),
        ({"equal": "seconds", "seconds": 0.0}, "must be more than 0, got 0.0"),
        ({"equal": "seconds", "seconds": float("nan")}, "must be more than 0, got nan"),
    ],
)
def test_what_cannot_be_equal_is_refused(data, settings, message):
    with pytest.raises(tpsgd.TpsgdError, match=message):
        compare(data, FACTORY, ["readout"], **{"epochs": 1, **settings})


def test_an_arm_that_fails_while_it_is_timed_tells_why(data):
    broken = rules.tpsgd(lambda y, target: (y * float("nan")).sum())
    record = compare(data, FACTORY, [broken], restarts=1, epochs=1, equal="seconds", seconds=0.1)
    assert "became nan" in next(r.error for r in record.results if r.error)
    assert record.finished == 2
