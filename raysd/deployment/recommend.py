"""From a finished sweep to how its winning arm is served: requests of a replica, replicas, delays, and how many tokens are drafted at which batch size.

Each value carries the cells that it was taken from. Nothing is read off between or beyond measured concurrencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raysd.errors import ExperimentError, MeasurementError
from raysd.experiment.serve import TARGET_FRAC, AutoscalingSection
from raysd.sweep.statistics import BASELINE, MIN_PAIRS, RatioEstimate, geometric_mean, paired_ratio

Cell = Mapping[str, Any]

GROWTH_FRAC = 0.25
"""More requests at once are worth it while output tok/s grows by at least this part of what the requests do: from 4 to 8 requests, by a quarter."""
LOSS_FRAC = 0.05
"""A replica still takes more requests than it is to have while output tok/s is within this of the target's."""
LOOK_BACK_ANSWERS, SHORTEST_LOOK_BACK_S, LONGEST_LOOK_BACK_S = 1.0, 5.0, 60.0
"""The mean is over as long as an answer takes: in a shorter span the count of requests follows single ones that come and go."""
UPSCALE_STARTS, DOWNSCALE_STARTS = 0.1, 5.0
"""Delays as parts of an engine's start: waiting a tenth of it before one is started loses little, and one that is ended too early costs a whole one, at a time when it
is needed."""


@dataclass(frozen=True)
class Reason:
    """A recommended value, and what it was taken from."""

    field: str
    value: Any
    because: str
    cells: tuple[dict[str, Any], ...]
    """arm, k, concurrency, blocks, and the numbers that decided."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Recommendation:
    arm: str
    workload: str
    k: int | None
    """Tokens drafted per verify step, the most where it depends on the batch; None: nothing drafts."""
    k_per_batch: list[list[int]] | None
    """vLLM's `num_speculative_tokens_per_batch_size`: [first, last, k] each; None: one k is the best throughout, or only one was measured."""
    autoscaling: dict[str, float | int]
    """Fields of serve.autoscaling."""
    acceptance_length: float | None
    """At the recommended load, for the policy that takes acceptance into account."""
    reasons: tuple[Reason, ...]

    @property
    def serve(self) -> dict[str, Any]:
        """What goes into the experiment under `serve:`."""
        drafting = {name: value for name, value in (("k", self.k), ("k_per_batch", self.k_per_batch)) if value is not None}
        return {"arm": self.arm, **drafting, "autoscaling": self.autoscaling}

    def as_json(self) -> dict[str, Any]:
        return {"workload": self.workload, "serve": self.serve, "num_speculative_tokens_per_batch_size": self.k_per_batch, "acceptance_length": self.acceptance_length,
                "reasons": [reason.as_json() for reason in self.reasons]}


@dataclass(frozen=True)
class Asked:
    """What only the user knows."""

    arm: str | None = None
    workload: str | None = None
    peak: int | None = None
    """Requests in flight at the highest load; None: not known."""
    trough: int = 0
    """At the lowest."""
    tpot_ms: float | None = None
    """The slowest that tokens of an answer may follow each other, at the median; None: as it comes."""


@dataclass(frozen=True)
class Load:
    """One concurrency of what is served, with the k that is best there."""

    concurrency: int
    k: int | None
    cells: tuple[Cell, ...]

    @property
    def output_tok_s(self) -> float:
        return geometric_mean([cell["output_tok_s"] for cell in self.cells])

    @property
    def tpot_ms(self) -> float:
        return geometric_mean([cell["tpot_ms_p50"] for cell in self.cells])

    @property
    def e2el_s(self) -> float:
        return geometric_mean([cell["e2el_ms_p50"] for cell in self.cells]) / 1000

    def told(self, **more: Any) -> dict[str, Any]:
        """The cells as a reason names them."""
        return {"arm": self.cells[0]["arm"], "k": self.k, "concurrency": self.concurrency, "blocks": sorted(cell["block"] for cell in self.cells),
                "output_tok_s": round(self.output_tok_s, 2), **more}


