"""A folder that is damaged, edited, newer or foreign is refused in one sentence."""

import errno
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from helpers import points, same, state
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from torch import nn

import tpsgd
from tpsgd import TpsgdError
from tpsgd.saved import folder as folders
from tpsgd.saved import modules

DATA = points()


@pytest.fixture
def saved(tmp_path):
    """A folder with a model, and the run that wrote it."""
    torch.manual_seed(0)
    run = tpsgd.fit(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), DATA, epochs=1)
    run.save(tmp_path / "model", classes=list("abc"))
    return tmp_path / "model", run


def tensors_file(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(TpsgdError) as error:
        tpsgd.load(folder)
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    for word in words:
        assert word in text


def forge(folder: Path, change, tensors=None) -> None:
    """Rewrite a folder with other content and checksums that fit."""
    file = folder / "model.json"
    description = json.loads(file.read_text())
    if tensors is not None:
        old = tensors_file(folder)
        content = tensors(tensors_of(old.read_bytes()))
        old.unlink()
        content = content if isinstance(content, bytes) else bytes_of(content)
        description["weights_sha256"] = hashlib.sha256(content).hexdigest()
        name = f"model-{description['weights_sha256'][:16]}.safetensors"
        (folder / name).write_bytes(content)
    change(description)
    del description["sha256"]
    file.write_bytes(folders.sealed(description, indent=1))


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("find", [lambda f: f / "model.json", tensors_file])
def test_files_that_are_cut_off(saved, find, share):
    file = find(saved[0])
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    refused(saved[0])


@pytest.mark.parametrize("find", [lambda f: f / "model.json", tensors_file])
def test_every_bit_matters(saved, find):
    file = find(saved[0])
    content = file.read_bytes()
    for place in range(0, len(content), max(1, len(content) // 150)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(flipped)
        refused(saved[0])
    file.write_bytes(content)
    tpsgd.load(saved[0])


def test_an_edit_by_hand_is_noticed(saved):
    file = saved[0] / "model.json"
    text = file.read_text()
    file.write_text(text.replace('"a"', '"A"'))
    refused(saved[0], "was edited or damaged")
    file.write_text(json.dumps(json.loads(text), indent=4))
    refused(saved[0], "was edited or damaged")


def test_another_text_of_the_same_values_is_noticed(saved):
    folder, run = saved
    run.save(folder, inputs={"limit": 1e-05}, overwrite=True)
    file = folder / "model.json"
    text = file.read_text()
    assert "1e-05" in text
    file.write_text(text.replace("1e-05", "1E-05"))
    refused(folder, "was edited or damaged")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[]", "describes no model of tpsgd"),
        (b"{}", "describes no model of tpsgd"),
        (b"null", "describes no model of tpsgd"),
        (b'{"format": 2}', "install a newer tpsgd"),
        (b'{"format": true}', "describes no model of tpsgd"),
        (b'{"format": "1"}', "describes no model of tpsgd"),
        (b'{"format": 0}', "reads format 1: make the model again"),
        (b'{"format": 1}', "was edited or damaged"),
        (b"\xff\xfe\x00", "is not whole"),
        (b"[" * 200_000, "is not whole"),
        (pickle.dumps({"format": 1}), "is not whole"),
    ],
)
def test_a_foreign_description(saved, content, said):
    (saved[0] / "model.json").write_bytes(content)
    refused(saved[0], said)


def test_a_newer_format_says_so_whatever_else_it_holds(saved):
    forge(saved[0], lambda d: d.update(format=2, more="things"))
    refused(saved[0], "has format 2", "install a newer tpsgd")


def test_missing_files(saved, tmp_path):
    refused(tmp_path / "nowhere", "holds no model: there is no model.json")
    tensors_file(saved[0]).unlink()
    refused(saved[0], "holds no model", ".safetensors")


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def test_a_pickle_in_place_of_tensors_is_not_run(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    forge(saved[0], lambda d: None, lambda tensors: pickle.dumps(Bomb()))
    refused(saved[0], "is no whole .safetensors file")
    assert not Path("exploded").exists()


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (without("0.bias"), "'0.bias'"),
        (lambda t: t | {"3.weight": torch.ones(1)}, "'3.weight'"),
        (lambda t: t | {"0.bias": t["0.bias"].double()}, "is float64 4, and 'float32 4'"),
        (lambda t: t | {"0.bias": t["0.bias"].long()}, "is int64 4, and 'float32 4'"),
        (lambda t: t | {"0.bias": t["0.bias"][:3].clone()}, "is float32 3"),
    ],
)
def test_tensors_that_are_not_those_of_the_description(saved, tensors, said):
    forge(saved[0], lambda d: None, tensors)
    refused(saved[0], said)


