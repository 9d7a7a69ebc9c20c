"""`tpsgd adapt`: words to adaptors, what it says before and after, its files, Ctrl-C."""

import errno
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tpsgd
from tpsgd import adapt, rules
from tpsgd.common.units import size
from tpsgd.zoo import vgg
from tpsgd_adapt import Adaptor, backbone
from tpsgd_adapt.features import fingerprint
from tpsgd_adapt.quantize import int8, weight_bytes

NET = """
import torch
from torch import nn
from tpsgd_adapt import Backbone

def make():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
    taps = {"early": "2", "late": "5"}
    return Backbone(net, taps, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25), name="tiny")

def plain():
    return make().model

def nothing():
    return 7
"""
SMALL = ("--backbone", "net.py:make", "--data", "images.npz", "--epochs", "2")
LIGHT = ("--convs", "0", "--dense", "0", "--no-controls")
FILES = {"adaptor.json", "adaptor.safetensors", "record.json"}
LEARNED = "readout-learned"
ARMS = [LEARNED, "backprop", "frozen", "linear probe"]
TRAIN, TEST = 192, 48  # of the images


def colours(n: int, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Noise, with more of one colour in every class."""
    y = np.arange(n) % 3
    x = np.random.default_rng(0).integers(0, 120, (n, side, side, 3))
    x[np.arange(n), :, :, y] += 100
    return x.astype("uint8"), y


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two backbones' code, images in a file and in a folder."""
    place = tmp_path_factory.mktemp("made")
    (place / "net.py").write_text(NET)
    x, y = colours(TRAIN + TEST)
    np.savez(place / "images.npz", x=x.transpose(0, 3, 1, 2) / np.float32(255), y=y)
    np.savez(place / "vectors.npz", x=x[:60, 0, 0].astype("float32"), y=y[:60])
    np.savez(place / "alike.npz", x=x[:60].transpose(0, 3, 1, 2) / np.float32(255), y=0 * y[:60])
    for i, (image, c) in enumerate(zip(*colours(30), strict=True)):
        folder = place / "photos" / ("red", "green", "blue")[c]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i}.png")
    return place


