"""The exported C: equal to `fit`, to itself on every compiler, and safe against bad calls."""

import ctypes
import re
import shutil
import struct
import subprocess
import warnings
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import with_full
from torch import nn

import tpsgd
from benchmarks import emulated, random_nets
from tpsgd import projections, rules
from tpsgd.common.errors import TpsgdError
from tpsgd_export.read_model import read_model
from tpsgd_export.records import fingerprint
from tpsgd_export.to_c.check import distances, samples
from tpsgd_export.to_c.codes import drawn, with_codes
from tpsgd_export.to_c.compiled import CompiledNet, compiler
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import kernels, sources

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C compiler"),
    pytest.mark.usefixtures("unwatched"),
]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 8), nn.LeakyReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)
    )


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, (3, 2), stride=(2, 1), padding=2, dilation=2, bias=False), nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2, padding=1), nn.Sigmoid(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(112, 5),
    )  # fmt: skip


NETS = {"mlp": (mlp, (12,)), "cnn": (cnn, (2, 9, 6))}
RULES = {
    "readout": rules.readout(),
    "readout, fixed scale": rules.readout(scale=3.0, projection=projections.uniform(0.5)),
    "learned": rules.default(),
    "learned, fixed scale": rules.readout(True, projections.uniform(0.5), features=20, scale=3.0),
    "l2": rules.tpsgd_l2(),
    "l1": rules.tpsgd_l1(projections.per_filter(0.7)),
    "drtp": rules.drtp(projections.orthogonal(0.2)),
    "frozen": rules.frozen(),
}


def recipe_of(net="mlp", rule="learned", codes="hash", **options):
    model, shape = NETS[net][0](), NETS[net][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recipe = read_model(model, RULES[rule], shape, **options)
    return model, with_codes(recipe, codes)


def compiled(tmp_path: Path, recipe, **options) -> CompiledNet:
    for name, text in sources(recipe).items():
        (tmp_path / name).write_text(text)
    return CompiledNet(tmp_path, **options)


@pytest.mark.cover(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "optimizer, batch, codes, order",
    [("sgd", 1, "hash", tpsgd.simultaneous), ("adam", 4, "flash", tpsgd.sequential)],
)
def test_a_net_learns_the_weights_of_fit(net, rule, optimizer, batch, codes, order):
    model, recipe = recipe_of(net, rule, codes, optimizer=optimizer, batch=batch, seed=7)
    steps = 60 if net == "mlp" else 20
    apart = distances(model, recipe, sources(recipe), order, steps, rule=RULES[rule])
    assert apart.equal, apart
    assert apart.ours < 1e-5


def test_convolutions_over_flat_rows_of_sensors_learn_the_weights_of_fit():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (3, 16)), nn.Conv1d(3, 6, 3, stride=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Unflatten(1, (6, 1)), nn.Conv2d(6, 4, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    recipe = read_model(model, RULES["learned"], (48,), batch=4)
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 20, rule=RULES["learned"])
    assert apart.equal and apart.ours < 1e-5


@pytest.mark.parametrize("loss", [tpsgd.mse, tpsgd.cross_entropy, tpsgd.bce])
def test_every_loss_of_the_last_block(loss):
    model, recipe = recipe_of(loss=loss, optimizer="momentum", batch=3)
    options = {"rule": RULES["learned"], "loss": loss}
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 40, **options)
    assert apart.equal and apart.ours < 1e-5


def test_one_output_that_says_yes_or_no():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
    recipe = read_model(model, rules.default(), (5,), loss=tpsgd.bce, batch=2)
    options = {"rule": rules.default(), "loss": tpsgd.bce}
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 30, **options)
    assert apart.equal and apart.ours < 1e-5


def test_losses_are_those_of_the_objectives(tmp_path):
    model, recipe = recipe_of(rule="l2", batch=4)
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 1)
    losses = net.step(x, labels, 0.0)
    run = tpsgd.fit(
        model, (x, labels), rule=RULES["l2"], lr=1e-12, epochs=1, batch_size=4, seed=0,
        optimizer=tpsgd.sgd, order=tpsgd.simultaneous,
    )  # fmt: skip
    expected = [epoch.loss for epoch in run.history]
    assert torch.allclose(losses, torch.tensor(expected, dtype=torch.float32), rtol=1e-5)


