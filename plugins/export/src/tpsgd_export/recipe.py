"""A training step in plain numbers: layers, activations, local objectives, class codes.

`read_model` makes a `StepRecipe` of a torch model and a rule; the writers of C and ONNX read no
more than that. A picture's shape is (channels, height, width); a `Conv1d` has height 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.features.target_scaling import TargetScaling

Pair = tuple[int, int]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Dense:
    """z = W x + b."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class Convolution:
    """A convolution of feature maps, channels first, with zeros around them."""

    channels: int
    size: Pair  # of the input: rows and columns
    filters: int
    kernel: Pair
    out: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def inputs(self) -> int:
        """Numbers of a sample that it reads."""
        return self.channels * prod(self.size)

    @property
    def outputs(self) -> int:
        """Numbers of a sample that it gives."""
        return self.filters * prod(self.out)


@dataclass(frozen=True)
class CellLayer:
    """H <- (1 - leak) H + leak sigma(W_X x + b_X + W_H H + b_H), once for every time step."""

    inputs: int
    outputs: int
    leak: float


@dataclass(frozen=True)
class DiagonalLayer:
    """A diagonal linear recurrence, `tpsgd.nets.diagonal`; `loss_at`: last, mean or every."""

    inputs: int
    states: int
    outputs: int
    loss_at: str


Layer = Dense | Convolution | CellLayer | DiagonalLayer


@dataclass(frozen=True)
class Pool:
    """The largest (`max`) or the mean (`mean`) of windows; or the means of a grid of `cells`."""

    kind: str
    channels: int
    size: Pair
    kernel: Pair
    stride: Pair
    out: Pair


@dataclass(frozen=True)
class Codes:
    """The class codes P of a block, `size` numbers for each class.

    Number i of class c is `distribution` at hash `streams[c]` + i, times `std`; with `filters` (the
    paper's filter-based sampling) before that times f / filters, f the number of its filter from 1.
    A `table` has the numbers themselves; of `bits` a device has their signs alone. With `per_step`
    each time step has its own codes: their streams follow from `seed`, `block` and the step.
    """

    size: int
    distribution: str  # normal, uniform, binary, table, or bits
    streams: tuple[int, ...] = ()
    std: float = 1.0
    filters: int = 0
    table: Tensor | None = None
    per_step: bool = False
    seed: int = 0
    block: int = 0


@dataclass(frozen=True)
class LocalLoss:
    """What a hidden block lowers.

    Args:
        name: `l1`, `l2`, `inner` or `readout`.
        codes: of the classes.
        shape: of the output that it looks at, after the activation.
        grid: the cells that feature maps are averaged over before a readout.
        gain: the factor of a readout's logits; 0 before it is calibrated.
        target: over the root mean square of the features in the first batch: the calibrated gain.
        loss: of a readout's logits: cross_entropy or bce; of numbers, the last block's.
        learned: whether a readout's codes learn with the block.
    """

    name: str
    codes: Codes
    shape: Shape
    grid: Pair | None = None
    gain: float = 1.0
    target: float = 0.0
    loss: str = "cross_entropy"
    learned: bool = False


