"""What the measured numbers allow to say: paired ratios with their intervals, and a verdict that holds for all comparisons of a sweep together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from raysd.errors import MeasurementError
from raysd.sweep.power import LARGEST_LOG, detectable_ratio, exp

BASELINE = "none"
ALPHA = 0.05
"""Share of intervals that may miss: 1 minus the confidence of 95 %."""
MIN_PAIRS = 3
"""Fewer pairs give no interval: with two, the t quantile is 12.7 and the interval says nothing."""
MIN_BOOTSTRAP_PAIRS = 10
"""Fewer pairs give no bootstrap: resampling three of them covers about 76 % where it says 95 %."""
BOOTSTRAP_RESAMPLES = 4000

Verdict = Literal["faster", "slower", "tie"]
Interval = tuple[float, float]
Cell = Mapping[str, Any]
"""One row of the sweep's `cells`."""


@dataclass(frozen=True)
class RatioEstimate:
    """How values compare with others, computed on logarithms."""

    ratio: float
    """Geometric mean of value / other."""
    n: int
    """Pairs; of an unpaired comparison the values of the side that has fewer."""
    log_se: float | None = None
    """Standard error of ln(ratio); None where there are too few values for one."""
    freedom: float | None = None
    """Degrees of freedom behind log_se."""
    bootstrap: Interval | None = None
    """95 % interval of resampled pairs (BCa), to be shown beside the t interval; None below MIN_BOOTSTRAP_PAIRS pairs."""

    def interval_at(self, level: float) -> Interval | None:
        """The t interval that misses the true ratio in a share `level` of all cases; None without a standard error."""
        half_width = self._half_width(level)
        return None if half_width is None else (exp(math.log(self.ratio) - half_width), exp(math.log(self.ratio) + half_width))

    @property
    def interval(self) -> Interval | None:
        """The 95 % interval of this comparison by itself."""
        return self.interval_at(ALPHA)

    @property
    def half_width_frac(self) -> float | None:
        """Half the 95 % interval's width, as a share of the ratio: what `sweep.until_ci` is compared with."""
        half_width = self._half_width(ALPHA)
        return None if half_width is None else math.sinh(min(half_width, LARGEST_LOG))

    @property
    def log_sd(self) -> float | None:
        """Spread of one pair's log-ratio, of a paired comparison."""
        return None if self.log_se is None else self.log_se * math.sqrt(self.n)

    @property
    def p_value(self) -> float | None:
        """Two-sided, of the hypothesis that the true ratio is 1."""
        if self.log_se is None:
            return None
        shift = abs(math.log(self.ratio))
        if self.log_se == 0:
            return 1.0 if shift == 0 else 0.0
        from scipy import stats  # late: a second of import that `raysd plan` does not need

        return 2 * float(stats.t.sf(shift / self.log_se, self.freedom))

    def detectable_ratio(self, level: float = ALPHA) -> float | None:
        """The smallest true ratio above 1 that a comparison like this one finds four times in five; None without a standard error."""
        return None if self.log_se is None else detectable_ratio(self.log_se, self.freedom, level)

    def _half_width(self, level: float) -> float | None:
        return None if self.log_se is None else t_quantile(self.freedom, level) * self.log_se


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
    compared: RatioEstimate | None
    """None if no block has both cells valid."""
    level: float = ALPHA
    """Share of cases in which `interval` may miss, as Holm's procedure leaves it to this comparison."""

    @property
    def interval(self) -> Interval | None:
        """The interval that decides, adjusted for all comparisons of the sweep; None without one."""
        return self.compared.interval_at(self.level) if self.compared else None

    @property
    def verdict(self) -> Verdict | None:
        return verdict(self.interval)


def verdict(interval: Interval | None) -> Verdict | None:
    """`tie` when the interval holds 1; None without an interval."""
    if interval is None:
        return None
    low, high = interval
    return "tie" if low <= 1 <= high else "faster" if low > 1 else "slower"


@lru_cache(maxsize=4096)
def t_quantile(freedom: float, level: float) -> float:
    """Student's t that is exceeded, on either side, in a share `level` of all cases."""
    from scipy import stats

    return float(stats.t.isf(level / 2, freedom))


