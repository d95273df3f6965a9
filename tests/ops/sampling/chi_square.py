"""A chi-square test with the Wilson-Hilferty approximation, so that it needs no tables."""

from __future__ import annotations

import math

from torch import Tensor


def normal_score(observed: Tensor, expected: Tensor, freedom: int | None = None) -> float:
    """The chi-square statistic as a standard normal number: beyond 5 the counts are not as expected.

    Counts of sampling without replacement vary less than independent ones; ``freedom`` stays an upper bound then.
    """
    statistic = float(((observed - expected).double() ** 2 / expected).sum())
    n = freedom or observed.numel() - 1
    return ((statistic / n) ** (1 / 3) - (1 - 2 / (9 * n))) / math.sqrt(2 / (9 * n))
