"""The model of scale: its simulation equals what is worked out by hand and by closed forms."""

import math
import random
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import mlp

import tpsgd
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.settings import Settings
from tpsgd.memory.rehearse import Inputs, rehearse

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The folder of the benchmarks, from which they import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def model(monkeypatch):
    """The model, in which no block's gradients wait for those of others."""
    module = import_module("scale_model")
    monkeypatch.setattr(module, "MESSAGE_BYTES", 0)
    return module


def place(model, latency=0.0, bandwidth=math.inf, weights=math.inf, host=0.0):
    """A machine that multiplies once a second."""
    return model.Place(model.Machine(1.0, weights), model.Link(latency, bandwidth, host))


def learning(model, seconds, sums):
    """Blocks that learn for these seconds, and whose sums over two ranks take those.

    The sum of two ranks sends as many bytes as there are; a link sends four bytes a second.
    """
    return [model.Block(0, 0, c, m, 0) for c, m in zip(seconds, sums, strict=True)]


# ---- events --------------------------------------------------------------------------------------


def test_a_message_that_takes_half_of_the_core_delays_its_work():
    events = import_module("scale_events")
    tasks = [
        events.Task("a", "core", 2.0),
        events.Task("b", "core", 3.0),
        events.Task("message", "link", 4.0, after=("a",), slows="core", share=0.5),
    ]
    assert events.simulate(tasks) == {"a": 2.0, "message": 6.0, "b": 7.0}  # 2 of 4 s, then 1


def test_a_message_that_takes_the_whole_core_hides_behind_nothing(model):
    blocks, here = learning(model, [2, 3], [1, 4]), place(model, bandwidth=4.0, host=1.0)
    assert model.local_seconds(blocks, model.Layout((2,), 2), 1, here) == pytest.approx(10)


def test_tasks_that_wait_for_each_other_are_an_error():
    events = import_module("scale_events")
    with pytest.raises(ValueError, match="wait for each other"):
        events.simulate([events.Task("a", 0, 1.0, ("b",)), events.Task("b", 1, 1.0, ("a",))])


# ---- data-parallel local learning ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "sums", "step"),
    [
        ([2, 3], [1, 1], 5),  # all sums are hidden
        ([2, 3], [4, 5], 9),  # the link is busy all the time
        ([1, 1], [0, 6], 7),  # the last block waits for its own sum
        ([5], [4], 9),  # a single block has nothing to hide behind
        ([9, 6, 9, 2, 1], [6, 6, 6, 5, 5], 28),  # the link falls behind by one second in a step
    ],
)
def test_sums_hide_behind_other_blocks(model, seconds, sums, step):
    blocks, here = learning(model, seconds, sums), place(model, bandwidth=4.0)
    assert model.local_seconds(blocks, model.Layout((len(blocks),), 2), 1, here) == step


@pytest.mark.parametrize("seed", range(40))
def test_a_local_step_takes_its_compute_its_sums_or_its_slowest_block(model, seed):
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    seconds, sums = ([draw.randint(1, 9) for _ in range(count)] for _ in range(2))
    blocks, here = learning(model, seconds, sums), place(model, bandwidth=4.0)
    slowest = max(c + m for c, m in zip(seconds, sums, strict=True))
    step = model.local_seconds(blocks, model.Layout((count,), 2), 1, here)
    assert step == pytest.approx(max(sum(seconds), sum(sums), slowest))


# ---- data-parallel backprop ----------------------------------------------------------------------


def ddp_step(forward, backward, sums):
    """Forward, then backward from the last block on, each sum after the one before."""
    now, link = sum(forward), 0.0
    for seconds, message in zip(reversed(backward), reversed(sums), strict=True):
        now += seconds
        link = max(link, now) + message
    return max(now, link)


@pytest.mark.parametrize(
    ("sums", "step"),
    [([0, 0, 0], 9), ([1, 1, 1], 10), ([1, 9, 1], 17)],  # by hand: 3 forward, 6 backward
)
def test_sums_of_backprop_hide_behind_the_backward_pass_alone(model, monkeypatch, sums, step):
    monkeypatch.setattr(model, "FIRST_BUCKET", 1)
    monkeypatch.setattr(model, "BUCKET", 1)
    blocks = [model.Block(1, 2, 0, m, 0) for m in sums]
    layout, here = model.Layout((3,), 2), place(model, bandwidth=4.0)
    assert step == ddp_step([1] * 3, [2] * 3, sums)
    assert model.backprop_seconds(blocks, layout, 1, here) == step


