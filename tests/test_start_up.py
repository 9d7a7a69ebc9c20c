"""What a fresh interpreter loads: imports that take a second happen only where they are needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import tpsgd

TRAINING = """
import torch, tpsgd
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
data = torch.randn(64, 8), torch.arange(64) % 2
images = torch.randn(64, 1, 4, 4), data[1]
cnn = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
rnn = nn.Sequential(tpsgd.Recurrent(4, 8), nn.Linear(8, 2))
tpsgd.fit(model, data, epochs=2, validation=data)
tpsgd.fit(model, data, epochs=2, order=tpsgd.simultaneous, optimizer=tpsgd.sgd)
tpsgd.fit(cnn, images, epochs=2, rule=tpsgd.rules.tpsgd_l2())
tpsgd.fit(rnn, (images[0][:, 0], data[1]), epochs=2, optimizer=tpsgd.two_rates(x=0.1, h=0.1))
lru = nn.Sequential(tpsgd.Recurrent.diagonal(4, 8), nn.Linear(8, 2))
tpsgd.fit(lru, (images[0][:, 0], data[1]), epochs=2)
tpsgd.fit(cnn, images, epochs=2, rule=tpsgd.rules.auxiliary(), lr_schedule=tpsgd.one_cycle())
tpsgd.evaluate(model, data)
"""
AUTOGRAD = """
tpsgd.fit_backprop(model, data, epochs=2)
deeper = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), *model)
tpsgd.fit(deeper, data, epochs=2, blocks=2)
"""
COMPILER = {"torch._dynamo", "torch._inductor"}


def loaded(*codes: str) -> list[set[str]]:
    """The modules of a fresh interpreter after each of these pieces of code."""
    report = "print(json.dumps(sorted(sys.modules)))\n"
    code = "import json, sys\n" + "".join(code + report for code in codes)
    env = os.environ | {"PYTHONPATH": str(Path(tpsgd.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


def test_training_loads_no_compiler_no_plots_and_no_command_line():
    after_import, after_training, after_autograd = loaded("import tpsgd\n", TRAINING, AUTOGRAD)
    assert not after_import & {"torch", "numpy"}
    assert "tpsgd.engine.fit" in after_training
    others = {"sympy", "matplotlib", "sklearn", "scipy", "PIL", "pooch", "rich", "typer"}
    assert not after_training & (COMPILER | others)
    assert not after_autograd & (COMPILER | others - {"sympy"})  # torch.autograd loads sympy
