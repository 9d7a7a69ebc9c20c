"""How samples of a stream reach the layers of an adaptor: as features of its backbone's taps."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.nets.modes import evaluating
from tpsgd_adapt.features import check_samples
from tpsgd_streams.readers import ModelReader

if TYPE_CHECKING:
    from tpsgd_adapt.adaptor import Adaptor


class AdaptorReader(ModelReader):
    """Samples of an adaptor, whose layers learn from the features of its backbone's taps."""

    def __init__(self, adaptor: "Adaptor") -> None:
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

    def evaluate(self, data: Any) -> float:
        return self.adaptor.evaluate(data)

    def add_class(self, name: str) -> None:
        self.adaptor.classes = (*self.adaptor.classes, name)
