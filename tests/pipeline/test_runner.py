"""The runner's decisions. The cluster is scripted here, because supervisors do not die at will; `tests/backends` runs real jobs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts import LocalStore, Record
from raysd.errors import ArtifactError, ExperimentError, StageError, TryAgainError, to_dict
from raysd.experiment import load_experiment
from raysd.pipeline.display import PlainDisplay
from raysd.pipeline.events import ErrorEvent, write_event
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.runner import BACKOFF_S, Job, JobOutcome, run_stages
from raysd.pipeline.stages import Stage

DONE = JobOutcome("SUCCEEDED", None, 0, "Job finished successfully.")
DIED = JobOutcome("FAILED", "JOB_SUPERVISOR_ACTOR_DIED", None, "The supervisor died.")
COMMAND_ERROR = "JOB_ENTRYPOINT_COMMAND_ERROR"


def failed(exit_code: int) -> JobOutcome:
    return JobOutcome("FAILED", COMMAND_ERROR, exit_code, f"Job entrypoint command failed with exit code {exit_code}")


class ScriptedCluster:
    """Ends each job as the script says; a job that ends well leaves its record, as `raysd.pipeline.job` would."""

    def __init__(
        self,
        store: LocalStore,
        stages: dict[str, Stage],
        script: list[JobOutcome],
        lines: tuple[str, ...] = ("hello",),
        leaves_record: bool = True,
    ) -> None:
        self.store, self.stages, self.script, self.lines, self.leaves_record = store, stages, list(script), lines, leaves_record
        self.submitted: list[Job] = []
        self.stopped: list[str] = []
        self.taken: list[int] = []

    def attempts(self, prefix: str) -> list[int]:
        return self.taken

    def submit(self, job: Job) -> None:
        self.submitted.append(job)

    def follow(self, job_id: str) -> Iterator[str]:
        yield from self.lines

    def outcome(self, job_id: str) -> JobOutcome:
        outcome = self.script.pop(0)
        if outcome.status == "SUCCEEDED" and self.leaves_record:
            publish(self.store, self.stages[self.submitted[-1].stage])
        return outcome

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)


def publish(store: LocalStore, stage: Stage) -> None:
    out = store.work(stage.key) / "out"
    out.mkdir()
    at = "2026-01-01T00:00:00+00:00"
    store.publish(
        stage.key,
        out,
        Record(
            experiment=stage.experiment,
            stage=stage.name,
            fingerprint=stage.fingerprint,
            identity=stage.identity,
            section={},
            code_version="0",
            packages={},
            host={},
            metrics={},
            started=at,
            ended=at,
            elapsed_s=1.0,
            attempt=1,
            files={},
        ),
    )


class Bench:
    """A store, a chain of sweep and report, and what a run showed."""

    def __init__(self, store: LocalStore, stages: list[Stage]) -> None:
        self.store, self.stages = store, stages
        self.shown, self.slept, self.entered, self.left = io.StringIO(), [], 0, 0

    def cluster(self, *script: JobOutcome, **options: Any) -> ScriptedCluster:
        return ScriptedCluster(self.store, {stage.name: stage for stage in self.stages}, list(script), **options)

    def run(self, cluster: ScriptedCluster) -> Any:
        @contextmanager
        def connect() -> Iterator[ScriptedCluster]:
            self.entered += 1
            try:
                yield cluster
            finally:
                self.left += 1

        return run_stages(plan(self.stages, self.store), self.store, connect, PlainDisplay(self.shown), self.slept.append)


@pytest.fixture
def bench(tmp_path: Path, write_experiment: Callable[..., Path]) -> Bench:
    experiment = load_experiment(write_experiment(capture=None, train=None, quantize=None, sweep={"arms": ["none"]}))
    return Bench(LocalStore(tmp_path / "store"), stages_of(experiment))


def test_stages_run_in_order_and_are_done_by_their_records(bench: Bench):
    cluster = bench.cluster(DONE, DONE)
    outcome = bench.run(cluster)
    assert outcome.error is None
    assert [(result.stage.name, result.state) for result in outcome.stages] == [("sweep", "done"), ("report", "done")]
    sweep = bench.stages[0]
    assert cluster.submitted[0].id == f"raysd-sweep-{sweep.fingerprint[:12]}-a1"
    assert (bench.store.folder(sweep.key) / "job-a1.log").read_text() == "hello\n"
    assert outcome.stages[0].as_json().keys() == {"stage", "state", "fingerprint", "elapsed_s", "artifact"}


def test_nothing_is_connected_to_when_all_is_found(bench: Bench):
    bench.run(bench.cluster(DONE, DONE))
    again = bench.run(bench.cluster())
    assert [result.state for result in again.stages] == ["cached", "cached"] and bench.entered == 1


def test_a_job_that_succeeds_without_a_record_has_failed(bench: Bench):
    outcome = bench.run(bench.cluster(DONE, leaves_record=False))
    assert [result.state for result in outcome.stages] == ["failed", "blocked"]
    assert isinstance(outcome.error, StageError) and "left no record" in outcome.error.what and "job-a1.log" in outcome.error.where
    assert bench.left == 1


@pytest.mark.parametrize("first", [DIED, failed(75), JobOutcome("FAILED", "RUNTIME_ENV_SETUP_FAILURE", None, "no disk")])
def test_infrastructure_is_tried_again_with_growing_waits(bench: Bench, first: JobOutcome):
    cluster = bench.cluster(first, first, DONE, DONE)
    outcome = bench.run(cluster)
    assert outcome.error is None
    assert [job.attempt for job in cluster.submitted] == [1, 2, 3, 1]
    assert bench.slept == list(BACKOFF_S) and "trying again" in bench.shown.getvalue()


def test_infrastructure_that_stays_broken_ends_the_run_after_three_attempts(bench: Bench):
    cluster = bench.cluster(DIED, DIED, DIED, DONE)
    outcome = bench.run(cluster)
    assert isinstance(outcome.error, TryAgainError) and outcome.error.exit_code == 75
    assert "JOB_SUPERVISOR_ACTOR_DIED" in outcome.error.what and len(cluster.submitted) == 3


@pytest.mark.parametrize("exit_code", [1, 64, 137, -9])
def test_the_stages_own_failure_is_never_tried_again(bench: Bench, exit_code: int):
    cluster = bench.cluster(failed(exit_code), DONE)
    outcome = bench.run(cluster)
    assert outcome.error is not None and len(cluster.submitted) == 1 and bench.slept == []
    if exit_code in (137, -9):
        assert "signal 9" in outcome.error.what and "memory" in outcome.error.what


def test_the_workers_own_error_comes_out(bench: Bench):
    text = io.StringIO()
    write_event(ErrorEvent(to_dict(ExperimentError(what="k is 9", where="sweep.k", fix="use 1 to 8"))), text)
    outcome = bench.run(bench.cluster(failed(64), lines=("before", text.getvalue().rstrip())))
    assert type(outcome.error) is ExperimentError
    assert (outcome.error.what, outcome.error.fix) == ("k is 9", "use 1 to 8") and outcome.error.where.startswith("sweep.k (log: ")


def test_attempts_count_on_from_rays_table_and_from_the_logs_that_are_there(bench: Bench):
    cluster = bench.cluster(DONE, DONE)
    cluster.taken = [1, 4]
    bench.run(cluster)
    assert [job.attempt for job in cluster.submitted] == [5, 5]
    sweep = bench.stages[0]
    (bench.store.folder(sweep.key) / "record.json").unlink()
    later = bench.cluster(DONE)
    bench.run(later)
    assert later.submitted[0].attempt == 6


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_a_run_that_is_cut_short_stops_its_job(bench: Bench, interruption: type[BaseException]):
    class Interrupted(ScriptedCluster):
        def follow(self, job_id: str) -> Iterator[str]:
            yield "at work"
            raise interruption

    cluster = Interrupted(bench.store, {}, [])
    with pytest.raises(interruption):
        bench.run(cluster)
    assert cluster.stopped == [cluster.submitted[0].id] and bench.left == 1


def test_a_blocked_chain_submits_nothing(bench: Bench):
    bench.run(bench.cluster(DONE, DONE))
    (bench.store.folder(bench.stages[0].key) / "record.json").write_text("{")
    outcome = bench.run(bench.cluster())
    assert isinstance(outcome.error, ArtifactError) and "sweep" in outcome.error.what
    assert [result.state for result in outcome.stages] == ["blocked", "cached"] and bench.entered == 1
