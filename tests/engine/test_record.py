"""The record of a run: what it holds, and how it prints."""

import gc
import json
import pickle
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import Residual, mlp, points
from torch import nn

import tpsgd
from tpsgd import Run, rules
from tpsgd.common.units import columns, size
from tpsgd.train import Epoch


def test_settings_say_how_it_was_made():
    run = tpsgd.fit(
        mlp(6, 8, 3),
        points(),
        rule=rules.drtp(),
        order=tpsgd.simultaneous,
        optimizer=partial(torch.optim.SGD, momentum=0.9),
        lr=0.05,
        epochs=[1, 2],
        batch_size=7,
        seed=11,
    )
    wanted = {
        "rule": "drtp",
        "loss": "cross_entropy",
        "order": "simultaneous",
        "optimizer": "SGD {'momentum': 0.9}",
        "lr": 0.05,
        "epochs": [1, 2],
        "batch_size": 7,
        "seed": 11,
    }
    assert wanted.items() <= run.settings.items()
    assert run.settings["torch"] == torch.__version__ and run.seed == 11
    assert run.settings["threads"] == torch.get_num_threads()


@pytest.mark.parametrize("lr", [None, 0.1, 1, [0.1, 0.2], (0.1, 0.2)])
@pytest.mark.parametrize("epochs", [1, [1, 1], (1, 1)])
def test_the_record_is_ready_for_json(lr, epochs):
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=epochs, lr=lr, validation=points(seed=1))
    again = json.loads(json.dumps(run.as_dict()))
    assert [Epoch(**e) for e in again["history"]] == run.history
    assert again["sample_passes"] == 96 and again["blocks"][0]["learning"] == "closed form"


def test_times_add_up():
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=2)
    times = [e.seconds for e in run.history]
    assert times == sorted(times) and times[0] > 0 and times[-1] <= run.seconds
    assert run.setup_seconds > 0


def test_blocks_say_what_they_are():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Residual(8), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    run = tpsgd.fit(model, points(), rule=rules.drtp(), epochs=1)
    assert [(b.name, b.rule, b.parameters, b.learning) for b in run.blocks] == [
        ("0: Linear + ReLU", "drtp", 48, "closed form"),
        ("2: Residual", "drtp", 144, "autograd"),
        ("3: Linear", "head", 27, "closed form"),
    ]


def test_a_record_prints_as_a_table():
    run = tpsgd.fit(mlp(6, 8, 3), points(), epochs=2, lr=0.05, batch_size=8)
    title, choice, header, *rows = str(run).splitlines()
    assert title.startswith("readout-learned: ")
    assert "192 sample passes" in title and "memory" in title
    assert choice == run.memory_choice and "inputs" in choice
    assert header.split()[:3] == ["block", "layer", "rule"]
    assert len(rows) == 2 and rows[1].split()[0] == "2" and "closed form" in rows[1]
    assert rows[0].rstrip().endswith("%")  # the readout is a classifier too


def test_a_block_without_epochs_prints_dashes():
    run = tpsgd.fit(mlp(6, 8, 3), points(), rule=rules.frozen(), epochs=1)
    first = str(run).splitlines()[3]
    assert first.split()[-4:] == ["frozen", "0", "-", "-"]


def test_backprop_prints_the_whole_nets_epochs_for_every_layer():
    run = tpsgd.fit_backprop(mlp(6, 8, 3), points(), epochs=3, lr=0.05)
    assert all(row.split()[-3] == "3" for row in str(run).splitlines()[2:])


def test_an_empty_record():
    run = Run("drtp", 0, {})
    assert run.loss is None and "0 sample passes" in str(run)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (5 << 20, "5.0 MB"), (3 << 30, "3.00 GB")],
)
def test_sizes_for_people(count, words):
    assert size(count) == words


def test_columns_are_aligned():
    assert columns([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_memory_is_the_peak_and_the_kept_inputs():
    run = Run("drtp", 0, {}, peak_bytes=1024, kept_bytes=2048)
    assert run.total_bytes == 3072 and run.as_dict()["total_bytes"] == 3072
    assert ", memory 3.0 KB (peak 1.0 KB + kept inputs 2.0 KB)" in str(run)
    assert ", memory 1.0 KB (process 4.0 KB)" in str(
        replace(run, kept_bytes=0, resident_bytes=4096)
    )
    assert ", memory not measured" in str(Run("drtp", 0, {}))
    assert Run.of(run.as_dict()) == run


def test_a_record_without_its_model_lets_the_model_go_and_can_be_pickled():
    model = mlp(6, 8, 3)
    run = tpsgd.fit(model, points(), epochs=2, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    record, gone = run.without_model(), weakref.ref(model)
    assert record == run and pickle.loads(pickle.dumps(record)) == record
    assert "tpsgd.plan counts" in run.as_dict()["memory_choice"]
    assert "tpsgd.plan counts" in pickle.loads(pickle.dumps(run)).memory
    del model, run
    gc.collect()
    assert gone() is None
