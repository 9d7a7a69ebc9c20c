"""VGG nets (Simonyan & Zisserman 2015) as plain `nn.Sequential`s, with torchvision's key names.

VGG8 is the VGG8b of Nøkland & Eidnes (2019). With `dense=(4096, 4096)`, `pool=7` and 1,000 classes,
VGG11 and VGG16 load torchvision's weights for images of any size.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from tpsgd.common.errors import TpsgdError

# The widths of the convolutions; 0 is a max pooling, which halves the image.
LAYERS = {
    8: (128, 256, 0, 256, 512, 0, 512, 0, 512, 0),
    11: (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    16: (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
}
DENSE = {8: (1024,), 11: (512,), 16: (512,)}


def vgg(
    depth: int,
    shape: Sequence[int],
    classes: int,
    dense: Sequence[int] | None = None,
    batch_norm: bool = False,
    dropout: float = 0.0,
    pool: int | None = None,
    dense_norm: bool = False,
) -> nn.Sequential:
    """A VGG net for images of this shape: `features`, `flatten`, `classifier`.

    Args:
        depth: 8, 11 or 16.
        shape: the shape of one image, (channels, height, width).
        classes: the number of outputs.
        dense: widths of the linear layers before the classifier; default 1,024 for VGG8, else 512.
        batch_norm: normalise after each convolution; indices are those of `vgg11_bn`, `vgg16_bn`.
        dropout: the share dropped after each dense ReLU; 0.5 in torchvision.
        pool: average the last feature maps to `pool x pool` (a module `avgpool`); 7 in torchvision.
        dense_norm: normalise between each dense layer and its ReLU; indices of `classifier` shift.

    Examples:
        >>> net = vgg(11, (3, 32, 32), 10)
        >>> sum(p.numel() for p in net.parameters())
        9488266
    """
    check_image(shape, classes)
    halved = 2 ** len(taps(depth))
    height, width = (n // halved for n in shape[1:])
    if not height or not width:
        image = f"images of {shape[1]} x {shape[2]} are too small for VGG{depth}"
        raise TpsgdError(f"{image}: give {halved} x {halved} or more")
    layers: dict[str, nn.Module] = {"features": _features(depth, shape[0], batch_norm)}
    if pool is not None:
        layers["avgpool"] = nn.AdaptiveAvgPool2d(pool)
        height = width = pool
    widths = DENSE[depth] if dense is None else dense
    inputs = LAYERS[depth][-2] * height * width
    classifier = _classifier(inputs, widths, classes, dropout, dense_norm)
    net = nn.Sequential(OrderedDict(layers, flatten=nn.Flatten(), classifier=classifier))
    for module in net.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)
    return net


def taps(depth: int, batch_norm: bool = False) -> dict[str, str]:
    """The module path of every pooling layer, where features can be read.

    Examples:
        >>> taps(16)["pool1"], taps(11)["pool5"]
        ('features.4', 'features.20')
    """
    if depth not in LAYERS:
        raise TpsgdError(f"there is no VGG{depth} here: choose {', '.join(map(str, LAYERS))}")
    features = _features(depth, 1, batch_norm, "meta")
    pools = [i for i, module in enumerate(features) if isinstance(module, nn.MaxPool2d)]
    return {f"pool{n}": f"features.{i}" for n, i in enumerate(pools, 1)}


def _features(
    depth: int, channels: int, batch_norm: bool, device: str | None = None
) -> nn.Sequential:
    features: list[nn.Module] = []
    for width in LAYERS[depth]:
        if not width:
            features.append(nn.MaxPool2d(2))
            continue
        features.append(nn.Conv2d(channels, width, 3, padding=1, device=device))
        if batch_norm:
            features.append(nn.BatchNorm2d(width, device=device))
        features.append(nn.ReLU(inplace=True))
        channels = width
    return nn.Sequential(*features)


def _classifier(
    inputs: int, dense: Sequence[int], classes: int, dropout: float, norm: bool
) -> nn.Sequential:
    """The linear layers; without dropout an `nn.Identity` keeps torchvision's key names."""
    layers: list[nn.Module] = []
    for width in dense:
        drops = nn.Dropout(dropout) if dropout else nn.Identity()
        norms = [nn.BatchNorm1d(width)] if norm else []
        layers += [nn.Linear(inputs, width), *norms, nn.ReLU(inplace=True), drops]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def check_image(shape: Sequence[int], classes: int) -> None:
    """Refuse a shape that is not an image's, and a number of classes below 1."""
    if len(shape) != 3 or not all(isinstance(n, int) and n > 0 for n in shape):
        expected = "an image's (channels, height, width), such as (3, 32, 32)"
        raise TpsgdError(f"shape must be {expected}, got {shape}")
    if not isinstance(classes, int) or classes < 1:
        raise TpsgdError(f"classes must be a whole number, 1 or more, got {classes!r}")
