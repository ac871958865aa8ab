"""What a stage function gets and gives: the contract between the pipeline and the folders that do the work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from raysd.experiment import Experiment

if TYPE_CHECKING:
    from raysd.artifacts.store import ArtifactKey


class Progress(Protocol):
    """Called by a stage as it goes on; how it is shown is somebody else's concern."""

    def __call__(self, doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
        """doing: a few words, present tense; done of total units where the length is known; figures: numbers worth a glance, with
        units in their names."""


class Prompts(Protocol):
    """The prompts of an experiment (prompts/prompt_set.py)."""

    measured: Mapping[str, Any]
    """Those of a workload's own, by its name."""

    def split(self, name: Any, limit: int | None = None) -> list[Any]:
        """The prompts of one split, or its first `limit`. Raises ExperimentError if it holds fewer, or none."""

    def alone(self, name: Any) -> Any:
        """The same without the prompts of the other splits."""


class Kept(Protocol):
    """Finished pieces of the unfinished artifact (artifacts/pieces.py): they survive the attempt, and are whole or not there."""

    def keep(self, name: str, path: Path) -> Path:
        """Keeps a finished file under a name; returns where it is now. The file may be moved."""

    def find(self, name: str) -> Path | None:
        """The file kept under a name, on this machine; None if there is none that is whole."""


@dataclass(frozen=True)
class Stored:
    """Where a process on another machine opens an artifact. It can be pickled."""

    store: str
    """As `--store` takes it."""
    key: ArtifactKey


@dataclass(frozen=True)
class StageRun:
    """One run of a stage. The function writes files into `out` and returns metrics; it never touches the store itself."""

    experiment: Experiment
    """A target of the Hugging Face hub is pinned in it: `target.revision` is the commit that the fingerprint is of."""
    prompts: Prompts
    """Those that the fingerprint is of, whatever their files hold by now."""
    inputs: dict[str, Path]
    """Stage name to the folder of its verified artifact, on this machine."""
    pieces: Kept
    """Finished pieces, of this attempt and those before."""
    work: Path
    """This attempt's own folder, gone when the artifact is there."""
    out: Path
    """Empty at the start; what is in it at the end becomes the artifact."""
    progress: Progress
    """Raises LeaseLostError if another run has taken the stage over."""
    whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    """`with run.whole():` what an interruption must not cut in two: SIGTERM and Ctrl-C wait until its end."""
    elsewhere: Mapping[str, Stored] = field(default_factory=dict)
    """Inputs, by stage, whose folder is this machine's own; all others are on a file system that the machines share."""


StageFunction = Callable[[StageRun], dict[str, Any]]
"""A pure function of its experiment and its inputs to files and metrics. Raises RaysdError for what a user can mend."""


def no_progress(doing: str, done: float | None = None, total: float | None = None, unit: str = "", **figures: float) -> None:
    """A Progress that shows nothing."""
