"""Pictures of the same sweep from other sides: throughput against speed for a user, latencies as distributions, acceptance under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raysd.report import formats
from raysd.report.canvas import ARM_COLOURS, FARTHEST, GRID, INK, LINE_STYLES, QUIET, figure_at, label_ends, left_out, say, title
from raysd.report.summaries import OperatingPoint, Series, Spread
from raysd.sweep.position_rates import AcceptanceLength

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE_NAMES = ("solid", "dashed", "dash-dotted", "dotted")
"""Of LINE_STYLES."""
LATENCY_TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000)


def draw_pareto(points: Sequence[OperatingPoint], per_device: str, subtitle: str, path: Path) -> None:
    """Output tokens per second of a device against those of a user, one line per arm and k, each point with its concurrency. per_device: `GPU` or `machine`."""
    with figure_at(8.4, 4.5, path) as figure:
        axes = figure.add_axes((0.085, 0.125, 0.80, 0.68))
        title(figure, f"What a {per_device} gives against what a user gets", subtitle)
        near = [point for point in points if max(point.tok_s_per_user, point.output_tok_s_per_device) <= FARTHEST]
        left_out(figure, len(points) - len(near), 0.025)
        if not near:
            say(axes, "no point that can be drawn" if points else "no valid cell")
            return
        ends = []
        series = _by_series(near)
        for (arm, k), at in series.items():
            at = sorted(at, key=lambda point: point.concurrency)
            x, y = [point.tok_s_per_user for point in at], [point.output_tok_s_per_device for point in at]
            axes.plot(x, y, color=ARM_COLOURS[arm], lw=2, ls=_style(k, series), marker="o", ms=5.5, zorder=3)
            for point in at:  # the series' name stands at the right of its first point
                axes.annotate(str(point.concurrency), (point.tok_s_per_user, point.output_tok_s_per_device), xytext=(-5, 5) if point is at[0] else (5, 4),
                              ha="right" if point is at[0] else "left", textcoords="offset points", fontsize=8, color=ARM_COLOURS[arm])
            ends.append((y[0], x[0], _name(arm, k, series), ARM_COLOURS[arm]))
        axes.set(xlabel="Speed for one user (tok/s, 1000 / TPOT)", ylabel=f"Output tok/s of one {per_device}", xlim=(0, None), ylim=(0, None))
        axes.grid(axis="x", color=GRID, lw=0.8)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.04)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        label_ends(axes, ends)
        figure.text(0.885, 0.835, "farther right and up is better; numbers are concurrency", ha="right", fontsize=8.5, color=QUIET)


def draw_latency(spreads: Mapping[str, Sequence[Spread]], subtitle: str, path: Path) -> None:
    """TTFT, TPOT and E2EL over requests: from the 5th to the 95th percentile thin, the middle half thick, the median as a point, p99 as a dash; logarithmic.

    spreads: name of the latency to one entry per arm, k and concurrency.
    """
    with figure_at(8.4, 4.0, path) as figure:
        title(figure, "Latency of single requests", subtitle)
        panels = [figure.add_axes((start, 0.135, 0.26, 0.585)) for start in (0.065, 0.39, 0.715)]
        near = {name: [spread for spread in entries if spread.values_ms[-1] <= FARTHEST and not 0 < spread.values_ms[0] < 1 / FARTHEST] for name, entries in spreads.items()}
        left_out(figure, sum(map(len, spreads.values())) - sum(map(len, near.values())), 0.80)
        if not any(near.values()):
            say(panels[0], "no point that can be drawn" if any(spreads.values()) else "no valid request")
            for axes in panels[1:]:
                axes.set_axis_off()
            return
        series = _by_series([spread for entries in near.values() for spread in entries])
        for axes, (name, entries) in zip(panels, near.items(), strict=True):
            axes.set_title(f"{name} (ms)", loc="left", fontsize=10, pad=8)
            concurrencies = sorted({spread.concurrency for spread in entries})
            width = min(0.2, 0.8 / max(1, len(series)))
            for spread in entries:
                x = concurrencies.index(spread.concurrency) + (list(series).index((spread.arm, spread.k)) - (len(series) - 1) / 2) * width
                low, lower, middle, upper, high, highest = spread.values_ms
                colour = ARM_COLOURS[spread.arm]
                axes.plot([x, x], [low, high], color=colour, lw=1.1, zorder=2)
                axes.plot([x, x], [lower, upper], color=colour, lw=4.5, solid_capstyle="butt", zorder=3, alpha=0.55)
                axes.plot([x], [highest], color=colour, marker="_", ms=6, mew=1.4, zorder=3)
                axes.plot([x], [middle], color=colour, marker="o", ms=4, mec="white", mew=0.7, zorder=4)
            axes.set_yscale("log")
            axes.set_xticks(range(len(concurrencies)), [str(each) for each in concurrencies])
            axes.set_xlabel("Concurrency (requests)")
            _latency_ticks(axes)
        _legend(figure, series)


def draw_acceptance_under_load(by_concurrency: Mapping[tuple[str, int | None, int], AcceptanceLength], by_category: Mapping[tuple[str, int | None, str], AcceptanceLength],
                               published: Mapping[str, float], subtitle: str, path: Path) -> None:
    """Acceptance length by concurrency at the left, by category of the prompt at the right where that is known, with 95 % intervals.

    published: name to an acceptance length that somebody else measured for this target and k; drawn as dashed lines.
    """
    with figure_at(8.4, 3.9, path) as figure:
        ks = sorted({k for _, k, _ in by_concurrency if k is not None})
        styles = ", ".join(f"{k} {STYLE_NAMES[index % len(STYLE_NAMES)]}" for index, k in enumerate(ks))
        title(figure, "Tokens per verify step, under load", subtitle)
        left = figure.add_axes((0.075, 0.135, 0.40 if by_category else 0.905, 0.585))
        if not by_concurrency:
            say(left, "no draft was counted in a valid cell")
            return
        concurrencies = sorted({concurrency for _, _, concurrency in by_concurrency})
        series = {(arm, k): None for arm, k, _ in by_concurrency}
        for index, (arm, k) in enumerate(series):
            at = [(concurrency, length) for (an_arm, a_k, concurrency), length in by_concurrency.items() if (an_arm, a_k) == (arm, k)]
            x = [concurrencies.index(concurrency) + (index - (len(series) - 1) / 2) * 0.07 for concurrency, _ in at]
            y = [length.length for _, length in at]
            left.errorbar(x, y, yerr=_bars([length for _, length in at]), color=ARM_COLOURS[arm], lw=2, ls=_style(k, series), marker="o", ms=5.5, elinewidth=1.2, capsize=3, zorder=3)
        for name, length in published.items():
            left.axhline(length, color=QUIET, lw=1, ls=(0, (4, 3)), zorder=1)
            left.annotate(f"{name}: {length:.2f}", (0, length), xytext=(4, 3), textcoords="offset points", xycoords=("axes fraction", "data"), fontsize=8, color=QUIET)
        left.set_xticks(range(len(concurrencies)), [str(each) for each in concurrencies])
        left.set(xlabel="Concurrency (requests)", ylabel="AL (tokens per step)", xlim=(-0.4, len(concurrencies) - 0.6))
        left.set_ylim(1, 1 + 1.15 * (max([*(bar for length in by_concurrency.values() for bar in (length.length, (length.interval or (0, 0))[1])), *published.values()]) - 1))
        left.set_title("by concurrency" + (f"; k = {styles}" if len(ks) > 1 else ""), loc="left", fontsize=10, pad=8)
        _legend(figure, series)
        if by_category:
            _categories(figure.add_axes((0.655, 0.135, 0.325, 0.585)), by_category)


def _categories(axes: Axes, by_category: Mapping[tuple[str, int | None, str], AcceptanceLength]) -> None:
    series = {(arm, k): None for arm, k, _ in by_category}
    categories = list(dict.fromkeys(category for *_, category in by_category))
    height = 0.78 / len(series)
    for index, (arm, k) in enumerate(series):
        at = [(categories.index(category), length) for (an_arm, a_k, category), length in by_category.items() if (an_arm, a_k) == (arm, k)]
        y = [place + (index - (len(series) - 1) / 2) * height for place, _ in at]
        axes.barh(y, [length.length - 1 for _, length in at], height * 0.9, left=1, color=ARM_COLOURS[arm], zorder=2, alpha=0.85)
        axes.errorbar([length.length for _, length in at], y, xerr=_bars([length for _, length in at]), fmt="none", ecolor=INK, elinewidth=1, capsize=2, zorder=3)
    axes.set_yticks(range(len(categories)), categories)
    axes.invert_yaxis()
    axes.grid(axis="x", color=GRID, lw=0.8)
    axes.grid(axis="y", visible=False)
    axes.set_xlim(1, None)
    axes.set_xlabel("AL (tokens per step)")
    axes.set_title("by category of the prompt", loc="left", fontsize=10, pad=8)


def _by_series(entries: Sequence[OperatingPoint] | Sequence[Spread]) -> dict[Series, list]:
    found: dict[Series, list] = {}
    for entry in sorted(entries, key=lambda entry: (entry.arm != "none", entry.arm, entry.k or 0)):
        found.setdefault((entry.arm, entry.k), []).append(entry)
    return found


def _style(k: int | None, series: Mapping[Series, object]) -> str:
    ks = sorted({a_k for _, a_k in series if a_k is not None})
    return LINE_STYLES[ks.index(k) % len(LINE_STYLES)] if k in ks else "-"


def _name(arm: str, k: int | None, series: Mapping[Series, object]) -> str:
    several = len({a_k for _, a_k in series if a_k is not None}) > 1
    return formats.arm_name(arm) + (f", k = {k}" if several and k is not None else "")


def _bars(lengths: Sequence[AcceptanceLength]) -> list[list[float]]:
    bounds = [length.interval or (length.length, length.length) for length in lengths]
    return [[length.length - low for length, (low, _) in zip(lengths, bounds, strict=True)],
            [high - length.length for length, (_, high) in zip(lengths, bounds, strict=True)]]


def _legend(figure: Figure, series: Mapping[Series, object]) -> None:
    """One line an arm at the top right; where there are several k, in the order in which they stand."""
    arms: dict[str, list[str]] = {}
    for arm, k in series:
        arms.setdefault(arm, []).append(str(k))
    several = any(len(ks) > 1 for ks in arms.values())
    height_in = figure.get_size_inches()[1]
    for index, (arm, ks) in enumerate(reversed(arms.items())):
        text = formats.arm_name(arm) + (f", k = {', '.join(ks)}" if several and arm != "none" else "")
        figure.text(0.98, 1 - (0.18 + 0.205 * index) / height_in, f"■ {text}", ha="right", va="center", fontsize=9.5, fontweight="bold", color=ARM_COLOURS[arm])


def _latency_ticks(axes: Axes) -> None:
    low, high = axes.get_ylim()
    low, high = low / 1.15, high * 1.15
    ticks = [tick for tick in LATENCY_TICKS_MS if low <= tick <= high]
    axes.set_ylim(low, high)
    axes.set_yticks(ticks, [f"{tick:,d}" for tick in ticks])
    axes.set_yticks([], minor=True)
