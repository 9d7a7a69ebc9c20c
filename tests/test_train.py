"""The training loop: the order of events, noted by learners, sources and observers."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import mlp, points, same, state

import tpsgd
from tpsgd import Memory, TpsgdError
from tpsgd.engine.learners.learner import (
    BlockLearner,
    calibrate,
    step_on_error,
    validate,
    with_pending_updates,
)
from tpsgd.memory.meter import LiveBytes
from tpsgd.objectives import Signal
from tpsgd.train import Net, Observer, sequential, simultaneous, step, train

LABELS = torch.tensor([0, 1])
ERROR = torch.tensor([[0.5, -2.0]])


class Batches:
    """A source of batches whose input is their number."""

    def __init__(self, log, count=2, name="source", parts=1):
        self.log, self.count, self.name, self.parts = log, count, name, parts
        self.form = SimpleNamespace(no_batches="there was no batch", device=torch.device("cpu"))

    @property
    def samples(self):
        return 2 * self.count

    def batches(self, block=0, epoch=None):
        for number in range(self.count):
            last, load = not (number + 1) % self.parts, partial(self._load, number)
            yield SimpleNamespace(size=2, share=1 / self.parts, last=last, load=load)

    def _load(self, number):
        self.log.append(f"load {number}")
        return number, LABELS


class Block:
    """A learner that writes down what it is asked to do; its output is its name after its input."""

    noise = None

    def __init__(self, log, name, epochs=1, signal=Signal.LABEL, calibrates=False):
        self.log, self.name, self.epochs, self.signal = log, name, epochs, signal
        self.calibrates = calibrates
        self.learning, self.updates = epochs > 0, []
        self.block = SimpleNamespace(train=lambda mode: log.append(f"{name} train({mode})"))
        self.updater = SimpleNamespace(finish=lambda: self.note("finish"), apply=self.apply)

    def note(self, what):
        self.log.append(f"{self.name} {what}")

    def start(self):
        self.learning = self.epochs > 0
        self.note("start")

    def stop(self):
        self.learning = False
        self.note("stop")

    def set_mode(self):
        self.note("mode")

    def begin_epoch(self, epoch):
        self.note(f"epoch {epoch}")

    def forward(self, x):
        self.note(f"forward {x}")
        return x

    def output(self, saved):
        self.note("output")
        return f"{saved}{self.name}"

    def error(self, saved, labels):
        self.note("error")
        return ERROR

    def update(self, *args, **options):
        BlockLearner.update(self, *args, **options)

    def apply(self, saved, s, labels, output_unused):
        self.note("update")
        self.updates.append((s, output_unused))
        assert labels is LABELS

    def end_epoch(self, samples):
        self.note(f"end of {samples}")

    def measure(self, saved, labels):
        self.note("measure")

    def measure_features(self, x, labels, share):
        self.note(f"measure {share:g} of {x}")
        assert labels is LABELS and not torch.is_grad_enabled()
        torch.rand(1)
        return f"{x}{self.name}"

    def calibrate(self):
        self.note("calibrate")


class Notes(Observer):
    """An observer that writes down what it is told, and stops some blocks after some epochs."""

    def __init__(self, log, stops=()):
        self.log, self.stops = log, dict(stops)

    def stage(self, learners, learning=True):
        self.log.append(f"stage {''.join(x.name for x in learners)}")

    def started(self, learner):
        self.log.append(f"{learner.name} started")

    def batch(self, learners, batch):
        self.log.append(f"batch of {batch.size} by {''.join(x.name for x in learners) or 'nobody'}")

    def computing(self, active):
        self.log.append(f"computing {active}")

    def epoch(self, end):
        self.log.append(f"epoch {end.number} of {end.samples}")
        return {x for x in end.learners if self.stops.get(x.name) == end.number}


def net_of(log, *learners, observers=(), batches=2, validation=None):
    def pass_on(net, learner, source):
        log.append(f"pass {source.name} on through {learner.name}")
        return Batches(log, batches, source.name + learner.name)

    def wrap(step, learners, source):
        log.append("wrap")
        return step

    def batches_of(learners, source, epoch):
        return source.batches(0, epoch)

    source = Batches(log, batches)
    parts = list(learners), source, validation, list(observers), wrap, pass_on
    return Net(*parts, step_on_error, batches_of, calibrate)


def told(log, *words):
    """The events that say one of these words."""
    return [event for event in log if any(word in event for word in words)]


# ---- a step --------------------------------------------------------------------------------------


def test_a_block_learns_before_the_next_one_sees_the_batch():
    log = []
    a, b, c = (Block(log, name) for name in "abc")
    with_pending_updates(step)([a, b, c], next(Batches(log).batches()))
    assert log == [
        "load 0",
        "a forward 0", "a update", "a output",
        "b forward 0a", "b update", "b output",
        "c forward 0ab", "c update",
        "a finish", "b finish", "c finish",
    ]  # fmt: skip
    assert [x.updates for x in (a, b, c)] == [
        [(LABELS, False)],
        [(LABELS, False)],
        [(LABELS, True)],
    ]


def test_a_block_that_does_not_learn_passes_the_batch_on():
    log = []
    a, b = Block(log, "a", epochs=0), Block(log, "b")
    step([a, b], next(Batches(log).batches()))
    assert told(log, "forward", "update", "output") == [
        "a forward 0", "a output", "b forward 0a", "b update",
    ]  # fmt: skip


def test_a_step_on_the_error_updates_no_block_before_the_output_is_known():
    log = []
    kinds = {"a": Signal.ERROR, "b": Signal.ERROR_SIGN, "c": Signal.LABEL, "d": Signal.LABEL}
    blocks = [Block(log, name, signal=signal) for name, signal in kinds.items()]
    with_pending_updates(step_on_error)(blocks, next(Batches(log).batches()))
    assert told(log, "forward", "error", "update", "finish") == [
        "a forward 0", "b forward 0a", "c forward 0ab", "d forward 0abc", "d error",
        "a update", "b update", "c update", "d update",
        "a finish", "b finish", "c finish", "d finish",
    ]  # fmt: skip
    signals = [block.updates[0][0] for block in blocks]
    assert signals[0] is ERROR and torch.equal(signals[1], ERROR.sign())
    assert signals[2] is signals[3] is LABELS


def test_blocks_wait_for_the_error_only_while_one_that_needs_it_learns():
    log = []
    waiting, local = Block(log, "a", epochs=1, signal=Signal.ERROR), Block(log, "b", epochs=2)
    net = net_of(log, waiting, local, batches=1)
    train(net, net.learners, net.source)
    assert told(log, "update", "error", "a stop") == [
        "b error", "a update", "b update", "a stop", "b update",
    ]  # fmt: skip


# ---- epochs --------------------------------------------------------------------------------------


def test_the_events_of_training_come_in_order():
    log = []
    block = Block(log, "a", epochs=2)
    net = net_of(log, block, observers=[Notes(log)], batches=1)
    train(net, [block], net.source)
    epoch = [
        "load 0", "a forward 0", "a update", "batch of 2 by a", "a end of 2", "epoch {0} of 2",
    ]  # fmt: skip
    assert log == [
        "stage a", "a start", "a started", "wrap",
        "a epoch 0", *(event.format(0) for event in epoch),
        "a epoch 1", *(event.format(1) for event in epoch), "a stop",
    ]  # fmt: skip


def test_an_observer_stops_a_block_and_the_others_go_on():
    log = []
    blocks = [Block(log, "a", epochs=5), Block(log, "b", epochs=3)]
    net = net_of(log, *blocks, observers=[Notes(log), Notes([], stops={"a": 1})])
    train(net, blocks, net.source)
    assert told(log, "epoch", "stop") == [
        "a epoch 0", "b epoch 0", "epoch 0 of 4",
        "a epoch 1", "b epoch 1", "epoch 1 of 4", "a stop",
        "a epoch 2", "b epoch 2", "epoch 2 of 4", "b stop",
    ]  # fmt: skip
    assert [len(block.updates) for block in blocks] == [4, 6]


def test_blocks_without_epochs_see_no_batch():
    log = []
    net = net_of(log, Block(log, "a", epochs=0))
    train(net, net.learners, net.source)
    assert not told(log, "load", "update", "stop")


def test_an_epoch_without_a_batch_is_an_error():
    net = net_of([], Block([], "a"), batches=0)
    with pytest.raises(TpsgdError, match="there was no batch"):
        train(net, net.learners, net.source)


def test_blocks_are_calibrated_on_the_first_batch_before_a_step_is_wrapped():
    """The batch goes no further than to the last block that asks for it."""
    log = []
    asks = {"a": False, "b": True, "c": False, "d": True, "e": False}
    blocks = [Block(log, name, calibrates=calibrates) for name, calibrates in asks.items()]
    net = net_of(log, *blocks, observers=[Notes(log)])
    torch.manual_seed(0)
    train(net, blocks, net.source)
    first = log[log.index("e started") + 1 : log.index("wrap")]
    assert first == [
        "load 0", "a measure 1 of 0", "b measure 1 of 0a", "c measure 1 of 0ab",
        "d measure 1 of 0abc", "b calibrate", "d calibrate",
    ]  # fmt: skip
    assert not told(log[log.index("wrap") :], "measure", "calibrate")
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(1))  # numbers that the measurement drew are given back


def test_all_parts_of_the_first_batch_are_measured_before_a_block_is_calibrated():
    log = []
    net = net_of(log, Block(log, "a", calibrates=True))
    train(net, net.learners, Batches(log, 4, parts=2))
    first = log[: log.index("wrap")]
    assert told(first, "measure", "calibrate") == [
        "a measure 0.5 of 0", "a measure 0.5 of 1", "a calibrate",
    ]  # fmt: skip


def test_without_a_batch_nothing_is_calibrated():
    log = []
    net = net_of(log, Block(log, "a", calibrates=True), batches=0)
    with pytest.raises(TpsgdError, match="there was no batch"):
        train(net, net.learners, net.source)
    assert not told(log, "calibrate")


def test_what_wraps_a_step_is_what_takes_it():
    log, seen = [], []
    net = net_of(log, Block(log, "a"))

    def wrap(step, learners, source):
        assert source is net.source
        return lambda learners, batch: seen.append((learners, batch.size))

    net.wrap = wrap
    train(net, net.learners, net.source)
    assert seen == [(net.learners, 2)] * 2 and not told(log, "load", "update")


def test_gradients_are_off_in_training():
    modes = []

    class Look(Block):
        def update(self, *args, **options):
            modes.append(torch.is_grad_enabled())

    net = net_of([], Look([], "a"))
    train(net, net.learners, net.source)
    assert modes == [False, False]


def test_validation_measures_blocks_that_learn_from_labels_and_changes_none():
    log = []
    blocks = [Block(log, "a", signal=Signal.ERROR), Block(log, "b", epochs=0), Block(log, "c")]
    net = net_of(log, *blocks, observers=[Notes(log)])
    assert validate(blocks, Batches(log, 1), net.observers) == 2
    assert log == [
        "computing True", "a train(False)", "b train(False)", "c train(False)",
        "load 0", "a forward 0", "a output", "b forward 0a", "b output", "c forward 0ab",
        "c measure", "batch of 2 by nobody", "computing False", "a mode", "b mode", "c mode",
    ]  # fmt: skip


# ---- orders -----------------------------------------------------------------------------------


def test_sequential_trains_a_block_freezes_it_and_passes_its_outputs_on():
    log = []
    held_out = Batches(log, 1, "validation")
    blocks = [Block(log, name) for name in "abc"]
    sequential(net_of(log, *blocks, observers=[Notes(log)], validation=held_out))
    assert told(log, "stage", "stop", "pass") == [
        "stage a", "a stop", "pass source on through a", "pass validation on through a",
        "stage b", "b stop", "pass sourcea on through b", "pass validationa on through b",
        "stage c", "c stop",
    ]  # fmt: skip


def test_simultaneous_trains_all_blocks_with_every_batch():
    log = []
    simultaneous(net_of(log, *(Block(log, name) for name in "abc"), observers=[Notes(log)]))
    updates = ["a update", "b update", "c update"]
    assert told(log, "stage", "pass", "update") == ["stage abc", *updates, *updates]


def test_a_users_schedule():
    """The first block alone, then the two others together."""

    def first_alone(net):
        first, *others = net.learners
        train(net, [first], net.source)
        train(net, others, net.pass_on(net, first, net.source))

    models = {order: mlp(6, 8, 7, 3) for order in (first_alone, sequential)}
    runs = [
        tpsgd.fit(model, points(), order=order, epochs=2, batch_size=16)
        for order, model in models.items()
    ]
    assert [(e.block, e.epoch) for e in runs[0].history] == [
        (1, 1), (1, 2), (2, 1), (3, 1), (2, 2), (3, 2),
    ]  # fmt: skip
    assert runs[0].settings["order"] == "first_alone"
    one, other = map(state, models.values())
    assert same({k: one[k] for k in one if k < "3"}, {k: other[k] for k in other if k < "3"})
    assert not torch.equal(one["4.weight"], other["4.weight"])  # its inputs changed as it learned


@pytest.mark.parametrize("order", [sequential, simultaneous])
def test_memory_that_is_not_measured_costs_nothing(order, monkeypatch):
    settings = {"order": order, "epochs": 2, "batch_size": 16, "validation": points(seed=1)}
    measured, plain = mlp(6, 8, 3), mlp(6, 8, 3)
    assert tpsgd.fit(measured, points(), **settings).peak_bytes > 0

    def refuse(self, *args, **options):
        raise AssertionError("memory is measured")

    monkeypatch.setattr(LiveBytes, "__enter__", refuse)
    monkeypatch.setattr(LiveBytes, "__init__", refuse)
    run = tpsgd.fit(plain, points(), memory=Memory(measure=False), **settings)
    assert run.peak_bytes == run.kept_bytes == 0
    assert same(state(measured), state(plain))
    with pytest.raises(AssertionError, match="memory is measured"):
        tpsgd.fit(plain, points(), **settings)
