"""What can learn from a stream: a model, or the layers of an adaptor on a frozen backbone."""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.adapt.adaptor import Adaptor
from tpsgd.adapt.features import check_samples
from tpsgd.engine.batches import check_values
from tpsgd.errors import TpsgdError
from tpsgd.maths.epoch_figures import hits
from tpsgd.nets.modes import evaluating
from tpsgd.streams.new_classes import add_output, last_block, outputs_of, why_not
from tpsgd.training.evaluate import all_outputs, evaluate, form_for, last_module

EXAMPLES = 2  # samples that show whether a model can take them


class Model:
    """A model that learns as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: list[str] | None = None  # of the classes, if the model has any
        self.form: Any = None  # of the samples so far

    @property
    def nets(self) -> list[nn.Module]:
        """The nets that learn."""
        return [self.model]

    @property
    def classes(self) -> int:
        """How many classes it tells apart."""
        return outputs_of(self.nets[0])

    def inputs(self, x: Any) -> list[Any]:
        """What each net sees of some samples."""
        return [x]

    def check(self, x: Any) -> None:
        """Refuse samples that it cannot take; one of a shape that is new goes through it."""
        check_values(x, form_for(self.model, EXAMPLES))
        form = type(x), x.shape[1:], x.dtype
        if form != self.form:
            all_outputs(self.model, x[:EXAMPLES], EXAMPLES)
            self.form = form

    def outputs(self, x: Any, batch_size: int) -> Tensor:
        """One number per class for each sample."""
        return all_outputs(self.model, x, batch_size)

    def evaluate(self, x: Any, y: Tensor) -> float:
        """The share of samples that are classified correctly; y are indices or rows."""
        return evaluate(self.model, (x, y))

    def wrong(self, x: Any, y: Tensor, multi_label: bool) -> list[int]:
        """For each sample 1 if it is classified wrongly, else 0; y are indices or rows."""
        cut = 0.5 if isinstance(last_module(self.nets[0]), nn.Sigmoid) else 0.0
        out = self.outputs(x, len(x)) - cut
        return (1 - hits(out[:, None], y.to(out.device)[:, None], multi_label)).tolist()

    def check_new_class(self) -> None:
        """Refuse a new class if a net cannot get another output."""
        for net in self.nets:
            if reason := why_not(block := last_block(net)):
                raise TpsgdError(f"the last block ({block}) cannot get a new class: {reason}")

    def add_class(self, name: Any) -> None:
        """One more output of each net."""
        for net in self.nets:
            add_output(net)


class Layers(Model):
    """The layers of an adaptor, which learn from the features of its backbone's taps."""

    def __init__(self, adaptor: Adaptor) -> None:
        super().__init__(adaptor)
        self.adaptor, self.names = adaptor, list(adaptor.classes)

    @property
    def nets(self) -> list[nn.Module]:
        """The layers of each tap."""
        return list(self.adaptor.heads.values())

    def inputs(self, x: Tensor) -> list[Tensor]:
        """The features of each tap."""
        return list(self.adaptor.backbone(x, self.adaptor.taps).values())

    def check(self, x: Any) -> None:
        """Refuse samples that are not like those of the adaptor's training."""
        if not isinstance(x, Tensor) or tuple(x.shape[1:]) != self.adaptor.shape:
            raise TpsgdError(
                f"the adaptor was trained on samples of shape {self.adaptor.shape}, these have "
                f"{tuple(x.shape[1:])}"
            )
        check_samples(self.adaptor.backbone, x)

    @torch.no_grad()
    def outputs(self, x: Any, batch_size: int) -> Tensor:
        """One number per class for each sample."""
        self.check(x)
        with evaluating(self.adaptor):
            return torch.cat([self.adaptor(few) for few in x.split(batch_size)])

    def evaluate(self, x: Any, y: Tensor) -> float:
        """The share of samples that are classified correctly; y are indices or rows."""
        return self.adaptor.evaluate((x, y))

    def add_class(self, name: Any) -> None:
        """One more output of each tap's layers."""
        super().add_class(name)
        self.adaptor.classes = (*self.adaptor.classes, str(name))


def as_subject(model: nn.Module) -> Model:
    """A model or an adaptor as something that can learn from a stream."""
    if isinstance(model, Adaptor):
        return Layers(model)
    if not isinstance(model, nn.Module):
        raise TpsgdError(f"a stream needs a model, an nn.Sequential, got {type(model).__name__}")
    return Model(model)
