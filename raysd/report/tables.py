"""The report's tables of results: measured rows in, text with units out."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysd.report import formats
from raysd.report.document import Column, Table, Value
from raysd.report.inputs import Inputs
from raysd.report.results import Row
from raysd.sweep.position_rates import position_rates, wilson_interval
from raysd.sweep.statistics import BASELINE, MIN_PAIRS, Speedup

VERDICT_TONES = {"faster": "good", "slower": "bad", "tie": "quiet", None: "quiet"}


def speedup_table(speedups: Sequence[Speedup], title: str, compared_at_once: int, over: str = "No draft") -> Table:
    """One row per arm, k and concurrency of one workload. compared_at_once: comparisons that share the adjustment. over: what the ratio is over."""
    resampled = any(speedup.compared and speedup.compared.bootstrap for speedup in speedups)
    rows = []
    for speedup in speedups:
        compared, tone = speedup.compared, VERDICT_TONES[speedup.verdict]
        rows.append(
            [
                formats.arm_name(speedup.arm),
                str(speedup.k),
                str(speedup.concurrency),
                formats.decimal(speedup.baseline_output_tok_s),
                formats.decimal(speedup.output_tok_s),
                Value(formats.ratio(compared.ratio if compared else None), tone),
                Value(speedup.verdict or f"under {MIN_PAIRS} blocks", tone),
                formats.interval(speedup.interval),
                formats.interval(compared.interval if compared else None),
                *([formats.interval(compared.bootstrap if compared else None)] if resampled else []),
                formats.ratio(compared.detectable_ratio(speedup.level) if compared else None),
                str(compared.n if compared else 0),
            ]
        )
    columns = [
        Column("Arm", numeric=False),
        Column("k", "tokens"),
        Column("Concurrency", "requests"),
        Column(over, "output tok/s"),
        Column("This arm", "output tok/s"),
        Column("Speed-up", "ratio"),
        Column("Verdict", numeric=False),
        Column("Adjusted interval", "95 %, all at once"),
        Column("Own interval", "95 %, by itself"),
        *([Column("Bootstrap", "95 %, by itself")] if resampled else []),
        Column("Detectable", "from, ratio"),
        Column("Blocks", "n"),
    ]
    return Table(
        title,
        columns,
        rows,
        "Token rates are geometric means over the paired blocks, so that they divide to the speed-up. Intervals are t intervals of the log-ratio over blocks. "
        f"The verdict goes by the adjusted one (Holm, {formats.plural(compared_at_once, 'comparison')}): a tie is an adjusted interval that holds 1. "
        "Detectable is the smallest true speed-up that this comparison would have found four times in five.",
    )


def workloads_table(speedups: Sequence[Speedup]) -> Table:
    """One row per workload, arm and k: at how many concurrencies it is faster, slower, a tie or undecided, and its best and worst."""
    rows: list[list[str | Value]] = []
    for workload, arm, k in dict.fromkeys((speedup.workload, speedup.arm, speedup.k) for speedup in speedups):
        points = [speedup for speedup in speedups if (speedup.workload, speedup.arm, speedup.k) == (workload, arm, k)]
        measured = sorted((speedup for speedup in points if speedup.compared), key=lambda speedup: speedup.compared.ratio)
        counts = [Value(str(found), VERDICT_TONES[verdict] if found else "quiet")
                  for verdict in ("faster", "slower", "tie", None) for found in [sum(speedup.verdict == verdict for speedup in points)]]
        best, worst = (f"{formats.ratio(each[0].compared.ratio)} at {each[0].concurrency}" if each else formats.ABSENT for each in (measured[-1:], measured[:1]))
        rows.append([workload, formats.arm_name(arm), str(k), *counts, best, worst])
    columns = [Column("Workload", numeric=False), Column("Arm", numeric=False), Column("k", "tokens"), Column("Faster", "points"), Column("Slower", "points"),
               Column("Tie", "points"), Column("No verdict", "points"), Column("Best", "ratio, at a concurrency"), Column("Worst", "ratio, at a concurrency")]
    return Table("All workloads", columns, rows, f"Points are concurrencies. Under {MIN_PAIRS} valid blocks there is no verdict.")


def latency_table(inputs: Inputs, workload: str, title: str) -> Table:
    """Medians over valid blocks, one row per concurrency, arm and k; arms side by side."""
    groups: dict[tuple, list[Row]] = {}
    for cell in inputs.cells:
        if cell["workload"] == workload and cell["valid"]:
            groups.setdefault((cell["concurrency"], inputs.arms.index(cell["arm"]), cell["k"] or 0, cell["arm"]), []).append(cell)
    rows = []
    for (concurrency, _, k, arm), cells in sorted(groups.items()):
        drafts, accepted = sum_of(cells, "drafts"), sum_of(cells, "accepted")
        rows.append(
            [
                str(concurrency),
                formats.arm_name(arm),
                str(k) if k else formats.ABSENT,
                formats.decimal(_median(cells, "ttft_ms_p50")),
                formats.decimal(_median(cells, "tpot_ms_p50"), 2),
                formats.decimal(_median(cells, "e2el_ms_p50"), 0),
                formats.decimal(_median(cells, "output_tok_s")),
                formats.decimal(_median(cells, "window_output_tok_s")),
                formats.decimal(1 + accepted / drafts if drafts else None, 2),
                str(len(cells)),
            ]
        )
    columns = [
        Column("Concurrency", "requests"),
        Column("Arm", numeric=False),
        Column("k", "tokens"),
        Column("TTFT", "ms"),
        Column("TPOT", "ms"),
        Column("E2EL", "ms"),
        Column("Whole cell", "output tok/s"),
        Column("Steady window", "output tok/s"),
        Column("AL", "tokens"),
        Column("Blocks", "n"),
    ]
    return Table(
        title,
        columns,
        rows,
        "Each figure is the median over valid blocks; TTFT, TPOT and E2EL are the medians over requests within a block. "
        "AL sums the counts of those blocks.",
    )


def acceptance_table(inputs: Inputs) -> Table:
    """Every acceptance length in the artifacts with the counts behind it."""
    rows = [
        _acceptance_row("sweep, report split", formats.arm_name(arm), str(counts["k"]), counts)
        for arm, counts in inputs.sweep_metrics.get("acceptance", {}).items()
    ]
    for stage, key, name in (("train", "served", "bf16"), ("quantize", "bf16_served", "bf16"), ("quantize", "served", "fp8")):
        counts = inputs.records[stage].metrics.get(key) if stage in inputs.records else None
        if counts:
            rows.append(
                _acceptance_row(f"{stage}, choose split", formats.arm_name(name), str(counts.get("k", len(counts["per_position"]))), counts)
            )
    columns = [
        Column("Counted in", numeric=False),
        Column("Arm", numeric=False),
        Column("k", "tokens"),
        Column("Drafts", "n"),
        Column("Drafted", "tokens"),
        Column("Accepted", "tokens"),
        Column("AL", "tokens per step"),
    ]
    return Table(
        "Acceptance length from vLLM's counters",
        columns,
        rows,
        "AL = 1 + accepted / drafts, the bonus token counted. "
        "Settings and checkpoints were chosen on the choose split; the report split was used once.",
    )


def _acceptance_row(where: str, name: str, k: str, counts: Mapping[str, Any]) -> list[str]:
    return [
        where,
        name,
        k,
        formats.count(counts["drafts"]),
        formats.count(counts["draft_tokens"]),
        formats.count(counts["accepted"]),
        formats.decimal(counts["acceptance_length"], 3),
    ]


def position_table(acceptance: Mapping[str, Any]) -> Table:
    """Acceptance at each position of the draft, by arm."""
    rows = []
    for arm, counts in acceptance.items():
        for rate in position_rates(counts["drafts"], counts["per_position"]):
            low, high = wilson_interval(rate.accepted, rate.drafts)
            rows.append(
                [
                    formats.arm_name(arm),
                    str(rate.position),
                    formats.count(rate.accepted),
                    formats.count(rate.drafts),
                    formats.percent(rate.cumulative_frac),
                    f"{formats.percent(low)} to {formats.percent(high)}",
                    formats.count(rate.reached),
                    formats.percent(rate.conditional_frac),
                ]
            )
    columns = [
        Column("Arm", numeric=False),
        Column("Position", "1 to k"),
        Column("Accepted", "tokens"),
        Column("Drafts", "n"),
        Column("Of all drafts", "%"),
        Column("95 % interval", "%"),
        Column("Reached", "drafts"),
        Column("Of those reached", "%"),
    ]
    return Table(
        "Acceptance by position in the draft",
        columns,
        rows,
        "Of all drafts: accepted / drafts. Of those reached: accepted / drafts whose earlier positions were all accepted. "
        "The interval (Wilson) takes "
        "drafts as independent, which drafts of one answer are not quite, so it is a little narrow.",
    )


def lossless_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    rows = [
        [
            formats.arm_name(arm),
            formats.count(sum(entry.values())),
            formats.count(entry["equal"]),
            formats.count(entry["near_tie"]),
            Value(formats.count(entry["broken"]), "bad" if entry["broken"] else "good"),
        ]
        for arm, entry in counts.items()
    ]
    columns = [
        Column("Arm", numeric=False),
        Column("Compared", "answers"),
        Column("Equal", "answers"),
        Column("Near-tie", "answers"),
        Column("Broken", "answers"),
    ]
    return Table("Answers against those without a draft", columns, rows)


def evaluation_table(evaluations: Sequence[Row]) -> Table:
    """Held-out accuracy by position and the replayed acceptance length, one row per evaluation."""
    positions = sorted({row["position"] for row in evaluations})
    by_step: dict[int, dict[int, Row]] = {}
    for row in evaluations:
        by_step.setdefault(row["step"], {})[row["position"]] = row
    rows = [
        [
            formats.count(step),
            *(formats.percent(at[position]["accuracy"]) if position in at else formats.ABSENT for position in positions),
            formats.decimal(next(iter(at.values()))["replay_acceptance_length"], 3),
        ]
        for step, at in sorted(by_step.items())
    ]
    columns = [
        Column("Step", "n"),
        *(Column(f"Position {position}", "accuracy, %") for position in positions),
        Column("Replayed AL", "tokens per step"),
    ]
    return Table(
        "Held-out evaluations during training",
        columns,
        rows,
        "Accuracy is teacher-forced on the choose split: the draft sees the true tokens before each position. "
        "The replay walks captured answers as the "
        "engine would, drafting and rejecting.",
    )


def candidate_table(candidates: Sequence[Row], chosen_step: int) -> Table:
    """The checkpoints that were served, one row each, and which of them is the draft."""
    rows = [
        [
            formats.count(each["step"]),
            formats.decimal(each["replay"]["acceptance_length"], 3),
            formats.decimal(each["served"]["acceptance_length"], 3),
            formats.count(each["served"]["drafts"]),
            "the draft" if each["step"] == chosen_step else "",
        ]
        for each in candidates
    ]
    columns = [Column("Step", "n"), Column("Replayed AL", "tokens per step"), Column("Served AL", "tokens per step"), Column("Drafts", "served"), Column("Chosen")]
    return Table("Checkpoints served on the choose split", columns, rows, "The checkpoint with the longest served acceptance length is the draft.")


def sum_of(cells: Iterable[Row], column: str) -> int:
    """Sum of a column of counts; an absent count is none."""
    return sum(cell[column] or 0 for cell in cells)


def _median(cells: Iterable[Row], column: str) -> float | None:
    values = [cell[column] for cell in cells if cell[column] is not None]
    return statistics.median(values) if values else None


def baseline_rates(cells: Sequence[Row], workload: str) -> dict[int, float]:
    """Median output tokens per second without a draft, by concurrency, over valid blocks."""
    by_concurrency: dict[int, list[Row]] = {}
    for cell in cells:
        if cell["arm"] == BASELINE and cell["workload"] == workload and cell["valid"]:
            by_concurrency.setdefault(cell["concurrency"], []).append(cell)
    return {concurrency: _median(group, "output_tok_s") for concurrency, group in sorted(by_concurrency.items())}
