"""Exported recurrent nets: compiled C beside `fit`, and what a device may do wrong."""

import ctypes
import math
import shutil
import subprocess
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import with_full
from torch import Tensor, nn

import tpsgd
from tpsgd import projections, rules
from tpsgd.common.errors import TpsgdError
from tpsgd.maths.random import Key, permutation
from tpsgd.nets.cuts.split import split
from tpsgd.nets.recurrent import connect
from tpsgd_export.read_model import read_model
from tpsgd_export.recipe import StepRecipe
from tpsgd_export.records import read_weights
from tpsgd_export.to_c.check import OPTIMIZERS, keeping_codes
from tpsgd_export.to_c.compiled import CompiledReader
from tpsgd_export.to_c.memory import layout
from tpsgd_export.to_c.source import sources

HARNESS = Path(__file__).with_name("sequences.c")
STRICT = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
SANITIZED = [*STRICT, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ALL = 0xFFFFFFFF
Recurrent, Diagonal, Linear = tpsgd.Recurrent, tpsgd.Recurrent.diagonal, nn.Linear

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


@dataclass
class Case:
    """A net and how it learns."""

    layers: Callable[[], list[nn.Module]]
    rule: Any = field(default_factory=rules.default)
    lr: float = 0.05
    optimizer: str = "sgd"
    loss: Any = None
    seed: int = 0

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(*self.layers()).to(dtype)

    def recipe(self) -> StepRecipe:
        return read_model(
            self.model(), self.rule, (7, 3), optimizer=self.optimizer, loss=self.loss,
            seed=self.seed,
        )  # fmt: skip


BINARY = projections.binary()
CASES = {
    "leaky": Case(lambda: [Recurrent(3, 9, leak=0.3), Linear(9, 4)]),
    "leaky_l2": Case(
        lambda: [Recurrent(3, 9, leak=0.7), Linear(9, 4)],
        rules.tpsgd_l2(projection=projections.uniform(0.5)), optimizer="momentum", lr=0.01, seed=3,
    ),
    "paper_l1": Case(
        lambda: [Recurrent.paper(3, 9), Linear(9, 4)], rules.tpsgd_l1(projection=BINARY), 0.01
    ),
    "paper_drtp": Case(
        lambda: [Recurrent.paper(3, 9), Linear(9, 4)],
        rules.drtp(projection=projections.normal(0.5)),
    ),
    "stack": Case(
        lambda: [
            Recurrent(3, 6, leak=0.3, sequence=True),
            Recurrent(6, 8, leak=0.6, activation=nn.ReLU),
            *(Linear(8, 5), nn.Tanh(), Linear(5, 4)),
        ],
        optimizer="adam", lr=0.003,
    ),
    "rnn": Case(
        lambda: [nn.RNN(3, 6, num_layers=2, batch_first=True, bias=False), Linear(6, 4)],
        rules.readout(scale=2.0),
    ),
    "frozen": Case(lambda: [Recurrent(3, 9), Linear(9, 4)], rules.frozen()),
    "bce": Case(lambda: [Recurrent(3, 9), Linear(9, 4)], loss=tpsgd.losses.bce),
    "mse": Case(lambda: [Recurrent(3, 9), Linear(9, 4)], loss=tpsgd.losses.mse),
    "fixed_codes": Case(lambda: [Recurrent(3, 9, leak=0.3), Linear(9, 4)], rules.readout()),
    "diagonal_last": Case(
        lambda: [Diagonal(3, 6, states=5, loss_at="last"), Linear(6, 4)], lr=3e-4
    ),
    "diagonal_codes": Case(
        lambda: [Diagonal(3, 6, states=5, loss_at="every"), Linear(6, 4)], lr=3e-4
    ),
    "diagonal_every": Case(
        lambda: [Diagonal(3, 6, states=5, loss_at="every"), Linear(6, 4)], rules.tpsgd_l2(),
        optimizer="adam", lr=0.003,
    ),
    "diagonal_stack": Case(
        lambda: [
            Diagonal(3, 6, states=5, loss_at="last", sequence=True),
            Diagonal(6, 5, loss_at="every", sequence=True),
            *(Recurrent(5, 6, leak=0.5), Linear(6, 4)),
        ],
        lr=3e-4,
    ),
    "diagonal_frozen": Case(lambda: [Diagonal(3, 6), Linear(6, 4)], rules.frozen()),
}  # fmt: skip


def samples(count: int = 30, steps: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, steps, 3, generator=generator)
    y = torch.arange(count) % 4
    return x + 0.5 * y[:, None, None], y


def write(recipe: StepRecipe, folder: Path) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in sources(recipe).items():
        (folder / name).write_text(text)
    return folder


def program(folder: Path, flags: Sequence[str] = SANITIZED, compiler: str = "gcc") -> Path:
    path = folder / "run"
    subprocess.run(
        [compiler, *flags, "-I", folder, HARNESS, folder / "net.c", "-o", path], check=True
    )
    return path


def run(
    path: Path, sequences: list[tuple[bool, Tensor, int]], lr: float, emulator: Sequence[str] = ()
) -> bytes:
    """What the program writes after it has learned from sequences, or has only looked at them."""
    stream = [np.array([len(sequences), ALL], np.uint32), np.float32(lr)]
    for learn, x, label in sequences:
        stream += [np.array([learn, len(x), label], np.uint32), x.float().contiguous().numpy()]
    data = b"".join(part.tobytes() for part in stream)
    done = subprocess.run(
        [*emulator, path], input=data, capture_output=True, check=True, timeout=60
    )
    assert not done.stderr
    return done.stdout


class Trained(NamedTuple):
    model: nn.Sequential
    record: Any
    codes: dict[int, Tensor]


def trained(case: Case, x: Tensor, y: Tensor, dtype: torch.dtype) -> Trained:
    model, codes = case.model(dtype), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = tpsgd.fit(
            model, (x.to(dtype), y), rule=keeping_codes(case.rule, codes),
            order=tpsgd.simultaneous, optimizer=OPTIMIZERS[case.optimizer], lr=case.lr,
            epochs=1, batch_size=1, seed=case.seed, loss=case.loss, progress=False,
        )  # fmt: skip
    return Trained(model, record, codes)


def learned_numbers(result: Trained, recipe: StepRecipe) -> Tensor:
    """Weights, and class codes that learn, as they lie in the state of the C."""
    blocks = zip(split(result.model), recipe.blocks, strict=True)
    each = [p for b, r in blocks if r.learns for p in b.layer.parameters()]
    return torch.cat([p.detach().flatten() for p in (*each, *result.codes.values())]).double()


def measures(recipe: StepRecipe) -> bool:
    """Whether the first sequence only sets the size of a readout."""
    return any(
        block.local is not None and block.local.target > 0 and block.recurrent
        and getattr(block.layer, "loss_at", "every") != "last"
        for block in recipe.blocks
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    with_full(CASES, CASES.keys() - {"leaky", "fixed_codes", "paper_drtp", "diagonal_stack"}),
)
def test_c_learns_what_fit_learns(name: str, tmp_path: Path) -> None:
    case, (x, y) = CASES[name], samples()
    recipe = case.recipe()
    order = torch.cat(list(permutation(len(x), Key(case.seed, 0, 0)))).tolist()
    sequences = [(True, x[i], int(y[i])) for i in order]
    sequences = sequences[: measures(recipe)] + sequences + [(False, x[i], 0) for i in range(4)]
    out = run(program(write(recipe, tmp_path)), sequences, case.lr)

    count, words = len(sequences) - 4, 1 + len(recipe.blocks)
    numbers = torch.frombuffer(bytearray(out), dtype=torch.float32)
    answers = numbers[: count * words].view(torch.int32).view(-1, words)[:, 0]
    assert answers.tolist() == [7] * measures(recipe) + [0] * (count - measures(recipe))
    logits, weights = numbers[count * words :].split([16, recipe.learned])
    losses = numbers[: count * words].view(-1, words)[measures(recipe) :, 1:].mean(0)

    exact, rounded = (trained(case, x, y, dtype) for dtype in (torch.float64, torch.float32))
    reference, first = learned_numbers(exact, recipe), Trained(case.model(), None, {})
    torchs = (learned_numbers(rounded, recipe) - reference).abs().max()
    moved = reference[: recipe.parameters] - learned_numbers(first, recipe)
    assert moved.abs().max() > 0.01  # something was learned
    assert (weights - reference).abs().max() <= max(4 * float(torchs), 2e-6)
    with torch.no_grad():
        expected = connect(exact.model.eval())(x[:4].double())
    assert torch.allclose(logits.view(4, 4).double(), expected, atol=2e-5)
    recorded = {epoch.block - 1: epoch.loss for epoch in exact.record.history}
    for number, loss in recorded.items():
        assert float(losses[number]) == pytest.approx(loss, rel=1e-4, abs=1e-5)


def test_outputs_of_small_and_large_inputs(tmp_path: Path) -> None:
    """Where the norm divides by little more than its epsilon, and where the gate is saturated."""
    case, (x, _) = CASES["diagonal_last"], samples(3, 20)
    reader, model = CompiledReader(write(case.recipe(), tmp_path)), case.model(torch.float64)
    for size in (1e-4, 0.01, 1.0, 20.0):
        outputs = torch.stack([reader.forward(size * sequence) for sequence in x])
        with torch.no_grad():
            assert torch.allclose(outputs.double(), model(size * x.double()), atol=5e-6)


def test_cosine_sine_and_erf_are_within_rounding(tmp_path: Path) -> None:
    folder = write(CASES["diagonal_last"].recipe(), tmp_path)
    (folder / "functions.c").write_text(
        '#include "net.h"\n#include "tpsgd.h"\n'
        "void turn(float x, float *y) { tps_turn(x, y, y + 1); y[2] = tps_erf(x); }\n"
    )
    library = folder / "functions.so"
    flags = ["-std=c99", "-O2", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, folder / "functions.c", "-o", library], check=True)
    functions: Any = ctypes.CDLL(str(library))
    functions.turn.argtypes = [ctypes.c_float, ctypes.c_void_p]
    angles, y = np.linspace(-20, 20, 8001, dtype=np.float32), np.zeros(3, np.float32)
    for angle in angles.tolist():
        functions.turn(angle, y.ctypes.data)
        expected = math.cos(angle), math.sin(angle), math.erf(angle)
        assert np.abs(y - np.array(expected)).max() < 3e-7, angle
    functions.turn(math.inf, y.ctypes.data)
    assert np.isnan(y[:2]).all()


