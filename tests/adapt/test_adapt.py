"""Backbones and their taps, adaptors on them, and adaptors in files."""

import json
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tpsgd
from experiments.recovery import Domain, recover
from tpsgd import Memory, TpsgdError, adapt, rules
from tpsgd_adapt import Backbone, Layers, Probe, shots
from tpsgd_adapt import backbone as named_backbone
from tpsgd_adapt.adaptor import fit_weights
from tpsgd_adapt.backbone import Tap

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def net(seed: int = 0, inplace: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=inplace),
    )  # fmt: skip


def frozen(seed: int = 0, **options) -> Backbone:
    scale = {"mean": MEAN, "std": STD} | options
    return Backbone(net(seed), {"early": "3", "late": "5"}, **scale)


def pictures(n: int = 40, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.rand(n, 3, 8, 8, generator=g) * 0.5
    for i, c in enumerate(y.tolist()):
        x[i, c % 3, (c // 3) * 4 : (c // 3) * 4 + 4] += 0.5
    return x, y


class Explodes(nn.Module):
    def forward(self, x):
        raise AssertionError("this must not run")


# ---- taps ----------------------------------------------------------------------------------------


def test_taps_give_the_outputs_of_their_modules():
    backbone, (x, _) = frozen(), pictures()
    model = net().eval()
    scaled = (x - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    heard = backbone(x)
    torch.testing.assert_close(heard["early"], model[:4](scaled))
    torch.testing.assert_close(heard["late"], model(scaled))
    assert list(backbone(x, ["late"])) == ["late"] and not heard["late"].requires_grad


def test_forward_ends_at_the_last_tap_that_is_needed():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), Explodes())
    backbone = Backbone(model, ["0", "2", "3"])
    assert set(backbone(torch.ones(2, 4), ["2", "0"])) == {"0", "2"}
    with pytest.raises(AssertionError):
        backbone(torch.ones(2, 4), ["3"])
    assert not any(m._forward_hooks for m in model.modules())


def test_a_module_that_writes_into_its_input_does_not_spoil_an_earlier_tap():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(5, 4)
    torch.testing.assert_close(Backbone(model, ["0", "2"])(x)["0"], model[0](x))


def test_a_backbone_is_frozen_whatever_is_asked_of_it():
    backbone, (x, y) = frozen(), pictures()
    before = {k: v.clone() for k, v in backbone.model.state_dict().items()}
    backbone.train()
    assert not any(m.training for m in backbone.modules())
    for method in (tpsgd.fit, tpsgd.fit_backprop):
        for reuse in (True, False):
            adapt.fit(backbone, (x, y), epochs=1, method=method, memory=Memory(reuse=reuse))
    after = backbone.model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None and not p.requires_grad for p in backbone.parameters())


def test_images_as_bytes_and_as_numbers_up_to_one_give_the_same_features():
    backbone, (x, _) = frozen(), pictures()
    as_bytes = (x * 255).round().to(torch.uint8)
    expected, found = backbone(as_bytes.float() / 255)["late"], backbone(as_bytes)["late"]
    torch.testing.assert_close(found, expected)


def test_grey_images_are_read_as_three_equal_channels():
    backbone, (x, _) = frozen(), pictures()
    grey = x[:, :1]
    torch.testing.assert_close(backbone(grey)["late"], backbone(grey.expand(-1, 3, -1, -1))["late"])


def test_taps_of_a_half_precision_backbone_are_float32():
    model = nn.Sequential(nn.Linear(4, 3)).bfloat16()
    assert Backbone(model, ["0"])(torch.ones(2, 4).bfloat16())["0"].dtype is torch.float32


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

    def forward(self, x):
        y = self.inner(x)
        return y, y


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Backbone(net(), ["pool"]), "no submodule 'pool'"),
        (lambda: Backbone(net(), []), "needs a tap"),
        (lambda: Backbone(net, ["1"]), "is an nn.Module"),
        (lambda: Backbone(net(), ["1"], mean=(0.5,)), "go together"),
        (lambda: Backbone(net(), ["1"], mean=(0.5,) * 3, std=(1, 0, 1)), "above 0"),
        (lambda: frozen()(torch.ones(2, 2, 8, 8)), "reads images"),
        (lambda: frozen()(torch.ones(2, 3, 8, 8), ["never"]), "no tap 'never'"),
        (lambda: Backbone(net(), ["5"]).shapes(torch.ones(2, 5, 8, 8)), "cannot take samples"),
        (lambda: Backbone(nn.Sequential(TwoOutputs()), ["0"])(torch.ones(2, 4)), "gives tuple"),
        (lambda: Backbone(TwoOutputs(), ["unused"])(torch.ones(2, 4)), "never runs 'unused'"),
    ],
)
def test_mistakes_about_backbones_are_named(make, words):
    with pytest.raises(TpsgdError, match=words):
        make()


