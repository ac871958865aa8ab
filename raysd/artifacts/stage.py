"""What a stage function gets and gives: the contract between the pipeline and the folders that do the work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raysd.experiment import Experiment


class Progress(Protocol):
    """Called by a stage as it goes on; how it is shown is somebody else's concern."""

    def __call__(self, doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
        """doing: a few words, present tense; done of total units where the length is known; figures: numbers worth a glance, with
        units in their names."""


@dataclass(frozen=True)
class StageRun:
    """One run of a stage. The function writes files into `out` and returns metrics; it never touches the store itself."""

    experiment: Experiment
    inputs: dict[str, Path]
    """Stage name to the folder of its verified artifact, on this machine."""
    work: Path
    """Unfinished work that survives a failed attempt."""
    out: Path
    """Empty at the start; what is in it at the end becomes the artifact."""
    progress: Progress


StageFunction = Callable[[StageRun], dict[str, Any]]
"""A pure function of its experiment and its inputs to files and metrics. Raises RaysdError for what a user can mend."""