def paired_ratio(values: Sequence[float], others: Sequence[float], pilot: int | None = None, resample: bool = True) -> RatioEstimate:
    """The ratio of paired values, with the standard error of its mean log-ratio.

    values, others: same length, at least one pair, element i of both from the same block, in block order. pilot: of a sweep that measures until
    intervals are narrow, how many pairs decided how many there are; spread and degrees of freedom are then those of the first `pilot` pairs alone
    (sequential.py says why). resample: whether the bootstrap is wanted. Raises MeasurementError for a value that is not above zero.
    """
    if len(values) != len(others) or not values:
        raise ValueError(f"{len(values)} values and {len(others)} others are not pairs")
    log_ratios = [value - other for value, other in zip(_logarithms(values), _logarithms(others), strict=True)]
    n = len(log_ratios)
    ratio = exp(_mean(log_ratios))
    if n < MIN_PAIRS:
        return RatioEstimate(ratio, n)
    spread = log_ratios if pilot is None else log_ratios[:pilot]
    log_se = math.sqrt(_variance(spread) / n)
    bootstrap = _bootstrap(log_ratios) if resample and n >= MIN_BOOTSTRAP_PAIRS else None
    return RatioEstimate(ratio, n, log_se, len(spread) - 1, bootstrap)


def unpaired_ratio(values: Sequence[float], others: Sequence[float], pilots: tuple[int | None, int | None] = (None, None)) -> RatioEstimate:
    """The ratio of two sets of values that have nothing to do with each other: Welch's t on logarithms, which takes no equal spread for granted.

    Each at least one value, in block order. pilots: of either, as paired_ratio has it. Raises MeasurementError for a value that is not above zero.
    """
    logs, other_logs = _logarithms(values), _logarithms(others)
    ratio, n = exp(_mean(logs) - _mean(other_logs)), min(len(logs), len(other_logs))
    if n < MIN_PAIRS:
        return RatioEstimate(ratio, n)
    spreads = [each[:pilot] for each, pilot in zip((logs, other_logs), pilots, strict=True)]
    parts = [_variance(spread) / len(each) for spread, each in zip(spreads, (logs, other_logs), strict=True)]
    total = sum(parts)
    # Welch and Satterthwaite; of two sets without any spread the freedom does not matter.
    freedom = total**2 / sum(part**2 / (len(spread) - 1) for part, spread in zip(parts, spreads, strict=True)) if total else n - 1
    return RatioEstimate(ratio, n, math.sqrt(total), freedom)


def holm_levels(p_values: Sequence[float | None], alpha: float = ALPHA) -> list[float]:
    """For each of several comparisons, the level at which Holm's procedure decides it (Scandinavian Journal of Statistics 6, 1979).

    The smallest of m p-values is held against alpha / m, the next against alpha / (m - 1), and so on up to the first that is larger: that one and all
    after it are ties, at that one's level. So an interval at the level that is given here holds 1 exactly where Holm's verdict is a tie, and the
    chance to name any winner where there is none is at most alpha, however the comparisons hang together (those of one sweep share baselines). Each
    interval covers its own ratio with at least 1 - alpha. None: a comparison without a test takes no part, and gets alpha.
    """
    tested = sorted((p_value, index) for index, p_value in enumerate(p_values) if p_value is not None)
    levels = [alpha] * len(p_values)
    open_still = True
    level = alpha
    for rank, (p_value, index) in enumerate(tested):
        if open_still:
            level = alpha / (len(tested) - rank)
            open_still = p_value <= level
        levels[index] = level
    return levels


def speedups(cells: Sequence[Cell], pilot: int | None = None, resample: bool = True) -> list[Speedup]:
    """Every drafting arm's speed-up in output tokens per second, by workload (in the order met), arm, k and concurrency; Holm-adjusted over all of them.

    A pair is two valid cells of the same workload, concurrency and block. pilot, resample: as paired_ratio has them. Raises MeasurementError if a cell is
    there twice.
    """
    rates = _Rates(cells)
    return adjusted([rates.compared(point, BASELINE, None, pilot, resample) for point in rates.points if point[1] != BASELINE])


