"""The store: what is published is found whole, what is not is not there, and two writers never meet."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, LocalStore, Record, describe_files
from raysd.errors import ArtifactError

KEY = ArtifactKey("tiny", "train", "a" * 32)


def record_of(folder: Path, key: ArtifactKey = KEY, ended: str = "2026-01-01T00:01:00+00:00") -> Record:
    return Record(
        experiment=key.experiment,
        stage=key.stage,
        fingerprint=key.fingerprint,
        identity={"stage": key.stage, "inputs": {}},
        section={},
        code_version="0",
        packages={},
        host={},
        metrics={},
        started=ended,
        ended=ended,
        elapsed_s=1.0,
        attempt=1,
        files=describe_files(folder),
    )


def write_out(store: LocalStore, key: ArtifactKey = KEY) -> Path:
    out = store.work(key) / "out"
    (out / "sub").mkdir(parents=True)
    (out / "draft.bin").write_bytes(b"weights")
    (out / "sub" / "log.txt").write_text("fine")
    return out


def test_what_is_published_is_found_with_its_files(tmp_path: Path):
    store = LocalStore(tmp_path / "store")
    assert store.record(KEY) is None and store.records("tiny", "train") == []
    out = write_out(store)
    home = store.publish(KEY, out, record_of(out))
    assert store.open(KEY) == home == store.folder(KEY)
    assert (home / "draft.bin").read_bytes() == b"weights" and (home / "sub" / "log.txt").read_text() == "fine"
    assert not (home / "work").exists()
    assert store.record(KEY).files.keys() == {"draft.bin", "sub/log.txt"}


def test_files_without_a_record_are_no_artifact(tmp_path: Path):
    store = LocalStore(tmp_path)
    write_out(store)
    (store.folder(KEY) / "draft.bin").write_bytes(b"half")
    assert store.record(KEY) is None
    with pytest.raises(ArtifactError, match="no train artifact"):
        store.open(KEY)


def test_a_publish_that_was_cut_short_can_be_done_again(tmp_path: Path):
    store = LocalStore(tmp_path)
    out = write_out(store)
    (store.folder(KEY) / "draft.bin").write_bytes(b"of the attempt before")
    (store.folder(KEY) / "record.json.part").write_text("{")
    store.publish(KEY, out, record_of(out))
    assert (store.open(KEY) / "draft.bin").read_bytes() == b"weights"


def test_a_damaged_artifact_does_not_open(tmp_path: Path):
    store = LocalStore(tmp_path)
    out = write_out(store)
    (store.publish(KEY, out, record_of(out)) / "draft.bin").write_bytes(b"weight")
    with pytest.raises(ArtifactError, match="draft.bin"):
        store.open(KEY)


def test_records_come_newest_first(tmp_path: Path):
    store = LocalStore(tmp_path)
    for letter, ended in (("a", "2026-01-01T00:00:00+00:00"), ("b", "2026-03-01T00:00:00+00:00"), ("c", "2026-02-01T00:00:00+00:00")):
        key = ArtifactKey("tiny", "train", letter * 32)
        out = write_out(store, key)
        store.publish(key, out, record_of(out, key, ended))
    assert [record.fingerprint[0] for record in store.records("tiny", "train")] == ["b", "c", "a"]
    assert store.records("other", "train") == []


def test_a_store_that_is_a_file_or_lies_below_one_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="not a folder"):
        LocalStore(tmp_path / "file")
    with pytest.raises(ArtifactError, match="cannot be written") as caught:
        LocalStore(tmp_path / "file" / "below").check_writable()
    assert str(tmp_path / "file") in caught.value.where


HOLDER = """
import sys, time
from raysd.artifacts import ArtifactKey, LocalStore
with LocalStore(sys.argv[1]).lock(ArtifactKey("tiny", "train", "a" * 32)):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(store: Path, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(store), str(seconds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_waits_until_the_first_lets_go(tmp_path: Path):
    first = hold(tmp_path, 0.6)
    started = time.monotonic()
    with LocalStore(tmp_path).lock(KEY):
        waited_s = time.monotonic() - started
        assert first.poll() is not None or waited_s > 0.2
    assert waited_s > 0.2
    assert first.wait(10) == 0


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path):
    first = hold(tmp_path, 600)
    first.kill()
    first.wait(10)
    started = time.monotonic()
    with LocalStore(tmp_path).lock(KEY):
        assert time.monotonic() - started < 5


def test_locks_of_different_artifacts_do_not_meet(tmp_path: Path):
    first = hold(tmp_path, 600)
    try:
        with LocalStore(tmp_path).lock(ArtifactKey("tiny", "train", "b" * 32)):
            assert first.poll() is None
    finally:
        first.kill()
        first.wait(10)