def test_sequences_may_have_any_length(tmp_path: Path) -> None:
    """A long sequence needs no more memory, and means over time are over its own steps."""
    case = CASES["leaky"]
    recipe, (x, y) = case.recipe(), samples(6, 50)
    reader = CompiledReader(write(recipe, tmp_path))
    for i in torch.cat(list(permutation(len(x), Key(0, 0, 0)))).tolist():
        reader.step(x[i], y[i], case.lr)
    exact = trained(case, x, y, torch.float64)
    assert (reader.weights - learned_numbers(exact, recipe)).abs().max() < 5e-6
    assert reader.ram == layout(recipe).ram_bytes  # the compiler has checked it, too


@pytest.mark.full
@pytest.mark.parametrize("name", ["paper_drtp", "diagonal_stack"])
def test_same_bits_from_every_compiler(name: str, tmp_path: Path) -> None:
    case, (x, y) = CASES[name], samples(12)
    folder = write(case.recipe(), tmp_path)
    sequences = [(True, a, int(b)) for a, b in zip(x, y, strict=True)]
    builds = [("gcc", ["-std=c99", "-O0"]), ("gcc", ["-std=gnu11", "-O3", "-march=native"])]
    if shutil.which("clang"):
        builds.append(("clang", [*STRICT, "-O2"]))
    outs = {run(program(folder, flags, cc), sequences, case.lr) for cc, flags in builds}
    assert len(outs) == 1


