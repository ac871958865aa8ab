"""Stages as Ray jobs: ships the code, submits, follows and stops through Ray's job server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import queue
import shlex
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import raysd
from raysd.backends.ray_driver import last_line
from raysd.errors import ExperimentError, RaysdError, TryAgainError
from raysd.experiment import Experiment, dump_experiment
from raysd.experiment.hardware import StageResources
from raysd.pipeline.runner import Job, JobExistsError, JobOutcome

STOP_WAIT_S = 30
"""How long a stage may take to stop its engines before Ray kills it."""

REACH_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
SUBMIT_TIMEOUT_S = 300.0
"""Uploads the code, and waits for the job's first process."""
POLL_S = 1.0
LOG_PATIENCE_S = 60.0
"""For the job server to notice that the node with a job's log has died."""
QUIET_S = 15.0
"""After so long without a line, the job's state is asked: a broken connection tells nothing by itself."""

PACKAGE = Path(raysd.__file__).parent


@contextlib.contextmanager
def connect_jobs(address: str, experiment: Experiment, store: str) -> Iterator[RayJobClient]:
    """A client for the job server of a running cluster, with the experiment and the code ready to be shipped.

    address: `http://HOST:PORT` of the job server, or `auto` for the cluster that this process runs in. store: as `--store` takes it. Raises
    RaysdError within seconds if nothing answers there.
    """
    with tempfile.TemporaryDirectory(prefix="raysd-") as scratch:
        working_dir = pack_working_dir(Path(scratch) / "job", experiment)
        yield RayJobClient(job_submission_client(address), working_dir, store, experiment)


def pack_working_dir(folder: Path, experiment: Experiment) -> Path:
    """Writes what a stage's job runs in: the entry scripts in `jobs/` and the resolved `experiment.yaml`; returns the folder."""
    (folder / "jobs").mkdir(parents=True)
    for script in jobs_folder().glob("*.py"):
        shutil.copy(script, folder / "jobs")
    (folder / "experiment.yaml").write_text(dump_experiment(experiment), encoding="utf-8")
    return folder


def jobs_folder() -> Path:
    """The entry scripts: inside the package in a wheel, beside it in a checkout."""
    return PACKAGE / "jobs" if (PACKAGE / "jobs").is_dir() else PACKAGE.parent / "jobs"


def entrypoint(stage: str, store: str, attempt: int) -> str:
    """The shell command of a stage's job."""
    # A job's PATH is the head's, which need not hold the environment that raysd is in; on another machine only `python` can be meant.
    python = f'"$(command -v {shlex.quote(sys.executable)} || command -v python)"'
    return f"exec {python} jobs/{stage}.py --experiment experiment.yaml --store {shlex.quote(store)} --attempt {attempt}"


def job_resources(experiment: Experiment, stage: str) -> StageResources:
    """What the job of a stage reserves: nothing for a training whose workers do, each for itself, or a sweep whose nodes do."""
    shared = stage == "train" and experiment.train is not None and experiment.train.workers > 1 or stage == "sweep" and (experiment.sweep.nodes > 1 or experiment.sweep.client == "other_node")
    return StageResources() if shared else experiment.hardware.of_stage(stage)


def resource_options(resources: StageResources) -> dict[str, Any]:
    """What a stage asks for, as `submit_job` takes it; nothing asked is nothing passed, so that the job runs on the head."""
    asked = {
        "entrypoint_num_cpus": resources.cpus,
        "entrypoint_num_gpus": resources.gpus,
        "entrypoint_memory": resources.memory_bytes,
        "entrypoint_resources": resources.custom,
    }
    return {name: value for name, value in asked.items() if value}


