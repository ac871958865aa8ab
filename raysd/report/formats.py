"""Numbers as a reader sees them: one way for each kind, the unit beside it or in the column's head."""

from __future__ import annotations

from collections.abc import Sequence

ABSENT = "–"

ARM_NAMES = {"none": "no draft", "bf16": "BF16 draft", "fp8": "FP8 draft"}


def arm_name(arm: str) -> str:
    return ARM_NAMES[arm]


def ratio(value: float | None) -> str:
    """`1.30×`; a third digit where two would claim equality with 1, and a power of ten where they would say nothing."""
    if value is None:
        return ABSENT
    if not 0.005 <= value < 1e6:
        return f"{value:.2e}×"
    text = f"{value:.2f}"
    return f"{value:.3f}×" if text == "1.00" and value != 1 else f"{text}×"


def interval(bounds: tuple[float, float] | None) -> str:
    return ABSENT if bounds is None else f"{ratio(bounds[0])} to {ratio(bounds[1])}"


def decimal(value: float | None, digits: int = 1) -> str:
    if value is None:
        return ABSENT
    return f"{value:,.{digits}f}" if abs(value) < 1e15 else f"{value:.2e}"


def count(value: int | None) -> str:
    return ABSENT if value is None else f"{value:,d}"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.1f} %"


def gap(nat: float) -> str:
    return f"{nat:.3g} nat"


def duration(seconds: float) -> str:
    """`48.2 s`, or `3 min 20 s` from two minutes on."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(size_bytes: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} bytes"


def listing(parts: Sequence[object]) -> str:
    """`1`, `1 and 2`, `1, 2 and 4`."""
    words = [str(part) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def plural(number: int, word: str) -> str:
    return f"{number:,d} {word}" if number == 1 else f"{number:,d} {word}s"