@pytest.mark.full
@pytest.mark.skipif(
    not (shutil.which("arm-none-eabi-gcc") and shutil.which("qemu-system-arm")),
    reason="arm-none-eabi-gcc and qemu-system-arm are not installed",
)
def test_same_bits_on_a_cortex_m4(tmp_path: Path) -> None:
    case, (x, y) = CASES["diagonal_stack"], samples(12)
    folder, board = write(case.recipe(), tmp_path), HARNESS.with_name("cortex_m")
    sequences = [(True, a, int(b)) for a, b in zip(x, y, strict=True)]
    here = run(program(folder, ["-std=c99", "-O1"]), sequences, case.lr)
    flags = ["-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16", "-O2"]
    flags += ["-std=c99", "--specs=rdimon.specs", "-T", str(board / "mps2.ld")]
    elf = program(folder, [*flags, str(board / "start.c")], "arm-none-eabi-gcc")
    emulator = ["qemu-system-arm", "-M", "mps2-an386", "-nographic", "-monitor", "none"]
    emulator += ["-serial", "none", "-semihosting", "-kernel"]
    assert run(elf, sequences, case.lr, emulator) == here


def test_codes_of_time_steps_are_those_of_projections(tmp_path: Path) -> None:
    """With W = 0 and no leak, l2's first gradient of the biases is minus the mean of the codes."""

    def layers() -> list[nn.Module]:
        cell = Recurrent.paper(1, 11, init="zeros")
        return [cell, Linear(11, 3)]

    case = Case(layers, rules.tpsgd_l2(projection=projections.uniform()), seed=2**40 + 7)
    recipe = read_model(case.model(), case.rule, (1, 1), seed=case.seed)
    reader = CompiledReader(write(recipe, tmp_path))
    for step in range(3):
        codes = [projections.uniform()((11,), 3, Key(case.seed, 0, t)) for t in range(step + 1)]
        expected = (0.5 - torch.stack(codes)[:, 2]).mean(0) * 0.25  # y = sigma(0), times its slope
        reader.net.net_begin(reader.state)
        reader.step(torch.zeros(step + 1, 1), torch.tensor(2), 1.0)
        moved = -reader.weights[11 + 121 : 11 + 121 + 11]
        assert torch.allclose(moved, expected, atol=1e-6)