def test_small_blocks_are_summed_in_one_message(model, monkeypatch):
    blocks, here = learning(model, [2, 3, 4], [1, 4, 2]), place(model, bandwidth=4.0, latency=0.5)
    numbered = list(enumerate(blocks))
    assert model.messages(numbered) == {0: [0], 1: [1], 2: [2]}
    monkeypatch.setattr(model, "MESSAGE_BYTES", model.NUMBER * 5)
    assert model.messages(numbered) == {1: [0, 1], 2: [2]}
    monkeypatch.setattr(model, "MESSAGE_BYTES", math.inf)
    seconds = model.local_seconds(blocks, model.Layout((3,), 2), 1, here)
    assert seconds == 9 + 7 + 2 * 0.5  # all blocks wait for one sum of 28 bytes, in two messages


def test_gradients_are_summed_in_buckets(model):
    megabyte = (1 << 20) // 4
    blocks = [model.Block(1, 1, 1, n * megabyte, 0) for n in (3, 20, 6, 2, 1)]
    filled = model.buckets(list(enumerate(blocks)))
    assert {i: count >> 20 for i, count in filled.items()} == {4: 1, 1: 28, 0: 3}


def test_the_optimizer_waits_for_the_sums_in_backprop(model):
    blocks = [model.Block(1, 2, 3, 8, 0)]
    here = place(model, bandwidth=4.0, weights=2.0)  # a sum of 8 s, an update of 4 s
    assert model.backprop_seconds(blocks, model.Layout((1,), 2), 1, here) == 3 + 8 + 4
    assert model.local_seconds(blocks, model.Layout((1,), 2), 1, here) == 3 + 8 + 4


# ---- pipelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_local_pipeline_is_filled_once_and_then_as_slow_as_its_slowest_stage(model, seed):
    draw = random.Random(seed)
    seconds = [draw.randint(1, 9) for _ in range(6)]
    sends = [draw.randint(0, 9) for _ in range(5)]
    blocks = [model.Block(0, 0, c, 0, b) for c, b in zip(seconds, [*sends, 0], strict=True)]
    layout, here = model.Layout((2, 1, 3)), place(model, bandwidth=1.0)
    ends = [0, 2, 3, 6]
    stages = [sum(seconds[a:b]) for a, b in pairwise(ends)]
    each = [*stages, sends[1], sends[2]]
    assert model.local_total(blocks, layout, 1, here, 7) == sum(each) + 6 * max(each)
    assert model.local_seconds(blocks, layout, 1, here) == pytest.approx(max(each))


@pytest.mark.parametrize("in_turns", [False, True], ids=["GPipe", "1F1B"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 8), (4, 2)])
def test_the_bubble_of_backprop_is_the_textbook_s(model, stages, micro_batches, in_turns):
    blocks = [model.Block(1, 2, 0, 0, 0)] * stages
    layout = model.Layout((1,) * stages, 1, micro_batches, in_turns)
    step = model.backprop_seconds(blocks, layout, micro_batches, place(model))
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert micro_batches * 3 / step == pytest.approx(1 - bubble)


def test_1f1b_has_few_micro_batches_in_flight(model):
    layout = model.Layout((1,) * 3, 1, 5, in_turns=True)
    for rank in range(3):
        flying = most = 0
        for way, _ in model.order(rank, layout):
            flying += 1 if way == "forward" else -1
            most = max(most, flying)
        assert (flying, most) == (0, 3 - rank)
    assert sorted(model.order(0, layout)) == sorted(
        (way, m) for way in ("forward", "backward") for m in range(5)
    )


