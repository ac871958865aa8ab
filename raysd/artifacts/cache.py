"""The folder where raysd keeps copies of what it can fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """RAYSD_CACHE, or else ~/.cache/raysd. It may be absent."""
    return Path(os.environ.get("RAYSD_CACHE") or Path.home() / ".cache" / "raysd")
