"""What the tests of the data package share."""

import pytest

from tpsgd import TpsgdError, data


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty TPSGD_DATA of the test's own, and an empty cache."""
    monkeypatch.setenv("TPSGD_DATA", str(tmp_path))
    monkeypatch.setenv("TPSGD_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def refused():
    """Check that `load` raises an error of one line that matches, and return its text."""

    def check(spec, message, **options):
        with pytest.raises(TpsgdError, match=message) as error:
            data.load(str(spec), **options)
        assert "\n" not in str(error.value)
        return str(error.value)

    return check
