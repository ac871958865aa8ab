"""The report's tables of the sweep from other sides: in AMD's shape, latencies, energy, nodes, acceptance under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysd.report import formats
from raysd.report.document import Column, Table, Value
from raysd.report.published_rates import PublishedRates
from raysd.report.results import Row
from raysd.report.summaries import QUANTILES, Cost, OperatingPoint, Spread, mean_rates, shares_by_position
from raysd.report.tables import VERDICT_TONES
from raysd.sweep.nodes import NodeEffect
from raysd.sweep.position_rates import AcceptanceLength
from raysd.sweep.statistics import BASELINE, Speedup

SHOWN_QUANTILES = (0.50, 0.95, 0.99)

_LENGTH_COLUMNS = [Column("Arm", numeric=False), Column("k", "tokens"), Column("AL", "tokens per step"), Column("95 % interval", "tokens per step"),
                   Column("Drafts", "n"), Column("Accepted", "tokens")]


def published_shape(speedups: Sequence[Speedup], points: Mapping[tuple, Sequence[Row]], devices: int, per_device: str, workload: str, k: int) -> Table:
    """The table as AMD publishes its own: a row per concurrency, each arm's output tokens per second of a device, and how many times the baseline's they are."""
    rates = mean_rates(points)
    chosen = [speedup for speedup in speedups if speedup.workload == workload and speedup.k == k]
    arms = list(dict.fromkeys(speedup.arm for speedup in chosen))
    rows: list[list[str | Value]] = []
    for concurrency in sorted({speedup.concurrency for speedup in chosen} | {point[2] for point in points if point[0] == BASELINE}):
        row: list[str | Value] = [str(concurrency), _per_device(rates.get((BASELINE, None, concurrency)), devices)]
        for arm in arms:
            speedup = next((each for each in chosen if (each.arm, each.concurrency) == (arm, concurrency)), None)
            row += [_per_device(rates.get((arm, k, concurrency)), devices), Value(_times(speedup), VERDICT_TONES[speedup.verdict if speedup else None])]
        rows.append(row)
    unit = f"output tok/s/{per_device}"
    columns = [Column("Concurrency", "requests"), Column("No draft", unit)]
    for arm in arms:
        name = formats.arm_name(arm)
        columns += [Column(name, unit), Column("×", f"{name} / no draft")]
    return Table(f"In the shape of AMD's table, workload {workload}, k = {k}", columns, rows,
                 "Rates are geometric means over valid blocks; the ratio is over blocks in which both are valid. A tie is an adjusted interval that holds 1.")


def _per_device(rate: float | None, devices: int) -> str:
    return formats.decimal(rate / devices if rate is not None else None)


def _times(speedup: Speedup | None) -> str:
    if speedup is None:
        return "not run"
    if speedup.compared is None:
        return "invalid"
    suffix = {"tie": " (tie)", None: " (not tested)"}.get(speedup.verdict, "")
    return formats.ratio(speedup.compared.ratio) + suffix


def amds_table(published: PublishedRates) -> Table:
    """What AMD published for this target."""
    rows: list[list[str | Value]] = []
    for index, concurrency in enumerate(published.concurrency):
        row: list[str | Value] = [str(concurrency), formats.decimal(published.arms[BASELINE][index])]
        for arm, speedup in published.speedup.items():
            row += [formats.decimal(published.arms[arm][index]), formats.ratio(speedup[index])]
        rows.append(row)
    columns = [Column("Concurrency", "requests"), Column("No draft", "output tok/s/GPU")]
    for arm in published.speedup:
        columns += [Column(formats.arm_name(arm), "output tok/s/GPU"), Column("×", f"{formats.arm_name(arm)} / no draft")]
    return Table(f"As AMD published it for {published.model}, July 2026", columns, rows,
                 f"{published.setting}. Not raysd's measurement, and not a matched one: the arms ran on different builds of vLLM, probably at different k, and no spread or "
                 "acceptance length was published (rocm.blogs.amd.com, eagle3-speculative-decoding).")


def pareto_table(points: Sequence[OperatingPoint], per_device: str, workload: str) -> Table:
    """The numbers behind the picture of the same name."""
    rows = [[formats.arm_name(point.arm), formats.count(point.k), str(point.concurrency), formats.decimal(point.tok_s_per_user), formats.decimal(point.output_tok_s_per_device), str(point.blocks)]
            for point in sorted(points, key=lambda point: (point.arm != BASELINE, point.arm, point.k or 0, point.concurrency))]
    columns = [Column("Arm", numeric=False), Column("k", "tokens"), Column("Concurrency", "requests"), Column("For a user", "tok/s"), Column(f"Of a {per_device}", "output tok/s"), Column("Blocks", "n")]
    return Table(f"Speed for a user and throughput, workload {workload}", columns, rows, "For a user: 1000 / TPOT, of the median request. Both are medians over valid blocks.")


def spread_table(spreads: Mapping[str, Sequence[Spread]], workload: str) -> Table:
    """Quantiles of the latencies over all requests of valid cells."""
    at = {name: {(spread.arm, spread.k, spread.concurrency): spread for spread in entries} for name, entries in spreads.items()}
    points = dict.fromkeys(point for entries in at.values() for point in entries)
    rows = []
    for arm, k, concurrency in sorted(points, key=lambda point: (point[2], point[0] != BASELINE, point[0], point[1] or 0)):
        row = [str(concurrency), formats.arm_name(arm), formats.count(k)]
        requests = 0
        for name, digits in (("TTFT", 0), ("TPOT", 1), ("E2EL", 0)):
            spread = at[name].get((arm, k, concurrency))
            requests = max(requests, spread.requests if spread else 0)
            row.append(" / ".join(formats.decimal(spread.values_ms[QUANTILES.index(share)], digits) for share in SHOWN_QUANTILES) if spread else formats.ABSENT)
        rows.append([*row, formats.count(requests)])
    columns = [Column("Concurrency", "requests"), Column("Arm", numeric=False), Column("k", "tokens"),
               *(Column(name, f"ms, {' / '.join(f'p{100 * share:.0f}' for share in SHOWN_QUANTILES)}") for name in ("TTFT", "TPOT", "E2EL")), Column("Requests", "n")]
    return Table(f"Latency over single requests, workload {workload}", columns, rows, "Over the requests of all valid blocks together. With few requests a p99 is close to their maximum.")


def cost_of_tokens_table(costs: Sequence[Cost], workload: str) -> Table:
    rows = [[str(cost.concurrency), formats.arm_name(cost.arm), formats.count(cost.k), formats.decimal(cost.joules_per_output_token, 3),
             formats.decimal(cost.usd_per_million_output_tokens, 2), str(cost.blocks)] for cost in costs]
    columns = [Column("Concurrency", "requests"), Column("Arm", numeric=False), Column("k", "tokens"), Column("Energy", "J per output token"),
               Column("Cost", "USD per million output tokens"), Column("Blocks", "n")]
    return Table(f"Energy and cost, workload {workload}", columns, rows,
                 "Energy is what the devices drew over a cell, measured; cost is the experiment's price per hour over a cell's whole length.")


def node_table(effects: Sequence[NodeEffect]) -> Table:
    """Nodes against the median of all."""
    rows = []
    for effect in effects:
        interval = f"{_signed(effect.interval[0])} to {_signed(effect.interval[1])}" if effect.interval else formats.ABSENT
        verdict = Value("stands apart", "bad") if effect.outlier else Value("alike" if effect.effect_frac is not None else "no valid cell", "quiet")
        rows.append([effect.node, _signed(effect.effect_frac), interval, formats.count(effect.blocks), formats.count(effect.valid_cells), formats.count(effect.invalid_cells), verdict])
    columns = [Column("Node", numeric=False), Column("Against the median", "%"), Column("95 % interval", "%"), Column("Blocks", "n"), Column("Valid", "cells"),
               Column("Invalid", "cells"), Column("", numeric=False)]
    return Table("Nodes", columns, rows,
                 "How much faster the same cells ran there. All arms of a block run on one node, so speed-ups are free of it.")


def _signed(share: float | None) -> str:
    return formats.ABSENT if share is None else f"{100 * share:+.1f} %"


def length_by_load_table(points: Mapping[tuple, Sequence[Row]], by_concurrency: Mapping[tuple, AcceptanceLength], workload: str) -> Table:
    """Acceptance length of the measured cells, and what was accepted at each position."""
    rows = [[str(concurrency), formats.arm_name(arm), formats.count(k), formats.decimal(length.length, 3), _length_interval(length), formats.count(length.drafts), formats.count(length.accepted),
             " / ".join(f"{100 * share:.0f}" for share in shares_by_position(points[arm, k, concurrency]))]
            for (arm, k, concurrency), length in by_concurrency.items()]
    columns = [Column("Concurrency", "requests"), *_LENGTH_COLUMNS, Column("By position", "% of all drafts, first to k-th")]
    return Table(f"Acceptance length under load, workload {workload}", columns, rows, "Of valid cells, from the engine's counters. Intervals are over blocks.")


def length_by_category_table(by_category: Mapping[tuple, AcceptanceLength], workload: str) -> Table:
    rows = [[category, formats.arm_name(arm), formats.count(k), formats.decimal(length.length, 3), _length_interval(length), formats.count(length.drafts), formats.count(length.accepted)]
            for (arm, k, category), length in by_category.items()]
    columns = [Column("Category", numeric=False), *_LENGTH_COLUMNS]
    return Table(f"Acceptance length by category, workload {workload}", columns, rows, "From what the server tells of each request. Intervals are over requests.")


def _length_interval(length: AcceptanceLength) -> str:
    return formats.ABSENT if length.interval is None else f"{length.interval[0]:.2f} to {length.interval[1]:.2f}"
