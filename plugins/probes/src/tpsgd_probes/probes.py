"""`Probes`: a callback of `fit` that measures the blocks of a model on a batch, every epoch."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd import TpsgdError
from tpsgd.engine.record import of_run
from tpsgd.engine.sources.inputs import check_finite, labels
from tpsgd.nets.cuts.split import LAYERS, split
from tpsgd.nets.modes import evaluating
from tpsgd.objectives import Place
from tpsgd.train import Epoch, Net

Row = dict[str, Any]
LEAST = 2  # samples: a linear probe learns from one half of them, and is tested on the other


@dataclass(frozen=True)
class Moment:
    """What a measure sees: the model in mid-training, a batch, and one of the model's blocks.

    `block` counts from 0, the last one being the output layer. `net` is the training loop's:
    its learners have the objectives of the blocks that are learning.
    """

    model: nn.Module
    x: Tensor
    y: Tensor
    block: int
    outputs: Sequence[Tensor]  # of every block, on x
    net: Net

    @cached_property
    def features(self) -> Tensor:
        """The output of the block, a row for each sample."""
        return self.outputs[self.block].flatten(1)

    @property
    def last(self) -> bool:
        """Whether the block is the output layer."""
        return self.block == len(self.outputs) - 1


Measure = Callable[[Moment], float | None]


@dataclass(eq=False)
class Probes:
    """Measures of the blocks on a batch, after every epoch: a callback of `fit` and `fit_backprop`.

    Args:
        x: the samples to measure on; held-out ones say most.
        y: their labels.
        measures: functions of a `Moment` that return a number, or None where there is none; the
            key in a row is the function's name. Or a dict of them by name.
        every: measure after every so many epochs of a block.
        to: functions that each row is given to, such as `tensorboard(folder)` and `wandb()`.

    A block that learns by itself is measured after its own epochs, all blocks of backprop after
    each of its epochs. The `rows` have block and epoch, loss and accuracy, and the measures. In a
    comparison they are those of all runs, with the arm and the seed.

    Examples:
        >>> import tpsgd
        >>> x, y = torch.randn(64, 8), torch.arange(64) % 2
        >>> watch = Probes(x, y, {"size": lambda moment: float(moment.features.norm())})
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> _ = tpsgd.fit(model, (x, y), epochs=2, callbacks=[watch])
        >>> [(row["block"], row["epoch"]) for row in watch.rows]
        [(1, 1), (1, 2), (2, 1), (2, 2)]
    """

    x: Tensor
    y: Tensor
    measures: Sequence[Measure] | Mapping[str, Measure]
    every: int = 1
    to: Sequence[Callable[[Row], Any]] = ()
    rows: list[Row] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not (isinstance(self.x, Tensor) and isinstance(self.y, Tensor)):
            kinds = f"{type(self.x).__name__} and {type(self.y).__name__}"
            raise TpsgdError(f"probes need tensors of samples x and labels y, got {kinds}")
        sizes = [len(t) if t.dim() else 0 for t in (self.x, self.y)]
        if sizes[0] != sizes[1] or sizes[0] < LEAST:
            raise TpsgdError(
                f"probes need a batch x of {LEAST} samples or more and a label y for each, got "
                f"{sizes[0]} and {sizes[1]}"
            )
        check_finite(self.x)
        if not isinstance(self.every, int) or self.every < 1:
            raise TpsgdError(f"every must be a whole number of epochs from 1 on, got {self.every}")
        if not isinstance(self.to, Sequence) or not all(map(callable, self.to)):
            raise TpsgdError(f"to must be a list of functions of a row, got {self.to}")
        named = self.measures
        if not isinstance(named, (Mapping, Sequence)) or isinstance(named, str):
            raise TpsgdError(f"measures must be functions or a dict of them, got {named!r}")
        if not isinstance(named, Mapping):
            named = {getattr(f, "__name__", type(f).__name__): f for f in named}
        if len(named) < len(self.measures) or not all(map(callable, named.values())):
            raise TpsgdError("measures must be functions with different names, or a dict of them")
        self._named: Mapping[str, Measure] = named
        self._net: Net | None = None
        self._run: Row = {}
        self._all: list[Row] = []  # the rows of all runs, in one of several

    def of_run(self, arm: str, seed: int) -> "Probes":
        """The probes of one of several runs, which add its rows to these."""
        self.rows = [row for row in self.rows if "arm" in row]  # none of an earlier run alone
        probes = copy(self)
        probes._run, probes._all = {"arm": arm, "seed": seed}, self.rows
        probes.to = of_run({"callbacks": self.to}, arm, seed)["callbacks"]
        return probes

    def begin(self, net: Net) -> None:
        """`fit` gives the net to callbacks before the training; a batch that it cannot take fails.

        That is of another shape than the model's input, or has labels that are not its classes.
        """
        self._net, self.rows = net, []
        model, x = net.models[0], self.x[:LEAST]
        try:
            with torch.no_grad(), evaluating(model):
                x = x.to(next(model.parameters()).device)
                output = block_outputs(model, x, _blocks(net, model))[-1]
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise TpsgdError(
                f"the model cannot compute the x of the probes, of shape {tuple(self.x.shape)} and "
                f"type {self.x.dtype}: {error}"
            ) from error
        if not self.y.is_floating_point() and output.dim() == 2 and output.shape[1] > 1:
            try:
                labels(self.y, None, output.shape[1], complete=False)
            except TpsgdError as error:
                raise TpsgdError(f"the y of the probes: {error}") from None

    def __call__(self, epoch: Epoch) -> None:
        if self._net is None:
            raise TypeError("probes are a callback of fit: fit(..., callbacks=[probes])")
        if epoch.epoch % self.every:
            return
        net, model = self._net, self._net.models[0]
        of_run = next(iter(model.parameters())).device
        x, y = self.x.to(of_run), self.y.to(of_run)
        model.eval()  # the mode of before is set again after every callback
        blocks = _blocks(net, model)
        with torch.no_grad():
            outputs = block_outputs(model, x, blocks)
        for block in range(len(outputs)) if epoch.block == 0 else [epoch.block - 1]:
            moment = Moment(model, x, y, block, outputs, net)
            row: Row = {**self._run, "block": block + 1, "epoch": epoch.epoch}
            row |= {"loss": epoch.loss, "accuracy": epoch.accuracy}
            row |= {name: measure(moment) for name, measure in self._named.items()}
            self.rows.append(row)
            self._all.append(row)
            for sink in self.to:
                sink(row)

    def series(self, name: str, block: int, **run: Any) -> list[float | None]:
        """The values of a measure for a block, counted from 1, in the order of the epochs.

        In a comparison `arm="readout", seed=0` says of which run.
        """
        wanted = {"block": block, **run}
        return [row[name] for row in self.rows if wanted.items() <= row.items()]


def _blocks(net: Net, model: nn.Module) -> list[Any]:
    """The blocks that learn, or under backprop a block for each layer."""
    if len(net.learners) > 1:
        return [learner.block for learner in net.learners]
    return [*split(model, blocks=LAYERS)]


def block_outputs(model: nn.Module, x: Tensor, blocks: Sequence[Any] | None = None) -> list[Tensor]:
    """The output of every block of a model for some samples; by default a block is a layer.

    Examples:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> [tuple(y.shape) for y in block_outputs(model, torch.zeros(5, 8))]
        [(5, 4), (5, 2)]
    """
    outputs = []
    for block in blocks or [*split(model, blocks=LAYERS)]:
        x = block.outputs(x)[Place.END]
        outputs.append(x)
    return outputs