def test_mistakes_leave_the_weights_as_they_were(tmp_path: Path) -> None:
    reader = CompiledReader(write(CASES["rnn"].recipe(), tmp_path))
    before, (x, y) = reader.weights, samples(2)
    broken = x[0].clone()
    broken[3, 1] = math.nan
    with pytest.raises(TpsgdError, match="BAD_INPUT"):
        reader.step(broken, y[0], 0.1)
    for rate in (math.inf, math.nan, -0.1):
        with pytest.raises(TpsgdError, match="BAD_RATE"):
            reader.step(x[0], y[0], rate)
    with pytest.raises(TpsgdError, match="BAD_LABEL"):
        reader.step(x[0], torch.tensor(4), 0.1)
    with pytest.raises(TpsgdError, match="BAD_INPUT"):
        reader.forward(broken)
    assert torch.equal(reader.weights, before)
    reader.step(x[0], y[0], 0.1)  # the next sequence is read as if nothing had happened
    again = CompiledReader(tmp_path)
    again.step(x[0], y[0], 0.1)
    assert torch.equal(reader.weights, again.weights) and not torch.equal(reader.weights, before)


def test_an_error_lasts_until_the_next_sequence(tmp_path: Path) -> None:
    """`net_finish` after a step that was refused does not learn from the others."""
    reader = CompiledReader(write(CASES["rnn"].recipe(), tmp_path))
    net, state, arena, before = reader.net, reader.state, reader.arena, reader.weights
    good, bad = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)(1, math.inf, 3)
    loss = (ctypes.c_float * 3)()
    finish = (state, arena, 1, 0.1, ALL, loss)
    net.net_start(arena)
    assert net.net_finish(*finish) == 8  # no step has been read
    for calls, answer in (
        ([(good, 1), (bad, 1), (good, 1)], 1),
        ([(good, 1), (good, 2)], 8),  # another label
    ):
        net.net_start(arena)
        for x, label in calls:
            net.net_read(state, arena, x, label, ALL)
        assert net.net_finish(*finish) == answer
    net.net_start(arena)
    assert net.net_look(state, arena, good) == 0
    assert net.net_read(state, arena, good, 1, ALL) == 8
    assert torch.equal(reader.weights, before)
    net.net_start(arena)
    assert net.net_read(state, arena, good, 1, ALL) == 0
    assert net.net_finish(*finish) == 0
    assert net.net_finish(*finish) == 8  # one step cannot be taken twice
    assert not torch.equal(reader.weights, before)


