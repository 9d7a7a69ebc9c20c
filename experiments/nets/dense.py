"""DenseNet (Huang et al. 2017) in the manner of torchvision: every layer reads all before it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLayer(nn.Module):
    """A bottleneck on the outputs of all layers before, which come as a list."""

    def __init__(self, inputs: int, growth: int, bottleneck: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, bottleneck * growth, kernel_size=1, stride=1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(
            bottleneck * growth, growth, kernel_size=3, stride=1, padding=1, bias=False
        )
        self.drop_rate = float(drop_rate)

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        """The 1 x 1 convolution of all inputs."""
        concatenated = torch.cat(inputs, 1)
        return self.conv1(self.relu1(self.norm1(concatenated)))

    def forward(self, input: Tensor | list[Tensor]) -> Tensor:
        """`growth` new maps."""
        features = [input] if isinstance(input, Tensor) else input
        new = self.conv2(self.relu2(self.norm2(self.bn_function(features))))
        if self.drop_rate > 0:
            new = F.dropout(new, p=self.drop_rate, training=self.training)
        return new


class DenseBlock(nn.ModuleDict):
    """Layers that each read the outputs of all before them."""

    def __init__(
        self, layers: int, inputs: int, bottleneck: int, growth: int, drop_rate: float
    ) -> None:
        super().__init__()
        for i in range(layers):
            layer = DenseLayer(inputs + i * growth, growth, bottleneck, drop_rate)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, init_features: Tensor) -> Tensor:
        """The inputs and all new maps."""
        features = [init_features]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    """Half of the maps, at half of the resolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=1, stride=1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)


class DenseNet(nn.Module):
    """Dense blocks with transitions between them."""

    def __init__(
        self,
        growth: int = 12,
        blocks: tuple[int, ...] = (4, 4, 4),
        width: int = 24,
        bottleneck: int = 4,
        drop_rate: float = 0.0,
        channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(channels, width, 3, padding=1, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(width))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        maps = width
        for i, layers in enumerate(blocks):
            block = DenseBlock(layers, maps, bottleneck, growth, drop_rate)
            self.features.add_module(f"denseblock{i + 1}", block)
            maps += layers * growth
            if i < len(blocks) - 1:
                self.features.add_module(f"transition{i + 1}", Transition(maps, maps // 2))
                maps //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(maps))
        self.classifier = nn.Linear(maps, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)
