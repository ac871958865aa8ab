"""What `raysd gc` takes and what it leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.artifacts.lease import lease_key
from raysd.artifacts.resolved import Resolved, encode_resolved
from raysd.artifacts.store import RUN, Found
from raysd.errors import ArtifactError, ExperimentError, StageError
from raysd.pipeline.garbage import delete_garbage, find_garbage, read_age_s
from tests.records import AT, publish_files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(FolderHome(tmp_path / "store"))


def key(stage: str, letter: str, experiment: str = "tiny") -> ArtifactKey:
    return ArtifactKey(experiment, stage, letter * 32)


def publish(store: Store, stage: str, letter: str, age_s: float, inputs: dict[str, str] | None = None, experiment: str = "tiny") -> None:
    made = {name: source * 32 for name, source in (inputs or {}).items()}
    publish_files(store, key(stage, letter, experiment), {"data": letter.encode()}, identity={"stage": stage, "inputs": made})
    make_older(store, key(stage, letter, experiment), age_s)


def make_older(store: Store, of: ArtifactKey, age_s: float) -> None:
    for path in store.folder(of).rglob("*"):
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)


def resolve(store: Store, stages: dict[str, str], experiment: str = "tiny") -> None:
    """Makes a name stand for these stages, as a run does before it begins."""
    store.now_resolved(Resolved(experiment=experiment, target={}, stages={stage: letter * 32 for stage, letter in stages.items()}, resolved=AT))


def gone(store: Store, older_than_s: float = 0.0) -> set[str]:
    return {f"{each.key.experiment}/{each.key.stage}/{each.key.fingerprint[0]}" for each in find_garbage(store, older_than_s).artifacts}


@pytest.fixture
def two(store: Store) -> Store:
    """A store with a first experiment, and a second of the same name that goes on from the first's capture."""
    publish(store, "capture", "a", 500)
    publish(store, "train", "b", 400, {"capture": "a"})
    publish(store, "report", "c", 300, {"capture": "a", "train": "b"})
    publish(store, "train", "d", 200, {"capture": "a"})
    publish(store, "report", "e", 100, {"capture": "a", "train": "d"})
    publish(store, "sweep", "f", 900, experiment="other")
    resolve(store, {"sweep": "f"}, "other")
    return store


