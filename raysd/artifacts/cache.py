"""The folder where raysd keeps copies of what it can fetch again."""

from __future__ import annotations

import os
from pathlib import Path

from raysd.errors import ExperimentError


def cache_folder() -> Path:
    """RAYSD_CACHE, or else ~/.cache/raysd. It may be absent. Raises ExperimentError if there is no home folder either."""
    try:
        return Path(os.environ.get("RAYSD_CACHE") or "~/.cache/raysd").expanduser()
    except RuntimeError as err:  # a container's user need not be in the password file
        raise ExperimentError(what=f"there is no folder for copies of what can be fetched again: {err}", where="RAYSD_CACHE", fix="set it to a folder") from err
