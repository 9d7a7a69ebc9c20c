"""Plug-ins: what other distributions add, and what one that is absent or broken leads to."""

import importlib
import math
import sys
from importlib.metadata import EntryPoint

import helpers
import pytest
import typer

import tpsgd
from tpsgd.cli import rule_list
from tpsgd.cli.train import train
from tpsgd.common import plugins
from tpsgd.comparison import arms
from tpsgd.comparison.arms import arm


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
    with pytest.raises(tpsgd.TpsgdError, match=r"packages math:pi and math:e both .* twice: unins"):
        tpsgd.twice  # noqa: B018


# ---- distributions in a folder -------------------------------------------------------------------

MODULE = """
from tpsgd import Arm, rules
from tpsgd.rules import Entry

def mine():
    return rules.tpsgd_l2()

def whole():
    return Arm("whole", None, method=lambda model, data: None)

MINE, WHOLE = Entry(mine, "", "#012345", "o"), Entry(whole, "", "#012346", "o")
"""
NAMES = {
    plugins.ARMS: {
        "readout": "tpsgd_mine:MINE", "elm": "tpsgd_mine:MINE", "mine": "tpsgd_mine:MINE",
        "whole": "tpsgd_mine:WHOLE",
    },
    plugins.ATTRIBUTES: {"fit": "math:pi", "engine": "math:pi", "pi": "math:pi"},
    plugins.COMMANDS: {"train": "builtins:print", "data": "builtins:print"},
}  # fmt: skip


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Install distributions, each a name and its entry points, and read the words of arms anew."""

    def install(**groups):
        (tmp_path / "tpsgd_mine.py").write_text(MODULE)
        for name, points in groups.items():
            helpers.install_package(tmp_path, f"tpsgd-{name}", points)
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.reload(arms)

    yield install
    monkeypatch.undo()
    sys.modules.pop("tpsgd_mine", None)
    importlib.reload(arms)


def test_names_of_plug_ins_never_replace_those_of_tpsgd(packages):
    with pytest.warns(UserWarning, match="^(readout|elm) of the package tpsgd-mine is left out"):
        ours = packages(mine=NAMES)
    assert ours.ALL["readout"] is tpsgd.rules.ALL["readout"] and "mine" in ours.ALL
    assert arm("elm").optimizer is not None
    with pytest.raises(tpsgd.TpsgdError, match="elm is more than a rule"):
        tpsgd.rules.resolve("elm")
    with pytest.warns(UserWarning, match="^(readout|elm) of the package tpsgd-mine is left out"):
        listed = [word for word, *_ in rule_list.rule_list()]
    assert listed.count("readout") == 1 == listed.count("mine")


def test_attributes_and_commands_of_tpsgd_are_its_own(packages):
    with pytest.warns(UserWarning, match="of the package tpsgd-mine is left out"):
        packages(mine=NAMES)
    with pytest.warns(UserWarning, match="^(fit|engine) of the package tpsgd-mine is left out"):
        assert tpsgd.pi == math.pi
    assert tpsgd.fit.__module__ == "tpsgd.engine.fit"
    with pytest.warns(UserWarning, match="^(fit|engine) of the"), pytest.raises(AttributeError):
        plugins.attribute("engine")  # which `import tpsgd.engine` makes a module
    app = typer.Typer()
    app.add_typer(typer.Typer(), name="data")
    app.command()(train)
    own = plugins.add_commands(app)
    assert own == {"train", "data"}
    assert [c.callback for c in app.registered_commands if c.name in (None, "train")] == [train]
    with pytest.warns(UserWarning, match="^(train|data) of the package tpsgd-mine is left out"):
        plugins.names(plugins.COMMANDS, own)


def test_two_packages_with_one_name_are_refused_by_their_names(packages):
    points = {
        plugins.ARMS: {"mine": "tpsgd_mine:MINE"},
        plugins.ATTRIBUTES: {"pi": "math:pi"},
        plugins.COMMANDS: {"hello": "builtins:print"},
    }
    both = "the packages tpsgd-(one and tpsgd-two|two and tpsgd-one) both have a plug-in "
    with pytest.warns(UserWarning, match=both + "mine"):  # and the other words work
        packages(one=points, two=points)
    for use in (arm, tpsgd.rules.resolve, tpsgd.check_rule):
        with pytest.raises(tpsgd.TpsgdError, match=both + "mine: uninstall one"):
            use("mine")
    with pytest.raises(tpsgd.TpsgdError, match=both + "pi"):
        tpsgd.pi  # noqa: B018
    app = typer.Typer()
    plugins.add_commands(app)
    with pytest.raises(tpsgd.TpsgdError, match=both + "hello"):
        next(c for c in app.registered_commands if c.name == "hello").callback()


def test_a_word_of_a_plug_in_means_the_same_everywhere(packages, says, tmp_path):
    packages(one={plugins.ARMS: {k: NAMES[plugins.ARMS][k] for k in ("mine", "whole")}})
    data, net = helpers.points(), lambda: helpers.mlp(6, 4, 3)
    once = {"epochs": 1, "batch_size": 16}
    assert tpsgd.fit(net(), data, rule="mine", **once).rule == "tpsgd-l2"
    assert tpsgd.fit_many(net, data, rule=["mine", "mine"], restarts=1, **once).runs
    assert "sequential" in str(tpsgd.plan(net(), (6,), rule="mine"))
    tpsgd.check_rule("mine")
    record = tpsgd.compare((data, data), net, ["mine", "whole"], restarts=1, **once)
    assert [r.arm.name for r in record.results] == ["backprop", "tpsgd-l2", "whole", "frozen"]
    result = tpsgd.search((data, data), net, "mine", rates=[0.01], **once)
    assert result.searched == "tpsgd-l2"
    for use in (
        lambda word: tpsgd.fit(net(), data, rule=word),
        lambda word: tpsgd.plan(net(), (6,), rule=word),
        tpsgd.check_rule,
        tpsgd.rules.resolve,
    ):
        with pytest.raises(tpsgd.TpsgdError, match="whole is more than a rule: it is for compare"):
            use("whole")
        with pytest.raises(tpsgd.TpsgdError, match="unknown rule 'mina': did you mean 'mine'"):
            use("mina")
    small = ("--rule", "mine", "--model", "mlp:4", "--max-train", "50", "--epochs", "1")
    assert says("train", *small)[0] == 0 and says("plan", *small[:4])[0] == 0
    assert "whole cannot be planned" in says("plan", "--rule", "whole")[2]
