"""`tpsgd`: the commands, and what becomes of errors and interrupts."""

import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from tpsgd import __version__
from tpsgd.cli.compare import compare
from tpsgd.cli.demo import demo
from tpsgd.cli.plan import plan
from tpsgd.cli.predict import evaluate, predict
from tpsgd.cli.rule_list import rule_list
from tpsgd.cli.terminal import INTERRUPTED, Stopped, grid_of
from tpsgd.cli.torchrun import speaks, under_torchrun
from tpsgd.cli.train import train
from tpsgd.cli.wording import in_options
from tpsgd.common import plugins
from tpsgd.common.errors import TpsgdError, reason, user_line
from tpsgd.common.names import printable
from tpsgd.common.units import columns
from tpsgd.features import progress_bar

app = typer.Typer(
    help="Train neural networks without backpropagation.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The built-in data sets.", no_args_is_help=True)
app.add_typer(data_app, name="data")
for command in (demo, train, predict, evaluate, compare, plan):
    app.command()(command)


def main() -> NoReturn:
    """Run the command line; a mistake of the user's is one line and exit status 2."""
    progress_bar.automatic = False
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: _print_error(
            f"warning: {in_options(str(message))}"
        )
        sys.exit(_run())


def _run() -> int:
    try:
        code = app(standalone_mode=False)
        return _print_error("interrupted", INTERRUPTED) if code == INTERRUPTED else code or 0
    except (KeyboardInterrupt, typer.Abort):
        return _print_error("interrupted", INTERRUPTED)
    except Stopped as stopped:
        return _print_error(str(stopped), stopped.status)
    except TpsgdError as error:
        return _print_error(in_options(str(error)), 2)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{where}{error.strerror or error}", 1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's errors have it; help has no text
            if not user_line(error):
                raise
            return _print_error(reason(error), 2)
        text = error.format_message()  # type: ignore[attr-defined]
        return _print_error(f"{text} (see --help)", 2) if text else 0


def _print_error(text: str, code: int = 0) -> int:
    """Print one line on standard error, if this rank is the one that speaks."""
    if speaks(text):
        print("tpsgd:", printable(" ".join(text.split())), file=sys.stderr)
    return code


def _version(asked: bool) -> None:
    if asked:
        print(f"tpsgd {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    if under_torchrun() and context.invoked_subcommand != "train":
        raise TpsgdError(
            f"{context.invoked_subcommand} runs in one process: start it without torchrun, which "
            "is for train"
        )
    plugins.names(plugins.COMMANDS, OWN)  # warns of those that are left out


@app.command()
def rules() -> None:
    """List the rules, other methods and controls."""
    Console().print(grid_of("rule", "what it does", "source", rows=rule_list()))


@data_app.command("list")
def data_list() -> None:
    """List the built-in data sets and their folders."""
    from tpsgd.data import describe

    rows: list[tuple[str, ...]] = [("name", "train + test", "shape", "classes", "where")]
    for name, *sizes, where in describe():
        place = where.removesuffix(f": tpsgd data fetch {name}").removeprefix("comes with ")
        rows.append((name, *sizes, place))
    print(columns(rows))
    print("to download a data set that is not here: tpsgd data fetch NAME")


@data_app.command("fetch")
def data_fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="digits, mnist, ...; see: list.")],
) -> None:
    """Download a data set, unless it is already there, and print its folder."""
    from tpsgd.data import fetch

    print(fetch(name))


OWN = plugins.add_commands(app)
