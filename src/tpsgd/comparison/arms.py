"""Arms by a word: the rules, their peers and the controls that the command line knows.

torch is imported when an arm is made, not when words are checked.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpsgd.errors import TpsgdError

if TYPE_CHECKING:
    from tpsgd.comparison.compare import Arm
    from tpsgd.zoo.words import Factory

SOURCES = {
    "backprop": "",
    "tpsgd-l2": "Lomnitz et al. 2022",
    "tpsgd-l1": "Lomnitz et al. 2022",
    "drtp": "Frenkel et al. 2021",
    "dfa": "Nøkland 2016",
    "sdfa": "Frenkel et al. 2021",
    "readout": "Mostafa et al. 2018",
    "readout-learned": "Mostafa et al. 2018",
    "predsim": "Nøkland & Eidnes 2019",
    "lm-karnet": "Zhuang et al. 2019",
    "zorb": "Ranganathan & Lewandowski 2020",
    "dladmm": "Wang et al. 2019",
    "elm": "Huang et al. 2006",
    "frozen": "",
    "random": "",
    "reservoir": "Jaeger 2001",
}
RECURRENT = ("random", "reservoir")  # in `--rules all` of recurrent models alone
BY_NAME = ("dladmm", "predsim")  # not among all: long, or for deep nets
PEERS = ("lm-karnet", "zorb", "dladmm", "elm")


def arm_of(word: str, schedule: Any = None, factory: "Factory | None" = None) -> "Arm":
    """The arm that a word names; without a factory, only to be talked about."""
    from tpsgd import rules
    from tpsgd.comparison.compare import RESERVOIR, Arm, arm, reservoir
    from tpsgd.engine.schedules import sequential
    from tpsgd.peers.arms import PEERS as peers

    if word in peers:
        return peers[word]()
    if word == "reservoir":
        return reservoir(factory) if factory else Arm(word, RESERVOIR)
    special = {
        "backprop": lambda: None,
        "readout-learned": lambda: rules.readout(learned=True),
        "random": rules.untrained,
    }
    rule = (special.get(word) or getattr(rules, word.replace("-", "_")))()
    return arm(rule, schedule or sequential)


def all_words(factory: "Factory", recurrent: bool) -> list[str]:
    """What `--rules all` means for such models: those that can train them in good time."""
    if recurrent:
        return [word for word in SOURCES if word not in (*PEERS, *BY_NAME)]
    from tpsgd.peers.arms import suits

    model = factory()
    words = [word for word in SOURCES if word not in (*RECURRENT, *BY_NAME)]
    return [word for word in words if word not in PEERS or suits(word, model)]


def headed(
    arms: "list[Arm]",
    head: str,
    factory: "Factory",
    lr: float | None,
    optimizer: Any = None,
    controls: bool = False,
) -> "list[Arm]":
    """The arms with the head that was asked for, the controls too."""
    if head == "adam":
        return arms

    from tpsgd.comparison.compare import solved, with_controls
    from tpsgd.engine.optimizers import adam

    arms = with_controls(arms) if controls else arms
    return [solved(arm, factory, lr, optimizer or adam) for arm in arms]


def single(
    word: str,
    schedule: Any,
    factory: "Factory",
    head: str,
    lr: float | None = None,
    optimizer: Any = None,
) -> "Arm":
    """The one arm to train or to plan, under the schedule that was asked for, if one was."""
    arm = arm_of(word, schedule, factory)
    if schedule and arm.rule and arm.rule.head:
        arm = replace(arm, schedule=schedule)  # as asked: DFA may refuse it
    return headed([arm], head, factory, lr, optimizer)[0]


def refuse_options(word: str, optimizer: str | None, *others: Any) -> None:
    """A peer has no schedule, rate, loss or optimizer that could be chosen."""
    if word in PEERS and any(others):
        raise TpsgdError(f"{word} has no schedule, rate or loss to choose: leave those options out")
    if word in PEERS and optimizer:
        raise TpsgdError(f"{word} has no optimizer to choose: leave --optimizer out")
