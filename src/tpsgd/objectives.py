"""Local objectives: a loss of a block's own output, and the derivative of that loss.

An `Objective` is a pure function of the block's output `y`, the signal `s` and a few tensors of its
own (usually the projection P), so the same code runs once, stacked over restarts, or exported.
`loss` is the definition. `closed_form` computes the same loss together with its derivative, and
`tests/test_objectives.py` holds the two equal. Without a closed form, autograd differentiates
`loss` with respect to `y` alone: no graph reaches beyond the block's output.

The signal is always *where the output should go*: the label y*, or minus the derivative of the
network's loss with respect to its output. `aim(P, s)` is the paper's projected signal P s. Table 1
in `rules` lists the losses and their derivatives.

To write a rule: make an `Objective` for a `Site`, with P from `site.codes(projection)` and the
target from `aim(P, s)`; a closed form returns `LossAndGrads`. `tpsgd.Rule` says which signal the
objective gets and where it looks; `tpsgd.check_rule` tests it. See `examples/add_a_rule.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpsgd.common.errors import TpsgdError
from tpsgd.losses import Loss, cross_entropy
from tpsgd.maths.kernels.memory_format import flat, full, rows, unflat
from tpsgd.maths.noise import noise_key
from tpsgd.maths.pooling import back_to_pixels, cells, grid_for, pixel_codes
from tpsgd.maths.random import Key
from tpsgd.projections import Projection, Redrawn

__all__ = [
    "BlockSignal",
    "Calibration",
    "Formula",
    "Key",
    "LossAndGrads",
    "NetSignal",
    "Objective",
    "Place",
    "Signal",
    "Site",
    "aim",
    "any_loss",
    "differentiate",
    "inner",
    "l1",
    "l2",
    "output",
    "readout",
]

PIXEL_CODES = 1 << 14  # at most: a CPU multiplies so many faster than it averages over cells
NOT_COMPUTED: Any = None  # in place of a loss that is computed from the logits when it is needed


class Signal(Enum):
    """What the class codes project: the label, or minus the derivative of the net's loss."""

    LABEL = "the label"
    ERROR = "the output error"
    ERROR_SIGN = "the sign of the output error"


class LossAndGrads(NamedTuple):
    """An objective's loss on one batch, with its derivatives.

    Attributes:
        loss: one number, a tensor of shape (); usually a mean over the batch. None in a closed
            form whose objective says how to compute it from the logits (`Objective.of_logits`).
        dy: the derivative of `loss` with respect to the block's output, in memory of its own.
        dtensors: its derivatives with respect to the objective's tensors, if they are learned.
        logits: a prediction of the classes, if the objective makes one, for the record's accuracy.
        labels: those of the logits, where they are not the signal itself.
    """

    loss: Tensor
    dy: Tensor
    dtensors: tuple[Tensor, ...] = ()
    logits: Tensor | None = None
    labels: Tensor | None = None


class BlockSignal(NamedTuple):
    """What a block learns from in a step, if a signal of the whole net says so."""

    saved: Any  # a forward pass of the block, by `learner.forward`, of any samples
    signal: Any  # what its objective gets in addition to the output: a tensor, or several
    gradients: dict[str, Tensor] | None = None  # in place of those of the objective
    local: LossAndGrads | None = None  # with `gradients`: the loss and the logits for the record


class NetSignal:
    """A signal that is computed for every batch from passes through the whole net.

    A block learns before the next block's signal is asked for: a generator that does without the
    blocks behind has no update locking, and sets `needs_output` to False. `learner.tensors` are the
    tensors of a block's objective, `learner.noise` is its noise key (`maths.noise`).
    """

    about = "computed from the whole net"
    needs_output = True

    def __call__(
        self, learners: Sequence[Any], x: Any, labels: Tensor
    ) -> Iterable[BlockSignal | None]:
        """The signal of every block, the first one first; None: it learns nothing."""
        raise NotImplementedError


class Place(Enum):
    """Where in a block the objective looks."""

    BEFORE = "before the activation"
    AFTER = "after the activation"
    END = "at the block's end"