@dataclass(frozen=True)
class Ground:
    """What is known of the sweep beside its cells; a folder of cells alone tells none of it."""

    max_num_seqs: int | None = None
    """What an engine decodes at once."""
    engine_start_s: float | None = None
    """How long one takes to start."""
    fitting_replicas: int | None = None
    """How many engines the machines hold at once."""
    pilot: int | None = None
    """Of a sweep that measured until intervals were narrow, how many blocks decided how many there are."""


def recommend(cells: Sequence[Cell], asked: Asked, ground: Ground) -> Recommendation:
    """How an arm is to be served, by the cells of a sweep.

    An arm whose draft pays at no concurrency gives way to the baseline. Raises MeasurementError if no valid cell is of the arm and workload, ExperimentError if there never was one.
    """
    workload = _chosen(cells, asked)
    valid = [cell for cell in cells if cell["valid"] and cell["workload"] == workload]
    arms = [asked.arm] if asked.arm else sorted({cell["arm"] for cell in valid}, key=lambda arm: (arm != BASELINE, arm))  # of equals the simplest
    of_arms = {arm: found for arm in arms if (found := best_loads(valid, arm, ground.pilot))[0]}
    if not of_arms:
        raise MeasurementError(what=f"no cell of {asked.arm or 'any arm'} with the workload {workload} is valid", where="sweep", fix="see in the report why, and measure again")
    arm, arm_reason = fastest_arm({arm: loads for arm, (loads, _) in of_arms.items()})
    loads, k_reasons = of_arms[arm]
    if arm != BASELINE and not loads[0].k:
        arm_reason = Reason("arm", BASELINE, f"the draft of {arm} pays at no load: at the lowest, concurrency {loads[0].concurrency}, no draft is the fastest", k_reasons[0].cells)
        arm, (loads, k_reasons) = BASELINE, best_loads(valid, BASELINE, ground.pilot)
    target, target_reason = target_load(loads, asked.tpot_ms)
    most, most_reason = most_load(loads, target, ground.max_num_seqs)
    ongoing = float(target.concurrency) if target.concurrency < most else max(1.0, float(math.floor(TARGET_FRAC * most)))
    if ongoing < target.concurrency:
        target_reason = replace(target_reason, value=ongoing, because=f"{target_reason.because}; a replica takes no more than {most} at once, of which two thirds leave room while another one starts")
    replicas, replica_reasons = replica_bounds(ongoing, asked, ground.fitting_replicas)
    delays, delay_reasons = delays_of(target, ground.engine_start_s)
    used = [load for load in loads if load.concurrency <= max(most, loads[0].concurrency)]
    ks = [load.k for load in used if load.k]
    drafting = [cell for cell in target.cells if cell["drafts"]]
    return Recommendation(arm, workload, max(ks) if ks else None, k_table(used, ground.max_num_seqs or most) if arm != BASELINE else None,
                          {**replicas, "max_ongoing_requests": most, "target_ongoing_requests": ongoing, **delays},
                          round(1 + sum(cell["accepted"] for cell in drafting) / sum(cell["drafts"] for cell in drafting), 3) if drafting else None,
                          (arm_reason, target_reason, most_reason, *replica_reasons, *delay_reasons, *k_reasons))


def fastest_arm(of_arms: Mapping[str, Sequence[Load]]) -> tuple[str, Reason]:
    """The arm that gives the most output tok/s over the concurrencies that all arms have, in the geometric mean."""
    shared = set.intersection(*({load.concurrency for load in loads} for loads in of_arms.values()))
    if len(of_arms) == 1 or not shared:
        arm = next(iter(of_arms))
        return arm, Reason("arm", arm, "it is the one that was asked for, or the only one" if len(of_arms) == 1 else "no concurrency was measured of all arms; name one (--arm)", ())
    speeds = {arm: geometric_mean([load.output_tok_s for load in loads if load.concurrency in shared]) for arm, loads in of_arms.items()}
    arm = max(speeds, key=lambda each: speeds[each])
    return arm, Reason("arm", arm, f"it gives the most output tok/s over the concurrencies {', '.join(map(str, sorted(shared)))}, each at its best k, 0 where no draft is faster",
                       tuple({"arm": each, "output_tok_s_mean": round(speed, 2)} for each, speed in sorted(speeds.items(), key=lambda item: -item[1])))


