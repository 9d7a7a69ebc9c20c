"""Numbers of a user, as far as a float or 64 bits can hold them; Python's go on without an end."""

import math
import sys
from numbers import Integral, Real
from typing import Any

LARGEST = 2**63 - 1


def is_whole(value: Any, least: int = 0) -> bool:
    """Whether a value is a whole number from `least` to 2^63 - 1.

    Examples:
        >>> is_whole(3), is_whole(True), is_whole(2.0), is_whole(10**400)
        (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and least <= int(value) <= LARGEST


def is_real(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold.

    Examples:
        >>> is_real(3), is_real(1e300), is_real(float("nan")), is_real(10**400)
        (True, True, False, False)
    """
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    return bool(abs(number) <= sys.float_info.max)
