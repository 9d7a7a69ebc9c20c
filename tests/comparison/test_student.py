"""Student's t distribution against the printed tables, closed forms and scipy."""

from math import atan, pi, sqrt

import pytest

from tpsgd.comparison.student import incomplete_beta, quantile, two_sided

TABLE = {  # Student's t, two-sided: degrees of freedom -> quantiles of 90, 95 and 99 per cent
    1: (6.314, 12.706, 63.657),
    2: (2.920, 4.303, 9.925),
    4: (2.132, 2.776, 4.604),
    10: (1.812, 2.228, 3.169),
    24: (1.711, 2.064, 2.797),
    120: (1.658, 1.980, 2.617),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_printed_table(freedom):
    for level, printed in zip((0.9, 0.95, 0.99), TABLE[freedom], strict=True):
        assert quantile(level, freedom) == pytest.approx(printed, abs=5.1e-4)


@pytest.mark.parametrize("t", [1e-9, 0.3, 1.0, 7.0, 1e4, 1e9])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t):
    cauchy = 2 / pi * atan(1 / t)  # 1 - 2/pi atan(t), without cancellation
    assert two_sided(t, 1) == pytest.approx(cauchy, rel=1e-13)
    ratio = t / sqrt(2 + t * t)
    assert two_sided(t, 2) == pytest.approx(2 / (2 + t * t) / (1 + ratio), rel=1e-13)
    assert two_sided(-t, 2) == two_sided(t, 2)


def test_it_is_scipys():
    special = pytest.importorskip("scipy.special")
    for freedom in (1, 1.7, 2, 3.3, 4, 9, 24, 48.5, 300, 1e4):
        for t in (0.01, 0.5, 1.3, 2.2, 4.0, 12.0, 60.0):
            expected = 2 * special.stdtr(freedom, -t)
            assert two_sided(t, freedom) == pytest.approx(expected, rel=1e-10), (t, freedom)
        for level in (0.5, 0.95, 0.999):
            expected = special.stdtrit(freedom, (1 + level) / 2)
            assert quantile(level, freedom) == pytest.approx(expected, rel=1e-10)
    for a, b, x in ((0.5, 0.5, 0.2), (3, 7, 0.9), (40, 0.5, 0.99), (2, 300, 1e-4)):
        assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), rel=1e-12)


def test_the_ends():
    assert two_sided(0, 5) == 1.0 and two_sided(1e300, 5) == 0.0
    assert incomplete_beta(2, 3, 0) == 0.0 and incomplete_beta(2, 3, 1) == 1.0
