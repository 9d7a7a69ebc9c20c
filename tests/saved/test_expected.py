"""A checkpoint whose values do not fit the learners that go on from it is refused in a sentence."""

import math

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import Checkpoint, TpsgdError
from tpsgd.saved import checkpoint
from tpsgd.saved.expected import checked_state, state_after_a_step

DATA = torch.linspace(-1, 1, 180).view(30, 6).sin(), torch.arange(30) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def step_rate(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


SETTINGS = {
    "epochs": 3, "lr_schedule": step_rate, "early_stopping": tpsgd.EarlyStopping(3),
    "rule": tpsgd.rules.readout(learned=True),
}  # fmt: skip


class Ended(Exception):
    """The run ends here."""


@pytest.fixture
def state(tmp_path):
    """The state of a run after the second epoch of its first block."""

    def end(epoch):
        if epoch.epoch == 3:
            raise Ended

    with pytest.raises(Ended):
        tpsgd.fit(
            net(), DATA, checkpoint=Checkpoint(tmp_path, every=0), callbacks=[end], **SETTINGS
        )
    return checkpoint.read(tmp_path)


def resume(folder, state):
    checkpoint.write(folder, state)
    return tpsgd.fit(net(), DATA, checkpoint=Checkpoint(folder, resume=True), **SETTINGS)


def learner(state):
    return state["stages"][0]["learners"][0]


def optimizer(state):
    return learner(state)["optimizer"]


def exchange(values, a, b):
    values[a], values[b] = values[b], values[a]


CHANGES = {
    "moments of another parameter": lambda s: exchange(optimizer(s)["state"], 0, 1),
    "a shape": lambda s: optimizer(s)["state"][0].update(exp_avg=torch.zeros(6, 5)),
    "fewer numbers": lambda s: optimizer(s)["state"][0].update(exp_avg=torch.zeros(1)),
    "a number format": lambda s: optimizer(s)["state"][0].update(exp_avg=torch.zeros(5, 6).int()),
    "no moments": lambda s: optimizer(s)["state"][0].pop("exp_avg_sq"),
    "a moment that is a word": lambda s: optimizer(s)["state"][0].update(exp_avg="x"),
    "a step that is a number": lambda s: optimizer(s)["state"][0].update(step=3),
    "a step of many numbers": lambda s: optimizer(s)["state"][0].update(step=torch.zeros(5, 6)),
    "a step below 0": lambda s: optimizer(s)["state"][0].update(step=torch.tensor(-5.0)),
    "a step that is NaN": lambda s: optimizer(s)["state"][0].update(step=torch.tensor(math.nan)),
    "a parameter that is not there": lambda s: optimizer(s)["state"].update({-1: {}}),
    "a rate that is a word": lambda s: optimizer(s)["param_groups"][0].update(lr="x"),
    "a rate that is infinite": lambda s: optimizer(s)["param_groups"][0].update(lr=math.inf),
    "one beta": lambda s: optimizer(s)["param_groups"][0].update(betas=(0.9,)),
    "a beta of 1": lambda s: optimizer(s)["param_groups"][0].update(betas=(1.0, 0.999)),
    "a switch": lambda s: optimizer(s)["param_groups"][0].update(amsgrad=True),
    "a setting less": lambda s: optimizer(s)["param_groups"][0].pop("eps"),
    "codes of another shape": lambda s: learner(s).update(tensors=[torch.zeros(1)] * 2),
    "no codes": lambda s: learner(s).update(tensors=[None] * 2),
    "a scale of many numbers": lambda s: learner(s).update(mean_square=torch.ones(4)),
    "a scale below 0": lambda s: learner(s).update(mean_square=torch.tensor(-1.0)),
    "patience in words": lambda s: learner(s).update(patience=["x", 1]),
    "patience for ever": lambda s: learner(s).update(patience=[0.1, -(10**9)]),
    "batches": lambda s: learner(s).update(batches=3),
    "an epoch far away": lambda s: s["stages"][0].update(epoch=10**9),
    "an epoch in words": lambda s: s["stages"][0].update(epoch="x"),
    "random numbers": lambda s: s["stages"][0].update(random={"torch": torch.zeros(9).byte()}),
    "passes": lambda s: s["record"].update(sample_passes=(1,)),
    "a loss in words": lambda s: s["record"]["history"][0].update(loss="x"),
    "an accuracy in words": lambda s: s["record"]["history"][0].update(accuracy=[1]),
    "time": lambda s: s.update(seconds=math.nan),
    "memory": lambda s: s.update(peak=math.inf),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_state_that_does_not_fit_is_refused(name, state, tmp_path):
    CHANGES[name](state)
    with pytest.raises(TpsgdError, match=r"the checkpoint in .* makes no sense: ") as caught:
        resume(tmp_path, state)
    assert "\n" not in str(caught.value)


def test_the_state_as_it_was_fits(state, tmp_path):
    assert len(resume(tmp_path, state).history) == 6


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adafactor,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        lambda params: torch.optim.Adam(params, amsgrad=True, fused=True),
    ],
)
def test_the_state_of_every_optimizer_fits_a_new_one(make):
    params = [
        nn.Parameter(torch.ones(4, 3)),
        nn.Parameter(torch.ones(1)),
        nn.Parameter(torch.ones([])),
    ]
    stepped, fresh = make(params), make(params)
    for p in params:
        p.grad = torch.ones_like(p)
    stepped.step()
    saved = stepped.state_dict()
    assert list(checked_state(fresh, saved).values()) == list(saved["state"].values() or [{}] * 3)
    assert not fresh.state and all(torch.isfinite(p).all() for p in params)


def test_an_optimizer_that_cannot_be_tried_is_compared_by_shapes():
    class Own(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.shift = 0.0

        def step(self, closure=None):
            self.shift += 1  # an attribute that copies do not have
            return super().step(closure)

    (p,) = params = [nn.Parameter(torch.ones(4, 3))]
    stepped, fresh = Own(params), Own(params)
    p.grad = torch.ones_like(p)
    stepped.step()
    assert state_after_a_step(fresh, p) is None
    checked_state(fresh, stepped.state_dict())
    stepped.state[p]["momentum_buffer"] = torch.ones(3, 4)
    with pytest.raises(ValueError, match=r"momentum_buffer is torch\.float32 \(3, 4\) in place of"):
        checked_state(fresh, stepped.state_dict())


class Lavish(nn.Module):
    """A layer with a parameter that never has a gradient."""

    def __init__(self):
        super().__init__()
        self.unused, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(6, 5)

    def forward(self, x):
        return torch.relu(self.layer(x))


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("lost", [None, 1, 2])
def test_a_parameter_may_have_no_state(lost, tmp_path):
    def train(**more):
        torch.manual_seed(0)
        model = nn.Sequential(Lavish(), nn.Linear(5, 3))
        tpsgd.fit(model, DATA, epochs=3, optimizer=momentum, **more)
        return model

    def end(epoch):
        if epoch.epoch == 3:
            raise Ended

    with pytest.raises(Ended):
        train(checkpoint=Checkpoint(tmp_path, every=0), callbacks=[end])
    state = checkpoint.read(tmp_path)
    optimizer(state)["state"].pop(lost, None)  # the kernel takes all buffers or none
    checkpoint.write(tmp_path, state)
    resumed, whole = train(checkpoint=Checkpoint(tmp_path, resume=True)), train()
    same = [
        torch.equal(*both) for both in zip(resumed.parameters(), whole.parameters(), strict=True)
    ]
    assert all(same) == (lost is None)