def test_divergence_is_refused(tmp_path: Path) -> None:
    """States that grow without bound end the sequence, and no block learns."""
    layers = [Recurrent(3, 9, leak=1.0, activation=nn.ReLU, init="zeros"), Linear(9, 4)]
    with torch.no_grad():
        layers[0].cells[0].weight_h.fill_(30.0)  # type: ignore
        layers[0].cells[0].weight_x.fill_(30.0)  # type: ignore
    recipe = read_model(nn.Sequential(*layers), rules.readout(scale=1.0), (7, 3))
    reader = CompiledReader(write(recipe, tmp_path))
    before = reader.weights
    with pytest.raises(TpsgdError, match="DIVERGED"):
        reader.step(torch.ones(40, 3), torch.tensor(0), 0.1)
    with pytest.raises(TpsgdError, match="DIVERGED"):
        reader.forward(torch.ones(40, 3))
    assert torch.equal(reader.weights, before)


def test_divergence_of_the_head_is_refused_before_the_cell_learns(tmp_path: Path) -> None:
    layers = [Recurrent.paper(3, 9), Linear(9, 4)]
    with torch.no_grad():
        layers[1].weight.fill_(1e18)  # type: ignore
    recipe = read_model(nn.Sequential(*layers), rules.tpsgd_l2(projection=BINARY), (7, 3))
    reader = CompiledReader(write(recipe, tmp_path))
    before = reader.weights
    with pytest.raises(TpsgdError, match="DIVERGED"):
        reader.step(torch.ones(7, 3), torch.tensor(0), 0.1)
    assert torch.equal(reader.weights, before)


def test_blocks_learn_by_their_bits(tmp_path: Path) -> None:
    recipe, (x, y) = CASES["stack"].recipe(), samples(1)
    reader = CompiledReader(write(recipe, tmp_path))
    sizes = [*(b.weights for b in recipe.blocks), *(4 * b.learned_codes for b in recipe.blocks)]
    for i in range(len(recipe.blocks)):
        before = reader.weights
        reader.step(x[0], y[0], 0.1, 1 << i)
        pairs = zip(before.split(sizes), reader.weights.split(sizes), strict=True)
        moved = [not torch.equal(a, b) for a, b in pairs]
        blocks = len(recipe.blocks)
        assert moved == [j % blocks == i and n > 0 for j, n in enumerate(sizes)]


def test_a_record_goes_back_into_the_model(tmp_path: Path) -> None:
    case, (x, y) = CASES["stack"], samples(5)
    reader = CompiledReader(write(case.recipe(), tmp_path))
    for a, b in zip(x, y, strict=True):
        reader.step(a, b, 0.01)
    record, model = reader.save(), case.model()
    assert read_weights(model, record) == 4
    assert torch.allclose(model(x[:1])[0], reader.forward(x[0]), atol=1e-5)
    other = CompiledReader(tmp_path)
    other.load(record)
    assert torch.equal(other.weights, reader.weights)
    damaged = bytearray(record)
    damaged[40] ^= 1
    before = other.weights
    with pytest.raises(TpsgdError, match="BAD_RECORD"):
        other.load(bytes(damaged))
    assert torch.equal(other.weights, before)


