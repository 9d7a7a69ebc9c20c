"""How much of the library one has to read to follow a batch, by a trace of its calls."""

import sys
from pathlib import Path

import pytest
import torch
from helpers import mlp, points

import tpsgd

HOME = str(Path(tpsgd.__file__).parent)
FRAMES, FILES = 10, 14  # two of the files, figures and optimizers, are maths of one screen


class Plain(torch.optim.Optimizer):
    """SGD at 0.1."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1)


STEP = Plain.step.__code__  # torch wraps it when the first one is made


@pytest.fixture(scope="module")
def calls():
    """Of each optimizer step: frames of the library, `fit` included; its files since the last."""
    depths, files, since = [], [], set()

    def profile(frame, event, arg):
        if event != "call":
            return
        file = frame.f_code.co_filename
        if file.startswith(HOME):
            since.add(file)
        elif frame.f_code is STEP:
            depth, outer = 0, frame.f_back  # `fit` itself counts
            while outer is not None:
                depth, outer = depth + outer.f_code.co_filename.startswith(HOME), outer.f_back
            depths.append(depth)
            files.append(set(since))
            since.clear()

    fit, model, data = tpsgd.fit, mlp(6, 8, 3), points(64)
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        fit(model, data, rule=tpsgd.rules.readout(), optimizer=Plain, epochs=1, batch_size=16)
    finally:
        sys.setprofile(before)
    return depths, files


def test_a_step_is_ten_calls_deep_at_most(calls):
    depths, _ = calls
    assert len(depths) == 2 * 4 and max(depths) <= FRAMES


def test_a_batch_is_in_a_few_files(calls):
    """Between two steps of the same block; of its first step comes the rest of `fit` too.

    After the first step, `fast` is asked once for a quicker one.
    """
    _, files = calls
    assert all(3 < len(files[i]) <= FILES for i in (2, 3, 6, 7)), max(files[2:4], key=len)
    assert all(len(files[i]) <= FILES + 1 for i in (1, 5))
