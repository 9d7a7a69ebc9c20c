"""The similarity objective of `rules.predsim`.

Nøkland & Eidnes, "Training Neural Networks with Local Error Signals" (2019):

    J = a MSE(S(v), S(y*)) + (1 - a) CE(R pool(y), y*)

S has the cosines between the samples of a batch, each sample's features centred. For feature maps,
the features v are the standard deviations over space of a 3 x 3 convolution K of the output; for
vectors (and maps of one pixel), a linear map of it. K and R learn with the block. The loss compares
pairs of samples, so it is no mean over samples.

Its derivative, with n samples, T = S(y*), q the length of v - mean v and u = (v - mean v) / q, so
that S = u u^T:

    du = 4 a (S - T) u / n^2,   dv = (du - u <u, du>) / q, about its mean,
    dz = dv (z - mean z) / (std z (pixels - 1)),   z = K * y
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from tpsgd.losses import bce, cross_entropy, minus_labels
from tpsgd.maths.kernels.memory_format import bands, channels_last, spread
from tpsgd.maths.pooling import back_to_pixels, cells, grid_for, wide
from tpsgd.maths.random import Key
from tpsgd.objectives import LossAndGrads, Objective, Site
from tpsgd.projections import uniform

_LENGTH = 1e-8  # added to squared lengths
_CONVOLVE = (F.conv1d, F.conv2d, F.conv3d)


def predsim(site: Site, share: float, features: int, convolve: bool = True) -> Objective:
    """Similar for samples of a class, and readable by a classifier; without `convolve`, z = y."""
    grid = grid_for(site.shape, features) if site.maps else None
    d = site.shape[0] * prod(grid) if grid else prod(site.shape)
    local = bce if site.loss is bce else cross_entropy
    classes, pixels = site.classes, prod(site.shape[1:]) if site.maps else 1

    def read(y: Tensor) -> Tensor:
        return cells(y, grid) if grid else y.flatten(1)

    def loss(y: Tensor, s: Tensor, *tensors: Tensor) -> Tensor:
        z = convolved(y, tensors[0]) if convolve else y
        alike = dissimilarity(z, s, classes, pixels)
        return share * alike + (1 - share) * local.value(wide(read(y) @ tensors[-1].T), s)

    def of_batch(y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        R, f = tensors[-1], read(y)
        logits = wide(f @ R.T)
        e = minus_labels(local.link(logits), s).mul_((1 - share) / len(y)).to(y.dtype)
        df, T = e @ R, labels_alike(s, classes, logits.dtype)
        of_readout = back_to_pixels(df, y, grid) if grid else df.view(y.shape)
        if convolve:
            alike, dz = dissimilarity_and_grad(convolved(y, tensors[0]), T, share, pixels, None)
            dy, *dK = through_convolution(dz, y, tensors[0])
            del dz  # frees a batch of maps
            _add(dy, of_readout)
        else:
            alike, dy = dissimilarity_and_grad(y, T, share, pixels, of_readout)
            dK = ()
        value = alike.add_(local.value(logits, s), alpha=1 - share)
        return LossAndGrads(value, dy, (*dK, e.T @ f), logits)

    kernel = (_kernel(site),) if convolve else ()
    tensors = (*kernel, initial_weights(site, (d,), site.classes, site.key))
    return Objective(loss, tensors=tensors, learned=True, closed_form_of_batch=of_batch)


def dissimilarity(z: Tensor, s: Tensor, classes: int, pixels: int) -> Tensor:
    """The mean squared difference between the similarities of outputs and of labels."""
    v = wide(z.flatten(2).std(2) if pixels > 1 else z.flatten(1))
    labels = s if s.is_floating_point() else F.one_hot(s, classes)
    return F.mse_loss(similarity(v), similarity(labels.to(v.dtype)))


def similarity(z: Tensor) -> Tensor:
    """The cosines between rows, each about its own mean."""
    z = z - z.mean(1, keepdim=True)
    u = z / z.square().sum(1, keepdim=True).add(_LENGTH).sqrt()
    return u @ u.T


def labels_alike(s: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """`similarity` of labels; for indices it is one of two numbers, without one-hot rows."""
    if s.is_floating_point():
        return similarity(s.to(dtype))
    length = 1 - 1 / classes + _LENGTH
    alike = (s[:, None] == s[None]).to(dtype)
    return alike.sub_(1 / classes).div_(length)


def dissimilarity_and_grad(
    z: Tensor, T: Tensor, share: float, pixels: int, more: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`share` of the dissimilarity to T, and dz with the derivative `more` added to it."""
    if pixels == 1:
        loss, dv = _pairs(wide(z.flatten(1)), T, share)
        dz = dv.view(z.shape).to(z.dtype)
        return loss, dz if more is None else dz.add_(more)
    space = tuple(range(2, z.dim()))
    if _reads_once(z):
        variance, mean = torch.var_mean(z, space, keepdim=True)
        std = wide(variance.flatten(1)).sqrt_()
    else:
        mean, z = None, z - z.mean(space, keepdim=True)
        std = torch.linalg.vector_norm(z, dim=space, dtype=T.dtype).div_((pixels - 1) ** 0.5)
    loss, dv = _pairs(std, T, share)
    slope = torch.where(std > 0, dv / std, 0.0).div_(pixels - 1).to(z.dtype)
    slope = slope.view(*slope.shape, *[1] * len(space))
    if mean is not None:
        offset = -slope * mean if more is None else torch.addcmul(more, slope, mean, value=-1)
        return loss, _scaled(z, slope, offset)
    z.mul_(slope)
    return loss, z if more is None else _add(z, more)


