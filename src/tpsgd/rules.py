"""Table 1 of the paper as code: a rule says which signal reaches which local loss, and where.

With y_i = sigma(z_i), z_i = x_i W_i, class codes P_i, label y* and network output y_N, every rule
is gradient *descent* on a local loss J_i, so one sign convention serves all:

    W_i  <-  W_i + eta * x_i^T [ d_i * sigma'(z_i) ],     d_i = -dJ_i/dy_i

| rule         | local loss J_i              | d_i                    | signal s                |
|--------------|-----------------------------|------------------------|-------------------------|
| `dfa`        | - <y_i, P_i s>              | P_i (y* - y_N)         | -dL/dy_N                |
| `sdfa`       | - <y_i, P_i s>              | P_i sign(y* - y_N)     | sign(-dL/dy_N)          |
| `drtp`       | - <y_i, P_i y*>             | P_i y*                 | y*                      |
| `tpsgd_l1`   | sum abs(P_i y* - y_i)       | sign(P_i y* - y_i)     | y*                      |
| `tpsgd_l2`   | 1/2 sum (P_i y* - y_i)^2    | P_i y* - y_i           | y*                      |
| `tpsgd`      | any loss(y_i, P_i y*)       | -dJ_i/dy_i             | y*                      |
| `readout`    | CE(y_i P_i^T / sqrt(d), y*) | (y* - p) P_i / sqrt(d) | y*                      |
| `predsim`    | similarity within classes   | -dJ_i/dy_i             | y*                      |
| `frozen`     | none: the layer stays as it is; the control                                    |
| `untrained`  | none, and the last layer stays as it is too                                    |

(the printed table leaves out the input factor x_i^T; * and abs act on each element; losses are sums
over units and means over the batch). y* - y_N is written for the losses here, whose derivative with
respect to the logits is p - y*. DFA and sDFA wait for the network's output before any layer can
learn; the others do not. `readout` is not the paper's: it is the local classifier of Mostafa,
Ramesh & Cauwenberghs (2018) with fixed random weights, in the same frame.

In deep convolutional nets `tpsgd_l1`, `tpsgd_l2`, `tpsgd` and `drtp` can compare P_i y* with
averages over cells (`features`) and with standardised output (`standardise`): see `tpsgd_l2`.

A rule for a whole net also names the loss of its last block, which has no projection: `mse` for the
tpSGD rules as in the paper, `cross_entropy` for the others. `fit(loss=...)` overrides it.

Sources: tpSGD, Lomnitz et al. (2022); DRTP and sDFA, Frenkel et al. (2021); DFA, Nøkland (2016);
readout, Mostafa et al., "Deep supervised learning using local errors" (2018); predsim, Nøkland &
Eidnes, "Training Neural Networks with Local Error Signals" (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from tpsgd import objectives
from tpsgd.errors import TpsgdError
from tpsgd.losses import Loss, cross_entropy, mse
from tpsgd.maths import pooling
from tpsgd.maths import predsim as similarity
from tpsgd.objectives import Objective, Site
from tpsgd.projections import Projection, binary, normal, orthogonal


class Signal(Enum):
    """What is projected: always the direction in which the output should move."""

    LABEL = "the label"
    ERROR = "the output error"
    ERROR_SIGN = "the sign of the output error"


class Place(Enum):
    """Where in a block the objective looks."""

    BEFORE = "before the activation"
    AFTER = "after the activation"
    END = "at the block's end"


@dataclass(frozen=True)
class Rule:
    """A value that says how hidden blocks learn; `objective=None` means that they do not."""

    name: str
    objective: Callable[[Site], Objective] | None
    loss: Loss = cross_entropy
    signal: Signal = Signal.LABEL
    at: Place = Place.AFTER
    about: str = ""
    options: str = ""  # what was chosen beyond the name, for the record
    per_step: bool = True  # recurrent blocks: a projection for each time step, or one for all
    head: bool = True  # whether the last block learns
    last: Callable[[Site], Objective] | None = None  # what it wants, in place of its loss

    @property
    def needs_output(self) -> bool:
        """Whether a block must wait for the whole net's output (update locking)."""
        return self.signal is not Signal.LABEL


