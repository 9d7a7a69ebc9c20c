"""A head that learns from each sample once, in C, against ridge regression in float64."""

import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tpsgd
from tpsgd.common.errors import TpsgdError
from tpsgd_export.heads import reference
from tpsgd_export.heads.compiled import CompiledHead
from tpsgd_export.heads.recipe import HeadRecipe, most_features
from tpsgd_export.heads.source import encoded, read_encoder, sources
from tpsgd_export.to_c.compiled import FLAGS, compiler

needs_c = pytest.mark.skipif(compiler() is None, reason="no C compiler")
STRICT = ("-pedantic", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
SMALL = HeadRecipe(10, 24, 3, ridge=0.5, scale=0.3)


def samples(recipe: HeadRecipe, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Classes around different means."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, recipe.classes, count)
    means = np.random.default_rng(99).normal(size=(recipe.classes, recipe.inputs))
    x = means[labels] + 0.5 * rng.normal(size=(count, recipe.inputs))
    return x.astype(np.float32), labels


def learned(recipe: HeadRecipe, x, labels) -> CompiledHead:
    head = CompiledHead(sources(recipe), recipe.name)
    head.learn_all(x, labels)
    return head


def distance(weights, exact) -> float:
    return float(np.abs(weights - exact).max() / np.abs(exact).max())


@pytest.fixture(scope="module")
def digits():
    return tpsgd.data.load("digits")


def test_signs_are_those_of_the_hash_in_whole_numbers():
    recipe = HeadRecipe(40, 5, 2, seed=3)
    signs = reference.signs(recipe)
    for unit in range(5):
        for i in range(40):
            z = (unit * 2 + i // 32 + 3 * 0x9E3779B9) % 2**32
            z = (z ^ z >> 16) * 0x7FEB352D % 2**32
            z = (z ^ z >> 15) * 0x846CA68B % 2**32
            bit = (z ^ z >> 16) >> (31 - i % 32) & 1
            assert signs[unit, i] == 1 - 2 * bit
    assert abs(reference.signs(HeadRecipe(64, 512, 2)).mean()) < 0.02


@needs_c
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"features": 0, "scale": 1.0},
        {"inputs": 70, "seed": 7, "scale": 0.1},
    ],
)
def test_weights_are_those_of_ridge_regression_over_all_samples(changes):
    recipe = replace(SMALL, **changes)
    x, labels = samples(recipe, 300)
    h = reference.features(recipe, x)
    head = learned(recipe, x, labels)
    exact = reference.ridge(h, labels, recipe)
    assert distance(head.weights, exact) < 2e-5
    assert distance(reference.recursive(recipe, h, labels)[0], exact) < 1e-10
    # a wrong closed form is told apart
    assert distance(head.weights, reference.ridge(h, labels[::-1], recipe)) > 1e-2
    scores = np.array([head.scores(s) for s in x[:5]])
    np.testing.assert_allclose(scores, h[:5] @ head.weights.T.astype(np.float64), atol=1e-4)


@needs_c
@pytest.mark.parametrize("bound", [1.0, 1e6])
def test_samples_are_forgotten_as_in_float64_and_factors_are_bounded(bound):
    recipe = replace(SMALL, forgetting=0.95, bound=bound)
    x, labels = samples(recipe, 300)
    x[150:] = x[150:, ::-1]
    h = reference.features(recipe, x)
    exact, kept, bounded = reference.recursive(recipe, h, labels)
    assert 0.95 <= kept.min() < 0.97 and kept.max() > 0.995
    head = learned(recipe, x, labels)
    assert distance(head.weights, exact) < 1e-4
    if not bounded:  # then it is a regression in which each sample has its weight
        assert distance(exact, reference.ridge(h, labels, recipe, kept)) < 1e-9
    assert bounded == (bound == 1)


