"""What a comparison can find: the smallest effect that it detects, and how many blocks an effect needs."""

from __future__ import annotations

import math
from functools import lru_cache

POWER = 0.8
"""Share of cases in which an effect that is there is found."""
MOST_BLOCKS = 1000
"""Where the search for a number of blocks gives up."""
LARGEST_LOG = 700.0
"""About the logarithm of the largest number that a float holds: a ratio or the end of an interval that would lie beyond is said to lie there."""


def detectable_ratio(log_se: float, freedom: float, level: float) -> float:
    """The smallest true ratio above 1 that a two-sided t test at `level` finds in a share POWER of cases. log_se: standard error of the log-ratio."""
    return exp(_detectable_shift(freedom, level) * log_se)


def exp(log_ratio: float) -> float:
    """A ratio from its logarithm, above zero and finite whatever was measured."""
    return math.exp(max(-LARGEST_LOG, min(log_ratio, LARGEST_LOG)))


def blocks_to_find(log_ratio: float, log_sd: float, level: float) -> int | None:
    """The fewest blocks with which a true log-ratio is found in a share POWER of cases. log_sd: spread of one block's log-ratio.

    The spread is an estimate, of few blocks a rough one, and so is the answer. None: more than MOST_BLOCKS, or there is no effect to find.
    """
    if log_ratio == 0:
        return None

    def finds(blocks: int) -> bool:
        return _detectable_shift(blocks - 1, level) * log_sd <= abs(log_ratio) * math.sqrt(blocks)

    if not finds(MOST_BLOCKS):
        return None
    low, high = 2, MOST_BLOCKS  # 2 blocks give no interval; the condition holds from some number of blocks on
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if finds(middle) else (middle, high)
    return high


@lru_cache(maxsize=4096)
def _detectable_shift(freedom: float, level: float) -> float:
    """The shift, in standard errors, that a t test at `level` finds in a share POWER of cases: the noncentral t distribution solved for its centre."""
    from scipy import optimize, special, stats

    critical = float(stats.t.isf(level / 2, freedom))
    # The other side, which rejects for the wrong sign, is left out: at a power of 0.8 it is far below rounding.
    return float(optimize.brentq(lambda shift: (1 - special.nctdtr(freedom, shift, critical)) - POWER, 0, 4 * critical + 10))
