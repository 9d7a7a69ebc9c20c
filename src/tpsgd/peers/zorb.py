"""ZORB: every layer by least squares, its targets the labels taken back through the later layers.

Ranganathan & Lewandowski, "ZORB: a derivative-free backpropagation algorithm for neural networks"
(2020). Our reading, held to the authors' own program by a test: layer i, from the first to the
last, is solved once for all samples by the pseudo-inverse, W_i = pinv([x_i, 1]) T_i, where the
target T_i is the one-hot label taken back from the output through the inverses (`inverses`) of all
that comes after layer i, with the weights that the later layers *begin* with.

A target thus depends on the label alone: ZORB is target projection, before the activation, whose
class codes P_i are not drawn at random but computed from the random net. So it runs here on the
same loop as LM-KARnet, with `ridge(0)` on every block: sums over samples in float64, in batches,
and its memory does not grow with the data. Rows of soft labels get a mixture of their classes'
targets.

A bounded activation's targets are scaled into its range. The authors' program keeps that scale and
undoes it after the activation ever after. By default it is left out here: the next layer, solved on
what the activation really gives, absorbs it, and predicts the same. Where samples are fewer than
inputs and many weights fit, ours are smallest without the bias, theirs with it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpsgd.engine.assemble import classes_of
from tpsgd.engine.batches import first_samples
from tpsgd.engine.fit import train_local
from tpsgd.engine.record import Epoch, Run
from tpsgd.engine.settings import Memory, Settings
from tpsgd.errors import TpsgdError
from tpsgd.losses import mse
from tpsgd.nets.blocks import Block, leaves_of, shapes, split
from tpsgd.objectives import Objective, Site, l2
from tpsgd.peers.inverses import Scale, Unscale, check_invertible, inverse
from tpsgd.rules import Place, Rule
from tpsgd.solvers.ridge import ridge

ABOUT = "least squares to labels taken back through the random net"
_LINKS = (nn.Softmax, nn.LogSoftmax)  # at the output: the classes' order does not change


def fit_zorb(
    model: nn.Module,
    data: Any,
    *,
    alpha: float | None = 0.0,
    unscale: bool = False,
    batch_size: int = 1024,
    seed: int = 0,
    device: torch.device | str | None = None,
    validation: Any = None,
    callbacks: Sequence[Callable[[Epoch], Any]] = (),
    progress: Callable[[int, int], None] | None = None,
    reuse: bool | None = None,
) -> Run:
    """Train a model in place by ZORB; see the module for our reading of it.

    Args:
        model: an `nn.Sequential` of linear layers and convolutions with LeakyReLU, ReLU, Tanh or
            Sigmoid, pooling, Flatten and Dropout. Its initial weights make the targets.
        data: as for `tpsgd.fit`; labels are class indices, or rows of soft labels.
        alpha: 0 is the pseudo-inverse; a penalty as for `tpsgd.ridge`, None for its own choice.
        unscale: after every Sigmoid and Tanh, a module that undoes the scaling of its targets, as
            the authors' program has it; it becomes a part of the model.
        batch_size: samples that are added up together; it changes memory and speed alone.
        seed: for the record: nothing is drawn.
        device: as for `tpsgd.fit`.
        validation: as for `tpsgd.fit`.
        callbacks: as for `tpsgd.fit`.
        progress: as for `tpsgd.fit`.
        reuse: as for `tpsgd.fit`.

    Returns:
        The record, as of `tpsgd.fit`; `settings["scales"]` has the scales of bounded activations.

    Examples:
        >>> import tpsgd
        >>> x = torch.randn(100, 4)
        >>> y = (x[:, 0] * x[:, 1] > 0).long()
        >>> model = nn.Sequential(nn.Linear(4, 60), nn.LeakyReLU(0.3), nn.Linear(60, 2))
        >>> run = tpsgd.fit_zorb(model, (x, y))
        >>> run.rule, run.sample_passes
        ('zorb', 200)
    """
    started, blocks = time.perf_counter(), split(model)
    like = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    try:
        codes, scales = targets(blocks, first_samples(data)[:1].to(like.device, like.dtype))
    finally:
        for module, mode in modes:
            module.training = mode
    making = time.perf_counter() - started
    undo = _append_scales(model, scales) if unscale else []
    settings = Settings(
        optimizer=ridge(alpha), loss=mse, epochs=1, batch_size=batch_size, seed=seed,
        device=device, validation=validation, callbacks=callbacks, progress=progress,
        memory=Memory(reuse=reuse),
    )  # fmt: skip
    last = split(model)[-1]
    curved = last.modules[-1] is not last.layer
    try:
        (run,) = train_local([model], data, [_rule(c, curved) for c in codes], settings)
    except BaseException:
        for holder, name, module in undo:
            setattr(holder, name, module)
        raise
    run.seconds += making  # of the targets
    run.rule = run.settings["rule"] = "zorb"
    run.settings |= {"options": [], "unscale": unscale, "scales": [tuple(s) for s in scales]}
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


def targets(blocks: list[Block], x: Tensor) -> tuple[list[Tensor], list[Scale]]:
    """Every block's class codes before its activation, (classes, *shape), and all scales in order.

    `x` is a sample, whose shape tells what the inverses cannot know.
    """
    modules = check_model(blocks)
    classes = classes_of(shapes(blocks, x)[-1][Place.END], blocks[-1])
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
    """Reach for the codes; `last`: in a last block whose output is not linear."""

    def objective(site: Site) -> Objective:
        return l2(codes.to(site.device, site.dtype))

    return Rule(
        "zorb", objective, mse, at=Place.BEFORE, about=ABOUT, last=objective if last else None
    )


def _append_scales(model: nn.Module, scales: list[Scale]) -> list[tuple[nn.Module, str, nn.Module]]:
    """After each bounded activation, in the order in which data meets them; how to undo it."""
    undo = []
    bounded = [name for name, m in leaves_of(model) if isinstance(m, (nn.Sigmoid, nn.Tanh))]
    for name, scale in zip(bounded, scales, strict=True):
        parent, _, own = name.rpartition(".")
        holder = model.get_submodule(parent)
        undo.append((holder, own, getattr(holder, own)))
        setattr(holder, own, nn.Sequential(getattr(holder, own), Unscale(*scale)))
    return undo
