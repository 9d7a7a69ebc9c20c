"""The last block's loss of the network's output y against the label y*.

Every loss in this library, here and in `objectives`, is a **sum over units and a mean over the
batch**, so that a learning rate means the same at every width and plain SGD takes exactly the steps
of the paper's Table 1.

| loss            | per sample                        | derivative with respect to y |
|-----------------|-----------------------------------|------------------------------|
| `mse`           | 1/2 sum (y - y*)^2                | y - y*                       |
| `l1`            | sum abs(y - y*)                   | sign(y - y*)                 |
| `huber`         | sum (y - y*)^2 / 2 within 1, else abs(y - y*) - 1/2 | y - y*, cut at -1 and 1 |
| `cross_entropy` | - sum y* log softmax(y)           | softmax(y) - y*              |
| `bce`           | - sum y* log s(y) + (1-y*) log(1-s(y)), s the sigmoid | s(y) - y* |

For the last two, `y` are logits. Labels are class indices `(batch,)`, which are never expanded to
one-hot rows, or float rows `(batch, classes)`: several labels per sample with `bce`, soft labels
with `cross_entropy`, any numbers with the others. An index of `IGNORED` is no label.
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
    bound: Callable[[Tensor], Tensor] | None = None  # of the derivative, in its memory
    each: Callable[[Tensor, Tensor], Tensor] | None = None  # the loss of every sample by itself

    @property
    def of_numbers(self) -> bool:
        """Whether it compares the output itself with float rows: any numbers, not classes."""
        return self.link is torch.clone

    def grad(self, y: Tensor, labels: Tensor) -> Tensor:
        """The derivative of each sample's loss with respect to y (not divided by the batch)."""
        residual = minus_labels(self.link(y), labels)
        return residual if self.bound is None else self.bound(residual)

    def total(self, y: Tensor, labels: Tensor) -> Tensor:
        """The sum over the samples that have a label, those without left out."""
        if labels.is_floating_point():
            return self.value(y, labels) * len(labels)
        if self.each is None:
            has_label = labels != IGNORED
            return self.value(y[has_label], labels[has_label]) * has_label.sum()
        return (self.each(y, labels.clamp(min=0)) * (labels != IGNORED)).sum()

    def mean(self, y: Tensor, labels: Tensor) -> Tensor:
        """As `value`, the samples without a label left out."""
        count = labelled(labels)
        return self.total(y, labels) / (count.clamp(min=1) if isinstance(count, Tensor) else count)


def labelled(labels: Tensor, dim: int = 0) -> Any:
    """How many samples have a label; the samples are in this dimension."""
    return labels.shape[dim] if labels.is_floating_point() else (labels != IGNORED).sum(dim)


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
    return _each_mse(y, labels).mean()


def _each_mse(y: Tensor, labels: Tensor) -> Tensor:
    return y.square().sum(1) / 2 - y.gather(1, labels[:, None])[:, 0] + 0.5


def _residual(y: Tensor, labels: Tensor) -> Tensor:
    """y - y* in new memory, on autograd's graph."""
    if labels.is_floating_point():
        return y - labels
    return y.scatter_add(1, labels[:, None], y.new_full((), -1.0).expand(len(labels), 1))


def _each_l1(y: Tensor, labels: Tensor) -> Tensor:
    return _residual(y, labels).abs().sum(1)


def _each_huber(y: Tensor, labels: Tensor) -> Tensor:
    residual = _residual(y, labels)
    inside = residual.clamp(-1, 1)
    return (inside * (residual - inside / 2)).sum(1)


def _cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    """For rows, logsumexp(y) - <y*, y>: the usual form where a row sums to 1."""
    if labels.is_floating_point():
        return (y.logsumexp(1) - (labels * y).sum(1)).mean()
    if y.is_cuda:
        return F.cross_entropy(y, labels)
    return -torch.log_softmax(y.T.contiguous(), 0).gather(0, labels[None]).mean()


def _each_cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y, labels, reduction="none")


def _bce(y: Tensor, labels: Tensor) -> Tensor:
    """Sum over classes of softplus(y) - y* y, which is the usual form without a division."""
    if labels.is_floating_point():
        return (F.softplus(y) - labels * y).sum(1).mean()
    return _each_bce(y, labels).mean()


def _each_bce(y: Tensor, labels: Tensor) -> Tensor:
    return F.softplus(y).sum(1) - y.gather(1, labels[:, None])[:, 0]


def _sign(residual: Tensor) -> Tensor:
    return residual.sign_()


def _within_1(residual: Tensor) -> Tensor:
    return residual.clamp_(-1, 1)


IGNORED = -100  # in place of a class index, as in torch
mse = Loss("mse", torch.clone, _mse, each=_each_mse)
l1 = Loss("l1", torch.clone, lambda y, s: _each_l1(y, s).mean(), _sign, _each_l1)
huber = Loss("huber", torch.clone, lambda y, s: _each_huber(y, s).mean(), _within_1, _each_huber)
cross_entropy = Loss("cross_entropy", _softmax, _cross_entropy, each=_each_cross_entropy)
bce = Loss("bce", torch.sigmoid, _bce, each=_each_bce)
ALL = {loss.name: loss for loss in (mse, l1, huber, cross_entropy, bce)}
TORCHS: dict[Any, Loss] = {  # with their default arguments, up to a constant factor
    nn.CrossEntropyLoss: cross_entropy,
    nn.NLLLoss: cross_entropy,  # after an nn.LogSoftmax
    nn.BCEWithLogitsLoss: bce,
    nn.BCELoss: bce,  # after an nn.Sigmoid
    nn.MSELoss: mse,
    nn.L1Loss: l1,
    nn.SmoothL1Loss: huber,
    nn.HuberLoss: huber,
}


def resolve(loss: Any) -> Loss | None:
    """The loss that a name, or torch's module, stands for; losses stay, and so does None.

    Examples:
        >>> resolve("bce").name, resolve(nn.CrossEntropyLoss()).name, resolve("MSELoss").name
        ('bce', 'cross_entropy', 'mse')
    """
    if loss is None or isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        names = ALL | {kind.__name__: own for kind, own in TORCHS.items()}
        if (name := loss.replace("-", "_")) in names:  # as in the shell
            return names[name]
    kind = loss if isinstance(loss, type) else type(loss)
    if kind in TORCHS:
        if kind is loss or str(vars(loss)) == str(vars(kind())):
            return TORCHS[kind]
        raise TpsgdError(
            f"nn.{kind.__name__} with weights, smoothing, sums or another constant is not supported"
        )
    words = ", ".join(repr(name) for name in ALL)
    raise TpsgdError(
        f"loss must be one of {words}, a loss of torch.nn with its default arguments, or a tpsgd "
        f"loss, which are sums over outputs and means over samples; got {loss!r}"
    )
