"""ZORB: every layer by least squares; its targets are the labels taken back through later layers.

Ranganathan & Lewandowski, "ZORB: a derivative-free backpropagation algorithm for neural networks"
(2020). Our reading, which a test holds equal to the authors' program: layer i, from the first to
the last, is solved once for all samples by the pseudo-inverse, W_i = pinv([x_i, 1]) T_i. The target
T_i is the one-hot label, taken back from the output through the inverses (`inverses`) of everything
after layer i, with the *initial* weights of the later layers.

A target depends on the label alone. So ZORB is target projection before the activation, with class
codes P_i that are computed from the random net instead of drawn. It runs on the same loop as
LM-KARnet, with `ridge(0)` on every block: sums over samples in float64, batch by batch, in memory
that does not grow with the data. The target of a row of soft labels is the mixture of its classes'
targets.

The targets of a bounded activation are scaled into its range. The authors' program undoes that
scale after the activation. By default we leave it out: the next layer is solved on the activation's
actual output, absorbs the scale, and predicts the same. With fewer samples than inputs many weights
fit; ours are the smallest without the bias, theirs with it.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.fit import fit_models
from tpsgd.engine.record import Run
from tpsgd.engine.solvers import ridge
from tpsgd.losses import mse
from tpsgd.nets.blocks import Block, shapes
from tpsgd.nets.cuts.leaves import leaves_of
from tpsgd.nets.cuts.split import layers_of
from tpsgd.nets.modes import evaluating
from tpsgd.nets.precision import without_autocast
from tpsgd.objectives import Objective, Place, Site, l2
from tpsgd.rules import Rule
from tpsgd.targets import CLASSES
from tpsgd_peers.inverses import BOUNDED, Unscale, check_invertible, inverse
from tpsgd_peers.settings import check_data, peer_settings

ABOUT = "least squares to labels taken back through the random net"
_LINKS = (nn.Softmax, nn.LogSoftmax)  # at the output they do not change the order of the classes
_TAKES = ("batch_size", "seed", "device", "validation", "callbacks", "progress", "memory")


def fit_zorb(
    model: nn.Module,
    data: Any,
    *,
    alpha: float | None = 0.0,
    unscale: bool = False,
    batch_size: int = 1024,
    **settings: Any,
) -> Run:
    """Train a model in place by ZORB; see the module for our reading of it.

    Args:
        model: an `nn.Sequential` of linear layers and convolutions with LeakyReLU, ReLU, Tanh or
            Sigmoid, pooling, Flatten and Dropout. The targets depend on its initial weights.
        data: as for `tpsgd.fit`; labels are class indices, or rows of soft labels.
        alpha: 0 is the pseudo-inverse; otherwise a penalty as for `tpsgd.ridge`.
        unscale: after every Sigmoid and Tanh, append a module to the model that undoes the scaling
            of its targets, as the authors' program does.
        batch_size: samples that are summed together; it changes memory and speed only.
        **settings: `seed`, `device`, `validation`, `callbacks`, `progress` and `memory`, as for
            `tpsgd.fit`. The seed is only recorded: nothing is random.

    Returns:
        The record, as of `tpsgd.fit`; `settings["scales"]` has the scales of bounded activations.

    Examples:
        >>> import tpsgd
        >>> x = torch.randn(100, 4)
        >>> y = (x[:, 0] * x[:, 1] > 0).long()
        >>> model = nn.Sequential(nn.Linear(4, 60), nn.LeakyReLU(0.3), nn.Linear(60, 2))
        >>> run = tpsgd.peers.fit_zorb(model, (x, y))
        >>> run.rule, run.sample_passes
        ('zorb', 200)
    """
    chosen = peer_settings(
        "fit_zorb", settings, _TAKES,
        optimizer=ridge(alpha), loss=mse, epochs=1, batch_size=batch_size,
    )  # fmt: skip
    samples = check_data("ZORB", data)
    started, blocks = time.perf_counter(), layers_of(model)
    like = next(model.parameters())
    with evaluating(model), without_autocast():
        codes, scales = targets(blocks, samples[:1].to(like.device, like.dtype))
    seconds = time.perf_counter() - started
    undo = _append_scales(model, scales) if unscale else []
    last = layers_of(model)[-1]
    curved = last.modules[-1] is not last.layer
    try:
        (run,) = fit_models([model], data, [_rule(c, curved) for c in codes], chosen)
    except BaseException:
        for holder, name, module in undo:
            setattr(holder, name, module)
        raise
    run.seconds += seconds  # of the targets
    run.rule = run.settings["rule"] = "zorb"
    numbers = [(float(scale.gain), float(scale.shift)) for scale in scales]
    run.settings |= {"options": [], "unscale": unscale, "scales": numbers}
    return run


def check_model(blocks: list[Block]) -> list[nn.Module]:
    """The modules to invert; refused if one has no inverse or a layer may not learn."""
    modules = [m for block in blocks for m in block.modules]
    if isinstance(modules[-1], _LINKS):
        modules.pop()
    for module in modules:
        check_invertible(module)
    for block in blocks:
        if not all(p.requires_grad for p in block.layer.parameters()):
            raise TpsgdError(
                f"block {block.index + 1} ({block}) may not learn (requires_grad is False), and "
                "ZORB solves all layers: compute its outputs once and train the rest on those"
            )
    return modules


def targets(blocks: list[Block], x: Tensor) -> tuple[list[Tensor], list[Unscale]]:
    """Every block's class codes before its activation, (classes, *shape), and all scales in order.

    `x` is one sample: the inverses need the shapes that it has on the way through the net.
    """
    modules = check_model(blocks)
    output = shapes(blocks, x)[-1][Place.END]
    classes = CLASSES.at(output, False).outputs(output)
    if classes < 2:
        raise TpsgdError(
            "ZORB needs an output for each class, and the last layer has one: give it 2"
        )
    before = []
    with torch.no_grad():
        for module in modules:
            before.append(x.shape[1:])
            x = module(x.clone())
    y = torch.eye(classes, dtype=torch.float64, device=x.device)
    codes, scales, layers = [], [], {id(block.layer) for block in blocks}
    for module, shape in zip(reversed(modules), reversed(before), strict=True):
        if id(module) in layers:
            codes.append(y)
        if len(codes) == len(blocks):
            break
        y, scale = inverse(module, y, shape)
        scales += [scale] if scale else []
    return codes[::-1], scales[::-1]


def _rule(codes: Tensor, last: bool) -> Rule:
    """The squared error to the codes; `last`: of a last block whose output is not linear, too."""

    def objective(site: Site) -> Objective:
        return l2(codes.to(site.device, site.dtype))

    return Rule(
        "zorb", objective, mse, at=Place.BEFORE, about=ABOUT, last=objective if last else None
    )


def _append_scales(
    model: nn.Module, scales: list[Unscale]
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Append a scale to each bounded activation, in the order of the data; how to undo it."""
    undo = []
    bounded = [name for name, m in leaves_of(model) if isinstance(m, BOUNDED)]
    for path, scale in zip(bounded, scales, strict=True):
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        undo.append((holder, name, getattr(holder, name)))
        setattr(holder, name, nn.Sequential(getattr(holder, name), scale))
    return undo
