"""A scaling policy of Ray Serve that takes acceptance into account: a replica whose drafts are accepted less is slower, and so is worth fewer requests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

METRIC = "acceptance_length"
"""Under which replicas publish it (raysd/deployment/vitals.py)."""
SMALLEST_FRAC = 0.5
"""However badly drafts are accepted, a replica counts as at least this part of a good one: replicas do not make drafts better, and the bounds are for the load."""


class Context(Protocol):
    """What this policy reads of Serve's AutoscalingContext."""

    total_num_requests: float
    current_num_replicas: int
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    config: Any


def worth_of(lengths: Collection[float], expected: float) -> float:
    """What an average replica is worth of one whose drafts are accepted as in the sweep, from SMALLEST_FRAC to 1; without a measurement, 1.

    A verify step takes the same time however much of the draft is accepted, so that a replica's speed goes with the tokens that a step emits.
    """
    if not lengths:
        return 1.0
    return max(SMALLEST_FRAC, min(1.0, sum(lengths) / len(lengths) / expected))


def replicas_for(requests: float, target: float, worth: float, fewest: int, most: int) -> int:
    """How many replicas it takes for each to have `target` requests, or the part of it that it is worth."""
    wanted = math.ceil(round(requests / (target * worth), 9))  # what is 3 but for rounding takes no fourth
    return max(fewest, min(most, wanted))


class ByAcceptance:
    """Serve's policy class: `policy_kwargs` are its arguments. Delays and bounds are Serve's own, around what it answers."""

    def __init__(self, acceptance_length: float) -> None:
        """acceptance_length: of the sweep, at which a replica was measured to carry target_ongoing_requests."""
        self._expected = acceptance_length

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        lengths = (context.aggregated_metrics or {}).get(METRIC) or {}
        worth = worth_of([length for length in lengths.values() if length >= 1], self._expected)
        wanted = replicas_for(context.total_num_requests, context.config.get_target_ongoing_requests(), worth, context.capacity_adjusted_min_replicas,
                              context.capacity_adjusted_max_replicas)
        return wanted, {}
