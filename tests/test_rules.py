"""Table 1 as values: which signal reaches which loss, and where; class codes of every block."""

from functools import partial

import pytest
import torch
from helpers import mlp, points
from torch import nn
from torch.nn.functional import smooth_l1_loss

import tpsgd
from tpsgd import Place, losses, projections, rules
from tpsgd.engine.assemble import make_learners
from tpsgd.engine.settings import Settings
from tpsgd.engine.spec import request, specify
from tpsgd.maths.random import Key
from tpsgd.objectives import Signal, Site

CE, MSE = losses.cross_entropy, losses.mse
LABEL = Signal.LABEL
TABLE = {  # signal, the last block's loss, codes for each time step, hidden blocks learn, the last
    "tpsgd-l2": (LABEL, MSE, True, True, True),
    "tpsgd-l1": (LABEL, MSE, True, True, True),
    "drtp": (LABEL, CE, True, True, True),
    "dfa": (Signal.ERROR, CE, True, True, True),
    "sdfa": (Signal.ERROR_SIGN, CE, True, True, True),
    "readout": (LABEL, CE, False, True, True),
    "readout-learned": (LABEL, CE, False, True, True),
    "predsim": (LABEL, CE, False, True, True),
    "lls": (LABEL, CE, False, True, True),
    "auxiliary": (LABEL, CE, False, True, True),
    "frozen": (LABEL, CE, True, False, True),
    "random": (LABEL, CE, True, False, False),
}
PLACED = [
    *(rules.tpsgd_l2, rules.tpsgd_l1, partial(rules.tpsgd, smooth_l1_loss), rules.drtp),
    *(rules.dfa, rules.sdfa, rules.readout, rules.auxiliary, rules.lls),
]


def test_every_rule_is_in_the_table():
    assert TABLE.keys() == rules.ALL.keys()


@pytest.mark.parametrize("name", TABLE)
def test_a_rule_has_the_signal_and_the_loss_of_the_table(name):
    rule = rules.ALL[name].make()
    learns = rule.objective is not None
    assert (rule.signal, rule.loss, rule.per_step, learns, rule.head) == TABLE[name]
    assert rule.name == name and rule.at is Place.AFTER and rule.last is None
    assert rule.needs_output is (rule.signal is not LABEL)


@pytest.mark.parametrize("at", Place)
@pytest.mark.parametrize("make", PLACED)
def test_a_rule_looks_where_it_is_told(make, at):
    assert make(at=at).at is at


@pytest.mark.parametrize(
    ("rule", "recurrent", "expected"),
    [
        (rules.tpsgd_l2(), False, projections.normal()),
        (rules.tpsgd_l1(), False, projections.normal()),
        (rules.tpsgd_l1(), True, projections.binary()),
        (rules.drtp(), True, projections.orthogonal()),
        (rules.drtp(projections.uniform(2.0)), True, projections.uniform(2.0)),
        (rules.dfa(projections.binary()), False, projections.binary()),
    ],
)
def test_codes_are_drawn_from_the_rules_projection(rule, recurrent, expected):
    site = Site((8,), 4, Key(3, 1, 2), recurrent=recurrent)
    assert torch.equal(rule.objective(site).tensors[0], expected((8,), 4, Key(3, 1, 2)))


def test_every_block_has_codes_of_its_own():
    model, (x, _), rule = mlp(6, 5, 5, 5, 3), points(), rules.tpsgd_l2()
    settings = Settings(seed=7, order=tpsgd.sequential)
    spec = specify(request([model], None, rule, settings), x[:2], False, torch.device("cpu"))
    *hidden, last = make_learners(spec, rule, settings, len(x))
    for number, learner in enumerate(hidden):
        codes = projections.normal()((5,), 3, Key(7, number))
        assert torch.equal(learner.draw().tensors[0], codes)
    assert len(hidden) == 3 and last.draw().tensors == ()


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ({"rule": "readout"}, {"rule": rules.readout()}),
        (
            {"rule": ["drtp", rules.readout(), "dfa"]},
            {"rule": [rules.drtp(), rules.readout(), rules.dfa()]},
        ),
        ({"loss": "mse"}, {"loss": tpsgd.mse}),
        (
            {"loss": nn.CrossEntropyLoss(), "rule": "tpsgd-l2"},
            {"loss": CE, "rule": rules.tpsgd_l2()},
        ),
    ],
)
def test_words_and_torchs_loss_train_what_the_values_train(words, values):
    runs = []
    for settings in (words, values):
        model = mlp(6, 8, 8, 3)
        tpsgd.fit(model, points(), epochs=1, batch_size=16, progress=False, **settings)
        runs.append(list(model.parameters()))
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours, theirs)
