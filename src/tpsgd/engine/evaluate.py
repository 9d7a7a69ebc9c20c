"""`evaluate`: the accuracy of a model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.settings import ProgressFunction
from tpsgd.engine.sources.batches import BatchForm, has_lookup, suits_channels_last
from tpsgd.engine.sources.inputs import check_values, inputs, labels
from tpsgd.engine.sources.loaders import as_source
from tpsgd.losses import bce
from tpsgd.maths.kernels.epoch_figures import hits
from tpsgd.nets.blocks import misfit
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.recurrent import connect, tokens_of


@torch.no_grad()
def evaluate(
    model: nn.Module, data: Any, *, batch_size: int = 1024, multi_label: bool | None = None
) -> float:
    """The share of samples that a model classifies correctly, between 0 and 1.

    Labels are class indices, or float rows: soft labels when every row sums to 1 (the largest entry
    counts), otherwise yes-or-no labels of several classes, all of which must be right (subset
    accuracy); `multi_label` overrides this guess. Yes-or-no outputs are cut at 0 for logits and at
    0.5 after a Sigmoid. Samples are read as `fit` reads them: bytes are divided by 255.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        >>> evaluate(model, (torch.eye(2), torch.tensor([0, 1])))
        1.0
    """
    cut = cut_of(model)
    samples, right_largest, right_everywhere, soft = 0, 0, 0, True  # by largest or every entry
    for out, y in answers(model, data, batch_size):
        samples += len(y)
        soft &= out.shape[1] > 1
        soft &= not y.is_floating_point() or bool(((y.sum(1) - 1).abs() < 1e-3).all())
        right_largest += hits(out, y, multi_label=False)
        right_everywhere += hits(out - cut, y, multi_label=True)
    soft = soft if multi_label is None else not multi_label
    return int(right_largest if soft else right_everywhere) / samples


def answers(model: nn.Module, data: Any, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The outputs of a model and the labels, batch by batch; a single output has float labels.

    After the last batch, empty data and outputs that are NaN are errors.
    """
    form = form_for(model, batch_size)
    samples, has_nan = 0, torch.zeros((), dtype=torch.bool, device=form.device)
    with modes_restored(model):
        net = connect(model).eval()
        for batch in as_source(data, form, None, None).batches():
            x, y = batch.load()
            out = output(net, x)
            _refuse_numbers(y)
            samples += len(y)
            has_nan = has_nan | out.isnan().any()
            if out.shape[1] == 1:
                yield out, labels(y, bce, 1).to(out.dtype)
            else:
                yield out, labels(y, None, out.shape[1])
    if not samples:
        raise TpsgdError("the data is empty: there is nothing to evaluate on")
    if has_nan:
        raise not_a_number(model)


def _refuse_numbers(y: Tensor) -> None:
    if y.is_floating_point() and y.numel() and (y.min() < 0 or y.max() > 1):
        raise TpsgdError(
            f"y has float targets from {float(y.min()):.4g} to {float(y.max()):.4g}, and accuracy "
            "is for classes: compute a loss of the outputs, for example "
            "torch.nn.functional.mse_loss(model(x), y)"
        )


def form_for(model: nn.Module, batch_size: int) -> BatchForm:
    """The form of batches that a model evaluates."""
    if batch_size < 1:
        raise TpsgdError(f"batch_size must be 1 or more, got {batch_size}")
    first = next(model.parameters(), torch.empty(0))
    modules = list(model.modules())
    return BatchForm(
        first.device,
        first.dtype,
        batch_size,
        (0,),
        channels_last=suits_channels_last(modules),
        lookup=has_lookup(modules),
        tokens=tokens_of(model),
    )


def output(model: nn.Module, x: Any) -> Tensor:
    """One number per class for each sample of a batch, or an error that says why not."""
    try:
        out = model(x)
    except Exception as error:  # whatever a custom module may raise
        raise misfit(type(model).__name__, [model], x, error) from error
    if not isinstance(out, Tensor) or out.dim() != 2:
        shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise TpsgdError(f"the model must give (batch, classes), one number per class, got {shape}")
    return out


@torch.no_grad()
def all_outputs(
    model: nn.Module, x: Any, batch_size: int, progress: ProgressFunction | None = None
) -> Tensor:
    """A model's outputs for samples in any form, one number per class, in evaluation mode."""
    x, form = inputs(x), form_for(model, batch_size)
    if not len(x):
        raise TpsgdError("there are no samples to predict")
    check_values(x, form)
    with modes_restored(model):
        net, outputs = connect(model).eval(), []
        for start in range(0, len(x), batch_size):
            if progress is not None:
                progress(start, len(x))
            outputs.append(output(net, form(x[start : start + batch_size])))
        return torch.cat(outputs)


def not_a_number(model: nn.Module) -> TpsgdError:
    """The error of a model whose output is NaN: it names the first weights that are not finite."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, t in tensors if not torch.isfinite(t).all()]
    if not names:
        return TpsgdError("the model's output is NaN, though its weights are finite")
    return TpsgdError(
        f"the model's output is NaN, because {names[0]} has NaN or infinity: train it again from "
        "new weights with a lower learning rate"
    )


def cut_of(model: nn.Module) -> float:
    """The output from which a yes-or-no answer is yes: 0.5 after a Sigmoid, else 0."""
    return 0.5 if isinstance(last_module(model), nn.Sigmoid) else 0.0


def last_module(module: nn.Module) -> nn.Module:
    """The last module of nested `nn.Sequential`s."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[-1]
    return module
