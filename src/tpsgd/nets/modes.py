"""Modes and statistics of modules, changed for a while."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def modes_restored(*modules: nn.Module) -> Iterator[None]:
    """Give every submodule its mode back at the end, whatever happens in between."""
    modes = [(m, m.training) for module in modules for m in module.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def attributes_restored(model: nn.Module) -> Iterator[None]:
    """Give every submodule its mode, its other attributes and its buffers back at the end."""
    attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in model.modules()]
    values = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for module, own, buffers in attributes:
            for contents, before in ((vars(module), own), (module._buffers, buffers)):
                contents.clear()
                contents.update(before)
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode; at the end every submodule has the mode that it had before.

    Examples:
        >>> net = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with evaluating(net):
        ...     net.training
        False
        >>> [m.training for m in net]
        [True, False]
    """
    with modes_restored(module):
        module.eval()
        yield


@contextmanager
def statistics_restored(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give buffers that change in training mode, such as a norm's statistics, their values back."""
    owners = [m for top in modules if top.training for m in top.modules()]
    buffers = [(m, k, b, b.clone()) for m in owners for k, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer.copy_(values)
