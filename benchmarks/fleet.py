"""Twenty devices in Flower's simulation: bytes per round, accuracy by round, memory per device.

    TPSGD_DATA=FOLDER python benchmarks/fleet.py --out results

The app is `examples/fleet`: an MLP on MNIST, and an adaptor on VGG16's features of Imagenette
(1,000 images, 500 to test), split by a Dirichlet distribution of concentration 0.1 and 1. FedAvg of
all devices, ten rounds for the MLP, five for the adaptor, Adam, batches of 32. The rate and the
number of local epochs are chosen for each arm, task and split by the accuracy on a fifth of the
training samples, after three rounds without them: first the rate, then the number of epochs at that
rate. Local rules keep no inputs for reuse (`Memory(reuse=False)`), which takes time and
saves memory. Each row runs in a process of its own, with ray. The controls are backprop on the
devices, and hidden layers that stay random. "ridge" is one round, on random hidden layers (MLP) or
on averages of the encoder's features, compared with the same ridge on all samples in one place. A
stopped run goes on with the rows that are missing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "fleet"
sys.path[:0] = [str(ROOT), str(EXAMPLE)]

PER_DEVICE = "readout, calibrated by each device"
ARMS: dict[str, dict[str, Any]] = {
    "readout": {"rule": "readout"},
    "readout, restricted softmax": {"rule": "readout", "restricted-softmax": True},
    PER_DEVICE: {"rule": "readout"},
    "tpsgd-l2": {"rule": "tpsgd-l2"},
    "backprop": {"rule": "backprop"},
    "backprop, restricted softmax": {"rule": "backprop", "restricted-softmax": True},
    "frozen": {"rule": "frozen"},
    "ridge": {"rule": "frozen", "rounds": 0, "head": "ridge"},
}
RATES = 0.001, 0.003, 0.01
EPOCHS = {"mlp": (1, 2), "adaptor": (5, 2)}  # rates are compared with the first of them
ROUNDS_OF_SEARCH = 3
SHARE_OF_ROUNDS = {"mlp": 1, "adaptor": 2}
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Run every row that the section does not have yet."""
    options = arguments()
    from many import commit, read, write_section

    before = {} if options.again else read(options.out).get("fleet", {})
    rows, trials = before.get("rows", []), before.get("trials", [])
    settings = {"devices": options.devices, "strategy": "FedAvg", "batch_size": 32}
    settings |= {name: version(name) for name in ("flwr", "ray")}
    section = {"settings": settings, "rows": rows, "trials": trials}

    def measure(setting: dict[str, Any], table: list[dict[str, Any]]) -> dict[str, Any]:
        """The row of a table with this setting; it is measured and written if it is missing."""
        for row in table:
            if setting.items() <= row.items():
                return row
        began = time.perf_counter()
        row = setting | measured(setting, options.devices) | {"commit": commit()}
        table.append(row | {"seconds": time.perf_counter() - began})
        write_section(options.out, "fleet", section)
        print(f"{summary(row)}, {table[-1]['seconds']:.0f} s", flush=True)
        return row

    for setting in planned(options):
        if not any(setting.items() <= row.items() for row in rows):
            choice = chosen(setting, lambda trial: measure(trial, trials))
            measure(setting | choice, rows)


