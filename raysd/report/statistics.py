"""What the measured numbers allow to say: paired ratios with their intervals, and rates with theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raysd.errors import MeasurementError

BASELINE = "none"
CONFIDENCE_FRAC = 0.95
MIN_PAIRS = 3
"""Fewer pairs give no interval: with two, the t quantile is 12.7 and the interval says nothing."""

Verdict = Literal["faster", "slower", "tie"]
Cell = Mapping[str, Any]
"""One row of the sweep's `cells`."""


@dataclass(frozen=True)
class PairedRatio:
    """How a value compares with its baseline over pairs measured in the same block."""

    ratio: float
    """Geometric mean of value / baseline."""
    interval: tuple[float, float] | None
    """95 % t interval of `ratio`, computed on logarithms; None below MIN_PAIRS pairs."""
    pairs: int

    @property
    def verdict(self) -> Verdict | None:
        """`tie` when the interval holds 1; None without an interval."""
        if self.interval is None:
            return None
        low, high = self.interval
        return "tie" if low <= 1 <= high else "faster" if low > 1 else "slower"


@dataclass(frozen=True)
class Speedup:
    """One drafting arm against the baseline, at one workload, concurrency and k."""

    workload: str
    arm: str
    k: int
    concurrency: int
    baseline_output_tok_s: float | None
    """Geometric mean over the pairs, so that the two columns divide to the ratio; None without a pair."""
    output_tok_s: float | None
    """Likewise, of the arm."""
    compared: PairedRatio | None
    """None if no block has both cells valid."""

    @property
    def verdict(self) -> Verdict | None:
        return self.compared.verdict if self.compared else None


def paired_ratio(values: Sequence[float], baselines: Sequence[float]) -> PairedRatio:
    """The ratio of paired values, with the 95 % t interval of the mean log-ratio.

    values, baselines: same length, at least one pair, element i of both from the same block. Raises MeasurementError for a value
    that is not above zero, since it has no logarithm.
    """
    if len(values) != len(baselines) or not values:
        raise ValueError(f"{len(values)} values and {len(baselines)} baselines are not pairs")
    if any(not (math.isfinite(value) and value > 0) for value in (*values, *baselines)):
        raise MeasurementError(
            what=f"values {list(values)} and baselines {list(baselines)} must all be above zero",
            where="valid cells of the sweep",
            fix="delete the sweep's artifact to run it again",
        )
    log_ratios = [math.log(value / baseline) for value, baseline in zip(values, baselines, strict=True)]
    n = len(log_ratios)
    mean = sum(log_ratios) / n
    if n < MIN_PAIRS:
        return PairedRatio(math.exp(mean), None, n)

    from scipy import stats  # late: a second of import that `raysd plan` does not need

    deviation = math.sqrt(sum((value - mean) ** 2 for value in log_ratios) / (n - 1))
    half_width = float(stats.t.ppf((1 + CONFIDENCE_FRAC) / 2, n - 1)) * deviation / math.sqrt(n)
    return PairedRatio(math.exp(mean), (math.exp(mean - half_width), math.exp(mean + half_width)), n)


def speedups(cells: Sequence[Cell]) -> list[Speedup]:
    """Every drafting arm's speed-up in output tokens per second, by workload (in the order met), arm, k and concurrency.

    A pair is two valid cells of the same workload, concurrency and block. Raises MeasurementError if a cell is there twice.
    """
    workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
    valid: dict[tuple, float] = {}
    seen = set()
    for cell in cells:
        key = (cell["workload"], cell["arm"], cell["k"], cell["concurrency"], cell["block"])
        if key in seen:
            raise MeasurementError(
                what=f"the cell (workload, arm, k, concurrency, block) = {key} is there twice",
                where="cells of the sweep",
                fix="delete the sweep's artifact to run it again",
            )
        seen.add(key)
        if cell["valid"]:
            valid[key] = cell["output_tok_s"]
    points = sorted({key[:4] for key in seen if key[1] != BASELINE}, key=lambda point: (workloads.index(point[0]), *point[1:]))
    return [_speedup(point, sorted({key[4] for key in seen}), valid) for point in points]


def _speedup(point: tuple, blocks: Sequence[int], valid: Mapping[tuple, float]) -> Speedup:
    workload, arm, k, concurrency = point
    pairs = [
        (valid[(*point, block)], valid[(workload, BASELINE, None, concurrency, block)])
        for block in blocks
        if (*point, block) in valid and (workload, BASELINE, None, concurrency, block) in valid
    ]
    if not pairs:
        return Speedup(workload, arm, k, concurrency, None, None, None)
    values, baselines = zip(*pairs, strict=True)
    compared = paired_ratio(values, baselines)
    return Speedup(workload, arm, k, concurrency, _geometric_mean(baselines), _geometric_mean(values), compared)


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


@dataclass(frozen=True)
class PositionRate:
    """Acceptance at one position of the draft, counted from 1."""

    position: int
    accepted: int
    drafts: int
    reached: int
    """Drafts whose earlier positions were all accepted."""

    @property
    def unconditional_frac(self) -> float:
        """Of all drafts, the share accepted up to and including this position."""
        return self.accepted / self.drafts

    @property
    def conditional_frac(self) -> float | None:
        """Of the drafts that were accepted up to the position before, the share accepted here too; None if none got that far."""
        return self.accepted / self.reached if self.reached else None


def position_rates(drafts: int, per_position: Sequence[int]) -> list[PositionRate]:
    """The rates behind the counts of one arm. Raises MeasurementError if no draft was counted."""
    if drafts <= 0:
        raise MeasurementError(
            what="no draft was counted, so there is no acceptance to report",
            where="acceptance counts of the sweep",
            fix="check in the engine's log that the draft was loaded",
        )
    reached = [drafts, *per_position]
    return [PositionRate(index + 1, accepted, drafts, reached[index]) for index, accepted in enumerate(per_position)]


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, 1927).

    It takes the trials as independent; drafts of one answer are not quite, so it is a little narrow.
    """
    z = 1.959964  # normal quantile of 0.975
    share = successes / trials
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half_width = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    # At 0 and 1 rounding would put the share a hair outside its own interval.
    return max(0.0, min(share, centre - half_width)), min(1.0, max(share, centre + half_width))