@dataclass(frozen=True)
class Calibration:
    """How an objective is fitted to the size of a block's output, once, before the block learns.

    The last of the objective's tensors, a factor of its logits, is divided by the root mean square
    that the features have in the first batch.

    Args:
        scale: the number that the measured size divides: over it, `run.blocks[i].scale`.
        features: `(y, s) -> ` what is measured.
    """

    scale: float
    features: Callable[[Tensor, Tensor], Tensor]

    @property
    def mean_square(self) -> "Objective":
        """An objective whose loss is the mean square of the features, and nothing to learn from."""

        def loss(y: Tensor, s: Tensor) -> Tensor:
            f = self.features(y, s)
            wide = torch.float32 if f.dtype is torch.bfloat16 else f.dtype
            return torch.linalg.vector_norm(f, dtype=wide).square() / f.numel()

        return Objective(loss, lambda y, s: LossAndGrads(loss(y, s), y))


@dataclass(frozen=True)
class Formula:
    """An objective in words and numbers, from which `tpsgd.export` writes other programs.

    Args:
        name: `l1`, `l2`, `inner` or `readout`.
        codes: how readout's P is drawn; those of the others are their tensor.
        grid: the cells that feature maps are averaged over, if they are.
        gain: the factor of readout's logits, before the calibration if there is one.
        loss: of readout's logits.
        learned: whether the codes learn.
    """

    name: str
    codes: Redrawn | None = None
    grid: tuple[int, ...] | None = None
    gain: float = 1.0
    loss: Loss | None = None
    learned: bool = False


@dataclass(frozen=True)
class Objective:
    """The local loss that one block lowers. Called with `(y, s)` it returns `LossAndGrads`.

    Args:
        loss: `(y, s, *tensors) -> ` one number: the definition.
        closed_form: `(y, s, *tensors) -> LossAndGrads`, if the derivative is written out and the
            loss is a mean over samples.
        tensors: what the objective is made of besides its arguments, usually P. With `precision=`
            they are rounded like the output, but vectors are not.
        learned: train the tensors together with the block.
        squared: the loss is half the squared distance to P s, so least squares can solve it.
        closed_form_of_batch: as `closed_form`, of a loss that is no mean over samples because it
            compares them or scales them by one another: micro-batches would change it.
        of_logits: the loss is this one of the `logits` that the closed form returns in place of
            the loss, so that it can be computed from the logits of many batches together.
        constants: how many of the tensors, the last ones, do not learn although `learned` is set.
        calibration: what to measure in the first batch before the block learns.
        formula: the same in words and numbers, if it has a plain form.
        noise_at: which of the tensors is a noise key, renewed for every batch: see `Site.noise`.

    Examples:
        >>> objective = l2(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        >>> local = objective(torch.tensor([[0.5, 0.0]]), torch.tensor([0]))
        >>> local.loss, local.dy
        (tensor(0.1250), tensor([[-0.5000,  0.0000]]))
    """

    loss: Callable[..., Tensor]
    closed_form: Callable[..., LossAndGrads] | None = None
    tensors: tuple[Tensor, ...] = ()
    learned: bool = False
    squared: bool = False
    closed_form_of_batch: Callable[..., LossAndGrads] | None = None
    of_logits: Loss | None = None
    constants: int = 0
    calibration: Calibration | None = None
    formula: Formula | None = None
    noise_at: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tensors, (tuple, list)):
            kind = type(self.tensors).__name__
            raise TpsgdError(f"tensors of an Objective must be a tuple such as (P,), got a {kind}")

    @property
    def learned_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are trained together with the block."""
        return self.tensors[: len(self.tensors) - self.constants] if self.learned else ()

    @property
    def written_out(self) -> bool:
        """Whether its derivative needs no autograd."""
        return bool(self.closed_form or self.closed_form_of_batch)

    def __call__(self, y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        """The loss of a batch and its derivatives; `tensors` replace the objective's own."""
        local = self.in_cells(y, s, *tensors)
        return local._replace(dy=full(local.dy, y), loss=self.loss_of(local, s))

    def loss_of(self, local: LossAndGrads, s: Tensor) -> Tensor:
        """The loss that belongs to a closed form's result."""
        if local.loss is not NOT_COMPUTED:
            return local.loss
        assert self.of_logits is not None and local.logits is not None
        if local.labels is None:
            return self.of_logits.value(local.logits, s)
        return self.of_logits.mean(local.logits, local.labels)

    def in_cells(self, y: Tensor, s: Tensor, *tensors: Tensor) -> LossAndGrads:
        """The same, but `dy` may have one number per cell of feature maps: `memory_format.full`.

        And the loss may be None: `loss_of`.
        """
        tensors = tensors or self.tensors
        if written_out := self.closed_form or self.closed_form_of_batch:
            return written_out(y, s, *tensors)
        learned = len(tensors) - self.constants if self.learned else 0
        return differentiate(self.loss, y, s, tensors, learned)