def best_loads(cells: Sequence[Cell], arm: str, pilot: int | None = None) -> tuple[list[Load], list[Reason]]:
    """The arm at each concurrency, ascending, each with the k that is best there; 0 where the baseline is faster. One block is compared with itself only.

    The k of the concurrency before stays unless another one is faster by more than the blocks' spread can explain (the 95 % interval of their ratio is above 1), so
    that the table holds no noise.
    """
    points: dict[int, dict[int, list[Cell]]] = {}
    for cell in cells:
        if cell["arm"] in (arm, BASELINE):
            points.setdefault(cell["concurrency"], {}).setdefault(cell["k"] or 0, []).append(cell)
    loads, reasons, before = [], [], None
    for concurrency in sorted(points):
        found = points[concurrency]
        if arm != BASELINE and not any(found):
            continue  # of the arm itself nothing is valid here
        k, compared = _best_k(found, before, pilot)
        load = Load(concurrency, k if arm != BASELINE else None, tuple(found[k]))
        if arm != BASELINE and k != before:
            reasons.append(Reason("k", k, _k_words(concurrency, k, before),
                                  tuple(Load(concurrency, each, tuple(found[each])).told(ratio=compared.get(each)) for each in sorted(found))))
        loads.append(load)
        before = k
    return loads, reasons


def target_load(loads: Sequence[Load], tpot_ms: float | None = None) -> tuple[Load, Reason]:
    """The load that a replica is to have: the highest measured one up to which more requests at once are worth it. tpot_ms: see Asked.

    Raises ExperimentError if tokens follow each other more slowly even at the lowest.
    """
    if tpot_ms is not None and loads[0].tpot_ms > tpot_ms:
        raise ExperimentError(what=f"even at concurrency {loads[0].concurrency} the median TPOT is {loads[0].tpot_ms:.1f} ms, above {tpot_ms:g}", where="--tpot-ms",
                              fix="allow more, or measure lower concurrencies or faster engines")
    last, why, seen = loads[0], "it is the highest concurrency that was measured: a higher one may be better", [loads[0]]
    for load in loads[1:]:
        growth = (load.output_tok_s / last.output_tok_s - 1) / (load.concurrency / last.concurrency - 1)
        if tpot_ms is not None and load.tpot_ms > tpot_ms:
            why = f"at {load.concurrency} the median TPOT is {load.tpot_ms:.1f} ms, above {tpot_ms:g}"
        elif growth < GROWTH_FRAC:
            why = f"from {last.concurrency} to {load.concurrency} requests at once, output tok/s grows by {load.output_tok_s / last.output_tok_s - 1:.0%}, less than a quarter of what the requests do"
        elif load.k == 0:
            why = f"at {load.concurrency} the draft no longer pays"
        else:
            last = load
            seen.append(load)
            continue
        seen.append(load)
        break
    return last, Reason("target_ongoing_requests", float(last.concurrency), why, tuple(load.told(tpot_ms=round(load.tpot_ms, 2)) for load in seen))


def most_load(loads: Sequence[Load], target: Load, max_num_seqs: int | None) -> tuple[int, Reason]:
    """Requests that a replica takes at once: up to the highest measured concurrency at which it loses nothing by them."""
    above = [load for load in loads if load.concurrency > target.concurrency]
    kept = [target]
    for load in above:
        if load.output_tok_s < (1 - LOSS_FRAC) * target.output_tok_s or (max_num_seqs is not None and load.concurrency > max_num_seqs):
            break
        kept.append(load)
    why = "it is the highest that was measured" if len(kept) == 1 + len(above) else f"above it, output tok/s falls by more than {LOSS_FRAC:.0%}, or the engine decodes no more at once"
    most = kept[-1].concurrency if max_num_seqs is None else min(kept[-1].concurrency, max_num_seqs)
    return most, Reason("max_ongoing_requests", most, f"up to {most} requests at once a replica is as fast as with {target.concurrency}; {why}",
                        tuple(load.told() for load in (*kept, *above[len(kept) - 1:len(kept)])))


