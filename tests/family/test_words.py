"""The family's rules as words, as its entry points name them."""

import importlib
import tomllib
from pathlib import Path

import helpers
import pytest

import tpsgd
from tpsgd.cli import rule_list
from tpsgd.common import plugins
from tpsgd.comparison import arms

family = pytest.importorskip("tpsgd_family")
PROJECT = Path(family.__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory):
    """The package as it is in this checkout, whatever is installed."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    folder = tmp_path_factory.mktemp("family")
    helpers.install_package(folder, project["name"], project["entry-points"])
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.reload(arms)
        yield
    importlib.reload(arms)


@pytest.mark.parametrize("word", family.ALL)
def test_a_word_names_the_rule_with_its_defaults(word):
    arm, entry = arms.arm(word), arms.entry(word)
    rule = family.ALL[word]()
    assert (arm.name, str(arm.rule), arm.about) == (word, str(rule), rule.about)
    assert str(tpsgd.rules.resolve(word)) == str(rule)
    assert (word, arm.about, entry.source) in rule_list.rule_list()
    assert plugins.FOLDERS[plugins.ARMS][word] == "family"


def test_words_are_no_part_of_all_and_look_different():
    words, _ = arms.all_words(lambda: helpers.mlp(6, 4, 3))
    assert not set(words) & set(family.ALL) and set(family.ALL) <= set(arms.ALL)
    looks = [(entry.colour, entry.marker) for entry in arms.ALL.values()]
    assert len(set(looks)) == len(looks) == len({colour for colour, _ in looks})


def test_a_saved_word_is_read_back(says, tmp_path):
    small = ("--rule", "pepita", "--model", "mlp:4", "--max-train", "50", "--epochs", "1")
    assert says("train", *small, "--save", str(tmp_path / "model"))[0] == 0
    again = ("--model", str(tmp_path / "model"), "--max-train", "50", "--epochs", "1")
    code, out, _ = says("train", *again)
    assert code == 0 and "pepita" in out
