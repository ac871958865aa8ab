"""Acceptance by position in the draft, from counts: of all drafts, and of those that got there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysd.errors import MeasurementError
from raysd.sweep.statistics import ALPHA, MIN_PAIRS, Interval, t_quantile


@dataclass(frozen=True)
class PositionRate:
    """Acceptance at one position of the draft, counted from 1."""

    position: int
    accepted: int
    drafts: int
    reached: int
    """Drafts whose earlier positions were all accepted."""

    @property
    def cumulative_frac(self) -> float:
        """Of all drafts, the share accepted up to and including this position."""
        return self.accepted / self.drafts

    @property
    def conditional_frac(self) -> float | None:
        """Of the drafts that were accepted up to the position before, the share accepted here too; None if none got that far."""
        return self.accepted / self.reached if self.reached else None


@dataclass(frozen=True)
class AcceptanceLength:
    """Tokens emitted per verify step, the bonus token included: 1 + accepted / drafts."""

    length: float
    drafts: int
    accepted: int
    interval: Interval | None
    """95 %, over what was counted apart (blocks, or requests); None below 3 of them."""


def position_rates(drafts: int, per_position: Sequence[int]) -> list[PositionRate]:
    """The rates behind counts. Raises MeasurementError if no draft was counted."""
    if drafts <= 0:
        raise MeasurementError(
            what="no draft was counted, so there is no acceptance to report",
            where="acceptance counts of the sweep",
            fix="check in the engine's log that the draft was loaded",
        )
    reached = [drafts, *per_position]
    return [PositionRate(index + 1, accepted, drafts, reached[index]) for index, accepted in enumerate(per_position)]


def pooled_length(rows: Sequence[Mapping[str, Any]]) -> AcceptanceLength | None:
    """The acceptance length over rows with `drafts` and `accepted` that were counted apart; None if no draft was counted.

    The interval is that of a ratio of two sums (linearised, t over rows): drafts of one row hang together, so single drafts are not what is counted.
    """
    counted = [(row["drafts"], row["accepted"]) for row in rows if row["drafts"]]
    if not counted:
        return None
    n, drafts, accepted = len(counted), sum(d for d, _ in counted), sum(a for _, a in counted)
    share = accepted / drafts
    interval = None
    if n >= MIN_PAIRS:
        residual = sum((a - share * d) ** 2 for d, a in counted)
        half_width = t_quantile(n - 1, ALPHA) * math.sqrt(residual * n / (n - 1)) / drafts
        interval = max(1.0, 1 + share - half_width), 1 + share + half_width
    return AcceptanceLength(1 + share, drafts, accepted, interval)


def wilson_interval(successes: int, trials: int) -> Interval:
    """95 % interval of a share (Wilson, 1927).

    It takes the trials as independent; drafts of one answer are not quite, so it is a little narrow.
    """
    z = 1.959964  # normal quantile of 0.975
    share = successes / trials
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half_width = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    # At 0 and 1 rounding would put the share a hair outside its own interval.
    return max(0.0, min(share, centre - half_width)), min(1.0, max(share, centre + half_width))
