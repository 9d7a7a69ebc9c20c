"""Which blocks each rank of a pipeline trains, and what `plan(ranks=...)` says of them."""

from itertools import combinations, pairwise

import pytest
import torch
from helpers import mlp
from torch import nn

import tpsgd
from tpsgd import Memory, TpsgdError, rules
from tpsgd.engine.learners.optimizers import adam
from tpsgd.engine.settings import Settings
from tpsgd.memory.rehearse import Inputs
from tpsgd.nets.cuts.balance import TIE
from tpsgd_parallel.stages import (
    AHEAD,
    IN_FLIGHT,
    BlockCost,
    balanced_stages,
    block_costs,
    checked_stages,
    plan_of,
    rank_bytes,
)


def costs(*products, lasting=0, passing=0, outputs=0):
    """Blocks with these multiplications."""
    return [BlockCost(n, lasting, passing, outputs) for n in products]


@pytest.mark.parametrize(
    ("products", "ranks", "stages"),
    [
        ((1, 1, 1, 1), 2, [2, 2]),
        ((9, 3, 3, 3), 2, [1, 3]),
        ((3, 3, 3, 9), 2, [3, 1]),
        ((1, 1, 1, 1, 1, 1), 4, [1, 1, 2, 2]),
        ((5, 1, 1, 5, 1, 1), 2, [3, 3]),
        ((50, 10, 10, 10, 10, 2), 4, [1, 1, 2, 2]),
        ((7, 7, 7), 1, [3]),
        ((7, 7, 7), 3, [1, 1, 1]),
    ],
)
def test_the_busiest_rank_has_the_fewest_multiplications(products, ranks, stages):
    assert balanced_stages(costs(*products), ranks) == stages


def test_bytes_decide_between_stages_that_are_about_equally_busy():
    large = BlockCost(10, lasting=900, passing=0, outputs=0)
    small = BlockCost(10, lasting=10, passing=0, outputs=0)
    assert balanced_stages([large, large, small, small, small], 2) == [2, 3]
    assert balanced_stages([large, small, small, small, large], 2) in ([2, 3], [3, 2])
    nearly = BlockCost(11, lasting=900, passing=0, outputs=0)
    middle = BlockCost(10, lasting=500, passing=0, outputs=0)
    assert balanced_stages([middle, middle, nearly], 2) == [2, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_no_other_stages_are_better(seed, ranks):
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1, 100, (7, 4), generator=g).tolist()
    blocks = [BlockCost(*row) for row in numbers]

    def busiest(cuts):
        return max(sum(b.multiplications for b in blocks[i:j]) for i, j in pairwise(cuts))

    def largest(cuts):
        return max(rank_bytes(blocks, i, j) for i, j in pairwise(cuts))

    every = [(0, *inner, 7) for inner in combinations(range(1, 7), ranks - 1)]
    fewest = min(map(busiest, every))
    lowest = min(largest(cuts) for cuts in every if busiest(cuts) <= TIE * fewest)
    stages = balanced_stages(blocks, ranks)
    cuts = [sum(stages[:i]) for i in range(ranks + 1)]
    assert busiest(cuts) <= TIE * fewest and largest(cuts) <= TIE * lowest


def test_the_bytes_of_a_rank_are_those_counted_by_hand():
    blocks = [BlockCost(1, 100, 10, 4), BlockCost(1, 200, 70, 5), BlockCost(1, 300, 30, 6)]
    assert rank_bytes(blocks, 0, 3) == 600 + 70
    assert rank_bytes(blocks, 0, 1) == 100 + 10 + IN_FLIGHT * 4
    assert rank_bytes(blocks, 1, 2) == 200 + 70 + AHEAD * 4 + IN_FLIGHT * 5
    assert rank_bytes(blocks, 1, 3) == 500 + 70 + AHEAD * 4


def test_ranks_are_busy_while_the_busiest_one_works_and_the_pipeline_is_full():
    blocks = costs(6, 4, 2)
    assert plan_of(blocks, [1, 1, 1], 0).utilisation == pytest.approx(4 / 6)
    assert plan_of(blocks, [1, 2], 0).utilisation == 1
    assert plan_of(blocks, [1, 2], 0, batches=9).utilisation == pytest.approx(9 / 10)
    assert [rank.multiplications for rank in plan_of(blocks, [2, 1], 7).ranks] == [10, 2]
    assert [rank.peak_bytes for rank in plan_of(blocks, [2, 1], 7).ranks] == [7, 7]


