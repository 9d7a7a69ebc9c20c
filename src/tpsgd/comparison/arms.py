"""Arms by their words: rules, peers and controls; `ALL` names every one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tpsgd import rules
from tpsgd.engine.optimizers import adam, sgd
from tpsgd.engine.settings import Schedule
from tpsgd.errors import TpsgdError, suggestion
from tpsgd.nets.blocks import split
from tpsgd.peers import arms as peers
from tpsgd.rules import Entry, Rule, frozen
from tpsgd.solvers import ridge
from tpsgd.train import sequential, simultaneous
from tpsgd.training.arm import Arm
from tpsgd.zoo.words import Factory, is_recurrent
from tpsgd.zoo.words import reservoir as reservoir_like

RESERVOIR = replace(
    frozen(), name="reservoir", about="control: random leaky cells, head by least squares"
)


def backprop() -> Arm:
    """Backpropagation, with which every other arm is compared."""
    return Arm("backprop", None)


def reservoir(factory: Factory | None = None) -> Arm:
    """A control for recurrent nets: random leaky cells of the same sizes, and a solved head.

    The cells are well scaled, whatever cells the net has. A perceptron between the recurrent layers
    and the classifier is left out. Without a factory the arm can be described but not trained.
    """
    if factory is None:
        return Arm("reservoir", RESERVOIR)
    make = reservoir_like(factory)
    optimizer = [*[adam] * (len(split(make())) - 1), ridge()]
    return Arm("reservoir", RESERVOIR, optimizer=optimizer, factory=make)


ALL: dict[str, Entry] = {
    "backprop": Entry(backprop, "", "#000000", "o"),
    **rules.ALL,
    **peers.ALL,
    "reservoir": Entry(reservoir, "Jaeger 2001", "#5C5C5C", "h", "--", feed_forward=False),
}


def entry(word: str) -> Entry:
    """The entry of a word; an unknown word is an error that names the closest one."""
    if word not in ALL:
        raise TpsgdError(f"unknown rule {word!r}: {suggestion(word, ALL)}")
    return ALL[word]


def arm(
    what: str | Rule | Arm, schedule: Schedule | None = None, factory: Factory | None = None
) -> Arm:
    """The arm of a word or a rule; an arm is returned as it is.

    Rules that need the network's output learn simultaneously, whatever the schedule. The factory is
    that of the models to compare, which the reservoir depends on.

    Examples:
        >>> arm(rules.dfa()).schedule.__name__, arm("elm").about
        ('simultaneous', 'control: random hidden layers, head by ridge')
    """
    if isinstance(what, str):
        make = entry(what).make
        what = make(factory) if what == "reservoir" else make()
    if isinstance(what, Arm):
        return what
    if not isinstance(what, Rule):
        raise TpsgdError(f"an arm is a word, a rule or an Arm, not a {type(what).__name__}")
    if not what.head:  # nothing learns
        return Arm(what.name, what, simultaneous, epochs=0)
    return Arm(what.name, what, simultaneous if what.needs_output else schedule)


def all_words(factory: Factory) -> tuple[list[str], list[str]]:
    """The words of `--rules all` for these models, and the peers that are left out."""
    model = factory()
    if is_recurrent(model):
        return [word for word, entry in ALL.items() if entry.recurrent], []
    words = [word for word, entry in ALL.items() if entry.feed_forward]
    words = [word for word in words if word not in peers.ALL or peers.suits(word, model)]
    return words, [word for word in peers.ALL if word not in words]


def with_controls(arms: Sequence[Arm]) -> list[Arm]:
    """Backprop, the arms, the frozen control, then other controls.

    Backprop and the frozen control are added if they are missing.
    """
    names = [a.name for a in arms]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise TpsgdError(f"two arms are called {min(repeated)!r}: give each a different name")
    methods = [a for a in arms if not a.backprop and not a.control]
    schedule = next((a.schedule for a in methods if a.rule and not a.rule.needs_output), None)
    first = [a for a in arms if a.backprop] or [backprop()]
    frozen_arms = [a for a in arms if a.rule and a.rule.name == "frozen"]
    frozen_arms = frozen_arms or [arm(frozen(), schedule)]
    controls = [a for a in arms if a.control and a not in frozen_arms]
    return [*first, *methods, *frozen_arms, *controls]


def scaled(arm: Arm, scale: float) -> Arm:
    """The arm of `readout` or `readout-learned` with another scale, calibrated."""
    if arm.rule is None or arm.rule.name not in ("readout", "readout-learned"):
        raise TpsgdError(f"{arm.name} has no scale: it is for readout and readout-learned")
    learned = arm.rule.name == "readout-learned"
    return replace(arm, rule=rules.readout(learned, at=arm.rule.at, scale=scale, calibrate=True))


def with_ridge(arm: Arm, factory: Factory, settings: Mapping[str, Any]) -> Arm:
    """The arm with its last block solved in closed form, if it is trained block by block.

    Hidden blocks have the optimizer and the learning rate of the settings.
    """
    free = arm.rule is not None and arm.rule.head and arm.optimizer is None
    if not free or arm.schedule not in (None, sequential):
        return arm
    hidden = settings.get("optimizer", adam)
    if "lr" in settings:
        kinds: dict[Any, Any] = {adam: torch.optim.Adam, sgd: torch.optim.SGD}
        hidden = partial(kinds[hidden], lr=settings["lr"])
    blocks = split(factory(), settings.get("blocks"))
    return replace(arm, optimizer=[*[hidden] * (len(blocks) - 1), ridge()])
