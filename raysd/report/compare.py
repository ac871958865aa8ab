"""Two sweeps compared cell by cell: rates, and how much a draft gains in each, with verdicts that hold for all cells together.

Blocks of two sweeps are never paired. Block 3 of one and block 3 of the other have prompts in common at most; they were measured at other times, often on other
machines, so what pairing is for, the drift that both sides share, is not there to be cancelled, and pairing would give away half of the degrees of freedom.
Welch's test takes the blocks of each sweep as independent; where prompts are shared it is a little wide. A sweep's own state that day (another
neighbour, a warmer machine) shifts all its blocks alike and no test over blocks sees it: a difference of rates alone may be that. A difference of speed-ups is
free of it, since each is a ratio within its own blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysd.errors import ExperimentError
from raysd.report.results import Row
from raysd.report.sides import MUST_AGREE, SHOWN, Side
from raysd.sweep.statistics import ALPHA, BASELINE, Interval, RatioEstimate, Verdict, geometric_mean, holm_levels, unpaired_ratio, verdict

Point = tuple[str, int, str, int | None, int]
"""Workload, OSL, arm, k and concurrency."""


@dataclass(frozen=True)
class Compared:
    """One number of B against the same of A, at one point."""

    point: Point
    a: float | None
    """Geometric mean over valid blocks; None without one."""
    b: float | None
    a_blocks: int
    b_blocks: int
    ratio: RatioEstimate | None
    """B / A; None unless both have a valid block."""
    level: float = ALPHA

    @property
    def interval(self) -> Interval | None:
        """The interval that decides, adjusted for all comparisons of its kind."""
        return self.ratio.interval_at(self.level) if self.ratio else None

    @property
    def verdict(self) -> Verdict | None:
        """Of B."""
        return verdict(self.interval)


@dataclass(frozen=True)
class Comparison:
    a: str
    b: str
    same: dict[str, str]
    """Conditions that are known of both and equal."""
    differing: dict[str, tuple[str, str]]
    unknown: list[str]
    """Conditions that must agree and are not known of both."""
    rates: list[Compared]
    """Output tokens per second."""
    speedups: list[Compared]
    """How many times the baseline's rate of its own block a drafting arm has."""
    only_a: list[Point]
    only_b: list[Point]


def compare(a: Side, b: Side, across: Sequence[str] = ()) -> Comparison:
    """B against A at every point that both have. across: conditions that are meant to differ.

    Raises ExperimentError where a condition that must agree differs and is not in `across`, and where the two have no point in common.
    """
    both = [name for name in (*MUST_AGREE, *SHOWN) if name in a.conditions and name in b.conditions]
    differing = {name: _what_differs(a.conditions[name].shown, b.conditions[name].shown) for name in both if a.conditions[name].identity != b.conditions[name].identity}
    refused = [name for name in differing if name in MUST_AGREE and name not in across]
    if refused:
        told = "; ".join(f"{name}: {_apart(*differing[name])}" for name in refused)
        raise ExperimentError(what=f"the two sweeps were measured under different conditions: {told}", where=f"{a.name} and {b.name}",
                              fix=f"compare sweeps that agree in this, or say that it is what you compare: {' '.join(f'--across {name}' for name in refused)}")
    of_a, of_b = _points(a.results.cells), _points(b.results.cells)
    defined_alike = {name for name in a.workloads.keys() | b.workloads.keys()
                     if name not in a.workloads or name not in b.workloads or a.workloads[name] == b.workloads[name]} if a.workloads and b.workloads else None
    common = [point for point in of_a if point in of_b and (defined_alike is None or point[0] in defined_alike)]
    if not common:
        raise ExperimentError(what=f"the two sweeps have no point in common: the first has {_words(of_a)}; the second has {_words(of_b)}", where=f"{a.name} and {b.name}",
                              fix="compare sweeps of the same workloads (name, lengths and prompts), arms, k and concurrencies")
    pilots = b.pilot, a.pilot
    rates = [_compared(point, _valid(of_a[point]), _valid(of_b[point]), pilots) for point in common]
    gains = [_compared(point, _gains(of_a, point), _gains(of_b, point), pilots) for point in common if point[2] != BASELINE]
    return Comparison(a.name, b.name, {name: a.conditions[name].shown for name in both if name not in differing}, differing,
                      [name for name in MUST_AGREE if name not in both], _adjusted(rates), _adjusted(gains),
                      [point for point in of_a if point not in common], [point for point in of_b if point not in common])


