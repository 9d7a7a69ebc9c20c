"""Labels that are numbers, standardised while a net learns; afterwards it gives their own units.

The mean and the deviation of the training labels go into the last layer: its weights are multiplied
by the deviation, and the mean is added to its bias. So the trained model needs no statistics beside
it, and training that goes on takes them out again first. A model whose outputs do not follow its
last layer in this way, because a sigmoid comes after it for example, learns the labels as they are.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.assemble import parameters
from tpsgd.engine.extension import Extension
from tpsgd.engine.record import Run
from tpsgd.engine.sources.loaders import some_pairs
from tpsgd.engine.spec import RunRequest, form_for
from tpsgd.nets.layers import ends_in_maps
from tpsgd.nets.modes import modes_restored
from tpsgd.nets.recurrent import connect
from tpsgd.train import Net

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)
LABELS = 2048  # of a loader, for their mean and deviation
FEW = 256  # samples that tell whether a model gives the units of the labels already
RESOLVED = 2.0**-18  # of a number: 32 steps of float32
NOTED = "standardised"  # in the record of a run


@dataclass(frozen=True)
class TargetScaling:
    """The mean and the deviation of labels; of a constant, the deviation 1."""

    shift: Tensor
    scale: Tensor

    @classmethod
    def of(cls, y: Tensor, shifts: bool = True) -> "TargetScaling":
        """Those of some labels, with their numbers in the last dimension."""
        rows = y.double().flatten(0, -2)
        constant = (rows == rows[0]).all(0)
        shift = torch.where(constant, rows[0], rows.mean(0))
        deviation = torch.where(constant, 1.0, rows.std(0, correction=0))
        return cls(shift if shifts else torch.zeros_like(shift), deviation)

    def __call__(self, y: Tensor) -> Tensor:
        """Labels with mean 0 and deviation 1."""
        return (y.double() - self.shift.to(y.device)) / self.scale.to(y.device)

    @torch.no_grad()
    def into(self, layer: Any) -> None:
        """Let a layer that gives standardised numbers give them in the units of the labels."""
        shift, scale = (t.to(layer.weight) for t in (self.shift, self.scale))
        layer.weight.mul_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None:
            layer.bias.mul_(scale).add_(shift)

    @torch.no_grad()
    def out_of(self, layer: Any) -> None:
        """The reverse of `into`."""
        shift, scale = (t.to(layer.weight) for t in (self.shift, self.scale))
        layer.weight.div_(scale.view(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None:
            layer.bias.sub_(shift).div_(scale)


class StandardisedTargets(Extension):
    """Standardises labels that are numbers, wherever the last layer can take their units.

    A model that explains some of the labels' variance as it is, from an earlier training, gives
    their units already: these are taken out of its last layer before it goes on.
    """

    scaling: TargetScaling | None = None
    layers: Sequence[Any] = ()  # the last ones of the models
    trained: Sequence[bool] = ()  # which of them give the units of the labels already

    def prepare(self, request: RunRequest) -> RunRequest:
        """Find the last layers, and the statistics of the labels."""
        if not request.target.numbers:
            return request
        nets = [Outputs(model, request) for model in request.models]
        if any(net.layer is None for net in nets):
            return request
        try:
            with torch.random.fork_rng([]):  # a loader that shuffles gives the same samples again
                torch.manual_seed(request.settings.seed)
                x, labels = some_pairs(request.data, LABELS)
            y = nets[0].canonical(labels)
        except TpsgdError:  # which labels of such a shape are later
            return request
        outputs = len(nets[0].layer.weight)
        if outputs not in (1, y.shape[-1]) or not torch.isfinite(y).all():
            return request
        rows = y.reshape(-1, outputs)  # of a model that leaves out a dimension of 1, all steps
        self.scaling = TargetScaling.of(rows, shifts=nets[0].layer.bias is not None)
        _warn_of_offset(self.scaling, rows)
        self.layers = [net.layer for net in nets]
        self.trained = [net.fits(x, y, self.scaling) for net in nets]
        return replace(request, scaling=self.scaling)

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Standardised outputs while the net learns; the units of the labels afterwards."""
        scaling = net.spec.scaling
        if scaling is None or not net.learners[-1].trains:
            yield
            return
        recorder = net.recorder
        for layer, trained in zip(self.layers, self.trained, strict=True):
            if trained:
                scaling.out_of(layer)
        if net.spec.restarts:  # which were stacked before
            stacked = parameters(len(net.learners) - 1, net.spec.cuts)
            with torch.no_grad():
                for name, values in stacked.items():
                    net.learners[-1].params[name].copy_(values)
        recorder.callbacks = [self._in_units(f) for f in recorder.callbacks]
        try:
            yield
        finally:
            for layer in self.layers:
                scaling.into(layer)

    def _in_units(self, callback: Any) -> Any:
        """A caller's function, for which the model gives the units of the labels."""

        @wraps(callback)
        def called(*arguments: Any) -> Any:
            assert self.scaling is not None
            before = [_copies(layer) for layer in self.layers]
            for layer in self.layers:
                self.scaling.into(layer)
            shown = [_copies(layer) for layer in self.layers]
            try:
                return callback(*arguments)
            finally:
                for layer, own, values in zip(self.layers, before, shown, strict=True):
                    if all(map(torch.equal, layer.parameters(), values)):
                        _restore(layer, own)  # without rounding: a look at a model changes nothing
                    else:
                        self.scaling.out_of(layer)

        return called

    def finish(self, net: Net, runs: list[Run]) -> list[Run]:
        """Note what the labels were, for those who predict: numbers, or those of positions."""
        target, note = net.spec.target, NOTED if net.spec.scaling is not None else "as they are"
        for run in runs:
            if target.numbers:
                run.settings["targets"] = note
            if target.positions:
                run.settings["positions"] = "last" if target.channels_first else "first"
        return runs


