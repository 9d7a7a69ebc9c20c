"""The last block's loss of the network's output y against the label y*.

Every loss in this library, here and in `objectives`, is a **sum over units and a mean over the
batch**, so that a learning rate means the same at every width and plain SGD takes exactly the steps
of the paper's Table 1.

| loss            | per sample                        | derivative with respect to y |
|-----------------|-----------------------------------|------------------------------|
| `mse`           | 1/2 sum (y - y*)^2                | y - y*                       |
| `cross_entropy` | - sum y* log softmax(y)           | softmax(y) - y*              |
| `bce`           | - sum y* log s(y) + (1-y*) log(1-s(y)), s the sigmoid | s(y) - y* |

For the last two, `y` are logits. Labels are class indices `(batch,)`, which are never expanded to
one-hot rows, or float rows `(batch, classes)`: several labels per sample with `bce`, soft labels
with `cross_entropy`, any numbers with `mse`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd.maths.kernels.torch_internals import internal

_batched = internal("_C._functorch.is_batchedtensor")


@dataclass(frozen=True)
class Loss:
    """A loss of the output: its link, so that the derivative is `link(y) - y*`, and its value.

    `link` returns new memory, which may be written into.
    """

    name: str
    link: Callable[[Tensor], Tensor]
    value: Callable[[Tensor, Tensor], Tensor]

    @property
    def of_numbers(self) -> bool:
        """Whether it compares the output itself with float rows: any numbers, not classes."""
        return self.link is torch.clone

    def grad(self, y: Tensor, labels: Tensor) -> Tensor:
        """The derivative of each sample's loss with respect to y (not divided by the batch)."""
        return minus_labels(self.link(y), labels)


def minus_labels(p: Tensor, labels: Tensor) -> Tensor:
    """p - y* in p's memory, without a one-hot matrix when the labels are indices."""
    if labels.is_floating_point():
        return p.sub_(labels)
    if _batched is None or _batched(p):  # vmap cannot write there
        return torch.scatter(p, 1, labels[:, None], -1.0, reduce="add")
    p.T.scatter_(0, labels[None], -1.0, reduce="add")
    return p


def _softmax(y: Tensor) -> Tensor:
    """On a CPU across the batch, which for ten classes is ten times faster."""
    return torch.softmax(y, 1) if y.is_cuda else torch.softmax(y.T.contiguous(), 0).T


def _mse(y: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return (y - labels).square().sum(1).mean() / 2
    return (y.square().sum(1) / 2 - y.gather(1, labels[:, None])[:, 0] + 0.5).mean()


def _cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    """For rows, logsumexp(y) - <y*, y>: the usual form where a row sums to 1."""
    if labels.is_floating_point():
        return (y.logsumexp(1) - (labels * y).sum(1)).mean()
    if y.is_cuda:
        return F.cross_entropy(y, labels)
    return -torch.log_softmax(y.T.contiguous(), 0).gather(0, labels[None]).mean()


def _bce(y: Tensor, labels: Tensor) -> Tensor:
    """Sum over classes of softplus(y) - y* y, which is the usual form without a division."""
    if labels.is_floating_point():
        return (F.softplus(y) - labels * y).sum(1).mean()
    return (F.softplus(y).sum(1) - y.gather(1, labels[:, None])[:, 0]).mean()


mse = Loss("mse", torch.clone, _mse)
cross_entropy = Loss("cross_entropy", _softmax, _cross_entropy)
bce = Loss("bce", torch.sigmoid, _bce)
ALL = {loss.name: loss for loss in (mse, cross_entropy, bce)}
TORCHS: dict[Any, Loss] = {nn.CrossEntropyLoss: cross_entropy}  # with its default arguments


def resolve(loss: Any) -> Loss | None:
    """The loss that a name, or torch's module, stands for; losses stay, and so does None.

    Examples:
        >>> resolve("bce").name, resolve(nn.CrossEntropyLoss()).name
        ('bce', 'cross_entropy')
    """
    if loss is None or isinstance(loss, Loss):
        return loss
    if isinstance(loss, str) and (name := loss.replace("-", "_")) in ALL:  # as in the shell
        return ALL[name]
    if type(loss) in TORCHS:
        if str(vars(loss)) == str(vars(type(loss)())):
            return TORCHS[type(loss)]
        raise TpsgdError("nn.CrossEntropyLoss with weights, smoothing or sums is not supported")
    raise TpsgdError(
        "loss must be 'cross_entropy', 'bce', 'mse', nn.CrossEntropyLoss(), or a tpsgd loss, which "
        f"are sums over outputs and means over samples; got {loss!r}"
    )