def test_the_closed_form_has_no_gradient():
    recipe = replace(SMALL, features=6)
    x, labels = samples(recipe, 50)
    h = torch.tensor(reference.features(recipe, x))
    kept = np.where(np.arange(50) % 3, 0.9, 1.0)
    counts = torch.tensor([np.prod(kept[i + 1 :]) for i in range(50)], dtype=torch.float64)
    y = torch.tensor(reference.one_hot(labels, 3))

    def largest_gradient(weights) -> float:
        w = torch.tensor(weights, requires_grad=True)
        loss = ((h @ w.T - y).square().sum(1) * counts).sum()
        loss = loss + recipe.ridge * float(np.prod(kept)) * w.square().sum()
        loss.backward()
        assert w.grad is not None
        return float(w.grad.abs().max())

    assert largest_gradient(reference.ridge(h.numpy(), labels, recipe, kept)) < 1e-9
    assert largest_gradient(reference.ridge(h.numpy(), labels, recipe)) > 1e-3


@needs_c
@pytest.mark.parametrize("forgetting", [1.0, 0.95])
def test_a_sample_of_weight_three_counts_as_three_samples(forgetting):
    recipe = replace(SMALL, forgetting=forgetting)
    x, labels = samples(recipe, 100)
    h, weights = reference.features(recipe, x), np.where(labels == 1, 3.0, 0.5)
    head = CompiledHead(sources(recipe))
    for sample, label, weight in zip(x, labels, weights, strict=True):
        head.learn(sample, label, weight)
    exact, *_ = reference.recursive(recipe, h, labels, weights)
    assert distance(head.weights, exact) < 1e-4
    if forgetting == 1:
        assert distance(exact, reference.ridge(h, labels, recipe, weights=weights)) < 1e-10
        twice = np.repeat(np.arange(100), np.where(labels == 1, 6, 1))  # in halves
        double = reference.ridge(h[twice], labels[twice], replace(recipe, ridge=2 * recipe.ridge))
        assert distance(exact, double) < 1e-10


@needs_c
def test_the_order_of_samples_does_not_matter():
    x, labels = samples(SMALL, 300)
    order = np.argsort(labels, kind="stable")
    by_class, mixed = learned(SMALL, x[order], labels[order]), learned(SMALL, x, labels)
    assert distance(by_class.weights, mixed.weights) < 2e-5


@needs_c
def test_a_class_that_comes_later_learns_as_if_it_had_been_there():
    recipe = replace(SMALL, classes=2, spare=1)
    x, labels = samples(SMALL, 200)
    order = np.argsort(labels == 2, kind="stable")
    x, labels = x[order], labels[order]
    first = int((labels < 2).sum())
    head = learned(recipe, x[:first], labels[:first])
    with pytest.raises(TpsgdError, match="BAD_LABEL"):
        head.learn(x[first], 2)
    before = head.scores(x[0])
    head.add_class()
    np.testing.assert_array_equal(head.scores(x[0]), [*before, 0])
    head.learn_all(x[first:], labels[first:])
    np.testing.assert_array_equal(head.weights, learned(SMALL, x, labels).weights)
    with pytest.raises(TpsgdError, match="NO_SPACE"):
        head.add_class()


@needs_c
@pytest.mark.parametrize("flags", [FLAGS, ("-Ofast",)], ids=["strict", "fast"])
def test_what_is_refused_changes_nothing(flags):
    x, labels = samples(SMALL, 20)
    head = CompiledHead(sources(SMALL), flags=flags)
    head.learn_all(x, labels)
    state = head.save()
    for number in (np.nan, np.inf, -np.inf, 2e9):
        bad = x[0].copy()
        bad[3] = number
        with pytest.raises(TpsgdError, match="BAD_INPUT"):
            head.learn(bad, 0)
        with pytest.raises(TpsgdError, match="BAD_INPUT"):
            head.scores(bad)
    with pytest.raises(TpsgdError, match="BAD_LABEL"):
        head.learn(x[0], 3)
    for weight in (0.0, -1.0, np.nan, np.inf, 2e6):
        with pytest.raises(TpsgdError, match="BAD_WEIGHT"):
            head.learn(x[0], 0, weight)
    for label in (-1, 1 << 16):
        with pytest.raises(TpsgdError, match="a label must be a whole number"):
            head.learn(x[0], label)
    with pytest.raises(TpsgdError, match="x must have 10 numbers, got 9"):
        head.learn(x[0][:9], 0)
    assert head.save() == state


