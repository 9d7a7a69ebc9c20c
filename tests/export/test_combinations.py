"""Parts of an export that meet in one net: names, encoders, weights of a byte, backprop."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.recipe import HeadRecipe
from tpsgd_export.heads.source import read_encoder
from tpsgd_export.heads.source import sources as head_sources
from tpsgd_export.read_model import BACKPROP, read_model
from tpsgd_export.to_c.check import distances
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.names import named
from tpsgd_export.to_c.small import with_small_weights
from tpsgd_export.to_c.source import sources

pytestmark = [
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc"),
    pytest.mark.usefixtures("unwatched"),
]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
WATCHED = ["-std=c99", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def net(*frozen: int) -> nn.Sequential:
    """Four layers, some of which do not learn."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5), nn.Tanh(),
        nn.Linear(5, 6), nn.LeakyReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    layers = [layer for layer in model if hasattr(layer, "weight")]
    for i in frozen:
        layers[i].requires_grad_(False)
    return model


def test_backprop_ends_at_the_first_layer_that_learns():
    model = net(0, 1)
    whole = read_model(model, BACKPROP, (1, 8, 8))
    recipe = with_small_weights(whole)
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 6, WATCHED, rule=BACKPROP)
    assert apart.equal
    forward, learned = 36 * 4 * 9 + 144 * 5 + 5 * 6 + 6 * 3, 5 * 6 + 6 * 3
    assert layout(whole).operations == forward + learned + 6 * 3  # the error passes the last layer


def test_backprop_through_weights_of_a_byte_is_refused(tmp_path):
    with pytest.raises(TpsgdError, match=r"block 2 .*leave it out, or freeze the layers before"):
        tpsgd.export.c(net(1), tmp_path, shape=(1, 8, 8), rule="backprop", frozen="int8")
    assert not any(tmp_path.iterdir())


MAIN = """
#include "a.h"
#include "b.h"
#include "net.h"
enum verdict { NET_DROP };
static a_state a;
static b_state b;
static a_arena scratch_a;
static b_arena scratch_b;
static net_state state;
int main(void)
{
    float x[A_INPUT] = {1.0f};
    a_begin(&a);
    b_begin(&b);
    net_begin(&state);
    int error = a_learn(&a, &scratch_a, x, 1, 1.0f) + b_learn(&b, &scratch_b, x, 1, 1.0f);
    return error + NET_OK + NET_DROP;
}
"""


def test_two_heads_with_encoders_and_a_net_link_into_one_program(tmp_path):
    encoder = read_encoder(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), (6,))
    texts = sources(read_model(nn.Linear(6, 2), rules.readout(), (6,))) | {"main.c": MAIN}
    for name in ("a", "b"):
        own = head_sources(HeadRecipe(5, 4, 2, name=name), encoder)
        assert len(own) == 5 and not own.keys() & texts.keys()
        texts |= own
    assert run(tmp_path, texts) == 0


def test_an_encoder_has_the_name_of_its_head(tmp_path):
    encoder = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    settings = {"shape": (6,), "classes": 2, "model": encoder, "features": 4}
    tpsgd.export.one_pass(tmp_path, name="gait", **settings)
    assert CompiledHead(tmp_path, "gait").units == 5
    names = ["gait.c", "gait.h", "gait_net.c", "gait_net.h", "gait_net_tpsgd.h"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert not re.search(r"\b(net|tps)_\w", (tmp_path / "gait_net.c").read_text())


def test_a_step_of_backprop_is_one_part(tmp_path):
    texts = named(sources(read_model(net(), BACKPROP, (1, 8, 8))), "gait")
    main = MAIN_OF_PARTS.replace("net", "gait").replace("NET", "GAIT")
    assert run(tmp_path, texts | {"main.c": main}) == 0


def run(folder: Path, texts: dict[str, str]) -> int:
    """The exit status of a program of these files."""
    for file, text in texts.items():
        (folder / file).write_text(text)
    program = str(folder / "program")
    subprocess.run(["gcc", *STRICT, *map(str, folder.glob("*.c")), "-o", program], check=True)
    return subprocess.run([program]).returncode


MAIN_OF_PARTS = """
#include <string.h>
#include "net.h"
#define ALL NET_ALL_BLOCKS
static net_state one, other;
static net_arena arena;
int main(void)
{
    float x[NET_INPUT] = {1.0f, 0.5f}, loss[NET_BLOCKS];
    uint16_t label = 2;
    uint32_t part = 0;
    net_begin(&one);
    net_begin(&other);
    if (net_step(&one, &arena, x, &label, 0.1f, ALL, loss)) return 1;
    if (!memcmp(&one, &other, sizeof one)) return 2;
    if (net_step_part(&other, &arena, x, &label, 0.1f, ALL, loss, &part) || part) return 3;
    part = 1;
    if (net_step_part(&other, &arena, x, &label, 0.1f, ALL, loss, &part) == NET_OK) return 4;
    return memcmp(&one, &other, sizeof one) != 0;
}
"""


@pytest.mark.parametrize("name", ["signal", "stdint", "time"])
def test_a_name_that_hides_a_header_of_c_is_refused(name, tmp_path):
    for export, words in (
        (tpsgd.export.one_pass, {"shape": (4,), "classes": 2}),
        (lambda *a, **k: tpsgd.export.c(nn.Linear(4, 2), *a, **k), {"shape": (4,)}),
    ):
        with pytest.raises(TpsgdError, match=rf"would hide {name}\.h"):
            export(tmp_path / "x", name=name, **words)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "words, said",
    [
        ({"classes": None}, "classes must be how many"),
        ({"classes": 3.0}, "classes must be how many"),
        ({"classes": 3, "model": nn.Linear(5, 3)}, "does not take samples of shape"),
        ({"classes": 3, "model": nn.Linear(4, 3).double()}, "does not take samples of shape"),
    ],
)
def test_a_head_of_nonsense_is_refused(words, said, tmp_path):
    with pytest.raises(TpsgdError, match=said):
        tpsgd.export.one_pass(tmp_path / "x", shape=(4,), **words)
    assert not (tmp_path / "x").exists()
