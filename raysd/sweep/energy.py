"""Energy and money: from the power of devices over time to joules and dollars for tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

HOST = "host"
"""The source of telemetry's rows that are of no device."""
MAX_GAP_S = 3.0
"""Between two samples of a device's power, or from the window's edge to the nearest: more is not bridged (InferenceX has the same)."""


def energy_j(samples: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float | None:
    """Energy of one device over a window, in joules, by the trapezoid rule; at the edges interpolated, or held where there is no sample beyond.

    samples: time in s and power in W, ascending in time; those around the window count, too. None if the samples leave a gap that is not bridged.
    """
    known = [(at_s, power_w) for at_s, power_w in samples if start_s - MAX_GAP_S <= at_s <= end_s + MAX_GAP_S]
    if not known or end_s <= start_s:
        return None
    times = [start_s, *(at_s for at_s, _ in known if start_s < at_s < end_s), end_s]
    gaps = [later[0] - earlier[0] for earlier, later in zip(known, known[1:], strict=False)]
    if known[0][0] - start_s > MAX_GAP_S or end_s - known[-1][0] > MAX_GAP_S or any(gap > MAX_GAP_S for gap in gaps):
        return None
    power_w = [_at(known, at_s) for at_s in times]
    return sum((later - earlier) * (one + other) / 2
               for earlier, later, one, other in zip(times, times[1:], power_w, power_w[1:], strict=False))


def _at(samples: Sequence[tuple[float, float]], at_s: float) -> float:
    """Power at a time, linear between samples and held beyond them."""
    before = [sample for sample in samples if sample[0] <= at_s]
    after = [sample for sample in samples if sample[0] >= at_s]
    if not before or not after:
        return (after[0] if after else before[-1])[1]
    (one_s, one_w), (other_s, other_w) = before[-1], after[0]
    return one_w if other_s == one_s else one_w + (other_w - one_w) * (at_s - one_s) / (other_s - one_s)


def energy_of(rows: Iterable[Mapping[str, Any]], start_s: float, end_s: float, devices: set[str] | None = None) -> float | None:
    """Energy of all devices, or of those named, over a window, from telemetry's rows. None if there is none, or one of them does not tell its power, or not without a
    gap: the others' sum would be too little."""
    samples: dict[str, list[tuple[float, float]]] = {device: [] for device in devices or ()}
    for row in rows:
        if row["source"] != HOST and (devices is None or row["device"] in devices):
            of_device = samples.setdefault(row["device"], [])
            if row["power_w"] is not None:
                of_device.append((row["t_s"], row["power_w"]))
    each = [energy_j(sorted(of_device), start_s, end_s) for of_device in samples.values()]
    return sum(each) if each and None not in each else None


def joules_per_token(energy: float, output_tokens: int) -> float | None:
    """Energy for one token of output; None without a token."""
    return energy / output_tokens if output_tokens else None


def usd_per_million_tokens(usd_per_hour: float, output_tok_s: float) -> float | None:
    """What a million tokens of output cost at a price of what made them; None without a token."""
    return usd_per_hour / 3600 / output_tok_s * 1e6 if output_tok_s else None