def replica_bounds(ongoing: float, asked: Asked, fitting: int | None) -> tuple[dict[str, int], list[Reason]]:
    """min_replicas and max_replicas, from the load that is expected, else from what the machines hold. Raises ExperimentError for a lowest load above the highest."""
    if asked.peak is not None and asked.trough > asked.peak:
        raise ExperimentError(what=f"the lowest load, {asked.trough}, is above the highest, {asked.peak}", where="--trough", fix="swap them")
    fewest = max(1, math.ceil(asked.trough / ongoing))
    reasons = [Reason("min_replicas", fewest, f"{asked.trough} requests in flight at the lowest load, {ongoing:g} for each replica" if asked.trough else
                      "no lowest load is given (--trough); one replica answers at once where none would have to start first", ())]
    if asked.peak is not None:
        most = max(fewest, math.ceil(asked.peak / ongoing))
        short = f"; the machines that the experiment names hold {fitting}" if fitting is not None and fitting < most else ""
        reasons.append(Reason("max_replicas", most, f"{asked.peak} requests in flight at the highest load, {ongoing:g} for each replica{short}", ()))
    else:
        most = max(fewest, fitting or 1)
        reasons.append(Reason("max_replicas", most, "no highest load is given (--peak); " + ("so many engines fit the machines that the experiment names" if fitting else
                                                                                               "how many the machines hold is not known"), ()))
    return {"min_replicas": fewest, "max_replicas": most}, reasons


def delays_of(target: Load, engine_start_s: float | None) -> tuple[dict[str, float], list[Reason]]:
    """How long the load is looked at and waited for, from how long an answer and a start take. The defaults where a start was not seen."""
    look_back = round(min(LONGEST_LOOK_BACK_S, max(SHORTEST_LOOK_BACK_S, LOOK_BACK_ANSWERS * target.e2el_s)), 1)
    reasons = [Reason("look_back_period_s", look_back, f"an answer takes {target.e2el_s:.1f} s (median E2EL) at this load; from {SHORTEST_LOOK_BACK_S:g} to {LONGEST_LOOK_BACK_S:g} s",
                      (target.told(e2el_s=round(target.e2el_s, 2)),))]
    if engine_start_s is None:
        defaults = AutoscalingSection()
        delays = {"upscale_delay_s": defaults.upscale_delay_s, "downscale_delay_s": defaults.downscale_delay_s}
        return {"look_back_period_s": look_back, **delays}, [*reasons, *(Reason(name, value, "the default: how long an engine takes to start is not in the sweep", ()) for name, value in delays.items())]
    delays = {"upscale_delay_s": round(max(1.0, UPSCALE_STARTS * engine_start_s), 1), "downscale_delay_s": round(max(60.0, DOWNSCALE_STARTS * engine_start_s), 1)}
    whys = {"upscale_delay_s": f"an engine takes {engine_start_s:.0f} s to start; a tenth of it is waited for, to see whether the load lasts",
            "downscale_delay_s": f"an engine takes {engine_start_s:.0f} s to start, and one that ends too early has to again; five times as long, at least a minute"}
    return {"look_back_period_s": look_back, **delays}, [*reasons, *(Reason(name, value, whys[name], ()) for name, value in delays.items())]


def k_table(loads: Sequence[Load], largest_batch: int) -> list[list[int]] | None:
    """[first, last, k] by batch size, as vLLM takes it; None if one k is the best throughout, or none drafts.

    The first range starts at 1; between measured concurrencies the k of the one below holds, as vLLM itself fills gaps; the last goes on to the largest batch.
    """
    ks = [load.k or 0 for load in loads]
    if len(set(ks)) < 2:
        return None
    starts = [(1, ks[0]), *((load.concurrency, k) for load, k, before in zip(loads[1:], ks[1:], ks, strict=False) if k != before)]
    ends = [start - 1 for start, _ in starts[1:]] + [max(largest_batch, starts[-1][0])]
    return [[start, end, k] for (start, k), end in zip(starts, ends, strict=True)]