@pytest.fixture(autouse=True)
def here(made, tmp_path, monkeypatch):
    """Run in an empty folder with links to these files."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def unplanned(monkeypatch):
    """No rehearsal, to save time."""
    found = {"tap": "late", "peak_bytes": 1, "kept_bytes": 0, "backprop_bytes": 2}
    monkeypatch.setattr(sys.modules["tpsgd_adapt_cli.adapt"], "_rehearsed", lambda *_: found)


@pytest.fixture
def says(says):
    """As everywhere, of `tpsgd adapt`, which may be called twice."""
    return lambda *words: says("adapt", *words, "--overwrite")


@pytest.fixture
def tells(says, unplanned):
    """The record of a run without errors and without a plan."""

    def call(*words: str) -> dict:
        code, out, err = says(*words, "--json")
        assert (code, err) == (0, "") and out.count("\n") == 1
        return json.loads(out)

    return call


def written(folder: str = "tpsgd-adaptor") -> set[str]:
    return {re.sub("-[0-9a-f]{16}", "", path.name) for path in Path(folder).iterdir()}


def loaded(folder: str = "tpsgd-adaptor", net: str = "net.py:make") -> Adaptor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another backbone would be warned of
        return adapt.load(folder, backbone(net))


def accuracies(record: dict) -> dict[str, float]:
    return {row["arm"]: row["accuracy"] for row in record["arms"]}


# ---- what it says and writes ---------------------------------------------------------------------


def test_a_folder_of_images(says, unplanned):
    words = ("--backbone", "net.py:make", "--data", "photos", "--rule", "tpsgd-l2", "--epochs", "2")
    code, out, err = says(*words, "--out", "found")
    lines = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    assert lines[2] == "tiny (2.4 KB, frozen) at late: photos"
    table = dict(line.split("%")[0].rsplit(maxsplit=1) for line in lines if "%" in line)
    assert list(table) == ["tpsgd-l2", *ARMS[1:]] and table["linear probe"] == "100.00"
    assert lines[-1] == "tpsgd-l2's adaptor and record.json: found" and written("found") == FILES
    adaptor, data = loaded("found"), tpsgd.data.load("photos")
    assert f"{adaptor.evaluate(data.test):.2%}" == f"{table['tpsgd-l2']}%"
    assert adaptor.classes == ("blue", "green", "red") == data.classes
    record = json.loads(Path("found/record.json").read_text())
    assert record["arms"][0]["trained_bytes"] == adaptor.nbytes


def test_the_record_is_all_there_is(tells):
    record = tells(*SMALL, "--seed", "3")
    assert record == json.loads(Path("tpsgd-adaptor/record.json").read_text())
    assert list(accuracies(record)) == ARMS and not record["interrupted"]
    assert record["command"].startswith("tpsgd adapt --backbone net.py:make")
    assert record["taps"] == ["late"] and record["data"]["test"] == TEST
    features = adapt.encode(backbone("net.py:make"), tpsgd.data.load("images.npz", seed=3).train)
    direct = adapt.fit(
        backbone("net.py:make"), features, classes=3, seed=3, epochs=2, batch_size=32,
        rule=rules.default(),
    )  # fmt: skip
    for mine, other in zip(loaded().parameters(), direct.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


# ---- bytes before training -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "numbers"),  # of a sample's features
    [
        (("--tap", "early,late"), 8 * 2 * 2 + 6 * 4 * 4),
        pytest.param((), 8 * 2 * 2, marks=pytest.mark.full),
    ],
)
def test_planned_bytes_come_true(says, words, numbers):
    code, out, _ = says(*SMALL, "--rule", "tpsgd-l2", *words)
    record = json.loads(Path("tpsgd-adaptor/record.json").read_text())
    planned, layers = record["planned"], record["planned"]["layers"]
    mine, other = record["arms"][:2]
    assert layers["peak_bytes"] == mine["peak_bytes"] > 300_000
    assert layers["kept_bytes"] == mine["kept_bytes"]
    assert layers["backprop_bytes"] == pytest.approx(other["peak_bytes"], abs=64)
    assert layers["tap"] == ("early" if len(words[1:]) and "," in words[1] else "late")
    assert planned["features_bytes"] == 4 * (TRAIN + TEST) * numbers == record["features_bytes"]
    assert planned["backbone_bytes"] == 4 * (6 * 3 * 9 + 6 + 8 * 6 * 9 + 8)
    held = f"features of 240 samples {size(4 * 240 * numbers)}"
    kept = f" + {size(layers['kept_bytes'])}" if layers["kept_bytes"] else ""
    peaks = f"{size(layers['peak_bytes'])}{kept}, backprop {size(layers['backprop_bytes'])}"
    assert code == 0 and out.splitlines()[:2] == [
        f"in memory: backbone 2.4 KB, {held}",
        f"planned peak of training: tpsgd-l2 {peaks}",
    ]


def test_the_plan_is_the_librarys(says):
    code, out, _ = says(*SMALL, "--convs", "0", "--batch-size", "16", "--rule", "backprop")
    head = adapt.Layers(convs=0)((8, 2, 2), 3)
    plan = tpsgd.plan(head, (8, 2, 2), batch_size=16, epochs=2, samples=TRAIN)
    peak = plan["backprop"].peak
    record = json.loads(Path("tpsgd-adaptor/record.json").read_text())
    assert record["planned"]["layers"]["peak_bytes"] == peak
    assert code == 0 and out.splitlines()[1] == f"planned peak of training: backprop {size(peak)}"


@pytest.mark.full
def test_a_budget(says):
    words = (*SMALL, "--convs", "0", "--dense", "0")
    code, out, err = says(*words, "--memory", "30MB")
    record = json.loads(Path("tpsgd-adaptor/record.json").read_text())
    assert (code, err) == (0, "") and list(accuracies(record)) == [LEARNED, "linear probe"]
    said = "in memory: at most 30.0 MB, including the backbone's 2.4 KB"
    assert out.splitlines()[0] == said
    assert record["arms"][0]["settings"]["memory_budget"] == "30MB"
    plain = json.loads(says(*words, "--json")[1])
    assert accuracies(record).items() <= accuracies(plain).items()
    code, out, err = says(*words, "--memory", "9KB")
    assert code == 2 and "is too small" in err


# ---- options -------------------------------------------------------------------------------------


def test_taps_with_learned_weights(tells):
    record = tells(*SMALL, "--tap", "early,late", "--combine", "learned", *LIGHT)
    adaptor = loaded()
    assert adaptor.taps == ("early", "late") and adaptor.combine is adapt.learned
    assert float((adaptor.weights - 0.5).abs().max()) > 1e-3
    test = tpsgd.data.load("images.npz").test
    assert adaptor.evaluate(test) == record["arms"][0]["accuracy"]
    tells(*SMALL, "--tap", "late,early", "--combine", "summed", *LIGHT)
    assert loaded().weights.tolist() == [1, 1] and loaded().taps == ("late", "early")


@pytest.mark.parametrize("word", ["bf16", "int8"])
def test_a_smaller_backbone(tells, word):
    plain = backbone("net.py:make").model
    record = tells(*SMALL, *LIGHT, "--quantize", word)
    light = weight_bytes(plain) // 2 if word == "bf16" else weight_bytes(int8(plain))
    assert record["backbone_bytes"] == record["planned"]["backbone_bytes"] == light
    assert record["backbone"] == f"tiny in {word}" and record["quantize"] == word
    assert accuracies(record)["linear probe"] > 0.9
    with pytest.warns(UserWarning, match="its features are within"):
        adapt.load("tpsgd-adaptor", backbone("net.py:make"))


def test_rules_that_wait_for_the_output(tells):
    assert list(accuracies(tells(*SMALL, "--rule", "dfa"))) == ["dfa", *ARMS[1:]]
    assert list(accuracies(tells(*SMALL, "--rule", "frozen", "--lr", "0.01"))) == [
        "frozen", "backprop", "linear probe"
    ]  # fmt: skip


RULES = """from dataclasses import replace
from tpsgd import rules
def l1(): return rules.tpsgd_l1()
def wrong(): return replace(rules.tpsgd_l1(), objective=lambda site: site.nothing)
"""


def test_a_rule_of_a_file(tells, says):
    Path("own.py").write_text(RULES)
    record = tells(*SMALL, *LIGHT, "--rule", "own.py:l1")
    assert [*accuracies(record)] == ["own.py:l1", "linear probe"]
    code, _, error = says(*SMALL, "--no-controls", "--rule", "own.py:wrong", "--out", "a")
    assert code == 2 and error.startswith("tpsgd: AttributeError: 'Site' object has no attribute")
    assert error.endswith("own.py, line 4)\n") and error.count("\n") == 1


def test_fewer_samples(tells):
    record = tells(*SMALL, *LIGHT, "--max-train", "30")
    assert list(accuracies(record)) == [LEARNED, "linear probe"]
    assert (record["data"]["train"], record["data"]["test"]) == (30, TEST)
    assert round(TEST * accuracies(record)["linear probe"], 6).is_integer()


@pytest.mark.full
def test_weights_from_files(tells):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        whole = vgg.vgg(11, (3, 32, 32), 2, dense=())
    state = {k: v for k, v in whole.state_dict().items() if k.startswith("features")}
    torch.save(state, "w.pth")
    np.savez("w.npz", **{k: v.numpy() for k, v in state.items()})
    pytest.importorskip("safetensors.torch").save_file(state, "w.safetensors")
    x, y = colours(30, 32)
    np.savez("large.npz", x=x.transpose(0, 3, 1, 2), y=y)
    own, found = fingerprint(backbone("vgg11", "w.pth").model), []
    for file in ("w.pth", "w.npz", "w.safetensors"):
        words = ("--backbone", "vgg11", "--weights", file, "--data", "large.npz", "--tap", "pool4")
        found.append(accuracies(tells(*words, "--epochs", "1", *LIGHT)))
        kept = json.loads(Path("tpsgd-adaptor/adaptor.json").read_text())
        assert kept["backbone_sha256"] == own and kept["taps"]["pool4"]["shape"] == [512, 2, 2]
    assert found[0] == found[1] == found[2]


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rule redout", "did you mean 'readout'?"),
        ("--rule zorb", "an adaptor is trained by a rule or by backprop, not by zorb"),
        ("--rule reservoir", "not by reservoir"),
        ("--combine learnt", "'learnt' is not one of"),
        ("--quantize int4", "'int4' is not one of"),
        ("--memory apples", "'apples' is no amount of memory"),
        ("--memory 9MB --rule backprop", "backprop takes no --memory"),
        ("--reuse no", "No such option: --reuse"),
        ("--lr 0", "--lr must be more than 0"),
        ("--lr nan", "--lr must be more than 0"),
        ("--epochs 0", "--epochs"),
        ("--convs -1", "--convs"),
        ("--device gpu", "gpu"),
        ("--tap middle", "tiny has no tap 'middle': choose from early, late"),
        ("--tap late,late", "--tap late,late: name each tap once"),
        ("--backbone vgg12", "unknown backbone 'vgg12'"),
        ("--backbone none.py:make", "there is no file none.py"),
        ("--backbone net.py:nothing", "must return an nn.Module"),
        ("--backbone net.py:plain", "name the submodule to read from"),
        ("--backbone net.py:plain --tap nine", "has no submodule 'nine'"),
        ("--backbone vgg11", "vgg11 needs a file of weights"),
        ("--backbone vgg11 --weights none.pth", "none.pth does not exist"),
        ("--backbone vgg11 --weights net.py", "net.py is no file of weights by its name"),
        ("--backbone vgg11 --weights broken.npz", "broken.npz"),
        ("--data diggits", "did you mean 'digits'?"),
        ("--data nowhere/photos", "nowhere/photos"),
        ("--data vectors.npz", "tiny reads images (samples, 3, height, width)"),
        ("--data alike.npz", "classes"),
    ],
)
def test_a_mistake_is_one_sentence_before_training(says, monkeypatch, words, said):
    monkeypatch.setattr(adapt, "fit", None)
    monkeypatch.setattr(adapt, "encode", None)
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    Path("broken.npz").write_bytes(b"PK nothing")
    code, out, err = says(*SMALL, "--no-controls", *words.split())
    assert code == 2 and err.startswith("tpsgd: ") and err.count("\n") == 1 and said in err
    assert "in memory" in out or not out
    assert not Path("tpsgd-adaptor").exists() or not written()


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_that_cannot_be_written_to(says, monkeypatch, full):
    def no_room(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(adapt, "encode", None)
    if full:
        monkeypatch.setattr("tempfile.TemporaryFile", no_room)
    code, out, err = says(*SMALL, "--out", "found" if full else "net.py/found")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "name another folder" in err


def test_without_safetensors_nothing_is_trained(says, monkeypatch):
    monkeypatch.setattr(sys.modules["tpsgd_adapt_cli.adapt"], "find_spec", lambda name: None)
    code, out, err = says(*SMALL)
    assert (code, out) == (2, "") and "pip install safetensors" in err


def test_a_disk_that_fills_up(says, unplanned, monkeypatch):
    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = says(*SMALL, *LIGHT)
    assert code == 1 and err.count("\n") == 1 and "test accuracy" in out
    assert "tpsgd-adaptor: cannot write to it (No space left on device); nor to a temp" in err
    assert not written()


# ---- Ctrl-C --------------------------------------------------------------------------------------


def interrupt(monkeypatch, where, name: str, at: int) -> None:
    """Let a function be interrupted in this call."""
    real, calls = getattr(where, name), []

    def function(*given, **options):
        calls.append(given)
        if len(calls) == at:
            raise KeyboardInterrupt
        return real(*given, **options)

    monkeypatch.setattr(where, name, function)


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("name", ["encode", "fit"])
def test_ctrl_c_before_anything_is_done(says, unplanned, monkeypatch, name, more):
    interrupt(monkeypatch, adapt, name, 1)
    code, out, err = says(*SMALL, *more)
    said = "interrupted before the first training run was done; nothing was written"
    assert (code, err) == (130, f"tpsgd: {said}\n") and not written()
    assert [line.partition(":")[0] for line in out.splitlines()] == (
        [] if "--json" in more else ["in memory", "planned peak of training"]
    )


def test_ctrl_c_keeps_the_adaptor(says, unplanned, monkeypatch):
    interrupt(monkeypatch, adapt, "fit", 2)
    code, out, err = says(*SMALL, "--out", "found")
    done = "1 of 4 training runs are done; readout-learned's adaptor and record.json are in found"
    assert (code, err) == (130, f"tpsgd: interrupted; {done}\n") and written("found") == FILES
    record = json.loads(Path("found/record.json").read_text())
    assert record["interrupted"] and list(accuracies(record)) == [LEARNED]
    right = loaded("found").evaluate(tpsgd.data.load("images.npz").test)
    assert accuracies(record)[LEARNED] == right and f"{right:.2%}" in out


def test_ctrl_c_while_it_is_tested(says, unplanned, monkeypatch):
    interrupt(monkeypatch, Adaptor, "evaluate", 1)
    code, out, err = says(*SMALL, "--json")
    assert code == 130 and "readout-learned's adaptor and record.json are in tpsgd-adaptor" in err
    assert accuracies(json.loads(out)) == {LEARNED: None} and written() == FILES
    interrupt(monkeypatch, Adaptor, "evaluate", 1)
    out = says(*SMALL)[1]
    assert out.splitlines()[-3].split()[:2] == [LEARNED, "-"]
