"""VGG nets (Simonyan & Zisserman 2015) as plain `nn.Sequential`s, with torchvision's key names."""

from collections.abc import Sequence

from torch import nn

from .errors import TpsgdError

# The widths of the convolutions; 0 halves the picture.
LAYERS = {
    11: (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    16: (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0),
}


def vgg(
    depth: int, shape: Sequence[int], classes: int, dense: Sequence[int] = (512,)
) -> nn.Sequential:
    """A VGG net for pictures of this shape, with these widths of the layers before the classes.

    Examples:
        >>> net = vgg(11, (3, 32, 32), 10)
        >>> sum(p.numel() for p in net.parameters())
        9488266
    """
    if depth not in LAYERS:
        raise TpsgdError(f"there is no VGG{depth} here: choose {', '.join(map(str, LAYERS))}")
    net, channels, halved = nn.Sequential(), shape[0], 1
    features: list[nn.Module] = []
    for width in LAYERS[depth]:
        if width:
            features += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            features.append(nn.MaxPool2d(2))
            halved *= 2
    inputs = channels * (shape[1] // halved) * (shape[2] // halved)
    if not inputs:
        raise TpsgdError(f"pictures of {shape[1]} x {shape[2]} are too small for VGG{depth}")
    classifier: list[nn.Module] = []
    for width in dense:
        classifier += [nn.Linear(inputs, width), nn.ReLU(inplace=True)]
        inputs = width
    net.add_module("features", nn.Sequential(*features))
    net.add_module("flatten", nn.Flatten())
    net.add_module("classifier", nn.Sequential(*classifier, nn.Linear(inputs, classes)))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return net
