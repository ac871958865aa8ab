"""A Markdown summary for the page of a GitHub Actions job: appended to the file that the runner names in GITHUB_STEP_SUMMARY."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raysd.errors import ArtifactError

VARIABLE = "GITHUB_STEP_SUMMARY"


def append_step_summary(markdown: str, environment: Mapping[str, str]) -> bool:
    """Appends to the file, if there is one; whether there was. Raises ArtifactError if it cannot be written."""
    named = environment.get(VARIABLE)
    if not named:
        return False
    try:
        with Path(named).open("a", encoding="utf-8") as file:
            file.write(markdown.rstrip() + "\n\n")
    except OSError as err:
        raise ArtifactError(what=f"the job's summary cannot be written: {err.strerror}", where=f"{VARIABLE}: {named}", fix="unset the variable, or let it name a file that can be written") from err
    return True