@pytest.mark.parametrize("stages", [[2, 2], [3, 0], [1, 1, 1], [2.0, 1], "21", [True, 2], 3, []])
def test_stages_by_hand_must_add_up(stages):
    with pytest.raises(
        TpsgdError, match="2 numbers, one for each rank, that add up to the model's"
    ):
        checked_stages(stages, 3, 2)


def test_stages_by_hand_are_taken():
    assert checked_stages((1, 2), 3, 2) == [1, 2]


def measured(model, shape, **settings):
    rule = settings.pop("rule", rules.tpsgd_l2())
    chosen = Settings(optimizer=adam, batch_size=10, **settings)
    return block_costs(model, Inputs(shape, samples=40), rule, chosen)


def test_multiplications_are_those_of_the_forward_pass_and_of_the_gradient():
    blocks, weights = measured(mlp(6, 8, 5, 3), (6,))
    assert [b.multiplications for b in blocks] == [10 * 2 * n for n in (6 * 8, 8 * 5, 5 * 3)]
    assert [b.outputs for b in blocks] == [10 * 4 * n for n in (8, 5, 3)]
    assert weights == 4 * (6 * 8 + 8 + 8 * 5 + 5 + 5 * 3 + 3)
    adams_state = 2 * 4 * (6 * 8 + 8) + 2 * 4  # two averages, and a step for both parameters
    assert blocks[0].lasting == adams_state + 4 * 3 * 8  # and the class codes


def test_convolutions_and_blocks_of_two_layers_are_counted():
    cnn = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(75, 3)),
    )
    first, second = 25 * 2 * 4 * 9, 25 * 4 * 3 * 9
    blocks, _ = measured(cnn, (2, 5, 5))
    assert [b.multiplications for b in blocks] == [10 * 2 * n for n in (first, second, 75 * 3)]
    blocks, _ = measured(cnn, (2, 5, 5), blocks=[2, 1])
    assert blocks[0].multiplications == 10 * (2 * first + 3 * second)  # one more inside the block


def test_a_frozen_block_only_computes():
    blocks, _ = measured(mlp(6, 8, 5, 3), (6,), rule=rules.frozen())
    assert [b.multiplications for b in blocks] == [10 * n for n in (6 * 8, 8 * 5, 2 * 5 * 3)]


def test_gradients_of_micro_batches_last():
    whole, _ = measured(mlp(6, 8, 5, 3), (6,))
    cut, _ = measured(mlp(6, 8, 5, 3), (6,), memory=Memory(micro_batch=5))
    assert cut[0].lasting == whole[0].lasting + 4 * (6 * 8 + 8)
    assert cut[0].multiplications == whole[0].multiplications
    assert cut[0].outputs == whole[0].outputs // 2


def test_a_plan_has_the_ranks_that_were_asked_for():
    model = mlp(6, 32, 8, 8, 3)
    plan = tpsgd.plan(model, (6,), ranks=2, batch_size=10, samples=100, epochs=2, others=False)
    assert plan.pipeline is not None and sum(plan.pipeline.stages) == 4
    assert plan.as_dict()["pipeline"]["ranks"][1]["blocks"] == plan.pipeline.stages[1]
    lines = str(plan).splitlines()
    (row,) = (line for line in lines if line.startswith("expected to be busy"))
    assert row.endswith(f"{plan.pipeline.utilisation:.0%}")
    assert max(map(len, lines)) <= 80
    without = tpsgd.plan(model, (6,), others=False)
    assert without.pipeline is None and "pipeline" not in without.as_dict()


def test_without_the_plug_in_ranks_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("tpsgd.common.plugins.entry_points", lambda **_: [])
    with pytest.raises(TpsgdError, match=r"pip install -c constraints\.txt -e plugins/parallel"):
        tpsgd.plan(mlp(6, 8, 3), (6,), ranks=2, others=False)
    assert not hasattr(tpsgd, "pipeline")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ranks": 5}, "a pipeline of 5 ranks needs a block for each of them"),
        ({"ranks": 0}, "ranks must be a whole number, 1 or more, got 0"),
        ({"ranks": 2, "rule": rules.dfa()}, "dfa cannot learn in a pipeline"),
        (
            {"ranks": 2, "optimizer": [adam, adam, tpsgd.ridge()]},
            r"ridge\(\) cannot solve a block in",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused(settings, reason):
    with pytest.raises(TpsgdError, match=reason):
        tpsgd.plan(mlp(6, 8, 8, 3), (6,), others=False, **settings)
