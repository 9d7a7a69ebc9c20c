"""Training and evaluation mode of modules, changed for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for submodule, training in modes:
            submodule.training = training
