"""When an engine is warm: rounds of short requests until its answers get no faster."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

DRIFT = 0.05
"""How much faster than the best round before, in the median over concurrencies, still counts as drift."""
ROUNDS = 6
"""At most: on a machine that others use, it may seem to get faster for ever."""


def warm_up(one_round: Callable[[], Mapping[int, float]]) -> list[dict[int, float]]:
    """Asks for rounds until one is not faster than those before it; returns them all.

    one_round: answers requests at each concurrency, and gives at each the median time of an answer by its tokens, in ms: their chunks may arrive as one, but an answer's
    end says how long its steps took.
    """
    rounds = [dict(one_round())]
    while len(rounds) < ROUNDS:
        best = {concurrency: min(each[concurrency] for each in rounds) for concurrency in rounds[0]}
        rounds.append(dict(one_round()))
        if statistics.median(rounds[-1][concurrency] / best[concurrency] for concurrency in best) > 1 - DRIFT:
            break
    return rounds
