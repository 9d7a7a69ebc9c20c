"""What clients and server share: the data, the model and the settings of a run.

With `TPSGD_DATA` set to a folder of real data, the MLP learns MNIST and the adaptor Imagenette on
the features of VGG16. Without, both learn the digits of scikit-learn, and the encoder is a random
convolution.
"""

import json
import os
import tempfile
from functools import cache
from pathlib import Path

import torch
from flwr.serverapp import strategy
from torch import nn

import tpsgd
from tpsgd import adapt, fleet

CLIENTS, CLASSES = 20, 10
IMAGES = 1000  # to train the adaptor on: encoding one with VGG16 takes about 0.1 s
TEST_IMAGES = 500
UNITS = 256
VALIDATION = 5  # every fifth training sample, where a run is measured on those


def real(name):
    """Whether real data of this name is there."""
    folder = os.environ.get("TPSGD_DATA")
    return bool(folder) and (Path(folder) / name).is_dir()


@cache
def load(task):
    """The data set: samples and labels to train on and to test on."""
    if task == "mlp":
        return tpsgd.data.load("mnist" if real("mnist") else "digits")
    return tpsgd.data.load("imagenette", max_train=IMAGES) if real("vgg16") else load("mlp")


@cache
def encoder():
    """VGG16, or in its place one convolution with random weights."""
    with torch.random.fork_rng():  # so that the model's weights depend on its seed alone
        if real("vgg16"):
            return adapt.backbone("vgg16")
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        return adapt.Backbone(nn.Sequential(*layers), ["2"])


def model(context):
    """An MLP, or the layers of an adaptor: the encoder is no part of what travels.

    Where hidden layers do not learn, their weights do not travel either: the seed makes them.
    """
    config = context.run_config
    if config["task"] == "mlp":
        inputs = 784 if real("mnist") else 64
        hidden = nn.Linear(inputs, UNITS), nn.ReLU(), nn.Linear(UNITS, UNITS), nn.ReLU()
        layers = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(UNITS, CLASSES))
    else:
        build = adapt.Layers() if config["rounds"] else adapt.Probe()  # a head alone is linear
        layers = build(tap_shape(), CLASSES)
    if config["rule"] == "frozen":
        layers[:-1].requires_grad_(False)
    return layers


@cache
def tap_shape():
    """The shape of an image's features."""
    image = torch.zeros(1, *((3, 160, 160) if real("vgg16") else (1, 8, 8)))
    return list(encoder().shapes(image).values())[-1]


def client_data(context):
    """The samples of one client; for the adaptor their features, which it computes once."""
    config, number = context.run_config, int(context.node_config["partition-id"])
    clients = int(context.node_config.get("num-partitions", CLIENTS))

    def samples():
        x, y = load(config["task"]).train
        indices = fleet.dirichlet(y, clients, config["concentration"], seed=config["seed"])[number]
        return x[indices], y[indices], indices

    name = f"{clients}-{config['concentration']}-{config['seed']}-{number}"
    x, y, indices = samples() if config["task"] == "mlp" else features(name, samples)
    if config["measure"] == "test":
        return x, y
    training = indices % VALIDATION > 0
    return x[training], y[training]


def server_data(context):
    """The samples that the server measures accuracy on, or their features.

    They are test samples, or, to choose settings by, training samples that no client learns from.
    """
    config = context.run_config

    def samples():
        data = load(config["task"])
        if config["measure"] == "validation":
            every, (x, y) = VALIDATION, data.train
        else:  # images are sorted by class
            (x, y), images = data.test, config["task"] == "adaptor"
            every = max(1, len(y) // TEST_IMAGES) if images else 1
        return x[::every], y[::every]

    return samples() if config["task"] == "mlp" else features(config["measure"], samples)


def features(name, samples):
    """Samples with features in place of images, from a file once they are computed."""
    kind = "vgg16" if real("vgg16") else "random"
    file = Path(tempfile.gettempdir()) / "tpsgd-fleet-features" / f"{kind}-{name}.pt"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        x, y, *indices = samples()
        tap = list(encoder().taps)[-1]
        torch.save((*adapt.encode(encoder(), (x, y), [tap]).at(tap), *indices), file)
    return torch.load(file)


def training(context):
    """The settings of a client's `tpsgd.fit`."""
    config = context.run_config
    settings = {"epochs": config["epochs"], "lr": config["lr"], "batch_size": config["batch-size"]}
    settings["restricted_softmax"] = config["restricted-softmax"]
    if config["rule"] == "backprop":
        return {"method": tpsgd.fit_backprop, **settings}
    budget = {"memory": config["memory"]} if config["memory"] else {}
    return {"rule": tpsgd.rules.ALL[config["rule"]].make(), **budget, **settings}


def serving(context):
    """The settings of the server."""
    config, more = context.run_config, {}
    if config["strategy"] == "FedProx":
        more = {"proximal_mu": 0.1}
    if config["strategy"] == "FedAdam":
        more = {"eta": 0.01}
    return {
        "strategy": getattr(strategy, config["strategy"])(fraction_evaluate=0.0, **more),
        "rounds": config["rounds"],
        "head": tpsgd.ridge() if config["head"] == "ridge" else None,
        "evaluate": server_data,
        "seed": config["seed"],
        "finish": lambda report: finish(report, config["out"]),
    }


def finish(report, out):
    """Print the rounds, and write them into a file if there is a name for one."""
    print(report, flush=True)
    if out:
        Path(out).write_text(json.dumps(report.as_dict(), indent=1))
