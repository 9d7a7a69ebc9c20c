"""Classes by their names: the labels of a client as indices that mean the same on all clients.

The server has the list of names. A client announces labels that are not on it as new classes, and
leaves their samples out. After the round each new class has a row in the last layer and class codes
on every client, and is learned from the next round on.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.sources.inputs import inputs, pair
from tpsgd.maths.random import Key, permutation
from tpsgd_streams.labels import is_rows, plain

LONGEST = 100  # characters of a class's name


@dataclass(frozen=True)
class LocalSamples:
    """What a client can learn from in a round, and the classes that it has to announce."""

    data: Any
    count: int  # 0 if all samples are of new classes
    new: list[str]


def indices(y: Any, names: list[str]) -> Tensor:
    """The index of each label in the list of names; -1 for a label that is not on it.

    Examples:
        >>> indices(["cat", "cow"], ["dog", "cat"])
        tensor([ 1, -1])
        >>> indices(torch.tensor([1, 2]), ["0", "1"])
        tensor([ 1, -1])
    """
    position = {name: i for i, name in enumerate(names)}
    return torch.tensor([position.get(str(label), -1) for label in plain(y)], dtype=torch.long)


def samples_of(data: Any, names: list[str]) -> LocalSamples:
    """Data with class indices in place of names, without the samples of classes not on the list.

    Rows of numbers (soft labels, several classes), data sets and loaders are taken as they are:
    their columns, or indices, are in the order of the list.
    """
    if not isinstance(data, (tuple, list)):
        try:
            return LocalSamples(data, len(getattr(data, "dataset", data)), [])
        except TypeError:
            raise TpsgdError("a client's data needs a length (__len__): give (x, y)") from None
    x, y = pair(data)
    x = inputs(x)
    if is_rows(y):
        return LocalSamples((x, torch.as_tensor(y)), len(x), [])
    index = indices(y, names)
    if len(index) != len(x):
        raise TpsgdError(f"x has {len(x)} samples, but y has {len(index)} labels")
    on_list = (index >= 0).nonzero().flatten()
    if len(on_list) == len(index):
        return LocalSamples((x, index), len(index), [])
    new = sorted({str(label) for label in plain(y)} - set(names))
    return LocalSamples((x[on_list], index[on_list]), len(on_list), new)


def shuffled(data: Any, seed: int, server_round: int) -> Any:
    """The data of a round: from the second round on, arrays are put into another order.

    The shuffling of `fit` depends on the seed alone, which is the same in all rounds.
    """
    if server_round <= 1 or not isinstance(data, tuple):
        return data
    x, y = data
    order = torch.cat(list(permutation(len(y), Key(seed, -1, server_round))))
    return x[order], y[order]
