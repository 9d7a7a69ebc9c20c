"""Edges of adaptors: what must be told apart, refused, or left as it is."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import tpsgd
from experiments.corruptions import noise
from tpsgd import Memory, TpsgdError, adapt, rules
from tpsgd.engine.sources import augment
from tpsgd.saved import folder
from tpsgd_adapt import Backbone, Layers, novelty, search, shots
from tpsgd_adapt.backbone import Tap

SMALL = Layers(0, 1, width=8)


def net(seed: int = 0, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), act(), nn.Linear(6, 6), act())


def vectors(n: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def pictures(n: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.rand(n, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(n) % 3


def seer(**options) -> Backbone:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU())
    return Backbone(model, ["1"], mean=(0.5,) * 3, std=(0.3,) * 3, **options)


# ---- files ---------------------------------------------------------------------------------------


def test_the_same_weights_in_another_net_are_another_backbone(tmp_path):
    adapt.fit(Backbone(net(), {"t": "1"}), vectors(), layers=SMALL, epochs=1).save(tmp_path)
    with pytest.raises(TpsgdError, match=r"this backbone has the taps \{'t': '3'\}"):
        adapt.load(tmp_path, Backbone(net(), {"t": "3"}))
    with pytest.raises(TpsgdError, match="differ by"):
        adapt.load(tmp_path, Backbone(net(act=nn.Tanh), {"t": "1"}))


def test_taps_of_tokens_are_told_apart(tmp_path):
    def normed(seed: int, scale: float = 1.0) -> Backbone:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        with torch.no_grad():
            model[0].weight.mul_(scale)
            model[1].weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
        return Backbone(model, ["1"])

    x, y = torch.randn(20, 5, 4), torch.arange(20) % 2
    adapt.fit(normed(0), (x, y), layers=SMALL, epochs=1).save(tmp_path)
    with pytest.raises(TpsgdError, match="differ by"):
        adapt.load(tmp_path, normed(1))
    with pytest.warns(UserWarning, match="within"):
        adapt.load(tmp_path, normed(0, 1.001))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c.update(classes=2),
        lambda c: c.update(shape=[4.5]),
        lambda c: c["taps"]["t"].update(shape=["a"]),
        lambda c: c.pop("combine"),
        lambda c: c["layers"].update(width="wide"),
        lambda c: c.update(preprocessing=3),
    ],
)
def test_a_saved_description_that_makes_no_sense_is_refused(spoil, tmp_path):
    adapt.fit(Backbone(net(), {"t": "1"}), vectors(), layers=SMALL, epochs=1).save(tmp_path)
    file = tmp_path / "adaptor.json"
    config = json.loads(file.read_text())
    del config["sha256"]
    spoil(config)
    file.write_bytes(folder.sealed(config, indent=1))
    with pytest.raises(TpsgdError, match=r"not whole|of shape|width must|scaled by|weights"):
        adapt.load(tmp_path, Backbone(net(), {"t": "1"}))


def test_saved_weights_do_not_load_with_the_description_of_another_adaptor(tmp_path):
    for i in (0, 1):
        made = adapt.fit(Backbone(net(), {"t": "1"}), vectors(), layers=SMALL, epochs=1, seed=i)
        made.save(tmp_path / str(i))
    first, other = (next((tmp_path / name).glob("*.safetensors")) for name in "01")
    first.write_bytes(other.read_bytes())
    with pytest.raises(TpsgdError, match="do not belong together"):
        adapt.load(tmp_path / "0", Backbone(net(), {"t": "1"}))


# ---- backbones -----------------------------------------------------------------------------------


def test_the_callers_samples_stay_as_they_are():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    x, y = vectors()
    before = x.clone()
    adapt.encode(Backbone(model, ["1"]), (x, y))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_backbone_computes_in_its_own_numbers(dtype):
    heard = Backbone(net().to(dtype), ["3"])(vectors()[0])["3"]
    assert heard.dtype is torch.float32
    torch.testing.assert_close(heard, net()(vectors()[0]), rtol=0.1, atol=0.05)


def test_a_module_that_stands_twice_can_be_tapped_by_either_name():
    act = nn.ReLU()
    body = nn.Sequential(nn.Linear(4, 3), act)
    model = nn.Sequential(body, nn.Linear(3, 3), act)
    assert Backbone(model, ["2"]).taps == {"2": "2"}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: (x * 200).long(), "torch.int64"),
        (lambda x: x - 0.5, "go from -0"),
        (lambda x: x * 255, "divide them by 255"),
    ],
)
def test_what_cannot_be_images_is_refused(change, words):
    x, y = pictures()
    for act in (lambda b: adapt.encode(b, (change(x), y)), lambda b: adapt.fit(b, (change(x), y))):
        with pytest.raises(TpsgdError, match=words):
            act(seer())


def test_an_adaptor_comes_in_evaluation_mode(tmp_path):
    def build(shape, classes):
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, classes))

    x, y = vectors()
    made = adapt.fit(Backbone(net(), {"t": "1"}), (x, y), layers=build, epochs=1)
    assert torch.equal(made(x), made(x)) and not made.training
    made.save(tmp_path)
    assert not adapt.load(tmp_path, Backbone(net(), {"t": "1"}), layers=build).training


# ---- training ------------------------------------------------------------------------------------


def test_contradictory_settings_are_refused():
    x, y = pictures()
    data, flip = (x, y), augment.flip()
    for options, given, words in (
        ({"augment": flip, "memory": Memory(reuse=True)}, data, "leave reuse out"),
        ({"augment": flip}, adapt.encode(seer(), data), "cannot be kept"),
        ({"memory": "1MB", "method": tpsgd.fit_backprop}, data, "takes no memory budget"),
    ):
        with pytest.raises(TpsgdError, match=words):
            adapt.fit(seer(), given, epochs=1, **options)


def test_bytes_are_divided_by_255_before_augmentation_and_in_validation():
    x, y = pictures()
    images, seen = (x * 255).to(torch.uint8), []

    def look(x):
        seen.append(float(x.max()))
        return x

    pairs = [(images, y), (images.float() / 255, y)]
    adaptors = [
        adapt.fit(seer(), data, epochs=1, validation=pairs[0], augment=look) for data in pairs
    ]
    assert max(seen) <= 1
    torch.testing.assert_close(adaptors[0](images), adaptors[1](images))


def test_augmentation_changes_the_images_not_the_features():
    seen = []

    def look(x):
        seen.append(tuple(x.shape[1:]))
        return x

    adapt.fit(seer(), pictures(), layers=SMALL, epochs=1, augment=look)
    assert set(seen) == {(3, 6, 6)}


def test_starting_from_an_adaptor_keeps_its_combination_and_refuses_another_kind():
    backbone = Backbone(net(), {"a": "1", "b": "3"})
    options = {"taps": ["a", "b"], "layers": SMALL, "epochs": 1}
    first = adapt.fit(backbone, vectors(), combine=adapt.summed, **options)
    assert adapt.fit(backbone, vectors(), start=first, **options).combine is adapt.summed
    with pytest.raises(TpsgdError, match="other classes"):
        adapt.fit(backbone, vectors(), start=first, classes=7, **options)
    other = Backbone(net(1), {"a": "1", "b": "3"})
    with pytest.raises(TpsgdError, match="another backbone"):
        adapt.fit(other, vectors(), start=first, **options)


def test_memory_is_counted_over_all_taps(monkeypatch):
    backbone = Backbone(net(), {f"t{i}": str(i) for i in range(4)})
    monkeypatch.setattr("tpsgd_adapt.features.available", lambda device: 3000)
    with pytest.raises(TpsgdError, match="3,840 bytes"):
        adapt.encode(backbone, vectors())
    assert adapt.encode(backbone, vectors(), ["t0", "t1"]).nbytes == 1920


@pytest.mark.parametrize("y", [[], [0.0, float("nan")], [-1, 0]])
def test_shots_of_what_are_no_classes(y):
    with pytest.raises(TpsgdError, match="y must be classes, whole numbers from 0"):
        shots(torch.tensor(y), 1)


def test_shots_of_soft_labels():
    y = torch.eye(3)[torch.arange(12) % 3]
    assert y[shots(y, 2)].sum(0).tolist() == [2, 2, 2]


def test_noise_of_other_images_is_other_noise():
    x = torch.full((4, 3, 5, 5), 0.5)
    assert torch.equal(noise()(x), noise()(x))
    assert not torch.equal(noise()(x), noise()(x, first=4))


def test_a_detector_takes_tokens():
    x = torch.randn(60, 5, 3, generator=torch.Generator().manual_seed(0))
    found = novelty.mahalanobis(x).score(x)
    torch.testing.assert_close(found, novelty.mahalanobis(x.mean(1)).score(x.mean(1)))


def test_predsim_reads_several_classes_out_as_the_head_does():
    torch.manual_seed(0)
    x = torch.randn(40, 6)
    y = (x[:, :3] > 0).float()
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    run = tpsgd.fit(model, (x, y), rule=rules.predsim(), loss=tpsgd.bce, epochs=60, batch_size=20)
    first = [e.loss for e in run.history if e.block == 1]
    assert first[-1] < 0.6 * first[0]


# ---- search --------------------------------------------------------------------------------------


def test_other_samples_are_another_search(tmp_path):
    backbone, (x, y) = Backbone(net(), ["3"]), vectors(80)
    options = {"taps": "3", "convs": (0,), "dense": (0,), "epochs": 4, "folder": tmp_path}
    search(backbone, (x, y), **options)
    shuffled = x[torch.from_numpy(np.random.default_rng(0).permutation(80))]
    with pytest.raises(TpsgdError, match="is of another run: its training data was"):
        search(backbone, (shuffled, y), **options)


def test_functions_of_the_user_are_identified_by_name(tmp_path):
    def slow(params):
        return torch.optim.Adam(params, lr=1e-9)

    def fast(params):
        return torch.optim.Adam(params, lr=0.03)

    backbone, data = Backbone(net(), ["3"]), vectors(80)
    options = {"taps": "3", "convs": (0,), "dense": (1,), "epochs": 10, "folder": tmp_path}
    search(backbone, data, optimizer=slow, **options)
    with pytest.raises(TpsgdError, match="is of another run: its optimizer was"):
        search(backbone, data, optimizer=fast, **options)


# ---- what a caller may get wrong -----------------------------------------------------------------


def test_features_of_another_backbone_are_refused():
    known = adapt.encode(Backbone(net(1), ["3"]), vectors())
    with pytest.raises(TpsgdError, match="another backbone"):
        adapt.fit(Backbone(net(0), ["3"]), known, layers=SMALL, epochs=1)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x: x[:, :, :4], "samples of shape"),
        (lambda x: x.permute(0, 2, 3, 1), "samples of shape"),
        (lambda x: x.index_fill(0, torch.tensor([2]), torch.nan), "NaN"),
        (lambda x: x[:0], "empty"),
    ],
)
def test_samples_unlike_those_of_the_training_are_refused(change, words):
    x, y = pictures()
    made = adapt.fit(seer(), (x, y), layers=SMALL, epochs=1)
    with pytest.raises(TpsgdError, match=words):
        made.predict(change(x))


def test_frozen_batch_norm_is_no_reason_to_warn():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
    net = nn.Sequential(Tap(Backbone(model, ["2"]), "2"), nn.Linear(6, 2))
    plan = tpsgd.plan(net, (4,), batch_size=16, memory=Memory(micro_batch=4))
    assert not any("batch normalisation" in remark for remark in plan.remarks)


def test_words_in_place_of_values_are_refused():
    with pytest.raises(TpsgdError, match=r"adapt\.summed"):
        adapt.fit(Backbone(net(), ["3"]), vectors(), epochs=1, combine="learned")
    with pytest.raises(TpsgdError, match=r"adapt\.Backbone"):
        adapt.fit(net(), vectors(), epochs=1)


def test_predsim_is_a_word():
    from tpsgd.comparison.arms import arm

    assert arm("predsim").rule.name == "predsim"


def test_a_small_file_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    from tpsgd_adapt import weights

    np.savez_compressed(tmp_path / "bomb.npz", a=np.zeros(1 << 20, np.float32))
    assert weights.load(tmp_path / "bomb.npz")["a"].shape == (1 << 20,)  # 4 MB: let it be
    monkeypatch.setattr(weights, "LEAST_UNPACKED", 1 << 20)
    with pytest.raises(TpsgdError, match="would unpack to"):
        weights.load(tmp_path / "bomb.npz")


def test_an_adaptor_whose_weights_are_nan_has_no_accuracy():
    adaptor = adapt.fit(seer(), pictures(), layers=SMALL, epochs=1)
    adaptor.layers[0][-1].bias.data.fill_(float("nan"))
    with pytest.raises(TpsgdError, match=r"output is NaN, because layers\.0\.\d\.bias has NaN"):
        adaptor.evaluate(pictures())
