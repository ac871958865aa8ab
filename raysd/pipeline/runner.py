"""Runs what the plan says has to run: one Ray job a stage, followed, retried by the class of its error, and stopped on the way out.

A stage that somebody else works on is followed until it is there; whether it is done is decided by its record alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raysd.artifacts import Record, Store, fingerprint
from raysd.artifacts.lease import Lease, LeaseHeldError, LeaseLostError
from raysd.artifacts.stage import Progress
from raysd.artifacts.store import KeptLog, log_name
from raysd.errors import DamagedError, EngineError, ExperimentError, RaysdError, StageError, TryAgainError, from_dict
from raysd.pipeline.events import ErrorEvent, ProgressEvent, read_event
from raysd.pipeline.plan import PlannedStage
from raysd.pipeline.stages import Stage

RETRIES = {"infrastructure": 2, "killed": 1, "engine": 1}
"""Class of an error to how often a stage is submitted again after one; any other error ends the run. A stage goes on from its unfinished work."""
BACKOFF_S = (5.0, 20.0)
"""Waits before a class's first and second retry."""
FOLLOW_POLL_S = 1.0
"""Between two looks at what somebody else does."""
FOLLOW_PATIENCE_S = 120.0
"""How long a store may not answer while somebody else works: they wait for it, too."""

INFRASTRUCTURE = (
    "RUNTIME_ENV_SETUP_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
    "JOB_SUPERVISOR_ACTOR_DIED",
    "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE",
)
"""Ray's JobErrorType values that tell of the cluster and not of the stage."""
KILLED = (-9, 137)
"""Exit codes of a process that was ended by SIGKILL."""


@dataclass(frozen=True)
class Job:
    """One attempt at one stage, as a Ray job."""

    id: str
    stage: Stage
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


class JobExistsError(TryAgainError):
    """Another runner has submitted a job under the same id."""