IDLE = Objective(lambda y, s: y.new_zeros(()))  # of a block that is not learning


@dataclass(frozen=True)
class Site:
    """The place of an objective: all that a rule can know about its block.

    Args:
        shape: of one sample's output, `(units,)` or `(channels, *space)`.
        classes: number of classes.
        key: the seed, block and time step that the projection depends on.
        maps: the output is feature maps, channels first.
        loss: the loss of the last block.
        numbers: labels are real numbers, not classes; `classes` is how many a sample has.
        device: where the objective's tensors belong.
        dtype: their number format.
        recurrent: the output is the state of a recurrent layer; `key.step` is the time step.
        redraw: do not store P; compute its rows whenever they are needed.
        behind: the shape of the weight behind the block, or ().
        input: the shape that enters the block.
    """

    shape: tuple[int, ...]
    classes: int
    key: Key
    maps: bool = False
    loss: Loss = cross_entropy
    numbers: bool = False
    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32
    recurrent: bool = False
    redraw: bool = False
    behind: tuple[int, ...] = ()
    input: tuple[int, ...] = ()

    def noise(self) -> Tensor:
        """A noise key, for an objective whose `noise_at` says which of its tensors it is."""
        return noise_key(self.key, self.device)

    def draw(self, projection: Projection, shape: tuple[int, ...] | None = None) -> Tensor:
        """P for the output's shape, or for another shape."""
        P = projection(shape or self.shape, self.classes, self.key, self.device)
        return P.to(self.dtype)

    def codes(
        self, projection: Projection, shape: tuple[int, ...] | None = None
    ) -> "Tensor | Redrawn":
        """As `draw`, or with `redraw` a P that is not stored; `aim` takes both."""
        shape = shape or self.shape
        if not self.redraw or projection.name == "orthogonal":  # its rows depend on one another
            return self.draw(projection, shape)
        return self.drawing(projection, shape)

    def drawing(self, projection: Projection, shape: tuple[int, ...]) -> Redrawn:
        """How P is drawn."""
        return Redrawn(projection, shape, self.classes, self.key, self.device, self.dtype)


def differentiate(
    loss: Callable[..., Tensor], y: Tensor, s: Tensor, tensors: tuple[Tensor, ...], learned: int
) -> LossAndGrads:
    """The derivatives of a loss by autograd, on a graph that starts at y.

    The first `learned` tensors have derivatives, too.
    """
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        tensors = tuple(
            t if isinstance(t, Redrawn) else t.detach().requires_grad_(i < learned)
            for i, t in enumerate(tensors)
        )
        value = loss(y, s, *tensors)
        if not isinstance(value, Tensor) or value.dim():
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise TpsgdError(
                f"a loss must return one number, a tensor of shape (), a mean over the batch; got "
                f"{got}"
            )
        if not value.requires_grad:
            raise TpsgdError("a loss must depend on the output: no gradient leads from it to y")
        dy, *dtensors = torch.autograd.grad(value, (y, *tensors[:learned]))
    return LossAndGrads(value.detach(), dy, tuple(dtensors))


