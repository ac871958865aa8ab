"""Fingerprints: the same on every machine and Python, and different whenever a value that changes the result differs."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(document: Any) -> str:
    """32 hexadecimal digits of SHA-256 over the document's canonical JSON.

    Keys are sorted and floats written as Python's shortest round-trip form, so key order, machine and Python version do
    not matter. Raises TypeError for a value that JSON does not know, ValueError for NaN.
    """
    text = json.dumps(document, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:32]


def difference(before: Any, after: Any, prefix: str = "") -> list[str]:
    """What changed between two documents, one line a value: `train.lr changed: 0.001 -> 0.0005`."""
    if isinstance(before, dict) and isinstance(after, dict):
        lines = []
        for key in sorted({*before, *after}, key=str):
            path = f"{prefix}.{key}" if prefix else str(key)
            if key not in before:
                lines.append(f"{path} is new: {_short(after[key])}")
            elif key not in after:
                lines.append(f"{path} is gone: was {_short(before[key])}")
            else:
                lines += difference(before[key], after[key], path)
        return lines
    return [] if before == after else [f"{prefix} changed: {_short(before)} -> {_short(after)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value
    return text if len(text) <= 40 else text[:37] + "..."
