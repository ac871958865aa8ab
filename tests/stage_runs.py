"""One attempt at a stage as a job makes it, for tests that call a stage function: a lease that is held, pieces that survive the attempt, scratch that does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.stage import Progress, StageRun, Stored, no_progress
from raysd.experiment import Experiment
from raysd.prompts.prompt_set import PromptSet, load_prompts

KEY = ArtifactKey("tiny", "stage", "0123456789abcdef0123456789abcdef")


@contextlib.contextmanager
def attempt(store: Path, experiment: Experiment, inputs: dict[str, Path] | None = None, progress: Progress = no_progress,
            whole: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext, elsewhere: Mapping[str, Stored] | None = None) -> Iterator[StageRun]:
    """An attempt at the one artifact of a store in a folder, with the prompts of the experiment if there are any (a report needs none). Later attempts
    at the same store find what this one keeps, and delete its scratch and `out`."""
    with Store(FolderHome(store)).work_on(KEY, {}) as work:
        out = work.clear()
        prompts = load_prompts(experiment.prompts) if experiment.prompts.path.exists() else PromptSet(())
        yield StageRun(experiment=experiment, prompts=prompts, inputs=inputs or {}, pieces=work.pieces, work=work.scratch, out=out, progress=progress, whole=whole,
                       elsewhere=elsewhere or {})


def piece(store: Path, name: str) -> Path:
    """Where the newest piece of a name lies in such a store, or a folder of pieces, for tests that count or damage them; it may be absent."""
    work = FolderHome(store).local(f"{KEY.prefix}work")
    return max(work.glob(f"[0-9]*/{name}"), default=work / name)