def aim(P: Any, s: Tensor) -> Tensor:
    """The projected signal P s of every sample, in new memory.

    Args:
        P: `(classes, *shape)`, from `Site.draw` or `Site.codes`.
        s: class indices `(batch,)`, which pick rows of P, or numbers `(batch, classes)`.

    Examples:
        >>> P = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> aim(P, torch.tensor([1, 0]))
        tensor([[3., 4.],
                [1., 2.]])
        >>> aim(P, torch.tensor([[0.5, 0.5]]))
        tensor([[2., 3.]])
    """
    if isinstance(P, Redrawn):
        return P.aim(s)
    if s.is_floating_point():
        return (s @ P.flatten(1)).view(-1, *P.shape[1:])
    return rows(P, s)


def inner(P: Any) -> Objective:
    """Align with the projected signal: the loss behind DRTP, DFA and sDFA. It has no minimum."""

    def loss(y: Tensor, s: Tensor, P: Any) -> Tensor:
        return -(y * aim(P, s)).sum() / len(y)

    def closed_form(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        dy = aim(P / -len(y), s)  # P is smaller than the batch: scale it first
        return LossAndGrads(_dot(y, dy), dy)

    return Objective(loss, closed_form, (P,), formula=Formula("inner"))


def l1(P: Any) -> Objective:
    """The sum of absolute differences to the projected signal."""

    def loss(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return (aim(P, s) - y).abs().sum() / len(y)

    def closed_form(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        difference = aim(P, s).sub_(y)
        loss = torch.linalg.vector_norm(difference, 1) / len(y)
        return LossAndGrads(loss, difference.sign_().mul_(-1.0 / len(y)))

    return Objective(loss, closed_form, (P,), formula=Formula("l1"))


def l2(P: Any) -> Objective:
    """Half the sum of squared differences to the projected signal."""

    def loss(y: Tensor, s: Tensor, P: Tensor) -> Tensor:
        return (aim(P, s) - y).square().sum() / (2 * len(y))

    def closed_form(y: Tensor, s: Tensor, P: Tensor) -> LossAndGrads:
        dy = aim(P / -len(y), s).add_(y, alpha=1.0 / len(y))
        return LossAndGrads(_dot(dy, dy) * (len(y) / 2), dy)

    return Objective(loss, closed_form, (P,), squared=True, formula=Formula("l2"))


def any_loss(P: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Any `(output, target) -> scalar` between the output and the projected signal."""
    return Objective(lambda y, s, P: loss(y, aim(P, s)), None, (P,))


def output(loss: Loss) -> Objective:
    """The last block's objective: a loss of its output against the labels."""

    def closed_form(y: Tensor, s: Tensor) -> LossAndGrads:
        dy = loss.grad(y, s).mul_(1.0 / len(y))
        return LossAndGrads(NOT_COMPUTED, dy, (), y)

    return Objective(loss.value, closed_form, of_logits=loss)


def readout(
    site: Site,
    projection: Projection,
    learned: bool,
    features: int,
    scale: float,
    calibrated: bool = False,
    gain: float | None = None,
) -> Objective:
    """A local classifier: cross-entropy of y read out through the class codes, against the label.

    If the last block has another loss of logits, so has the local classifier: `bce` for several
    labels per sample or one yes-or-no output. If labels are real numbers, they are read out by the
    last block's loss.
    Feature maps are averaged over a grid of cells first, the finest that keeps at most `features`
    numbers (at least one cell). Other output is read out whole. The logits are the codes' products
    with the features times `scale`, over the root of their number; with `calibrated`, also over the
    root mean square of the features in the first batch, and over the root of the number of units,
    or filters: then `scale` is about the logit of a vector whose units all agree with a code.
    With `gain` that is the factor, and the codes are as much smaller or larger: the first logits
    are the same, and under SGD the products of codes and gain move with gain^2 times the rate.
    """
    grid = grid_for(site.shape, features) if site.maps else None
    d = site.shape[0] * prod(grid) if grid else prod(site.shape)
    units = site.shape[0] if site.maps else d
    scale = scale / units**0.5 if calibrated else scale
    factor = scale / d**0.5
    if gain is not None:
        projection = replace(projection, std=projection.std * factor / gain)
        factor = gain
    drawing = site.drawing(projection, (d,))
    codes, pool = site.draw(projection, (d,)), grid
    gains = torch.full((), factor, dtype=codes.dtype, device=codes.device)
    if grid is None:
        codes = codes.view(-1, *site.shape)
    elif (
        not learned and codes.device.type == "cpu" and len(codes) * prod(site.shape) <= PIXEL_CODES
    ):
        codes, pool = pixel_codes(codes, site.shape, grid), None  # average and product in one
    local = cross_entropy if site.loss.of_numbers and not site.numbers else site.loss
    classifier = _Classifier(local, pool, learned)
    measured = Calibration(scale, lambda y, s: cells(y, grid) if grid else y)
    return Objective(
        classifier.loss,
        classifier.closed_form,
        (codes.clone(), gains) if learned else (codes * gains,),  # a projection may keep its own
        learned,
        of_logits=local,
        constants=int(learned),
        calibration=measured if calibrated else None,
        formula=Formula("readout", drawing, grid, factor, local, learned),
    )


class _Classifier(NamedTuple):
    """The loss of `readout` and its derivatives; learned codes have their gain apart."""

    local: Loss
    grid: tuple[int, ...] | None  # that feature maps are averaged over before the product
    learned: bool

    def read(self, y: Tensor, P: Tensor, *gain: Tensor) -> tuple[Tensor, Tensor]:
        """Features and logits."""
        f, P = (cells(y, self.grid), P) if self.grid else (flat(y, y), flat(P, y))
        logits = P @ f.T  # classes first: faster where they are few
        # in bfloat16 the differences between logits would drown in rounding
        logits = logits.float() if logits.dtype is torch.bfloat16 else logits
        return f, (logits * gain[0] if gain else logits).T

    def loss(self, y: Tensor, s: Tensor, P: Tensor, *gain: Tensor) -> Tensor:
        return self.local.value(self.read(y, P, *gain)[1], s)

    def closed_form(self, y: Tensor, s: Tensor, P: Tensor, *gain: Tensor) -> LossAndGrads:
        f, logits = self.read(y, P, *gain)
        P = P if self.grid else flat(P, y)
        e = self.local.grad(logits, s)
        e = (e * gain[0] if gain else e).to(y.dtype)
        dP = scaled_product(1.0 / len(y), e.T, f, P) if self.learned else None
        del f  # before its derivative is computed
        df = scaled_product(1.0 / len(y), e, P, P)
        dy = back_to_pixels(df, y, self.grid) if self.grid else unflat(df, y)
        dtensors = () if dP is None else (dP if self.grid else unflat(dP, y),)
        return LossAndGrads(NOT_COMPUTED, dy, dtensors, logits)


def move(objective: Objective, place: Callable[[Tensor], Tensor]) -> Objective:
    """The same objective with its tensors on another device, or in another memory format."""
    tensors = (t.laid_out() if isinstance(t, Redrawn) else place(t) for t in objective.tensors)
    return replace(objective, tensors=tuple(tensors))


def scaled_product(scale: float, a: Tensor, b: Tensor, P: Tensor) -> Tensor:
    """scale * a b in one operator, which wants a third matrix; P is there, and not read."""
    return torch.addmm(P[:1, :1], a, b, beta=0, alpha=scale)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a * b, without storing the product if both have the same memory format."""
    if a.dim() == 4 and not a.is_contiguous():
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    if a.is_contiguous() and b.is_contiguous():
        return a.flatten() @ b.flatten()
    return (a * b).sum()


def over_dimension(
    objective: Callable[..., LossAndGrads], in_dims: Any = 0
) -> Callable[..., LossAndGrads]:
    """An objective over one more dimension of its arguments, as `torch.vmap`."""

    def present(*args: Tensor) -> dict[str, Any]:
        return without_none(objective(*args))

    return lambda *args: LossAndGrads(**torch.vmap(present, in_dims=in_dims)(*args))


def without_none(local: LossAndGrads) -> dict[str, Any]:
    """Its fields, those that are None left out: vmap cannot return None."""
    return {k: v for k, v in local._asdict().items() if v is not None}