def codes_of_c_and_python(name: str, tmp_path: Path, right: str = "", wrong: str = ""):
    """The class codes of a block of 3,000 units; `right` in the kernels is replaced by `wrong`."""
    count = 3000
    model = nn.Sequential(nn.Linear(2, count), nn.ReLU(), nn.Linear(count, 3))
    rule = rules.tpsgd_l2(getattr(projections, name)(0.3))
    recipe = read_model(model, rule, (2,), seed=123456789)
    (tmp_path / "tpsgd.h").write_text(kernels(recipe).replace(right, wrong))
    (tmp_path / "codes.c").write_text(
        '#include "tpsgd.h"\n'
        "float code(uint8_t kind, uint64_t stream, float std, uint32_t filters, uint32_t i) {"
        f"tps_codes p = {{kind, {count}, &stream, 0, std, filters}}; return tps_code(&p, 0, i); }}"
    )
    library = tmp_path / "codes.so"
    command = ["gcc", "-std=c99", "-O2", "-shared", "-fPIC", str(tmp_path / "codes.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    code = ctypes.CDLL(str(library)).code
    code.restype, number = ctypes.c_float, ctypes.c_uint32
    code.argtypes = [ctypes.c_uint8, ctypes.c_uint64, ctypes.c_float, number, number]
    local = recipe.blocks[0].local
    assert local is not None
    kind = {"uniform": 2, "binary": 3}.get(name, 1)
    ours = [
        [code(kind, stream, 0.3, local.codes.filters, i) for i in range(count)]
        for stream in local.codes.streams
    ]
    return torch.tensor(ours), drawn(local.codes, 3)


@pytest.mark.parametrize("name", ["normal", "uniform", "binary", "per_filter"])
def test_class_codes_are_those_of_python_bit_for_bit(name, tmp_path):
    ours, pythons = codes_of_c_and_python(name, tmp_path)
    assert torch.equal(ours, pythons)


@pytest.mark.parametrize("rule", ["readout", "learned", "l2"])
def test_a_block_does_not_learn_from_later_blocks(rule, tmp_path):
    _, recipe = recipe_of(rule=rule)
    (x, labels), first = samples(recipe, 4), recipe.blocks[0].weights
    alone, together = (compiled(tmp_path, recipe) for _ in range(2))
    for sample, label in zip(x.split(1), labels.split(1), strict=True):
        alone.step(sample, label, 0.05, blocks=1)
        together.step(sample, label, 0.05)
    assert torch.equal(alone.weights[:first], together.weights[:first])
    assert not torch.equal(alone.weights[first:], together.weights[first:])


def test_half_a_code_step_is_noticed(tmp_path):
    ours, pythons = codes_of_c_and_python("normal", tmp_path, "* 2 + 1", "* 2")
    assert not torch.equal(ours, pythons) and torch.allclose(ours, pythons, atol=1e-3)


@pytest.mark.parametrize("net", with_full(NETS, ["mlp"]))
def test_every_compiler_and_level_gives_the_same_bits(net, tmp_path):
    _, recipe = recipe_of(net, optimizer="adam", batch=2)
    (x, labels), weights = samples(recipe, 20), []
    builds = [(["gcc"], ("-O0",)), (["gcc"], ("-O3", "-march=native", "-std=gnu11"))]
    builds += [(["clang"], ("-O2",))] if shutil.which("clang") else []
    for command, flags in builds:
        machine = compiled(tmp_path, recipe, command=command, flags=flags)
        for batch, label in zip(x.split(2), labels.split(2), strict=True):
            machine.step(batch, label, 0.01)
        weights.append(machine.weights)
    assert all(torch.equal(weights[0], other) for other in weights[1:])


MUTANTS = {
    "slope of LeakyReLU": ("z > 0.0f ? z : z * b->slope", "z > 0.0f ? z : z * b->slope * 1.01f"),
    "second moment": ("0.999f * *v", "0.99f * *v"),
    "shift of the hash": ("(z >> 27)", "(z >> 26)"),
    "a lost row": ("p.rows = rows.end - rows.first", "p.rows = rows.end - rows.first - 1"),
    "gain of the derivative": ("gain * share) * share", "share) * share"),
    "a bias that stays": ("tps_move(r, weights, b->bias + unit, g);", "(void)g;"),
    "one sample of a batch": ("(g = 0.0f, n = 0; n < batch;", "(g = 0.0f, n = 0; n < 1;"),
    "padding of the columns": ("stride_columns - c->pad", "stride_columns + 1 - c->pad"),
    "derivative of tanh": ("1.0f - y * y", "1.0f - y"),
    "groups that read the first maps": ("x += (int32_t)(unit", "x += 0 * (int32_t)(unit"),
    "codes that stay": ("learned != TPS_NOWHERE) tps_move_codes", "learned == 0) tps_move_codes"),
    "codes of the first sample": ("e[n * net->classes + c] * f[n]", "e[c] * f[n]"),
    "codes that unlearn": ("number + c * b->codes->size, g)", "number + c * b->codes->size, -g)"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", with_full(MUTANTS, list(MUTANTS)[4:]))
def test_a_mutant_does_not_pass(mutant):
    right, wrong = MUTANTS[mutant]
    cases = [("mlp", "readout", "sgd"), ("cnn", "readout", "sgd"), ("mlp", "readout", "adam")]
    cases += [("cnn", "learned", "sgd")]
    for net, rule, optimizer in cases:
        model, recipe = recipe_of(net, rule, optimizer=optimizer, batch=2)
        texts = sources(recipe)
        if right in texts["tpsgd.h"]:
            texts["tpsgd.h"] = texts["tpsgd.h"].replace(right, wrong)
            apart = distances(model, recipe, texts, tpsgd.simultaneous, 8, rule=RULES[rule])
            if not apart.equal:
                return
    pytest.fail("no net differs from fit")


@pytest.mark.parametrize("seeds", with_full([range(4), range(4, 20)], [range(4, 20)]))
def test_random_nets_learn_the_weights_of_fit(seeds):
    for seed in seeds:  # benchmarks/random_nets.py draws thousands
        case = random_nets.draw(seed)
        assert random_nets.measure(case).equal, case


def exported(tmp_path, **options):
    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    return tpsgd.export.c(model, tmp_path, shape=(16,), **options)


def digits(tmp_path: Path, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 17, (count, 16), generator=generator, dtype=torch.uint8)
    y = torch.randint(0, 3, (count,), generator=generator)
    numbers = {"EPOCHS": "2", "RATE": "0.01f", "SCALE": "0.0625f"}
    emulated.write_data(tmp_path, (x, y), (x[:9], y[:9]), **numbers)


@pytest.mark.full
def test_no_sanitizer_complains(tmp_path):
    exported(tmp_path, batch=2, optimizer="adam")
    digits(tmp_path, 40)
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert emulated.on_host(tmp_path, "gcc", *flags)["ram"]


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
@pytest.mark.parametrize("board", ["Cortex-M0", "Cortex-M4F"])
def test_an_emulated_microcontroller_learns_the_same_bits(board, tmp_path):
    memory = exported(tmp_path).memory
    digits(tmp_path, 20)
    here, there = emulated.on_host(tmp_path), emulated.on_board(tmp_path, board)
    assert there["weights"] == here["weights"] and there["right"] == here["right"]
    assert int(there["placed"]) == int(there["ram"]) == memory.ram_bytes
    assert 100 < int(there["stack"]) < 1024


@pytest.mark.cover(1)
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "options", [{}, {"optimizer": "adam", "batch": 3, "spare": 2}, {"optimizer": "momentum"}]
)
@pytest.mark.parametrize("rule", ["readout", "learned"])
def test_planned_bytes_are_those_of_the_structs(net, options, rule, tmp_path):
    _, recipe = recipe_of(net, rule, **options)
    assert compiled(tmp_path, recipe).ram == layout(recipe).ram_bytes


def test_learned_codes_cost_their_bytes_and_their_moments():
    for optimizer, times in {"sgd": 1, "momentum": 2, "adam": 3}.items():
        fixed, learned = (
            layout(recipe_of(rule=rule, optimizer=optimizer)[1]).ram_bytes
            for rule in ("readout", "learned")
        )
        assert learned - fixed == 4 * times * 4 * (8 + 6)  # four classes, 8 and 6 units


def test_a_bad_number_changes_no_weight(tmp_path):
    _, recipe = recipe_of(optimizer="adam")
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 1)
    net.step(x, labels, 0.01)
    before, bad = bytes(net.state), x.clone()
    for number in (float("nan"), float("inf"), 1e30):
        bad[0, 3] = number
        with pytest.raises(TpsgdError, match="BAD_INPUT"):
            net.step(bad, labels, 0.01)
        with pytest.raises(TpsgdError, match="BAD_INPUT"):
            net.forward(bad[0])
        for rate in (number, -0.1):
            with pytest.raises(TpsgdError, match="BAD_RATE"):
                net.step(x, labels, rate)
    with pytest.raises(TpsgdError, match="BAD_LABEL"):
        net.step(x, labels + 4, 0.01)
    assert bytes(net.state) == before


def test_a_net_that_diverges_says_so(tmp_path):
    _, recipe = recipe_of(rule="l2")
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 60)
    with pytest.raises(TpsgdError, match="DIVERGED"):
        for sample, label in zip(x.split(1), labels.split(1), strict=True):
            net.step(sample, label, 900.0)


def test_a_new_class_changes_no_output_of_the_others(tmp_path):
    _, recipe = recipe_of(spare=1)
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 8)
    for sample, label in zip(x.split(1), labels.split(1), strict=True):
        net.step(sample, label, 0.05)
    before = net.forward(x[0])
    net.add_class()
    after = net.forward(x[0])
    assert len(after) == 5 and torch.equal(after[:4], before) and after[4] == 0
    for _ in range(20):
        net.step(x[:1], torch.tensor([4]), 0.1)
    assert net.forward(x[0]).argmax() == 4
    with pytest.raises(TpsgdError, match="NO_SPACE"):
        net.add_class()


