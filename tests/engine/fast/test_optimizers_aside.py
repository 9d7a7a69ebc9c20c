"""An optimizer on a second stream: what waits for what, with streams that write it down."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from tpsgd.engine.fast import cuda_graphs


class Stream:
    """Notes for which stream it waits."""

    def __init__(self, name, events):
        self.name, self.events = name, events

    def wait_stream(self, other):
        self.events.append(f"{self.name} waits for {other.name}")


class Block:
    """A learner that notes what it does, and on which stream."""

    def __init__(self, name, watch, learning=True, slices=1):
        self.name, self.watch, self.learning = name, watch, learning
        self.p = torch.zeros(2)
        step = lambda: self.note("steps")  # noqa: E731
        moving = {"weight": self.p}
        self.updater = SimpleNamespace(
            slices=slices, waits=False, moving=moving, step_optimizer=step
        )

    def note(self, what):
        self.watch.events.append(f"{self.name} {what} on {self.watch.current.name}")
        if what == "steps":
            self.p.grad = None  # which a real optimizer still reads

    def forward(self, x):
        self.note("computes")

    def output(self, saved):
        self.note("passes on")

    def update(self, saved, labels, output_unused):
        self.p.grad = torch.ones(2)
        self.gradient = weakref.ref(self.p.grad)
        if not self.updater.waits:
            self.note("steps")


@pytest.fixture
def watch(monkeypatch):
    events = []
    main, side = Stream("main", events), Stream("side", events)
    state = SimpleNamespace(events=events, current=main)

    @contextmanager
    def on(stream):
        before, state.current = state.current, stream
        yield
        state.current = before

    monkeypatch.setattr(cuda_graphs, "update_stream", lambda _: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    return state


def run(*blocks):
    labels = SimpleNamespace(is_cuda=True, device="cuda")
    cuda_graphs.step_with_optimizers_aside(
        blocks, SimpleNamespace(load=lambda: (torch.zeros(1), labels))
    )


def test_an_optimizer_waits_for_its_gradients_and_the_next_one_for_it(watch):
    blocks = [Block(name, watch) for name in "abc"]
    alive = []
    blocks[2].forward = lambda _: alive.extend(b.gradient() is not None for b in blocks[:2])
    run(*blocks)
    assert watch.events == [
        "a computes on main", "a passes on on main", "side waits for main", "a steps on side",
        "b computes on main", "b passes on on main", "main waits for side",
        "side waits for main", "b steps on side", "c steps on main", "main waits for side",
    ]  # fmt: skip
    assert alive == [False, True]  # the gradients of a are free, those of b in use
    assert not any(block.updater.waits for block in blocks)


def test_a_gradient_in_slices_and_a_frozen_block_take_no_second_stream(watch):
    run(Block("a", watch, slices=2), Block("b", watch, learning=False), Block("c", watch))
    assert "side" not in " ".join(watch.events)


def test_a_frozen_last_block_waits_for_the_optimizers_too(watch):
    run(Block("a", watch), Block("b", watch, learning=False))
    assert watch.events[-1] == "main waits for side"
