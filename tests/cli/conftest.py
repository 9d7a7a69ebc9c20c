"""What the tests of the command line share."""

import pytest


@pytest.fixture(autouse=True)
def _undrawn(undrawn):
    """tests/comparison/test_report.py draws."""