def _warn_of_offset(scaling: TargetScaling, rows: Tensor) -> None:
    """Warn of labels that differ by less than a few steps of float32."""
    differ = (rows != rows[0]).any(0)
    if (differ & (scaling.scale < RESOLVED * scaling.shift.abs())).any():
        warnings.warn(
            f"labels of about {float(scaling.shift.abs().max()):.3g} differ by only "
            f"{float(scaling.scale.min()):.3g}, which float32 can hardly show: subtract their mean "
            "first, and add it to predictions",
            stacklevel=7,
        )


def _copies(layer: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in layer.parameters()]


def _has_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers of its own."""
    tensors = *module.parameters(recurse=False), *module.buffers(recurse=False)
    return bool(tensors)


@torch.no_grad()
def _restore(layer: nn.Module, values: Sequence[Tensor]) -> None:
    for p, before in zip(layer.parameters(), values, strict=True):
        p.copy_(before)


class Outputs:
    """The outputs of a model, and the layer whose weights and bias scale and shift them, if any."""

    def __init__(self, model: nn.Module, request: RunRequest) -> None:
        self.model, self.target, self.layer = model, request.target, None
        self.samples = request.samples
        device = next(model.parameters()).device
        form = form_for([model], request.layers[0], request.samples, True, request.settings, device)
        self.form = replace(form, channels_last=False, precision=None)
        self.plain = self._of(self.form(request.samples))
        modules = [m for m in model.modules() if _has_tensors(m)]  # the last may be a batch norm
        layers = modules[-1:] if modules and type(modules[-1]) in KINDS else []
        learns = layers and all(p.requires_grad for p in layers[-1].parameters())
        if learns and self.plain is not None and self._follow(layers[-1]):
            self.layer: Any = layers[-1]

    @torch.no_grad()
    def _of(self, x: Any) -> Tensor | None:
        with modes_restored(self.model):
            try:
                out = connect(self.model).eval()(x)
            except Exception:  # whatever is wrong with the samples is refused later
                return None
        return out if isinstance(out, Tensor) and out.dim() > 1 else None

    @torch.no_grad()
    def _follow(self, layer: Any) -> bool:
        """Whether the outputs are twice as large, and 1 more, with such weights and such a bias."""
        before = _copies(layer)
        try:
            for p in layer.parameters():
                p.mul_(2)
            if layer.bias is not None:
                layer.bias.add_(1)
            changed = self._of(self.form(self.samples))
        finally:
            _restore(layer, before)
        assert self.plain is not None
        expected = 2 * self.plain + (layer.bias is not None)
        return changed is not None and torch.allclose(changed, expected, rtol=1e-3, atol=1e-4)

    def canonical(self, y: Tensor) -> Tensor:
        """Labels with the numbers of a position last."""
        assert self.plain is not None
        target = self.target.at(tuple(self.plain.shape[1:]), ends_in_maps(self.model))
        return target.canonical(y)

    def fits(self, x: Any, y: Tensor, scaling: TargetScaling) -> bool:
        """Whether outputs have the labels' units: nearer than the mean, or standardised far off."""
        count = min(len(x), len(y), FEW)  # a loader has told the labels of more samples
        out = self._of(self.form(x[:count]))
        if out is None:
            return False
        target = self.target.at(tuple(out.shape[1:]), ends_in_maps(self.model))
        outputs = target.canonical(out) if target.positions else out
        labels = scaling(y[:count].cpu())
        errors = [t.square().mean() for t in (scaling(outputs.cpu()) - labels, labels)]
        standardised = (outputs.cpu() - labels).square().mean()
        return bool(errors[0] < max(errors[1], standardised / 4))