def arguments() -> argparse.Namespace:
    """The words of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="the folder of many.json")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "adaptor"], choices=EPOCHS)
    parser.add_argument("--concentrations", nargs="+", type=float, default=[0.1, 1.0])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--again", action="store_true", help="also the rows that are there already")
    return parser.parse_args()


def planned(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings of all rows."""
    return [
        {
            "task": task,
            "concentration": concentration,
            "arm": arm,
            "seed": seed,
            "rounds": ARMS[arm].get("rounds", options.rounds // SHARE_OF_ROUNDS[task]),
        }
        for task in options.tasks
        for concentration in options.concentrations
        for seed in range(options.seeds)
        for arm in options.arms
    ]


def chosen(
    setting: dict[str, Any], measure: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The rate and the number of local epochs that are best on training samples without them."""
    if not setting["rounds"]:  # a head that is solved has neither
        return {}
    trial = setting | {"rounds": ROUNDS_OF_SEARCH, "measure": "validation"}
    epochs, other_epochs = EPOCHS[setting["task"]]
    choices = [{"lr": lr, "epochs": epochs} for lr in RATES]

    def validation(choice: dict[str, Any]) -> float:
        return measure(trial | choice)["accuracy"][-1]

    best = max(choices, key=validation)
    return max(best, best | {"epochs": other_epochs}, key=validation)


def measured(setting: dict[str, Any], devices: int) -> dict[str, Any]:
    """The result of one row, from a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        paths = [str(ROOT / "src"), str(EXAMPLE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
        words = [json.dumps(setting), str(devices), str(out)]
        call = [sys.executable, __file__, "row", *words]
        done = subprocess.run(call, env=environment, capture_output=True, text=True)
        if not out.exists():
            raise SystemExit(done.stderr[-3000:])
        return json.loads(out.read_text())


def summary(row: dict[str, Any]) -> str:
    """A row in one line."""
    name = f"{row['task']} {row['concentration']:g} {row['arm']}"
    name += "".join(f", {word} {row[word]}" for word in ("lr", "epochs", "measure") if word in row)
    sent = row["sent_bytes_per_round"] + row["received_bytes_per_round"]
    share, memory = row["accuracy"][-1], row.get("memory_bytes", 0)
    return f"{name}: {share:.2%}, {sent:,} bytes a round, {memory:,} bytes of memory"


def simulate(setting: dict[str, Any], devices: int, out: Path) -> None:
    """One row: the example's app, with these settings."""
    from fleet_app import task
    from flwr.app import UserConfig
    from flwr.simulation import run_simulation

    from tpsgd import Memory, fleet
    from tpsgd_fleet import strategy

    app = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    arm = ARMS[setting["arm"]]
    fixed = {"batch-size": 32, "restricted-softmax": False, "memory": "", "out": ""}
    values = {name: value for name, value in setting.items() if name != "arm"}
    config = UserConfig(app["config"] | fixed | arm | values)
    if setting["arm"] == PER_DEVICE:
        strategy.shared_scales = lambda replies: []  # so that devices measure in every round

    def configured(function: Any) -> Any:
        def call(context: Any) -> Any:
            return function(SimpleNamespace(run_config=config, node_config=context.node_config))

        return call

    def serving(context: Any) -> dict[str, Any]:
        settings = task.serving(context)
        settings["strategy"].min_available_nodes = devices
        return settings | {
            "evaluate": configured(task.server_data),
            "finish": lambda report: out.write_text(json.dumps(figures(report, config, devices))),
        }

    def training(context: Any) -> dict[str, Any]:
        if (
            arm["rule"] == "backprop" or "measure" in setting
        ):  # memory is not compared in the search
            return task.training(context)
        return task.training(context) | {"memory": Memory(reuse=False)}

    model, data = configured(task.model), configured(task.client_data)
    client = fleet.client(model, data, configure=configured(training))
    server = fleet.server(model, configure=configured(serving))
    resources = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server, client, devices, backend_config=resources)


def figures(report: Any, config: Any, devices: int) -> dict[str, Any]:
    """What a row of the file has."""
    rounds = report.rounds
    row = {
        "accuracy": [report.accuracy, *(r.accuracy for r in rounds)],
        "loss": [r.loss for r in rounds],
        "sent_bytes_per_round": rounds[0].sent_bytes,
        "received_bytes_per_round": rounds[0].received_bytes,
        "refused": [reason for r in rounds for reason in r.refused.values()],
        "scales": report.scales,
    }
    if memory := max(r.memory_bytes for r in rounds):  # that of moments is not measured
        row["memory_bytes"] = memory
    if config["head"] == "ridge":
        row["difference_to_central"] = difference_to_central(report, config, devices)
    return row


def difference_to_central(report: Any, config: Any, devices: int) -> float:
    """The largest difference of a weight to a ridge head on all samples in one place."""
    import torch
    from fleet_app import task

    import tpsgd
    from tpsgd_fleet.shared_model import make_model

    nodes = [{"num-partitions": devices, "partition-id": number} for number in range(devices)]
    contexts: list[Any] = [SimpleNamespace(run_config=config, node_config=node) for node in nodes]
    data_of_clients = [task.client_data(context) for context in contexts]
    data = tuple(torch.cat(column) for column in zip(*data_of_clients, strict=True))
    model: Any = make_model(task.model, contexts[0], config["seed"])
    settings = {"optimizer": tpsgd.ridge(), "epochs": 1, "progress": False}
    tpsgd.fit(model, data, rule=tpsgd.rules.frozen(), **settings)
    return float((model[-1].weight - report.model[-1].weight).abs().max())


if __name__ == "__main__":
    if sys.argv[1:2] == ["row"]:
        simulate(json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
