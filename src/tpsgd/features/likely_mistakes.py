"""Likely mistakes of users: an error or a warning before training, a hint after it."""

import warnings
from collections.abc import Sequence
from math import inf, log

import torch
from torch import Tensor, nn
from torch.special import entr

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.assemble import place_of
from tpsgd.engine.evaluate import last_module
from tpsgd.engine.record import LARGE_INPUT, Run
from tpsgd.engine.solvers import SOLVERS
from tpsgd.engine.sources.batches import ArraySource, stored_samples
from tpsgd.engine.sources.loaders import LoaderSource
from tpsgd.engine.spec import RunSpec
from tpsgd.losses import IGNORED, Loss, bce, cross_entropy, mse
from tpsgd.nets.cuts.split import AUTO
from tpsgd.nets.model_inputs import ModelInputs
from tpsgd.nets.padded import Padded
from tpsgd.objectives import Place
from tpsgd.train import Source

# what a loss expects of the output, and the functions at the end of a model that prevent it
PREVENTED: dict[Loss, tuple[str, tuple[type[nn.Module], ...]]] = {
    cross_entropy: ("applies a softmax itself", (nn.Softmax, nn.Sigmoid)),
    bce: ("applies a sigmoid itself", (nn.Softmax, nn.LogSoftmax, nn.Sigmoid)),
    mse: ("compares the output with 0 and 1", (nn.LogSoftmax,)),
}
BOUNDED = nn.Sigmoid, nn.Tanh, nn.Softmax
SMALL_INPUT = 0.01  # standard deviation of x below which a net hardly sees its inputs
INPUTS = 1000  # samples that are looked at
SUITABLE = {nn.Softmax: cross_entropy, nn.LogSoftmax: cross_entropy, nn.Sigmoid: bce}


def refuse_broken_weights(models: Sequence[nn.Module]) -> None:
    """Refuse weights that are NaN or infinite, or have hooks that no training here would run."""
    for name, p in (pair for model in models for pair in model.named_parameters()):
        if p._post_accumulate_grad_hooks:
            raise TpsgdError(
                f"{name} has a hook that waits for gradients to be accumulated, which is never "
                "done here: remove it, or change gradients with register_hook"
            )
        has_numbers = p.is_floating_point() and p.numel() and not p.is_meta
        if has_numbers and not torch.isfinite(torch.stack(p.detach().aminmax())).all():
            raise TpsgdError(
                f"the model has NaN or infinity in {name} before training: make it anew"
            )


def warn_of_link(spec: RunSpec) -> None:
    """Warn if the model ends in a function that the loss has already, or has no use for."""
    block, loss = spec.blocks[-1], spec.loss
    link = type(last_module(block.modules[-1]))
    solved = isinstance(spec.block_settings[-1].optimizer, SOLVERS)
    if solved or place_of(block, loss) is not Place.END:  # else the loss looks at the logits
        return
    reason, links = PREVENTED.get(loss, ("", ()))
    if link in links:
        name, other = f"nn.{link.__name__}", SUITABLE[link]
        advice = f", or use loss=tpsgd.{other.name}" if other is not loss else ""
        text = f"the model ends in {name}, but {loss.name} {reason}: leave {name} out{advice}"
        warnings.warn(text, stacklevel=6)


def warn_of_cut(spec: RunSpec, model: nn.Module) -> None:
    """Warn if nothing can be cut, or if sizes do not tell steps from classes."""
    (*_, sizes), block = spec.sizes, spec.blocks[-1]
    matrices = [p for p in block.named_parameters().values() if p.dim() > 1]
    asked = spec.settings.blocks not in (None, AUTO) or spec.settings.split_points
    if block.of_class and spec.rules and len(spec.blocks) == 1 < len(matrices) and not asked:
        warnings.warn(
            f"{type(model).__name__} is one block, so that it learns by backprop: more than one "
            "activation crosses wherever it might be cut, or it shares weights, or its layers are "
            "in no list (print(tpsgd.split(model, shape)) shows it)",
            stacklevel=6,
        )
    output, positions = sizes[Place.END], spec.target.positions
    ends_in_layer = isinstance(block.modules[-1], (nn.Linear, nn.Conv1d, nn.Conv2d))
    if positions and not ends_in_layer and spec.target.is_ambiguous(output):
        order = "(classes, steps)" if spec.target.channels_first else "(steps, classes)"
        warnings.warn(
            f"outputs of shape (batch, {output[0]}, {output[-1]}) are taken as {order}: they may "
            "be the other way round; end the model with the layer itself to settle it",
            stacklevel=6,
        )


