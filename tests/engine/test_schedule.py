"""The order that `fit` takes if none is asked for: by the kind of net and by the rule."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import tpsgd
from tpsgd import ridge, rls, rules, sequential, simultaneous
from tpsgd.engine.learners.backprop import Backprop
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.settings import Settings
from tpsgd.engine.spec import completed
from tpsgd.nets.cuts.split import split

X, Y = torch.randn(40, 6), torch.arange(40) % 3


def net(blocks: int, norm: bool = True) -> nn.Sequential:
    between = [nn.BatchNorm1d(6)] if norm else []
    hidden = [
        m for _ in range(blocks - 1) for m in (nn.Linear(6, 6), *deepcopy(between), nn.Tanh())
    ]
    return nn.Sequential(*hidden, nn.Linear(6, 3))


def default(blocks: int, rule=None, norm: bool = True, **settings):
    return order_of(net(blocks, norm), rule or rules.readout(), **settings)


def order_of(model: nn.Module, rule, **settings):
    return completed(rule, split(model), Settings(**settings)).order


@pytest.mark.parametrize(("blocks", "expected"), [(1, sequential), (4, sequential)])
def test_shallow_nets_learn_block_by_block(blocks, expected):
    assert default(blocks) is expected


@pytest.mark.parametrize("rule", [rules.readout(), rules.tpsgd_l2(), rules.predsim()])
def test_deep_nets_with_batch_norm_learn_all_blocks_from_every_batch(rule):
    assert default(5, rule) is simultaneous
    assert default(5, rule, norm=False) is sequential


@pytest.mark.parametrize("rule", [rules.dfa(), rules.sdfa(), [rules.dfa(), rules.readout()]])
def test_rules_that_need_the_output_have_it(rule):
    assert default(2, rule) is simultaneous


def test_the_last_block_only_lends_its_loss():
    assert default(2, [rules.readout(), rules.dfa()]) is sequential


@pytest.mark.parametrize("optimizer", [ridge(), rls(), [*[adam] * 7, ridge()]])
def test_solved_blocks_come_one_after_another(optimizer):
    assert default(8, rules.tpsgd_l2(at=tpsgd.Place.BEFORE), optimizer=optimizer) is sequential


@pytest.mark.parametrize("memory", ["1MB", tpsgd.Memory(reuse=False), tpsgd.Memory(reuse=True)])
def test_settings_that_save_memory_take_what_needs_least(memory):
    assert default(8, memory=memory) is sequential
    assert default(8, rules.dfa(), memory=memory) is simultaneous


def test_micro_batches_go_with_both_schedules():
    assert default(8, memory=tpsgd.Memory(micro_batch=4)) is simultaneous


@pytest.mark.parametrize(
    ("rule", "epochs"),
    [
        (rules.frozen(), 2),
        ([*[rules.frozen()] * 4, *[rules.readout()] * 4], 2),
        (rules.readout(), [0] * 4 + [2] * 4),
    ],
)
def test_blocks_that_do_not_learn_are_not_counted(rule, epochs):
    assert default(8, rule, epochs=epochs) is sequential


def test_blocks_whose_parameters_may_not_learn_are_not_counted():
    model = net(8)
    model[:12].requires_grad_(False)
    assert order_of(model, rules.readout()) is sequential


@pytest.mark.parametrize("asked", [sequential, simultaneous])
@pytest.mark.parametrize("blocks", [2, 8])
def test_what_is_asked_for_is_taken(asked, blocks):
    assert default(blocks, order=asked) is asked


def test_dfa_is_refused_block_by_block_if_that_is_asked_for():
    with pytest.raises(tpsgd.TpsgdError, match=r"use order=tpsgd\.simultaneous"):
        tpsgd.fit(net(2), (X, Y), rule=rules.dfa(), order=sequential)


def test_backprop_has_one_block():
    assert completed(Backprop(), [], Settings()).order is sequential


@pytest.mark.parametrize(
    ("blocks", "rule", "name"),
    [
        (2, rules.readout(), "sequential"),
        (8, rules.readout(), "simultaneous"),
        (2, rules.dfa(), "simultaneous"),
    ],
)
def test_records_plans_and_arms_have_the_same_schedule(blocks, rule, name):
    run = tpsgd.fit(net(blocks), (X, Y), rule=rule, epochs=1)
    assert run.settings["order"] == name
    plan = tpsgd.plan(net(blocks), (6,), rule=rule, others=False)
    assert plan.lines[0].name == name
    many = tpsgd.fit_many(lambda: net(blocks), (X, Y), rule=rule, restarts=2, epochs=1)
    assert {r.settings["order"] for r in many.runs} == {name}
    data = tpsgd.data.Data("few", (X, Y), (X, Y), ("a", "b", "c"), (6,), "")
    record = tpsgd.compare(data, lambda: net(blocks), [rule], restarts=1, epochs=1)
    assert record.settings["order"] == "by the net and the rule"
    assert record.results[1].runs[0].settings["order"] == name
    assert record.results[-1].runs[0].settings["order"] == "sequential"  # of the control


@pytest.mark.full
def test_a_plan_within_a_budget_keeps_its_schedule():
    planned = tpsgd.plan(net(8), (6,), samples=40, memory="1MB", others=False)
    run = tpsgd.fit(net(8), (X, Y), epochs=2, **planned.settings)
    assert run.settings["order"] == planned.lines[0].name == "sequential"
    within = tpsgd.fit(net(8), (X, Y), epochs=2, memory="1MB")
    assert within.settings["order"] == "sequential"
