"""Acceptance that somebody else published for a target, to hold measured acceptance against: SemiAnalysis InferenceX's `golden` curves."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

CURVES = Path(__file__).parent / "golden-acceptance-length.yaml"
LOWEST, HIGHEST = 0.75, 1.15
"""Times the published acceptance length: outside of this band a measured one is to be looked into. It was measured on other prompts, so inside it proves nothing."""


def published_acceptance(model: str, k: int) -> dict[str, float]:
    """What was measured to an acceptance length, for a target and k drafted tokens: `InferenceX, thinking on`, and `off`. Empty if the target is not listed, or k not.

    model: as the experiment names it, an id of the hub or a folder; only its last part counts. Names of conversions count as the target's own (`Kimi-K2.5-MXFP4`
    is kimi-k2.5), names of other versions do not (`MiniMax-M3.5` is not minimax-m3).
    """
    return {f"InferenceX, {mode.replace('_', ' ')}": lengths[k - 1]
            for curve in _curves().values() if _names(model, curve["target"])
            for mode, lengths in curve.items() if mode != "target" and 1 <= k <= len(lengths)}


def looks_wrong(measured: float, published: dict[str, float]) -> str | None:
    """Why a measured acceptance length should be looked into, in words; None if it is within the band, or nothing was published."""
    if not published:
        return None
    if measured < LOWEST * min(published.values()):
        name, length = min(published.items(), key=lambda item: item[1])
        return f"{measured:.2f} is below {LOWEST:.0%} of the published {length:.2f} ({name}): is this draft made for this target, and are its layer ids right?"
    if measured > HIGHEST * max(published.values()):
        name, length = max(published.items(), key=lambda item: item[1])
        return f"{measured:.2f} is above {HIGHEST:.0%} of the published {length:.2f} ({name}): do answers repeat themselves?"
    return None


def _names(model: str, target: str) -> bool:
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1].lower()
    return re.match(rf"{re.escape(target)}(?![.\d])", last) is not None


@cache
def _curves() -> dict[str, dict[str, Any]]:
    import yaml

    return yaml.safe_load(CURVES.read_text(encoding="utf-8"))
