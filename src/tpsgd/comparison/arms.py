"""Arms by their words: rules, peers and controls; `ALL` names every one."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from tpsgd import rules
from tpsgd.common import plugins
from tpsgd.common.errors import TpsgdError
from tpsgd.common.files import is_function
from tpsgd.comparison import closed_forms
from tpsgd.comparison.fields import rule_of_file
from tpsgd.comparison.scores import target_of
from tpsgd.comparison.trials import SEARCH
from tpsgd.data import Data
from tpsgd.engine.arm import BACKPROP, Arm
from tpsgd.engine.learners.backprop import in_segments
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.restarts import make_model
from tpsgd.engine.settings import Order, Settings
from tpsgd.engine.solvers import ridge
from tpsgd.engine.spec import refuse_comparing
from tpsgd.memory.rehearse import Inputs, best_segments
from tpsgd.nets.cuts.split import LAYERS, split
from tpsgd.nets.padded import Padded
from tpsgd.rules import Entry, Rule, frozen
from tpsgd.targets import Target, refuse_all_but_classes
from tpsgd.train import sequential, simultaneous
from tpsgd.zoo.words import Factory, is_recurrent
from tpsgd.zoo.words import reservoir as reservoir_like

CELLS = "control: random leaky cells, head by least squares"
RESERVOIR = replace(frozen(), name="reservoir", about=CELLS)


def backprop() -> Arm:
    """Backpropagation, with which every other arm is compared."""
    return Arm(BACKPROP, None)


def backprop_checkpointed() -> Arm:
    """Backpropagation with activation checkpointing; `compare` has the segments that save most."""
    about = "backprop with activation checkpointing"
    return Arm("backprop-checkpointed", None, remark=about, checkpointed=True)


def backprop_micro(micro_batch: int = 8) -> Arm:
    """Backpropagation with gradient accumulation: a batch is processed in micro-batches."""
    about = "backprop with gradient accumulation over micro-batches"
    return Arm("backprop-micro", None, remark=about, micro_batch=micro_batch)


def reservoir(factory: Factory | None = None) -> Arm:
    """A control for recurrent nets: random, well scaled leaky cells, and a solved head.

    A perceptron between the recurrent layers and the classifier is left out. Without a factory the
    arm can be described but not trained.
    """
    if factory is None:
        return Arm("reservoir", RESERVOIR)
    make = reservoir_like(factory)
    optimizer = [*[adam] * (len(split(make(), blocks=LAYERS)) - 1), ridge()]
    return Arm("reservoir", RESERVOIR, optimizer=optimizer, factory=make)


OWN = (*rules.ALL, *rules.METHODS)
ALL: dict[str, Entry] = {
    "backprop": Entry(backprop, "", "#000000", "o"),
    "backprop-checkpointed": Entry(backprop_checkpointed, "Chen et al. 2016", "#2B2B66", "d", "--"),
    "backprop-micro": Entry(backprop_micro, "", "#662B2B", "H", ":"),
    **rules.ALL,
    **closed_forms.ALL,
    **plugins.load_all(plugins.ARMS, OWN),
    "reservoir": Entry(reservoir, "Jaeger 2001", "#5C5C5C", "h", "--", feed_forward=False),
}


def entry(word: str) -> Entry:
    """The entry of a word, or of a rule in FILE.py:FUNCTION; the closest one is named in errors."""
    if is_function(word):
        return Entry(partial(rule_of_file, word), "", "", "")
    return rules.entry(word, ALL)


def arm(what: str | Rule | Arm, order: Order | None = None, factory: Factory | None = None) -> Arm:
    """The arm of a word or a rule; an arm is returned as it is.

    Rules that need the network's output learn simultaneously, whatever the order. The factory is
    that of the models to compare, which the reservoir depends on.

    Examples:
        >>> arm(rules.dfa()).order.__name__, arm("elm").about
        ('simultaneous', 'control: random hidden layers, head by ridge')
    """
    if isinstance(what, str):
        make = entry(what).make
        what = make(factory) if what == "reservoir" else make()
    if isinstance(what, Arm):
        return what
    rule = rules.resolve(what)
    if not isinstance(rule, Rule):
        raise TpsgdError(f"an arm is a word, a rule or an Arm, not {type(rule).__name__}")
    if not rule.head and rule.objective is None:  # nothing learns
        return Arm(rule.name, rule, simultaneous, epochs=0)
    return Arm(rule.name, rule, simultaneous if rule.needs_net else order)


def all_words(factory: Factory) -> tuple[list[str], list[str]]:
    """The words of `--rules all` for these models, and the peers that are left out."""
    model = factory()
    if is_recurrent(model):
        return [word for word, entry in ALL.items() if entry.recurrent], []
    words = [word for word, entry in ALL.items() if entry.feed_forward]
    methods = {word: entry.suits for word, entry in ALL.items() if entry.suits}
    words = [word for word in words if word not in methods or methods[word](model)]
    return words, [word for word in methods if word not in words]


def suited(
    arms: Sequence[Arm], factory: Factory, data: Data, settings: Settings
) -> tuple[list[Arm], list[str]]:
    """The arms that this net and these data allow, and a remark on each of the others."""
    allowed, remarks = [], []
    target = target_of(data.train[1], settings.loss)
    for a in arms:
        try:
            refuse_comparing([a.rule, a.rule] if a.rule else [], target)
            if a.of_classes:
                refuse_all_but_classes(a.name, target)
            allowed.append(_fitted(a, factory, data, settings) if a.backprop else a)
        except TpsgdError as error:
            remarks.append(f"{a.name} is left out: {error}")
    return allowed, remarks


def _fitted(a: Arm, factory: Factory, data: Data, settings: Settings) -> Arm:
    """An arm of backprop with the number of segments that saves most; refused if it saves none."""
    (x, y), micro_batch = data.train, settings.memory.micro_batch
    if a.micro_batch and isinstance(x, Padded):
        raise TpsgdError("sequences of different lengths cannot be cut into micro-batches")
    if a.checkpointed is not True:
        return a
    model = make_model(a.factory or factory, 0)
    in_segments(model, True)
    plain = Settings(batch_size=micro_batch or settings.batch_size, device=settings.device)
    with suppress(TpsgdError, RuntimeError):  # a net that cannot be rehearsed: one per block
        inputs = Inputs.of(x, len(y), Target.of(y, settings.loss))
        return replace(a, checkpointed=best_segments(model, inputs, plain))
    return a


def with_controls(arms: Sequence[Arm]) -> list[Arm]:
    """Backprop, the arms, the frozen control, then other controls.

    Backprop and the frozen control are added if no arm that is one has its name.
    """
    methods = [a for a in arms if not a.reference and not a.control]
    order = next((a.order for a in methods if a.rule and not a.rule.needs_output), None)
    first = [a for a in arms if a.reference] or [backprop()]
    frozen_arms = [a for a in arms if a.control and a.name == "frozen"] or [arm(frozen(), order)]
    controls = [a for a in arms if a.control and a.name != "frozen"]
    compared = [*first, *methods, *frozen_arms, *controls]
    names = [a.name for a in compared]
    if repeated := [name for name in names if names.count(name) > 1]:
        advice = "give each a different name; backprop and frozen are in every comparison"
        raise TpsgdError(f"two arms are called {repeated[0]!r}: {advice}")
    return compared


def scaled(arm: Arm, scale: float) -> Arm:
    """The arm of a readout with another scale."""
    if arm.rule is None:
        raise TpsgdError(f"{arm.name} has no scale: it is for readout and readout-learned")
    return replace(arm, rule=rules.with_scale(arm.rule, scale))


def with_ridge(arm: Arm, factory: Factory, settings: Mapping[str, Any]) -> Arm:
    """The arm with its last block solved in closed form, if it is trained block by block.

    Hidden blocks have the optimizer of the settings, and their learning rate or the arm's.
    """
    free = arm.rule is not None and arm.rule.head and arm.optimizer is None
    if not free or arm.order not in (None, sequential):
        return arm
    words = ("split_points", "no_split", "blocks")
    cut = {name: settings[name] for name in words if settings.get(name)}
    blocks, lr = split(factory(), **cut), settings.get("lr")
    optimizers = [*[settings.get("optimizer", adam)] * (len(blocks) - 1), ridge()]
    return replace(arm, optimizer=optimizers, lr=lr if arm.lr is None and lr != SEARCH else arm.lr)