def test_tensors_that_fit_the_description_and_not_the_model(saved):
    def change(description):
        description["tensors"]["0.bias"] = "float32 5"

    forge(saved[0], change, lambda t: t | {"0.bias": torch.ones(5)})
    refused(saved[0], "is float32 5, the model needs float32 4")
    forge(saved[0], lambda d: d["tensors"].update({"0.bias": "int64 4"}),
          lambda t: t | {"0.bias": torch.ones(4).long()})  # fmt: skip
    refused(saved[0], "is int64 4, the model needs float32 4")


def linear(**arguments):
    return {"type": "Linear", "arguments": {"in_features": 6, "out_features": 4} | arguments}


@pytest.mark.parametrize(
    "module",
    [
        None,
        7,
        {},
        {"type": "Linear"},
        {"type": ["Linear"], "arguments": {}},
        {"type": "Linear", "arguments": []},
        {"type": "Linear", "arguments": {}, "extra": 1},
        linear(out_features=2**62),
        linear(out_features=10**30),
        linear(out_features=-1),
        linear(out_features="4"),
        linear(device="cuda"),
        linear(_weight=1),
        linear(bias={"a": 1}),
        {"type": "long" * 5000, "arguments": {}},
        linear(**{"long" * 5000: 1}),
        {"type": "Module", "arguments": {}},
        {"type": "DataParallel", "arguments": {}},
        {"type": "os.system", "arguments": {"command": "mkdir exploded"}},
        {"type": "__import__", "arguments": {"name": "antigravity"}},
        {"type": "Sequential", "modules": []},
        {"type": "Sequential", "modules": {"a.b": linear()}},
        {"type": "Sequential", "modules": {"forward": linear()}},
        {"type": "RNN", "arguments": {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}},
        {"type": "Recurrent", "arguments": {"inputs": 1, "hidden": 1, "bidirectional": 10**9}},
        {"type": "Recurrent", "arguments": {"inputs": 1, "hidden": 1, "activation": "Module"}},
        {"type": "Diagonal", "arguments": {"inputs": 10**30, "units": 1}},
        {"type": "Residual", "arguments": {"inputs": "many"}},
    ],
)
def test_a_forged_module(saved, module, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    forge(saved[0], lambda d: d["model"]["modules"].update({"0": module}))
    refused(saved[0])
    assert not Path("exploded").exists()


@pytest.mark.parametrize(
    "key", ["model", "tensors", "frozen", "run", "classes", "inputs", "versions"]
)
def test_forged_values_and_missing_keys(saved, key):
    for value in (None, 7, "words", [[1]], {"a": {"b": 1}}):
        forge(saved[0], lambda d, v=value: d.update({key: v}))
        if key in ("inputs", "versions") and isinstance(value, dict):
            continue  # any names and values are
        refused(saved[0])
    forge(saved[0], lambda d: d.pop(key))
    refused(saved[0], f"makes no sense: KeyError: '{key}'")


@pytest.mark.parametrize("key", ["settings", "seed", "blocks", "history"])
def test_a_forged_record(saved, key):
    forge(saved[0], lambda d: d["run"].update({key: "words"}))
    refused(saved[0], "the record of the model", "makes no sense")


def test_a_deep_description_is_refused():
    description = linear()
    for _ in range(3000):
        description = {"type": "Sequential", "modules": {"0": description}}
    with pytest.raises(TpsgdError):
        modules.build(description)


def test_a_description_takes_no_memory_before_its_tensors_are_there():
    net = modules.build(linear(in_features=10**6, out_features=10**6))  # 4 TB
    assert net.weight.is_meta


# ---- writing -------------------------------------------------------------------------------------


def test_a_folder_that_holds_a_model_is_kept_unless_asked(saved):
    folder, run = saved
    before = sorted((f.name, f.read_bytes()) for f in folder.iterdir())
    with pytest.raises(TpsgdError, match=r"already holds a model.*overwrite=True"):
        run.save(folder)
    assert sorted((f.name, f.read_bytes()) for f in folder.iterdir()) == before
    tpsgd.fit(run.model, DATA, epochs=1).save(folder, overwrite=True)
    assert len(list(folder.iterdir())) == 2
    assert same(state(tpsgd.load(folder).model), state(run.model))


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-0123.safetensors").write_text("mine")
    run = tpsgd.fit(nn.Sequential(nn.Linear(6, 3)), DATA, epochs=1)
    run.save(tmp_path)
    run.save(tmp_path, overwrite=True)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("fails", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.write_bytes"])
def test_a_full_disk_at_any_moment_leaves_the_old_model_or_the_new(saved, monkeypatch, name, fails):
    folder, run = saved
    old = state(tpsgd.load(folder).model)
    later = tpsgd.fit(run.model, DATA, epochs=1)
    module, _, attribute = name.rpartition(".")
    home = os if module == "os" else Path
    calls, real = [], getattr(home, attribute)

    def full(*arguments):
        calls.append(1)
        if len(calls) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(home, attribute, full)
        try:
            later.save(folder, overwrite=True)
            raised = False
        except OSError as error:
            raised = True
            assert "No space left on device" in str(error) and str(folder) in str(error)
    loaded = state(tpsgd.load(folder).model)
    assert same(loaded, old if raised else state(run.model))
    assert len(list(folder.iterdir())) == 2
    later.save(folder, overwrite=True)
    assert same(state(tpsgd.load(folder).model), state(run.model))


def test_leftovers_of_killed_processes_are_removed_when_they_are_old(saved):
    folder, run = saved
    names = ["model-" + "0" * 16 + ".safetensors", ".model.json.17.part"]
    for name in [*names, "model-mine.safetensors"]:
        (folder / name).write_text("left over")
    run.save(folder, overwrite=True)
    assert len(list(folder.iterdir())) == 5  # fresh: another process may be about to use them
    for file in folder.iterdir():
        os.utime(file, (0, 0))
    run.save(folder, overwrite=True)
    assert not any((folder / name).exists() for name in names)
    assert (folder / "model-mine.safetensors").exists()
    tpsgd.load(folder)


def test_two_processes_that_overwrite_in_turn_never_remove_the_tensors_in_use(saved, monkeypatch):
    folder, run = saved
    other = tpsgd.fit(nn.Sequential(nn.Linear(6, 3)), DATA, epochs=1)
    real, inside = folders.write_whole, []

    def write_whole(path, content):
        if path.suffix == ".json" and not inside:
            inside.append(1)
            other.save(folder, overwrite=True)  # begins and ends while this one writes
        return real(path, content)

    later = tpsgd.fit(run.model, DATA, epochs=1)
    monkeypatch.setattr(folders, "write_whole", write_whole)
    later.save(folder, overwrite=True)
    assert same(state(tpsgd.load(folder).model), state(run.model))


def test_a_folder_that_cannot_be_written(saved, tmp_path, monkeypatch):
    _, run = saved
    (tmp_path / "file").write_text("")
    with pytest.raises(TpsgdError, match=r"cannot write to .*file/here .*; name another folder"):
        run.save(tmp_path / "file" / "here")

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", read_only)
    with pytest.raises(TpsgdError, match=r"Read-only file system"):
        run.save(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder(saved, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(TpsgdError, match="cannot write to"):
        saved[1].save(tmp_path / "locked")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"classes": ["a", "b", "a"]}, "different names"),
        ({"classes": "abc"}, "classes must be"),
        ({"classes": 5}, "classes must be"),
        ({"inputs": {"mean": torch.ones(1)}}, "plain values"),
        ({"factory": "net"}, "FILE.py:FUNCTION"),
        ({"factory": "gone.py:net"}, "there is no file gone.py"),
    ],
)
def test_arguments_that_make_no_sense_write_nothing(saved, tmp_path, options, said):
    with pytest.raises(TpsgdError, match=said):
        saved[1].save(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_record_without_a_model_says_so(tmp_path):
    with pytest.raises(TpsgdError, match="has no model to save"):
        tpsgd.Run("readout", 0, {}).save(tmp_path)
