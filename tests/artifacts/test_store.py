"""The store, in a folder and on a real S3 server alike: what is published is found whole, and what is not is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, Record, Store
from raysd.artifacts.home import Home
from raysd.artifacts.lease import LeaseHeldError
from raysd.artifacts.record import SCHEMA, encode_record, read_record
from raysd.artifacts.store import Work
from raysd.errors import ArtifactError, DamagedError
from tests.records import make_record, publish_files, write_files

KEY = ArtifactKey("tiny", "train", "a" * 32)
FILES = {"draft.bin": b"weights", "sub/log.txt": b"fine"}


def record_of(out: Path, work: Work, key: ArtifactKey = KEY) -> Record:
    return make_record(key, out, folder=work.folder, metrics={"accepted": 1234})


def publish(store: Store, key: ArtifactKey = KEY, files: dict[str, bytes] = FILES) -> Record:
    return publish_files(store, key, files, metrics={"accepted": 1234})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_published_is_found_with_its_files(store: Store, new_home: Callable[[], Home]):
    assert (
        store.record(KEY) is None and store.newest_record("tiny", "train") is None and store.lease(KEY) is None and store.inventory() == []
    )
    record = publish(store)
    for seen in (store, Store(new_home())):
        assert seen.record(KEY) == record
        folder = seen.open(KEY)
        assert folder == seen.folder(KEY) / record.folder and contents(folder) == FILES and read_record(folder) == record
        assert seen.open(KEY) == folder
    assert [entry.key.removeprefix(KEY.prefix) for entry in store.home.list(KEY.prefix)] == [
        f"{record.folder}/draft.bin",
        f"{record.folder}/sub/log.txt",
        "lease-00001.json",
        "record.json",
    ]


def test_a_published_file_need_not_be_fetched_by_the_one_that_published_it(store: Store):
    record = publish(store)
    assert contents(store.folder(KEY) / record.folder) == FILES


def test_files_without_a_record_are_no_artifact(store: Store):
    store.home.put(f"{KEY.prefix}files-0123456789ab/draft.bin", b"half")
    assert store.record(KEY) is None
    with pytest.raises(ArtifactError, match="no train artifact"):
        store.open(KEY)


def test_a_publish_that_was_cut_short_is_done_again_without_its_leftovers(store: Store, new_home: Callable[[], Home]):
    with pytest.raises(ArtifactError), store.work_on(KEY, {}) as work:
        out = write_files(work.clear(), {"a-leftover.bin": b"of the first attempt", **FILES})
        record = record_of(out, work)
        (out / "sub" / "log.txt").unlink()
        work.publish(out, record)
    leftover = f"{KEY.prefix}{record.folder}/a-leftover.bin"
    assert store.home.get(leftover) is not None
    assert store.record(KEY) is None and Store(new_home()).record(KEY) is None and store.lease(KEY).state() == "failed"
    with pytest.raises(ArtifactError, match="no train artifact"):
        store.open(KEY)
    publish(Store(new_home()))
    for seen in (store, Store(new_home())):
        assert contents(seen.open(KEY)) == FILES
    assert store.home.get(leftover) is None


@pytest.mark.parametrize(
    ("content", "words"), [(b"weight", "6 bytes"), (b"weighty", "SHA-256"), (None, "missing")], ids=["truncated", "flipped", "deleted"]
)
def test_a_damaged_artifact_does_not_open_and_the_file_is_named(
    store: Store, new_home: Callable[[], Home], content: bytes | None, words: str
):
    file = f"{KEY.prefix}{publish(store).folder}/draft.bin"
    store.home.put(file, content) if content else store.home.delete([file])
    other = Store(new_home())
    for _ in range(2):
        with pytest.raises(DamagedError, match=words) as caught:
            other.open(KEY)
        assert caught.value.where == store.home.place(file) and f"delete {store.place(KEY)}" in caught.value.fix
    store.home.put(file, b"weights")
    assert contents(other.open(KEY)) == FILES


def test_a_flipped_digit_of_a_metric_is_refused(store: Store):
    publish(store)
    content = store.home.get(KEY.prefix + "record.json")
    assert content.count(b"1234") == 1
    store.home.put(KEY.prefix + "record.json", content.replace(b"1234", b"1235"))
    for ask in (store.record, store.open):
        with pytest.raises(ArtifactError, match="damaged") as caught:
            ask(KEY)
        assert caught.value.where == store.place(KEY, "record.json")


def test_a_newer_schema_asks_for_a_newer_raysd(store: Store):
    record = publish(store)
    store.home.put(KEY.prefix + "record.json", encode_record(record.model_copy(update={"record_schema": SCHEMA + 1})))
    with pytest.raises(ArtifactError) as caught:
        store.open(KEY)
    assert caught.value.fix == "upgrade raysd"


def test_a_record_that_names_a_file_outside_writes_nothing_there(store: Store, new_home: Callable[[], Home], tmp_path: Path):
    record = publish(store)
    evil = record.model_copy(update={"files": {**record.files, "../x": record.files["draft.bin"]}})
    store.home.put("tiny/train/x", b"weights")
    store.home.put(KEY.prefix + "record.json", encode_record(evil))
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match="does not parse"):
        Store(new_home()).open(KEY)
    assert contents(tmp_path) == before


def test_the_record_of_another_artifact_is_refused(store: Store):
    record = publish(store)
    other = replace(KEY, fingerprint="b" * 32)
    store.home.put(other.prefix + "record.json", encode_record(record))
    with pytest.raises(ArtifactError, match="record is that of tiny/train/aaaa"):
        store.record(other)


def test_the_newest_record_is_the_one_written_last(store: Store):
    publish(store, replace(KEY, fingerprint="b" * 32))
    time.sleep(1.1)  # S3 tells when in whole seconds
    publish(store)
    publish(store, replace(KEY, stage="quantize", fingerprint="c" * 32))
    assert store.newest_record("tiny", "train").fingerprint == KEY.fingerprint
    assert store.newest_record("tin", "train") is None and store.newest_record("other", "train") is None


def test_the_inventory_holds_what_is_there_and_deleting_takes_it_away(store: Store, new_home: Callable[[], Home]):
    unfinished = ArtifactKey("tiny", "quantize", "b" * 32)
    record = publish(store)
    with pytest.raises(KeyboardInterrupt), store.work_on(unfinished, {"train": KEY.fingerprint}):
        raise KeyboardInterrupt
    store.home.put("notes.txt", b"of a person")
    found = {each.key: each for each in store.inventory()}
    assert found.keys() == {KEY, unfinished}
    assert (
        found[KEY].size_bytes == sum(entry.size_bytes for entry in store.home.list(KEY.prefix))
        and found[KEY].entry(f"{record.folder}/draft.bin").size_bytes == 7
    )
    assert abs(found[KEY].modified_s - store.home.now_s()) < 60
    first, second = store.read_all([found[KEY], found[unfinished]])
    assert (first.record, first.lease.state(), first.error) == (record, "released", None)
    assert (second.record, second.lease.state(), second.lease.lease.inputs) == (None, "failed", {"train": KEY.fingerprint})
    store.home.put(unfinished.prefix + "record.json", b"{")
    first, second = store.read_all([found[KEY], {each.key: each for each in store.inventory()}[unfinished]])
    assert first.record == record and second.record is None and second.error.where == store.place(unfinished, "record.json")
    store.delete(found[KEY])
    assert store.record(KEY) is None and Store(new_home()).record(KEY) is None
    assert [each.key for each in store.inventory()] == [unfinished]
    assert not store.folder(KEY).exists() or not contents(store.folder(KEY) / record.folder)
    assert store.home.get("notes.txt") == b"of a person"


def test_a_log_is_kept_while_it_is_written_and_after_a_crash(store: Store, new_home: Callable[[], Home]):
    with pytest.raises(ZeroDivisionError), store.log(KEY, 2) as log:
        log.write("one")
        log.upload()
        assert Store(new_home()).read_log(KEY, 2) == "one\n"
        log.write("two \u2713")
        raise ZeroDivisionError
    assert Store(new_home()).read_log(KEY, 2) == "one\ntwo \u2713\n" and list(store.logs(KEY)) == [2] and store.read_log(KEY, 1) == ""


def test_the_lease_of_one_artifact_leaves_others_alone(store: Store):
    with store.work_on(KEY, {}):
        with pytest.raises(LeaseHeldError), store.work_on(KEY, {}):
            pass
        publish(store, replace(KEY, fingerprint="b" * 32))
