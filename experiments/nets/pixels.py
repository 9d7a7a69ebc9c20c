"""U-Nets: a label for every pixel, with long skips and without."""

import torch
from torch import Tensor, nn


class DoubleConv(nn.Module):
    """Two convolutions with norms and activations."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps."""
        return self.double_conv(x)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015): skips from the way down to the way up."""

    def __init__(self, channels: int = 1, width: int = 8, classes: int = 2) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = DoubleConv(width, 2 * width)
        self.down2 = DoubleConv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(4 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(2 * width, width)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (images, classes, height, width)."""
        x1 = self.inc(x)
        x2 = self.down1(self.pool(x1))
        x3 = self.down2(self.pool(x2))
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


class Hourglass(nn.Module):
    """The same way down and up without long skips, so that one activation passes everywhere."""

    def __init__(self, channels: int = 1, width: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.inc = DoubleConv(channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, 2 * width))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * width, 4 * width))
        self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, kernel_size=2, stride=2)
        self.conv1 = DoubleConv(2 * width, 2 * width)
        self.up2 = nn.ConvTranspose2d(2 * width, width, kernel_size=2, stride=2)
        self.conv2 = DoubleConv(width, width)
        self.outc = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (images, classes, height, width)."""
        x = self.down2(self.down1(self.inc(x)))
        x = self.conv1(torch.relu(self.up1(x)))
        x = self.conv2(torch.relu(self.up2(x)))
        return self.outc(x)
