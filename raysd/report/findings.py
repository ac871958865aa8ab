"""What the numbers say, in sentences: each says only what an interval supports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raysd.report import formats
from raysd.sweep.nodes import NodeEffect
from raysd.sweep.power import blocks_to_find
from raysd.sweep.published import looks_wrong
from raysd.sweep.statistics import ALPHA, MIN_PAIRS, Speedup, family_size, verdict

FP8_TOLERANCE_FRAC = 0.03
"""FP8 rounding is expected to move the acceptance length by at most this share."""

MANY_INVALID_FRAC = 0.2
"""From this share of invalid cells on, a report says so before anything else."""

MOST_NAMED = 3
"""A headline counts workloads instead of naming them if they are more."""

_RANKS = {"faster": 3, "tie": 2, "slower": 1, None: 0}
"""What is worth more in a headline: a proven gain, even if a point with a wide interval reads higher."""


def headline(speedups: Sequence[Speedup], of_sweep: Sequence[Speedup]) -> str:
    """The best speed-up of one workload and one k, where it was reached, and where that arm turns into a loss; then, where the sweep has more workloads, what
    drafting does on those. of_sweep: all that share the adjustment."""
    workloads = list(dict.fromkeys(speedup.workload for speedup in of_sweep))
    said = _best(speedups, of_sweep)
    if len(workloads) < 2 or not speedups:
        return said
    mine = speedups[0].workload
    return f"Workload {mine}: {said[0].lower()}{said[1:]} {_elsewhere([speedup for speedup in of_sweep if speedup.workload != mine])}"


def _best(speedups: Sequence[Speedup], of_sweep: Sequence[Speedup]) -> str:
    measured = [speedup for speedup in speedups if speedup.compared]
    if not speedups:
        return "The sweep has no drafting arm, so there is no speed-up to report."
    if not measured:
        return "No drafting arm has a block in which it and the baseline are both valid, so there is no speed-up to report."
    best = max(measured, key=lambda speedup: (_RANKS[speedup.verdict], speedup.compared.ratio))
    name, at = formats.arm_name(best.arm), f"at concurrency {best.concurrency}"
    shown = formats.ratio(best.compared.ratio)
    doubt = f"{interval_of(best)}, {formats.plural(best.compared.n, 'block')}, k = {best.k}"
    if best.verdict is None:
        return (
            f"The {name} decoded {shown} as fast as no draft {at}, but in fewer than {MIN_PAIRS} valid blocks "
            f"({best.compared.n}, k = {best.k}), so there is no interval and nothing is claimed."
        )
    if best.verdict == "tie" and verdict(best.compared.interval) != "tie":
        return (
            f"No speed-up is proven yet: the best, the {name} {at}, reads {shown} (by itself {formats.interval(best.compared.interval)}), which among "
            f"{formats.plural(family_size(of_sweep), 'comparison')} is a tie ({doubt})."
        )
    if best.verdict == "tie":
        return f"No speed-up was found: the best, the {name} {at}, is a tie with no draft at {shown} ({doubt})."
    if best.verdict == "slower":
        return (
            f"Speculation loses wherever an interval could be formed: the best, the {name} {at}, "
            f"decodes {shown} as fast as no draft ({doubt})."
        )
    return f"At concurrency {best.concurrency} the {name} decodes {shown} as fast as no draft ({doubt}){_turning_point(best, measured)}."


def _elsewhere(speedups: Sequence[Speedup]) -> str:
    """How many points of the headline's other workloads are faster, slower, ties or undecided, which workloads have them, and how far gains and losses go."""
    workloads = list(dict.fromkeys(speedup.workload for speedup in speedups))
    told = []
    for name, words, farthest in (("faster", "faster", ("up to", max)), ("slower", "slower", ("down to", min)), ("tie", "a tie", None), (None, "without a verdict", None)):
        found = [speedup for speedup in speedups if speedup.verdict == name]
        if not found:
            continue
        having = list(dict.fromkeys(speedup.workload for speedup in found))
        where = "" if len(workloads) == 1 else f" of {formats.listing(having) if len(having) <= MOST_NAMED else f'{len(having)} workloads'}"
        how_far = f" ({farthest[0]} {formats.ratio(farthest[1](speedup.compared.ratio for speedup in found))})" if farthest else ""
        told.append(f"{words} at {formats.plural(len(found), 'point')}{where}{how_far}")
    others = f"workload, {workloads[0]}," if len(workloads) == 1 else f"{len(workloads)} workloads"
    return f"On the other {others} speculation is {formats.listing(told)}."