def test_messages_of_a_pipeline_by_hand(model):
    """Two stages, one micro-batch: 1 forward, 3 there, 1 + 2, 3 back, 2 backward."""
    blocks = [model.Block(1, 2, 2, 0, 3), model.Block(1, 2, 2, 0, 0)]
    here, layout = place(model, bandwidth=1.0), model.Layout((1, 1))
    assert model.backprop_seconds(blocks, layout, 1, here) == 1 + 3 + 1 + 2 + 3 + 2
    assert model.local_seconds(blocks, layout, 1, here) == 3
    assert model.rank_bytes(blocks, layout, 10, backprop=False) == 30
    assert model.rank_bytes(blocks, layout, 10, backprop=True) == 30


def test_the_first_stage_of_backprop_waits_for_its_sum_alone(model):
    """Two stages in two replicas: 1 + 1 forward, 2 + 2 back, then the sum of 8; those of the second
    stage go on at the same time."""
    blocks = [model.Block(1, 2, 3, 8, 0), model.Block(1, 2, 3, 8, 0)]
    here, layout = place(model, bandwidth=4.0), model.Layout((1, 1), 2)
    assert model.backprop_seconds(blocks, layout, 1, here) == 1 + 1 + 2 + 2 + 8
    assert model.local_seconds(blocks, layout, 1, here) == 3 + 8


def test_gradients_of_micro_batches_are_summed_when_the_last_has_come_back(model):
    layout, here = model.Layout((1,), 2, micro_batches=2), place(model, bandwidth=4.0)
    assert model.backprop_seconds([model.Block(1, 2, 0, 8, 0)], layout, 2, here) == 2 + 4 + 8


def test_backprop_also_returns_the_gradients_of_inputs(model):
    blocks = [model.Block(1, 2, 2, 0, outputs) for outputs in (5, 3, 0)]
    layout = model.Layout((1, 1, 1))
    assert model.rank_bytes(blocks, layout, 10, backprop=False) == 50
    assert model.rank_bytes(blocks, layout, 10, backprop=True) == 30 + 50


# ---- links and nets ------------------------------------------------------------------------------


def test_an_all_reduce_by_hand(model):
    link = model.Link(latency=0.5, bandwidth=10.0)
    assert link.send(20) == 2.5
    assert link.sum(20, 1) == 0
    assert link.sum(20, 2) == 2 * 0.5 + 20 / 10  # half of the bytes, twice
    assert link.sum(20, 4) == 4 * 0.5 + 1.5 * 20 / 10
    assert model.sum_bytes(20, 4) == 30


def test_multiplications_are_those_of_the_rehearsal():
    nets = import_module("scale_nets")
    net = mlp(6, 8, 5, 3)
    blocks = nets.blocks_of(net, (6,), tpsgd.rules.tpsgd_l2())
    assert [b.forward for b in blocks] == [48, 40, 15]
    assert [b.local for b in blocks] == [96, 80, 30]
    assert [b.weights for b in blocks] == [56, 45, 18]
    assert [b.outputs for b in blocks] == [32, 20, 12]
    inputs, settings = Inputs((6,), samples=20), Settings(batch_size=10)
    stage = rehearse(net, inputs, Backprop(), settings).stages[-1]
    assert sum(b.forward + b.backward for b in blocks) == stage.multiplications


def test_speeds_are_read_from_measured_steps(model):
    check = import_module("scale_check")
    nets = {name: [model.Block(1, 2, 4, w, 0)] * 3 for name, w in (("a", 10), ("b", 50))}
    machine = model.Machine(products=1e3, weights=1e4, overhead=1e-3)
    rows = [
        {"arm": check.ARMS["local"], "net": name, "batch": n, "turns": [9.0, 3 * seconds]}
        for name, blocks in nets.items()
        for n in (8, 16, 64)
        for seconds in [machine.local(blocks[0], n)]
    ]
    speeds = check.machine_from(rows, nets, "local")
    assert [speeds.products, speeds.weights, speeds.overhead] == pytest.approx([1e3, 1e4, 1e-3])
    link = model.Link(latency=1e-4, bandwidth=1e8)
    sizes = (1e3, 1e5, 1e7)
    sums = [{"bytes": n, "seconds": link.sum(n, 2), "busy_seconds": 0.0} for n in sizes]
    measured = check.link_from(sums)
    assert [measured.latency, measured.bandwidth] == pytest.approx([1e-4, 1e8])
