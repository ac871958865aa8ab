"""The report's pictures of speed-up, acceptance by position, and training, drawn by matplotlib without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysd.report import formats
from raysd.report.canvas import (
    ARM_COLOURS,
    INK,
    LINE_STYLES,
    LOSS,
    POSITION_COLOURS,
    cut,
    figure_at,
    fits,
    label_ends,
    left_out,
    say,
    title,
)
from raysd.report.results import Row
from raysd.sweep.position_rates import position_rates, wilson_interval
from raysd.sweep.statistics import Speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RATIO_TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0)


def draw_speedup(speedups: Sequence[Speedup], baseline_tok_s: Mapping[int, float], subtitle: str, path: Path) -> None:
    """Speed-up by concurrency, one line per arm and k of one workload, with 95 % intervals; the region below 1 is shaded as a loss.
    A point that is a tie, or has no interval, is hollow.

    baseline_tok_s: output tokens per second without a draft, by concurrency; shown below the concurrency.
    """
    compared = [speedup for speedup in speedups if speedup.compared]
    measured = [speedup for speedup in compared if fits(speedup.compared.ratio)]
    with figure_at(8.4, 4.5, path) as figure:
        axes = figure.add_axes((0.085, 0.165, 0.895, 0.64))
        title(figure, "Speed-up over decoding without a draft", subtitle)
        left_out(figure, len(compared) - len(measured), 0.835)
        if not measured:
            say(axes, "no point that can be drawn" if compared else "no pair of valid cells")
            return
        series: dict[tuple[str, int], list[Speedup]] = {}
        for speedup in measured:
            series.setdefault((speedup.arm, speedup.k), []).append(speedup)
        concurrencies = sorted({*baseline_tok_s, *(speedup.concurrency for speedup in measured)})
        place = {concurrency: index for index, concurrency in enumerate(concurrencies)}
        several_k = len({speedup.k for speedup in measured}) > 1
        ks = sorted({speedup.k for speedup in measured})
        lows = [_low(speedup) for speedup in measured]
        highs = [_high(speedup) for speedup in measured]
        bottom, top = min(*lows, 0.93), max(*highs, 1.07)
        room = (top / bottom) ** 0.12  # for the words above and below the bars, whatever they span
        bottom, top = bottom / max(1.08, room), top * max(1.08, room)
        axes.set(
            yscale="log", ylim=(bottom, top), xlim=(-0.35, len(concurrencies) - 0.9 + len(concurrencies) * (0.24 if several_k else 0.16))
        )
        axes.axhspan(bottom, 1, color=LOSS, lw=0, zorder=0)
        axes.axhline(1, color=INK, lw=1, zorder=1)
        axes.annotate(
            "slower than no draft",
            (1, 0),
            xycoords="axes fraction",
            xytext=(-5, 5),
            textcoords="offset points",
            va="bottom",
            ha="right",
            fontsize=8.5,
            color="#a2501c",
        )
        ends = []
        for index, ((arm, k), points) in enumerate(series.items()):
            colour = ARM_COLOURS[arm]
            shift = _shift(index, len(series))
            x = [place[point.concurrency] + shift for point in points]
            y = [point.compared.ratio for point in points]
            axes.errorbar(
                x,
                y,
                yerr=[
                    [value - _low(point) for value, point in zip(y, points, strict=True)],
                    [_high(point) - value for value, point in zip(y, points, strict=True)],
                ],
                color=colour,
                lw=2,
                ls=LINE_STYLES[ks.index(k) % len(LINE_STYLES)],
                marker="o",
                ms=6,
                elinewidth=1.4,
                capsize=3.5,
                zorder=3,
            )
            hollow = [place_and_ratio for *place_and_ratio, point in zip(x, y, points, strict=True) if point.verdict not in ("faster", "slower")]
            if hollow:
                axes.plot(*zip(*hollow, strict=True), ls="none", marker="o", ms=6, color=colour, mfc="white", mew=1.6, zorder=4)
            ends.append(
                (
                    y[-1],
                    place[points[-1].concurrency] + _shift(len(series) - 1, len(series)),
                    formats.arm_name(arm) + (f", k = {k}" if several_k else ""),
                    colour,
                )
            )
        label_ends(axes, ends)
        if len(series) <= 2:
            _label_points(axes, measured, place, len(series))
        _ratio_ticks(axes, bottom, top)
        axes.set_xticks(range(len(concurrencies)), [_concurrency_label(concurrency, baseline_tok_s) for concurrency in concurrencies])
        axes.set_xlabel("Concurrency (requests in flight); below it, output tok/s without a draft", labelpad=6)
        axes.set_ylabel("Speed-up (ratio of output tok/s)")


def draw_acceptance(acceptance: Mapping[str, Any], subtitle: str, path: Path) -> None:
    """Acceptance by position: of all drafts at the left, of the drafts that reached the position at the right, with 95 % Wilson intervals.

    acceptance: arm to counts (`drafts`, `per_position`).
    """
    from matplotlib.ticker import PercentFormatter

    rates = {arm: position_rates(counts["drafts"], counts["per_position"]) for arm, counts in acceptance.items()}
    with figure_at(8.4, 3.9, path) as figure:
        title(figure, "Drafted tokens that the target accepted, by position", subtitle)
        left, right = (figure.add_axes((start, 0.135, 0.405, 0.60)) for start in (0.075, 0.575))
        if not rates:
            say(left, "no drafting arm")
            right.set_axis_off()
            return
        width = 0.78 / len(rates)
        for axes, head in ((left, "of all drafts"), (right, "of the drafts that got that far")):
            axes.set_title(head, loc="left", fontsize=10, color=INK, pad=8)
            for index, (arm, at) in enumerate(rates.items()):
                trials = [rate.drafts if axes is left else rate.reached for rate in at]
                shares = [(rate.accepted / n) if n else 0.0 for rate, n in zip(at, trials, strict=True)]
                bounds = [wilson_interval(rate.accepted, n) if n else (0.0, 0.0) for rate, n in zip(at, trials, strict=True)]
                x = [rate.position + (index - (len(rates) - 1) / 2) * width for rate in at]
                axes.bar(x, shares, width * 0.92, color=ARM_COLOURS[arm], zorder=2)
                axes.errorbar(
                    x,
                    shares,
                    yerr=[
                        [s - low for s, (low, _) in zip(shares, bounds, strict=True)],
                        [high - s for s, (_, high) in zip(shares, bounds, strict=True)],
                    ],
                    fmt="none",
                    ecolor=INK,
                    elinewidth=1,
                    capsize=2.5,
                    zorder=3,
                )
                for at_x, share, (_, high), n in zip(x, shares, bounds, trials, strict=True):
                    axes.annotate(
                        f"{100 * share:.0f} %" if n else formats.ABSENT,
                        (at_x, high),
                        xytext=(0, 3),
                        textcoords="offset points",
                        ha="center",
                        fontsize=8.5,
                        color=ARM_COLOURS[arm],
                    )
            axes.set_xticks([rate.position for rate in max(rates.values(), key=len)])
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
            axes.set_xlabel("Position in the draft (tokens)")
        highest = max(axes.get_ylim()[1] for axes in (left, right))
        for axes in (left, right):
            axes.set_ylim(0, min(1.12, highest * 1.08))
        left.set_ylabel("Accepted (%)")
        for index, arm in enumerate(rates):
            figure.text(
                0.98,
                0.945 - 0.06 * index,
                f"■ {formats.arm_name(arm)}",
                ha="right",
                va="center",
                fontsize=10,
                fontweight="bold",
                color=ARM_COLOURS[arm],
            )


def draw_training(curve: Sequence[Row], evaluations: Sequence[Row], candidates: Sequence[Row], subtitle: str, path: Path) -> None:
    """Training loss, held-out accuracy by position and acceptance length (simulated, replayed, served), all over steps.

    Without any of them the picture says so.
    """
    from matplotlib.ticker import PercentFormatter

    with figure_at(8.4, 3.7, path) as figure:
        title(figure, "Training of the draft", subtitle)
        loss, accuracy, replay = (
            figure.add_axes((start, 0.145, width, 0.575)) for start, width in ((0.07, 0.24), (0.385, 0.19), (0.755, 0.225))
        )
        if not curve and not evaluations:
            say(loss, "no training in this experiment")
            accuracy.set_axis_off()
            replay.set_axis_off()
            return
        steps = [row["step"] for row in curve]
        losses = [row["loss"] for row in curve]
        loss.plot(steps, losses, color="#a9c7de", lw=1)
        loss.plot(steps, _running_median(losses), color=ARM_COLOURS["bf16"], lw=2)
        loss.set_title("loss, running median bold", loc="left", fontsize=10, pad=8)
        loss.set(xlabel="Step", ylabel="Loss (nat, TTT steps weighted)")
        ends = []
        for position in sorted({row["position"] for row in evaluations}):
            rows = sorted((row for row in evaluations if row["position"] == position), key=lambda row: row["step"])
            colour = POSITION_COLOURS[(position - 1) % len(POSITION_COLOURS)]
            accuracy.plot([row["step"] for row in rows], [row["accuracy"] for row in rows], color=colour, lw=2, marker="o", ms=4.5)
            ends.append((rows[-1]["accuracy"], rows[-1]["step"], f"position {position}", colour))
        accuracy.set_ylim(0, None)
        accuracy.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        accuracy.set_title("held-out accuracy", loc="left", fontsize=10, pad=8)
        accuracy.set(xlabel="Step", ylabel="Accuracy (%, teacher-forced)")
        simulated = [row["simulated_acceptance_length"] for row in curve]
        replay.plot(steps, _running_median(simulated), color="#a9c7de", lw=1.5, label="simulated, train split")
        lengths = sorted({row["step"]: row["replay_acceptance_length"] for row in evaluations}.items())
        replay.plot([step for step, _ in lengths], [length for _, length in lengths], color=INK, lw=2, marker="o", ms=4.5, label="replayed, held out")
        served = [(each["step"], each["served"]["acceptance_length"]) for each in candidates]
        replay.plot([step for step, _ in served], [length for _, length in served], ls="none", color=ARM_COLOURS["bf16"], marker="D", ms=5.5, label="served, held out")
        for step, length in served[-1:]:
            replay.annotate(f"{length:.2f}", (step, length), xytext=(0, -13), textcoords="offset points", ha="center", fontsize=9, color=ARM_COLOURS["bf16"])
        replay.set_ylim(1, 1 + 1.45 * max((length - 1 for length in [*simulated, *(length for _, length in [*lengths, *served])]), default=1))
        replay.legend(loc="upper left", fontsize=7.5, frameon=False, handlelength=1.6, borderpad=0.1, labelspacing=0.25)
        replay.set_title("acceptance length", loc="left", fontsize=10, pad=8)
        replay.set(xlabel="Step", ylabel="AL (tokens per step)")
        for axes in (loss, accuracy, replay):
            axes.set_xlim(0, max(steps + [row["step"] for row in evaluations]) * 1.04)
        label_ends(accuracy, ends, size=8.5)


def _shift(index: int, series: int) -> float:
    """How far a series stands beside its concurrency, so that intervals do not cover each other; concurrencies are 1 apart."""
    return (index - (series - 1) / 2) * min(0.08, 0.4 / series)


def _label_points(axes: Axes, measured: Sequence[Speedup], place: Mapping[int, int], series: int) -> None:
    """The ratio beside each point: above the higher and below the lower of two at one concurrency; a lone one away from the line at 1."""
    arms = list(dict.fromkeys((speedup.arm, speedup.k) for speedup in measured))
    for speedup in measured:
        others = [other for other in measured if other.concurrency == speedup.concurrency and other is not speedup]
        below = any(other.compared.ratio > speedup.compared.ratio for other in others) or (not others and speedup.compared.ratio < 1)
        shift = _shift(arms.index((speedup.arm, speedup.k)), series)
        axes.annotate(
            formats.ratio(speedup.compared.ratio),
            (place[speedup.concurrency] + shift, _low(speedup) if below else _high(speedup)),
            xytext=(0, -6 if below else 6),
            textcoords="offset points",
            ha="center",
            va="top" if below else "bottom",
            fontsize=9,
            color=ARM_COLOURS[speedup.arm],
        )


def _ratio_ticks(axes: Axes, bottom: float, top: float) -> None:
    """Ticks of a logarithmic ratio axis, far enough apart to be read, 1 among them."""
    smallest_gap = math.log(top / bottom) / 9
    chosen = [1.0]
    for tick in sorted((tick for tick in RATIO_TICKS if bottom <= tick <= top), key=lambda tick: abs(math.log(tick))):
        if all(abs(math.log(tick / other)) >= smallest_gap for other in chosen):
            chosen.append(tick)
    axes.set_yticks(sorted(chosen), [f"{tick:.1f}×" for tick in sorted(chosen)])
    axes.set_yticks([], minor=True)


def _concurrency_label(concurrency: int, baseline_tok_s: Mapping[int, float]) -> str:
    rate = baseline_tok_s.get(concurrency)
    return f"{concurrency}\n{formats.decimal(rate, 0)} tok/s" if rate is not None else str(concurrency)


def _low(speedup: Speedup) -> float:
    return cut(speedup.compared.interval[0]) if speedup.compared.interval else speedup.compared.ratio


def _high(speedup: Speedup) -> float:
    return cut(speedup.compared.interval[1]) if speedup.compared.interval else speedup.compared.ratio


def _running_median(values: Sequence[float]) -> list[float]:
    """Median over a window of about a twelfth of the curve around each point."""
    half = max(1, len(values) // 24)
    windows = (sorted(values[max(0, index - half) : index + half + 1]) for index in range(len(values)))
    return [window[len(window) // 2] for window in windows]
