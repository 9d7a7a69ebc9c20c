"""Vision transformers (Dosovitskiy et al. 2021) as plain `nn.Sequential`s, for images of any size.

A layer norm comes before attention and before the perceptron; the classifier reads the mean over
the tokens. `tpsgd.split` makes a block of each layer, of the first together with the patches.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.zoo.vgg import check_image

SMALL = 64  # pixels; larger images have patches of 16


class Patches(nn.Module):
    """Square patches of an image as tokens, with a vector that is learned for each place."""

    embeds = True  # learns together with the layer behind it
    sizes = "channels", "side", "patch", "width"

    def __init__(self, channels: int, side: int, patch: int, width: int) -> None:
        super().__init__()
        self.channels, self.side, self.patch, self.width = channels, side, patch, width
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (samples, patches, width)."""
        return self.proj(x).flatten(2).mT + self.places


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's, with the norms first, GELU and no dropout."""

    sizes = "width", "heads", "hidden"

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__(
            width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.width, self.heads, self.hidden = width, heads, hidden


class TokenMean(nn.Module):
    """The mean over the tokens."""

    sizes = ()

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (samples, width)."""
        return x.mean(1)


def vit(
    shape: Sequence[int],
    classes: int,
    *,
    depth: int = 8,
    width: int = 192,
    heads: int | None = None,
    patch: int | None = None,
    hidden: int | None = None,
) -> nn.Sequential:
    """A vision transformer for square images of this shape.

    Args:
        shape: the shape of one image, (channels, side, side).
        classes: the number of outputs.
        depth: how many layers.
        width: of a token.
        heads: of attention. Default: one for 64 numbers of the width, or fewer that divide it.
        patch: the side of a patch. Default: an eighth of the image's, or 16 above 64 px, but 2 or
            more; if that does not divide the side, the next larger number that does.
        hidden: units of each layer's perceptron. Default: twice the width.

    Examples:
        >>> net = vit((3, 32, 32), 10, depth=2, width=64)
        >>> net(torch.zeros(5, 3, 32, 32)).shape
        torch.Size([5, 10])
        >>> import tpsgd
        >>> for block in tpsgd.split(net):
        ...     print(block)
        patches-layer1: Patches + EncoderLayer
        layer2: EncoderLayer + LayerNorm + TokenMean
        head: Linear
    """
    check_image(shape, classes)
    sizes = {"depth": depth, "width": width}
    chosen = {"heads": heads, "patch": patch, "hidden": hidden}
    for name, number in (sizes | {k: v for k, v in chosen.items() if v is not None}).items():
        if not isinstance(number, int) or number < 1:
            raise TpsgdError(f"{name} must be a whole number, 1 or more, got {number!r}")
    channels, side = shape[0], shape[-1]
    if patch is None:
        least = 16 if side > SMALL else min(side, max(2, side // 8))
        patch = next((n for n in range(least, side // 2 + 1) if side % n == 0), least)
    if heads is None:
        heads = next(n for n in range(max(1, width // 64), 0, -1) if width % n == 0)
    if shape[1] != side or side % patch or width % heads:
        raise TpsgdError(
            "a vision transformer needs square images of whole patches, and a width that the heads "
            f"divide; got {tuple(shape)}, patch={patch}, width={width}, heads={heads}"
        )
    layers: dict[str, nn.Module] = {"patches": Patches(channels, side, patch, width)}
    for i in range(depth):
        layers[f"layer{i + 1}"] = EncoderLayer(width, heads, hidden or 2 * width)
    layers |= {"norm": nn.LayerNorm(width), "mean": TokenMean(), "head": nn.Linear(width, classes)}
    return nn.Sequential(OrderedDict(layers))
