"""Plug-ins: other distributions that add attributes, commands and arms to `tpsgd`.

A plug-in names them in the entry points of its distribution. In the group `tpsgd.plugins`,
`export = "package"` makes `tpsgd.export` that package, and `name = "package.module:function"` makes
`tpsgd.name` that function. In the group `tpsgd.commands`, `export = "package.cli:app"` is a typer
app, or a function that is a command of typer. In the group `tpsgd.arms`,
`zorb = "package.arms:ZORB"` is a `tpsgd.rules.Entry` whose `make()` gives a rule or a `tpsgd.Arm`.
A name that tpsgd has itself stays its own, and two packages cannot share one.
"""

import warnings
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

import tpsgd
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
    ARMS: {
        "dladmm": "peers", "feedback-alignment": "family", "forward-forward": "family",
        "forward-gradient-activations": "family", "forward-gradient-local": "family",
        "forward-gradient-weights": "family", "hsic-bottleneck": "family", "pepita": "family",
        "sign-symmetry": "family", "target-propagation": "family", "weight-perturbation": "family",
        "zorb": "peers",
    },
}  # fmt: skip


class PluginMissing(TpsgdError, AttributeError):
    """An attribute of `tpsgd` that a plug-in would provide, which is not installed."""


def names(group: str, own: Collection[str] = ()) -> set[str]:
    """The names of a group that installed plug-ins provide.

    Those that are tpsgd's `own` are left out, each with a warning.
    """
    points = entry_points(group=group)
    for point in points:
        if point.name in own:
            warnings.warn(
                f"{point.name} of the package {_package(point)} is left out: tpsgd has its own",
                stacklevel=2,
            )
    return {point.name for point in points}.difference(own)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.value


def load(group: str, name: str) -> Any:
    """What a plug-in provides by this name; two plug-ins with the same name are refused."""
    point, *others = entry_points(group=group, name=name)
    if others:
        packages = " and ".join(map(_package, (point, *others)))
        raise TpsgdError(f"the packages {packages} both have a plug-in {name}: uninstall one")
    try:
        return point.load()
    except Exception as error:  # whatever another distribution may raise
        raise PluginMissing(f"the plug-in of {name} cannot be loaded: {error}") from error


def load_all(group: str, own: Collection[str] = ()) -> dict[str, Any]:
    """What plug-ins provide in a group, by name; one that cannot be loaded gives a warning."""
    values = {}
    for name in sorted(names(group, own)):
        try:
            values[name] = load(group, name)
        except TpsgdError as error:
            warnings.warn(str(error), stacklevel=2)
    return values


def attribute(name: str) -> Any:
    """What a plug-in provides as `tpsgd.NAME`; public names and modules of tpsgd are its own."""
    own = {*tpsgd.__all__, *(module.name for module in iter_modules(tpsgd.__path__))}
    if not name.startswith("_") and name in names(ATTRIBUTES, own):
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


def add_commands(app: "typer.Typer") -> set[str]:
    """Add the commands of plug-ins; one that is not there says why when it is called.

    Returns the names that the app has already: a plug-in's command of such a name is left out.
    """
    functions = [command.name or command.callback.__name__ for command in app.registered_commands]  # type: ignore[union-attr]
    own = {*functions, *(str(group.name) for group in app.registered_groups)}
    installed = names(COMMANDS) - own
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
    return own


def _add_refusal(app: "typer.Typer", name: str, sentence: str) -> None:
    """Add a hidden command that refuses with this sentence, whatever words follow it."""
    any_words = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name, hidden=True, context_settings=any_words)
    def refuse() -> None:
        raise TpsgdError(sentence)
