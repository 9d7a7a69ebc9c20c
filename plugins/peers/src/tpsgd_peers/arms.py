"""ZORB and dlADMM as arms of `compare`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from tpsgd.common.errors import TpsgdError
from tpsgd.engine.arm import Arm
from tpsgd.engine.record import Run
from tpsgd.nets.cuts.split import layers_of
from tpsgd.rules import Entry
from tpsgd_peers.dladmm import check_model as check_dladmm
from tpsgd_peers.dladmm import fit_dladmm
from tpsgd_peers.zorb import check_model as check_zorb
from tpsgd_peers.zorb import fit_zorb

SHARED = ("seed", "device", "progress", "validation", "callbacks")  # settings of all arms


def zorb(**options: Any) -> Arm:
    """ZORB as an arm; `options` are those of `fit_zorb`."""
    about = "least squares to labels propagated back through the net"
    method = partial(_train, by=fit_zorb, options=options)
    return Arm("zorb", None, method=method, remark=about, of_classes=True)


def dladmm(**options: Any) -> Arm:
    """dlADMM as an arm; `options` are those of `fit_dladmm`."""
    about = "alternating updates of all layers, full batch"
    method = partial(_train, by=fit_dladmm, options=options)
    return Arm("dladmm", None, method=method, remark=about, of_classes=True)


def _train(
    model: nn.Module, data: Any, *, by: Callable[..., Run], options: dict[str, Any], **settings: Any
) -> Run:
    """Train by a peer, which has no epochs, rates or batches of the size that other arms have."""
    shared = {name: value for name, value in settings.items() if name in SHARED}
    return by(model, data, **(shared | options))


def _suits(check: Callable[[Any], Any], model: nn.Module) -> bool:
    """Whether a method can train a model with these layers."""
    try:
        check(layers_of(model))
    except TpsgdError:
        return False
    return True


ZORB = Entry(
    zorb, "Ranganathan & Lewandowski 2020", "#7B2D00", ">", recurrent=False,
    suits=partial(_suits, check_zorb),
)  # fmt: skip
DLADMM = Entry(
    dladmm, "Wang et al. 2019", "#00504A", "*", feed_forward=False, recurrent=False,
    suits=partial(_suits, check_dladmm),
)  # fmt: skip
