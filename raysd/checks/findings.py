"""What a check finds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
"""`error`: it does not start, or does not do what the experiment says. `warning`: it may fail or be slow, or could not be checked. `info`: worth knowing."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
NOT_CHECKED = "not-checked"
"""The code of what no check could tell, for want of a figure that is public or of a file on this machine."""


@dataclass(frozen=True)
class Finding:
    """One thing to look at."""

    code: str
    """Short and stable; empty: that of the check that found it."""
    severity: Severity
    field: str
    """Of the experiment (`sweep.engine.env.VLLM_ROCM_USE_AITER`), or what was looked at on a machine."""
    message: str
    """What is wrong, with the value that was seen."""
    fix: str
    """What to do."""
    source: str = ""
    """Where that is known from; empty: the check's own."""

    def as_json(self) -> dict[str, str]:
        return asdict(self)


def error(field: str, message: str, fix: str) -> Finding:
    """An error under the check's own code."""
    return Finding("", "error", field, message, fix)


def warning(field: str, message: str, fix: str) -> Finding:
    """A warning under the check's own code."""
    return Finding("", "warning", field, message, fix)


def info(field: str, message: str, fix: str) -> Finding:
    """Something worth knowing, under the check's own code."""
    return Finding("", "info", field, message, fix)


def not_checked(field: str, message: str, fix: str) -> Finding:
    """What could not be checked, and how it could be."""
    return Finding(NOT_CHECKED, "warning", field, message, fix)


def has_errors(findings: list[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
