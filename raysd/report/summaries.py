"""Rows of cells and requests, summed up for one workload: what the pictures draw and the tables show. Only valid cells count."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from raysd.draft.acceptance import add_positions
from raysd.load.percentiles import percentile
from raysd.report.results import Row
from raysd.sweep.energy import joules_per_token, usd_per_million_tokens
from raysd.sweep.position_rates import AcceptanceLength, pooled_length, position_rates
from raysd.sweep.statistics import geometric_mean

Series = tuple[str, int | None]
"""Arm and k; the baseline has no k."""
QUANTILES = (0.05, 0.25, 0.50, 0.75, 0.95, 0.99)


@dataclass(frozen=True)
class OperatingPoint:
    """What one arm gives at one concurrency: speed for a user against work of a device."""

    arm: str
    k: int | None
    concurrency: int
    tok_s_per_user: float
    """1000 / TPOT, median over blocks of the median over requests."""
    output_tok_s_per_device: float
    """Median over blocks."""
    blocks: int


@dataclass(frozen=True)
class Spread:
    """How one latency of one arm at one concurrency is distributed over requests, of all blocks together."""

    arm: str
    k: int | None
    concurrency: int
    values_ms: tuple[float, ...]
    """At QUANTILES."""
    requests: int


@dataclass(frozen=True)
class Cost:
    """What one arm took at one concurrency, over all blocks; None where it was not measured or no price is known."""

    arm: str
    k: int | None
    concurrency: int
    joules_per_output_token: float | None
    usd_per_million_output_tokens: float | None
    blocks: int


def grouped(rows: Iterable[Row], key: Callable[[Row], tuple]) -> dict[tuple, list[Row]]:
    """Rows by key, keys in their order of first appearance."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def points_of(cells: Sequence[Row], workload: str, arms: Sequence[str]) -> dict[tuple[str, int | None, int], list[Row]]:
    """(Arm, k, concurrency) to its valid cells, one a block; arms side by side at each concurrency."""
    groups = grouped((cell for cell in cells if cell["workload"] == workload and cell["valid"]), lambda cell: (cell["arm"], cell["k"], cell["concurrency"]))
    return {point: groups[point] for point in sorted(groups, key=lambda point: (point[2], arms.index(point[0]), point[1] or 0))}


def operating_points(points: Mapping[tuple[str, int | None, int], Sequence[Row]], devices: int) -> list[OperatingPoint]:
    """devices: what the rates are divided by, the GPUs of an engine."""
    found = []
    for (arm, k, concurrency), cells in points.items():
        tpots = [cell["tpot_ms_p50"] for cell in cells if cell["tpot_ms_p50"]]
        if tpots:
            found.append(OperatingPoint(arm, k, concurrency, 1000 / statistics.median(tpots),
                                        statistics.median(cell["output_tok_s"] for cell in cells) / devices, len(cells)))
    return found


def acceptance_by_concurrency(points: Mapping[tuple[str, int | None, int], Sequence[Row]]) -> dict[tuple[str, int | None, int], AcceptanceLength]:
    """Of the points that draft; intervals are over blocks."""
    return {point: length for point, cells in points.items() if (length := pooled_length(cells)) is not None}


def shares_by_position(cells: Sequence[Row]) -> list[float]:
    """Of all drafts of some cells, the share accepted up to and including each position."""
    drafts, per_position = add_positions(cells)
    return [rate.cumulative_frac for rate in position_rates(drafts, per_position)] if drafts else []


def acceptance_by_category(requests: Iterable[Row], workload: str) -> dict[tuple[str, int | None, str], AcceptanceLength]:
    """(Arm, k, category of the prompt) to the acceptance length over all concurrencies; intervals are over requests. Empty unless the server told each
    request's counts and the prompts have categories."""
    known = [row for row in requests if row["workload"] == workload and row["category"] is not None and row["drafts"] and row["accepted"] is not None]
    groups = grouped(known, lambda row: (row["arm"], row["k"], row["category"]))
    return {key: length for key in sorted(groups, key=lambda key: (key[2], key[0], key[1] or 0)) if (length := pooled_length(groups[key])) is not None}


def latency_spreads(requests: Iterable[Row], workload: str, column: str) -> list[Spread]:
    """How `ttft_ms`, `tpot_ms` or `e2el_ms` is distributed."""
    known = (row for row in requests if row["workload"] == workload and row["error"] is None and row[column] is not None)
    groups = grouped(known, lambda row: (row["arm"], row["k"], row["concurrency"]))
    return [Spread(*point, tuple(percentile((row[column] for row in rows), 100 * share) for share in QUANTILES), len(rows)) for point, rows in sorted(groups.items(), key=lambda entry: (entry[0][2], entry[0][0] != "none", entry[0][0], entry[0][1] or 0))]


def costs(points: Mapping[tuple[str, int | None, int], Sequence[Row]], usd_per_hour: float | None) -> list[Cost]:
    """Energy and money for each point; none if nothing is known of either. Sums over blocks are divided, so that a long block weighs more. usd_per_hour: price of
    what an engine runs on."""
    found = []
    for (arm, k, concurrency), cells in points.items():
        answered = [cell for cell in cells if cell["output_tokens"]]
        metered = [cell for cell in answered if cell["energy_j"] is not None]
        joules = joules_per_token(_sum(metered, "energy_j"), _sum(metered, "output_tokens")) if metered else None
        usd = usd_per_million_tokens(usd_per_hour, _sum(answered, "output_tokens") / _sum(answered, "elapsed_s")) if usd_per_hour is not None and answered else None
        if joules is not None or usd is not None:
            found.append(Cost(arm, k, concurrency, joules, usd, len(cells)))
    return found


def _sum(cells: Sequence[Row], column: str) -> float:
    return sum(cell[column] for cell in cells)


def mean_rates(points: Mapping[tuple[str, int | None, int], Sequence[Row]]) -> dict[tuple[str, int | None, int], float]:
    """Geometric mean over blocks of output tokens per second."""
    return {point: geometric_mean([cell["output_tok_s"] for cell in cells]) for point, cells in points.items()}
