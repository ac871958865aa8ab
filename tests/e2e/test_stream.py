"""Capture and training as one Ray job: `raysd run` as a user types it, killed in the middle and run again, with what it wrote on disks watched."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.tiny_chain import UNHURRIED, write_experiment
from tests.tiny_models import chained, tiny_llama

PATIENCE_S = 900
SWEEP = UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1], "k": [2], "blocks": 3, "requests_per_slot": 1, "workloads": [{"name": "report", "osl": 32}],
         "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}}
CAPTURE = {"mode": "stream", "engines": 2, "max_tokens": 48, "concurrency": 16, "shard_conversations": 16, "kv_cache_bytes": 268435456, "queue_bytes": 2**22}
TRAIN = {"steps": 90, "ttt_steps": 2, "lr": 2e-3, "truncated": "keep", "evaluations": 1, "served_checkpoints": 1, "served_k": 2, "served_tokens": 48, "checkpoint_every_s": 3.0}


@pytest.fixture
def spec(tmp_path) -> Path:
    """The tiny chain on a stream, with a wider target, so that its states are more than all else that a run writes."""
    path = write_experiment(tmp_path, capture=CAPTURE, train=TRAIN, quantize=None, sweep=SWEEP)
    shutil.rmtree(tmp_path / "target")
    chained(tiny_llama(tmp_path / "target", hidden=512))
    return path


@pytest.fixture
def scratch() -> Iterator[Path]:
    """Where Ray and everybody else put their temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="rs-"))  # short: the paths of Ray's sockets have a limit
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """Measures folders while something runs."""

    def __init__(self, *folders: Path) -> None:
        self._folders, self._stop = folders, threading.Event()
        self.most_bytes = dict.fromkeys(folders, 0)
        self.seen: set[str] = set()
        """Names of all files that were there at a time."""
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for folder in self._folders:
                total = 0
                for path in folder.rglob("*"):
                    with contextlib.suppress(OSError):  # it is gone by now
                        if path.is_file() and not path.is_symlink():
                            self.seen.add(path.name)
                            total += path.stat().st_size
                self.most_bytes[folder] = max(self.most_bytes[folder], total)


def start(spec: Path, scratch: Path, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "raysd", "run", str(spec), *arguments], start_new_session=True,
                            env={**os.environ, "RAY_TMPDIR": str(scratch), "TMPDIR": str(scratch)}, **options)


@pytest.mark.slow
def test_a_run_on_a_stream_that_is_killed_goes_on_and_ends_with_a_draft_that_is_accepted_and_no_state_on_a_disk(spec, scratch, tmp_path):
    runs = tmp_path / "runs"
    streams = set(Path("/dev/shm").glob("raysd-*"))
    with Watch(runs, scratch) as watch:
        with (tmp_path / "first").open("w") as shown:
            first = start(spec, scratch, stdout=shown, stderr=subprocess.STDOUT)
        until(lambda: list(runs.glob("tiny/train/*/work/*/checkpoint-*.pt.sum")) or first.poll() is not None, "a checkpoint is kept")
        assert first.poll() is None, (tmp_path / "first").read_text()[-4000:]
        started = psutil.Process(first.pid).children(recursive=True)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started), "everything of the killed run has ended")
        until(lambda: set(Path("/dev/shm").glob("raysd-*")) <= streams, "the states of the killed run have been deleted")
        again = start(spec, scratch, "--json", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, told = again.communicate(timeout=PATIENCE_S)
        assert again.returncode == 0, told[-4000:]
    run = json.loads(out)
    assert [(entry["stage"], entry["state"]) for entry in run["stages"]] == [(stage, "done") for stage in ("train", "sweep", "report")]
    assert run["acceptance_length"]["bf16"] > 1.05 and run["lossless"]["bf16"]["broken"] == 0
    metrics = json.loads((Path(run["stages"][0]["artifact"]) / "record.json").read_text())["metrics"]
    assert metrics["steps"] == 90 and metrics["conversations"] == 360 and 0 < metrics["resumed_steps"][0] < 90
    assert metrics["served"]["acceptance_length"] == pytest.approx(metrics["replay"]["acceptance_length"], rel=0.03)
    assert max(metrics["capture"]["hf_relative_error"].values()) < 0.05
    print(json.dumps({"states_bytes": metrics["capture"]["bytes"], **{str(folder): most for folder, most in watch.most_bytes.items()}}))
    # All of Ray's and everybody's temporary files, and the store but for the draft and its checkpoints, are a fraction of the states that went by.
    assert watch.most_bytes[scratch] < metrics["capture"]["bytes"] / 2
    tensors = {name for name in watch.seen if name.endswith((".safetensors", ".safetensors.part", ".pt", ".npy", ".bin"))}
    assert tensors <= {"model.safetensors", "checkpoint.pt", "checkpoint-0.pt", "checkpoint-1.pt"}
    assert set(Path("/dev/shm").glob("raysd-*")) <= streams


def until(true, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, what
        time.sleep(0.3)
