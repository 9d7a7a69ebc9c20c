"""MobileNetV2 in the manner of torchvision, and a small net of depthwise convolutions."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F


class ConvNormActivation(nn.Sequential):
    """A convolution, its norm and its activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1
    ) -> None:
        padding = (kernel - 1) // 2
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """More maps, a depthwise convolution, and fewer maps again; with a shortcut where sizes fit."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand_ratio: int) -> None:
        super().__init__()
        hidden = inputs * expand_ratio
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expand_ratio != 1:
            layers.append(ConvNormActivation(inputs, hidden, kernel=1))
        layers += [
            ConvNormActivation(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, 1, 0, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Maps, and the input where there is a shortcut."""
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 (Sandler et al. 2018); `settings`: expansion, maps, count and stride."""

    def __init__(
        self,
        settings: tuple[tuple[int, int, int, int], ...] = (
            (1, 16, 1, 1),
            (6, 24, 2, 1),
            (6, 32, 2, 2),
            (6, 64, 2, 2),
        ),
        width: int = 16,
        last: int = 128,
        channels: int = 3,
        classes: int = 10,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        features: list[nn.Module] = [ConvNormActivation(channels, width)]
        for expansion, maps, count, stride in settings:
            for i in range(count):
                features.append(InvertedResidual(width, maps, stride if i == 0 else 1, expansion))
                width = maps
        features.append(ConvNormActivation(width, last, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(p=dropout), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)


class Separable(nn.Module):
    """A small MobileNet (Howard et al. 2017): depthwise and pointwise convolutions in turn."""

    def __init__(
        self,
        widths: tuple[int, ...] = (16, 32, 32, 64),
        channels: int = 1,
        classes: int = 10,
        norm: bool = True,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []

        def add(inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
            pad = kernel // 2
            layers.append(nn.Conv2d(inputs, outputs, kernel, padding=pad, groups=groups))
            layers.extend([nn.BatchNorm2d(outputs)] if norm else [])
            layers.append(nn.ReLU())

        add(channels, widths[0], 3)
        for inputs, outputs in pairwise(widths):
            add(inputs, inputs, 3, groups=inputs)
            add(inputs, outputs, 1)
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Linear(4 * widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.classifier(self.pool(self.features(x)).flatten(1))
