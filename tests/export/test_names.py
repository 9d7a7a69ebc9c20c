"""Nets of different names in one program, and beside somebody else's names."""

import re
import shutil
import subprocess

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.to_c.compiled import CompiledNet, CompiledReader, compiler

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no cc"),
    pytest.mark.usefixtures("unwatched"),
]
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
TWO_NETS = """
#include <stdio.h>
enum net_verdict { NET_OK, NET_CONTINUE, NET_DROP }; /* of Zephyr's net_core.h */
#include "gait.h"
#include "voice.h"
static gait_state gait;
static gait_arena gait_scratch;
static voice_state voice;
static voice_arena voice_scratch;
int main(void)
{
    float x[GAIT_INPUT] = {1.0f}, y[VOICE_INPUT] = {1.0f}, logits[8], loss[GAIT_BLOCKS];
    uint16_t label = 1;
    int errors = 0;
    gait_begin(&gait);
    voice_begin(&voice);
    errors += gait_step(&gait, &gait_scratch, x, &label, 0.01f, GAIT_ALL_BLOCKS, loss) != GAIT_OK;
    errors += gait_forward(&gait, &gait_scratch, x, logits) != GAIT_OK;
    voice_start(&voice_scratch);
    errors += voice_look(&voice, &voice_scratch, y) != VOICE_OK;
    errors += voice_logits(&voice, &voice_scratch, logits) != VOICE_OK;
    return errors + NET_OK;
}
"""


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cell() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(tpsgd.Recurrent(2, 5), nn.Linear(5, 3))


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def gait_and_voice(tmp_path):
    """A net and a recurrent one, with other kernels, in one folder."""
    x = torch.randn(64, 6)
    tpsgd.export.c(
        mlp(), tmp_path / "gait", shape=(6,), name="gait", rule=rules.readout(), samples=x,
        inputs={"shape": (6,), "columns": ["net_load", "tps_x", "initial", "d", "e", "f"]},
        classes=["net_save", "NET_OK", "blocks"],
    )  # fmt: skip
    tpsgd.export.c(cell(), tmp_path / "voice", shape=(4, 2), name="voice", rule="tpsgd-l2")
    folder = tmp_path / "both"
    folder.mkdir()
    for name in ("gait", "voice"):
        for path in (tmp_path / name).iterdir():
            shutil.copy(path, folder)
    return folder


def test_two_nets_link_into_one_program_beside_the_names_of_zephyr(tmp_path):
    folder = gait_and_voice(tmp_path)
    (folder / "main.c").write_text(TWO_NETS)
    program = str(folder / "main")
    sources = [str(folder / file) for file in ("main.c", "gait.c", "voice.c")]
    run("cc", *STRICT, *sources, "-o", program)
    assert subprocess.run([program]).returncode == 0


def test_every_name_has_the_prefix(tmp_path):
    folder = gait_and_voice(tmp_path)
    for name in ("gait", "voice"):
        target = str(folder / f"{name}.o")
        run("cc", *STRICT, "-O0", "-c", str(folder / f"{name}.c"), "-o", target)
        symbols = [line.split()[-1] for line in run("nm", target).splitlines()]
        assert [s for s in symbols if not s.startswith(f"{name}_")] in ([], [f"{name}.c"])
        assert f"{name}_begin" in symbols and len(symbols) > 20
        of_c = set(
            run("cc", "-std=c99", "-dM", "-E", "-include", "stdint.h", "-xc", "/dev/null").split(
                "\n"
            )
        )
        macros = (
            set(run("cc", "-std=c99", "-dM", "-E", str(folder / f"{name}.c")).split("\n")) - of_c
        )
        names = {line.split()[1].split("(")[0] for line in macros}
        assert all(macro.startswith(f"{name.upper()}_") for macro in names) and len(names) > 10
        words = set(
            re.findall(
                r"\w+", re.sub(r"/\*.*?\*/", "", (folder / f"{name}.h").read_text(), flags=re.S)
            )
        )
        assert not {w for w in words if re.match(r"(net|tps)_", w, re.IGNORECASE)}


def test_names_of_columns_and_classes_stay(tmp_path):
    header = (gait_and_voice(tmp_path) / "gait.h").read_text()
    assert "0 net_load, 1 tps_x, 2 initial" in header
    assert "0 net_save, 1 NET_OK, 2 blocks" in header


@pytest.mark.parametrize("numbers", ["float32", "int8"])
def test_a_name_changes_no_bit(numbers, tmp_path):
    x, y = torch.randn(200, 6), torch.arange(200) % 3
    x[:, :3] += 3 * nn.functional.one_hot(y, 3)
    for name in ("net", "gait"):
        tpsgd.export.c(
            mlp(), tmp_path / name, shape=(6,), name=name, rule=rules.readout(), samples=x,
            labels=y, numbers=numbers,
        )  # fmt: skip
    if numbers == "int8":
        text = (tmp_path / "gait/gait.c").read_text()
        assert "gait_quantise" in text and not re.search(r"\b(net|tps)_\w", text, re.IGNORECASE)
        return
    nets = [CompiledNet(tmp_path / name) for name in ("net", "gait")]
    for net in nets:
        for sample, label in zip(x, y[:, None], strict=True):
            net.step(sample, label, 0.05)
    assert nets[0].save() == nets[1].save()


def test_a_recurrent_net_of_another_name_is_called_from_python(tmp_path):
    tpsgd.export.c(cell(), tmp_path, shape=(4, 2), name="voice", rule="tpsgd-l2", overwrite=True)
    assert CompiledReader(tmp_path).forward(torch.zeros(4, 2)).shape == (3,)


def test_a_library_of_arduino_has_the_name(tmp_path):
    tpsgd.export.c(mlp(), tmp_path / "a", shape=(6,), name="gait", files="arduino")
    sketch = (tmp_path / "a/examples/learn/learn.ino").read_text()
    assert "#include <gait.h>" in sketch and "net_" not in sketch.replace("gait_net_", "")
    properties = (tmp_path / "a/library.properties").read_text()
    assert "name=tpsgd_gait\n" in properties and "includes=gait.h" in properties
    assert "gait_step\tKEYWORD2" in (tmp_path / "a/keywords.txt").read_text()


@pytest.mark.parametrize("name", ["", "2nets", "gait-1", "Gait", "gäit", "a" * 32, None, "net.h"])
def test_a_name_that_is_none_in_c_is_refused(name, tmp_path):
    with pytest.raises(TpsgdError, match="name must have"):
        tpsgd.export.c(mlp(), tmp_path / "x", shape=(6,), name=name)
    assert not (tmp_path / "x").exists() and compiler()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "a word of C") for name in ("int", "restrict", "class", "uint8", "int_fast16_t")),
        *((name, "file of kernels") for name in ("tpsgd", "gait_tpsgd")),
    ],
)
def test_a_name_that_is_taken_is_refused(name, reason, tmp_path):
    with pytest.raises(TpsgdError, match=f"name='{name}' is .*{reason}.* take another"):
        tpsgd.export.c(mlp(), tmp_path / "x", shape=(6,), name=name)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["internal", "uint", "tps", "tpsgd_2"])
def test_a_name_that_is_like_those_is_free(name, tmp_path):
    tpsgd.export.c(mlp(), tmp_path, shape=(6,), name=name)
    assert CompiledNet(tmp_path).forward(torch.zeros(6)).shape == (3,)


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(TpsgdError, match=r"there is no folder .*nope"):
        CompiledNet(tmp_path / "nope")
