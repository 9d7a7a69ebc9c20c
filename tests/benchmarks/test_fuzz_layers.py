"""A few random layers; `benchmarks/fuzz_layers.py` has thousands, with older vector units too."""

import sys
from collections import deque
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import fuzz_layers


def outcome(units: str, threads: int, seeds: range):
    return deque(fuzz_layers.run(units, threads, seeds), maxlen=1)[0]


@pytest.mark.parametrize(
    ("units", "threads", "count"),
    [
        ("avx2", 1, 20),
        *(
            pytest.param(u, t, 150, marks=pytest.mark.full)
            for u in fuzz_layers.UNITS
            for t in (1, 2)
        ),
    ],
)
def test_random_layers_learn_by_the_right_gradients(units, threads, count):
    result = outcome(units, threads, range(1000, 1000 + count))
    assert result.cases == count and not result.bad


def test_cases_repeat_and_are_of_every_kind():
    cases = [fuzz_layers.draw(seed) for seed in range(200)]
    kinds = {type(case.layer[0]).__name__ for case in cases}
    assert kinds >= {"Conv1d", "Conv2d", "Linear", "Residual", "Recurrent", "Diagonal"}
    assert fuzz_layers.draw(7).text == cases[7].text
    assert torch.equal(fuzz_layers.draw(7).x, cases[7].x)


def test_a_wrong_gradient_is_seen(monkeypatch):
    def by_onednn(layer):
        zeros = getattr(layer, "padding_mode", None) == "zeros"
        return type(layer) is nn.Conv2d and layer.in_channels > 1 and zeros

    seed = next(s for s in range(99) if by_onednn(fuzz_layers.draw(s).layer[0]))
    assert fuzz_layers.difference(fuzz_layers.draw(seed)) < 1
    right = torch.ops.aten.convolution_backward
    monkeypatch.setattr(
        torch.ops.aten, "convolution_backward", lambda *a: (None, right(*a)[1] * 1.01, None)
    )
    assert fuzz_layers.difference(fuzz_layers.draw(seed)) > 1


def test_a_process_that_dies_is_a_bad_case_and_the_next_one_runs(monkeypatch, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys, json\n"
        "start, count = int(sys.argv[2]), int(sys.argv[3])\n"
        "for seed in range(start, start + count):\n"
        "    print(json.dumps([seed, None]), flush=True)\n"
        "    os.abort() if seed == 3 else print(json.dumps([seed, 1e-9]), flush=True)\n"
    )
    monkeypatch.setattr(fuzz_layers, "__file__", str(script))
    result = outcome("default", 1, range(2, 6))
    assert result.cases == 4 and set(result.bad) == {3}