def warn_of_bytes(source: Source) -> None:
    """Warn of bytes that are no pixels: 0 and 1, which would be divided by 255."""
    samples = stored_samples(source)
    if not isinstance(samples, ArraySource) or samples.form.looks_up(samples.x):
        return
    x = samples.x.data if isinstance(samples.x, (Padded, ModelInputs)) else samples.x
    if x.dtype is torch.uint8 and x.numel() and int(x.max()) <= 1:
        warnings.warn(
            "x is of bytes (uint8), which are taken as pixels and divided by 255, but has none "
            "above 1: give x as bool or float if it holds yes and no",
            stacklevel=6,
        )


def hint_for(run: Run, samples: ArraySource | LoaderSource, spec: RunSpec) -> str:
    """Why the last block is no better than guessing, in a sentence; "" if it has learned."""
    losses = [e.loss for e in run.history if e.block in (0, len(run.blocks))]
    if not losses or run.blocks[-1].learning == "solved":
        return ""
    last, rate = losses[-1], run.settings["lr"]
    lower = "lower the learning rate" + ("" if rate is None else f", lr={rate}")
    of_zeros, guessed = _losses_without_inputs(samples, spec.loss, spec.classes)
    if of_zeros == inf:
        rose = f"the last block's loss rose from {losses[0]:.3g} to {last:.3g}: {lower}"
        return rose if last > 1.1 * losses[0] else ""
    diverged = last > 2 * of_zeros
    if guessed < 1e-6 * of_zeros or not (diverged or (len(losses) > 1 and last > 0.98 * guessed)):
        return ""
    longer = "train longer (more epochs, or a smaller batch_size) or raise the learning rate"
    if spec.target.numbers and (end := type(last_module(spec.blocks[-1].modules[-1]))) in BOUNDED:
        longer = f"the model ends in nn.{end.__name__}: leave it out, or scale the labels to it"
    cause = _unscaled(samples) or (lower if diverged else longer)
    level = "far above" if diverged else "no better than"
    guessing = f"{level} the loss of guessing, {guessed:.3g}"
    return f"the last block's loss, {last:.3g}, is {guessing}: {cause}"


def _losses_without_inputs(
    samples: ArraySource | LoaderSource, loss: Loss, classes: int
) -> tuple[float, float]:
    """The loss of outputs that are all 0, and of the best that are equal for all samples.

    Both are for classes of equal size where the labels are not stored; infinity if unknown.
    """
    of_zeros = {cross_entropy: log(classes), bce: classes * log(2)}.get(loss, inf)
    if not isinstance(samples, ArraySource) or loss not in PREVENTED:
        return of_zeros, of_zeros
    y, square = samples.y, 1.0
    if y.dim() > 1 + y.is_floating_point():  # labels of every step or pixel
        y = y.flatten(0, -2) if y.is_floating_point() else y[y != IGNORED]
    if y.is_floating_point():
        mean, square = y.double().mean(0), float(y.double().square().sum(1).mean())
    else:
        mean = torch.bincount(y.long(), minlength=classes).double() / len(y)
    if loss is mse:
        return square / 2, (square - float(mean.square().sum())) / 2
    return of_zeros, float((entr(mean) + (entr(1 - mean) if loss is bce else 0)).sum())


def _unscaled(samples: ArraySource | LoaderSource) -> str:
    """What to do about inputs that are much smaller or larger than 1; "" if they are not."""
    if isinstance(samples, LoaderSource) or not isinstance(samples.x, (Tensor, Padded)):
        return ""
    if samples.form.looks_up(samples.x):
        return ""
    x = samples.form(samples.x[:INPUTS])
    x = x.data if isinstance(x, Padded) else x
    spread, largest = float(x.float().std(correction=0)), float(x.abs().max())
    if spread < SMALL_INPUT:
        return f"x has a standard deviation of {spread:.2g}, scale it to about 1"
    return f"x reaches {largest:.2g}, scale it to about 1" if largest > LARGE_INPUT else ""
