"""One simulation with Flower's engine, and the example app without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install tpsgd-fleet")

from fleet.desk import Desk, context
from flwr.app import UserConfig

import tpsgd

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "fleet"


def test_a_simulation_goes_on_without_broken_devices(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install tpsgd-fleet")
    file = tmp_path / "rounds.json"
    paths = [str(HERE.parents[1] / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / "simulated.py"), str(file)],
        env=os.environ | quiet | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second, solved = json.loads(file.read_text())
    for each in (first, second):
        reasons = sorted(each["refused"].values())
        assert reasons[0] == "0.bias has NaN or infinity" and "sensor is broken" in reasons[1]
    assert len(solved["refused"]) == 1 and solved["accuracy"] > 0.9
    assert first["accuracy"] < min(second["accuracy"], solved["accuracy"])
    assert "refused: node" in done.stdout + done.stderr


@pytest.fixture
def example(monkeypatch, tmp_path):
    """The example's modules, with the digits of scikit-learn and a temporary folder of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delenv("TPSGD_DATA", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    from fleet_app import client_app, server_app, task

    yield client_app.app, server_app.app, task
    for name in [name for name in sys.modules if name.startswith("fleet_app")]:
        del sys.modules[name]


def config(**values):
    import tomllib

    app = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    return UserConfig(app["config"] | values)


class Configured(Desk):
    """A desk whose clients have the settings of a run."""

    def __init__(self, app, nodes, settings):
        def configured(message, context):
            context.run_config = settings
            return app(message, context)

        super().__init__(configured, nodes)


@pytest.mark.parametrize("task", ["mlp", "adaptor"])
def test_the_example_learns(example, task, tmp_path):
    client, server, _ = example
    out = tmp_path / "report.json"
    values = {"task": task, "rounds": 2, "epochs": 1, "head": "ridge", "out": str(out)}
    settings = config(**values, concentration=1.0, memory="")
    of_server = context(-1)
    of_server.run_config = settings
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    server(Configured(client, 20, settings), of_server)
    torch.set_num_threads(threads)
    report = json.loads(out.read_text())
    rounds = report["rounds"]
    assert len(rounds) == 3 and not any(r["refused"] for r in rounds)
    assert rounds[-1]["accuracy"] > 0.9
    weights = 2**18 if task == "mlp" else 2**20
    assert rounds[0]["sent_bytes"] > 20 * weights


@pytest.mark.parametrize("word", ["backprop", "tpsgd-l2", "frozen"])
def test_the_example_names_every_rule(example, word):
    _, _, task = example
    asked = context(0)
    asked.run_config = config(rule=word)
    settings = task.training(asked)
    assert settings.get("method") is (tpsgd.fit_backprop if word == "backprop" else None)
    assert word == "backprop" or settings["rule"].name == word


@pytest.mark.parametrize("task", ["mlp", "adaptor"])
def test_validation_samples_are_training_samples_that_no_client_has(example, task):
    _, _, app = example
    contexts = [context(node) for node in range(20)]
    rows = {}
    for measure in ("test", "validation"):
        for each in contexts:
            each.run_config = config(task=task, measure=measure)
        clients = [app.client_data(each) for each in contexts]
        rows[measure] = torch.cat([x.flatten(1) for x, _ in clients])
    x, y = app.server_data(contexts[0])
    everything = torch.cat([rows["validation"], x.flatten(1)])
    assert len(x) == len(y) == -(-len(rows["test"]) // app.VALIDATION)
    nearest = torch.cdist(everything.double(), rows["test"].double()).min(1)
    assert nearest.values.max() < 1e-4  # features differ in their rounding from batch to batch
    assert nearest.indices.unique().numel() == len(rows["test"])
