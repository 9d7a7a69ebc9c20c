"""Damaged files and random words for every reader: nothing but a TpsgdError may come out.

    python benchmarks/fuzz.py --cases 10000 --out results
    python benchmarks/fuzz.py --cases 10000 --only csv,npz --seed 1

Every case is a valid file with a few random changes (bits, bytes, cuts, numbers, and fields inside
of a format, with its checksums made right again), or a random word. A case is bad if its reader
raises anything but a TpsgdError, if the error is no single sentence, if it takes longer than ten
seconds, or if it takes more than 256 MB of memory for a file below 1 MB. Bad cases are kept in
--keep, and the exit status is then 1. Each reader runs in a process of its own. With --out, the
figures go into FOLDER/robustness.json; those of pieces with different seeds are added.
"""

import argparse
import collections
import contextlib
import hashlib
import io
import json
import random
import re
import resource
import signal
import string
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from robustness import add_figures
from torch import nn

import tpsgd
from tpsgd import TpsgdError
from tpsgd.cli import options
from tpsgd.common import units
from tpsgd.comparison import arms
from tpsgd.data.new_samples import read_new
from tpsgd.data.user_files import find
from tpsgd.engine.device import forget_resident_peak, resident
from tpsgd.saved import checkpoint
from tpsgd.saved import folder as saved_folder
from tpsgd.zoo.words import factory
from tpsgd_adapt import weights

MOST_BYTES, MOST_SECONDS, SENTENCE = 256 << 20, 10, 1200
SELDOM = 12  # times as often as files that take long, small ones are changed
ROOM = 16 << 30  # bytes of address space beyond what torch has taken
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "255",
    "256",
    "65535",
    "2147483648",
    "4294967296",
    "1e308",
    "9223372036854775807",
    "18446744073709551616",
    "9" * 40,
    "9" * 5000,
    "nan",
    "inf",
    "-0.0",
    "1_0",
    "٣",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    10**9,
    2**63,
    10**40,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "Linear",
    "../../x",
    [],
    [1],
    [[1, 2]],
    {},
    {"type": "Linear"},
    "a" * 5000,
)
Read = Callable[[Any], Any]


@dataclass
class Target:
    """A reader, valid inputs, and how to change one of them."""

    seeds: Callable[[Path], list[Any]]
    change: Callable[[random.Random, Any, Path], Any]  # seed -> what the reader gets
    read: Read


# ---- changes -------------------------------------------------------------------------------------


