"""Plug-ins: other distributions that add attributes, commands and arms to `tpsgd`.

A plug-in names them in the entry points of its distribution. In the group `tpsgd.plugins`,
`export = "package"` makes `tpsgd.export` that package, and `name = "package.module:function"` makes
`tpsgd.name` that function. In the group `tpsgd.commands`, `export = "package.cli:app"` is a typer
app, or a function that is a command of typer. In the group `tpsgd.arms`,
`zorb = "package.arms:ZORB"` is a `tpsgd.rules.Entry` whose `make()` gives a `tpsgd.Arm`.
"""

import warnings
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from tpsgd.common.errors import TpsgdError

if TYPE_CHECKING:
    import typer

ATTRIBUTES, COMMANDS, ARMS = "tpsgd.plugins", "tpsgd.commands", "tpsgd.arms"
FOLDERS = {  # in plugins/, for a sentence on how to install what is not there
    ATTRIBUTES: {
        "adapt": "adapt", "data_parallel": "parallel", "export": "export", "family": "family",
        "fleet": "fleet", "lda": "streams", "OnePass": "streams", "peers": "peers",
        "pipeline": "parallel", "probes": "probes", "Rehearsal": "streams",
        "RiverClassifier": "streams", "Stream": "streams", "TPSGDClassifier": "sklearn",
        "TPSGDRegressor": "sklearn",
    },
    COMMANDS: {"adapt": "adapt", "export": "export", "search": "adapt"},
    ARMS: {"dladmm": "peers", "zorb": "peers"},
}  # fmt: skip


class PluginMissing(TpsgdError, AttributeError):
    """An attribute of `tpsgd` that a plug-in would provide, which is not installed."""


def names(group: str) -> set[str]:
    """The names of a group that installed plug-ins provide."""
    return {point.name for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """What a plug-in provides by this name; two plug-ins with the same name are refused."""
    point, *others = entry_points(group=group, name=name)
    if others:
        values = " and ".join(each.value for each in (point, *others))
        raise TpsgdError(f"{values} are both plug-ins of the name {name}: uninstall one of them")
    try:
        return point.load()
    except Exception as error:  # whatever another distribution may raise
        raise PluginMissing(f"the plug-in of {name} cannot be loaded: {error}") from error


def load_all(group: str) -> dict[str, Any]:
    """What plug-ins provide in a group, by name; one that cannot be loaded gives a warning."""
    values = {}
    for name in sorted(names(group)):
        try:
            values[name] = load(group, name)
        except PluginMissing as error:
            warnings.warn(str(error), stacklevel=2)
    return values


def attribute(name: str) -> Any:
    """What a plug-in provides as `tpsgd.NAME`."""
    if not name.startswith("_") and name in names(ATTRIBUTES):
        return load(ATTRIBUTES, name)
    if sentence := absent(ATTRIBUTES, name):
        raise PluginMissing(sentence)
    raise AttributeError(f"module 'tpsgd' has no attribute {name!r}")


def absent(group: str, name: str) -> str:
    """How to install the plug-in that provides a name; "" if none of this repository does."""
    if (folder := FOLDERS[group].get(name)) is None:
        return ""
    return (
        f"{name} is in the plug-in tpsgd-{folder}, which is not installed: pip install -c "
        f"constraints.txt -e plugins/{folder}, in a checkout of tpsgd"
    )


def add_commands(app: "typer.Typer") -> None:
    """Add the commands of plug-ins; one that is not there says why when it is called."""
    installed = names(COMMANDS)
    for name in sorted(installed):
        try:
            command = load(COMMANDS, name)
        except TpsgdError as error:  # the other commands work without it
            _add_refusal(app, name, str(error))
            continue
        if callable(getattr(command, "command", None)):  # a typer app
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    for name in FOLDERS[COMMANDS].keys() - installed:
        _add_refusal(app, name, absent(COMMANDS, name))


def _add_refusal(app: "typer.Typer", name: str, sentence: str) -> None:
    """Add a hidden command that refuses with this sentence, whatever words follow it."""
    any_words = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, hidden=True, context_settings=any_words)
    def refuse() -> None:
        raise TpsgdError(sentence)