def interval_of(speedup: Speedup) -> str:
    """The interval that decides, with its name: it is adjusted wherever it is not the comparison's own."""
    name = "95 % interval" if speedup.level == ALPHA else "adjusted 95 % interval"
    return f"{name} {formats.interval(speedup.interval)}"


def turned_to_ties(speedups: Sequence[Speedup], many_workloads: bool = False) -> str | None:
    """Why a point whose own interval does not hold 1 is called a tie all the same, and how many blocks would tell; None if there is no such point."""
    turned = [speedup for speedup in speedups if speedup.verdict == "tie" and verdict(speedup.compared.interval) != "tie"]
    if not turned:
        return None
    m = family_size(speedups)
    needed = [(speedup, blocks_to_find(math.log(speedup.compared.ratio), speedup.compared.log_sd, ALPHA / m)) for speedup in turned]
    told = [f"{_where(speedup, many_workloads)}, with {blocks} blocks" for speedup, blocks in needed if blocks is not None]
    said = (
        f"At {len(turned)} of {formats.plural(m, 'point')} the interval by itself does not hold 1, but the adjusted one does, so it is called a tie: "
        f"{m} comparisons at once must each be surer, and few blocks have few degrees of freedom to be sure with."
    )
    return f"{said} An effect as large as the one seen would be found four times in five: {'; '.join(told)}." if told else said


def width_reached(speedups: Sequence[Speedup], until_ci: float, many_workloads: bool = False) -> str:
    """Whether the sweep ended because its intervals were narrow enough, or because of a limit."""
    wide = [speedup for speedup in speedups if speedup.compared and speedup.compared.half_width_frac is not None and speedup.compared.half_width_frac > until_ci]
    asked = f"Blocks were added until half of each interval's width would be at most {formats.percent(until_ci)} of its speed-up (until_ci)"
    how = "spread and degrees of freedom are those of the blocks that decided how many there would be (Stein's two stages), so that the intervals still cover in 95 % of all cases"
    if not wide:
        return f"{asked}; every interval got there. The {how}."
    told = "; ".join(f"{_where(speedup, many_workloads)}: {formats.percent(speedup.compared.half_width_frac)}" for speedup in wide)
    return f"{asked}; a limit of blocks or time ended the sweep before these got there: {told}. The {how}."


def fp8_over_bf16(ratios: Sequence[Speedup]) -> str | None:
    """What quantization alone does to speed; None unless both arms ran."""
    decided = [each for each in ratios if each.verdict]
    if not decided:
        return None
    counts = {name: sum(each.verdict == name for each in decided) for name in ("faster", "slower", "tie")}
    said = formats.listing([f"{words} at {counts[name]}" for name, words in (("faster", "faster"), ("slower", "slower"), ("tie", "a tie")) if counts[name]])
    return f"Against the BF16 draft in the same blocks, the FP8 draft is {said} of {formats.plural(len(decided), 'point')}."


def _turning_point(best: Speedup, speedups: Sequence[Speedup]) -> str:
    """Where the best arm stops winning, as the end of the headline."""
    same_arm = sorted(
        (speedup for speedup in speedups if speedup.arm == best.arm and speedup.verdict), key=lambda speedup: speedup.concurrency
    )
    highest = same_arm[-1].concurrency
    losses = [speedup for speedup in same_arm if speedup.verdict == "slower"]
    ties = [speedup.concurrency for speedup in same_arm if speedup.verdict == "tie"]
    if losses:
        after = [speedup for speedup in losses if speedup.concurrency > best.concurrency]
        loss = after[0] if after else losses[-1]
        turns = "turns into a loss" if after else "is a loss"
        shown = f"{formats.ratio(loss.compared.ratio)}, {formats.interval(loss.interval)}"
        return f"; at concurrency {loss.concurrency} it {turns} ({shown})"
    if ties:
        return f"; it is a tie at concurrency {formats.listing(ties)}, and no loss was measured up to {highest}"
    return f", and no loss was measured up to concurrency {highest}" if len(same_arm) > 1 else ""