def changed_bytes(rng: random.Random, content: bytes) -> bytes:
    """Content with one to four changes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        at, end = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        kind = rng.randrange(8)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.choice((0, 1, 10, 34, 44, 127, 128, 255))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            del data[min(at, end) : min(max(at, end), min(at, end) + 64)]
        elif kind == 4:
            data[at:at] = data[min(at, end) : min(at, end) + rng.randrange(64)]
        elif kind == 5:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 6 and len(data) > 8:
            at %= len(data) - 8
            width = rng.choice((1, 2, 4, 8))
            number = rng.choice((0, 1, 2**7, 2**8 - 1, 2 ** (8 * width - 1), 2 ** (8 * width) - 1))
            data[at : at + width] = number.to_bytes(16, rng.choice(("little", "big")))[:width]
        else:
            data[:] = changed_text(rng, data.decode("latin-1")).encode("latin-1", "replace")
    return bytes(data)


def changed_text(rng: random.Random, text: str) -> str:
    """A text with a number, a line or a few characters changed."""
    kind = rng.randrange(4)
    if kind == 0 and (places := [i for i, c in enumerate(text) if c.isdigit()]):
        start = end = rng.choice(places)
        while end < len(text) and text[end].isdigit():
            end += 1
        return text[:start] + rng.choice(NUMBERS) + text[end:]
    if kind == 1 and "\n" in text:
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        lines[i] = lines[j] if rng.random() < 0.5 else lines[i] + lines[j]
        return "\n".join(lines)
    letters = string.printable + "\0\ufeffäλ٣"
    at = rng.randrange(len(text) + 1)
    new = "".join(rng.choice(letters) for _ in range(rng.randrange(6)))
    return text[:at] + new + text[at + rng.randrange(3) :]


def changed_json(rng: random.Random, tree: Any, values: tuple[Any, ...] = ()) -> Any:
    """Plain values with one to three of them replaced, also by `values`, removed or added."""
    tree = json.loads(json.dumps(tree))
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.choice([p for p in _paths(tree) if p])
        inner = tree
        for key in place[:-1]:
            inner = inner[key]
        kind = rng.random()
        if kind < 0.75:
            inner[place[-1]] = rng.choice(VALUES + values)
        elif kind < 0.9:
            del inner[place[-1]]
        elif isinstance(inner, dict):
            inner[rng.choice(("x", "forward", "device", "inputs", "weight"))] = rng.choice(VALUES)
        if not tree:
            break
    return tree


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        yield from _paths(value, (*path, key))


def changed_zip(rng: random.Random, content: bytes) -> bytes:
    """An archive with a changed member, whose checksum is right, or with changed bytes."""
    if rng.random() < 0.3:
        return changed_bytes(rng, content)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        infos = old.infolist()
        chosen = rng.choice(infos)
        for info in infos:
            member = old.read(info)
            if info is chosen:
                member = changed_bytes(rng, member[:256]) + member[256:]
            if info is not chosen or rng.random() < 0.95:
                new.writestr(info.filename, member, rng.choice((info.compress_type, 8)))
    return out.getvalue()


def in_file(change: Callable[[random.Random, bytes], bytes]) -> Callable[..., Path]:
    """A change of a file's bytes: the changed file."""

    def changed(rng: random.Random, seed: Path, folder: Path) -> Path:
        file = folder / seed.name
        file.write_bytes(change(rng, seed.read_bytes()))
        return file

    return changed


# ---- CSV, NPZ and images -------------------------------------------------------------------------


def csv_seeds(folder: Path) -> list[Path]:
    rows = [f"{i / 7:.3f},{i % 5},{'ab'[i % 2]}" for i in range(30)]
    quoted = [f'"{i}";"{i % 3}";"class {i % 2}"' for i in range(24)]
    steps = [f"{i // 6},{i % 6},{i / 9:.2f},{i // 6 % 2}" for i in range(48)]
    texts = {
        "table.csv": "height,width,label\n" + "\n".join(rows) + "\n",
        "quoted.csv": '"a";"b";"target"\r\n' + "\r\n".join(quoted),
        "bom.csv": "\ufeffid\tx\ty\n" + "\n".join(f"{i}\t{i * i}\t{i % 2}" for i in range(20)),
        "steps.csv": "sequence,step,x,label\n" + "\n".join(steps) + "\n",
    }
    return [_written(folder / name, text.encode()) for name, text in texts.items()]


def npz_seeds(folder: Path) -> list[Path]:
    rng, y = np.random.default_rng(0), np.arange(24) % 2
    x, names = rng.normal(size=(24, 5)).astype("f4"), np.array(["cat", "dog"])[y]
    images = rng.integers(0, 255, (24, 6, 6, 3)).astype("u1")
    tokens, lengths = rng.integers(0, 9, (24, 7)), np.arange(24) % 7 + 1
    np.savez(folder / "plain.npz", x=x, y=y)
    np.savez_compressed(folder / "packed.npz", x=x, y=names, x_test=x, y_test=names)
    np.savez(folder / "images.npz", x=images, y=y.astype("f8"))
    np.savez(folder / "tokens.npz", tokens=tokens, y=y, lengths=lengths)
    np.savez(folder / "object.npz", x=x, y=np.array([None, 1] * 12))
    small = sorted(folder.glob("*.npz"))
    large = {
        "tall": {"x": np.zeros((15_000, 1000), "f4"), "y": np.arange(15_000) % 2},
        "bytes": {"x": np.zeros((200, 250, 250), "u1"), "y": np.arange(200) % 2},
        "zeros": {"tokens": np.zeros((9000, 1500), "u1"), "y": np.arange(9000) % 2},
    }
    for name, arrays in large.items():  # as large as a small file may be
        np.savez_compressed(folder / f"{name}.npz", **arrays)
    return small * SELDOM + [folder / f"{name}.npz" for name in large]


