"""Samples of one data set as those of many clients, which have few of the classes in common."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError


def dirichlet(
    y: Any, clients: int, concentration: float, *, seed: int = 0, least: int = 10
) -> list[Tensor]:
    """The indices of each client's samples: every class is shared out by a Dirichlet distribution.

    With a small concentration (0.1) a class is on a few clients, with a large one (100) all clients
    have about the same classes (Hsu, Qi & Brown 2019). Everyone has at least `least` samples: those
    with fewer get some of the client with most.

    Args:
        y: class indices of all samples.
        clients: how many.
        concentration: of the distribution, over 0.
        seed: of the split.
        least: samples of the smallest client.

    Examples:
        >>> clients = dirichlet(torch.arange(1000) % 10, 4, 0.1)
        >>> sorted(torch.cat(clients).tolist()) == list(range(1000))
        True
    """
    y = np.asarray(y)
    if clients < 1 or not concentration > 0 or len(y) < clients * least:
        raise TpsgdError(
            f"{len(y)} samples cannot be shared out to {clients} clients of {least} or more with "
            f"a concentration of {concentration}"
        )
    random = np.random.default_rng(seed)
    indices: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        of_class = random.permutation(np.flatnonzero(y == label))
        shares = random.dirichlet(np.full(clients, concentration))
        ends = (np.cumsum(shares)[:-1] * len(of_class)).astype(int)
        for of_client, more in zip(indices, np.split(of_class, ends), strict=True):
            of_client += more.tolist()
    for of_client in indices:
        random.shuffle(of_client)
    for of_client in indices:
        while len(of_client) < least:
            of_client.append(max(indices, key=len).pop())
    return [torch.tensor(of_client) for of_client in indices]