def as_json(comparison: Comparison) -> dict[str, Any]:
    """What `raysd report A B --json` prints. Ratios are B / A; verdicts are of B."""
    verdicts = [each.verdict for each in comparison.rates]
    return {
        "a": comparison.a,
        "b": comparison.b,
        "conditions": {"same": comparison.same, "differing": {name: list(pair) for name, pair in comparison.differing.items()}, "unknown": comparison.unknown},
        "cells": [_compared_json(each, "output_tok_s") for each in comparison.rates],
        "speedups": [_compared_json(each, "speedup") for each in comparison.speedups],
        "verdicts": {name: verdicts.count(name) for name in ("faster", "slower", "tie")} | {"not_tested": verdicts.count(None)},
        "only_in_a": [_point_json(point) for point in comparison.only_a],
        "only_in_b": [_point_json(point) for point in comparison.only_b],
    }


def _point_json(point: Point) -> dict[str, Any]:
    return dict(zip(("workload", "osl", "arm", "k", "concurrency"), point, strict=True))


def _compared_json(each: Compared, unit: str) -> dict[str, Any]:
    ratio = each.ratio
    return _point_json(each.point) | {
        f"a_{unit}": each.a,
        f"b_{unit}": each.b,
        "a_blocks": each.a_blocks,
        "b_blocks": each.b_blocks,
        "ratio": ratio.ratio if ratio else None,
        "interval": list(each.interval) if each.interval else None,
        "interval_alone": list(ratio.interval) if ratio and ratio.interval else None,
        "verdict": each.verdict,
        "detectable_ratio": ratio.detectable_ratio(each.level) if ratio else None,
    }


def _points(cells: Iterable[Row]) -> dict[Point, list[Row]]:
    found: dict[Point, list[Row]] = {}
    for cell in sorted(cells, key=lambda cell: cell["block"]):
        found.setdefault((cell["workload"], cell["osl"], cell["arm"], cell["k"], cell["concurrency"]), []).append(cell)
    return dict(sorted(found.items(), key=lambda entry: (entry[0][0], entry[0][1], entry[0][2] != BASELINE, entry[0][2], entry[0][3] or 0, entry[0][4])))


def _valid(cells: Sequence[Row]) -> list[float]:
    return [cell["output_tok_s"] for cell in cells if cell["valid"]]


def _gains(points: Mapping[Point, Sequence[Row]], point: Point) -> list[float]:
    """The arm's rate over the baseline's, in each block in which both are valid."""
    workload, osl, _, _, concurrency = point
    baselines = {cell["block"]: cell["output_tok_s"] for cell in points.get((workload, osl, BASELINE, None, concurrency), ()) if cell["valid"]}
    return [cell["output_tok_s"] / baselines[cell["block"]] for cell in points[point] if cell["valid"] and cell["block"] in baselines]


def _compared(point: Point, of_a: Sequence[float], of_b: Sequence[float], pilots: tuple[int | None, int | None]) -> Compared:
    return Compared(point, geometric_mean(of_a) if of_a else None, geometric_mean(of_b) if of_b else None, len(of_a), len(of_b),
                    unpaired_ratio(of_b, of_a, pilots) if of_a and of_b else None)


def _adjusted(compared: Sequence[Compared]) -> list[Compared]:
    levels = holm_levels([each.ratio.p_value if each.ratio else None for each in compared])
    return [replace(each, level=level) for each, level in zip(compared, levels, strict=True)]


def _what_differs(first: str, second: str) -> tuple[str, str]:
    """Two conditions as they are told: of settings, those alone that differ."""
    if not (first.startswith("{") and second.startswith("{")):
        return first, second
    settings, others = json.loads(first), json.loads(second)
    names = [name for name in {**settings, **others} if settings.get(name) != others.get(name)]
    return tuple(", ".join(f"{name}: {each.get(name)}" for name in names) for each in (settings, others))


def _apart(first: str, second: str) -> str:
    return f"{first} and {second}" if first != second else f"{first} in both, with other content"


def _words(points: Iterable[Point]) -> str:
    """What a sweep has, in a few words."""
    by_workload: dict[tuple[str, int], tuple[dict, dict]] = {}
    for workload, osl, arm, k, concurrency in points:
        arms, concurrencies = by_workload.setdefault((workload, osl), ({}, {}))
        arms[arm if k is None else f"{arm} (k {k})"] = concurrencies[concurrency] = True
    return ", and ".join(f"workload {workload} (OSL {osl}): {', '.join(arms)} at {', '.join(map(str, sorted(concurrencies)))}" for (workload, osl), (arms, concurrencies) in by_workload.items())
