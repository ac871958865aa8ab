"""The runner's decisions. The cluster is scripted here, because supervisors do not die at will; `tests/backends` runs real jobs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.artifacts.lease import LeaseHeldError, hold_lease
from raysd.artifacts.store import RUN, KeptLog
from raysd.errors import ArtifactError, EngineError, ExperimentError, StageError, TryAgainError, to_dict
from raysd.experiment import load_experiment
from raysd.pipeline.display import PlainDisplay
from raysd.pipeline.events import ErrorEvent, write_event
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.runner import BACKOFF_S, Job, JobExistsError, JobOutcome, job_prefix, run_stages
from raysd.pipeline.stages import Stage
from tests.records import make_record, publish_stage

DONE = JobOutcome("SUCCEEDED", None, 0, "Job finished successfully.")
DIED = JobOutcome("FAILED", "JOB_SUPERVISOR_ACTOR_DIED", None, "The supervisor died.")
COMMAND_ERROR = "JOB_ENTRYPOINT_COMMAND_ERROR"


def failed(exit_code: int) -> JobOutcome:
    return JobOutcome("FAILED", COMMAND_ERROR, exit_code, f"Job entrypoint command failed with exit code {exit_code}")


class ScriptedCluster:
    """Ends each job as the script says; a job that ends well leaves its record, as `raysd.pipeline.job` would."""

    def __init__(
        self,
        store: Store,
        script: list[JobOutcome],
        lines: tuple[str, ...] = ("hello",),
        leaves_record: bool = True,
    ) -> None:
        self.store, self.script, self.lines, self.leaves_record = store, list(script), lines, leaves_record
        self.submitted: list[Job] = []
        self.stopped: list[str] = []
        self.taken: list[int] = []

    def attempts(self, prefix: str) -> list[int]:
        return self.taken

    def submit(self, job: Job) -> None:
        self.submitted.append(job)

    def follow(self, job_id: str) -> Iterator[str]:
        yield from self.lines

    def log(self, job_id: str) -> str:
        return "at work\nsaved a checkpoint while it was stopped\n"

    def outcome(self, job_id: str) -> JobOutcome:
        outcome = self.script.pop(0)
        if outcome.status == "SUCCEEDED" and self.leaves_record:
            publish_stage(self.store, self.submitted[-1].stage)
        return outcome

    def stop(self, job_id: str) -> None:
        self.stopped.append(job_id)


class Bench:
    """A store, a chain of sweep and report, and what a run showed."""

    def __init__(self, store: Store, stages: list[Stage]) -> None:
        self.store, self.stages = store, stages
        self.shown, self.slept, self.entered, self.left = io.StringIO(), [], 0, 0

    def cluster(self, *script: JobOutcome, **options: Any) -> ScriptedCluster:
        return ScriptedCluster(self.store, list(script), **options)

    def run(self, cluster: ScriptedCluster, sleep: Callable[[float], None] | None = None) -> Any:
        @contextmanager
        def connect() -> Iterator[ScriptedCluster]:
            self.entered += 1
            try:
                yield cluster
            finally:
                self.left += 1

        return run_stages(plan(self.stages, self.store), self.store, connect, PlainDisplay(self.shown), sleep or self.slept.append)


@pytest.fixture
def bench(tmp_path: Path, write_experiment: Callable[..., Path]) -> Bench:
    experiment = load_experiment(write_experiment(capture=None, train=None, quantize=None, sweep={"arms": ["none"]}))
    return Bench(Store(FolderHome(tmp_path / "store")), stages_of(experiment))


def test_stages_run_in_order_and_are_done_by_their_records(bench: Bench):
    cluster = bench.cluster(DONE, DONE)
    outcome = bench.run(cluster)
    assert outcome.error is None
    assert [(result.stage.name, result.state) for result in outcome.stages] == [("sweep", "done"), ("report", "done")]
    sweep = bench.stages[0]
    assert cluster.submitted[0].id == f"{job_prefix(sweep, bench.store)}1"
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


@pytest.mark.parametrize("exit_code", [1, 64, 139, -11])
def test_the_stages_own_failure_is_never_tried_again(bench: Bench, exit_code: int):
    cluster = bench.cluster(failed(exit_code), DONE)
    outcome = bench.run(cluster)
    assert outcome.error is not None and len(cluster.submitted) == 1 and bench.slept == []


@pytest.mark.parametrize("exit_code", [137, -9])
def test_a_killed_process_gets_one_more_attempt(bench: Bench, exit_code: int):
    cluster = bench.cluster(failed(exit_code), failed(exit_code), DONE)
    outcome = bench.run(cluster)
    assert len(cluster.submitted) == 2 and bench.slept == [BACKOFF_S[0]]
    assert "signal 9" in outcome.error.what and "memory" in outcome.error.what


def test_an_engine_that_died_gets_one_more_attempt(bench: Bench):
    text = io.StringIO()
    write_event(ErrorEvent(to_dict(EngineError(what="the engine died", where="log", fix="read it"))), text)
    cluster = bench.cluster(failed(1), failed(1), DONE, lines=(text.getvalue().rstrip(),))
    outcome = bench.run(cluster)
    assert len(cluster.submitted) == 2 and isinstance(outcome.error, EngineError)


def test_each_class_of_error_is_counted_by_itself(bench: Bench):
    cluster = bench.cluster(DIED, failed(137), DIED, DONE, DONE)
    assert bench.run(cluster).error is None
    assert bench.slept == [BACKOFF_S[0], BACKOFF_S[0], BACKOFF_S[1]]


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


class CutShort(ScriptedCluster):
    """Its jobs are interrupted as they are followed."""

    interruption: type[BaseException] = KeyboardInterrupt

    def follow(self, job_id: str) -> Iterator[str]:
        yield "at work"
        raise self.interruption


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_a_run_that_is_cut_short_stops_its_job_and_keeps_what_that_said_last(bench: Bench, interruption: type[BaseException]):
    cluster = CutShort(bench.store, [])
    cluster.interruption = interruption
    with pytest.raises(interruption):
        bench.run(cluster)
    assert cluster.stopped == [cluster.submitted[0].id] and bench.left == 1
    assert bench.store.read_log(bench.stages[0].key, 1) == cluster.log("")


def test_ctrl_c_stops_the_job_also_when_the_store_refuses_the_log(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    def refuse(log: KeptLog) -> None:
        if cluster.submitted:
            raise TryAgainError(what="the store does not answer", where="s3", fix="wait")

    cluster = CutShort(bench.store, [])
    monkeypatch.setattr(KeptLog, "upload", refuse)
    with pytest.raises(KeyboardInterrupt) as caught:
        bench.run(cluster)
    assert cluster.stopped == [cluster.submitted[0].id]
    assert any("the store does not answer" in note for note in caught.value.__notes__)


def test_a_run_that_cannot_reach_its_store_says_that_its_job_may_go_on(bench: Bench):
    class Lost(ScriptedCluster):
        def follow(self, job_id: str) -> Iterator[str]:
            yield "at work"
            raise ArtifactError(what="the credentials have expired", where="s3", fix="renew them")

    cluster = Lost(bench.store, [])
    outcome = bench.run(cluster)
    assert "expired" in outcome.error.what and cluster.stopped == []
    assert any(cluster.submitted[0].id in note for note in outcome.error.__notes__)


class Silent:
    """A home that does not answer some of the questions after the first ones."""

    def __init__(self, home: Any, after: int, refusals: int) -> None:
        self._home, self._after, self._refusals = home, after, refusals

    def __getattr__(self, name: str) -> Any:
        if name == "list":
            self._after -= 1
            if self._after < 0 and self._refusals > 0:
                self._refusals -= 1
                raise TryAgainError(what="the server does not answer", where="s3", fix="wait")
        return getattr(self._home, name)


@pytest.mark.parametrize("after", range(1, 12))
def test_a_short_silence_of_the_store_ends_neither_a_run_nor_a_follower(bench: Bench, after: int):
    other = other_run(bench, bench.stages[0])
    work, polls = other.__enter__(), []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 5:
            publish_by(work, bench)
            other.__exit__(None, None, None)

    planned, home = plan(bench.stages, bench.store), bench.store.home
    cluster = bench.cluster(DONE)
    outcome = run_stages(planned, Store(Silent(home, after, 2)), lambda: nullcontext(cluster), PlainDisplay(bench.shown), sleep)
    assert outcome.error is None and [result.state for result in outcome.stages] == ["done", "done"]


def test_two_runners_of_the_same_instant_never_write_one_log(bench: Bench):
    class Late(ScriptedCluster):
        def attempts(self, prefix: str) -> list[int]:
            bench.store.new_log(bench.stages[0].key, 1)  # the other's, since this one looked
            return []

    cluster = Late(bench.store, [DONE, DONE])
    assert bench.run(cluster).error is None and cluster.submitted[0].attempt == 2 and bench.store.read_log(bench.stages[0].key, 1) == ""


def test_jobs_of_two_stores_or_of_two_names_have_ids_of_their_own(bench: Bench, tmp_path: Path):
    stage = bench.stages[0]
    ids = {job_prefix(each, store) for each in (stage, replace(stage, experiment="another")) for store in (bench.store, Store(FolderHome(tmp_path / "another")))}
    assert len(ids) == 4 and job_prefix(stage, bench.store) in ids


def test_whoever_runs_is_seen_in_the_store_while_it_runs_and_not_after(bench: Bench):
    seen = []

    class Watched(ScriptedCluster):
        def follow(self, job_id: str) -> Iterator[str]:
            seen.extend(each.key for each in bench.store.inventory() if each.key.stage == RUN)
            return super().follow(job_id)

    assert bench.run(Watched(bench.store, [DONE, DONE])).error is None
    assert len(seen) == 2 and len(set(seen)) == 1 and not [each for each in bench.store.inventory() if each.key.stage == RUN]


def test_a_blocked_chain_submits_nothing(bench: Bench):
    bench.run(bench.cluster(DONE, DONE))
    (bench.store.folder(bench.stages[0].key) / "record.json").write_text("{")
    outcome = bench.run(bench.cluster())
    assert isinstance(outcome.error, ArtifactError) and "sweep" in outcome.error.what
    assert [result.state for result in outcome.stages] == ["blocked", "cached"] and bench.entered == 1


def other_run(bench: Bench, stage: Stage):
    """Somebody else who works on a stage."""
    return bench.store.work_on(stage.key, {})


def test_what_somebody_else_works_on_is_followed_and_not_submitted(bench: Bench):
    other = other_run(bench, bench.stages[0])
    work = other.__enter__()
    polls = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            publish_by(work, bench)
            other.__exit__(None, None, None)

    cluster = bench.cluster(DONE)
    outcome = bench.run(cluster, sleep)
    assert outcome.error is None and [job.stage.name for job in cluster.submitted] == ["report"]
    assert len(polls) == 3 and f"run by {work.held.lease.owner}; following" in bench.shown.getvalue() and cluster.stopped == []


def publish_by(work: Any, bench: Bench) -> None:
    stage, out = bench.stages[0], work.clear()
    work.publish(out, make_record(stage.key, out, folder=work.folder, identity=stage.identity))


def end_other(other: Any, error: BaseException) -> None:
    assert not other.__exit__(type(error), error, None)  # as at the end of a `with` that an error leaves


def test_a_followed_run_that_is_interrupted_is_gone_on_with(bench: Bench):
    other = other_run(bench, bench.stages[0])
    other.__enter__()
    cluster = bench.cluster(DONE, DONE)
    outcome = bench.run(cluster, lambda seconds: end_other(other, KeyboardInterrupt()))
    assert outcome.error is None and [job.stage.name for job in cluster.submitted] == ["sweep", "report"]
    assert cluster.submitted[0].attempt == 2  # the other's was the first


def test_a_followed_run_that_fails_ends_this_one_with_its_error(bench: Bench):
    other = other_run(bench, bench.stages[0])
    work = other.__enter__()
    cluster = bench.cluster(DONE)
    outcome = bench.run(cluster, lambda seconds: end_other(other, ExperimentError(what="k is 9", where="sweep.k", fix="use 1 to 8")))
    assert type(outcome.error) is ExperimentError and outcome.error.what == "k is 9" and work.held.lease.owner in outcome.error.where
    assert cluster.submitted == []


def test_a_job_that_finds_another_at_work_is_no_failure(bench: Bench):
    """Two runners with clusters of their own submit at the same moment; the job that is second to take the lease tells so."""
    other = other_run(bench, bench.stages[0])
    text = io.StringIO()
    write_event(ErrorEvent(to_dict(LeaseHeldError(what="is being run", where="x", fix="y"))), text)

    class Second(ScriptedCluster):
        def submit(self, job: Job) -> None:
            super().submit(job)
            if len(self.submitted) == 1:
                self.work = other.__enter__()

    def sleep(seconds: float) -> None:
        publish_by(cluster.work, bench)
        other.__exit__(None, None, None)

    cluster = Second(bench.store, [failed(75), DONE], lines=(text.getvalue().rstrip(),))
    assert bench.run(cluster, sleep).error is None
    assert [job.stage.name for job in cluster.submitted] == ["sweep", "report"] and "trying again" not in bench.shown.getvalue()


def test_a_job_of_the_same_id_is_followed(bench: Bench):
    """Two runners submit the same attempt to the same cluster: Ray takes one."""

    class Taken(ScriptedCluster):
        def submit(self, job: Job) -> None:
            super().submit(job)
            if job.stage.name == "sweep":
                raise JobExistsError(what="there is one", where="Ray", fix="follow it")

    cluster = Taken(bench.store, [DONE, DONE])
    assert bench.run(cluster).error is None and cluster.stopped == []


def test_a_stale_lease_is_taken_over_by_the_next_attempt(bench: Bench):
    stage = bench.stages[0]
    with hold_lease(bench.store.home, stage.key.prefix, "tiny", "sweep", stage.fingerprint, {}) as held:
        ended = held.lease.process.model_copy(update={"pid": 2**22 + 1})
        held.lease = held.lease.model_copy(update={"process": ended})
        held._write()
        cluster = bench.cluster(DONE, DONE)
        assert bench.run(cluster).error is None
    assert cluster.submitted[0].attempt == 2


def test_a_job_of_this_cluster_whose_runner_is_gone_is_shown_and_its_log_kept_from_the_start(bench: Bench):
    stage = bench.stages[0]
    prefix = job_prefix(stage, bench.store)
    other = bench.store.work_on(stage.key, {}, job=f"{prefix}1")
    work = other.__enter__()
    with bench.store.log(stage.key, 1) as log:
        log.write("cut sh")

    class Running(ScriptedCluster):
        def follow(self, job_id: str) -> Iterator[str]:
            yield "from the start"
            if job_id == f"{prefix}1":
                publish_by(work, bench)
                other.__exit__(None, None, None)
                yield "to the end"

    cluster = Running(bench.store, [DONE])
    cluster.taken = [1]
    assert bench.run(cluster).error is None
    assert [job.stage.name for job in cluster.submitted] == ["report"] and cluster.stopped == []
    assert bench.store.read_log(stage.key, 1) == "from the start\nto the end\n"
