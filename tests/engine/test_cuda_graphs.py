"""Which steps may be captured and replayed: those that never wait for the device."""

import pytest
import torch
from helpers import mlp, quartic
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tpsgd import rules, split
from tpsgd.engine.cuda_graphs import _capturable
from tpsgd.engine.learner import Learner
from tpsgd.maths.random import Key
from tpsgd.nets.closed_form import ClosedForm
from tpsgd.objectives import Site

WHOLE = {  # whose losses look at the whole batch
    "predsim": rules.predsim,
    "standardised": lambda: rules.tpsgd_l2(standardise=True),
    "standardised, pooled": lambda: rules.drtp(features=8, standardise=True),
}
EACH = {
    "readout": rules.readout,
    "readout, learned": lambda: rules.readout(learned=True),
    "l1": rules.tpsgd_l1,
    "pooled": lambda: rules.tpsgd_l2(features=8),
}
TRACED = {  # a loss of the caller's own, which autograd differentiates
    "own": lambda: rules.tpsgd(quartic),
    "own, pooled": lambda: rules.tpsgd(quartic, features=8),
    "own, standardised": lambda: rules.tpsgd(quartic, standardise=True),
}
SITES = [Site((6,), 3, Key()), Site((4, 6, 6), 3, Key(), maps=True)]


def learner(rule, site):
    """A block that is about to learn by a rule."""
    net = mlp(5, 6, 3) if len(site.shape) == 1 else nn.Sequential(nn.Conv2d(2, 4, 3, padding=1))
    block = split(net)[0]
    made = Learner(
        block, ClosedForm(block, rule.at), lambda: rule.objective(site),
        params={f"0.{name}": p for name, p in block.layer.named_parameters()},
    )  # fmt: skip
    made.start(torch.optim.SGD, 0.1)
    return made


@pytest.mark.parametrize("site", SITES, ids=["vectors", "maps"])
@pytest.mark.parametrize("name", [*WHOLE, *EACH, *TRACED])
def test_a_step_is_captured_where_its_loss_is_a_mean_with_a_written_derivative(name, site):
    made = learner((WHOLE | EACH | TRACED)[name](), site)
    assert made.known is (name not in TRACED)
    assert made.mean_over_samples is _capturable(made, fixed_rate=True) is (name in EACH)


class Elsewhere(TorchDispatchMode):
    """Notes every operation that touches a tensor which is not on the device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.found = device, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        self.found += [str(function) for t in tensors if t.device.type != self.device]
        return out


@pytest.mark.parametrize("site", SITES, ids=["vectors", "maps"])
@pytest.mark.parametrize("name", [*WHOLE, *EACH])
def test_and_such_an_objective_stays_on_the_device_and_never_waits_for_it(name, site):
    """Tensors of the meta device have no numbers: to look at one, or to bring one, would fail."""
    wish = (WHOLE | EACH)[name]().objective(site)
    y, *own = (t.to("meta") for t in (torch.zeros(5, *site.shape), *wish.tensors))
    for s in (torch.zeros(5, dtype=torch.long), torch.zeros(5, site.classes)):
        with Elsewhere("meta") as watch:
            local = wish(y, s.to("meta"), *own)
        assert watch.found == ["aten._to_copy.default"]  # the labels', here
        assert local.dy.shape == y.shape and local.loss.is_meta


def test_what_waits_or_brings_a_number_would_be_seen():
    y = torch.zeros(5, device="meta")
    with pytest.raises(RuntimeError, match="meta"):
        y.sum().item()
    with Elsewhere("meta") as watch:
        y + torch.zeros(())
    assert watch.found == ["aten.zeros.default", "aten.add.Tensor"]
