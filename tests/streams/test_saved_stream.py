"""A stream in a folder goes on bit for bit; a folder that is damaged or forged is refused."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of
from streams.nets import X, Y, cnn, learn, mlp, normed, recurrent, same, weights
from torch import nn

import tpsgd
from tpsgd import Padded, Recurrent, Rehearsal, Stream, TpsgdError, rules
from tpsgd.saved import folder as folders

KINDS = {
    "mlp": (mlp, {"lr": 0.003, "batch_size": 5}),
    "rehearsal": (normed, {"rehearsal": Rehearsal("10KB", replayed=2), "seed": 3}),
    "cnn": (cnn, {"rule": rules.readout(True), "optimizer": tpsgd.sgd}),
    "recurrent": (recurrent, {"rule": rules.tpsgd_l2(), "loss": tpsgd.mse, "lr": [0.01, 0.001]}),
    "rls": (mlp, {"optimizer": tpsgd.rls(0.5)}),
    "dfa": (mlp, {"rule": rules.dfa()}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_where_it_was_saved(kind, tmp_path):
    make, settings = KINDS[kind]
    first = learn(Stream(make(9), **settings), 100)  # a class came that the model did not have
    first.save(tmp_path / "saved")
    second = Stream.load(tmp_path / "saved")
    for stream in (first, second):
        learn(stream, 100, start=100)
    assert same(weights(first.model), weights(second.model)) and second.samples == 200
    assert first.classes == second.classes and second._settings.lr == settings.get("lr")
    assert second._settings.batch_size == first._settings.batch_size
    if first.rehearsal is not None:
        assert torch.equal(first.rehearsal.x, second.rehearsal.x)
        assert second.rehearsal.replayed == 2 and second.rehearsal.limit == 10 * 1024


def test_names_new_classes_bytes_and_sequences_are_saved(tmp_path):
    named = Stream(mlp(2), classes=["zero", "one"])
    named.save(tmp_path / "new")  # before its first sample
    named = Stream.load(tmp_path / "new")
    named.partial_fit((255 * X[Y < 2]).byte(), [("zero", "one")[i] for i in Y[Y < 2]])
    named.add_class("two")  # a state of fewer classes
    named.save(tmp_path / "named")
    again = Stream.load(tmp_path / "named", lr=0.5)
    assert again.classes == ("zero", "one", "two") and again._settings.lr == 0.5
    again.save(tmp_path / "twice")
    ragged = Stream(nn.Sequential(Recurrent(3, 4), nn.Linear(4, 2)))
    ragged.partial_fit(Padded.of([torch.ones(4, 3), torch.ones(2, 3)]), [0, 1])
    ragged.save(tmp_path / "ragged")
    for folder in ("named", "twice", "ragged"):
        assert Stream.load(tmp_path / folder).samples > 0
    with pytest.raises(TpsgdError, match="already holds a stream: name another folder"):
        again.save(tmp_path / "named")
    again.save(tmp_path / "named", overwrite=True)


def test_what_is_your_own_is_passed_again(tmp_path):
    def own(parameters):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    stream = learn(Stream(mlp(), rule=rules.readout(features=9), optimizer=own), 50)
    stream.save(tmp_path)
    with pytest.raises(TpsgdError, match=r"its own rule, .*: pass it again, .*rule="):
        Stream.load(tmp_path)
    with pytest.raises(TpsgdError, match="its own optimizer"):
        Stream.load(tmp_path, rule=rules.readout(features=9))
    with pytest.raises(TpsgdError, match="its optimizer was SGD, and now it is Adam"):
        Stream.load(tmp_path, rule=rules.readout(features=9), optimizer=torch.optim.Adam)
    assert Stream.load(tmp_path, rule=rules.readout(features=9), optimizer=own).samples == 50


def forge(folder, change, tensors=lambda t: t):
    """Rewrite a folder with other content and checksums that fit."""
    file = folder / "stream.json"
    description = json.loads(file.read_text())
    (old,) = folder.glob("*.safetensors")
    content = bytes_of(tensors(tensors_of(old.read_bytes())))
    old.unlink()
    description["weights_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / f"stream-{description['weights_sha256'][:16]}.safetensors").write_bytes(content)
    change(description["stream"]["settings"], description["stream"]["state"])
    del description["sha256"]
    file.write_bytes(folders.sealed(description, indent=1))


def shorter(word):
    """Every tensor with this word in its name cut to one number."""
    return lambda ts: {n: t.reshape(-1)[:1].clone() if word in n else t for n, t in ts.items()}


def nothing(settings, state):
    pass


HOSTILE = {
    "optimizer": (nothing, shorter("exp_avg_sq")),
    "weights": (nothing, shorter("model/1.weight")),
    "random": (nothing, shorter("random")),
    "stored": (lambda _, state: state["rehearsal"].update(stored=10**6), None),
    "labels": (nothing, lambda t: {n: v + 9 * (n.endswith("rehearsal.y")) for n, v in t.items()}),
    "samples": (lambda _, state: state.update(samples="many"), None),
    "rule": (lambda settings, _: settings.update(rule="eval"), None),
    "rate": (lambda settings, _: settings.update(lr="fast"), None),
    "batch": (lambda settings, _: settings.update(batch_size=-1), None),
    "shape": (lambda settings, _: settings.update(sample=[False, [1 << 40], "float32"]), None),
    "dtype": (lambda settings, _: settings.update(sample=[False, [64], "load"]), None),
    "blocks": (lambda _, state: state["nets"][0].update(blocks=[]), None),
    "nets": (lambda _, state: state.update(nets=[3]), None),
    "classes": (lambda _, state: state.update(classes=4), None),
    "argument": (lambda settings, _: settings.update(model=1), None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_stream_is_refused_in_one_sentence(name, tmp_path):
    change, tensors = HOSTILE[name]
    learn(Stream(mlp(), rehearsal=Rehearsal("10KB")), 50).save(tmp_path)
    forge(tmp_path, change, tensors or (lambda t: t))
    with pytest.raises(TpsgdError) as error:
        Stream.load(tmp_path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_sums_of_other_shapes_are_refused(tmp_path):
    learn(Stream(mlp(), optimizer=tpsgd.rls()), 50).save(tmp_path)
    forge(tmp_path, nothing, shorter("sums.xy"))
    with pytest.raises(TpsgdError, match="makes no sense"):
        Stream.load(tmp_path)


def test_files_that_are_cut_off_or_edited_are_refused(tmp_path):
    learn(Stream(mlp()), 50).save(tmp_path)
    for file in (tmp_path / "stream.json", *tmp_path.glob("*.safetensors")):
        content = file.read_bytes()
        for other in (content[: len(content) // 2], content.replace(b"5", b"6")):
            file.write_bytes(other)
            with pytest.raises(TpsgdError):
                Stream.load(tmp_path)
        file.write_bytes(content)
    assert Stream.load(tmp_path).samples == 50
    with pytest.raises(TpsgdError, match="holds no stream"):
        Stream.load(tmp_path / "none")