@pytest.mark.parametrize("rule", ["readout, fixed scale", "learned, fixed scale"])
def test_a_new_class_learns_as_in_a_stream(rule, tmp_path):
    model, recipe = recipe_of(rule=rule, spare=1, seed=3)
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 12)
    labels = labels.clone()
    labels[6:] = 4
    stream = tpsgd.Stream(model, rule=RULES[rule], optimizer=tpsgd.sgd, lr=0.01, seed=3)
    for i, (sample, label) in enumerate(zip(x.split(1), labels.split(1), strict=True)):
        if i == 6:
            net.add_class()
        net.step(sample, label, 0.01)
        stream.partial_fit(sample, label)
    ours = torch.stack([net.forward(sample) for sample in x])
    with torch.no_grad():
        assert torch.allclose(ours, stream.model(x), atol=1e-5)


@pytest.mark.parametrize("rule", ["readout", "learned"])
def test_weights_travel_to_a_record_and_back(rule, tmp_path):
    model, recipe = recipe_of(rule=rule, spare=2)
    net, (x, labels) = compiled(tmp_path, recipe), samples(recipe, 8)
    for sample, label in zip(x.split(1), labels.split(1), strict=True):
        net.step(sample, label, 0.05)
    net.add_class()
    record, logits = net.save(), net.forward(x[0])
    (tmp_path / "weights.bin").write_bytes(record)
    assert tpsgd.export.read_weights(model, tmp_path / "weights.bin") == 5
    with torch.no_grad():
        assert torch.allclose(model(x[:1])[0], logits, atol=1e-6)
    other = compiled(tmp_path, recipe)
    other.load(record)
    assert other.classes == 5 and torch.equal(other.forward(x[0]), logits)
    assert torch.equal(other.weights, net.weights)  # class codes that learn are among them
    before = bytes(other.state)
    for damaged in (record[:40] + b"x" + record[41:], b"TPS2" + record[4:], record[:-1] + b"!"):
        with pytest.raises(TpsgdError, match="BAD_RECORD"):
            other.load(damaged)
        with pytest.raises(TpsgdError, match=r"damaged|no record"):
            tpsgd.export.read_weights(model, damaged)
    assert bytes(other.state) == before