def ratios_of_arms(cells: Sequence[Cell], arm: str, other: str, pilot: int | None = None, resample: bool = True) -> list[Speedup]:
    """One drafting arm over another of the same k, otherwise as `speedups`: `baseline_output_tok_s` is the other's. Holm-adjusted among themselves, since they are
    a question of their own."""
    rates = _Rates(cells)
    return adjusted([rates.compared(point, other, point[2], pilot, resample) for point in rates.points if point[1] == arm and (point[0], other, *point[2:]) in rates.points])


def adjusted(compared: Sequence[Speedup]) -> list[Speedup]:
    """The same with the levels of Holm's procedure over all of them."""
    levels = holm_levels([speedup.compared.p_value if speedup.compared else None for speedup in compared])
    return [replace(speedup, level=level) for speedup, level in zip(compared, levels, strict=True)]


def family_size(compared: Sequence[Speedup]) -> int:
    """How many comparisons share the adjustment."""
    return sum(speedup.verdict is not None for speedup in compared)


class _Rates:
    """The rates of valid cells, found by what is compared. Raises MeasurementError if a cell is there twice."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        workloads = list(dict.fromkeys(cell["workload"] for cell in cells))
        self._valid: dict[tuple, float] = {}
        seen = set()
        for cell in cells:
            key = (cell["workload"], cell["arm"], cell["k"], cell["concurrency"], cell["block"])
            if key in seen:
                raise MeasurementError(
                    what=f"the cell (workload, arm, k, concurrency, block) = {(*key[:4], key[4] + 1)} is there twice",
                    where="cells of the sweep",
                    fix="delete the sweep's artifact to run it again",
                )
            seen.add(key)
            if cell["valid"]:
                self._valid[key] = cell["output_tok_s"]
        self._blocks = sorted({key[4] for key in seen})
        self.points = sorted({key[:4] for key in seen}, key=lambda point: (workloads.index(point[0]), point[1], point[2] or 0, point[3]))
        """(Workload, arm, k, concurrency), workloads in the order met."""

    def compared(self, point: tuple, arm: str, k: int | None, pilot: int | None, resample: bool) -> Speedup:
        """A point against the one of another arm and k at its workload and concurrency."""
        workload, _, _, concurrency = point
        other = (workload, arm, k, concurrency)
        pairs = [(self._valid[(*point, block)], self._valid[(*other, block)]) for block in self._blocks if (*point, block) in self._valid and (*other, block) in self._valid]
        if not pairs:
            return Speedup(*point, None, None, None)
        values, others = zip(*pairs, strict=True)
        return Speedup(*point, geometric_mean(others), geometric_mean(values), paired_ratio(values, others, pilot, resample))


def geometric_mean(values: Sequence[float]) -> float:
    """Raises MeasurementError for a value that is not above zero."""
    return math.exp(_mean(_logarithms(values)))


def _logarithms(values: Sequence[float]) -> list[float]:
    if any(not (math.isfinite(value) and value > 0) for value in values):
        raise MeasurementError(
            what=f"the values {list(values)} must all be above zero",
            where="valid cells of the sweep",
            fix="delete the sweep's artifact to run it again",
        )
    return [math.log(value) for value in values]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return variance if variance > (1e-12 * max(1.0, abs(mean))) ** 2 else 0.0  # what rounding leaves of equal ratios is no spread


def _bootstrap(log_ratios: Sequence[float]) -> Interval:
    """Efron's BCa interval over pairs, always with the same resamples."""
    if _variance(log_ratios) == 0:
        return (exp(log_ratios[0]),) * 2
    import numpy as np
    from scipy import stats

    found = stats.bootstrap((np.array(log_ratios),), np.mean, n_resamples=BOOTSTRAP_RESAMPLES, confidence_level=1 - ALPHA, method="BCa",
                            rng=np.random.default_rng(0)).confidence_interval
    return exp(found.low), exp(found.high)
