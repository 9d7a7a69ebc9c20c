"""Plug-ins: what other distributions add, and what one that is absent or broken leads to."""

from importlib.metadata import EntryPoint

import pytest

import tpsgd
from tpsgd.common import plugins


@pytest.fixture
def installed(monkeypatch):
    """Let these entry points be the installed ones, each `(group, name, value)`."""

    def install(*points):
        def entry_points(group, name=None):
            return [EntryPoint(n, v, g) for g, n, v in points if g == group and name in (None, n)]

        monkeypatch.setattr(plugins, "entry_points", entry_points)

    return install


def test_a_package_or_a_function_becomes_an_attribute(installed):
    installed(
        (plugins.ATTRIBUTES, "fractions", "fractions"), (plugins.ATTRIBUTES, "root", "math:sqrt")
    )
    assert tpsgd.root(4) == 2 and tpsgd.fractions.Fraction(1, 2) == 0.5
    assert {"root", "fractions"} <= set(dir(tpsgd))


def test_an_absent_plug_in_says_how_to_install_it(installed):
    installed()
    with pytest.raises(tpsgd.TpsgdError, match=r"plug-in tpsgd-adapt.* -e plugins/adapt"):
        tpsgd.adapt  # noqa: B018
    with pytest.raises(tpsgd.TpsgdError, match=r"^Stream is in the plug-in tpsgd-streams"):
        tpsgd.Stream  # noqa: B018
    assert not hasattr(tpsgd, "adapt") and not hasattr(tpsgd, "nonsense")


def test_a_broken_plug_in_is_one_sentence_and_the_others_work(installed):
    installed(
        (plugins.ATTRIBUTES, "broken", "no_such_package"),
        (plugins.ARMS, "broken", "no_such_package:ARM"),
        (plugins.ARMS, "whole", "math:pi"),
    )
    with pytest.raises(tpsgd.TpsgdError, match="plug-in of broken cannot be loaded: No module"):
        tpsgd.broken  # noqa: B018
    with pytest.warns(UserWarning, match="plug-in of broken cannot be loaded"):
        assert list(plugins.load_all(plugins.ARMS)) == ["whole"]


def test_two_plug_ins_of_one_name_are_refused(installed):
    installed((plugins.ATTRIBUTES, "twice", "math:pi"), (plugins.ATTRIBUTES, "twice", "math:e"))
    with pytest.raises(tpsgd.TpsgdError, match="both plug-ins of the name twice"):
        tpsgd.twice  # noqa: B018
