"""The Ray of one run beside others on the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysd.backends.local_ray import local_ray
from raysd.backends.ray_jobs import job_submission_client

OTHER = """
import ray
context = ray.init(address="local", include_dashboard=False, num_cpus=1, object_store_memory=80 * 2**20, _node_ip_address="127.0.0.1", configure_logging=False)
print("at", context.address_info["gcs_address"], flush=True)
input()
"""
DRIVER = """
from raysd.backends.ray_driver import connected
with connected("a test", "here"):
    import ray
    print("at", ray.get_runtime_context().gcs_address)
"""
PATIENCE_S = 120


@pytest.fixture
def folder(monkeypatch) -> Iterator[Path]:
    """Where Ray puts its files; short, since the paths of its sockets have a limit."""
    folder = Path(tempfile.mkdtemp(prefix="rl-"))
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def another_ray() -> Iterator[str]:
    """Its GCS address."""
    process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"})
    try:
        yield next(line.split()[1] for line in iter(process.stdout.readline, "") if line.startswith("at "))
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_a_job_connects_to_the_ray_that_it_runs_in_and_no_file_of_it_stays(folder, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    with contextlib.ExitStack() as others:
        addresses = {others.enter_context(another_ray()) for _ in range(2)}
        with local_ray() as address:
            client = job_submission_client(address)
            job = client.submit_job(entrypoint=f"{sys.executable} {tmp_path / 'driver.py'}")
            give_up = time.monotonic() + PATIENCE_S
            while not client.get_job_status(job).is_terminal():
                assert time.monotonic() < give_up
                time.sleep(0.5)
            log = client.get_job_logs(job)
            (own,) = folder.glob("raysd-*/ray_current_cluster")
            assert f"at {own.read_text()}" in log and own.read_text() not in addresses
    assert not list(folder.glob("raysd-*"))
