"""ResNets (He et al. 2016) as plain `nn.Sequential`s, with torchvision's key names.

`tpsgd.split` makes blocks of the stem, of each residual block (autograd runs inside it and stops at
its input) and of the classifier. Features can be read at `layer1` to `layer4`.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.zoo.vgg import check_image

LAYERS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class Residual(nn.Module):
    """relu(x + f(x)), f two 3 x 3 convolutions with batch norm; x is projected if shapes differ."""

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or inputs != width:
            shortcut = nn.Conv2d(inputs, width, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


def resnet(
    depth: int, shape: Sequence[int], classes: int, small: bool = False, width: int = 64
) -> nn.Sequential:
    """A ResNet18 or ResNet34 for images of this shape.

    Args:
        depth: 18 or 34.
        shape: the shape of one image, (channels, height, width).
        classes: the number of outputs.
        small: for images under 64 px: a 3 x 3 stem of stride 1 without pooling, instead of 7 x 7,
            stride 2 and max pooling, which keep a sixteenth of the pixels.
        width: the number of filters in the first stage; it doubles with each of the next three.

    Examples:
        >>> net = resnet(18, (3, 32, 32), 10, small=True)
        >>> sum(p.numel() for p in net.parameters())
        11173962
    """
    if depth not in LAYERS:
        raise TpsgdError(f"there is no ResNet{depth} here: choose {', '.join(map(str, LAYERS))}")
    check_image(shape, classes)
    if not isinstance(width, int) or width < 1:
        raise TpsgdError(f"width must be a whole number of filters, 1 or more, got {width!r}")
    kernel, stride = (3, 1) if small else (7, 2)
    layers: dict[str, nn.Module] = {
        "conv1": nn.Conv2d(shape[0], width, kernel, stride, padding=kernel // 2, bias=False),
        "bn1": nn.BatchNorm2d(width),
        "relu": nn.ReLU(inplace=True),
        "maxpool": nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1),
    }
    channels = width
    for i, count in enumerate(LAYERS[depth]):
        filters = width << i
        first = Residual(channels, filters, stride=1 if i == 0 else 2)
        others = [Residual(filters, filters) for _ in range(count - 1)]
        layers[f"layer{i + 1}"] = nn.Sequential(first, *others)
        channels = filters
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
    layers |= {"fc": nn.Linear(channels, classes)}
    net = nn.Sequential(OrderedDict(layers))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
