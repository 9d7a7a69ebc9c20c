"""The similarity objective: "Training Neural Networks with Local Error Signals" (2019).

By Nøkland & Eidnes; `rules.predsim` places it.

    J = a MSE(S(K * y), S(y*)) + (1 - a) CE(R pool(y), y*)

S(z) holds the cosines between the samples of a batch, each sample's features centred; of feature
maps the features are the standard deviations over space of a 3 x 3 convolution K of the output, of
vectors a linear map of it. K and R learn with the block. The loss looks at pairs of samples, so a
batch in pieces is not the same.
"""

from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from .losses import cross_entropy
from .objectives import Objective, Site, cells, grid_for
from .projections import uniform


def predsim(site: Site, share: float, features: int) -> Objective:
    """The objective of a block: alike for samples of a class, and readable."""
    grid = grid_for(site.shape, features) if site.maps else None
    d = site.shape[0] * prod(grid) if grid else prod(site.shape)
    filters = site.shape[0] if site.maps else prod(site.shape)
    kernel = (filters, 3, 3) if site.maps else (filters,)

    def loss(y: Tensor, s: Tensor, K: Tensor, R: Tensor) -> Tensor:
        known = s if s.is_floating_point() else F.one_hot(s, site.classes)
        if site.maps:
            spread, read = F.conv2d(y, K, padding=1).flatten(2).std(2), cells(y, grid or ())
        else:
            read = y.flatten(1)
            spread = read @ K.T
        alike = F.mse_loss(similarity(spread), similarity(known.to(y.dtype)))
        return share * alike + (1 - share) * cross_entropy.value(read @ R.T, s)

    return Objective(loss, None, (_drawn(site, kernel, filters), _drawn(site, (d,))), learned=True)


def similarity(z: Tensor) -> Tensor:
    """The cosines between rows, each about its own mean."""
    z = z - z.mean(1, keepdim=True)
    z = z / z.square().sum(1, keepdim=True).add(1e-8).sqrt()
    return z @ z.T


def _drawn(site: Site, shape: tuple[int, ...], rows: int | None = None) -> Tensor:
    """Initial weights as torch draws a layer's, from the site's key."""
    key = replace(site.key, step=site.key.step + (0 if rows is None else 1))
    draw = uniform((3 * prod(shape)) ** -0.5)
    weights = draw(shape, rows or site.classes, key, site.device).to(site.dtype)
    maps = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    return weights.contiguous(memory_format=maps)