# ---- features ------------------------------------------------------------------------------------


class Own(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


@pytest.mark.parametrize("wrap", [tuple, Own, TensorDataset, DataLoader, "numpy"])
def test_features_are_the_same_from_every_kind_of_data(wrap):
    backbone, (x, y) = frozen(), pictures(21)
    data = {
        tuple: lambda: (x, y),
        Own: lambda: Own(x, y),
        TensorDataset: lambda: TensorDataset(x, y),
        DataLoader: lambda: DataLoader(Own(x, y), batch_size=5),
        "numpy": lambda: (x.numpy(), y.numpy()),
    }[wrap]()
    seen = []
    found = adapt.encode(backbone, data, batch_size=4, progress=lambda *part: seen.append(part))
    torch.testing.assert_close(found.x["late"], backbone(x)["late"])
    assert torch.equal(found.y, y) and seen[-1] == (21, 21) and found.shape == (3, 8, 8)
    assert found[found.y == 1].at("early")[0].shape == (5, 6, 4, 4)
    assert len(found + found) == 42 and found.nbytes == 21 * (6 * 16 + 8 * 16) * 4


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda x, y: (x * 255, y), "divide them by 255"),
        (lambda x, y: (x.index_fill(0, torch.tensor([3]), torch.nan), y), "NaN"),
        (lambda x, y: (x[:0], y[:0]), "empty"),
        (lambda x, y: (x, y[:-1]), "40 samples but y has 39"),
    ],
)
def test_bad_pictures_are_refused(spoil, words):
    for reuse in (True, False):
        with pytest.raises(TpsgdError, match=words):
            adapt.fit(frozen(), spoil(*pictures()), memory=Memory(reuse=reuse), epochs=1)


def test_features_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr("tpsgd_adapt.features.available", lambda device: 100)
    with pytest.raises(TpsgdError, match=r"20 samples take .* more than there is: .*reuse=False"):
        adapt.encode(
            Backbone(nn.Sequential(nn.ReLU()), ["0"]), (torch.ones(20, 3), torch.zeros(20).long())
        )


def test_an_adaptor_is_not_evaluated_on_nothing():
    backbone = frozen()
    features = adapt.encode(backbone, pictures())
    probe = adapt.probe(backbone, features)
    with pytest.raises(TpsgdError, match="the data is empty"):
        probe.evaluate(features[:0])


def test_shots_are_equally_many_samples_of_every_class():
    y = torch.tensor([2, 0, 1, 1, 0, 2, 2, 0, 1])
    chosen = shots(y, 2, seed=3)
    assert y[chosen].bincount().tolist() == [2, 2, 2] and len(set(chosen.tolist())) == 6
    assert torch.equal(chosen, shots(y, 2, seed=3))
    assert any(not torch.equal(chosen, shots(y, 2, seed=s)) for s in range(4, 8))
    with pytest.raises(TpsgdError, match="has 3 samples"):
        shots(y, 4)


def test_hold_out_takes_a_tenth_of_every_class_from_arrays_and_features_alike():
    backbone, (x, y) = frozen(), pictures(80)
    (x_train, y_train), (x_rest, y_rest) = adapt.hold_out((x, y), seed=3)
    assert y_train.bincount().tolist() == [18] * 4 and y_rest.bincount().tolist() == [2] * 4
    train, rest = adapt.hold_out(adapt.encode(backbone, (x, y)), seed=3)
    torch.testing.assert_close(train.x["late"], backbone(x_train)["late"])
    torch.testing.assert_close(rest.x["late"], backbone(x_rest)["late"])
    with pytest.raises(TpsgdError, match="validation="):
        adapt.hold_out(DataLoader(Own(x, y)))


# ---- layers --------------------------------------------------------------------------------------


def test_the_papers_adaptor_has_its_parameters():
    head = Layers()((512, 7, 7), 10)
    kinds = [type(m).__name__ for m in head]
    assert kinds == ["Conv2d", "LeakyReLU", "Flatten", "Linear", "LeakyReLU", "Linear"]
    assert sum(p.numel() for p in head.parameters()) == 1_624_906
    assert head(torch.ones(2, 512, 7, 7)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(9,), (7, 9), (4, 6, 6)])
