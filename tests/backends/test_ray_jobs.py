"""The runner against a real Ray: real jobs, a real store; the stages themselves are small scripts."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from raysd.artifacts import FolderHome, Store
from raysd.backends import ray_jobs
from raysd.backends.local_ray import local_ray
from raysd.errors import ExperimentError, RaysdError
from raysd.experiment import load_experiment
from raysd.experiment.hardware import StageResources
from raysd.pipeline import display
from raysd.pipeline.display import PlainDisplay
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.runner import job_prefix, run_stages

SCRIPT = """
import sys, time
from pathlib import Path
from raysd.backends.stores import open_store
from raysd.errors import ExperimentError
from raysd.pipeline.job import Edges, main

def work(run):
    {body}

raise SystemExit(main("{stage}", lambda: Edges({{"{stage}": work}}, open_store)))
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with local_ray() as address:
        yield address


@pytest.fixture
def run(
    address: str, tmp_path: Path, write_experiment: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """Runs a sweep and a report whose stage functions have the given bodies; real jobs, real store."""
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # must not win over the address that was asked for
    hardware = {"resources": {"report": {"cpus": 0.5}}, "env": {"RAYSD_TEST_WORD": "merged"}}
    experiment = load_experiment(write_experiment(capture=None, train=None, quantize=None, sweep={"arms": ["none"]}, hardware=hardware))
    store = Store(FolderHome(tmp_path / "runs"))

    def go(sweep: str, report: str = "(run.out / 'report.html').write_text('ok'); return {}", stream=None) -> SimpleNamespace:
        scripts = tmp_path / f"scripts-{time.monotonic_ns()}"
        working_dir = ray_jobs.pack_working_dir(scripts, experiment)
        for stage, body in (("sweep", sweep), ("report", report)):
            (working_dir / "jobs" / f"{stage}.py").write_text(SCRIPT.format(stage=stage, body=body))
        client = ray_jobs.RayJobClient(
            ray_jobs.job_submission_client(address), working_dir, store.uri, experiment
        )
        planned = plan(stages_of(experiment), store)
        outcome = run_stages(
            planned, store, lambda: nullcontext(client), PlainDisplay(stream or (tmp_path / "shown.txt").open("w")), sleep=lambda _: None
        )
        return SimpleNamespace(outcome=outcome, client=client, store=store, states=[result.state for result in outcome.stages])

    return go


def test_two_stages_run_as_jobs_and_are_found_the_next_time(run, capfd):
    first = run(
        "import os; run.progress('counting', 1, 2, 'cells'); print('a line'); (run.out / 'cells.txt').write_text('3'); "
        "return {'cells': 3, 'threads': os.environ.get('OMP_NUM_THREADS'), 'word': os.environ['RAYSD_TEST_WORD']}",
        "assert (run.inputs['sweep'] / 'cells.txt').read_text() == '3'; (run.out / 'report.html').write_text('ok'); return {}",
    )
    assert first.outcome.error is None, first.outcome.error
    assert "INFO" not in capfd.readouterr().err  # Ray is quiet beside our display
    assert first.states == ["done", "done"]
    sweep = first.outcome.stages[0]
    record = first.store.record(sweep.stage.key)
    assert (
        record.metrics == {"cells": 3, "threads": None, "word": "merged"}
        and list(record.files) == ["cells.txt"]
        and record.attempt >= 1
        and "ray" in record.packages
    )
    log = first.store.read_log(sweep.stage.key, record.attempt)
    assert "a line" in log and "counting" not in log
    info = first.client._client.get_job_info(f"{job_prefix(sweep.stage, first.store)}{record.attempt}")
    assert info.metadata.items() >= {"experiment": "tiny", "stage": "sweep", "fingerprint": sweep.stage.fingerprint, "attempt": str(record.attempt)}.items()
    assert first.store.lease(sweep.stage.key).lease.job == info.submission_id
    assert run("raise AssertionError('must not run again')").states == ["cached", "cached"]


def test_a_failed_stage_raises_its_own_error_with_the_log_named_and_leaves_nothing(run):
    failed = run("raise ExperimentError(what='k is 9', where='sweep.k', fix='use 1 to 8')")
    error = failed.outcome.error
    assert failed.states == ["failed", "blocked"]
    first_log = _log_named_in(error)
    assert type(error) is ExperimentError and error.what == "k is 9" and first_log.is_file()
    assert failed.store.record(failed.outcome.stages[0].stage.key) is None
    unexpected = run("raise ValueError('seven')").outcome.error
    assert "ValueError: seven" in unexpected.what
    assert _log_named_in(unexpected) != first_log and "Traceback" in _log_named_in(unexpected).read_text()


def _log_named_in(error: RaysdError) -> Path:
    return Path(error.where.partition("log: ")[2].rstrip(")"))


def test_an_interrupted_run_stops_its_job_and_lets_it_clear_up(run, tmp_path, monkeypatch):
    marker = tmp_path / "cleared"

    class Interrupting:
        """A terminal at which somebody presses Ctrl-C once the stage has said what it is doing."""

        def write(self, text: str) -> int:
            if (tmp_path / "at-work").exists():
                raise KeyboardInterrupt
            return len(text)

        def flush(self) -> None:
            pass

    body = (
        f"import os; Path({str(tmp_path / 'at-work')!r}).write_text(str(os.getpid()))\n"
        "    try:\n        [(run.progress(f'waiting {i}'), time.sleep(0.1)) for i in range(600)]\n"
        f"    finally:\n        Path({str(marker)!r}).touch()"
    )
    monkeypatch.setattr(display, "LINE_INTERVAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        run(body, stream=Interrupting())
    assert marker.exists()
    assert _has_ended(int((tmp_path / "at-work").read_text()))


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_ray_listens_on_loopback_only(address):
    own = psutil.Process()
    listening = []
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's workers come and go
            listening += [connection.laddr for connection in process.net_connections(kind="tcp") if connection.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    outside = [place for place in listening if not _is_loopback(place.ip)]
    assert outside == []


def _is_loopback(ip: str) -> bool:
    parsed = ipaddress.ip_address(ip)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def test_a_cluster_that_wants_another_token_says_so(address, monkeypatch):
    monkeypatch.setattr(
        "ray.dashboard.modules.dashboard_sdk.get_auth_headers_if_auth_enabled", lambda headers: {"authorization": "Bearer wrong"}
    )
    with pytest.raises(RaysdError, match="token") as caught:
        ray_jobs.job_submission_client(address)
    assert caught.value.exit_code == 1 and "RAY_AUTH_TOKEN" in caught.value.fix


def test_an_address_where_nothing_answers_is_refused_within_seconds():
    started = time.monotonic()
    with pytest.raises(RaysdError) as caught:
        ray_jobs.job_submission_client("http://127.0.0.1:9")
    assert caught.value.exit_code == 1 and "127.0.0.1:9" in caught.value.where
    assert time.monotonic() - started < 10


def test_a_ray_client_address_is_refused_as_wrong_usage():
    with pytest.raises(ExperimentError, match="job server"):
        ray_jobs.job_submission_client("ray://127.0.0.1:10001")


def test_only_what_a_stage_asks_for_is_passed_to_ray():
    assert ray_jobs.resource_options(StageResources()) == {}
    assert ray_jobs.resource_options(StageResources(gpus=8, custom={"node": 1})) == {
        "entrypoint_num_gpus": 8,
        "entrypoint_resources": {"node": 1},
    }


def test_a_job_server_that_goes_silent_is_given_up_on():
    silent = threading.Event()
    started = time.monotonic()
    with pytest.raises(RaysdError, match="did not answer within 0.2 s"), ray_jobs.explained("asking for a job"):
        ray_jobs.within(0.2, silent.wait)
    assert time.monotonic() - started < 10
    silent.set()
    with pytest.raises(KeyError):
        ray_jobs.within(5, {}.__getitem__, "absent")
    assert ray_jobs.within(5, max, 1, 2) == 2