class RayJobClient:
    """The runner's JobClient over Ray's JobSubmissionClient."""

    def __init__(self, client: Any, working_dir: Path, store: str, experiment: Experiment) -> None:
        self._client = client
        self._working_dir = working_dir
        self._store = store
        self._experiment = experiment

    def attempts(self, prefix: str) -> list[int]:
        with explained("listing jobs"):
            ids = [job.submission_id or "" for job in within(CALL_TIMEOUT_S, self._client.list_jobs)]
        return [int(number) for job_id in ids if job_id.startswith(prefix) and (number := job_id.removeprefix(prefix)).isdigit()]

    def submit(self, job: Job) -> None:
        runtime_env = {
            "working_dir": str(self._working_dir),
            "py_modules": [str(PACKAGE)],
            "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **self._experiment.hardware.env},
        }
        stage = job.stage
        with explained(f"submitting {job.id}"):
            try:
                within(
                    SUBMIT_TIMEOUT_S,
                    self._client.submit_job,
                    entrypoint=entrypoint(stage.name, self._store, job.attempt),
                    submission_id=job.id,
                    runtime_env=runtime_env,
                    metadata={"experiment": stage.experiment, "stage": stage.name, "fingerprint": stage.fingerprint, "attempt": str(job.attempt)},
                    **resource_options(job_resources(self._experiment, stage.name)),
                )
            except RuntimeError as err:
                if "already exists" in str(err):
                    raise JobExistsError(what=f"there is a job {job.id} already", where="Ray's job server", fix="another run submitted it: follow it") from err
                raise

    def follow(self, job_id: str) -> Iterator[str]:
        told, rest = 0, ""
        for chunk in self._tail(job_id):
            *lines, rest = (rest + chunk).split("\n")
            yield from lines
            told += len(lines)
        # The connection may have broken early, and it may close before the last lines: the whole log says what is still to tell.
        give_up = time.monotonic() + LOG_PATIENCE_S
        while True:
            with explained(f"asking for {job_id}"):
                ended = self._has_ended(job_id)  # asked first: what is written before the end is then in the log that is read next
            try:
                lines = self.log(job_id).split("\n")
            except TryAgainError:
                if ended:
                    return  # the log was lost with the job's node: how it ended, the job server still knows
                if time.monotonic() > give_up:
                    raise
            else:
                give_up = time.monotonic() + LOG_PATIENCE_S
                complete = lines if ended and lines[-1] else lines[:-1]
                yield from complete[told:]
                told = max(told, len(complete))
                if ended:
                    return
            time.sleep(POLL_S)

    def log(self, job_id: str) -> str:
        with explained(f"reading the log of {job_id}"):
            return within(CALL_TIMEOUT_S, self._client.get_job_logs, job_id)

    def outcome(self, job_id: str) -> JobOutcome:
        with explained(f"asking for {job_id}"):
            info = within(CALL_TIMEOUT_S, self._client.get_job_info, job_id)
        return JobOutcome(
            status=info.status.value, error_type=info.error_type, exit_code=info.driver_exit_code, message=last_line(info.message)
        )

    def stop(self, job_id: str) -> None:
        with explained(f"stopping {job_id}"):
            if not self._is_known(job_id):
                return  # interrupted before the job server had it
            within(CALL_TIMEOUT_S, self._client.stop_job, job_id)
            give_up = time.monotonic() + STOP_WAIT_S + 15
            while not self._has_ended(job_id):
                if time.monotonic() > give_up:
                    raise TryAgainError(
                        what=f"the job {job_id} did not stop within {STOP_WAIT_S + 15} s",
                        where="Ray's job server",
                        fix=f"stop it by hand: ray job stop {job_id}",
                    )
                time.sleep(0.2)

    def _is_known(self, job_id: str) -> bool:
        return any(job.submission_id == job_id for job in within(CALL_TIMEOUT_S, self._client.list_jobs))

    def _has_ended(self, job_id: str) -> bool:
        return within(CALL_TIMEOUT_S, self._client.get_job_status, job_id).is_terminal()

    def _tail(self, job_id: str) -> Iterator[str]:
        """Pieces of the log as Ray pushes them; ends early, without an error, if the connection breaks."""
        import aiohttp

        loop = asyncio.new_event_loop()
        pieces = self._client.tail_job_logs(job_id)
        waiting: asyncio.Task[str] | None = None
        try:
            while True:
                waiting = waiting or loop.create_task(anext(pieces))
                loop.run_until_complete(asyncio.wait({waiting}, timeout=QUIET_S))
                if waiting.done():
                    done, waiting = waiting, None
                    yield done.result()
                elif self._has_ended(job_id):
                    return
        except (StopAsyncIteration, RuntimeError, OSError, aiohttp.ClientError):
            return  # the end, or a broken connection: `follow` reads on from the whole log
        finally:
            if waiting is not None:
                waiting.cancel()
                loop.run_until_complete(asyncio.wait({waiting}))
            loop.run_until_complete(pieces.aclose())
            loop.close()