def lines(found: Recommendation) -> list[str]:
    """What to write into the experiment, and why, for people."""
    import yaml

    shown = [yaml.safe_dump({"serve": found.serve}, sort_keys=False, default_flow_style=None, width=140).rstrip(), ""]
    if found.k_per_batch is not None:
        shown += ["k_per_batch needs vLLM 0.24 or later. Its V1 runner then captures PIECEWISE graphs alone, which no cell here had: measure it, or set VLLM_USE_V2_MODEL_RUNNER.", ""]
    if found.acceptance_length is not None:
        shown += [f"For a policy that takes acceptance into account, add to serve.autoscaling: acceptance_length: {found.acceptance_length}", ""]
    for reason in found.reasons:
        shown.append(f"{reason.field} = {reason.value}: {reason.because}")
        shown += [f"    {', '.join(f'{name} {value}' for name, value in cell.items() if value is not None)}" for cell in reason.cells]
    return shown


def _best_k(found: Mapping[int, Sequence[Cell]], before: int | None, pilot: int | None) -> tuple[int, dict[int, float | None]]:
    """The best k of one concurrency, and the others' speed over the one that held before (at the lowest concurrency over the fastest)."""
    by_speed = sorted(found, key=lambda k: geometric_mean([cell["output_tok_s"] for cell in found[k]]), reverse=True)
    held = before if before in found else by_speed[0]
    ratios = {k: _ratio(found[k], found[held], pilot) for k in found if k != held}
    better = [k for k in by_speed if k != held and (ratio := ratios[k]) is not None and ratio.interval is not None and ratio.interval[0] > 1]
    return better[0] if better else held, {k: None if ratio is None else round(ratio.ratio, 3) for k, ratio in ratios.items()}


def _ratio(cells: Sequence[Cell], others: Sequence[Cell], pilot: int | None) -> RatioEstimate | None:
    """Of the same blocks; None if they share fewer than an interval needs."""
    at = {cell["block"]: cell["output_tok_s"] for cell in others}
    pairs = [(cell["output_tok_s"], at[cell["block"]]) for cell in sorted(cells, key=lambda cell: cell["block"]) if cell["block"] in at]
    return paired_ratio(*zip(*pairs, strict=True), pilot, resample=False) if len(pairs) >= MIN_PAIRS else None


def _k_words(concurrency: int, k: int, before: int | None) -> str:
    if before is None:
        return f"at the lowest concurrency, {concurrency}, k = {k} gives the most output tok/s" if k else f"at the lowest concurrency, {concurrency}, no draft is the fastest"
    return f"from concurrency {concurrency} on " + (f"k = {k} is faster than k = {before}" if k else f"no draft is faster than k = {before}") + " by more than the spread of blocks"


def _chosen(cells: Sequence[Cell], asked: Asked) -> str:
    """The workload. Raises ExperimentError for one, or an arm, that the sweep does not have."""
    workloads, arms = sorted({cell["workload"] for cell in cells}), {cell["arm"] for cell in cells}
    if asked.arm is not None and asked.arm not in arms:
        raise ExperimentError(what=f"the sweep has no arm {asked.arm}", where="--arm", fix=f"use one of: {', '.join(sorted(arms))}")
    if asked.workload is None and len(workloads) > 1:
        raise ExperimentError(what=f"the sweep has {len(workloads)} workloads, and a replica is set up for one", where="--workload", fix=f"name one of: {', '.join(workloads)}")
    if asked.workload is not None and asked.workload not in workloads:
        raise ExperimentError(what=f"the sweep has no workload {asked.workload!r}", where="--workload", fix=f"use one of: {', '.join(workloads)}")
    return asked.workload or workloads[0]
