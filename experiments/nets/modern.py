"""ConvNeXt, MLP-Mixer, and ViT and BERT of the package `transformers` with fresh weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of maps."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Maps, normalised pixel by pixel."""
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class StochasticDepth(nn.Module):
    """Leaves a branch out for some samples while training (Huang et al. 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x, or zeros for some samples."""
        if not self.training or self.p == 0.0:
            return x
        shape = [x.shape[0]] + [1] * (x.ndim - 1)
        noise = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p)
        return x * noise.div_(1 - self.p)


class CNBlock(nn.Module):
    """A depthwise convolution and a perceptron over channels, scaled, beside a shortcut."""

    def __init__(self, width: int, layer_scale: float, drop: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, kernel_size=7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.ones(width, 1, 1) * layer_scale)
        self.stochastic_depth = StochasticDepth(drop)

    def forward(self, input: Tensor) -> Tensor:
        """Maps."""
        x = self.dwconv(input).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x)))).permute(0, 3, 1, 2)
        return input + self.stochastic_depth(self.layer_scale * x)


class ConvNeXt(nn.Module):
    """ConvNeXt (Liu et al. 2022) in the manner of torchvision, for small images."""

    def __init__(
        self,
        depths: tuple[int, ...] = (1, 1, 2),
        widths: tuple[int, ...] = (24, 48, 96),
        channels: int = 3,
        classes: int = 10,
        patch: int = 2,
        layer_scale: float = 1e-1,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(channels, widths[0], patch, patch), LayerNorm2d(widths[0]))
        layers: list[nn.Module] = [stem]
        for i, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            blocks = [CNBlock(width, layer_scale, drop) for _ in range(depth)]
            layers.append(nn.Sequential(*blocks))
            if i < len(depths) - 1:
                down = nn.Conv2d(width, widths[i + 1], kernel_size=2, stride=2)
                layers.append(nn.Sequential(LayerNorm2d(width), down))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        norm = LayerNorm2d(widths[-1], eps=1e-6)
        self.classifier = nn.Sequential(norm, nn.Flatten(1), nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.classifier(self.avgpool(self.features(x)))


class MlpBlock(nn.Module):
    """Two layers over the last dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Numbers of the same shape."""
        return self.fc2(self.act(self.fc1(x)))


class MixerBlock(nn.Module):
    """A perceptron over tokens, then one over channels, each with a shortcut."""

    def __init__(self, tokens: int, width: int, tokens_hidden: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mlp_tokens = MlpBlock(tokens, tokens_hidden)
        self.norm2 = nn.LayerNorm(width)
        self.mlp_channels = MlpBlock(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens."""
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021) in the manner of timm."""

    def __init__(
        self,
        side: int = 32,
        patch: int = 4,
        width: int = 64,
        layers: int = 4,
        channels: int = 3,
        classes: int = 10,
    ) -> None:
        super().__init__()
        tokens = (side // patch) ** 2
        self.stem = nn.Conv2d(channels, width, patch, patch)
        self.blocks = nn.Sequential(
            *(MixerBlock(tokens, width, tokens, 2 * width) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens of images."""
        x = self.stem(x)
        x = x.flatten(2).transpose(1, 2)
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.head(self.forward_features(x).mean(dim=1))


def vit(
    side: int = 32, patch: int = 4, width: int = 64, layers: int = 4, classes: int = 10,
    channels: int = 3,
) -> Any:  # fmt: skip
    """`ViTForImageClassification` of transformers, its weights drawn anew."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=side, patch_size=patch, num_channels=channels, hidden_size=width,
            num_hidden_layers=layers, num_attention_heads=4, intermediate_size=2 * width,
            num_labels=classes,
        )
    )  # fmt: skip


def bert(
    vocabulary: int = 100, steps: int = 32, width: int = 64, layers: int = 4, classes: int = 4
) -> Any:
    """`BertForSequenceClassification` of transformers, its weights drawn anew."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
            num_attention_heads=4, intermediate_size=2 * width, max_position_embeddings=steps,
            num_labels=classes,
        )
    )  # fmt: skip