def within(timeout_s: float, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the call returns or raises. Raises TimeoutError if it takes longer: Ray's client would wait for ever for a job server that went silent."""
    results: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((True, call(*args, **kwargs)))
        except BaseException as err:  # handed over, not kept
            results.put((False, err))

    threading.Thread(target=run, daemon=True).start()  # a daemon: one that hangs does not keep the process
    try:
        returned, value = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"the job server did not answer within {timeout_s:g} s") from None
    if returned:
        return value
    raise value


def job_submission_client(address: str) -> Any:
    """Ray's client for the job server at an address, as `connect_jobs` takes it. Raises as that does."""
    from ray.job_submission import JobSubmissionClient

    for name in ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they tell of packages that they upload, in the middle of our display
    if address == "auto":
        with explained("looking for the cluster that this process runs in", address):
            try:
                return JobSubmissionClient("auto")
            except ConnectionError as err:
                raise RaysdError(what="there is no Ray cluster on this machine", where="--address auto",
                                 fix="name its job server, http://HOST:8265, or leave --address out: then raysd starts a local Ray") from err
    address = check_reachable(address)
    hidden = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}  # Ray lets them win over the argument
    try:
        with explained("connecting to the job server", address):
            return JobSubmissionClient(address)
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


def check_reachable(address: str) -> str:
    """The address with its scheme. Raises RaysdError within seconds if nothing answers: Ray's own client would try for minutes."""
    url = address if "://" in address else f"http://{address}"
    if not url.startswith(("http://", "https://")):
        raise ExperimentError(
            what=f"{address!r} is not an address of Ray's job server",
            where="--address",
            fix="use http://HOST:8265, the dashboard's address (`ray://` and the GCS port do not take jobs)",
        )
    url = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/api/version", timeout=REACH_TIMEOUT_S):
            return url
    except urllib.error.HTTPError as err:
        if err.code in (401, 403):
            return url  # it is there and wants a token, which Ray's client sends
        raise _unreachable(url, f"it answers {err.code} {err.reason}") from err
    except (OSError, ValueError, http.client.HTTPException) as err:
        raise _unreachable(url, str(getattr(err, "reason", "")) or f"{type(err).__name__}: what answers does not speak HTTP") from err


def _unreachable(url: str, reason: str) -> RaysdError:
    return RaysdError(
        what=f"no Ray job server answers: {reason}",
        where=f"--address {url}",
        fix="start one with `ray start --head`, correct the address (the dashboard's, port 8265 by default), or leave --address out",
    )


@contextlib.contextmanager
def explained(doing: str, where: str = "Ray's job server") -> Iterator[None]:
    """Turns what Ray's client raises into an error that says what was being done."""
    from ray.exceptions import AuthenticationError, RayError

    try:
        yield
    except AuthenticationError as err:
        raise RaysdError(
            what=f"{doing}: the cluster wants a token, and the one here is missing or another",
            where=where,
            fix="set RAY_AUTH_TOKEN to the cluster's token",
        ) from err
    except (RayError, RuntimeError, ConnectionError, OSError, ValueError) as err:  # requests' errors are OSErrors
        raise TryAgainError(
            what=f"{doing}: {last_line(err)}", where=where, fix="check that the cluster is up, and run again"
        ) from err
