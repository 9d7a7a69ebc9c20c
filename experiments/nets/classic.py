"""LeNet, VGG and ResNet as classes, and a net with two inputs."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """LeNet-5 in the manner of torch's tutorial: functional activations and pooling."""

    def __init__(self, channels: int = 1, side: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.fc1 = nn.Linear(16 * (side // 4) ** 2, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), (2, 2))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


class VGG(nn.Module):
    """VGG (Simonyan & Zisserman 2015) in the manner of torchvision: features, pool, classifier."""

    def __init__(
        self,
        plan: tuple[int | str, ...] = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M"),
        channels: int = 3,
        classes: int = 10,
        dense: int = 512,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in plan:
            if isinstance(width, int):
                convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1)
                layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers += [nn.MaxPool2d(kernel_size=2, stride=2)]
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, dense),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(dense, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, activated."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1, and a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both ways, activated."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet (He et al. 2016) in the manner of torchvision; `small`: a 3 x 3 stem for small images.

    The ReLU of a block is one module that is called several times.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
        layers: tuple[int, int, int, int] = (2, 2, 2, 2),
        width: int = 64,
        channels: int = 3,
        classes: int = 10,
        small: bool = True,
    ) -> None:
        super().__init__()
        self.inputs = width
        if small:
            self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
            self.maxpool: nn.Module = nn.Identity()
        else:
            self.conv1 = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
            self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._make_layer(block, width, layers[0], 1)
        self.layer2 = self._make_layer(block, 2 * width, layers[1], 2)
        self.layer3 = self._make_layer(block, 4 * width, layers[2], 2)
        self.layer4 = self._make_layer(block, 8 * width, layers[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width * block.expansion, classes)

    def _make_layer(
        self, block: type[BasicBlock] | type[Bottleneck], width: int, count: int, stride: int
    ) -> nn.Sequential:
        outputs, downsample = width * block.expansion, None
        if stride != 1 or self.inputs != outputs:
            shortcut = nn.Conv2d(self.inputs, outputs, 1, stride, bias=False)
            downsample = nn.Sequential(shortcut, nn.BatchNorm2d(outputs))
        blocks = [block(self.inputs, width, stride, downsample)]
        self.inputs = outputs
        blocks += [block(self.inputs, width, 1, None) for _ in range(1, count)]
        return nn.Sequential(*blocks)

    def _forward_impl(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self._forward_impl(x)


class TwoInputs(nn.Module):
    """A picture and a row of measurements, joined after a layer each; the row is read again."""

    def __init__(self, side: int = 8, measurements: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.dense = nn.Linear(measurements, 16)
        self.joined = nn.Linear(8 * (side // 2) ** 2 + 16, 64)
        self.middle = nn.Linear(64 + measurements, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        """Logits of a picture with its measurements."""
        maps = F.max_pool2d(F.relu(self.conv(image)), 2).flatten(1)
        x = torch.cat([maps, torch.relu(self.dense(row))], dim=1)
        x = F.relu(self.joined(x))
        x = self.middle(torch.cat([x, row], dim=1)).relu()
        return self.head(x)
