"""Table 1 of the paper as code: a rule says which signal reaches which local loss, and where.

With y_i = sigma(z_i), z_i = x_i W_i, class codes P_i, label y* and network output y_N, every rule
is gradient *descent* on a local loss J_i, so all rules have the same sign convention:

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
| `auxiliary`  | CE(net of y_i, y*)          | -dJ_i/dy_i             | y*                      |
| `lls`        | CE(B y_i / norm(y_i), y*)   | -dJ_i/dy_i             | y*                      |
| `frozen`     | none: hidden layers are not trained, the last layer is; the control            |
| `untrained`  | none: no layer is trained                                                      |

The printed table leaves out the input factor x_i^T. `*` and `abs` act on each element; losses are
sums over units and means over the batch. y* - y_N is the negative derivative of the last block's
loss with respect to the logits, y* - p. With DFA and sDFA no layer can learn before the
network's output is known; the other rules have no such update locking. `readout` is not from the
paper: it is the local classifier of Mostafa, Ramesh & Cauwenberghs (2018), with fixed random
weights or learned ones, written in the same form. `default()` is the learned one.

A rule for a whole net also names the loss of its last block, which has no projection: `mse` for the
tpSGD rules as in the paper, `cross_entropy` for the others. `fit(loss=...)` overrides it.

Sources: tpSGD, Lomnitz et al. (2022); DRTP and sDFA, Frenkel et al. (2021); DFA, Nøkland (2016);
readout, Mostafa et al., "Deep supervised learning using local errors" (2018); predsim, Nøkland &
Eidnes, "Training Neural Networks with Local Error Signals" (2019); auxiliary, Belilovsky et al.,
"Decoupled Greedy Learning of CNNs" (2020). Mono-Forward, Gong et al. (2025), is a learned readout.

`ALL` at the end names every rule. The words of the command line, the list of `tpsgd rules`, the
colours of the plots and the test matrix are derived from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

from torch import Tensor, nn

from tpsgd import objectives
from tpsgd.common import plugins
from tpsgd.common.errors import TpsgdError, suggestion
from tpsgd.common.numbers import is_real, is_whole
from tpsgd.losses import Loss, cross_entropy, mse
from tpsgd.maths import auxiliary as auxiliary_net
from tpsgd.maths import pooled_objectives, synchronised
from tpsgd.maths import predsim as similarity
from tpsgd.maths.pooling import grid_for
from tpsgd.objectives import NetSignal, Objective, Place, Signal, Site
from tpsgd.projections import Projection, binary, normal, orthogonal

CELLS = 16  # that the maps of a filter are averaged over, unless `features` bounds their number
SCALE = 12.0  # of calibrated readouts; chosen on held-out samples, see experiments/calibration.py
OF_NUMBERS = 3.0  # the same, of labels that are numbers: experiments/number_scale.py


@dataclass(frozen=True)
class Rule:
    """How hidden blocks learn; with `objective=None` they are not trained."""

    name: str
    objective: Callable[[Site], Objective] | None
    loss: Loss = cross_entropy
    signal: Signal | NetSignal = Signal.LABEL
    at: Place = Place.AFTER
    about: str = ""
    options: str = ""  # the chosen options in words, for the record
    per_step: bool = True  # recurrent blocks: class codes for each time step, or the same for all
    head: bool = True  # whether the last block learns
    classifies: bool = False  # whether its local loss is a classifier's, or a linear regression's
    compares: bool = False  # whether it compares samples of a class, so that it needs classes
    last: Callable[[Site], Objective] | None = None  # the last block's objective, if not its loss
    predictor: Callable[[Any], Any] | None = None  # of a model: what predicts, if not its output

    def __str__(self) -> str:
        return f"{self.name}: {self.options}, {self.at.value}, {self.loss.name}"

    def __post_init__(self) -> None:
        if not isinstance(self.at, Place):
            raise TpsgdError(f"at must be a tpsgd.Place, such as Place.AFTER, got {self.at!r}")
        if isinstance(self.objective, Objective) or not callable(self.objective or Objective):
            kind = f"None or a function of a Site, got a {type(self.objective).__name__}"
            raise TpsgdError(f"{self.name}: objective must be {kind}")

    def predicting(self, model: nn.Module) -> nn.Module:
        """The module that predicts: the model, or what `predictor` makes of it."""
        module = model if self.predictor is None else self.predictor(model)
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise TpsgdError(f"the predictor of {self.name} must return an nn.Module, got a {kind}")
        return module

    @property
    def needs_output(self) -> bool:
        """Whether blocks can only learn once the network's output is known (update locking)."""
        if isinstance(self.signal, NetSignal):
            return self.signal.needs_output
        return self.signal is not Signal.LABEL

    @property
    def needs_net(self) -> bool:
        """Whether its signal comes from the whole net, so that all blocks learn together."""
        return self.needs_output or isinstance(self.signal, NetSignal)


