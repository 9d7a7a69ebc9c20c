"""`evaluate`: the accuracy of a model, or how well it fits numbers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd import losses
from tpsgd.common.errors import TpsgdError
from tpsgd.common.numbers import is_whole
from tpsgd.engine.settings import ProgressFunction
from tpsgd.engine.sources.batches import BatchForm, has_lookup, suits_channels_last
from tpsgd.engine.sources.inputs import NO_LABEL, check_values, inputs, labels
from tpsgd.engine.sources.loaders import as_source
from tpsgd.losses import IGNORED, Loss, bce
from tpsgd.maths.kernels.epoch_figures import hits, moments_of, r_squared
from tpsgd.nets.blocks import misfit
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.recurrent import connect, tokens_of
from tpsgd.rules import Rule
from tpsgd.targets import Target, are_probabilities


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 1024,
    multi_label: bool | None = None,
    loss: Loss | str | nn.Module | None = None,
    rule: Rule | None = None,
) -> float:
    """The share of samples that a model classifies correctly, between 0 and 1; R² of numbers.

    Labels are class indices, or float rows: soft labels when every row sums to 1 (the largest entry
    counts), otherwise yes-or-no labels of several classes, all of which must be right (subset
    accuracy); `multi_label` overrides this guess. Yes-or-no outputs are cut at 0 for logits and at
    0.5 after a Sigmoid. Any other numbers are compared with the outputs: R² is 1 for equal ones and
    0 for outputs that are the mean, averaged over several outputs. With a label for every step or
    pixel, each counts, those without a label (-100) left out. Samples are read as `fit` reads
    them: bytes are divided by 255.

    Args:
        model: any module.
        data: as for `fit`.
        batch_size: samples per forward pass.
        multi_label: whether float rows are yes-or-no labels of several classes.
        loss: return the mean of this loss instead, as `fit` takes it; or "r2": R², also of numbers
            that look like classes, because all of them are 0 or 1.
        rule: that trained the model, if it predicts by something else than the last layer, as
            Forward-Forward does by the goodness of each class.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> _ = model.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        >>> evaluate(model, (torch.eye(2), torch.tensor([0, 1])))
        1.0
        >>> evaluate(model, (torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 2.0]])), loss="mse")
        0.25
    """
    if rule is not None and not isinstance(rule, Rule):
        raise TpsgdError(f"rule must be a tpsgd.Rule, the one that trained the model, got {rule!r}")
    model = model if rule is None else rule.predicting(model)
    if loss == "r2":
        return evaluate_numbers(model, data, batch_size)
    chosen, sums = losses.resolve(loss), Scores(cut_of(model))
    for out, y, target in answers(model, data, batch_size, chosen):
        if chosen is not None:
            sums.add_loss(chosen, out, y)
        else:
            sums.add(out, y, target.numbers)
    return sums.result(multi_label)


@torch.no_grad()
def evaluate_numbers(model: nn.Module, data: Any, batch_size: int = 1024) -> float:
    """R² of labels that are numbers, also where all of them happen to be 0 or 1."""
    sums = Scores(0.0)
    for out, y, _ in answers(model, data, batch_size, losses.mse):
        sums.add(out, y, numbers=True)
    return sums.result(None)


class Scores:
    """Sums over the samples of a data set, and what they come to."""

    def __init__(self, cut: float) -> None:
        self.cut, self.samples, self.total = cut, 0, 0.0
        self.right_largest: Any = 0  # by the largest entry of a row, and by every entry
        self.right_everywhere: Any = 0
        self.soft = True
        self.numbers = False  # whether any batch has labels that cannot be of classes
        self.moments: Any = 0

    def add_loss(self, loss: Loss, out: Tensor, y: Tensor) -> None:
        self.total += float(loss.value(out, y)) * len(y)
        self.samples += len(y)

    def add(self, out: Tensor, y: Tensor, numbers: bool) -> None:
        self.samples += len(y)
        self.numbers |= numbers
        if y.is_floating_point():
            self.moments = self.moments + moments_of(out, y)
        self.soft &= out.shape[1] > 1 and (not y.is_floating_point() or are_probabilities(y))
        self.right_largest += hits(out, y, multi_label=False)
        self.right_everywhere += hits(out - self.cut, y, multi_label=True)

    def result(self, multi_label: bool | None) -> float:
        """The mean loss, R², or the accuracy."""
        if self.numbers:
            return float(r_squared(self.moments))
        if not isinstance(self.right_largest, Tensor):
            return self.total / self.samples
        soft = self.soft if multi_label is None else not multi_label
        return int(self.right_largest if soft else self.right_everywhere) / self.samples


def answers(
    model: nn.Module, data: Any, batch_size: int, loss: Loss | None = None
) -> Iterator[tuple[Tensor, Tensor, Target]]:
    """The outputs of a model and the labels, batch by batch, a row for each label.

    A single output has float labels. After the last batch, empty data and outputs that are NaN are
    errors.
    """
    form, maps = form_for(model, batch_size), ends_in_maps(model)
    samples, labelled, has_nan = 0, 0, torch.zeros((), dtype=torch.bool, device=form.device)
    with modes_restored(model):
        net = connect(model).eval()
        for batch in as_source(data, form, None, None).batches():
            x, y = batch.load()
            out = output(net, x)
            samples += len(y)
            has_nan = has_nan | out.isnan().any()
            rows = _rows(out, y, _target_of(y, loss, out, maps))
            labelled += len(rows[1])
            if len(rows[1]):
                yield rows
    if not labelled:
        empty = "the data is empty: there is nothing to evaluate on"
        raise TpsgdError(NO_LABEL if samples else empty)
    if has_nan:
        raise not_a_number(model)


def _target_of(y: Tensor, loss: Loss | None, out: Tensor, maps: bool) -> Target:
    """What labels are; of real numbers without a loss, by their values."""
    shape, target = tuple(out.shape[1:]), Target.of(y, loss)
    if y.is_floating_point() and (loss is None or loss.of_numbers) and y.numel():
        yes_or_no = bool(((y == 0) | (y == 1)).all())
        of_classes = yes_or_no or (y.dim() == 2 and y.shape[1] > 1 and are_probabilities(y))
        target = replace(target, numbers=loss is not None or not of_classes)
    target = target.at(shape, maps)
    if loss is not None and loss.of_numbers and target.outputs(shape) == 1:
        return replace(target, numbers=True)  # whole numbers too, as in `fit`
    return target


def _rows(out: Tensor, y: Tensor, target: Target) -> tuple[Tensor, Tensor, Target]:
    """Outputs and labels, checked, with a row for each label."""
    if target.positions:
        y = labels(y, None, target.outputs(tuple(out.shape[1:])), False, target)
        out = target.outputs_last(out).flatten(0, -2)
        y = y.flatten(0, -2) if y.is_floating_point() else y.flatten().long()
        if not y.is_floating_point():
            out, y = out[y != IGNORED], y[y != IGNORED]
        return out, y, target
    if target.numbers:
        return out, labels(y, None, out.shape[1], False, target).to(out.dtype), target
    if out.shape[1] == 1:
        if y.numel() and not 0 <= y.min() <= y.max() <= 1:
            raise TpsgdError(
                "the labels of one yes-or-no output must lie between 0 and 1, and go from "
                f"{y.min():g} to {y.max():g}: numbers to predict must be real numbers, as y.float()"
            )
        return out, labels(y, bce, 1, False).to(out.dtype), target
    return out, labels(y, None, out.shape[1]), target


def form_for(model: nn.Module, batch_size: int) -> BatchForm:
    """The form of batches that a model evaluates."""
    if not is_whole(batch_size, 1):
        raise TpsgdError(f"batch_size must be 1 or more, got {batch_size!r}")
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
    """One number per class for each label of a batch, or an error that says why not."""
    try:
        out = model(x)
    except Exception as error:  # whatever a custom module may raise
        name = getattr(model, "block_title", type(model).__name__)
        raise misfit(name, [model], x, error) from error
    if not isinstance(out, Tensor) or out.dim() < 2:
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