@dataclass(frozen=True)
class BlockRecipe:
    """A layer, its activation and pools, and the local loss of their output.

    `parameters` are in the order in which they lie in memory, by their names in the layer. A block
    of several layers is its last one; those before it are its `inner` rows, whose outputs nothing
    outside the block reads. A row reads the output of an earlier row of its block, `source`, and
    adds that of another one, `added`, to its own before the activation; -1 is the block's input.
    """

    number: int
    name: str
    layer: Layer
    activation: str  # none, relu, leaky_relu, tanh, sigmoid
    slope: float
    shape: Shape  # of one sample after the activation
    pools: tuple[Pool, ...]
    local: LocalLoss | None  # None: the last block, or a hidden block that does not learn
    learns: bool
    parameters: Mapping[str, Tensor] = field(repr=False)
    names: Mapping[str, str] = field(default_factory=dict, repr=False)  # of parameters in the model
    scales: Tensor | None = None  # of rows of weights that are whole numbers, a byte each in C
    inner: tuple["BlockRecipe", ...] = ()
    source: int = -1
    added: int | None = None

    @property
    def rows(self) -> tuple["BlockRecipe", ...]:
        """The layers of the block, itself the last."""
        return (*self.inner, self)

    @property
    def joined(self) -> bool:
        """Whether it is more than a layer."""
        return bool(self.inner) or self.added is not None

    @property
    def size(self) -> int:
        """Numbers of a sample after the activation."""
        return prod(self.shape)

    @property
    def pooled(self) -> int:
        """Numbers of a sample after the pools: the next block's inputs."""
        last = self.pools[-1] if self.pools else None
        return last.channels * prod(last.out) if last else self.size

    @property
    def weights(self) -> int:
        """How many parameters it has, those of its inner rows included."""
        return sum(p.numel() for row in self.rows for p in row.parameters.values())

    @property
    def recurrent(self) -> bool:
        """Whether it reads one time step after another."""
        return isinstance(self.layer, (CellLayer, DiagonalLayer))

    @property
    def learned_codes(self) -> int:
        """Numbers of a class code that learns."""
        return self.local.codes.size if self.local and self.local.learned else 0


@dataclass(frozen=True)
class StepRecipe:
    """A net, its rule, its optimizer and the size of a batch.

    `classes` is how many there are at first, `spare` how many may come later. With `targets` labels
    are real numbers, `classes` of them for each sample: the net learns them standardised.
    """

    blocks: tuple[BlockRecipe, ...]
    rule: str
    shape: Shape  # of one sample; of one time step, if the first layer is recurrent
    classes: int
    spare: int
    batch: int
    optimizer: str  # sgd, momentum, adam
    loss: str  # of the last block: mse, cross_entropy, bce; of numbers: mse, l1, huber
    seed: int
    link: str = ""  # Softmax, for example: what follows the logits in the model, and is left out
    targets: TargetScaling | None = None
    counts: tuple[int, ...] = ()  # of layers in each block, where it is not one

    @property
    def rows(self) -> tuple[BlockRecipe, ...]:
        """The layers of all blocks."""
        return tuple(row for block in self.blocks for row in block.rows)

    @property
    def joined(self) -> bool:
        """Whether a block is more than a layer: several layers, or one with a skip connection."""
        return any(block.joined for block in self.blocks)

    @property
    def backprop(self) -> bool:
        """Whether hidden blocks learn by the error of the output, and not by local losses."""
        return self.rule == "backprop"

    @property
    def outputs(self) -> int:
        """Outputs of the last layer, spare classes included."""
        return self.classes + self.spare

    @property
    def inputs(self) -> int:
        """Numbers of a sample, or of a time step."""
        return prod(self.shape)

    @property
    def recurrent(self) -> bool:
        """Whether it reads sequences."""
        return self.blocks[0].recurrent

    @property
    def parameters(self) -> int:
        """How many parameters learn."""
        return sum(block.weights for block in self.blocks if block.learns)

    @property
    def learned(self) -> int:
        """How many numbers learn: parameters, and the class codes of learned readouts."""
        codes = sum(block.learned_codes for block in self.blocks)
        return self.parameters + self.outputs * codes

    @property
    def all_weights(self) -> int:
        """How many parameters there are."""
        return sum(block.weights for block in self.blocks)


def refuse_joined(recipe: StepRecipe, what: str) -> None:
    """Refuse blocks that are more than a layer, which `what` is not written for."""
    for block in recipe.blocks:
        if block.joined:
            raise TpsgdError(
                f"block {block.number + 1} ({block.name}) is more than a layer, such as one with a "
                f"skip connection: it is exported as C of float32, not as {what}"
            )
