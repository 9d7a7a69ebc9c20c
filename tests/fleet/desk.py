"""Flower's messages by hand: a server and its clients in one process, without transport."""

import torch
from flwr.app import Array, ConfigRecord, Context, Message, RecordDict, UserConfig
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from tpsgd import fleet

TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 0
INPUTS, UNITS, CLASSES = 6, 8, 3


def net(context=None):
    return nn.Sequential(nn.Linear(INPUTS, UNITS), nn.Tanh(), nn.Linear(UNITS, CLASSES))


def samples(count=60, seed=0, classes=CLASSES):
    """Points about a centre for each class."""
    centres = 2 * torch.randn(10, INPUTS, generator=torch.Generator().manual_seed(100))
    y = torch.arange(count) % classes
    return centres[y] + torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed)), y


def context(node):
    config = UserConfig({"partition-id": node})
    return Context(0, node, config, RecordDict(), config)


class Desk:
    """A grid whose clients answer at once: node i is asked with the context of partition i.

    `broken` maps a node to what becomes of its reply; None keeps the node from answering.
    """

    def __init__(self, app, nodes, broken=None):
        self.app, self.nodes, self.broken, self.configs = app, nodes, broken or {}, []

    def get_node_ids(self):
        return range(self.nodes)

    def send_and_receive(self, messages, timeout=None):
        replies = []
        for message in messages:
            self.configs.append(dict(message.content["config"]))
            node = message.metadata.dst_node_id
            change = self.broken.get(node, lambda reply: reply)
            if change is not None:
                replies.append(change(self.app(message, context(node))))
        return replies


def run(app, clients, model=net, broken=None, strategy=None, **settings):
    """The report of a server, and the desk it worked on; client i has the samples clients[i]."""
    reports, desk = [], Desk(app, len(clients), broken)
    settings = {"strategy": strategy or average(), "finish": reports.append, **settings}
    fleet.server(model, **settings)(desk, context(-1))
    return reports[0], desk


def average(kind=FedAvg, **settings):
    """A strategy that asks every client, and may be alone with one."""
    least = {"min_train_nodes": 1, "min_available_nodes": 1}
    return kind(fraction_evaluate=0.0, **least, **settings)


def client(clients, model=net, **settings):
    """A client app whose partition i has the samples clients[i]."""
    settings = {"epochs": 2, "batch_size": 16, **settings}
    return fleet.client(model, lambda c: clients[c.node_config["partition-id"]], **settings)


def message(arrays, kind="train", **config):
    """What a server sends to a client."""
    config = {"seed": 0, "classes": ["0", "1", "2"], "server-round": 1} | config
    return Message(RecordDict({"arrays": arrays, "config": ConfigRecord(config)}), 0, kind)


def with_array(name, values, record="arrays"):
    """A change of a reply: another array in place of one of its own."""

    def change(reply):
        reply.content[record][name] = Array(values)
        return reply

    return change


def same(model, other, tolerance=0.0):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)
