"""Percentiles, as NumPy has them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from raysd.errors import MeasurementError


def percentile(values: Iterable[float], percent: float) -> float:
    """The percentile with linear interpolation between ranks (NumPy's default). Raises MeasurementError without values."""
    ranked = sorted(values)
    if not ranked:
        raise MeasurementError(what="a percentile of no values", where="the client's results", fix="look at the errors of the requests")
    rank = (len(ranked) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)