def test_a_record_of_another_net_is_refused(tmp_path):
    _, recipe = recipe_of()
    record = compiled(tmp_path, recipe).save()
    for other, sentence in (
        (nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4)), "other layers"),
        (cnn(), "other layers"),
    ):
        with pytest.raises(TpsgdError, match=sentence):
            tpsgd.export.read_weights(other, record)
    with pytest.raises(TpsgdError, match="cannot read"):
        tpsgd.export.read_weights(mlp(), tmp_path / "nothing.bin")
    fixed = recipe_of(rule="readout")[1]
    assert fingerprint(fixed) != fingerprint(recipe)  # the C refuses it, too


def test_frozen_layers_lie_in_flash_and_their_norm_is_folded(tmp_path):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3)
    norm.running_mean, norm.running_var = torch.randn(3), torch.rand(3) + 0.5
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        norm,
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((2, 3)),
        nn.Flatten(),
        nn.Linear(18, 4),
    )
    model[:2].requires_grad_(False)
    recipe = read_model(model, rules.readout(), (1, 7, 6))
    net, x = compiled(tmp_path, recipe), torch.rand(1, 7, 6)
    assert net.params == 18 * 4 + 4
    with torch.no_grad():
        assert torch.allclose(net.forward(x), model.eval()(x[None])[0], atol=1e-5)


