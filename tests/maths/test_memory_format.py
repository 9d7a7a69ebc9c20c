"""A derivative of one number per cell, expanded over the cell's pixels."""

import pytest
import torch

from tpsgd.maths.kernels.memory_format import full

FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
SHAPES = [(3, 4, 8, 8, 2), (2, 5, 6, 6, 3), (2, 8, 4, 2, 2), (1, 3, 8, 12, 4)]


def expanded(dy, y):
    rows = dy.repeat_interleave(y.shape[2] // dy.shape[2], 2)
    return rows.repeat_interleave(y.shape[3] // dy.shape[3], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_pixel_has_the_number_of_its_cell(shape, layout, dtype):
    n, filters, height, width, cells = shape
    y = torch.zeros(n, filters, height, width, dtype=dtype).to(memory_format=FORMATS[layout])
    dy = torch.randn(n, filters, cells, cells).to(dtype)
    filled = full(dy, y)
    assert torch.equal(filled, expanded(dy, y))
    assert filled.dtype is dtype and filled.stride() == y.stride()


def test_whatever_lies_in_memory_where_four_numbers_cannot_be_copied_at_once():
    numbers = torch.randn(1 + 2 * 2 * 2 * 4).bfloat16()
    offset = numbers[1:].view(2, 2, 2, 4).permute(0, 3, 1, 2)
    y = torch.zeros(2, 4, 4, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    assert torch.equal(full(offset, y), expanded(offset, y))
    turned, dy = torch.zeros(2, 4, 8, 8).bfloat16().mT, torch.randn(2, 4, 2, 2).bfloat16()
    assert torch.equal(full(dy, turned), expanded(dy, turned))


def test_a_derivative_in_another_number_format_is_rounded_to_that_of_the_output():
    y, dy = torch.zeros(2, 4, 8, 8).bfloat16(), torch.randn(2, 4, 2, 2)
    assert torch.equal(full(dy, y), expanded(dy.bfloat16(), y))


def test_a_derivative_of_the_same_shape_stays_what_it_is():
    dy = torch.randn(2, 4, 8, 8)
    assert full(dy, torch.zeros_like(dy)) is dy