class JobClient(Protocol):
    """What the runner asks of a cluster's job server."""

    def attempts(self, prefix: str) -> list[int]:
        """Attempt numbers of the jobs whose id is the prefix and a number."""

    def submit(self, job: Job) -> None:
        """Submits the stage's entry script. Raises JobExistsError if there is one under the id, RaysdError if the job server does not take it."""

    def follow(self, job_id: str) -> Iterator[str]:
        """Lines of the job's log as they are written, each once, until the job has ended."""

    def log(self, job_id: str) -> str:
        """All that the job's log holds now."""

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

    def stage_followed(self, stage: str, owner: str) -> Progress:
        """Somebody else works on the stage; what they do is told to the Progress returned."""

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
    artifact: str | None
    """The artifact's place; None if there is none."""
    record: Record | None = None
    """The artifact's record, likewise."""

    def as_json(self) -> dict[str, Any]:
        """The stage as `raysd run --json` prints it."""
        return {
            "stage": self.stage.name,
            "state": self.state,
            "fingerprint": self.stage.fingerprint,
            "elapsed_s": round(self.elapsed_s, 1),
            "artifact": self.artifact,
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
    `connect` travels on too. While it runs, a lease in the store says so, by which `raysd stop` finds it: raises StageError if it was asked to stop.
    """
    if (error := blocked_error(planned, store)) is not None:
        return RunOutcome([_not_run(entry, store) for entry in planned], error)
    if all(entry.state == "cached" for entry in planned):
        for entry in planned:
            display.stage_cached(entry.stage.name)
        return RunOutcome([_not_run(entry, store) for entry in planned], None)
    with store.run_of(planned[0].stage.experiment, {entry.stage.name: entry.stage.fingerprint for entry in planned}), connect() as client:
        results: list[StageResult] = []
        for place, entry in enumerate(planned):
            stage = entry.stage
            if entry.state == "cached":
                display.stage_cached(stage.name)
                results.append(_not_run(entry, store))
                continue
            started = time.monotonic()
            try:
                record = run_stage(stage, store, client, display, entry.why, sleep)
            except RaysdError as err:
                display.stage_ended(stage.name, "failed", time.monotonic() - started)
                failed = StageResult(stage, "failed", time.monotonic() - started, None)
                return RunOutcome([*results, failed, *(_not_run(later, store) for later in planned[place + 1 :])], err)
            results.append(StageResult(stage, "done", time.monotonic() - started, store.place(stage.key), record))
            display.stage_ended(stage.name, "done", time.monotonic() - started)
        return RunOutcome(results, None)


def blocked_error(planned: Sequence[PlannedStage], store: Store) -> RaysdError | None:
    """Why a plan cannot be run; None if it can."""
    first = next((entry for entry in planned if entry.state == "blocked"), None)
    if first is None:
        return None
    return DamagedError(what=f"the stage {first.stage.name} cannot run: {first.why}", where=store.place(first.stage.key), fix="do what is said there, and run again")


def job_prefix(stage: Stage, store: Store) -> str:
    """What the ids of a stage's jobs start with, before the attempt's number: two stores may share a cluster, and two experiments a fingerprint."""
    return f"raysd-{stage.experiment}-{stage.name}-{stage.fingerprint[:12]}-{fingerprint(store.uri)[:8]}-a"


def run_stage(stage: Stage, store: Store, client: JobClient, display: Display, why: str, sleep: Callable[[float], None]) -> Record:
    """Follows or submits jobs for a stage until its record is there; returns the record.

    What is tried again, and how often, RETRIES says. Raises the worker's own error otherwise, with the job's log named in it.
    """
    prefix = job_prefix(stage, store)
    failures: Counter[str] = Counter()

    def asked(question: Callable[..., Any], *about: Any) -> Any:
        """The store's answer; as patient with it as with the cluster."""
        for wait_s in (*BACKOFF_S, None):
            try:
                return question(*about)
            except TryAgainError as err:
                if wait_s is None:
                    raise
                display.note(f"{stage.name}: {err.what}; asking again in {wait_s:g} s")
                sleep(wait_s)

    while (record := asked(store.record, stage.key)) is None:
        seen = asked(store.lease, stage.key)
        if seen is not None and seen.state() == "running":
            _follow_other(stage, store, client, prefix, seen.lease, display, sleep)
            if asked(store.record, stage.key) is None:
                _raise_other_error(stage, store)  # or else it was interrupted, or is stale: this run goes on with the stage
            continue
        attempt = 1 + max([0, *client.attempts(prefix), *asked(store.logs, stage.key), 0 if seen is None else seen.lease.number])
        while not asked(store.new_log, stage.key, attempt):
            attempt += 1
        job = Job(f"{prefix}{attempt}", stage, attempt)
        try:
            reported, outcome = _follow(job, store, client, display.stage_started(stage.name, attempt, why))
        except JobExistsError:
            _attach(stage, store, client, job.id, attempt, display.stage_followed(stage.name, f"the job {job.id} of another run"))
            reported, outcome = None, client.outcome(job.id)
        if asked(store.record, stage.key) is not None:
            continue
        error = _explained(stage, outcome, reported, store.place(stage.key, log_name(attempt)))
        if isinstance(error, (LeaseHeldError, LeaseLostError)):
            sleep(FOLLOW_POLL_S)
            continue  # somebody else was faster: followed from here
        kind = error_class(outcome, reported)
        if kind is None or failures[kind] == RETRIES[kind]:
            raise error
        wait_s = BACKOFF_S[failures[kind]]
        failures[kind] += 1
        display.note(f"{stage.name}: attempt {attempt} failed ({error.what}); trying again in {wait_s:g} s")
        sleep(wait_s)
    return record


def error_class(outcome: JobOutcome, reported: RaysdError | None) -> str | None:
    """The class in RETRIES of a job that left no record; None: the same would happen again."""
    if outcome.exit_code == TryAgainError.exit_code or outcome.error_type in INFRASTRUCTURE:
        return "infrastructure"
    if isinstance(reported, EngineError):
        return "engine"
    return "killed" if reported is None and outcome.exit_code in KILLED else None


def _follow(job: Job, store: Store, client: JobClient, progress: Progress) -> tuple[RaysdError | None, JobOutcome]:
    """Submits a job and keeps its log until it ends: the error that it reported, if it did, and the outcome."""
    with store.log(job.stage.key, job.attempt) as log:  # before the job: it looks for it, to see that its node shares the store (pipeline/job.py)
        try:
            client.submit(job)
            return _relay(client, job.id, log, progress), client.outcome(job.id)
        except JobExistsError:
            raise
        except RaysdError as err:  # the job server or the store cannot be reached
            err.add_note(f"if the job {job.id} still runs, the next `raysd run` follows it")
            raise
        except BaseException as interruption:
            try:
                client.stop(job.id)  # whatever the reason, nothing goes on running that nobody follows
                log.replace("".join(f"{line}\n" for line in client.log(job.id).splitlines() if not isinstance(read_event(line), ProgressEvent)))
            except RaysdError as err:
                interruption.add_note(f"the job {job.id} may still run: {err.what}; {err.fix}")
            raise


def _attach(stage: Stage, store: Store, client: JobClient, job_id: str, attempt: int, progress: Progress) -> None:
    """Shows what somebody else's job does until it ends, and keeps its log from the start: its own runner may be gone."""
    with store.log(stage.key, attempt) as log:
        _relay(client, job_id, log, progress)


def _relay(client: JobClient, job_id: str, log: KeptLog, progress: Progress) -> RaysdError | None:
    """Shows what a job does and writes its log until it ends; returns the error that it reported, if it did."""
    reported = None
    for line in client.follow(job_id):
        event = read_event(line)
        if isinstance(event, ProgressEvent):
            progress(event.doing, event.done, event.total, event.unit, **event.figures)
            continue
        if isinstance(event, ErrorEvent):
            reported = from_dict(event.error)
        log.write(line)
    return reported


def _follow_other(
    stage: Stage, store: Store, client: JobClient, prefix: str, lease: Lease, display: Display, sleep: Callable[[float], None]
) -> None:
    """Returns when a lease's owner no longer works on the stage. Nothing is stopped on the way out: the work is somebody else's."""
    progress = display.stage_followed(stage.name, lease.owner)
    number = lease.job.removeprefix(prefix)
    if number.isdigit() and int(number) in client.attempts(prefix):  # a job of this cluster, left by a runner that was killed, or followed by two
        _attach(stage, store, client, lease.job, int(number), progress)
    heard_s = time.monotonic()
    while True:
        try:
            seen = store.lease(stage.key)
            heard_s = time.monotonic()
        except TryAgainError as err:
            if time.monotonic() - heard_s > FOLLOW_PATIENCE_S:
                raise
            progress(f"the store does not answer: {err.what}")
        else:
            if seen is None or seen.state() != "running":
                return
            progress(seen.lease.doing)
        sleep(FOLLOW_POLL_S)


def _raise_other_error(stage: Stage, store: Store) -> None:
    """Raises the error that another run's attempt ended with, if the same would happen to this run."""
    seen = store.lease(stage.key)
    if seen is not None and seen.state() == "failed":
        error = from_dict(seen.lease.error)
        if not isinstance(error, (TryAgainError, EngineError)):
            raise type(error)(what=error.what, where=f"{error.where} (run by {seen.lease.owner})", fix=error.fix)


def _explained(stage: Stage, outcome: JobOutcome, reported: RaysdError | None, log: str) -> RaysdError:
    """Why a job left no record: the worker's own error if it told one. log: where the job's log is kept."""
    if reported is not None:
        return type(reported)(what=reported.what, where=f"{reported.where} (log: {log})", fix=reported.fix)
    where = f"stage {stage.name} (log: {log})"
    if outcome.exit_code == TryAgainError.exit_code or outcome.error_type in INFRASTRUCTURE:
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
        return StageResult(entry.stage, "cached", 0.0, store.place(entry.stage.key), entry.record)
    return StageResult(entry.stage, "blocked", 0.0, None)
