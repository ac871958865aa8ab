"""Runs what the plan says has to run: one Ray job a stage, followed, retried when infrastructure failed, and stopped on the way out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from raysd.artifacts import Record, Store
from raysd.artifacts.stage import Progress
from raysd.errors import ArtifactError, ExperimentError, RaysdError, StageError, TryAgainError, from_dict
from raysd.pipeline.events import ErrorEvent, ProgressEvent, read_event
from raysd.pipeline.plan import PlannedStage
from raysd.pipeline.stages import Stage

ATTEMPTS = 3
BACKOFF_S = (5.0, 20.0)
"""Waits before the second and the third attempt."""

INFRASTRUCTURE = (
    "RUNTIME_ENV_SETUP_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
)
"""Ray's JobErrorType values that tell of the cluster and not of the stage."""


@dataclass(frozen=True)
class Job:
    """One attempt at one stage, as a Ray job."""

    id: str
    stage: str
    attempt: int


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended, by Ray's job table."""

    status: str
    """Ray's JobStatus."""
    error_type: str | None
    """Ray's JobErrorType."""
    exit_code: int | None
    """The entry script's exit code; negative: ended by that signal."""
    message: str


class JobClient(Protocol):
    """What the runner asks of a cluster's job server."""

    def attempts(self, prefix: str) -> list[int]:
        """Attempt numbers of the jobs whose id is the prefix and a number."""

    def submit(self, job: Job) -> None:
        """Submits the stage's entry script. Raises RaysdError if the job server does not take it."""

    def follow(self, job_id: str) -> Iterator[str]:
        """Lines of the job's log as they are written, each once, until the job has ended."""

    def outcome(self, job_id: str) -> JobOutcome:
        """How the job ended."""

    def stop(self, job_id: str) -> None:
        """Stops the job and returns once it has ended; does nothing for one that has."""


class Display(Protocol):
    """Shows a run to a person."""

    def stage_cached(self, stage: str) -> None:
        """The stage's artifact was found."""

    def stage_started(self, stage: str, attempt: int, why: str) -> Progress:
        """A stage's job was submitted; what it does is told to the Progress returned."""

    def stage_ended(self, stage: str, state: str, elapsed_s: float) -> None:
        """state: `done` or `failed`."""

    def note(self, text: str) -> None:
        """Something a person should know, in one line."""


@dataclass(frozen=True)
class StageResult:
    """What became of one stage."""

    stage: Stage
    state: Literal["done", "cached", "failed", "blocked"]
    elapsed_s: float
    artifact: Path | None
    """The artifact's folder on this machine; None if there is none."""

    def as_json(self) -> dict[str, Any]:
        """The stage as `raysd run --json` prints it."""
        return {
            "stage": self.stage.name,
            "state": self.state,
            "fingerprint": self.stage.fingerprint,
            "elapsed_s": round(self.elapsed_s, 1),
            "artifact": None if self.artifact is None else str(self.artifact),
        }


@dataclass(frozen=True)
class RunOutcome:
    """What became of a run."""

    stages: list[StageResult]
    error: RaysdError | None
    """Why it ended early: the failed stage's own error."""


def run_stages(
    planned: Sequence[PlannedStage],
    store: Store,
    connect: Callable[[], AbstractContextManager[JobClient]],
    display: Display,
    sleep: Callable[[float], None] = time.sleep,
) -> RunOutcome:
    """Runs, in order, the stages that the plan says have to run. A stage counts as done when its record is in the store.

    connect: entered once, if anything has to run; leaving it stops whatever it started. After a failure, stages that were found still
    count as cached and the others as blocked. KeyboardInterrupt and its like stop the running job and travel on; a RaysdError from
    `connect` travels on too.
    """
    if any(entry.state == "blocked" for entry in planned):
        first = next(entry for entry in planned if entry.state == "blocked")
        error = ArtifactError(
            what=f"the stage {first.stage.name} cannot run: {first.why}",
            where=store.folder(first.stage.key),
            fix="mend or delete what is named, and run again",
        )
        return RunOutcome([_not_run(entry, store) for entry in planned], error)
    if all(entry.state == "cached" for entry in planned):
        for entry in planned:
            display.stage_cached(entry.stage.name)
        return RunOutcome([_not_run(entry, store) for entry in planned], None)
    with connect() as client:
        results: list[StageResult] = []
        for place, entry in enumerate(planned):
            stage = entry.stage
            if entry.state == "cached":
                display.stage_cached(stage.name)
                results.append(_not_run(entry, store))
                continue
            started = time.monotonic()
            try:
                run_stage(stage, store, client, display, entry.why, sleep)
            except RaysdError as err:
                display.stage_ended(stage.name, "failed", time.monotonic() - started)
                failed = StageResult(stage, "failed", time.monotonic() - started, None)
                return RunOutcome([*results, failed, *(_not_run(later, store) for later in planned[place + 1 :])], err)
            results.append(StageResult(stage, "done", time.monotonic() - started, store.folder(stage.key)))
            display.stage_ended(stage.name, "done", time.monotonic() - started)
        return RunOutcome(results, None)


