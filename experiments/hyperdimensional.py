"""A second detector of new data, by random codes, and how well a detector tells domains apart.

`hyperdimensional` scores a sample by 1 - its largest cosine with the classes' codes (Wilson et al.
2023). Features are those of `tpsgd_adapt.novelty`.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.maths.random import Key
from tpsgd.projections import binary
from tpsgd_adapt.novelty import Detector, Features, checked_taps, class_means

PROJECTION, SIGNS = -3, -4  # blocks of the keys that no block of a net has


class CodeDetector(Detector):
    """A detector whose `tensors` are a code for each class, the taps' means, and a seed."""

    def score_chunk(self, taps: dict[str, Tensor]) -> Tensor:
        """The scores of a few samples."""
        cosines = F.normalize(self.encode(taps)) @ F.normalize(self.tensors["bundles"]).T
        return 1 - cosines.amax(1)

    def encode(self, taps: dict[str, Tensor]) -> Tensor:
        """sum over taps t of s_t * (x_t - centre_t) P: (n, dimensions), P of -1 and 1."""
        seed, bundles = int(self.tensors["seed"]), self.tensors["bundles"]
        size, device = bundles.shape[1], bundles.device
        P = _projection(size, max(self.widths.values()), seed, device)
        signs = binary()((size,), len(taps), Key(seed, SIGNS), device)
        codes = torch.zeros(len(next(iter(taps.values()))), size, device=device)
        for x, s, centre in zip(taps.values(), signs, self.tensors["centres"], strict=True):
            codes.addcmul_((x.to(device).float() - centre) @ P[: x.shape[1]], s)
        return codes


@lru_cache(maxsize=1)
def _projection(size: int, width: int, seed: int, device: torch.device) -> Tensor:
    return binary()((size,), width, Key(seed, PROJECTION), device)


def hyperdimensional(
    features: Features, labels: Tensor, dimensions: int = 2048, seed: int = 0, unit: bool = True
) -> CodeDetector:
    """Hyperdimensional feature fusion (Wilson et al. 2023): one code per class.

    A sample's code is a random projection of its features, less their tap's mean, times a random
    sign vector per tap (binding), summed over taps; a class's is the sum of its samples' (bundling)
    over their number. The signs come from a hash: they are the same on every machine and not
    stored.
    """
    taps = checked_taps(features, unit)
    means = {name: class_means(x, labels)[0] for name, x in taps.items()}
    mid = torch.stack([x.mean() for x in taps.values()]).float()
    tensors = {"centres": mid, "bundles": mid.new_empty(0, dimensions), "seed": torch.tensor(seed)}
    detector = CodeDetector({k: x.shape[1] for k, x in taps.items()}, tensors, unit)
    tensors["bundles"] = detector.encode(means)  # a code is linear: the mean's is the codes' mean
    return detector


def auroc(known_scores: Tensor, new_scores: Tensor) -> float:
    """The probability that a new sample scores above a known one, ties counting half.

    Examples:
        >>> auroc(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]))
        0.875
    """
    known, new = known_scores.double().sort().values, new_scores.to(known_scores.device).double()
    below = torch.searchsorted(known, new) + torch.searchsorted(known, new, right=True)
    return float(below.double().mean() / (2 * len(known)))
