"""Differences of arms against scipy's own tests."""

import numpy as np
import pytest
from scipy import stats

from tpsgd.comparison.statistics import PAIRED, WELCH, difference, differences, holm

G = np.random.default_rng(0)
A, B = (list(G.normal(m, 0.01, 6)) for m in (0.9, 0.88))


def seeded(values, first=0):
    return list(enumerate(values, first))


def test_restarts_with_the_same_seeds_are_paired():
    d, expected = difference(seeded(A), seeded(B)), stats.ttest_rel(A, B)
    interval = expected.confidence_interval()
    assert (d.test, d.mean) == (PAIRED, pytest.approx(np.mean(A) - np.mean(B)))
    assert (d.p, d.low, d.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    shuffled = difference(seeded(A)[::-1], seeded(B))
    assert (shuffled.mean, shuffled.p) == pytest.approx((d.mean, d.p))


def test_other_seeds_are_compared_by_welch():
    d = difference(seeded(A), seeded(B[:4], 100))
    expected = stats.ttest_ind(A, B[:4], equal_var=False)
    interval = expected.confidence_interval()
    assert d.test == WELCH
    assert (d.p, d.low, d.high) == pytest.approx((expected.pvalue, interval.low, interval.high))


@pytest.mark.parametrize(("a", "b"), [([0.9], B), (A, [0.8]), ([0.5, 0.5], [0.4, 0.4])])
def test_without_a_spread_there_is_no_test(a, b):
    d = difference(seeded(a), seeded(b))
    assert (d.p, d.low, d.test) == (None, None, "")
    assert d.mean == pytest.approx(np.mean(a) - np.mean(b))


def test_holm_is_the_published_procedure():
    # Holm, "A simple sequentially rejective multiple test procedure", 1979: p times 3, 2, 1
    assert holm([0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    assert holm([0.5, 0.6]) == [1.0, 1.0] and holm([]) == []


def test_all_arms_are_corrected_together():
    scores = {"backprop": seeded(A), "one": seeded(B), "two": seeded(list(G.normal(0.9, 0.01, 6)))}
    each = differences(scores, "backprop")
    assert set(each) == {"one", "two"}
    assert [d.p_holm for d in each.values()] == pytest.approx(holm([d.p for d in each.values()]))
