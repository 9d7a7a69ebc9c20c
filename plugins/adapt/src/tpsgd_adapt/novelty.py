"""Is adaptation due? A detector of new data, fitted on the tap features of known data.

`mahalanobis` scores a sample by its squared distance to the nearest class mean (Lee et al. 2018).

Features are those of one tap, (n, d) or maps (n, c, h, w), which are averaged over space; or a dict
of several taps, by name. Each sample's features are scaled to unit length, tap by tap (Müller &
Hein 2025), unless `unit=False`: a net has weak features for unknown samples, close to the means.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.common.errors import TpsgdError
from tpsgd_adapt.features import pooled

Features = Tensor | Mapping[str, Tensor]
CHUNK = 512  # samples that are scored together


class Due(NamedTuple):
    """Whether adaptation is due, the share of new samples, that of known data, and the test."""

    due: bool
    share_new: float
    expected: float
    p_value: float

    def __bool__(self) -> bool:
        return self.due


@dataclass(eq=False)
class Detector:
    """Scores samples, and says which are new once `calibrate` has set the threshold.

    `widths` are the taps' names and numbers of features, `tensors` what was fitted, `calibrated`
    the number of samples it was calibrated on, `beyond` how many of them reach the threshold. To
    save it: `torch.save(vars(detector), file)`; to load it: `Detector(**torch.load(file))`.
    """

    widths: dict[str, int]
    tensors: dict[str, Tensor]
    unit: bool = True
    threshold: float = inf
    calibrated: int = 0
    beyond: int = 0

    def score(self, features: Features) -> Tensor:
        """How new each sample is: (n,)."""
        taps = checked_taps(features, self.unit)
        if (widths := {k: x.shape[1] for k, x in taps.items()}) != self.widths:
            raise TpsgdError(f"the detector was fitted on features {self.widths}, got {widths}")
        chunks = zip(*(x.split(CHUNK) for x in taps.values()), strict=True)
        return torch.cat([self.score_chunk(dict(zip(taps, c, strict=True))) for c in chunks])

    def calibrate(self, features: Features, quantile: float = 0.95) -> "Detector":
        """Set the threshold so that this share of known samples, not those fitted on, is below it.

        It is the score at rank ceil(quantile (m + 1)) of m samples: another known sample is then
        beyond it with a probability of at most 1 - quantile, however small m is.
        """
        if not 0 < quantile < 1:
            raise TpsgdError(f"a quantile lies between 0 and 1, got {quantile}")
        scores = self.score(features).sort().values
        rank = ceil(quantile * (len(scores) + 1) - 1e-9)
        if rank > len(scores):
            least = ceil(quantile / (1 - quantile) - 1e-9)
            raise TpsgdError(f"calibrate takes {least} samples or more, got {len(scores)}")
        self.threshold = float(scores[rank - 1])
        self.calibrated, self.beyond = len(scores), len(scores) + 1 - rank
        return self

    def is_new(self, features: Features) -> Tensor:
        """Which samples lie beyond the threshold: (n,), bool."""
        if not self.calibrated:
            raise TpsgdError("the detector has no threshold: calibrate(...) it with known samples")
        return self.score(features) > self.threshold

    def due(self, features: Features, share: float = 0.1, level: float = 0.01) -> Due:
        """Whether adaptation is due: many of these samples are new, and not by chance.

        `share` is the smallest share of new samples that is worth adapting to, `level` the largest
        p-value: the probability that as many known samples would look new.
        """
        new = self.is_new(features)
        p_value = tail(int(new.sum()), len(new), self.beyond, self.calibrated)
        share_new, expected = float(new.double().mean()), self.beyond / (self.calibrated + 1)
        return Due(share_new >= share and p_value <= level, share_new, expected, p_value)

    def score_chunk(self, taps: dict[str, Tensor]) -> Tensor:
        """The scores of a few samples."""
        W, means = self.tensors["whitening"], self.tensors["means"]
        return torch.cdist(torch.cat(list(taps.values()), 1).to(W) @ W.T, means).amin(1) ** 2


def mahalanobis(features: Features, labels: Tensor | None = None, unit: bool = True) -> Detector:
    """Class means with one covariance for all (Lee et al. 2018); without labels, one Gaussian.

    The covariance of the distances to the class means is shrunk after Ledoit and Wolf (2004), so
    there may be fewer samples than features. Sums are in float64.

    Examples:
        >>> x, y = torch.randn(200, 8) + torch.eye(8)[0] * 9, torch.arange(200) % 2
        >>> detector = mahalanobis(x[:100], y[:100]).calibrate(x[100:])
        >>> bool(detector.due(-x))
        True
    """
    taps = checked_taps(features, unit)
    x = torch.cat(list(taps.values()), 1)
    means, y = class_means(x, labels)
    W = torch.linalg.inv(torch.linalg.cholesky(ledoit_wolf(x - means[y])))
    widths = {k: x.shape[1] for k, x in taps.items()}
    return Detector(widths, {"means": means @ W.T, "whitening": W}, unit)


def ledoit_wolf(x: Tensor) -> Tensor:
    """The covariance S of centred samples, shrunk: (1 - a) S + a (tr S / d) I, a at least 1e-6."""
    n, d = x.shape
    S = x.T @ x / n
    mean, square = S.trace() / d, S.square().sum()
    if mean == 0:
        raise TpsgdError("the features do not vary within a class: give more than one sample each")
    noise = (x.square().sum(1).square().mean() - square) / n
    a = float((noise / (square - d * mean**2)).nan_to_num(1.0).clamp(1e-6, 1))
    S.mul_(1 - a).diagonal().add_(a * mean)
    return S


def tail(hits: int, n: int, beyond: int, calibrated: int) -> float:
    """The probability that `hits` or more of n known samples lie beyond the threshold.

    The threshold is itself a known sample's score, so a sample is beyond it with a probability
    q ~ Beta(beyond, calibrated + 1 - beyond), and the number of such samples is beta-binomial
    (binomial if `calibrated` is large).
    """

    def log_beta(a: Tensor, b: Tensor) -> Tensor:
        return a.lgamma() + b.lgamma() - (a + b).lgamma()

    j = torch.arange(hits, n + 1, dtype=torch.float64)
    a, b = torch.tensor([beyond, calibrated + 1 - beyond], dtype=torch.float64)
    terms = log_beta(j + a, n - j + b) - log_beta(j + 1, n - j + 1) - log_beta(a, b)
    return min(1.0, float(terms.logsumexp(0).exp()) / (n + 1))


def checked_taps(features: Features, unit: bool) -> dict[str, Tensor]:
    """Checked features of each tap, (n, d) in float64, in the order of their names."""
    features = features if isinstance(features, Mapping) else {"": features}
    taps: dict[str, Tensor] = {}
    for name in sorted(features):
        x = features[name]
        if not isinstance(x, Tensor) or x.ndim not in (2, 3, 4) or not x.is_floating_point():
            expected = "floats, (n, d), (n, tokens, d) or (n, c, h, w)"
            raise TpsgdError(f"features must be {expected}, got {_kind(x)}")
        x = pooled(x.detach()).double()
        if not x.numel() or not bool(x.isfinite().all()):
            raise TpsgdError(f"features must not be empty, NaN or infinite: see {_kind(x)}")
        taps[name] = F.normalize(x) if unit else x
    if len({len(x) for x in taps.values()}) != 1:
        raise TpsgdError("the taps must have equally many samples, and there must be at least one")
    return taps


def class_means(x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Each class's mean, and each sample's class, counted from 0."""
    if labels is None:
        return x.mean(0, keepdim=True), torch.zeros(len(x), dtype=torch.long, device=x.device)
    if not isinstance(labels, Tensor) or labels.shape != (len(x),) or labels.is_floating_point():
        raise TpsgdError(f"labels must be a tensor of {len(x)} whole numbers, got {_kind(labels)}")
    _, y, counts = labels.to(x.device).unique(return_inverse=True, return_counts=True)
    if len(counts) < 2:
        raise TpsgdError("labels must hold two classes or more, got one")
    return x.new_zeros(len(counts), x.shape[1]).index_add_(0, y, x) / counts[:, None], y


def _kind(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