def run_stage(stage: Stage, store: Store, client: JobClient, display: Display, why: str, sleep: Callable[[float], None]) -> Record:
    """Submits jobs for a stage until its record is there; returns the record.

    Only infrastructure is retried: a JobErrorType that tells of the cluster, or exit code 75. Raises the worker's own error otherwise,
    with the job's log named in it.
    """
    prefix = f"raysd-{stage.name}-{stage.fingerprint[:12]}-a"
    folder = store.folder(stage.key)
    folder.mkdir(parents=True, exist_ok=True)
    for tried in range(1, ATTEMPTS + 1):
        attempt = 1 + max([0, *client.attempts(prefix), *_attempts_logged(folder)])
        job = Job(f"{prefix}{attempt}", stage.name, attempt)
        log = folder / f"job-a{attempt}.log"
        reported, outcome = _follow(job, client, log, display.stage_started(stage.name, attempt, why))
        record = store.record(stage.key)
        if record is not None:
            return record
        error = _explained(stage, outcome, reported, log)
        if not is_infrastructure(outcome) or tried == ATTEMPTS:
            raise error
        wait_s = BACKOFF_S[tried - 1]
        display.note(f"{stage.name}: attempt {attempt} failed ({error.what}); trying again in {wait_s:g} s")
        sleep(wait_s)
    raise AssertionError("the last attempt either returns or raises")


def is_infrastructure(outcome: JobOutcome) -> bool:
    """Whether a failed job may succeed when it is submitted again, unchanged."""
    return outcome.exit_code == TryAgainError.exit_code or outcome.error_type in INFRASTRUCTURE


def _follow(job: Job, client: JobClient, log: Path, progress: Progress) -> tuple[RaysdError | None, JobOutcome]:
    """Submits a job and keeps its log until it ends: the error that it reported, if it did, and the outcome."""
    reported = None
    try:
        client.submit(job)
        with log.open("w", encoding="utf-8") as file:
            for line in client.follow(job.id):
                event = read_event(line)
                if isinstance(event, ProgressEvent):
                    progress(event.doing, event.done, event.total, event.unit, **event.figures)
                    continue
                if isinstance(event, ErrorEvent):
                    reported = from_dict(event.error)
                file.write(line + "\n")
                file.flush()
        return reported, client.outcome(job.id)
    except RaysdError:
        raise  # the job server itself cannot be reached: there is nobody to ask for a stop
    except BaseException as interruption:
        try:
            client.stop(job.id)  # whatever the reason, nothing goes on running that nobody follows
        except RaysdError as err:
            interruption.add_note(f"the job {job.id} may still run: {err.what}; {err.fix}")
        raise


def _explained(stage: Stage, outcome: JobOutcome, reported: RaysdError | None, log: Path) -> RaysdError:
    """Why a job left no record: the worker's own error if it told one."""
    if reported is not None:
        return type(reported)(what=reported.what, where=f"{reported.where} (log: {log})", fix=reported.fix)
    where = f"stage {stage.name} (log: {log})"
    if is_infrastructure(outcome):
        return TryAgainError(
            what=f"the cluster did not run the job: {outcome.error_type or f'exit code {outcome.exit_code}'}: {outcome.message}",
            where=where,
            fix="check the cluster, and run again",
        )
    if outcome.exit_code == ExperimentError.exit_code:
        return ExperimentError(
            what=f"the entry script refused its arguments: {outcome.message}", where=where, fix="read the log named above"
        )
    if outcome.status == "STOPPED":
        return StageError(what="the job was stopped from outside", where=where, fix="run again to go on from its unfinished work")
    if outcome.status == "SUCCEEDED":
        return StageError(
            what=f"the job ended well and left no record of {stage.fingerprint[:12]} in the store",
            where=where,
            fix="check that the job's node and this machine see the same store, and that no input changed meanwhile",
        )
    if outcome.exit_code is not None and (outcome.exit_code < 0 or outcome.exit_code > 128):
        number = -outcome.exit_code if outcome.exit_code < 0 else outcome.exit_code - 128
        return StageError(
            what=f"the stage's process was ended by signal {number}" + (", as when memory runs out" if number == 9 else ""),
            where=where,
            fix="free memory or lower kv_cache_bytes, then run again" if number == 9 else "read the log named above",
        )
    return StageError(what=f"the job failed: {outcome.message}", where=where, fix="read the log named above")


def _not_run(entry: PlannedStage, store: Store) -> StageResult:
    if entry.state == "cached":
        return StageResult(entry.stage, "cached", 0.0, store.folder(entry.stage.key))
    return StageResult(entry.stage, "blocked", 0.0, None)


def _attempts_logged(folder: Path) -> list[int]:
    """Attempts whose logs are there: a local Ray's job table is gone with it, and a log is never written over."""
    return [int(number) for path in folder.glob("job-a*.log") if (number := path.stem.removeprefix("job-a")).isdigit()]
