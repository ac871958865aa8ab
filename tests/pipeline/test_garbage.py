"""What `raysd gc` takes and what it leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.errors import ExperimentError, StageError
from raysd.pipeline.garbage import delete_garbage, find_garbage, read_age_s
from tests.records import publish_files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(FolderHome(tmp_path / "store"))


def key(stage: str, letter: str, experiment: str = "tiny") -> ArtifactKey:
    return ArtifactKey(experiment, stage, letter * 32)


def publish(store: Store, stage: str, letter: str, section: dict, age_s: float, inputs: dict[str, str] | None = None, experiment: str = "tiny") -> None:
    made = {name: source * 32 for name, source in (inputs or {}).items()}
    publish_files(store, key(stage, letter, experiment), {"data": letter.encode()}, section=section, identity={"stage": stage, "inputs": made})
    make_older(store, key(stage, letter, experiment), age_s)


def make_older(store: Store, of: ArtifactKey, age_s: float) -> None:
    for path in store.folder(of).rglob("*"):
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def gone(store: Store, older_than_s: float = 0.0) -> set[str]:
    return {f"{each.key.experiment}/{each.key.stage}/{each.key.fingerprint[0]}" for each in find_garbage(store, older_than_s).artifacts}


def test_the_newest_experiment_and_what_it_refers_to_stay(store: Store):
    first, second = {"train": {"lr": 1}}, {"train": {"lr": 2}}
    publish(store, "capture", "a", first, 500)  # made by the first, and read by the second
    publish(store, "train", "b", first, 400, {"capture": "a"})
    publish(store, "report", "c", first, 300, {"capture": "a", "train": "b"})
    publish(store, "train", "d", second, 200, {"capture": "a"})
    publish(store, "report", "e", second, 100, {"capture": "a", "train": "d"})
    publish(store, "sweep", "f", {"of": "another"}, 900, experiment="other")
    assert gone(store) == {"tiny/train/b", "tiny/report/c"}
    assert gone(store, older_than_s=350) == {"tiny/train/b"}
    before = {entry.key for entry in store.home.list("")}
    delete_garbage(store, find_garbage(store, 0))
    after = {entry.key for entry in store.home.list("")}
    assert {entry.split("/")[2][0] for entry in before - after} == {"b", "c"} and gone(store) == set()
    assert not store.folder(key("train", "b")).exists()


def test_what_runs_and_what_it_reads_stay(store: Store):
    publish(store, "capture", "a", {"of": "an older experiment"}, 500)
    publish(store, "sweep", "f", {"of": "the newest"}, 100)
    with store.work_on(key("train", "b"), {"capture": "a" * 32}):
        assert gone(store) == set()
    assert gone(store) == {"tiny/capture/a", "tiny/train/b"}


def test_unfinished_work_goes_once_it_is_old(store: Store):
    with pytest.raises(StageError), store.work_on(key("train", "b"), {}) as work:
        work.clear()
        (work.scratch / "checkpoint").write_bytes(b"x" * 1000)
        work.pieces.keep("checkpoint", work.scratch / "checkpoint")
        raise StageError(what="x", where="y", fix="z")
    assert gone(store, 3600) == set()
    make_older(store, key("train", "b"), 7200)
    assert gone(store, 3600) == {"tiny/train/b"} and find_garbage(store, 3600).size_bytes > 1000


def test_work_that_began_after_the_look_is_not_deleted(store: Store):
    publish(store, "sweep", "f", {"of": "the newest"}, 0)
    publish(store, "train", "b", {"of": "older"}, 500)
    garbage = find_garbage(store, 0)
    with store.work_on(key("train", "b"), {}):
        delete_garbage(store, garbage)
        assert store.record(key("train", "b")) is not None


def test_what_is_damaged_is_named_and_left_to_a_person(store: Store):
    publish(store, "train", "b", {"of": "older"}, 500)
    publish(store, "sweep", "f", {"of": "the newest"}, 0)
    (store.folder(key("train", "b")) / "record.json").write_text("{")
    garbage = find_garbage(store, 0)
    assert garbage.artifacts == [] and garbage.damaged == [store.place(key("train", "b"))]


@pytest.mark.parametrize(("text", "age_s"), [("0s", 0), ("90m", 5400), ("12h", 43200), ("30d", 2592000), ("2w", 1209600)])
def test_ages(text: str, age_s: int):
    assert read_age_s(text) == age_s


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5d", "30 d", "1y"])
def test_what_is_no_age_is_refused(text: str):
    with pytest.raises(ExperimentError, match="not an age"):
        read_age_s(text)
