"""How samples reach the nets of a stream: as they are, or as the features of an adaptor's taps."""

from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.evaluate import all_outputs, form_for
from tpsgd.engine.sources.inputs import check_values
from tpsgd.nets.modes import evaluating
from tpsgd_edge.adapt.adaptor import Adaptor
from tpsgd_edge.adapt.features import check_samples

EXAMPLES = 2  # samples that show whether a model can take them


class ModelReader:
    """Samples of a model that learns as a whole."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.nets = model, [model]  # the nets that learn
        self.names: list[str] | None = None  # of the classes, if the model has any
        self.form: Any = None  # type, shape and number format of the samples so far

    def inputs(self, x: Any) -> list[Any]:
        """What each net sees of some samples."""
        return [x]

    def check(self, x: Any) -> None:
        """Refuse samples that the model cannot take; one of a new shape goes through it."""
        check_values(x, form_for(self.model, EXAMPLES))
        form = type(x), x.shape[1:], x.dtype
        if form != self.form:
            all_outputs(self.model, x[:EXAMPLES], EXAMPLES)
            self.form = form

    def outputs(self, x: Any, batch_size: int) -> Tensor:
        """One number per class for each sample."""
        return all_outputs(self.model, x, batch_size)


class AdaptorReader(ModelReader):
    """Samples of an adaptor, whose layers learn from the features of its backbone's taps."""

    def __init__(self, adaptor: Adaptor) -> None:
        super().__init__(adaptor)
        self.adaptor, self.nets = adaptor, list(adaptor.heads.values())
        self.names = list(adaptor.classes)

    def inputs(self, x: Tensor) -> list[Tensor]:
        return list(self.adaptor.backbone(x, self.adaptor.taps).values())

    def check(self, x: Any) -> None:
        """Refuse samples that are not like those of the adaptor's training."""
        shape = tuple(x.shape[1:])
        if not isinstance(x, Tensor) or shape != self.adaptor.shape:
            was = self.adaptor.shape
            raise TpsgdError(f"the adaptor was trained on samples of shape {was}, not {shape}")
        check_samples(self.adaptor.backbone, x)

    @torch.no_grad()
    def outputs(self, x: Any, batch_size: int) -> Tensor:
        self.check(x)
        with evaluating(self.adaptor):
            return torch.cat([self.adaptor(few) for few in x.split(batch_size)])