@needs_c
@pytest.mark.parametrize("forgetting", [1.0, 0.9])
def test_no_input_makes_numbers_that_are_not_finite(forgetting):
    recipe = replace(SMALL, forgetting=forgetting, features=8, scale=0.05)
    rng = np.random.default_rng(0)
    head = CompiledHead(sources(recipe))
    x = np.where(rng.random((3000, 10)) < 0.5, 1e9, 10.0 ** rng.integers(-30, 9, (3000, 10)))
    x[::7] = 0.0
    x[1000:2000] = 1e9
    head.learn_all((x * rng.choice([-1, 1], x.shape)).astype(np.float32), np.arange(3000) % 3)
    assert np.isfinite(head.numbers).all()
    u, diagonal = head.numbers, np.cumsum(np.arange(1, recipe.units + 1)) - 1
    assert (u[diagonal] > 0).all()


@needs_c
def test_one_class_alone_does_not_drive_out_the_others_and_a_change_is_learned():
    recipe = replace(SMALL, forgetting=0.95)
    x, labels = samples(recipe, 600)
    test = samples(recipe, 200, seed=1)
    head = learned(recipe, x, labels)
    for _ in range(3):
        head.learn_all(x[labels == 0], labels[labels == 0])
    assert head.accuracy(*test) > 0.95
    moved, constant = learned(recipe, x, labels), learned(SMALL, x, labels)
    for each in (moved, constant):
        each.learn_all(x, (labels + 1) % 3)
    changed = test[0], (test[1] + 1) % 3
    assert moved.accuracy(*changed) > 0.95 > 0.8 > constant.accuracy(*changed)


@needs_c
@pytest.mark.full
@pytest.mark.parametrize("forgetting", [1.0, 0.999])
def test_a_hundred_thousand_samples_leave_it_as_good_as_in_float64(digits, forgetting):
    x, y = digits.train[0].flatten(1).numpy(), digits.train[1].numpy()
    recipe = HeadRecipe(64, 64, 10, scale=0.25, forgetting=forgetting)
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(len(y)) for _ in range(70)])[:100_000]
    head = learned(recipe, x[order], y[order])
    h = reference.features(recipe, x[order])
    if forgetting == 1:
        exact = reference.ridge(h, y[order], recipe)
    else:
        exact, *_ = reference.recursive(recipe, h, y[order])
    assert distance(head.weights, exact) < 2e-3
    test = digits.test[0].flatten(1).numpy(), digits.test[1].numpy()
    theirs = (reference.features(recipe, test[0]) @ exact.T).argmax(1) == test[1]
    assert head.accuracy(*test) == pytest.approx(theirs.mean(), abs=0.006)


@needs_c
def test_digits_are_learned_in_one_pass_within_12_kilobytes(digits, tmp_path):
    exported = tpsgd.export.one_pass(
        tmp_path, shape=(1, 8, 8), classes=digits.classes, ram="12KB", samples=digits.train[0]
    )
    assert exported.memory and exported.memory.ram_bytes <= 12 * 1024
    assert "ridge regression" in exported.checked
    head = CompiledHead(tmp_path)
    head.learn_all(*digits.train)
    assert (head.samples, head.ram) == (len(digits.train[1]), exported.memory.ram_bytes)
    assert head.accuracy(*digits.test) > 0.89
    assert "9 9" in (tmp_path / "head.h").read_text()