def image_seeds(folder: Path) -> list[Path]:
    from PIL import Image

    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 255, (9, 8, 3)).astype("u1"))
    deep = Image.fromarray(rng.integers(0, 65535, (9, 8)).astype("u2"))
    files = []
    for suffix in ("png", "jpg", "gif", "bmp", "tif", "webp", "ppm"):
        rgb.save(folder / f"rgb.{suffix}")
        files.append(folder / f"rgb.{suffix}")
    for name, image in {
        "deep.png": deep,
        "alpha.png": rgb.convert("RGBA"),
        "palette.png": rgb.convert("P"),
        "bits.tif": rgb.convert("1"),
    }.items():
        image.save(folder / name)
        files.append(folder / name)
    rgb.save(folder / "packed.tif", compression="tiff_lzw")
    for name, mode in (("large", "RGBA"), ("large-grey", "I;16"), ("large-bits", "1")):
        Image.new(mode, (2800, 2800)).save(folder / f"{name}.png")
    return [*files, folder / "packed.tif"] * SELDOM + sorted(folder.glob("large*.png"))


def into_folder(rng: random.Random, seed: Path, folder: Path) -> Path:
    """A folder of images of two classes, one of them changed."""
    root = folder / "images"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True, exist_ok=True)
        for old in (root / name).iterdir():
            old.unlink()
    content = seed.read_bytes()
    for i in range(4):
        (root / "ab"[i % 2] / f"{i}{seed.suffix}").write_bytes(content)
    (root / "a" / f"0{seed.suffix}").write_bytes(changed_bytes(rng, content))
    return root


INPUTS = {"shape": [2], "columns": ["height", "width"], "label": "label"}


def read_data(path: Path) -> None:
    """Read a file or a folder as for training, and then as new samples of a model."""
    inputs = INPUTS if path.suffix == ".csv" else {"shape": [3, 9, 8]} if path.is_dir() else {}
    with contextlib.suppress(TpsgdError):
        read_new(str(path), inputs=inputs, classes=("a", "b", "0", "1", "cat", "dog"))
    data = tpsgd.data.load(str(path))
    assert len(data.classes) > 1 and len(data.train[1])


# ---- saved models, weights -----------------------------------------------------------------------


def saved_seeds(folder: Path) -> list[Path]:
    x, y = torch.randn(20, 5, 3), torch.arange(20) % 2
    flat = nn.Sequential(nn.Flatten(), nn.Linear(15, 2))
    run = tpsgd.fit_backprop(flat, (x, y), epochs=1, seed=0)
    models = [
        flat,
        nn.Sequential(
            nn.Conv2d(3, 2, 3),
            nn.BatchNorm2d(2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(2, 2),
        ),
        nn.Sequential(
            tpsgd.Recurrent(3, 4, sequence=True),
            nn.RNN(4, 4, batch_first=True),
            nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(1)),
        ),
        nn.Sequential(tpsgd.Recurrent.diagonal(3, 4), nn.Linear(4, 2)),
    ]
    folders = []
    for i, model in enumerate(models):
        run.model = model
        folders.append(run.save(folder / str(i), classes=["a", "b"], inputs={"shape": [5, 3]}))
    return folders


