"""Training and evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in evaluation mode; afterwards each submodule has the mode it had.

    Examples:
        >>> net = nn.Sequential(nn.Dropout().eval(), nn.Linear(2, 2))
        >>> with evaluating(net):
        ...     net[1].training
        False
        >>> net[0].training, net[1].training
        (False, True)
    """
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training