def test_the_newest_experiment_and_what_it_refers_to_stay(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    assert gone(two) == {"tiny/train/b", "tiny/report/c"}
    assert gone(two, older_than_s=350) == {"tiny/train/b"}
    before = {entry.key for entry in two.home.list("")}
    deleted = delete_garbage(two, find_garbage(two, 0))
    after = {entry.key for entry in two.home.list("")}
    assert {entry.split("/")[2][0] for entry in before - after} == {"b", "c"} and gone(two) == set()
    assert {each.key.fingerprint[0] for each in deleted.artifacts} == {"b", "c"} and not two.folder(key("train", "b")).exists()


def test_an_experiment_that_was_found_again_is_the_newest_whatever_was_written_last(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    resolve(two, {"capture": "a", "train": "b", "report": "c"})
    assert gone(two) == {"tiny/train/d", "tiny/report/e"}


def test_a_stage_that_was_made_again_with_other_placement_takes_nothing_else_along(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    two.delete(next(each for each in two.inventory() if each.key == key("train", "d")))
    publish_files(two, key("train", "d"), {"data": b"d"}, section={"train": {"checkpoint_every_s": 5}}, identity={"stage": "train", "inputs": {"capture": "a" * 32}})
    assert gone(two) == {"tiny/train/b", "tiny/report/c"}


@pytest.mark.parametrize("mark", [None, b"", b"{", b"newer", b"a folder"], ids=["absent", "empty", "cut", "newer", "a folder"])
def test_where_nobody_can_tell_what_a_name_stands_for_all_of_it_stays(two: Store, mark: bytes | None):
    if mark == b"newer":
        mark = encode_resolved(Resolved(experiment="tiny", target={}, stages={}, resolved=AT, resolved_schema=2))
    if mark == b"a folder":
        two.home.local("tiny/experiment.json").mkdir()
    elif mark is not None:
        two.home.put("tiny/experiment.json", mark)
    garbage = find_garbage(two, 0)
    assert garbage.artifacts == [] and len(garbage.left) == 1 and garbage.left[0].startswith("all of tiny: ")


def test_what_runs_and_what_it_reads_stay(two: Store):
    resolve(two, {"report": "e"})
    with two.work_on(key("quantize", "9"), {"train": "b" * 32}):
        assert gone(two) == {"tiny/report/c"}
    assert gone(two) == {"tiny/report/c", "tiny/train/b", "tiny/quantize/9"}


def test_all_that_somebody_runs_stays_between_its_stages_too(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    with two.run_of("tiny", {"train": "b" * 32, "report": "c" * 32, "sweep": "7" * 32}):
        assert gone(two) == set()
    assert gone(two) == {"tiny/train/b", "tiny/report/c"}


def test_the_lease_of_a_runner_that_was_killed_goes(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    with two.run_of("tiny", {}) as held:
        lease = held.lease.model_copy(update={"process": held.lease.process.model_copy(update={"started": 1.0})})
        two.home.put(lease_key(key(RUN, "8").prefix, 1), lease.model_copy(update={"fingerprint": "8" * 32}).model_dump_json().encode())
    assert gone(two) == {"tiny/train/b", "tiny/report/c", f"tiny/{RUN}/8"}


def test_unfinished_work_goes_once_it_is_old(store: Store):
    resolve(store, {})
    with pytest.raises(StageError), store.work_on(key("train", "b"), {}) as work:
        work.clear()
        (work.scratch / "checkpoint").write_bytes(b"x" * 1000)
        work.pieces.keep("checkpoint", work.scratch / "checkpoint")
        raise StageError(what="x", where="y", fix="z")
    assert gone(store, 3600) == set()
    make_older(store, key("train", "b"), 7200)
    assert gone(store, 3600) == {"tiny/train/b"} and find_garbage(store, 3600).size_bytes > 1000


@pytest.mark.parametrize("begun", ["of the artifact", "that reads it", "of all"])
def test_what_somebody_has_begun_to_need_since_the_look_is_not_deleted(two: Store, begun: str):
    resolve(two, {"report": "e"})
    garbage = find_garbage(two, 0)
    assert {each.key.stage for each in garbage.artifacts} == {"train", "report"}
    work = {
        "of the artifact": lambda: two.work_on(key("train", "b"), {}),
        "that reads it": lambda: two.work_on(key("quantize", "9"), {"train": "b" * 32}),
        "of all": lambda: two.run_of("tiny", {"train": "b" * 32}),
    }[begun]
    with work():
        deleted = delete_garbage(two, garbage)
        assert two.record(key("train", "b")) is not None
    assert {each.key.stage for each in deleted.artifacts} == {"report"} and two.record(key("report", "c")) is None


def test_a_run_that_begins_while_artifacts_are_deleted_keeps_the_rest_of_what_it_needs(two: Store, monkeypatch: pytest.MonkeyPatch):
    resolve(two, {"report": "e"})
    for letter in "123":
        publish(two, "sweep", letter, 500)
    delete, first = Store.delete, []

    def slow(store: Store, found: Found) -> None:
        delete(store, found)
        if not first:
            first.append(found.key)
            resolve(two, {"train": "b", "report": "c", "sweep": "3"})

    monkeypatch.setattr(Store, "delete", slow)
    garbage = find_garbage(two, 0)
    order = sorted(garbage.artifacts, key=lambda each: each.key != key("sweep", "1"))
    deleted = delete_garbage(two, replace(garbage, artifacts=order))
    assert first == [key("sweep", "1")] and {each.key.fingerprint[0] for each in deleted.artifacts} == {"1", "2"}
    assert all(two.record(key(*each)) is not None for each in (("train", "b"), ("report", "c"), ("sweep", "3"), ("capture", "a")))


def test_leftovers_beside_a_finished_artifact_go_and_it_stays(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    prefix = key("train", "d").prefix
    left = {f"{prefix}work/00001/checkpoint-0.pt", f"{prefix}files-aaaaaaaaaaaa/draft.bin"}
    for name in left:
        two.home.put(name, b"left")
    assert find_garbage(two, 3600).leftovers == []
    garbage = find_garbage(two, 0)
    assert {entry.key for entry in garbage.leftovers} == left and garbage.size_bytes > 8
    delete_garbage(two, garbage)
    assert not any(two.home.get(name) for name in left) and two.open(key("train", "d")).joinpath("data").read_bytes() == b"d"


def test_a_name_that_stands_for_it_again_since_the_look_keeps_it(two: Store):
    resolve(two, {"report": "e"})
    garbage = find_garbage(two, 0)
    resolve(two, {"report": "c"})
    delete_garbage(two, garbage)
    assert two.record(key("report", "c")) is not None and two.record(key("train", "b")) is not None


def test_what_is_damaged_is_named_and_left_to_a_person(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    (two.folder(key("train", "b")) / "record.json").write_text("{")
    garbage = find_garbage(two, 0)
    assert [each.key.stage for each in garbage.artifacts] == ["report"] and garbage.left[0].startswith(two.place(key("train", "b")))


def test_where_a_folder_cannot_be_read_all_of_its_experiment_stays(two: Store, monkeypatch: pytest.MonkeyPatch):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    listed = FolderHome.list

    def partly(home: FolderHome, prefix: str, skipped: list | None = None) -> list:
        if skipped is not None:
            skipped.append(ArtifactError(what="the store cannot be read: Permission denied", where=two.place(key("report", "e")), fix="make it readable"))
        return [entry for entry in listed(home, prefix) if "e" * 32 not in entry.key]

    monkeypatch.setattr(FolderHome, "list", partly)
    garbage = find_garbage(two, 0)
    assert garbage.artifacts == [] and len(garbage.left) == 2 and garbage.left[1].startswith("all of tiny: ")


def test_a_corrupt_lease_beside_a_good_record_stops_nothing(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    two.home.put(lease_key(key("train", "b").prefix, 1), b"{")
    delete_garbage(two, find_garbage(two, 0))
    assert two.record(key("train", "b")) is None and two.record(key("report", "c")) is None


def test_what_raysd_did_not_write_is_never_touched(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    foreign = ["notes.txt", "tiny/notes.part", f"photos/2024/{'0' * 32}/a.jpg", f"tiny/train/{'1' * 32}/thesis.pdf", f"tiny/train/{'1' * 32}/work/x.part",
               f"tiny/backup/{'2' * 32}/record.json", ".download.part"]
    for name in foreign:
        two.home.put(name, b"somebody's")
    garbage = find_garbage(two, 0)
    assert garbage.uploads == [] and {each.key.fingerprint[0] for each in garbage.artifacts} == {"b", "c"} and garbage.left == []
    delete_garbage(two, garbage)
    assert all(two.home.get(name) == b"somebody's" for name in foreign)


def test_parts_of_files_that_a_killed_writer_left_go_and_are_named(two: Store):
    resolve(two, {"capture": "a", "train": "d", "report": "e"})
    part = two.folder(key("train", "d")) / f".record.json.{'0' * 12}.part"
    part.write_bytes(b"half")
    garbage = find_garbage(two, 0)
    assert [entry.key for entry in garbage.uploads] == [f"{key('train', 'd').prefix}{part.name}"]
    delete_garbage(two, garbage)
    assert not part.exists() and two.record(key("train", "d")) is not None


@pytest.mark.parametrize(("text", "age_s"), [("0s", 0), ("90m", 5400), ("12h", 43200), ("30d", 2592000), ("2w", 1209600)])
def test_ages(text: str, age_s: int):
    assert read_age_s(text) == age_s


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5d", "30 d", "1y", "\u0663d", "\u00b2d", "99999999999d"])
def test_what_is_no_age_is_refused(text: str):
    with pytest.raises(ExperimentError, match="not an age"):
        read_age_s(text)