def changed_folder(rng: random.Random, seed: Path, folder: Path) -> Path:
    """A folder of a model, or of a checkpoint, with a change; its checksums are mostly right."""
    kind_of_folder = "checkpoint" if (seed / "checkpoint.json").is_file() else "model"
    target = folder / seed.name
    target.mkdir(exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    description = json.loads((seed / f"{kind_of_folder}.json").read_bytes())
    tensors = next(seed.glob("*.safetensors")).read_bytes()
    kind = rng.random()
    if kind < 0.3:
        tensors = _safetensors_changed(rng, tensors)
        description[saved_folder.WEIGHTS] = hashlib.sha256(tensors).hexdigest()
    name = f"{kind_of_folder}-{str(description[saved_folder.WEIGHTS])[:16]}.safetensors"
    description.pop(saved_folder.SEAL)
    if kind >= 0.3 and kind_of_folder == "model":
        description = changed_json(rng, description)
    elif kind >= 0.3:
        description["state"] = changed_state(rng, description["state"])
    text = saved_folder.sealed(description, indent=1)
    if kind > 0.9:
        text = changed_bytes(rng, text)
    (target / f"{kind_of_folder}.json").write_bytes(text)
    (target / name).write_bytes(tensors)
    return target


def _safetensors_changed(rng: random.Random, content: bytes) -> bytes:
    """Tensors with a change in the header, or anywhere."""
    length = int.from_bytes(content[:8], "little")
    if rng.random() < 0.3:
        return changed_bytes(rng, content)
    header = changed_json(rng, json.loads(content[8 : 8 + length]))
    text = json.dumps(header).encode()
    if rng.random() < 0.3:
        text = changed_bytes(rng, text)
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def changed_state(rng: random.Random, state: dict[str, Any]) -> dict[str, Any]:
    """A state with changes, mostly not of its identity: another run is refused at once."""
    rest = dict(state)
    same = {} if rng.random() < 0.05 else {"identity": rest.pop("identity")}
    return same | changed_json(rng, rest, STATES)


STATES = (  # besides VALUES: what `checkpoint.pack` makes of tensors, tuples and dictionaries
    {"tensor": "model.0.weight"}, {"tensor": "x"}, {"tensor": [1]}, {"tuple": [1]}, {"tuple": 3},
    {"pairs": [[[], 1]]}, {"pairs": 3}, {"pairs": [[0, {}]]},
)  # fmt: skip


def _step_rate(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def _small_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 3))


RESUMED: dict[str, dict[str, Any]] = {
    "adam": {"lr_schedule": _step_rate, "early_stopping": tpsgd.EarlyStopping(3)},
    "cycle": {"order": tpsgd.simultaneous, "lr_schedule": tpsgd.one_cycle()},
    "momentum": {"optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)},
    "solved": {"rule": tpsgd.rules.readout(learned=True), "optimizer": [tpsgd.sgd, tpsgd.rls()]},
}


def resume(folder: Path) -> None:
    """Go on from a checkpoint, by the settings that the folder is named after."""
    x = torch.linspace(-1, 1, 240).view(40, 6).sin()
    saved = tpsgd.Checkpoint(folder, every=0, resume=True)
    settings = {"epochs": 3, "batch_size": 16, **RESUMED[folder.name.split("-")[0]]}
    tpsgd.fit(_small_net(), (x, torch.arange(40) % 3), checkpoint=saved, **settings)


def checkpoint_seeds(folder: Path) -> list[Path]:
    """Checkpoints that were written after each of the first epochs."""
    write, folders = checkpoint.write, []
    for name in RESUMED:
        written = 0

        def write_a_copy(place: Path, state: dict[str, Any]) -> None:
            nonlocal written
            folders.append(folder / f"{place.name}-{written}")
            write(folders[-1], state)
            written += 1

        with mock.patch.object(checkpoint, "write", write_a_copy):
            resume(folder / name)
    return folders


def read_saved(path: Path) -> None:
    """Load a model, and have it predict."""
    trained = tpsgd.load(path)
    for shape in ((2, 5, 3), (2, 3, 9, 9)):
        with contextlib.suppress(TpsgdError):
            trained.predict(torch.zeros(shape))


def weight_seeds(folder: Path) -> list[Path]:
    state = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).state_dict()
    torch.save(state, folder / "net.pth")
    torch.save({"state_dict": state, "epoch": 3}, folder / "wrapped.pt")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save({"w": torch.eye(4).to_sparse()}, folder / "sparse.pth")
    import safetensors.torch

    safetensors.torch.save_file(state, folder / "net.safetensors")
    np.savez(folder / "net.npz", **{k: v.numpy() for k, v in state.items()})
    return sorted(p for p in folder.iterdir() if p.is_file())


