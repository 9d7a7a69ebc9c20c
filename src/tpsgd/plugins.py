"""Plug-ins: other distributions that add attributes to `tpsgd` and commands to its command line.

A plug-in names them in the entry points of its distribution. In the group `tpsgd.plugins`,
`export = "package"` makes `tpsgd.export` that package, and `name = "package.module:function"` makes
`tpsgd.name` that function. In the group `tpsgd.commands`, `export = "package.cli:app"` is a typer
app, or a function that takes the app of `tpsgd` and adds commands to it.
"""

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    import typer

ATTRIBUTES, COMMANDS = "tpsgd.plugins", "tpsgd.commands"
FOLDERS: dict[str, dict[str, str]] = {  # plug-ins in plugins/, for a sentence on how to install one
    ATTRIBUTES: {},
    COMMANDS: {},
}


def names(group: str) -> set[str]:
    """The names of a group that installed plug-ins provide."""
    return {point.name for point in entry_points(group=group)}


def load(group: str, name: str) -> Any:
    """What a plug-in provides by this name; two plug-ins with the same name are refused."""
    point, *others = entry_points(group=group, name=name)
    if others:
        values = " and ".join(each.value for each in (point, *others))
        raise TpsgdError(f"{values} are both plug-ins of the name {name}: uninstall one of them")
    return point.load()


def attribute(name: str) -> Any:
    """What a plug-in provides as `tpsgd.NAME`."""
    if not name.startswith("_") and name in names(ATTRIBUTES):
        return load(ATTRIBUTES, name)
    if name in FOLDERS[ATTRIBUTES]:
        raise AttributeError(_how_to_install(f"tpsgd.{name}", FOLDERS[ATTRIBUTES][name]))
    raise AttributeError(f"module 'tpsgd' has no attribute {name!r}")


def add_commands(app: "typer.Typer") -> None:
    """Add the commands of plug-ins; one that is not there says why when it is called."""
    installed = names(COMMANDS)
    for name in sorted(installed):
        try:
            command = load(COMMANDS, name)
        except Exception as error:  # the other commands work without it
            _add_refusal(app, name, f"the plug-in of tpsgd {name} cannot be loaded: {error}")
            continue
        if callable(getattr(command, "command", None)):  # a typer app
            app.add_typer(command, name=name)
        else:
            command(app)
    for name in FOLDERS[COMMANDS].keys() - installed:
        _add_refusal(app, name, _how_to_install(f"tpsgd {name}", FOLDERS[COMMANDS][name]))


def _add_refusal(app: "typer.Typer", name: str, sentence: str) -> None:
    """Add a hidden command that refuses with this sentence, whatever words follow it."""
    any_words = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, hidden=True, context_settings=any_words)
    def refuse() -> None:
        raise TpsgdError(sentence)


def _how_to_install(name: str, folder: str) -> str:
    return (
        f"{name} is in the plug-in tpsgd-{folder}, which is not installed: pip install "
        f"tpsgd-{folder}, or pip install ./plugins/{folder} in a checkout of tpsgd"
    )