def test_a_frozen_encoder_with_a_norm_is_exported_and_its_head_comes_back(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)
    )
    model[:2].requires_grad_(False)
    tpsgd.export.c(model, tmp_path, shape=(1, 6, 6))
    net, x = CompiledNet(tmp_path), torch.rand(1, 6, 6)
    net.step(x, torch.tensor([2]), 0.1)
    assert tpsgd.export.read_weights(model, net.save()) == 4
    with torch.no_grad():
        assert torch.allclose(net.forward(x), model.eval()(x[None])[0], atol=1e-5)


def test_outputs_of_three_blocks_do_not_meet_in_the_arena():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 1, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16, 200), nn.ReLU(), nn.Linear(200, 10),
    )  # fmt: skip
    rule = rules.readout()
    recipe = read_model(model, rule, (1, 8, 8), batch=2)
    apart = distances(model, recipe, sources(recipe), tpsgd.simultaneous, 8, rule=rule)
    assert apart.equal and apart.ours < 1e-5


def forged(record: bytes, **values: int) -> bytes:
    """A record with another head, and a checksum that fits."""
    names = ("magic", "fingerprint", "mask", "outputs", "classes")
    head = dict(zip(names, struct.unpack("<5I", record[:20]), strict=True)) | values
    body = struct.pack("<5I", *head.values()) + record[20:-4]
    return body + struct.pack("<I", zlib.crc32(body))


FORGED = {"classes": (0, 7, 2**32 - 1), "outputs": (0, 2, 2**31), "mask": (0, 3, 2**32 - 1)}


def test_a_forged_record_changes_nothing(tmp_path):
    model, recipe = recipe_of(spare=2)
    before = [p.clone() for p in model.parameters()]
    record = compiled(tmp_path, recipe).save()
    for name, values in FORGED.items():
        for value in values:
            with pytest.raises(TpsgdError):
                tpsgd.export.read_weights(model, forged(record, **{name: value}))
            assert all(map(torch.equal, before, model.parameters()))


def test_after_a_load_the_optimizer_begins_anew(tmp_path):
    _, recipe = recipe_of(optimizer="adam")
    (x, labels), fresh = samples(recipe, 9), compiled(tmp_path, recipe)
    first, used = fresh.save(), compiled(tmp_path, recipe)
    for sample, label in zip(x.split(1), labels.split(1), strict=True):
        used.step(sample, label, 0.01)
    used.load(first)
    for net in (fresh, used):
        net.step(x[:1], labels[:1], 0.01)
    assert torch.equal(fresh.weights, used.weights)


def test_outputs_that_are_too_large_are_no_answer(tmp_path):
    model, _ = recipe_of()
    with torch.no_grad():
        model[4].bias += 1e20
    net = compiled(tmp_path, read_model(model, rules.readout(), (12,)))
    with pytest.raises(TpsgdError, match="DIVERGED"):
        net.forward(torch.zeros(12))


@pytest.mark.full
@pytest.mark.skipif(bool(emulated.missing()), reason=str(emulated.missing()))
@pytest.mark.parametrize("level", ["-Os", "-O2", "-O3"])
def test_the_program_needs_no_library(level, tmp_path):
    _, recipe = recipe_of("cnn", optimizer="adam", spare=2)
    compiled(tmp_path, recipe)
    command = ["arm-none-eabi-gcc", "-std=c99", "-mthumb", *emulated.BOARDS["Cortex-M4F"].flags]
    object_file = str(tmp_path / "net.o")
    command += [level, "-ffreestanding", "-c", str(tmp_path / "net.c"), "-o", object_file]
    subprocess.run(command, check=True)
    undefined = subprocess.run(
        ["arm-none-eabi-nm", "-u", object_file], capture_output=True, text=True, check=True
    )
    assert not undefined.stdout


