"""Ctrl-C as a terminal sends it: to every process of the foreground group at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil

from tests.tiny_chain import write_experiment

PATIENCE_S = 180


def test_ctrl_c_ends_the_run_with_everything_it_started_and_leaves_no_result(tmp_path):
    spec = write_experiment(tmp_path, capture={"max_tokens": 200, "concurrency": 1, "kv_cache_bytes": 2**28})
    with (tmp_path / "shown").open("w") as shown:
        run = subprocess.Popen([sys.executable, "-m", "raysd", "run", str(spec)], stdout=shown, stderr=subprocess.STDOUT, start_new_session=True,
                               # A shell's background jobs, and what they start, ignore SIGINT: a terminal's do not.
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "raysd.backends.capture_worker" not in _commands(run):
            assert run.poll() is None and time.monotonic() < deadline, (tmp_path / "shown").read_text()
            time.sleep(0.2)
        started = psutil.Process(run.pid).children(recursive=True)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(PATIENCE_S) == 130
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(PATIENCE_S)
    text = (tmp_path / "shown").read_text()
    assert "interrupted" in text and "Traceback" not in text
    gone_by = time.monotonic() + PATIENCE_S
    while left := [process for process in started if _is_alive(process)]:
        assert time.monotonic() < gone_by, left
        time.sleep(0.2)
    assert not list((tmp_path / "runs").glob("tiny/*/*/record.json"))


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _commands(run: subprocess.Popen) -> str:
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            found += process.cmdline()
        except psutil.NoSuchProcess:  # Ray's come and go
            continue
    return " ".join(found)
