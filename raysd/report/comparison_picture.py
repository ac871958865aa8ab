"""The picture of two sweeps compared: every ratio with its interval, one line a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raysd.report import formats
from raysd.report.canvas import ARM_COLOURS, GRID, INK, cut, figure_at, fits, left_out, say, title
from raysd.report.compare import Compared, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_IN = 0.27
MOST_LINES = 60


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Rates at the left, speed-ups at the right where there are any: B over A, with adjusted 95 % intervals; a hollow point is a tie or was not tested."""
    panels = [("output tokens per second, B / A", comparison.rates[:MOST_LINES]), ("speed-up over no draft, B / A", comparison.speedups[:MOST_LINES])]
    shown = [(head, entries) for head, entries in panels if entries]
    height_in = 1.45 + LINE_IN * max(len(entries) for _, entries in shown)
    with figure_at(8.4, height_in, path) as figure:
        left_out(figure, sum(each.ratio is not None and not fits(each.ratio.ratio) for _, entries in shown for each in entries), 1 - 0.22 / height_in)
        title(figure, "B against A", "right of 1: B is faster; adjusted 95 % intervals, hollow: a tie" + (f"; the first {MOST_LINES} of {len(comparison.rates)} points" if len(comparison.rates) > MOST_LINES else ""))
        for index, (head, entries) in enumerate(shown):
            width, tall_in = 0.285 if len(shown) == 2 else 0.77, LINE_IN * len(entries) + 0.1
            axes = figure.add_axes((0.20 + 0.495 * index, (height_in - 0.93 - tall_in) / height_in, width, tall_in / height_in))
            axes.set_title(head, loc="left", fontsize=9.5, pad=6)
            _forest(axes, entries)


def _forest(axes: Axes, entries: Sequence[Compared]) -> None:
    compared = [each for each in entries if each.ratio]
    known = [each for each in compared if fits(each.ratio.ratio)]
    if not known:
        say(axes, "no point that can be drawn" if compared else "no point is valid in both")
        return
    ends = [cut(end) for each in known for end in (each.interval or (each.ratio.ratio,) * 2)]
    low, high = min(*ends, 0.97), max(*ends, 1.03)
    axes.set(xscale="log", xlim=(low / (high / low) ** 0.06, high * (high / low) ** 0.06), ylim=(len(entries) - 0.4, -0.6))
    axes.axvline(1, color=INK, lw=1, zorder=1)
    for line, each in enumerate(entries):
        if each not in known:
            continue
        colour = ARM_COLOURS[each.point[2]]
        if each.interval:
            axes.plot([cut(end) for end in each.interval], [line, line], color=colour, lw=1.6, zorder=2)
        decided = each.verdict in ("faster", "slower")
        axes.plot([each.ratio.ratio], [line], ls="none", marker="o", ms=5.5, color=colour, mfc=colour if decided else "white", mew=1.5, zorder=3)
    several = len({each.point[0] for each in entries}) > 1
    axes.set_yticks(range(len(entries)), [_name(each, several) for each in entries], fontsize=8.5)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, lw=0.8)
    left, right = axes.get_xlim()
    step = next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if (right - left) / step < 6), right - left)
    ticks = [1 + step * count for count in range(math.ceil((left - 1) / step), math.floor((right - 1) / step) + 1)]
    axes.set_xticks(ticks)
    axes.set_xticks([], minor=True)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.2f}×")
    axes.tick_params(axis="x", labelsize=8.5)


def _name(each: Compared, several: bool) -> str:
    workload, _, arm, k, concurrency = each.point
    return (f"{workload}, " if several else "") + formats.arm_name(arm) + (f", k {k}" if k is not None else "") + f", at {concurrency}"
