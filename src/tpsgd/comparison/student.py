"""Student's t distribution, by the continued fraction of the incomplete beta function.

Press et al., "Numerical Recipes", 6.4.
"""

from math import exp, inf, lgamma, log, log1p

SMALLEST, STEPS = 1e-300, 10_000


def two_sided(t: float, freedom: float) -> float:
    """The probability that |T| is at least |t|, with these degrees of freedom."""
    if (square := t * t) < 1:
        return 1 - incomplete_beta(0.5, freedom / 2, square / (freedom + square))
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + square))


def quantile(level: float, freedom: float) -> float:
    """The t that |T| stays below with this probability: 0.95 for an interval of 95 %.

    Examples:
        >>> f"{quantile(0.95, 4):.3f}, {quantile(0.99, 10):.3f}"
        '2.776, 3.169'
    """
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > 1 - level:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if two_sided(middle, freedom) > 1 - level else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), for x from 0 to 1."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(b, a, 1 - x)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    c, d, before = 1.0, 1 / (1 - (a + b) * x / (a + 1) or SMALLEST), inf
    fraction = d
    for m in range(1, STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d or SMALLEST), 1 + term / c or SMALLEST
            fraction *= c * d
        if fraction == before:
            break
        before = fraction
    return front * fraction
