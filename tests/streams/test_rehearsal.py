"""The buffer takes no more bytes than allowed, is balanced, and helps to remember."""

import pytest
import torch
from streams.nets import X, Y, mlp

import tpsgd
from tpsgd import Rehearsal, Stream, TpsgdError


def bytes_held(buffer):
    """The bytes of every tensor that the buffer holds, by their storage."""
    tensors = [value for value in vars(buffer).values() if isinstance(value, torch.Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("memory", ["1KB", "100KB", 5000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
@pytest.mark.parametrize("balanced", [True, False])
def test_bytes_are_counted_truly(memory, dtype, balanced):
    buffer = Rehearsal(memory, balanced=balanced)
    limit = tpsgd.common.units.as_bytes(memory)
    one = 64 * dtype.itemsize + 8
    for start in range(0, 600, 100):
        buffer.add((16 * X[start : start + 100]).to(dtype), Y[start : start + 100])
        assert bytes_held(buffer) == buffer.nbytes <= limit
    assert len(buffer) == min(600, limit // one)
    assert buffer.nbytes > limit - one
    assert buffer.x.dtype is dtype


def test_what_is_stored_came_with_its_label():
    buffer = Rehearsal("20KB")
    buffer.add(X, Y)
    for x, y in zip(*buffer.draw(len(buffer)), strict=True):
        same = (x == X).flatten(1).all(1)
        assert y in Y[same]


def test_classes_are_balanced_and_a_plain_reservoir_is_not():
    order = Y.sort(stable=True).indices  # class by class
    many = torch.cat([order[Y[order] == 0], order[Y[order] == 1], order[Y[order] == 2][:40]])
    balanced, plain = Rehearsal("20KB"), Rehearsal("20KB", balanced=False)
    for buffer in (balanced, plain):
        for start in range(0, len(many), 30):
            buffer.add(X[many[start : start + 30]], Y[many[start : start + 30]])
    counts = balanced.counts()
    assert max(counts.values()) - min(counts.values()) <= 1
    assert plain.counts()[2] < 0.6 * plain.counts()[0]


@pytest.mark.parametrize("balanced", [True, False])
def test_the_counts_are_those_of_the_stored_labels(balanced):
    buffer = Rehearsal("5KB", balanced=balanced)
    for start in range(0, 400, 20):
        buffer.add(X[start : start + 20], Y[start : start + 20] * (start % 3))
        stored = buffer.y[: len(buffer)].tolist()
        assert buffer.counts() == {label: stored.count(label) for label in sorted(set(stored))}
    other = Rehearsal("5KB", balanced=balanced)
    other.load_state_dict(buffer.state_dict())
    assert other.counts() == buffer.counts()


def test_a_sample_does_not_cost_a_look_at_the_whole_buffer(monkeypatch):
    buffer = Rehearsal("20KB")
    buffer.add(X[:200], Y[:200])
    monkeypatch.setattr(torch.Tensor, "unique", lambda *_, **__: pytest.fail("it is counted"))
    buffer.add(X[200:300], Y[200:300])
    assert sum(buffer.counts().values()) == len(buffer)


def test_a_class_is_a_random_choice_of_all_that_came():
    buffer = Rehearsal(100 * (4 + 8))
    stream = torch.arange(2000.0).view(-1, 1)
    buffer.add(stream, torch.zeros(2000, dtype=torch.long))
    assert buffer.x.mean() == pytest.approx(1000, abs=200)
    assert (buffer.x > 1500).float().mean() == pytest.approx(0.25, abs=0.13)


def test_new_samples_come_with_as_many_earlier_ones():
    buffer = Rehearsal("20KB", replayed=2)
    assert len(buffer.mixed(X[:5], Y[:5])[1]) == 5
    buffer.add(X[:50], Y[:50])
    x, y = buffer.mixed(X[50:55], Y[50:55])
    assert len(x) == len(y) == 15 and torch.equal(x[:5], X[50:55])


def test_a_buffer_helps_to_remember():
    accuracies = {}
    for memory in (None, "50KB"):
        rehearsal = None if memory is None else Rehearsal(memory, replayed=4)
        stream = Stream(mlp(1), lr=0.005, rehearsal=rehearsal, batch_size=8)
        for digit in range(5):
            for _ in range(4):
                stream.partial_fit(X[digit == Y], Y[digit == Y])
        accuracies[memory] = stream.evaluate((X[Y < 5], Y[Y < 5]))
    assert accuracies[None] < 0.5 < 0.9 < accuracies["50KB"]


@pytest.mark.parametrize(
    ("memory", "sentence"),
    [("a few", "is no amount of memory"), (-3, "is no amount of memory"), ("100", "no room for")],
)
def test_sizes_that_make_no_sense_are_refused(memory, sentence):
    with pytest.raises(TpsgdError, match=sentence):
        Stream(mlp(), rehearsal=Rehearsal(memory)).partial_fit(X[:2], Y[:2])


def test_samples_that_cannot_be_stored_are_refused_before_they_are_learned():
    stream = Stream(mlp(), rehearsal=Rehearsal("10KB")).partial_fit(X[:10], Y[:10])
    before = [p.detach().clone() for p in stream.model.parameters()]
    for x, y in (
        (X[:3].double(), Y[:3]),
        (X[:3], torch.eye(10)[:3]),
        (X[:3].double(), [10, 11, 12]),
    ):
        with pytest.raises(TpsgdError, match="rehearsal buffer"):
            stream.partial_fit(x, y)
    assert stream.classes == tuple(range(10))
    assert all(map(torch.equal, before, stream.model.parameters()))
    with pytest.raises(TpsgdError, match="replayed must be"):
        Rehearsal("10KB", replayed=0)
