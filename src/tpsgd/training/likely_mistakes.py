"""Models and data that are probably not meant so: a warning, or an error, with the cause."""

import warnings
from collections.abc import Sequence

import torch
from torch import nn

from tpsgd.engine.anatomy import Anatomy
from tpsgd.engine.assemble import place_of
from tpsgd.engine.batches import Arrays, stored_samples
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, bce, cross_entropy, mse
from tpsgd.nets.padded import Padded
from tpsgd.protocols import Source
from tpsgd.rules import Place
from tpsgd.solvers import SOLVERS
from tpsgd.training.evaluate import last_module

# what a loss expects of the output, and the functions at the end of a model that prevent it
PREVENTED: dict[Loss, tuple[str, tuple[type[nn.Module], ...]]] = {
    cross_entropy: ("applies a softmax itself", (nn.Softmax, nn.Sigmoid)),
    bce: ("applies a sigmoid itself", (nn.Softmax, nn.LogSoftmax, nn.Sigmoid)),
    mse: ("compares the output with 0 and 1", (nn.LogSoftmax,)),
}
SUITABLE = {nn.Softmax: cross_entropy, nn.LogSoftmax: cross_entropy, nn.Sigmoid: bce}


def refuse_broken_weights(models: Sequence[nn.Module]) -> None:
    """Refuse a model that no training can mend: one with weights that are NaN or infinite."""
    for name, p in (pair for model in models for pair in model.named_parameters()):
        has_numbers = p.is_floating_point() and p.numel() and not p.is_meta
        if has_numbers and not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise TpsgdError(
                f"the model has NaN or infinity in {name} before training: make it anew"
            )


def warn_of_link(anatomy: Anatomy) -> None:
    """Warn if the model ends in a function that the loss has already, or has no use for.

    `place_of` lets a loss look at the logits before its own function where it can.
    """
    block, loss = anatomy.blocks[-1], anatomy.loss
    link = type(last_module(block.modules[-1]))
    solved = isinstance(anatomy.block_settings[-1].optimizer, SOLVERS)
    if solved or place_of(block, loss) is not Place.END or loss not in PREVENTED:
        return
    reason, links = PREVENTED[loss]
    if link in links:
        other = SUITABLE[link]
        advice = f"leave nn.{link.__name__} out"
        advice += f", or use loss=tpsgd.{other.name}" if other is not loss else ""
        warnings.warn(
            f"the model ends in nn.{link.__name__}, but {loss.name} {reason}: {advice}",
            stacklevel=4,
        )


def warn_of_bytes(source: Source) -> None:
    """Warn of bytes that are no pixels: 0 and 1, which would be divided by 255."""
    samples = stored_samples(source)
    if not isinstance(samples, Arrays) or samples.form.looks_up(samples.x):
        return
    x = samples.x.data if isinstance(samples.x, Padded) else samples.x
    if x.dtype is torch.uint8 and x.numel() and int(x.max()) <= 1:
        warnings.warn(
            "x is of bytes (uint8), which are taken as pixels and divided by 255, but has none "
            "above 1: give x as bool or float if it holds yes and no",
            stacklevel=4,
        )