def warnings(acceptance: str, invalid_share: float) -> list[str]:
    """What a reader must know before any number. acceptance: `real` or `synthetic`; invalid_share: of all cells."""
    found = []
    if acceptance == "synthetic":
        found.append(
            "Synthetic acceptance: the engines were told which drafted tokens to accept. Speeds are those of the kernels at that acceptance length; nothing here "
            "says how good the draft is, and the answers of measured cells are nonsense."
        )
    if invalid_share > MANY_INVALID_FRAC:
        found.append(f"{formats.percent(invalid_share)} of the cells are invalid and in no figure; the reasons are listed under “How it was measured”.")
    return found


def validity(cells: Sequence[Mapping[str, Any]]) -> str:
    """How much of the sweep may be used."""
    invalid, failures = sum(not cell["valid"] for cell in cells), sum(cell["failures"] or 0 for cell in cells)
    return f"{len(cells) - invalid} of {formats.plural(len(cells), 'cell')} are valid; {formats.plural(failures, 'request')} failed."


def client(cells: Sequence[Mapping[str, Any]]) -> str | None:
    """Whether the client could have been what was measured: the worst of the valid cells; None if it was not watched."""
    worst = {name: max((cell[name] for cell in cells if cell["valid"] and cell[name] is not None), default=None)
             for name in ("client_cpu_frac", "loop_lag_ms_p99", "dispatch_delay_ms_p99")}
    told = [text for text in (
        None if worst["client_cpu_frac"] is None else f"took at most {formats.percent(worst['client_cpu_frac'])} of a core",
        None if worst["loop_lag_ms_p99"] is None else f"was at most {worst['loop_lag_ms_p99']:.2f} ms late in its own loop (p99)",
        None if worst["dispatch_delay_ms_p99"] is None else f"sent requests at most {worst['dispatch_delay_ms_p99']:.2f} ms late (p99)") if text]
    return f"In the worst valid cell the client {formats.listing(told)}." if told else None


def nodes(effects: Sequence[NodeEffect]) -> tuple[str, bool]:
    """What is to be said of the nodes, and whether all is well with them."""
    known = [effect for effect in effects if effect.effect_frac is not None]
    odd = [effect for effect in effects if effect.outlier]
    if not known:
        return "No node has a valid cell.", False
    low, high = min(effect.effect_frac for effect in known), max(effect.effect_frac for effect in known)
    spread = f"Speeds of the same cells differ from the median node's by {100 * low:+.1f} % to {100 * high:+.1f} % ({formats.plural(len(known), 'node')})"
    if odd:
        names = formats.listing([f"{effect.node} ({100 * effect.effect_frac:+.1f} %)" for effect in odd])
        return f"{spread}; {names} {'stands' if len(odd) == 1 else 'stand'} apart from the others: look at its clocks, power and neighbours before believing its rates.", False
    return f"{spread}; none stands apart." if len(known) > 2 else f"{spread}; with two nodes nothing says which is the odd one.", True


def losses(speedups: Sequence[Speedup], many_workloads: bool = False) -> list[str]:
    """One line for each point at which speculation is slower, its interval below 1."""
    return [
        f"{_where(speedup, many_workloads)}: {formats.ratio(speedup.compared.ratio)} ({formats.interval(speedup.interval)})"
        for speedup in speedups
        if speedup.verdict == "slower"
    ]


def undecided(speedups: Sequence[Speedup], many_workloads: bool = False) -> list[str]:
    """One line for each point with too few valid pairs for an interval."""
    return [
        f"{_where(speedup, many_workloads)}: {formats.plural(speedup.compared.n if speedup.compared else 0, 'valid pair')}, "
        f"fewer than {MIN_PAIRS}, so no interval is given"
        for speedup in speedups
        if speedup.verdict is None
    ]


def _where(speedup: Speedup, many_workloads: bool) -> str:
    workload = f"workload {speedup.workload}, " if many_workloads else ""
    return f"{formats.arm_name(speedup.arm)}, {workload}concurrency {speedup.concurrency}, k = {speedup.k}"