def test_a_class_may_come_later(tmp_path: Path) -> None:
    case, (x, y) = CASES["leaky"], samples(8)
    recipe = read_model(case.model(), case.rule, (7, 3), spare=1)
    reader = CompiledReader(write(recipe, tmp_path))
    plain = CompiledReader(write(case.recipe(), tmp_path / "plain"))
    for a, b in zip(x, y, strict=True):
        reader.step(a, b, 0.05)
        plain.step(a, b, 0.05)
    assert torch.equal(reader.forward(x[0]), plain.forward(x[0]))
    with pytest.raises(TpsgdError, match="BAD_LABEL"):
        reader.step(x[0], torch.tensor(4), 0.05)
    reader.add_class()
    assert torch.equal(reader.forward(x[0])[:4], plain.forward(x[0]))
    for _ in range(30):
        reader.step(x[0], torch.tensor(4), 0.05)
    assert int(reader.forward(x[0]).argmax()) == 4
    with pytest.raises(TpsgdError, match="NO_SPACE"):
        reader.add_class()


@pytest.mark.full
def test_samples_calibrate_readouts_at_export(tmp_path: Path) -> None:
    """With the first sequence as `samples`, the device need not read it twice."""
    for name in ("stack", "diagonal_stack"):
        case, (x, y) = CASES[name], samples(3)
        recipe = read_model(case.model(), case.rule, (7, 3), samples=x[:1])
        assert not any(block.local and block.local.gain == 0 for block in recipe.blocks)
        reader = CompiledReader(write(recipe, tmp_path / f"{name}_with"))
        measuring = CompiledReader(
            write(read_model(case.model(), case.rule, (7, 3)), tmp_path / name)
        )
        for a, b in zip(x, y, strict=True):
            reader.step(a, b, 1e-3)
            measuring.step(a, b, 1e-3)
        assert torch.allclose(reader.weights, measuring.weights, atol=1e-6)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Diagonal(3, 6), Linear(6, 4)], 'loss at the "mean" over time'),
        ([Recurrent(3, 1), Recurrent(1, 5), Linear(5, 4)], "needs sequence=True"),
        ([Recurrent(3, 5, bidirectional=True), Linear(10, 4)], "in one direction"),
        ([Recurrent(3, 5, activation=nn.GELU), Linear(5, 4)], "GELU is not exported"),
    ],
)
def test_what_cannot_be_read_step_by_step_is_refused(layers: list[Any], message: str) -> None:
    with pytest.raises(TpsgdError, match=message):
        layout(read_model(nn.Sequential(*layers), rules.readout(), (7, 3)))


@pytest.mark.parametrize("first", [Recurrent(9, 5), nn.RNN(9, 5, batch_first=True)])
def test_tokens_are_refused_by_what_they_are(first: nn.Module) -> None:
    with pytest.raises(TpsgdError, match=r"^block 1 .* reads tokens, .*shape \(steps, 9\) are"):
        read_model(nn.Sequential(first, Linear(5, 4)), rules.readout(), (7,))


def test_orthogonal_codes_of_every_step_are_refused() -> None:
    rule = rules.drtp(projection=projections.orthogonal())
    with pytest.raises(TpsgdError, match="table without end"):
        read_model(CASES["leaky"].model(), rule, (7, 3))


def test_export_c_checks_a_recurrent_net_beside_fit(tmp_path: Path) -> None:
    exported = tpsgd.export.c(
        CASES["leaky"].model(), tmp_path / "net", shape=(7, 3), ram="4KB", spare=1
    )
    assert "run beside tpsgd.fit" in exported.checked
    assert exported.memory is not None and exported.memory.ram_bytes < 4096
    with pytest.raises(TpsgdError, match="arena: sums of gradients"):
        tpsgd.export.c(CASES["leaky"].model(), tmp_path / "small", shape=(7, 3), ram="1KB")