def changed_weights(rng: random.Random, content: bytes) -> bytes:
    if content[:2] == b"PK":
        return changed_zip(rng, content)
    if content[8:9] == b"{":
        return _safetensors_changed(rng, content)
    return changed_bytes(rng, content)


def read_weights(path: Path) -> None:
    """Load weights, and put them into a model."""
    state = weights.load(path)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    weights.put(net, state)


# ---- words ---------------------------------------------------------------------------------------

SHAPES = ((6,), (1, 9, 9), (7, 3), (3, 32, 32))
WORDS: dict[str, tuple[tuple[str, ...], Read]] = {
    "model": (
        (
            "mlp:8,4",
            "cnn:4x3,4x2",
            "vgg:8",
            "rnn:4,4+3",
            "birnn:4",
            "paper-rnn:4",
            "torch-rnn:4,4",
            "lru:4",
            "net.py:make",
            "mlp:",
        ),
        lambda word: [_build(word, shape) for shape in SHAPES],
    ),
    "activation": (("relu", "tanh"), lambda word: factory("mlp:4", (6,), 2, word)()),
    "rule": ((*arms.ALL, "all"), arms.entry),
    "blocks": (("4", "2,2,4"), options.block_numbers),
    "memory": (("64MB", "1.5GB", "100"), units.as_bytes),
    "data": (("digits", "photos@64", "own.npz", "x.py:f", "~/x.csv", "a/b.csv"), find),
}


def _build(word: str, shape: tuple[int, ...]) -> None:
    """Read a word for samples of a shape, and build the model if it is small."""
    try:
        make = factory(word, shape, 2)
    except TpsgdError:
        if shape == SHAPES[-1]:
            raise
    else:
        if max(map(len, re.findall(r"\d+", word)), default=0) < 4:
            make()


def word_seeds(_: Path) -> list[tuple[str, str]]:
    return [(kind, word) for kind, (words, _) in WORDS.items() for word in words]


def changed_word(rng: random.Random, seed: tuple[str, str], _: Path) -> tuple[str, str]:
    kind, word = seed
    for _ in range(rng.choice((1, 1, 2, 3))):
        word = changed_text(rng, word)
    return kind, word


def read_word(case: tuple[str, str]) -> None:
    WORDS[case[0]][1](case[1])


TARGETS = {
    "csv": Target(csv_seeds, in_file(changed_bytes), read_data),
    "npz": Target(npz_seeds, in_file(changed_zip), read_data),
    "images": Target(image_seeds, into_folder, read_data),
    "saved": Target(saved_seeds, changed_folder, read_saved),
    "checkpoints": Target(checkpoint_seeds, changed_folder, resume),
    "weights": Target(weight_seeds, in_file(changed_weights), read_weights),
    "words": Target(word_seeds, changed_word, read_word),
}


# ---- running -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How many cases were read and refused, what went wrong, and the most that a case took."""

    read: int = 0
    refused: int = 0
    bad: collections.Counter[str] = field(default_factory=collections.Counter)
    most_bytes: int = 0
    most_seconds: float = 0.0


