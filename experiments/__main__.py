"""The whole paper from one command, and what this library adds to it.

    python -m experiments --list
    python -m experiments mlp cnn [--restarts 2] [--device cuda] [--out reproduced]
    python -m experiments --smoke
    python -m experiments --merge here/deep.json there/deep.json --out results

Each experiment runs in a process of its own. One that fails does not stop the others; the exit
status is 1 then. A run that was stopped goes on with the same command: finished rows of the files
in the folder are not measured again (`--again` measures them again). `--smoke` needs no data and
takes seconds: it shows that an experiment works, its figures mean nothing; without a name, all run.
Words that are not listed here are handed to the experiments.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.merge import join, read
from experiments.registry import EXPERIMENTS, WEIGHTS, Experiment
from tpsgd import TpsgdError
from tpsgd.common.errors import suggestion
from tpsgd.common.files import writable_folder

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments say; the exit status."""
    options, words = parse(argv)
    try:
        if options.merge:
            print("\n".join(f"written: {file}" for file in join(options.merge, options.out)))
            return 0
        if options.list:
            print(listing())
            return 0
        return run_all(chosen(options), words, options)
    except TpsgdError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped: the same command goes on where it was", file=sys.stderr)
        return 130


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The arguments, and the words that are meant for the experiments."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run; --list names them")
    parser.add_argument("--list", action="store_true", help="what each needs and costs")
    parser.add_argument("--all", action="store_true", help="all of them; --paper: the paper's")
    parser.add_argument("--paper", action="store_true", help="all that is in the paper")
    parser.add_argument("--smoke", action="store_true", help="no data, seconds: does it work?")
    parser.add_argument("--again", action="store_true", help="also what the files have already")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder of results")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="join results of several machines"
    )
    return parser.parse_known_args(argv)


def chosen(options: argparse.Namespace) -> list[str]:
    """The experiments by name."""
    for name in options.names:
        if name not in EXPERIMENTS:
            raise TpsgdError(f"there is no experiment {name!r}: {suggestion(name, EXPERIMENTS)}")
    every = options.all or (options.smoke and not options.names and not options.paper)
    if every or options.paper:
        return [name for name, e in EXPERIMENTS.items() if every or e.of_paper]
    if not options.names:
        raise TpsgdError("name an experiment; python -m experiments --list has them all")
    return list(dict.fromkeys(options.names))


def listing() -> str:
    """Two lines for each experiment: what it shows; what it needs and costs, and its files."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        missing = experiment.missing
        needs = [f"{each} (not here)" if each in missing else each for each in experiment.data]
        files = ", ".join(f"{file}.json" for file in experiment.files)
        shows = experiment.shows if experiment.of_paper else f"ours: {experiment.shows}"
        lines += [f"{name:22}{shows}"]
        lines += [f"{'':22}needs {', '.join(needs) or 'no data'}; {experiment.cost}; {files}"]
    return "\n".join(lines)


def run_all(names: list[str], words: list[str], options: argparse.Namespace) -> int:
    """Run the experiments one after another; 1 if one of them failed, else 0."""
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        is_default = options.out == Path("reproduced")
        folder = Path(scratch) if options.smoke and is_default else options.out
        flags = [f"--{flag}" for flag in ("smoke", "again") if getattr(options, flag)]
        for name in names:
            experiment = EXPERIMENTS[name]
            if reason := obstacle(name, experiment, options.smoke) or damage(folder, experiment):
                failed.append(name)
                print(f"{name}: {reason}", file=sys.stderr, flush=True)
                continue
            for program in experiment.programs:
                print(f"== {name}: {program}", flush=True)
                if run([*program.split(), "--out", str(folder), *flags, *words]):
                    failed.append(name)
    failed = list(dict.fromkeys(failed))
    done = f"{len(names) - len(failed)} of {len(names)} ran"
    if failed:
        done += f"; failed: {', '.join(failed)}"
    print(done if options.smoke else f"{done}; results: {options.out}", flush=True)
    return int(bool(failed))


def damage(folder: Path, experiment: Experiment) -> str | None:
    """The reason why results cannot be added to a folder, in a sentence."""
    try:
        writable_folder(folder)
        for name in experiment.files:
            if (file := folder / f"{name}.json").exists():
                read(file)
    except TpsgdError as error:
        return str(error)
    return None


def obstacle(name: str, experiment: Experiment, smoke: bool) -> str | None:
    """The reason why an experiment cannot run here, in a sentence."""
    if experiment.absent:
        return f"this checkout has no {', '.join(experiment.absent)}"
    missing = experiment.missing
    needed = [each for each in missing if each == WEIGHTS]
    if smoke or not (needed or len(missing) == len(experiment.data) > 0):
        return None  # a data set that is missing among others is left out
    fetch = ", ".join(f"`tpsgd data fetch {each}`" for each in missing if each != WEIGHTS)
    how = [f"{fetch} gets the data or says how" * bool(fetch)]
    how += [f"$TPSGD_DATA/vgg16 is where the {WEIGHTS} are looked for" * bool(needed)]
    needs = ", ".join(missing)
    return (
        f"not here: {needs}; {'; '.join(filter(None, how))}; without data, "
        f"`python -m experiments {name} --smoke` shows in seconds that it works"
    )


def run(words: list[str]) -> int:
    """Run a program of this package in a process of its own; its exit status."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", f"experiments.{words[0]}", *words[1:]]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}).returncode


if __name__ == "__main__":
    sys.exit(main())