@needs_c
def test_inputs_are_scaled_as_for_training(tmp_path):
    scaling = {"method": "standard", "shift": [1.0, -2.0, 300.0], "scale": [2.0, 0.5, 10.0]}
    inputs = {"columns": ["a", "*/ b", "c"], "scaling": scaling}
    classes = ("low", "high */")
    exported = tpsgd.export.one_pass(
        tmp_path, shape=(3,), classes=classes, features=4, inputs=inputs
    )
    assert "head_scale standardises" in exported.note
    assert exported.memory and exported.memory.flash_bytes == 6 * 4
    head = CompiledHead(tmp_path)
    np.testing.assert_allclose(head.scale([3.0, -1.0, 320.0]), [1, 2, 2], rtol=1e-6)
    header = (tmp_path / "head.h").read_text()
    assert "x[0] a: shift 1, scale 2" in header and "0 low, 1 high" in header
    with pytest.raises(TpsgdError, match="without a scaling"):
        CompiledHead(sources(SMALL)).scale(np.zeros(10))
    with pytest.raises(TpsgdError, match="has 3 columns, and the net 4 inputs"):
        tpsgd.export.one_pass(tmp_path, shape=(4,), classes=2, inputs=inputs, overwrite=True)
    bytes_ = {"scaling": {"method": "bytes"}}
    tpsgd.export.one_pass(tmp_path, shape=(1, 2, 2), classes=2, inputs=bytes_, overwrite=True)
    np.testing.assert_allclose(CompiledHead(tmp_path).scale([0, 51, 255, 102]), [0, 0.2, 1, 0.4])


@needs_c
def test_a_frozen_encoder_gives_the_head_its_numbers(digits, tmp_path):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean = torch.rand(4)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 12), nn.Tanh(),
    )  # fmt: skip
    for features in (0, 20):
        exported = tpsgd.export.one_pass(
            tmp_path, shape=(1, 8, 8), classes=10, model=model, features=features, overwrite=True
        )
        head = CompiledHead(tmp_path)
        x, y = digits.train[0][:100], digits.train[1][:100].numpy()
        head.learn_all(x, y)
        recipe = HeadRecipe(12, features, 10, scale=12**-0.5 if features else 1.0)
        h = reference.features(recipe, encoded(model, x).numpy())
        assert distance(head.weights, reference.ridge(h, y, recipe)) < 1e-4
        assert exported.memory and exported.memory.ram_bytes == head.ram
        state = head.save()
    assert model.training
    with torch.no_grad():
        next(model.parameters())[0] += 1
    tpsgd.export.one_pass(
        tmp_path, shape=(1, 8, 8), classes=10, model=model, features=20, overwrite=True
    )
    with pytest.raises(TpsgdError, match="another head"):  # its encoder has other weights
        CompiledHead(tmp_path).load(state)


