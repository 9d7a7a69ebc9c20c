"""A torch without one of its internals trains the same weights, with one warning for each."""

import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from helpers import points, seeded
from torch import nn

import tpsgd
from tpsgd import losses
from tpsgd.maths.kernels import torch_internals
from tpsgd.maths.kernels.torch_internals import fused_kernel, internal

FAST = ("engine.fast.tape",)
OPTIMIZERS = {
    "_fused_adam_": torch.optim.Adam,
    "_fused_adamw_": torch.optim.AdamW,
    "_fused_sgd_": partial(torch.optim.SGD, momentum=0.9),
    "_C._VariableFunctions": torch.optim.Adam,
    "_C.TensorBase": torch.optim.Adam,
}


@pytest.fixture(autouse=True)
def _warnings_again():
    torch_internals._warn.cache_clear()
    yield
    torch_internals._warn.cache_clear()


def weights(optimizer):
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    tpsgd.fit(model, points(96), optimizer=partial(optimizer, lr=1e-2), epochs=20, batch_size=32)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def absent(name):
    """`internal` of a torch that has none of this name."""

    def look_up(other):
        if other == name:
            torch_internals._warn(name)
            return None
        return internal(other)

    return look_up


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_absent_name_costs_time_only(name, monkeypatch):
    expected = weights(OPTIMIZERS[name])
    for module in ("maths.kernels.torch_internals", *FAST):
        monkeypatch.setattr(f"tpsgd.{module}.internal", absent(name))
    with pytest.warns(UserWarning, match=name.split(".")[-1]) as caught:
        changed = weights(OPTIMIZERS[name])
    assert len(caught) == 1
    torch.testing.assert_close(changed, expected)


def test_a_name_that_torch_has_not_is_none_with_one_warning():
    with pytest.warns(UserWarning, match="_no_such_kernel_"):
        assert internal("_no_such_kernel_") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert internal("_no_such_kernel_") is None


def test_a_kernel_with_other_arguments_is_not_taken():
    numbers = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    assert fused_kernel("_fused_sgd_", 3, **numbers, **flags) is torch._fused_sgd_
    with pytest.warns(UserWarning, match="_fused_sgd_"):
        assert fused_kernel("_fused_sgd_", 3, **numbers, **flags, warmth=1.0) is None


def test_a_kernel_that_takes_empty_lists_is_taken(monkeypatch):
    def kernel(params, grads, *, lr):
        assert not params and not grads

    monkeypatch.setattr(torch_internals, "internal", lambda name: kernel)
    assert fused_kernel("_fused_sgd_", 2, lr=0.1) is kernel


def test_labels_are_subtracted_without_a_test_for_vmap(monkeypatch):
    y, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
    expected = losses.cross_entropy.grad(y, labels)
    monkeypatch.setattr(losses, "_batched", None)
    torch.testing.assert_close(losses.cross_entropy.grad(y, labels), expected)


def test_an_optimizer_without_lists_of_hooks_steps_by_itself(monkeypatch):
    expected = weights(torch.optim.Adam)
    monkeypatch.delattr(torch.optim.Optimizer, "_optimizer_step_pre_hooks", raising=False)
    from tpsgd.engine.fast.optimizer_steps import quick_step
    from tpsgd.maths.kernels.fused_optimizers import hooked

    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))], lr=0.1, fused=True)
    assert not hooked(optimizer)
    del optimizer._optimizer_step_pre_hooks
    assert hooked(optimizer) and quick_step(optimizer) is None
    torch.testing.assert_close(weights(torch.optim.Adam), expected)


WITHOUT = """
import torch, torch._subclasses.fake_tensor as fakes, torch.utils._python_dispatch as modes
from torch import nn
hidden = {"FakeTensor": fakes, "FakeTensorMode": fakes, "_disable_current_modes": modes}
values = {name: vars(module).pop(name) for name, module in hidden.items()}
del torch._foreach_copy_
import tpsgd.memory.plan
from tpsgd_peers import fit_dladmm
for name, module in hidden.items():  # torch itself needs them
    setattr(module, name, values[name])
x, y = torch.randn(40, 6), torch.arange(40) % 3
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
print(tpsgd.fit(model, (x, y), epochs=2).memory_choice)
fit_dladmm(model, (x, y), iterations=2)
for refused in (lambda: tpsgd.plan(model, (6,)), lambda: tpsgd.fit(model, (x, y), memory="1MB")):
    try:
        refused()
    except tpsgd.TpsgdError as error:
        print(error)
"""


def test_a_torch_without_fake_tensors_trains_and_does_not_plan():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    choice, *refusals = done.stdout.splitlines()
    assert "inputs are recomputed" in choice and len(refusals) == 2
    assert all("memory cannot be planned, nor kept within a budget" in r for r in refusals)