def tpsgd_l2(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with the squared error to the projected label: the paper's main rule.

    `features` and `standardise` (of the tpSGD rules and DRTP) are for deep convolutional nets; they
    are not the paper's. With `features`, feature maps are averaged over the finest grid that leaves
    at most so many numbers, and P y* is the target of those: a convolution does the same at every
    pixel and cannot follow a target for each. With `standardise`, what is compared has mean 0 and
    deviation 1 over the batch, so that the output cannot shrink to the targets' mean; `tpsgd_l2`
    and `drtp` then ask for the same. Take both in nets with BatchNorm.

    Examples:
        >>> tpsgd_l2(features=256, standardise=True).options
        'normal codes, std 1, at most 256 features, standardised'
    """
    return _reach("tpsgd-l2", objectives.l2, projection, at, features, standardise)


def tpsgd_l1(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with the absolute error to the projected label; options as `tpsgd_l2`'s.

    Leave `standardise` to the other rules: of outputs of deviation 1, those with rare spikes have
    the least absolute error, and units die.
    """
    return _reach("tpsgd-l1", objectives.l1, projection, at, features, standardise, binary())


def tpsgd(
    loss: Callable[[Tensor, Tensor], Tensor],
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with any `(output, target) -> scalar`; the scalar should be a mean over the batch.

    The other options are `tpsgd_l2`'s.

    Examples:
        >>> from torch.nn.functional import smooth_l1_loss
        >>> tpsgd(smooth_l1_loss).name
        'tpsgd-smooth_l1_loss'
    """
    name = f"tpsgd-{getattr(loss, '__name__', type(loss).__name__)}"

    def objective(P: Any) -> Objective:
        return objectives.any_loss(P, loss)

    return _reach(name, objective, projection, at, features, standardise)


def drtp(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """Direct random target projection: align with the projected label (Frenkel et al. 2021).

    The inner product has no floor, so features grow for as long as an unbounded activation lets
    them: prefer Tanh or Sigmoid, a small learning rate, or `standardise` (see `tpsgd_l2`).
    """
    return Rule(
        "drtp",
        _drawn(objectives.inner, projection, orthogonal(), features, standardise),
        at=at,
        about="align with P y*",
        options=_options(projection, orthogonal(), features, standardise),
    )


def dfa(projection: Projection | None = None, at: Place = Place.AFTER) -> Rule:
    """Direct feedback alignment: align with the projected output error (Nøkland 2016)."""
    return Rule(
        "dfa",
        _drawn(objectives.inner, projection),
        signal=Signal.ERROR,
        at=at,
        about="align with the projected output error; waits for the output",
        options=_options(projection),
    )


def sdfa(projection: Projection | None = None, at: Place = Place.AFTER) -> Rule:
    """DFA with the sign of the output error alone (Frenkel et al. 2021).

    Under cross-entropy that sign is +1 for the label and -1 elsewhere whatever the output, so the
    features have no floor, as in `drtp`.
    """
    return Rule(
        "sdfa",
        _drawn(objectives.inner, projection),
        signal=Signal.ERROR_SIGN,
        at=at,
        about="align with the projected sign of the output error; waits for the output",
        options=_options(projection),
    )


def readout(
    learned: bool = False,
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int = 256,
    scale: float | None = None,
) -> Rule:
    """Cross-entropy of the output read out through fixed random class codes: the default rule.

    After Mostafa, Ramesh & Cauwenberghs (2018); not the paper's rule. Feature maps are averaged
    over the finest grid that leaves at most `features` numbers. With `learned`, the codes are
    trained by the same local loss. Labels that go with `bce` are read out with `bce`. `scale`
    multiplies the logits: too small, and the features grow until the next block's inputs are too
    large for its learning rate; the default is 4 for vectors and 16 for feature maps, whose
    averages are smaller (found best on held-out MNIST).
    """

    def objective(site: Site) -> Objective:
        factor = (16.0 if site.maps else 4.0) if scale is None else scale
        return objectives.readout(site, projection or normal(), learned, features, factor)

    name = "readout-learned" if learned else "readout"
    about = f"local classifier through {'learned' if learned else 'fixed random'} codes"
    options = f"{_options(projection)}, at most {features} features, scale {scale or 'default'}"
    return Rule(name, objective, at=at, about=about, options=options, per_step=False)


def predsim(share: float = 0.99, features: int = 2048, convolve: bool = True) -> Rule:
    """Samples of a class alike, and a local classifier (Nøkland & Eidnes 2019); not the paper's.

    `share` is the weight of the similarity; `features` bounds what the classifier reads. Both of
    its linear maps learn with the block; the loss is over a whole batch. Without `convolve`, which
    is cheaper, the similarity is that of the output itself and not of a learned map of it.
    """

    def objective(site: Site) -> Objective:
        return similarity.predsim(site, share, features, convolve)

    about = "samples of a class alike, and a learned local classifier"
    options = (
        f"share {share:g}, at most {features} features{'' if convolve else ', no convolution'}"
    )
    return Rule("predsim", objective, at=Place.AFTER, about=about, options=options, per_step=False)


def frozen(loss: Loss = cross_entropy) -> Rule:
    """The control: hidden blocks stay as they are, the last one learns."""
    return Rule("frozen", None, loss, about="control: hidden blocks stay random")


def untrained() -> Rule:
    """The control below `frozen`: the net as it begins. `compare` trains nothing under it."""
    return Rule("random", None, about="control: nothing is trained, not even the head", head=False)


def _reach(
    name: str,
    make: Callable[[Any], Objective],
    projection: Projection | None,
    at: Place,
    features: int | None,
    standardise: bool,
    recurrent: Projection | None = None,
) -> Rule:
    """A tpSGD rule."""
    error = {"tpsgd-l1": "absolute error", "tpsgd-l2": "squared error"}.get(name, "any loss")
    return Rule(
        name,
        _drawn(make, projection, recurrent, features, standardise),
        mse,
        at=at,
        about=f"{error} to P y*",
        options=_options(projection, recurrent, features, standardise),
    )


def _options(
    projection: Projection | None,
    recurrent: Projection | None = None,
    features: int | None = None,
    standardise: bool = False,
) -> str:
    shown = projection or normal()
    text = f"{shown.name} codes, std {shown.std:g}"
    text += "" if projection or not recurrent else f" (recurrent blocks: {recurrent.name})"
    text += "" if features is None else f", at most {features} features"
    return text + (", standardised" if standardise else "")


def _drawn(
    make: Callable[[Any], Objective],
    projection: Projection | None,
    recurrent: Projection | None = None,
    features: int | None = None,
    standardise: bool = False,
) -> Callable[[Site], Objective]:
    """An objective of P alone, with P drawn for the block's output shape, or for its pooled one.

    `recurrent`: the default for recurrent blocks, where the paper has its own.
    """
    if features is not None and features < 1:
        raise TpsgdError(f"features={features} leaves nothing to compare: give 1 or more, or None")

    def draw(site: Site) -> Objective:
        default = recurrent if site.recurrent and recurrent else normal()
        grid = pooling.grid_for(site.shape, features) if features and site.maps else None
        shape = (site.shape[0], *grid) if grid else site.shape
        made = make(site.codes(projection or default, shape))
        made = pooling.of_standardised(made, site.maps and not grid) if standardise else made
        made = pooling.of_pooled(made, grid) if grid else made
        return made if features is None else replace(made, squared=False)  # not of every block

    return draw