def test_a_budget_that_cannot_be_kept_is_refused_with_the_bytes(tmp_path):
    with pytest.raises(TpsgdError, match=r"needs [\d,]+ B of RAM \(weights [\d,]+ B.* is 512 B"):
        exported(tmp_path, ram="512")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_an_earlier_export_is_not_replaced_unasked(tmp_path):
    exported(tmp_path)
    with pytest.raises(TpsgdError, match="already there"):
        exported(tmp_path)
    exported(tmp_path, overwrite=True)


def test_what_differs_from_fit_is_not_left_on_disk(tmp_path, monkeypatch):
    from tpsgd_export.to_c import export

    def wrong(recipe):
        texts = sources(recipe)
        return texts | {"tpsgd.h": texts["tpsgd.h"].replace("*w0++ -= s0", "*w0++ += s0")}

    monkeypatch.setattr(export, "sources", wrong)
    with pytest.raises(TpsgdError, match="learned other weights"):
        exported(tmp_path)
    assert not list(tmp_path.glob("net.*"))


def between(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), *modules, nn.Linear(3, 2))


OF_MLP = {"shape": (12,)}
REFUSED = {
    "gelu": (between(nn.GELU()), {}, "GELU is not exported"),
    "norm after": (between(nn.ReLU(), nn.BatchNorm1d(3)), {}, "BatchNorm1d before"),
    "rule": (mlp(), {"rule": rules.predsim(), **OF_MLP}, "predsim .* is not exported"),
    "dfa": (mlp(), {"rule": rules.dfa(), **OF_MLP}, "dfa needs the error"),
    "options": (mlp(), {"rule": rules.tpsgd_l2(standardise=True), **OF_MLP}, "is not exported"),
    "head": (nn.Sequential(nn.Conv1d(1, 2, 4), nn.Flatten()), {"shape": (1, 4)}, "an nn.Linear"),
    "optimizer": (mlp(), {"optimizer": "lion", **OF_MLP}, "sgd, momentum, adam"),
    "codes": (mlp(), {"codes": "rom", **OF_MLP}, "auto, hash, flash, binary"),
    "shape": (mlp(), {"shape": ()}, "shape must be"),
    "sizes": (mlp(), {"shape": (11,)}, "block 1 .* cannot take an input of shape"),
    "batch": (mlp(), {"batch": 0, **OF_MLP}, "batch must be"),
    "steps of flat rows": (
        nn.Sequential(nn.Unflatten(1, (4, 1)), tpsgd.Recurrent(1, 3), nn.Linear(3, 2)),
        {},
        "Unflatten before a recurrent layer is not exported",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_named(case, tmp_path):
    model, options, sentence = REFUSED[case]
    with pytest.raises(TpsgdError, match=sentence) as caught:
        tpsgd.export.c(model, tmp_path, **{"shape": (4,), **options})
    assert "\n" not in str(caught.value)
    assert not re.search(r"net\.[ch]", " ".join(p.name for p in tmp_path.iterdir()))


def test_drtp_without_a_bound_warns(tmp_path):
    with pytest.warns(UserWarning, match="without bound"):
        exported(tmp_path, rule=rules.drtp())


def test_samples_give_the_gain_of_a_readout(tmp_path):
    model, recipe = recipe_of()
    x = torch.rand(50, 12)
    measured = read_model(model, RULES["learned"], (12,), samples=x)
    run = tpsgd.fit(
        mlp(), (x, torch.arange(50) % 4), batch_size=50, epochs=1, order=tpsgd.simultaneous
    )
    for block, info in zip(measured.blocks[:2], run.blocks, strict=False):
        assert block.local is not None and info.scale is not None
        assert block.local.gain == pytest.approx(info.scale / block.local.codes.size**0.5, rel=1e-4)
    assert recipe.blocks[0].local.gain == 0.0
    assert replace(measured, blocks=recipe.blocks) == recipe


@pytest.mark.parametrize("loss", ["cross-entropy", "cross_entropy", nn.CrossEntropyLoss()])
def test_a_loss_by_name_is_exported(loss, tmp_path):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    tpsgd.export.c(model, tmp_path / "net", shape=(6,), loss=loss, rule="readout")
    assert (tmp_path / "net" / "net.c").exists()