def loss_summary(speedups: Sequence[Speedup]) -> str:
    """The sentence above the list of losses."""
    decided = [speedup for speedup in speedups if speedup.verdict]
    slower = sum(speedup.verdict == "slower" for speedup in decided)
    if not decided:
        return "No point has an interval, so it is open where speculation wins and where it loses."
    if slower == 0:
        return f"Speculation loses at none of the {formats.plural(len(decided), 'point')} that have an interval."
    if slower == len(decided):
        return f"Speculation loses at every point that has an interval ({slower} of {len(decided)}):"
    return f"Speculation loses at {slower} of the {formats.plural(len(decided), 'point')} that have an interval:"


def fp8_on_cpu(hardware: str, speedups: Sequence[Speedup], acceptance: Mapping[str, Any]) -> str | None:
    """Why FP8 is slow here and what it still shows; None unless the hardware is a CPU and FP8 was measured to be slower."""
    if hardware != "cpu" or not any(speedup.arm == "fp8" and speedup.verdict == "slower" for speedup in speedups):
        return None
    text = "vLLM found no FP8 matrix unit to use on this CPU, so FP8 products are emulated in float32, and that is slower."
    share = fp8_ratio(acceptance)
    if share is None:
        return f"{text} Its speed needs a GPU."
    kept = "FP8 keeps the acceptance" if is_within_tolerance(share) else "FP8 changes the acceptance more than expected"
    how = f"{formats.percent(share)} of the BF16 draft's acceptance length"
    return f"{text} What the CPU does show is that {kept} ({how}); its speed needs a GPU."


def fp8_ratio(acceptance: Mapping[str, Any]) -> float | None:
    """Acceptance length of the FP8 draft over that of the BF16 draft; None unless both were counted."""
    if "fp8" not in acceptance or "bf16" not in acceptance:
        return None
    return acceptance["fp8"]["acceptance_length"] / acceptance["bf16"]["acceptance_length"]


def is_within_tolerance(share: float) -> bool:
    return abs(share - 1) <= FP8_TOLERANCE_FRAC


def fp8_acceptance(acceptance: Mapping[str, Any]) -> str | None:
    """Whether the FP8 draft is accepted as the BF16 draft is; None unless both were counted."""
    share = fp8_ratio(acceptance)
    if share is None:
        return None
    expected = f"expected within {100 * FP8_TOLERANCE_FRAC:.0f} %"
    met = "as expected" if is_within_tolerance(share) else "outside what was expected"
    return f"The FP8 draft's acceptance length is {share:.3f} of the BF16 draft's ({100 * (share - 1):+.1f} %; {expected}): {met}."


def against_published(acceptance: Mapping[str, Any], published: Mapping[str, Mapping[str, float]]) -> tuple[str, bool] | None:
    """Measured acceptance lengths beside published ones, by arm, and whether none looks wrong; None if nothing was published for the target and k."""
    if not any(published.values()):
        return None
    lengths = {name: length for each in published.values() for name, length in each.items()}
    told = formats.listing([f"{length:.2f} ({name})" for name, length in lengths.items()])
    wrong = [f"{formats.arm_name(arm)}: {reason}" for arm, counts in acceptance.items() if (reason := looks_wrong(counts["acceptance_length"], dict(published[arm])))]
    if wrong:
        return f"Published for this target and k: {told}, on other prompts. To be looked into: {' '.join(wrong)}", False
    return f"Published for this target and k: {told}, on other prompts; what was measured here is not far from it.", True


def lossless(counts: Mapping[str, Mapping[str, int]], largest_gap_nat: float | None, near_tie_nat: float) -> tuple[str, bool]:
    """Whether the arms answered as the baseline did, and whether that holds."""
    broken = sum(entry["broken"] for entry in counts.values())
    compared = sum(sum(entry.values()) for entry in counts.values())
    largest = f" The largest gap is {formats.gap(largest_gap_nat)}." if largest_gap_nat is not None else ""
    if broken:
        return (
            f"{broken} of {formats.plural(compared, 'answer')} differ from the baseline's by more than a near-tie: "
            f"those arms are not lossless here.{largest}",
            False,
        )
    return (
        f"None of {formats.plural(compared, 'answer')} differs from the baseline's by more than a near-tie of "
        f"{formats.gap(near_tie_nat)}.{largest}",
        True,
    )
