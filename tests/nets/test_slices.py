"""A weight's gradient in slices: every row is in one of them."""

import pytest

from tpsgd.nets.closed_form import sliced


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
@pytest.mark.parametrize("slices", [1, 2, 3, 16, 64])
def test_every_row_is_in_one_slice(rows, slices):
    named = dict(sliced("w", rows, slices))
    assert len(named) == min(rows, slices)
    if len(named) == 1:
        assert named == {"w": None}
    else:
        assert [i for part in named.values() for i in range(rows)[part]] == list(range(rows))
        assert list(named) == [f"w[{i}]" for i in range(len(named))]
