"""A simulation with Flower's own engine and ray, in a process of its own: two broken devices."""

import json
import sys
from dataclasses import asdict

import torch
from flwr.app import Array
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

import tpsgd
from tpsgd import fleet

DEVICES, NAN, FAILING = 4, 1, 2


def net(context):
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def all_samples():
    torch.manual_seed(0)
    y = torch.arange(400) % 4
    return 2 * torch.randn(4, 8)[y] + torch.randn(400, 8), y


def samples(context):
    number = context.node_config["partition-id"]
    x, y = all_samples()
    if number == FAILING:
        raise OSError("the sensor is broken")
    mine = slice(100 * number, 100 * (number + 1))
    return x[mine], y[mine]


def spoiling(message, context, answer):
    """A mod of Flower's: one device sends NaN."""
    reply = answer(message, context)
    if context.node_config["partition-id"] == NAN and "arrays" in reply.content:
        bias = reply.content["arrays"]["0.bias"].numpy()
        reply.content["arrays"]["0.bias"] = Array(bias * float("nan"))
    return reply


def main(file):
    client = fleet.client(net, samples, epochs=3, batch_size=16, lr=0.02)
    client.train(mods=[spoiling])(client._registered_funcs.pop("train.default"))
    server = fleet.server(
        net,
        strategy=FedAvg(fraction_evaluate=0.0, min_available_nodes=DEVICES),
        rounds=2,
        timeout=60.0,
        head=tpsgd.ridge(),
        evaluate=lambda context: all_samples(),
        finish=lambda report: file.write(json.dumps([asdict(r) for r in report.rounds])),
    )
    backend = {"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1}}
    run_simulation(server, client, DEVICES, backend_config=backend)


if __name__ == "__main__":
    with open(sys.argv[1], "w") as file:
        main(file)