def _reads_once(z: Tensor) -> bool:
    """Whether mean and deviation of maps are faster in one pass, without a copy about the mean."""
    return z.is_cuda


def _pairs(v: Tensor, T: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """The mean squared difference between S(v) and T times its share, and dv.

    Layer normalisation of v is u times the root of its width.
    """
    n, width = v.shape
    u, mean, inverse = torch.native_layer_norm(v, (width,), None, None, _LENGTH / width)
    difference = torch.addmm(T, u, u.T, beta=-1, alpha=1 / width)
    du = (difference @ u).mul_(4 * share / (n * n * width))
    dv, *_ = torch.ops.aten.native_layer_norm_backward(
        du, v, (width,), mean, inverse, None, None, (True, False, False)
    )
    difference = difference.flatten()
    return torch.dot(difference, difference).mul_(share / (n * n)), dv


def _scaled(z: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """slope z + offset: one slope for each map; one offset for each map, cell or pixel."""
    if z.dim() != 4 or offset.shape in (z.shape, slope.shape):
        return torch.addcmul(offset, z, slope)
    slopes = spread(slope, z).narrow(-2, 0, 1)  # a row of pixels
    scaled = torch.addcmul(spread(offset, z), bands(z, offset.shape[2]), slopes)
    if channels_last(z):
        n, filters, height, width = z.shape
        return scaled.view(n, height, width, filters).permute(0, 3, 1, 2)
    return scaled.view(z.shape)


def convolved(y: Tensor, K: Tensor) -> Tensor:
    """K * y in maps of the same size; of vectors a product."""
    if K.dim() == 2:
        return y.flatten(1) @ K.T
    convolve: Callable[..., Tensor] = _CONVOLVE[K.dim() - 3]
    return convolve(y, K, padding=K.shape[-1] // 2)


def through_convolution(dz: Tensor, y: Tensor, K: Tensor) -> tuple[Tensor, Tensor]:
    """From the derivative with respect to K * y to those with respect to y and K."""
    if K.dim() == 2:
        return (dz @ K).view(y.shape), dz.T @ y.flatten(1)
    space = K.dim() - 2
    ones, padding = [1] * space, [K.shape[-1] // 2] * space
    dy, dK, _ = torch.ops.aten.convolution_backward(
        dz, y, K, None, ones, padding, ones, False, [0] * space, 1, (True, True, False)
    )
    return dy, dK


def _add(dy: Tensor, more: Tensor) -> Tensor:
    """Add to dy a derivative with one number per pixel or per cell."""
    if more.shape == dy.shape:
        return dy.add_(more)
    down, across = more.shape[2:]
    by_cell = dy.unflatten(3, (across, -1)).unflatten(2, (down, -1))
    by_cell.add_(more[:, :, :, None, :, None])
    return dy


def _kernel(site: Site) -> Tensor:
    """The initial K: 3 x 3 between all channels, or a matrix between all units."""
    filters, *space = site.shape if site.maps else (prod(site.shape),)
    key = replace(site.key, step=site.key.step + 1)
    return initial_weights(site, (filters, *[3] * len(space)), filters, key)


def initial_weights(site: Site, shape: tuple[int, ...], rows: int, key: Key) -> Tensor:
    """Initial weights with the distribution of torch's layers."""
    draw = uniform((3 * prod(shape)) ** -0.5)
    weights = draw(shape, rows, key, site.device).to(site.dtype)
    layout = torch.channels_last if len(shape) == 3 else torch.contiguous_format
    return weights.contiguous(memory_format=layout)
