"""Recipes: the settings of `fit` for one kind of net, as a value; local rules and backprop take it.

`deep` is for VGGs and other nets without shortcuts, `residual` for ResNets, `vit` for transformers.

    net = recipes.deep.vgg(11, (3, 160, 160), 10)
    tpsgd.fit(net, data, **recipes.deep.settings((3, 160, 160), device="cuda"))

`tpsgd train --recipe deep` takes the same value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.learners.optimizers import OptimizerFactory, momentum
from tpsgd.engine.settings import Settings
from tpsgd.engine.sources import augment
from tpsgd.maths.learning_rates import RateCurve, one_cycle
from tpsgd.train import simultaneous
from tpsgd.zoo import vgg

LEAST_SHIFT = 4  # pixels


@dataclass(frozen=True)
class Recipe:
    """How to train a net from scratch on images; a field changes by `replace`.

    Args:
        lr: the learning rate at the top of the curve.
        lr_schedule: what the learning rate follows.
        epochs: passes over the data.
        batch_size: samples per step.
        flip: the probability that an image is mirrored left and right.
        shift: images are shifted by up to this share of their shorter side, or by up to 4 pixels or
            an eighth of the side if the share is less; new pixels are mirrored ones.
        cutout: the side of a square that is set to zero, as a share of the shorter side.
        optimizer: as for `fit`; None is Adam.
        weight_decay: of matrices, as for `fit`.
        clip: the largest norm of a block's gradients, as for `fit`.
    """

    lr: float = 1e-3
    lr_schedule: RateCurve = one_cycle(0.2)  # noqa: RUF009 (a frozen value)
    epochs: int = 12
    batch_size: int = 64
    flip: float = 0.5
    shift: float = 0.075
    cutout: float = 0.0
    optimizer: OptimizerFactory | None = None
    weight_decay: float = 0.0
    clip: float | None = None

    def settings(
        self, shape: Sequence[int], device: torch.device | str | None = None, **chosen: Any
    ) -> dict[str, Any]:
        """The keywords of `fit` for images of this shape; `chosen` ones replace the recipe's.

        Args:
            shape: the shape of an image, (channels, height, width).
            device: where to train; on a GPU activations are `bfloat16`.
            **chosen: any other setting of `fit`.

        Examples:
            >>> settings = deep.settings((3, 160, 160), epochs=30)
            >>> print(settings["augment"], settings["lr_schedule"], settings["epochs"])
            chain(flip(0.5), crop(12, reflect)) one_cycle(0.2) 30
        """
        Settings.refuse_unknown("fit", (name for name in chosen if name != "rule"))
        settings = {
            "order": simultaneous,
            "lr": self.lr,
            "lr_schedule": self.lr_schedule,
            "optimizer": self.optimizer,
            "weight_decay": self.weight_decay,
            "clip": self.clip,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "augment": self.augmentation(shape),
        }
        if device is not None:
            settings["device"] = device
            if torch.device(device).type == "cuda":
                settings["precision"] = torch.bfloat16
        return settings | chosen

    def augmentation(self, shape: Sequence[int]) -> augment.Augmentation:
        """Flips, mirrored shifts and squares of zeros for images of this shape.

        Examples:
            >>> print(deep.augmentation((3, 32, 32)))
            chain(flip(0.5), crop(4, reflect))
        """
        if not isinstance(shape, Sequence) or len(shape) != 3:
            problem = f"not for samples of shape {shape}"
            raise TpsgdError(f"this recipe is for images, (channels, height, width), {problem}")
        side = min(shape[1:])
        shift = max(round(self.shift * side), min(LEAST_SHIFT, side // 8)) if self.shift else 0
        functions = [augment.flip(self.flip)] if self.flip else []
        functions += [augment.crop(shift, reflect=True)] if shift else []
        functions += [augment.cutout(size)] if (size := round(self.cutout * side)) else []
        return augment.chain(*functions)

    def vgg(self, depth: int, shape: Sequence[int], classes: int, **options: Any) -> nn.Sequential:
        """A VGG net with a norm after every layer but the last; `options` as for `zoo.vgg.vgg`."""
        options = {"batch_norm": True, "dense_norm": True} | options
        return vgg.vgg(depth, shape, classes, **options)


deep = Recipe()
residual = Recipe(0.2, epochs=15, batch_size=128, optimizer=momentum, weight_decay=5e-4)
vit = Recipe(1e-3, one_cycle(0.1), epochs=20, batch_size=128, weight_decay=0.05, clip=1.0)
ALL = {"deep": deep, "residual": residual, "vit": vit}
