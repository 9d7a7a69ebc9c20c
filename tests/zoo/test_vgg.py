"""VGG nets: torchvision's sizes and names, any image size, and training block by block."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import images, seeded
from torch import nn

import tpsgd
from tpsgd import TpsgdError, rules
from tpsgd.zoo.vgg import taps, vgg

pytestmark = pytest.mark.usefixtures("unwatched")

LIKE_TORCHVISION = {"dense": (4096, 4096), "dropout": 0.5, "pool": 7}


@pytest.mark.parametrize(
    ("depth", "batch_norm", "parameters"),
    [
        (11, False, 132_863_336),
        (11, True, 132_868_840),
        (16, False, 138_357_544),
        (16, True, 138_365_992),
    ],
)
@pytest.mark.parametrize("pool", [7, None])
def test_as_many_parameters_as_torchvisions(depth, batch_norm, parameters, pool):
    with torch.device("meta"):
        net = vgg(depth, (3, 224, 224), 1000, dense=(4096, 4096), batch_norm=batch_norm, pool=pool)
    assert sum(p.numel() for p in net.parameters()) == parameters


KEYS = {
    (11, False): [0, 3, 6, 8, 11, 13, 16, 18],
    (11, True): [0, 4, 8, 11, 15, 18, 22, 25],
    (16, False): [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28],
    (16, True): [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40],
}
BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("depth", "batch_norm"), KEYS)
def test_torchvisions_keys(depth, batch_norm, dropout):
    wanted = []
    for i in KEYS[depth, batch_norm]:
        wanted += [f"features.{i}.weight", f"features.{i}.bias"]
        wanted += [f"features.{i + 1}.{name}" for name in BATCH_NORM] if batch_norm else []
    wanted += [f"classifier.{i}.{name}" for i in (0, 3, 6) for name in ("weight", "bias")]
    options = LIKE_TORCHVISION | {"dropout": dropout}
    with torch.device("meta"):
        net = vgg(depth, (3, 64, 64), 1000, batch_norm=batch_norm, **options)
    assert list(net.state_dict()) == wanted


def test_vgg8_is_that_of_nokland_and_eidnes():
    """Their VGG8b: six convolutions, four poolings, 1,024 units; counted by hand at 32 px."""
    with torch.device("meta"):
        net = vgg(8, (3, 32, 32), 10)
    widths = [3, 128, 256, 256, 512, 512, 512]
    convolutions = sum(9 * a * b + b for a, b in pairwise(widths))
    linear = 512 * 2 * 2 * 1024 + 1024 + 1024 * 10 + 10
    assert sum(p.numel() for p in net.parameters()) == convolutions + linear
    kinds = [type(m).__name__[0] for m in net.features if not isinstance(m, nn.ReLU)]
    assert "".join(kinds) == "CCMCCMCMCM"


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("depth", [8, 11, 16])
def test_taps_are_the_poolings(depth, batch_norm):
    with torch.device("meta"):
        net = vgg(depth, (3, 32, 32), 10, batch_norm=batch_norm)
    pools = [name for name, m in net.named_modules() if isinstance(m, nn.MaxPool2d)]
    found = taps(depth, batch_norm)
    assert list(found.values()) == pools
    assert list(found) == [f"pool{i + 1}" for i in range(len(pools))]


def test_the_taps_of_vgg16_by_hand():
    assert list(taps(16).values()) == [f"features.{i}" for i in (4, 9, 16, 23, 30)]


@pytest.mark.parametrize(
    ("depth", "shape"), [(8, (1, 16, 16)), (8, (1, 28, 28)), (11, (4, 32, 48)), (16, (2, 33, 40))]
)
@pytest.mark.parametrize("pool", [None, 2])
def test_images_of_any_size_and_channels(depth, shape, pool):
    """Shapes are what matter: numbers are not computed."""
    with torch.device("meta"):
        net = vgg(depth, shape, 7, dense=(8,), pool=pool)
        assert net(torch.empty(2, *shape)).shape == (2, 7)


def test_average_pooling_makes_the_weights_serve_another_size():
    one, other = (vgg(8, (1, n, n), 3, dense=(4,), pool=1) for n in (16, 24))
    other.load_state_dict(one.state_dict())
    assert other(torch.zeros(1, 1, 24, 24)).shape == (1, 3)


@pytest.mark.real_data("vgg16")
@pytest.mark.filterwarnings("ignore:The given NumPy array")
def test_torchvisions_weights_load(data_root):
    arrays = np.load(data_root / "vgg16" / "vgg16_features.npz")
    net = vgg(16, (3, 32, 32), 10, dense=())
    loaded = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    missing, unknown = net.load_state_dict(loaded, strict=False)
    assert not unknown and missing == ["classifier.0.weight", "classifier.0.bias"]


WRONG = {
    "no VGG12": ((12, (3, 32, 32), 10), {}),
    "too small for VGG11.*32 x 32 or more": ((11, (3, 32, 16), 10), {}),
    "too small for VGG8.*16 x 16": ((8, (3, 15, 32), 10), {"pool": 7}),
    r"such as \(3, 32, 32\), got \(32, 32\)": ((8, (32, 32), 10), {}),
    "classes must be": ((8, (3, 32, 32), 0), {}),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_cannot_be_built_is_refused(message):
    given, options = WRONG[message]
    with pytest.raises(TpsgdError, match=message):
        vgg(*given, **options)


def test_a_depth_without_taps_is_refused():
    with pytest.raises(TpsgdError, match="no VGG19"):
        taps(19)


def test_blocks_learn_with_batch_norm_dropout_and_pooling():
    """Dropout belongs to the next block, so that every block has a closed form."""
    net = seeded(lambda: vgg(8, (2, 16, 16), 3, dense=(8,), batch_norm=True, dropout=0.2, pool=1))
    before = {name: p.clone() for name, p in net.named_parameters()}
    run = tpsgd.fit(net, images(8, 2, 16), rule=rules.readout(), epochs=1, batch_size=4)
    assert [b.learning for b in run.blocks] == ["closed form"] * 8
    assert not any(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_dense_layers_have_their_norm_before_the_relu():
    net = vgg(8, (2, 16, 16), 3, dense=(8, 4), batch_norm=True, dropout=0.5, dense_norm=True)
    kinds = [type(m).__name__ for m in net.classifier]
    dense = ["Linear", "BatchNorm1d", "ReLU", "Dropout"]
    assert kinds == [*dense, *dense, "Linear"]
    assert [net.classifier[i].num_features for i in (1, 5)] == [8, 4]
    plain = vgg(8, (2, 16, 16), 3, dense=(8, 4), batch_norm=True)
    assert net.features.state_dict().keys() == plain.features.state_dict().keys()
    assert not any(isinstance(m, nn.BatchNorm1d) for m in plain.modules())


def test_dense_layers_with_their_norm_are_blocks_with_a_closed_form():
    def make():
        return vgg(8, (2, 16, 16), 3, dense=(8,), batch_norm=True, dense_norm=True)

    net = seeded(make)
    run = tpsgd.fit(net, images(8, 2, 16), rule=rules.readout(), epochs=1, batch_size=4)
    assert run.blocks[-2].name.endswith("Linear + BatchNorm1d + ReLU")
    assert [b.learning for b in run.blocks] == ["closed form"] * 8
    assert int(net.classifier[1].num_batches_tracked) == 2