@needs_c
def test_a_state_is_kept_and_a_damaged_one_is_refused():
    x, labels = samples(SMALL, 50)
    head, other = learned(SMALL, x, labels), CompiledHead(sources(SMALL))
    state = head.save()
    other.load(state)
    np.testing.assert_array_equal(other.numbers, head.numbers)
    assert other.samples == 50
    for place in (0, len(state) // 2, len(state) - 20, len(state) - 1):
        damaged = bytearray(state)
        damaged[place] ^= 4
        with pytest.raises(TpsgdError, match="another head, or is damaged"):
            other.load(bytes(damaged))
    with pytest.raises(TpsgdError, match="has 1,"):
        other.load(state[:-1])
    stranger = CompiledHead(sources(replace(SMALL, seed=1)))
    with pytest.raises(TpsgdError, match="another head"):
        stranger.load(state)
    np.testing.assert_array_equal(other.numbers, head.numbers)


@needs_c
def test_the_program_is_strict_c_and_takes_names_of_its_prefix_only(tmp_path):
    name = "gait"
    for recipe in (replace(SMALL, name=name), replace(SMALL, name=name, features=0)):
        for file, text in sources(recipe).items():
            (tmp_path / file).write_text(text)
        source, target = tmp_path / f"{name}.c", tmp_path / "head.o"
        command = compiler() or []
        for standard in ("c99", "c11"):
            flags = [f"-std={standard}", *STRICT, "-Os", "-c", str(source), "-o", str(target)]
            done = subprocess.run([*command, *flags], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        nm = shutil.which("nm")
        if nm:
            said = subprocess.run([nm, str(target)], capture_output=True, text=True).stdout
            kinds = [line.split()[-2:] for line in said.splitlines()]
            assert not [symbol for kind, symbol in kinds if kind in "UDBbC"]
            assert all(symbol.startswith(f"{name}_") for kind, symbol in kinds if kind == "T")
    if shutil.which("g++"):
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-c", str(source)]
        done = subprocess.run(["g++", *flags, "-o", str(target)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@needs_c
def test_two_heads_link_into_one_program(tmp_path):
    texts = sources(SMALL) | sources(replace(SMALL, name="other", features=4))
    texts["main.c"] = (
        '#include "head.h"\n#include "other.h"\nstatic head_state a; static other_state b;\n'
        "int main(void) { head_begin(&a); other_begin(&b); return (int)(b.classes - a.classes); }\n"
    )
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    programs = [str(tmp_path / file) for file in ("main.c", "head.c", "other.c")]
    program = str(tmp_path / "program")
    subprocess.run([*(compiler() or []), *programs, "-o", program], check=True)
    assert subprocess.run([program]).returncode == 0


def test_the_most_features_that_fit_into_a_budget():
    count = most_features("40KB", 10)
    assert HeadRecipe(1, count, 10).memory.ram_bytes <= 40 * 1024
    assert HeadRecipe(1, count + 1, 10).memory.ram_bytes > 40 * 1024
    with pytest.raises(TpsgdError, match="does not hold a head of one feature"):
        most_features("100", 10)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ridge": 0}, "ridge must be a number from"),
        ({"ridge": float("nan")}, "ridge must be a number from"),
        ({"forgetting": 1.5}, r"forgetting must be a number from 0\.5 to 1"),
        ({"features": -1}, "features must be a whole number from 0"),
        ({"features": 2.5}, "features must be a whole number"),
        ({"classes": 0}, "classes must be a whole number from 1"),
        ({"spare": -1}, "spare must be a whole number"),
        ({"seed": 1 << 32}, "seed must be a whole number"),
        ({"name": "Head"}, "name must have small letters"),
        ({"name": "net"}, "that of the net's own files"),
        ({"ram": "1KB", "features": 100}, "a head of 100 features needs"),
        ({"shape": (0,)}, "shape must be a sample's"),
        ({"samples": torch.zeros(3, 5)}, r"samples must be one or more inputs of shape \(4,\)"),
        ({"model": nn.Conv2d(1, 2, 3), "shape": (1, 8, 8)}, "put nn.Flatten"),
    ],
)
def test_what_makes_no_head_is_refused_and_nothing_is_written(changes, words, tmp_path):
    arguments = {"shape": (4,), "classes": 2, "features": 8} | changes
    with pytest.raises(TpsgdError, match=words):
        tpsgd.export.one_pass(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_an_encoder_that_is_not_exported_is_refused():
    with pytest.raises(TpsgdError, match="GELU"):
        read_encoder(nn.Sequential(nn.Linear(4, 4), nn.GELU()), (4,))


PREDICTS = """
#include <stdio.h>
#include "head.h"
static head_state state;
static head_arena arena;
int main(void)
{
    static const float samples[3][2] = {{2, 0}, {0, 2}, {-2, -2}}, bad[2] = {2e9f, 0};
    float scores[HEAD_CLASSES];
    uint16_t i, label;
    head_begin(&state);
    for (i = 0; i < 3; i++) head_learn(&state, &arena, samples[i], i, 1.0f);
    for (i = 3; i-- > 0;)
        if (!head_predict(&state, &arena, samples[i], scores, &label))
            puts(head_class_names[label]);
    printf("%d [%s]\\n", head_predict(&state, &arena, bad, scores, &label), head_class_names[3]);
    return 0;
}
"""


@needs_c
@pytest.mark.parametrize("compile_with", [("gcc", "-std=c99"), ("g++", "-x", "c++")])
def test_a_program_predicts_a_class_by_its_name(tmp_path, compile_with):
    if shutil.which(compile_with[0]) is None:
        pytest.skip(f"no {compile_with[0]}")
    names = ("left", 'a "$n" */', "down")
    tpsgd.export.one_pass(tmp_path, shape=(2,), classes=names, features=0, spare=1, ridge=0.1)
    (tmp_path / "main.c").write_text(PREDICTS)
    files = [str(tmp_path / file) for file in ("main.c", "head.c")]
    command = [*compile_with, *STRICT, *files, "-o", str(tmp_path / "main")]
    subprocess.run(command, check=True)
    said = subprocess.run([str(tmp_path / "main")], capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == [*reversed(names), "1 []"]