@pytest.mark.parametrize("build", [Layers(), Layers(0, 0), Layers(2, 3, 5, 3, 11), Probe()])
def test_layers_fit_every_kind_of_tap(shape, build):
    assert build(shape, 3)(torch.randn(2, *shape)).shape == (2, 3)


def test_a_probe_reads_averages():
    x = torch.randn(4, 5, 3, 3)
    head = Probe()((5, 3, 3), 2)
    torch.testing.assert_close(head(x), head[-1](x.mean((2, 3))))
    tokens = torch.randn(4, 6, 5)
    head = Probe()((6, 5), 2)
    torch.testing.assert_close(head(tokens), head[-1](tokens.mean(1)))


@pytest.mark.parametrize("bad", [{"convs": -1}, {"kernel": 4}, {"width": 0}, {"dense": 1.5}])
def test_impossible_layers_are_refused(bad):
    with pytest.raises(TpsgdError):
        Layers(**bad)


# ---- training ------------------------------------------------------------------------------------


def by_hand(backbone, x, y, tap, seed, **options):
    """An adaptor trained step by step, by `tpsgd.fit` on the features."""
    features = backbone(x, [tap])[tap]
    torch.manual_seed(seed)
    head = Layers()(tuple(features.shape[1:]), int(y.max()) + 1)
    tpsgd.fit(head, (features, y), seed=seed, **options)
    return head