def run(name: str, cases: int, seed: int = 0, keep: Path | None = None) -> Outcome:
    """Read changed files, or words, and count what becomes of them."""
    target, outcome = TARGETS[name], Outcome()
    with tempfile.TemporaryDirectory() as text, warnings.catch_warnings(), _stopped_if_slow():
        warnings.simplefilter("ignore")
        folder = Path(text)
        (folder / "seeds").mkdir()
        seeds = target.seeds(folder / "seeds")
        for number in range(cases):
            rng = random.Random(f"{name} {seed} {number}")
            case = target.change(rng, rng.choice(seeds), folder)
            if problem := _problem(target.read, case, outcome):
                if not outcome.bad[problem] and keep is not None:
                    _keep(keep / f"{name}-{seed}-{number}", case, problem)
                outcome.bad[problem] += 1
    return outcome


def _problem(read: Read, case: Any, outcome: Outcome) -> str:
    """What is wrong with how a case is read; empty if nothing is."""
    before, began, problem = _reset_peak(), time.perf_counter(), ""
    signal.alarm(MOST_SECONDS)
    try:
        read(case)
        outcome.read += 1
    except TpsgdError as error:
        outcome.refused += 1
        if "\n" in str(error) or not 0 < len(str(error)) < SENTENCE:
            problem = f"no sentence: {str(error)[:200]!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        last = [frames[-1], *(f for f in frames if "tpsgd" in f.filename)][-1]
        place = f"{Path(last.filename).name}:{last.lineno}"
        problem = f"{type(error).__name__} at {place}: {str(error)[:120]!r}"
    finally:
        signal.alarm(0)
    seconds, nbytes = time.perf_counter() - began, resident()[1] - before
    outcome.most_seconds = max(outcome.most_seconds, seconds)
    outcome.most_bytes = max(outcome.most_bytes, nbytes)
    if nbytes > MOST_BYTES:
        problem = problem or f"{nbytes >> 20} MB of memory"
    return problem


def _reset_peak() -> int:
    forget_resident_peak()
    return resident()[1]


def _keep(place: Path, case: Any, problem: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "problem.txt").write_text(f"{problem}\n{case!r}\n")
    for file in [case] if isinstance(case, Path) and case.is_file() else []:
        (place / file.name).write_bytes(file.read_bytes())
    for file in case.rglob("*") if isinstance(case, Path) and case.is_dir() else []:
        if file.is_file():
            (place / "-".join(file.relative_to(case).parts)).write_bytes(file.read_bytes())


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@contextlib.contextmanager
def _stopped_if_slow() -> Iterator[None]:
    """A context in which an alarm is an error; without one, it would end the process."""

    def too_slow(*_: Any) -> None:
        raise TimeoutError(f"more than {MOST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def _report(name: str, cases: int, outcome: Outcome) -> None:
    counts = f"{cases:,} cases, {outcome.read:,} read, {outcome.refused:,} refused"
    most = f"at most {outcome.most_bytes / 2**20:.0f} MB and {outcome.most_seconds:.1f} s"
    print(f"{name}: {counts}, {sum(outcome.bad.values())} bad; {most}", flush=True)
    for problem, count in outcome.bad.most_common():
        print(f"  {count:5} x {problem}")


def figures(cases: int, outcome: Outcome) -> dict[str, Any]:
    """An outcome in plain numbers."""
    return {
        "cases": cases,
        "read": outcome.read,
        "refused": outcome.refused,
        "bad": sum(outcome.bad.values()),
        "most_mb": round(outcome.most_bytes / 2**20, 1),
        "most_seconds": round(outcome.most_seconds, 2),
    }


def main() -> int:
    """Fuzz the readers, each in its own process; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--keep", type=Path, default=Path("fuzz-bad"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if len(names) > 1:
        words = [*sys.argv[1:], "--only"]
        codes = [subprocess.run([sys.executable, __file__, *words, n]).returncode for n in names]
        return int(any(codes))
    torch.set_num_threads(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    outcome = run(names[0], arguments.cases, arguments.seed, arguments.keep)
    _report(names[0], arguments.cases, outcome)
    if arguments.out is not None:
        add_figures(arguments.out, "fuzz", {names[0]: figures(arguments.cases, outcome)})
    return int(bool(outcome.bad))


if __name__ == "__main__":
    sys.exit(main())
