"""Which gradients are summed over the ranks in one message, and what comes back."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tpsgd_parallel import gradient_sums
from tpsgd_parallel.data_parallel import _wrapped
from tpsgd_parallel.gradient_sums import GradientSums


class Echo:
    """Ranks that are two with the same numbers; `log` has the size of every message."""

    def __init__(self):
        self.log = []

    def begin_sum(self, tensor):
        self.log.append(tensor.numel())
        tensor.mul_(2)
        return self

    def wait(self):
        pass


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(gradient_sums, "MESSAGE_BYTES", 4 * 10)
    return Echo()


def params(*sizes, dtype=torch.float32):
    tensors = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for p in tensors:
        p.grad = torch.arange(float(p.numel())).to(dtype).view(p.shape)
    return tensors


def test_blocks_wait_for_others_until_there_are_enough_bytes(ranks):
    sums = GradientSums(ranks)
    first, second, third = params(4, 2), params(4), params(3)
    (message,) = sums.add(first)
    assert ranks.log == []
    assert sums.add(second) == [message]
    assert ranks.log == [10]  # enough now
    assert all(p.grad is None for p in first + second)  # their memory is free
    assert sums.add(third) != [message] and ranks.log == [10]
    sums.begin()  # the batch has passed all blocks
    sums.begin()
    assert ranks.log == [10, 3]
    sums.end(message)
    expected = [2 * p.grad for p in params(4, 2, 4)]
    assert all(map(torch.equal, [p.grad for p in first + second], expected))


def test_a_block_that_is_waited_for_begins_its_message(ranks):
    sums = GradientSums(ranks)
    (p,) = params(3)
    (message,) = sums.add([p])
    sums.end(message)
    sums.end(message)  # by another block in the same message
    assert ranks.log == [3] and torch.equal(p.grad, torch.tensor([0.0, 2.0, 4.0]))


def test_formats_are_not_mixed_in_a_message(ranks):
    sums = GradientSums(ranks)
    sums.add(params(3))
    sums.add(params(3, dtype=torch.float64))
    sums.begin()
    assert ranks.log == [3, 3]


def test_a_block_of_two_formats_has_two_messages(ranks):
    sums = GradientSums(ranks)
    block = params(3) + params(2, dtype=torch.float64) + params(1)
    messages = sums.add(block)
    for message in messages:
        sums.end(message)
    assert ranks.log == [3, 2, 1]
    assert [p.grad.dtype for p in block] == [p.dtype for p in block]
    assert [p.grad.tolist() for p in block] == [[0, 2, 4], [0, 2], [0]]


def test_the_sum_of_the_last_blocks_begins_before_the_next_batch(ranks):
    sums, (p,) = GradientSums(ranks), params(3)
    batch = SimpleNamespace(share=1.0, last=True)
    step = _wrapped(sums, lambda *_: sums.add([p]), [], None)
    step([], batch)
    assert ranks.log == [3]


def test_gradients_keep_the_strides_of_their_parameter(ranks):
    weight = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    weight.grad = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    before = weight.grad.clone()
    sums = GradientSums(ranks)
    sums.end(*sums.add([weight]))
    assert torch.equal(weight.grad, 2 * before) and weight.grad.stride() == weight.stride()


def test_a_rank_without_samples_adds_zeros(ranks):
    sums = GradientSums(ranks)
    (p,) = params(3)
    p.grad = None
    sums.end(*sums.add([p]))
    assert torch.equal(p.grad, torch.zeros(3))