@pytest.mark.parametrize("rule", [rules.tpsgd_l2(), rules.readout(), rules.drtp()])
def test_an_adaptor_is_what_fit_makes_of_the_features(rule):
    backbone, (x, y) = frozen(), pictures()
    made = adapt.fit(backbone, (x, y), rule=rule, epochs=2, batch_size=16, seed=3)
    head = by_hand(backbone, x, y, "late", 3, rule=rule, epochs=2, batch_size=16)
    for mine, theirs in zip(made.layers.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(made(x), head(backbone(x)["late"]))


@pytest.mark.parametrize("order", [tpsgd.sequential, tpsgd.simultaneous])
@pytest.mark.parametrize("bytes_given", [False, True])
def test_recomputed_features_train_the_same_adaptor(order, bytes_given, tmp_path):
    backbone, (x, y) = frozen(), pictures()
    x = (x * 255).to(torch.uint8) if bytes_given else x
    options = {"rule": rules.tpsgd_l2(), "epochs": 2, "batch_size": 16, "order": order}
    kept = adapt.fit(backbone, (x, y), memory=Memory(reuse=True), **options)
    for reuse in (False, tmp_path):
        again = adapt.fit(backbone, (x, y), memory=Memory(reuse=reuse), **options)
        for mine, theirs in zip(kept.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_memory_budget_counts_the_backbone_and_trains_the_same_adaptor():
    backbone, (x, y) = frozen(), pictures()
    options = {"rule": rules.readout(), "epochs": 2, "batch_size": 16}
    free, bound = (
        adapt.fit(backbone, (x, y), layers=Layers(1, 1, 8, 3, 16), **options, **more)
        for more in ({}, {"memory": "300KB"})
    )
    for mine, theirs in zip(free.parameters(), bound.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    run = bound.runs["late"]
    assert run.peak_bytes + run.kept_bytes <= 300 * 1024


def test_a_memory_budget_for_features_counts_the_layers_alone():
    backbone, (x, y) = frozen(), pictures()
    features, options = (
        adapt.encode(backbone, (x, y)),
        {"epochs": 1, "layers": Layers(0, 1, width=8)},
    )
    free, bound = (adapt.fit(backbone, features, **options, memory=m) for m in (None, "64KB"))
    for mine, theirs in zip(free.parameters(), bound.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert bound.runs["late"].settings["memory_budget"] == "64KB"


def test_settings_per_block_are_those_of_the_adaptors_blocks_with_or_without_kept_features():
    backbone, (x, y) = frozen(), pictures()
    options = {
        "rule": [rules.tpsgd_l2(), rules.readout(), rules.readout()],
        "epochs": [1, 2, 1],
        "optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()],
        "lr": [0.01, 0.02, None],
        "batch_size": 16,
    }
    kept, again = (
        adapt.fit(backbone, (x, y), memory=Memory(reuse=reuse), **options)
        for reuse in (True, False)
    )
    for mine, theirs in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_adaptors_learn_and_probes_are_the_least_squares_solution():
    backbone, (x, y) = frozen(), pictures(120)
    features = adapt.encode(backbone, (x, y), ["late"])
    train, test = features[:80], features[80:]
    for options in ({"rule": rules.readout()}, {"method": tpsgd.fit_backprop}):
        made = adapt.fit(backbone, train, epochs=20, batch_size=16, **options)
        assert made.evaluate(test) > 0.9 and made.evaluate((x[80:], y[80:])) > 0.9
    probe = adapt.probe(backbone, train, alpha=0.5)
    A = features.x["late"][:80].mean((2, 3)).double().numpy()
    Y = np.eye(4)[train.y.numpy()]
    centred = A - A.mean(0)
    W = np.linalg.solve(centred.T @ centred + 80 * 0.5 * np.eye(8), centred.T @ (Y - Y.mean(0)))
    expected = (features.x["late"].mean((2, 3)).numpy() - A.mean(0)) @ W + Y.mean(0)
    np.testing.assert_allclose(probe(x).detach().numpy(), expected, atol=1e-4)


def test_outputs_of_several_taps_are_averaged_or_summed():
    backbone, (x, y) = frozen(), pictures()
    options = {"taps": ["early", "late"], "epochs": 1, "batch_size": 16, "seed": 2}
    made = adapt.fit(backbone, (x, y), **options)
    each = [made.heads[tap](backbone(x)[tap]) for tap in ("early", "late")]
    torch.testing.assert_close(made(x), (each[0] + each[1]) / 2)
    together = adapt.fit(backbone, (x, y), combine=adapt.summed, **options)
    torch.testing.assert_close(together(x), 2 * made(x))
    assert set(made.runs) == {"early", "late"} and made.predict(x).shape == (40,)


def test_learned_weights_of_taps_are_the_least_squares_solution():
    backbone, (x, y) = frozen(), pictures(60)
    made = adapt.fit(
        backbone, (x[:40], y[:40]), taps=["early", "late"], combine=adapt.learned, epochs=1,
        validation=(x[40:], y[40:]),
    )  # fmt: skip
    heard = backbone(x[40:])
    said = [made.heads[t](heard[t]).detach().numpy() for t in ("early", "late")]
    A = np.stack([(s - s.mean(1, keepdims=True)).ravel() for s in said], 1)
    hot = np.eye(4)[y[40:].numpy()]
    expected = np.linalg.lstsq(A, (hot - hot.mean(1, keepdims=True)).ravel(), rcond=None)[0]
    np.testing.assert_allclose(made.weights.numpy(), expected, rtol=1e-3)
    before = made.weights.clone()
    fit_weights(made, adapt.encode(backbone, (x[40:], y[40:])))
    torch.testing.assert_close(made.weights, before)


def test_learned_weights_of_taps_hold_a_tenth_of_the_samples_out():
    made = adapt.fit(frozen(), pictures(), taps=["early", "late"], combine=adapt.learned, epochs=1)
    assert made.runs["late"].sample_passes == 3 * 36


def test_training_starts_from_the_weights_of_another_adaptor():
    backbone, (x, y) = frozen(), pictures()
    first = adapt.fit(backbone, (x, y), epochs=1)
    before = [p.clone() for p in first.layers.parameters()]
    same = adapt.fit(backbone, (x, y), start=first, epochs=0)
    assert all(torch.equal(a, b) for a, b in zip(before, same.layers.parameters(), strict=True))
    adapt.fit(backbone, (x, y), start=first, epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(before, first.layers.parameters(), strict=True))
    with pytest.raises(TpsgdError, match="other layers"):
        adapt.fit(backbone, (x, y), start=first, layers=Layers(0, 1))


def test_recover_reports_the_known_and_the_new_domain():
    backbone = frozen()
    train, test = (adapt.encode(backbone, pictures(80, 3, s)) for s in (0, 1))
    flipped = (pictures(80, 3, 2)[0].flip(1), pictures(80, 3, 2)[1])
    new = adapt.encode(backbone, flipped)
    seen = []
    arms = {
        "readout": {"rule": rules.readout(), "epochs": 10, "batch_size": 16},
        "probe": {"layers": Probe(), "optimizer": tpsgd.ridge()},
    }
    places = {"flipped": Domain(new[:30], new[30:]), "same": Domain(train[:30], test)}
    rows = recover(
        backbone, train, test, places, arms, epochs=10, progress=lambda *now: seen.append(now)
    )
    assert [(row.arm, row.domain) for row in rows] == [
        (arm, place) for arm in arms for place in places
    ]
    assert len(seen) == 4
    for row in rows[::2]:
        assert row.known_before > 0.9 and row.new_before < 0.7 and row.new_after > 0.9
        assert row.forgotten == pytest.approx(row.known_before - row.known_after)
    for row in rows[1::2]:
        assert row.new_before == row.known_before and row.new_after == row.known_after
    mixed = recover(backbone, train, test, places, arms, epochs=10, replay=10)
    assert mixed[0].known_after > rows[0].known_after


@pytest.mark.parametrize(
    "options, words",
    [
        ({"taps": "nowhere"}, "no tap 'nowhere'"),
        ({"taps": ["late", "late"]}, "each tap once"),
        ({"taps": []}, "at least one"),
        ({"classes": 1}, "two classes"),
        ({"classes": ["a", "b", "c", "b"]}, "two classes are called 'b'"),
        ({"classes": 3}, "out of range"),
        ({"memory": "4 apples"}, "is no amount of memory"),
        ({"epoch": 3}, "adapt.fit has no argument 'epoch': did you mean 'epochs'"),
        ({"memory_budget": "1MB"}, "adapt.fit has no argument 'memory_budget'"),
        ({"memory": Memory(reuse="nowhere-at-all")}, "is no folder"),
        ({"layers": lambda shape, classes: nn.Linear(3, 2)}, "nn.Sequential"),
        ({"rule": rules.dfa(), "order": tpsgd.sequential}, "simultaneous"),
    ],
)
def test_mistakes_about_adaptors_are_named(options, words):
    with pytest.raises(TpsgdError, match=words):
        adapt.fit(frozen(), pictures(), epochs=1, **options)


def test_a_stream_must_say_how_many_classes():
    loader = DataLoader(Own(*pictures()), batch_size=8)
    with pytest.raises(TpsgdError, match="how many classes"):
        adapt.fit(frozen(), loader, memory=Memory(reuse=False), epochs=1)
    made = adapt.fit(
        frozen(), loader, memory=Memory(reuse=False), epochs=1, classes=["a", "b", "c", "d"]
    )
    assert made.classes == ("a", "b", "c", "d")


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(self.attention(x, x, x)[0])


@pytest.mark.parametrize("reuse", [True, False])
def test_a_frozen_transformer_is_a_backbone(reuse):
    torch.manual_seed(0)
    x, y = torch.randn(30, 6, 8), torch.arange(30) % 3
    backbone = Backbone(Attends(), ["norm"])
    made = adapt.fit(backbone, (x, y), memory=Memory(reuse=reuse), epochs=1)
    assert made(x).shape == (30, 3) and made.tap_shapes == {"norm": (6, 8)}


def test_a_tap_is_a_block_of_its_own():
    model = nn.Sequential(Tap(frozen(), "late"), *Layers()((8, 4, 4), 4))
    blocks = tpsgd.split(model)
    assert [b.key for b in blocks] == [0, 0, 1, 2] and not blocks[0].named_parameters()


# ---- files ---------------------------------------------------------------------------------------


@pytest.fixture
def made():
    return adapt.fit(
        frozen(), pictures(), taps=["early", "late"], combine=adapt.learned, epochs=1, seed=7,
        classes=["a", "b", "c", "d"],
    )  # fmt: skip


def test_a_saved_adaptor_comes_back(made, tmp_path):
    x, _ = pictures()
    made.save(tmp_path / "one")
    tensors, described = sorted((tmp_path / "one").iterdir())
    assert described.name == "adaptor.json" and tensors.suffix == ".safetensors"
    back = adapt.load(tmp_path / "one", frozen())
    assert torch.equal(back(x), made(x)) and back.classes == ("a", "b", "c", "d")
    config = json.loads((tmp_path / "one/adaptor.json").read_text())
    assert config["seed"] == 7 and config["preprocessing"] == {"mean": [*MEAN], "std": [*STD]}
    assert config["taps"]["late"] == {"module": "5", "shape": [8, 4, 4]}
    assert config["training"]["late"]["rule"] == "readout-learned"
    own = sum(p.nbytes for p in made.layers.parameters())
    assert own < tensors.stat().st_size < own + 8000


def test_an_adaptor_refuses_a_backbone_that_is_not_its_own(made, tmp_path):
    made.save(tmp_path)
    wider = net()
    wider[4] = nn.Conv2d(6, 9, 3, padding=1)
    scale = {"mean": MEAN, "std": STD}
    taps = {"early": "3", "late": "5"}
    for other, words in (
        (frozen(seed=1), "differ by"),
        (Backbone(net(), {"early": "3"}, **scale), "reads the taps .*'late': '5'"),
        (Backbone(net(), taps), "scales them"),
        (Backbone(wider, taps, **scale), "it is another one"),
    ):
        with pytest.raises(TpsgdError, match=words):
            adapt.load(tmp_path, other)


def test_an_adaptor_takes_nearly_the_same_backbone_with_a_warning(made, tmp_path):
    made.save(tmp_path)
    close = frozen()
    with torch.no_grad():
        close.model[4].weight.mul_(1.01)
    with pytest.warns(UserWarning, match="within"):
        adapt.load(tmp_path, close)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt.load(tmp_path, frozen())


def test_layers_of_a_user_function_are_loaded_with_that_function(tmp_path):
    def build(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, classes))

    x, y = pictures()
    made = adapt.fit(frozen(), (x, y), layers=build, epochs=1)
    made.save(tmp_path)
    with pytest.raises(TpsgdError, match="layers="):
        adapt.load(tmp_path, frozen())
    assert torch.equal(adapt.load(tmp_path, frozen(), layers=build)(x), made(x))
    with pytest.raises(TpsgdError, match=r"the weights lack 'layers\.0\.0\.weight'"):
        adapt.load(tmp_path, frozen(), layers=lambda s, c: nn.Sequential(nn.Linear(3, c)))


@pytest.mark.parametrize("name", ["adaptor.json", "adaptor-*.safetensors"])
def test_a_damaged_adaptor_is_refused_in_a_sentence(made, tmp_path, name):
    made.save(tmp_path)
    (file,) = tmp_path.glob(name)
    whole = file.read_bytes()
    flipped = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in (9, len(whole) - 9)]
    for content in (whole[: len(whole) // 2], b"", b"nonsense", b"{}", *flipped):
        file.write_bytes(content)
        with pytest.raises(TpsgdError):
            adapt.load(tmp_path, frozen())
    file.unlink()
    with pytest.raises(TpsgdError, match="holds no adaptor"):
        adapt.load(tmp_path, frozen())


def test_nothing_is_lost_when_saving_fails(made, tmp_path, monkeypatch):
    made.save(tmp_path)
    before = (tmp_path / "adaptor.json").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        made.save(tmp_path)
    assert (tmp_path / "adaptor.json").read_bytes() == before


# ---- backbones by name ---------------------------------------------------------------------------


def test_named_backbones_take_a_file_of_weights(tmp_path):
    from tpsgd.zoo.resnet import resnet
    from tpsgd.zoo.vgg import vgg

    torch.manual_seed(0)
    for name, whole, tap, path in (
        ("vgg11", vgg(11, (3, 32, 32), 5), "pool2", "features.5"),
        ("resnet18", resnet(18, (3, 64, 64), 5), "layer2", "layer2"),
    ):
        torch.save(whole.state_dict(), tmp_path / f"{name}.pth")
        backbone = named_backbone(name, tmp_path / f"{name}.pth")
        x = torch.rand(2, 3, 64, 64)
        expected = Backbone(whole, [path], mean=backbone.mean, std=backbone.std)(x)[path]
        torch.testing.assert_close(backbone(x, [tap])[tap], expected)


def test_unknown_backbones_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    with pytest.raises(TpsgdError, match="unknown backbone"):
        named_backbone("vgg99")
    with pytest.raises(TpsgdError, match="needs a file of weights"):
        named_backbone("vgg16")
    with pytest.raises(TpsgdError, match="there is no"):
        named_backbone(f"{tmp_path}/none.py:make")
    file = tmp_path / "mine.py"
    file.write_text("from torch import nn\nnet = lambda: nn.Sequential(nn.Linear(2, 2))\n")
    with pytest.raises(TpsgdError, match="name the submodule"):
        named_backbone(f"{file}:net")
    assert named_backbone(f"{file}:net", taps=("0",)).taps == {"0": "0"}
    file.write_text("net = lambda: 3\n")
    with pytest.raises(TpsgdError, match="must return an nn"):
        named_backbone(f"{file}:net")


@pytest.mark.real_data("vgg16")
def test_vgg16_knows_where_its_weights_lie():
    backbone = named_backbone("vgg16")
    shapes = backbone.shapes(torch.zeros(1, 3, 160, 160))
    assert shapes["pool5"] == (512, 5, 5) and shapes["pool4"] == (512, 10, 10)