def tpsgd_l2(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with the squared error to the projected label: the paper's main rule.

    `features` and `standardise` (of the tpSGD rules and DRTP) are for deep convolutional nets; they
    are not in the paper. With `features`, feature maps are averaged over the finest grid that
    leaves at most this many numbers, and P y* is the target of these averages: a convolution
    computes the same function at every pixel and cannot reach a different target at each. With
    `standardise`, outputs are compared after scaling them to mean 0 and deviation 1 over the batch,
    so that they cannot shrink to the targets' mean; `tpsgd_l2` and `drtp` are then the same rule.
    Use both in nets with BatchNorm.

    Examples:
        >>> tpsgd_l2(features=256, standardise=True).options
        'normal codes, std 1, at most 256 features, standardised'
    """
    about = "squared error to P y*"
    codes = _Codes(projection, features, standardise)
    return codes.rule("tpsgd-l2", objectives.l2, at, about, loss=mse)


def tpsgd_l1(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with the absolute error to the projected label; options as `tpsgd_l2`'s.

    `standardise` is not recommended here: among outputs of deviation 1, those with rare spikes have
    the smallest absolute error, and units die.
    """
    about = "absolute error to P y*"
    codes = _Codes(projection, features, standardise, recurrent=binary())
    return codes.rule("tpsgd-l1", objectives.l1, at, about, loss=mse)


def tpsgd(
    loss: Callable[[Tensor, Tensor], Tensor],
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """tpSGD with any loss `(output, target) -> scalar`, which should be a mean over the batch.

    The other options are those of `tpsgd_l2`.

    Examples:
        >>> from torch.nn.functional import smooth_l1_loss
        >>> tpsgd(smooth_l1_loss).name
        'tpsgd-smooth_l1_loss'
    """
    name = f"tpsgd-{getattr(loss, '__name__', type(loss).__name__)}"

    def any_loss(P: Any) -> Objective:
        return objectives.any_loss(P, loss)

    codes = _Codes(projection, features, standardise)
    return codes.rule(name, any_loss, at, "any loss to P y*", loss=mse)


def drtp(
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    standardise: bool = False,
) -> Rule:
    """Direct random target projection: align with the projected label (Frenkel et al. 2021).

    The inner product has no minimum, so with an unbounded activation features keep growing: prefer
    Tanh or Sigmoid, a small learning rate, or `standardise` (see `tpsgd_l2`).
    """
    codes = _Codes(projection, features, standardise, recurrent=orthogonal())
    return codes.rule("drtp", objectives.inner, at, "align with P y*")


def dfa(projection: Projection | None = None, at: Place = Place.AFTER) -> Rule:
    """Direct feedback alignment: align with the projected output error (Nøkland 2016)."""
    about = "align with the projected output error; waits for the output"
    return _Codes(projection).rule("dfa", objectives.inner, at, about, signal=Signal.ERROR)


def sdfa(projection: Projection | None = None, at: Place = Place.AFTER) -> Rule:
    """DFA with only the sign of the output error (Frenkel et al. 2021).

    With cross-entropy this sign is +1 for the label and -1 for all other classes, whatever the
    output is, so features can grow without bound, as with `drtp`.
    """
    about = "align with the projected sign of the output error; waits for the output"
    return _Codes(projection).rule("sdfa", objectives.inner, at, about, signal=Signal.ERROR_SIGN)


def readout(
    learned: bool = False,
    projection: Projection | None = None,
    at: Place = Place.AFTER,
    features: int | None = None,
    scale: float | None = None,
    calibrate: bool | None = None,
    gain: float | None = None,
) -> Rule:
    """Cross-entropy of a local classifier, whose weights are class codes.

    After Mostafa, Ramesh & Cauwenberghs (2018); not in the paper. Feature maps are averaged over a
    grid of at most 16 cells, 4 x 4 of a picture, or the finest that leaves at most `features`
    numbers. The codes are fixed random numbers; with `learned` they start as these and are trained
    by the same local loss, which is the default rule (`rules.default`). If the last block's loss is
    `bce`, so is the local one.

    Before a block learns, one forward pass of its first batch measures the root mean square of the
    features, and a constant makes it `scale` over the root of the number of units, or filters
    (`calibrate`; `run.blocks` has the constant). Without that, the softmax is saturated in nets
    with batch norm and flat in others. By default `scale` is 12, of labels that are numbers 3. One
    that is set by hand is the constant itself, unless `calibrate=True`.

    Of learned codes that constant, `scale / sqrt(d)` for d features, is a factor of the logits, and
    plain SGD moves the products of code and factor with its square times the rate: slowly, where
    there are many features. With `gain` that number is the factor, and the codes begin as much
    smaller or larger: `readout(True, scale=2.0, gain=1.0)` learns its codes as fast as an output
    layer learns its weights, from the same first logits. It takes a `scale`, and no calibration.

    Mono-Forward (Gong, Li & Abdulla, "Mono-Forward: Backpropagation-Free Algorithm for Efficient
    Neural Network Training Harnessing Local Errors", 2025) is this rule with learned codes: its
    goodness a M^T is the logits, M = P scale / sqrt(d). For blocks of d outputs,
    `readout(True, uniform((3 * d) ** -0.5), features=d, scale=d**0.5)` takes exactly its steps,
    with M initialised as torch's linear layers are.
    """
    calibrated = scale is None if calibrate is None else calibrate
    local = _Readout(learned, projection, features, scale, calibrated, gain)
    name = "readout-learned" if learned else "readout"
    about = f"local classifier through {'learned' if learned else 'fixed random'} codes"
    options = {"about": about, "options": str(local), "per_step": False, "classifies": True}
    return Rule(name, local, at=at, **options)


def default() -> Rule:
    """The rule of `fit`, `plan`, `compare`, streams, classifiers and exports, if none is named.

    It is `readout` with learned codes. Chosen on held-out samples: `results/default_rule.json`.

    Examples:
        >>> default().name
        'readout-learned'
    """
    return readout(learned=True)


def predsim(share: float = 0.99, features: int = 2048, convolve: bool = True) -> Rule:
    """Similarity matching and a local classifier (Nøkland & Eidnes 2019); not in the paper.

    Samples of the same class shall have similar outputs, so labels must be one class for each
    sample: numbers, and labels for every step or pixel, are refused. `share` is the weight of this
    similarity loss, which compares all samples of a batch; `features` bounds the classifier's
    inputs. The classifier, and the convolution before the similarity, learn with the block;
    `convolve=False` leaves that convolution out and is cheaper.

    The published nets have a dropout after each activation, which the local loss does not see: put
    `nn.Dropout2d(0.2)` after the ReLU of each convolution and `nn.Dropout(0.2)` after that of each
    dense layer into the model. Their batch norm follows dense layers too, their activation is
    `nn.LeakyReLU`, and they train 400 epochs with Adam from a rate of 5e-4, divided by 4 after 50,
    75, 89 and 94 % of the epochs. With `share=0, convolve=False` the loss is their `pred`.
    """

    def objective(site: Site) -> Objective:
        return similarity.predsim(site, share, features, convolve)

    about = "samples of a class alike, and a learned local classifier"
    convolution = "" if convolve else ", no convolution"
    options = f"share {share:g}, at most {features} features{convolution}"
    kind: dict[str, Any] = {"per_step": False, "classifies": True, "compares": True}
    return Rule("predsim", objective, about=about, options=options, **kind)


def auxiliary(
    channels: int = 128,
    kernels: int | Sequence[int] = (3,),
    side: int = 10,
    share: float = 0.0,
    at: Place = Place.AFTER,
) -> Rule:
    """A local classifier with hidden layers; not in the paper.

    The auxiliary net of Belilovsky, Eickenberg & Oyallon, "Decoupled Greedy Learning of CNNs"
    (2020), learns with the block. Feature maps are averaged to at most `side` x `side` cells; then
    come a convolution of `channels` filters, batch norm and ReLU for each of the `kernels`, the
    average over 2 x 2 cells and a linear layer. For vectors the convolutions are linear layers.

    `kernels=(1, 1, 1)` or `(3, 3)` are nets as Belilovsky et al. have them. `share` is the weight
    of a similarity loss, that of `predsim(convolve=False)`, here of the averages; it is left out
    where labels are numbers. Batch norm looks at the whole batch, so micro-batches would change it.

    Examples:
        >>> auxiliary(kernels=(1, 3)).options
        '2 hidden layers of 128, kernel 1 and 3, at most 10 x 10 cells, share 0'
    """
    each = (kernels,) if isinstance(kernels, (int, float)) else tuple(kernels)
    whole = all(isinstance(n, int) and n is not True and n > 0 for n in (channels, side, *each))
    if not whole or any(k % 2 == 0 for k in each):
        raise TpsgdError(
            "an auxiliary net needs whole numbers, channels and side of 1 or more and odd kernels; "
            f"got channels={channels}, side={side}, kernels={kernels}"
        )
    if not 0 <= share <= 1:
        raise TpsgdError(f"share must be a number from 0 to 1, got {share}")

    def objective(site: Site) -> Objective:
        return auxiliary_net.auxiliary(site, channels, each, side, share)

    layers = f"{len(each)} hidden layer{'s' * (len(each) != 1)} of {channels}"
    widths = ", kernel " + " and ".join(map(str, each)) if each else ""
    options = f"{layers}{widths}, at most {side} x {side} cells, share {share:g}"
    about = "local classifier with a hidden layer, learned"
    return Rule(
        "auxiliary", objective, at=at, about=about, options=options, per_step=False, classifies=True
    )


def lls(temperature: float = 1.0, at: Place = Place.AFTER) -> Rule:
    """A classifier of the direction of a block's output, through fixed periodic codes.

    Apolinario, Roy & Roy, "LLS: Local Learning Rule for Deep Neural Networks Inspired by Neural
    Activity Synchronization" (2025); not in the paper. Feature maps are averaged over at most 4 x 4
    cells, as in the authors' program. Their variants with a learned modulation are not here.
    Nothing is drawn, so restarts differ in their weights alone.

    Examples:
        >>> lls(temperature=0.5).options
        'sines of 50 to 512, at most 16 cells, temperature 0.5'
    """
    if not isinstance(temperature, (int, float)) or not 0 < temperature < inf:
        raise TpsgdError(f"temperature must be a number above 0, got {temperature!r}")
    options = f"sines of 50 to 512, at most {CELLS} cells, temperature {temperature:g}"
    about = "local classifier of the output's direction through fixed periodic codes"
    objective = partial(synchronised.synchronised, most=CELLS, temperature=temperature)
    return Rule(
        "lls", objective, at=at, about=about, options=options, per_step=False, classifies=True
    )


def frozen(loss: Loss = cross_entropy) -> Rule:
    """The control: hidden blocks are not trained, the last block is."""
    return Rule("frozen", None, loss, about="control: hidden blocks stay random")


def untrained() -> Rule:
    """The weaker control: the net as it is initialised, without any training."""
    return Rule("random", None, about="control: nothing is trained, not even the head", head=False)


def with_tensors(rule: Rule, tensors: Mapping[int, Sequence[Tensor]]) -> Rule:
    """The rule with your own initial tensors of its objectives: P, or what else they hold.

    `tensors` has, by the number of a block, counted from 1, what replaces all of
    `rule.objective(site).tensors`, in their order; it is copied. Other blocks draw theirs, and
    numbers that no hidden block has change nothing.
    """
    make = rule.objective
    if make is None:
        raise TpsgdError(f"{rule.name} has no objective, and so no tensors to replace")
    for number, own in tensors.items():
        in_list = isinstance(own, list | tuple) and all(isinstance(t, Tensor) for t in own)
        if not (isinstance(number, int) and number > 0 and in_list):
            raise TpsgdError(
                "tensors must be lists of tensors by the numbers of blocks, which count from 1, "
                f"got a {type(own).__name__} for {number!r}"
            )

    def objective(site: Site) -> Objective:
        number = 1 + site.key.block
        if number not in tensors:
            return make(site)
        drawn = make(replace(site, redraw=False))
        needed = [tuple(t.shape) for t in drawn.tensors]
        shapes = [tuple(t.shape) for t in tensors[number]]
        if needed != shapes:
            raise TpsgdError(f"{rule.name} needs tensors {needed} in block {number}, got {shapes}")
        pairs = zip(tensors[number], drawn.tensors, strict=True)
        copies = tuple(t.detach().to(site.device, d.dtype, copy=True) for t, d in pairs)
        of_tensors = drawn.formula is None or drawn.formula.codes is None  # not of how P is drawn
        return replace(drawn, tensors=copies, formula=drawn.formula if of_tensors else None)

    options = f"{rule.options}, own tensors of blocks {', '.join(map(str, sorted(tensors)))}"
    return replace(rule, objective=objective, options=options.removeprefix(", "))


@dataclass(frozen=True)
class _Codes:
    """The options of a rule with class codes P: how P is drawn and what it is compared with."""

    projection: Projection | None = None  # None: normal codes
    features: int | None = None
    standardise: bool = False
    recurrent: Projection | None = None  # the default of recurrent blocks, if not normal codes

    def __str__(self) -> str:
        projection = self.projection or normal()
        text = f"{projection.name} codes, std {projection.std:g}"
        if self.recurrent and not self.projection:
            text += f" (recurrent blocks: {self.recurrent.name})"
        if self.features is not None:
            text += f", at most {self.features} features"
        return text + (", standardised" if self.standardise else "")

    def rule(
        self, name: str, objective: Callable[[Any], Objective], at: Place, about: str, **more: Any
    ) -> Rule:
        """A rule with an objective of P; `more` are fields of `Rule`."""
        if self.features is not None and not is_whole(self.features, 1):
            raise TpsgdError(f"features must be 1 or more, or None, got {self.features!r}")

        def draw(site: Site) -> Objective:
            return self.draw(objective, site)

        return Rule(name, draw, at=at, about=about, options=str(self), **more)

    def draw(self, objective: Callable[[Any], Objective], site: Site) -> Objective:
        """The objective of a P that is drawn for the shape of the block's output, pooled or not."""
        default = self.recurrent if site.recurrent and self.recurrent else normal()
        grid = grid_for(site.shape, self.features) if self.features and site.maps else None
        shape = (site.shape[0], *grid) if grid else site.shape
        drawn = objective(site.codes(self.projection or default, shape))
        if self.standardise:
            drawn = pooled_objectives.of_standardised(drawn, site.maps and not grid)
        if grid:
            drawn = pooled_objectives.of_pooled(drawn, grid)
        # with `features`, only blocks of feature maps pool: least squares would not solve them all
        return drawn if self.features is None else replace(drawn, squared=False)


@dataclass(frozen=True)
class _Readout:
    """The options of `readout`; called with a block's site, it makes the local classifier."""

    learned: bool
    projection: Projection | None
    features: int | None
    scale: float | None  # None: `SCALE` or `OF_NUMBERS`
    calibrated: bool
    gain: float | None = None  # of learned codes; None: what `scale` gives

    def __post_init__(self) -> None:
        if self.features is not None and not is_whole(self.features, 1):
            raise TpsgdError(f"features must be 1 or more, got {self.features!r}")
        for name, number in (("scale", self.scale), ("gain", self.gain)):
            if number is not None and not (is_real(number) and number > 0):
                raise TpsgdError(f"{name} must be a number over 0, got {number}")
        if self.gain is not None and (self.calibrated or self.scale is None or not self.learned):
            raise TpsgdError("gain= is for learned codes with a scale= that is not calibrated")

    def __str__(self) -> str:
        pooled = f", at most {CELLS} cells" if self.features is None else ""
        default = f"{SCALE:g} ({OF_NUMBERS:g} of numbers)"
        scale = default if self.scale is None else f"{self.scale:g}"
        scaled = f"{'calibrated, ' if self.calibrated else ''}scale {scale}"
        gain = "" if self.gain is None else f", gain {self.gain:g}"
        return f"{_Codes(self.projection, self.features)}{pooled}, {scaled}{gain}"

    def __call__(self, site: Site) -> Objective:
        codes = self.projection or normal()
        most = CELLS * site.shape[0] if self.features is None else self.features
        scale = self.scale or (OF_NUMBERS if site.numbers else SCALE)
        settings = self.learned, most, scale, self.calibrated, self.gain
        return objectives.readout(site, codes, *settings)


def scale_of(rule: Rule | None) -> float | None:
    """The scale of a readout, of classes by default; None for every other rule."""
    local = rule and rule.objective
    return local.scale or SCALE if isinstance(local, _Readout) else None


def has_default_scale(rule: Rule | None) -> bool:
    """Whether a rule is a readout whose scale nobody has chosen."""
    local = rule and rule.objective
    return isinstance(local, _Readout) and local.scale is None and local.calibrated


def learns_codes(rule: Rule | None) -> bool:
    """Whether a rule is a readout whose codes learn."""
    local = rule and rule.objective
    return isinstance(local, _Readout) and local.learned


def with_scale(
    rule: Rule, scale: float, calibrate: bool | None = None, gain: float | None = None
) -> Rule:
    """A readout with another scale and all its other settings; `calibrate` can change, too.

    `gain` becomes that of learned codes.

    Examples:
        >>> with_scale(readout(features=64, at=Place.BEFORE), 3).options
        'normal codes, std 1, at most 64 features, calibrated, scale 3'
    """
    if not isinstance(rule.objective, _Readout):
        raise TpsgdError(f"{rule.name} has no scale: it is for readout and readout-learned")
    calibrated = rule.objective.calibrated if calibrate is None else calibrate
    gain = rule.objective.gain if gain is None else gain
    local = replace(rule.objective, scale=scale, calibrated=calibrated, gain=gain)
    return replace(rule, objective=local, options=str(local))


def with_projection(rule: Rule, kind: Callable[[float], Projection]) -> Rule:
    """A readout with codes of another distribution, and their deviation and all else as before.

    Examples:
        >>> with_projection(readout(features=64), binary).options
        'binary codes, std 1, at most 64 features, calibrated, scale 12 (3 of numbers)'
    """
    if not isinstance(rule.objective, _Readout):
        raise TpsgdError(f"{rule.name} is no readout: its codes are its own")
    codes = rule.objective.projection or normal()
    local = replace(rule.objective, projection=kind(codes.std))
    return replace(rule, objective=local, options=str(local))


@dataclass(frozen=True)
class Entry:
    """A word of the command line: what it names, where it comes from, how plots show it.

    `make()` gives the rule (for methods that are no rules, see `comparison.arms.ALL`: an arm).
    """

    make: Callable[..., Any]
    source: str  # authors and year
    colour: str
    marker: str
    dash: str = "-"
    feed_forward: bool = True  # part of `--rules all` for feed-forward nets
    recurrent: bool = True  # part of `--rules all` for recurrent nets
    suits: Callable[[Any], bool] | None = None  # of a method without a rule: whether a model fits


# The colours are those of Okabe and Ito, which colour-blind readers can tell apart; controls are
# grey.
ALL: dict[str, Entry] = {
    "tpsgd-l2": Entry(tpsgd_l2, "Lomnitz et al. 2022", "#0072B2", "s"),
    "tpsgd-l1": Entry(tpsgd_l1, "Lomnitz et al. 2022", "#56B4E9", "^", "--"),
    "drtp": Entry(drtp, "Frenkel et al. 2021", "#D55E00", "D"),
    "dfa": Entry(dfa, "Nøkland 2016", "#E69F00", "v", "--"),
    "sdfa": Entry(sdfa, "Frenkel et al. 2021", "#8F7F00", "P"),
    "readout": Entry(readout, "Mostafa et al. 2018", "#009E73", "X", "--"),
    "readout-learned": Entry(partial(readout, True), "Mostafa et al. 2018", "#CC79A7", "p"),
    "predsim": Entry(
        predsim, "Nøkland & Eidnes 2019", "#8C564B", "H", feed_forward=False, recurrent=False
    ),
    "lls": Entry(
        lls, "Apolinario et al. 2025", "#AA4499", "p", feed_forward=False, recurrent=False
    ),
    "auxiliary": Entry(
        auxiliary, "Belilovsky et al. 2020", "#332288", "h", feed_forward=False, recurrent=False
    ),
    "frozen": Entry(frozen, "", "#888888", "o", ":"),
    "random": Entry(untrained, "", "#A0A0A0", "d", "-.", feed_forward=False),
}
METHODS = (  # the other words of `comparison.arms.ALL`, of arms that are more than a rule
    "backprop", "backprop-checkpointed", "backprop-micro", "lm-karnet", "elm", "reservoir",
)  # fmt: skip


def entry(word: str, own: Mapping[str, Entry] = ALL) -> Entry:
    """The entry of a word: the library's own, or that of a plug-in."""
    if word in own:
        return own[word]
    others = plugins.names(plugins.ARMS)
    if word in others:
        return plugins.load(plugins.ARMS, word)
    words = [*own, *sorted(others.difference(own))]
    absent = plugins.absent(plugins.ARMS, word)
    raise TpsgdError(absent or f"unknown rule {word!r}: {suggestion(word, words)}")


def resolve(rule: Any) -> Rule | list[Rule]:
    """The rule that a word names; rules stay, None is the default, lists have one a block.

    Examples:
        >>> resolve("drtp").name, [r.name for r in resolve(["readout", dfa()])], resolve(None).name
        ('drtp', ['readout', 'dfa'], 'readout-learned')
    """
    if rule is None:
        return default()
    if isinstance(rule, (list, tuple)):
        return [resolve(each) for each in rule]  # type: ignore[misc]
    if isinstance(rule, str):
        named = None if rule in METHODS else entry(rule).make()
        if not isinstance(named, Rule):
            raise TpsgdError(f"{rule} is more than a rule: it is for compare and tpsgd train")
        return named
    if callable(rule):
        name = getattr(rule, "__name__", type(rule).__name__)
        name = f"tpsgd.rules.{name}" if rule is globals().get(name) else name
        raise TpsgdError(f"rule must be a rule: write {name}(), not the function itself")
    return rule
