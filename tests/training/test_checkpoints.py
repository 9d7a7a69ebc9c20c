"""A run that was interrupted and resumed equals one that was not, bit for bit."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpsgd
from tpsgd import Checkpoint, TpsgdError, rules
from tpsgd.saved import checkpoint

SEEN = torch.Generator().manual_seed(0)
POINTS = torch.randn(90, 6, generator=SEEN), torch.arange(90) % 3
IMAGES = torch.rand(40, 2, 8, 8, generator=SEEN), torch.arange(40) % 3
SEQUENCES = torch.randn(40, 7, 4, generator=SEEN), torch.arange(40) % 3


class Killed(Exception):
    """The run ends, as if the process had been killed."""


def mlp():
    return nn.Sequential(
        *(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 8), nn.Tanh()),
        nn.Linear(8, 3),
    )


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(5 * 16, 3)),
    )


def plain():
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 3))


def leaky():
    return nn.Sequential(
        tpsgd.Recurrent(4, 6, sequence=True), tpsgd.Recurrent(6, 5), nn.Linear(5, 3)
    )


def diagonal():
    return tpsgd.zoo.words.factory("lru:6,5", (7, 4), 3)()


def step_rate(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], 0.3)


MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
TOGETHER = {"schedule": tpsgd.simultaneous}
RUNS = {
    "readout": (mlp, POINTS, {}),
    "readout, simultaneous": (mlp, POINTS, TOGETHER),
    "learned codes": (mlp, POINTS, {"rule": rules.readout(learned=True)}),
    "tpsgd-l2": (plain, POINTS, {"rule": rules.tpsgd_l2()}),
    "drtp, redrawn": (plain, POINTS, {"rule": rules.drtp(), "memory": tpsgd.Memory(redraw=True)}),
    "dfa": (mlp, POINTS, {"rule": rules.dfa()}),
    "predsim": (cnn, IMAGES, {"rule": rules.predsim()}),
    "auxiliary nets": (cnn, IMAGES, {"rule": rules.auxiliary(channels=4, side=2)}),
    "frozen": (mlp, POINTS, {"rule": rules.frozen()}),
    "cnn": (cnn, IMAGES, {}),
    "cnn, simultaneous, sgd": (cnn, IMAGES, {**TOGETHER, "optimizer": tpsgd.sgd}),
    "augmented": (cnn, IMAGES, {"augment": tpsgd.augment.crop(1)}),
    "own augmentation": (cnn, IMAGES, {"augment": lambda x: x + 0.1 * torch.rand_like(x)}),
    "blocks": (cnn, IMAGES, {"blocks": 2}),
    "momentum": (plain, POINTS, {"optimizer": MOMENTUM}),
    "one_cycle": (plain, POINTS, {"lr_schedule": tpsgd.one_cycle()}),
    "one_cycle, simultaneous": (
        plain, POINTS, {**TOGETHER, "lr_schedule": tpsgd.one_cycle(), "epochs": [2, 4, 3]}
    ),
    "step": (plain, POINTS, {"lr_schedule": step_rate, "optimizer": MOMENTUM}),
    "milestones": (plain, POINTS, {"lr_schedule": milestones}),
    "ridge head": (plain, POINTS, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()]}),
    "rls head": (plain, POINTS, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.rls()]}),
    "all ridge": (
        plain, POINTS,
        {"rule": rules.tpsgd_l2(at=tpsgd.Place.BEFORE), "optimizer": tpsgd.ridge()},
    ),
    "leaky": (leaky, SEQUENCES, {"optimizer": [tpsgd.sgd, tpsgd.sgd, tpsgd.ridge()]}),
    "leaky, simultaneous": (leaky, SEQUENCES, TOGETHER),
    "diagonal": (diagonal, SEQUENCES, {}),
    "early stopping": (
        plain, POINTS,
        {
            "validation": (POINTS[0][:20], POINTS[1][:20]),
            "early_stopping": tpsgd.EarlyStopping(1, 0.02),
        },
    ),
    "micro-batches": (plain, POINTS, {"memory": tpsgd.Memory(micro_batch=5)}),
    "slices": (plain, POINTS, {"memory": tpsgd.Memory(slices=2)}),
    "recomputed": (mlp, POINTS, {"memory": tpsgd.Memory(reuse=False)}),
    "half precision": (cnn, IMAGES, {"precision": torch.bfloat16}),
    "dataset": (mlp, TensorDataset(*POINTS), {}),
    "shuffled loader": (mlp, DataLoader(TensorDataset(*POINTS), 16, shuffle=True), {}),
    "backprop": (mlp, POINTS, {"method": tpsgd.fit_backprop}),
}  # fmt: skip
for name, (make, data, settings) in RUNS.items():
    RUNS[name] = make, data, {"epochs": 3, "batch_size": 16, **settings}


class Rows(torch.utils.data.Dataset):
    """Samples one by one."""

    def __len__(self):
        return len(POINTS[1])

    def __getitem__(self, i):
        return POINTS[0][i], POINTS[1][i]


RUNS["own dataset"] = mlp, Rows(), {"epochs": 3, "batch_size": 16}


def train(make, data, settings, seed=5):
    """The tensors and the record of a run."""
    torch.manual_seed(seed)  # the initial weights
    model, settings = make(), dict(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = settings.pop("method", tpsgd.fit)(model, data, **settings)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}, run


def compared(run):
    """What must be equal in the records of two runs."""
    history = [replace(epoch, seconds=0.0) for epoch in run.history]
    return history, run.blocks, run.sample_passes, run.forward_passes, run.kept_bytes, run.settings


@pytest.fixture
def killed_after_writing(monkeypatch):
    """Every checkpoint that is written is the last thing that a run does."""
    write = checkpoint.write

    def write_and_end(folder, state):
        write(folder, state)
        raise Killed

    monkeypatch.setattr(checkpoint, "write", write_and_end)


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, tmp_path: Path, killed_after_writing: None
) -> None:
    tensors, run = train(*RUNS[name])
    make, data, settings = RUNS[name]
    settings = {**settings, "checkpoint": Checkpoint(tmp_path, every=0, resume=True)}
    kills = 0
    while True:  # ended after every epoch, and after the last one too
        try:
            resumed, record = train(make, data, settings, seed=5 + kills)  # other initial weights
            break
        except Killed:
            kills += 1
    for key, tensor in tensors.items():
        assert torch.equal(tensor, resumed[key]), key
    assert compared(record) == compared(run)
    assert kills >= max(epoch.epoch for epoch in run.history)
    assert record.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02)
