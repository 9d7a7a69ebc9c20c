"""What callbacks may change in mid-run: the numbers of a model, where the blocks still read them.

A learner holds the parameters that it began with, and recorded steps hold their memory. So after
every epoch with callbacks a model is compared with what it was: modules or parameters that were
replaced, frozen, converted or got hooks are refused; memory that was replaced is read anew; a
change of a block that has learned already is refused if later blocks learn from its kept outputs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.extension import Extension
from tpsgd.engine.sources.batches import depth
from tpsgd.features.run_identity import checksum_of
from tpsgd.nets.blocks import hooked
from tpsgd.train import EpochEnd, Learner, Net, Observer


class Changes(Extension, Observer):
    """Follows or refuses what callbacks do to a model."""

    @contextmanager
    def around(self, net: Net) -> Iterator[None]:
        """Observe the run right after its recorder, which calls the callbacks."""
        self.net, (self.model, *_) = net, net.models
        self.structure, self.memory = _structure(self.model), _memory(self.model)
        self.frozen: dict[Any, str] = {}  # checksums of blocks before those that learn
        net.observers.insert(1, self)
        yield

    def stage(self, learners: Any, learning: bool = True) -> None:
        if learning:
            earlier = self.net.learners[: self.net.learners.index(learners[0])]
            self.frozen = {x: _checksum(x.block) for x in earlier}

    def epoch(self, end: EpochEnd) -> set[Learner]:
        structure, memory = _structure(self.model), _memory(self.model)
        if structure != self.structure:
            name = min(name for name, _ in structure.items() ^ self.structure.items())
            raise TpsgdError(
                f"a callback replaced, froze or converted {name} of the model, or gave it a hook: "
                "in mid-run only numbers can change, in place or by load_state_dict(...)"
            )
        if memory != self.memory:
            self.memory = memory
            for learner in self.net.learners:
                learner.version += 1
        recomputed = depth(end.source)  # blocks whose outputs are not kept: the last of the frozen
        for learner in list(self.frozen)[: len(self.frozen) - recomputed]:
            if _checksum(learner.block) != self.frozen[learner]:
                raise TpsgdError(
                    f"a callback changed block {learner.block.index + 1} ({learner.block}), which "
                    "had learned already and whose outputs were kept: change a block while it "
                    "learns, or train with memory=tpsgd.Memory(reuse=False)"
                )
        return set()


def _structure(model: nn.Module) -> dict[str, Any]:
    """The modules and parameters of a model by name, with their properties that must not change."""
    modules = {f"module {k!r}": (id(m), type(m), hooked(m)) for k, m in model.named_modules()}
    parameters = {
        f"parameter {k!r}": (id(p), p.dtype, p.device, p.requires_grad)
        for k, p in model.named_parameters()
    }
    return modules | parameters


def _memory(model: nn.Module) -> list[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return [t.untyped_storage()._cdata for t in tensors if type(t.data) is torch.Tensor]


def _checksum(block: Any) -> str:
    tensors = [t for module in block.modules for t in module.state_dict().values()]
    plain = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout is torch.strided]
    return checksum_of(plain)
