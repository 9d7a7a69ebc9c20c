"""A tape computes what its function does, with the same operators and no more memory."""

import pytest
import torch
from torch import nn

from tpsgd.engine.fast.tape import Tape, record
from tpsgd.memory.meter import LiveBytes

W, DATA = torch.randn(4, 3), torch.randn(20, 4)


def taped(function, *arguments):
    """A tape of a function of tensors, from two equal records."""
    results, records = [], []
    for _ in range(2):
        copies = [a.clone() for a in arguments]

        def call(copies=copies):
            results[:] = function(*copies)

        records.append(record(call, copies, lambda: results))
    assert records[0] == records[1]
    return Tape(records[1], len(arguments))


def test_a_tape_takes_other_arguments():
    def function(index):
        x = DATA.index_select(0, index)
        return [torch.tanh(x @ W), x.sum(0)]

    tape = taped(function, torch.tensor([1, 2, 3]))
    other = torch.tensor([5, 0, 7])
    for found, wanted in zip(tape.replay(other), function(other), strict=True):
        assert torch.equal(found, wanted)


def test_what_nothing_needs_is_left_out_but_for_what_writes_or_draws():
    counter = torch.zeros(())

    def function(x):
        x.exp()  # unused
        counter.add_(1)
        noise = torch.empty(3).uniform_()
        torch.bernoulli(torch.full((3,), 0.5))  # unused, but it moves the generator
        return [x + noise]

    tape = taped(function, torch.ones(3))
    assert "exp" not in tape.source and "add_" in tape.source and "bernoulli" in tape.source
    torch.manual_seed(0)
    found = [tape.replay(torch.ones(3))[0] for _ in range(2)]
    torch.manual_seed(0)
    wanted = [function(torch.ones(3))[0] for _ in range(2)]
    assert all(map(torch.equal, found, wanted))


def test_views_of_constants_are_made_once_and_equal_views_are_one():
    def function(x):
        y = x @ W.mT.mT
        return [y.T.T.relu() + y.T.T]

    tape = taped(function, torch.randn(5, 4))
    assert "transpose" not in tape.source and "permute" not in tape.source
    x = torch.randn(5, 4)
    assert torch.equal(tape.replay(x)[0], function(x)[0])


def test_writing_into_a_value_is_seen_through_its_views():
    def function(x):
        y = x * 2
        top = y[0]
        top.add_(10)
        return [y, y.T.contiguous()]

    tape = taped(function, torch.ones(2, 3))
    y, turned = tape.replay(torch.ones(2, 3))
    assert y.tolist() == [[12.0] * 3, [2.0] * 3] and torch.equal(turned, y.T)


def test_a_function_that_reads_a_value_has_no_record():
    x = torch.ones(3)
    assert record(lambda: x.mul_(float(x.sum())), [x], list) is None


@pytest.mark.parametrize("change", ["number", "tensor"])
def test_records_differ_where_python_changes_something(change):
    calls = []

    def function(x):
        calls.append(1)
        if change == "number":
            x.mul_(float(len(calls)))
        else:
            x.add_(torch.from_numpy(x.numpy() * 2))

    x = torch.ones(3)
    first, second = (record(lambda: function(x), [x], list) for _ in range(2))
    assert first != second


def test_numbers_that_python_cannot_write_are_kept():
    def function(x):
        return [x.clamp(min=-float("inf"), max=2.0).masked_fill(x > 0, float("inf")), x.double()]

    tape = taped(function, torch.tensor([-1.0, 3.0]))
    clamped, double = tape.replay(torch.tensor([-5.0, 1.0]))
    assert clamped[0] == -5 and clamped[1].isinf() and double.dtype is torch.float64


def test_operators_with_several_results():
    def function(x):
        value, index = x.max(1)
        first, _, last = x.split(1, 1)
        return [value, index, first + last]

    tape, x = taped(function, torch.randn(4, 3)), torch.randn(4, 3)
    assert all(map(torch.equal, tape.replay(x), function(x)))


def test_a_replay_frees_each_tensor_after_its_last_use():
    """Ten large values one after another: two are alive at a time."""
    x = torch.zeros(10_000)

    def function(x):
        for _ in range(10):
            x = x + 1
        return [x.sum()]

    tape, live = taped(function, x), LiveBytes()
    with live:
        tape.replay(x)
    assert live.peak < 2.1 * x.nbytes


def test_a_recording_holds_no_values():
    x = torch.zeros(10_000)
    live = LiveBytes()

    def function():
        y = x
        for _ in range(10):
            y = y + 1

    with live:
        record(function, [x], list)
    assert live.peak < 2.1 * x.nbytes


def test_modules_in_no_grad_mode():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())

    def function(x):
        return [net(x)]

    with torch.no_grad():
        tape = taped(function, torch.randn(2, 1, 5, 5))
        x = torch.randn(2, 1, 5, 5)
        before = net[1].running_mean.clone()
        found = tape.replay(x)[0]
        assert not torch.equal(net[1].running_mean, before)
        torch.testing.assert_close(found, function(x)[0])


def test_conjugates_are_views_of_their_own():
    def function(x):
        z = torch.fft.rfft(x)
        return [torch.fft.irfft(z.conj(), n=x.shape[-1]), (z.conj().imag + z.imag).abs().sum()]

    tape, x = taped(function, torch.randn(3, 8)), torch.randn(3, 8)
    for found, wanted in zip(tape.replay(x), function(x), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("function", [torch.unique, torch.nonzero, lambda x: x[x > 0]])
def test_a_shape_that_depends_on_values_has_no_record(function):
    x = torch.ones(3)
    assert record(lambda: function(x), [x], list) is None
