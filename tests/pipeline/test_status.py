"""What is in a store, who works on it, and how that is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.lease import Process, lease_key
from raysd.artifacts.store import RUN
from raysd.errors import StageError, TryAgainError
from raysd.pipeline.status import newest, statuses, stop
from tests.records import publish_files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(FolderHome(tmp_path / "store"))


def key(stage: str, letter: str = "a", experiment: str = "tiny") -> ArtifactKey:
    return ArtifactKey(experiment, stage, letter * 32)


def told(store: Store) -> dict[str, str]:
    return {status.key.stage: status.state for status in statuses(store)}


def test_states_come_from_records_and_leases_alone(store: Store):
    publish_files(store, key("capture"), {"a": b"1"})
    with pytest.raises(StageError), store.work_on(key("train"), {}):
        raise StageError(what="the loss is nan", where="train", fix="lower train.lr")
    with store.work_on(key("quantize"), {}) as work:
        work.held.doing = "quantizing"
        work.held._write(doing="quantizing")
        assert told(store) == {"capture": "done", "train": "failed", "quantize": "running"}
        why = {status.key.stage: status.why for status in statuses(store)}
        assert why["train"] == "the loss is nan" and why["quantize"] == "quantizing"
        lease = work.held.lease
        ended = lease.model_copy(update={"process": lease.process.model_copy(update={"pid": 2**22 + 1})})
        store.home.put(lease_key(key("quantize").prefix, 1), ended.model_dump_json().encode())
        assert told(store)["quantize"] == "stale"
    owners = {status.owner for status in statuses(store)}
    assert all("@" in owner for owner in owners)


def test_a_damaged_record_is_one_failed_line_and_hides_nothing(store: Store):
    publish_files(store, key("capture"), {"a": b"1"})
    publish_files(store, key("train"), {"a": b"1"})
    path = store.folder(key("train")) / "record.json"
    path.write_text(path.read_text().replace('"elapsed_s": 1.0', '"elapsed_s": 2.0'))
    assert told(store) == {"capture": "done", "train": "failed"}


def test_a_damaged_lease_beside_a_good_record_changes_nothing(store: Store):
    publish_files(store, key("capture"), {"a": b"1"})
    store.home.put(lease_key(key("capture").prefix, 1), b"{")
    assert told(store) == {"capture": "done"}


def test_logs_without_a_lease_and_foreign_files_are_no_artifact(store: Store):
    with store.log(key("train"), 1) as log:
        log.write("the cluster was down")
    for name in ("notes.txt", "tiny/train/notes/x", "tiny/other/" + "a" * 32 + "/record.json"):
        store.home.put(name, b"{}")
    assert told(store) == {}


def test_the_newest_of_each_stage_comes_first(store: Store):
    for letter, age_s in (("a", 300), ("b", 100), ("c", 200)):
        publish_files(store, key("train", letter), {"a": b"1"})
        for path in store.folder(key("train", letter)).rglob("*"):
            os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    assert [status.key.fingerprint[0] for status in statuses(store)] == ["b", "c", "a"]
    assert [status.key.fingerprint[0] for status in newest(statuses(store))] == ["b"]


AT_WORK = """
import sys, time
from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.signals import raise_when_terminated
raise_when_terminated()
with {held}:
    print("at work", flush=True)
    time.sleep(600)
"""
WORKER = 'Store(FolderHome(sys.argv[1])).work_on(ArtifactKey("tiny", "train", "a" * 32), {})'
RUNNER = 'Store(FolderHome(sys.argv[1])).run_of("tiny", {"train": "a" * 32})'


@contextlib.contextmanager
def another_process(store: Store, held: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds something of the store, until it is stopped or the test ends."""
    process = subprocess.Popen([sys.executable, "-c", AT_WORK.format(held=held), store.uri], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "at work\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_stop_ends_a_worker_that_only_shares_the_store(store: Store):
    with another_process(store, WORKER) as process:
        assert stop(store, "other") == []
        assert [status.key.stage for status in stop(store, "tiny")] == ["train"]
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1 and "ended with `raysd stop`" in said
    [status] = statuses(store)
    assert status.state == "failed" and "raysd stop" in status.why
    assert [entry.key for entry in store.home.list("") if entry.key.endswith(".stop")] == []


def test_stop_ends_a_runner_that_works_on_no_stage_now(store: Store):
    with another_process(store, RUNNER) as process:
        assert told(store) == {}  # it is no artifact
        assert [status.key.stage for status in stop(store, "tiny")] == [RUN]
        _, said = process.communicate(timeout=30)
        assert process.returncode == 1 and "ended with `raysd stop`" in said
    assert store.home.list("") == []


def test_an_owner_that_hangs_is_not_called_stopped_and_is_asked_nothing_later(store: Store):
    with another_process(store, WORKER) as process:
        process.send_signal(signal.SIGSTOP)
        lease = lease_key(key("train").prefix, 1)
        path = store.home.local(lease)

        def sleep(seconds: float) -> None:  # the heartbeat is missed by more than STALE_S
            os.utime(path, (path.stat().st_mtime - 40,) * 2)

        with pytest.raises(TryAgainError, match="has not stopped train") as caught:
            stop(store, "tiny", sleep)
        assert caught.value.exit_code == 75
    assert [entry.key for entry in store.home.list("") if entry.key.endswith(".stop")] == []


def test_this_process_has_not_ended_and_another_boots_may_live():
    this = Process.this()
    assert not this.has_ended()
    assert this.model_copy(update={"pid": 2**22 + 1}).has_ended()
    assert this.model_copy(update={"started": this.started + 1}).has_ended()  # the number is another process's now
    assert not this.model_copy(update={"pid": 2**22 + 1, "boot": "another machine"}).has_ended()
