"""What a plan says of each stage, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.artifacts.resolved import Resolved
from raysd.errors import ArtifactError, DamagedError, ExperimentError, StageError
from raysd.experiment import load_experiment
from raysd.experiment.hardware import StageResources
from raysd.pipeline.plan import PLAN_HEADER, PlannedStage, block, plan
from raysd.pipeline.preflight import check_same_target, resolve, stages_of
from tests.records import publish_stage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(FolderHome(tmp_path / "store"))


@pytest.fixture
def planned(write_experiment: Callable[..., Path], store: Store) -> Callable[..., dict[str, PlannedStage]]:
    return lambda **changes: {entry.stage.name: entry for entry in plan(stages_of(load_experiment(write_experiment(**changes))), store)}


def test_an_empty_store_means_that_all_has_to_run(planned, store):
    entries = planned()
    assert {entry.state for entry in entries.values()} == {"run"}
    assert entries["capture"].why == "never run"
    assert entries["train"].why == "input capture runs"
    assert entries["sweep"].why == "input train runs; input quantize runs"
    assert not store.home.root.exists()


def test_what_has_a_record_is_cached(planned, store):
    for entry in planned().values():
        publish_stage(store, entry.stage)
    assert {entry.state for entry in planned().values()} == {"cached"}


def test_a_changed_value_is_named_with_before_and_after(planned, store):
    for entry in planned(train={"lr": 0.001}).values():
        publish_stage(store, entry.stage)
    entries = planned(train={"lr": 0.0005})
    assert entries["capture"].state == "cached"
    assert (entries["train"].state, entries["train"].why) == ("run", "train.lr changed: 0.001 -> 0.0005")
    assert entries["quantize"].why == "input train runs"


def test_the_record_that_was_written_last_is_compared_whatever_the_clocks_of_their_runners_said(planned, store):
    publish_stage(store, planned(capture={"max_tokens": 32})["capture"].stage, ended="2026-01-02T00:00:00+00:00")
    publish_stage(store, planned(capture={"max_tokens": 64})["capture"].stage, ended="2026-01-01T00:00:00+00:00")
    assert planned(capture={"max_tokens": 128})["capture"].why == "capture.max_tokens changed: 64 -> 128"


def test_an_input_that_was_swapped_for_another_found_one_is_named(planned, store):
    for entry in planned(capture={"max_tokens": 64}).values():
        publish_stage(store, entry.stage)
    other = planned(capture={"max_tokens": 32})["capture"].stage
    publish_stage(store, other)
    assert planned(capture={"max_tokens": 32})["train"].why.startswith("input capture changed: ")


def test_a_corrupt_record_blocks_its_stage_and_what_needs_it(planned, store):
    for name, entry in planned().items():
        if name in ("capture", "train"):
            publish_stage(store, entry.stage)
    path = store.folder(planned()["train"].stage.key) / "record.json"
    path.write_text("{")
    entries = planned()
    assert [entry.state for entry in entries.values()] == ["cached", "blocked", "blocked", "blocked", "blocked"]
    assert str(path) in entries["train"].why and "delete" in entries["train"].why
    assert entries["quantize"].why == "input train is blocked"


def test_a_corrupt_record_of_another_fingerprint_stops_nothing(planned, store):
    stage = planned(capture={"max_tokens": 64})["capture"].stage
    publish_stage(store, stage)
    (store.folder(stage.key) / "record.json").write_text("{")
    entry = planned(capture={"max_tokens": 32})["capture"]
    assert entry.state == "run" and "cannot be compared" in entry.why


def test_json_holds_what_programs_were_promised(planned):
    entry = planned()["train"].as_json(StageResources(gpus=2), 1000)
    assert entry.keys() == {"stage", "fingerprint", "state", "why", "inputs", "resources", "expected_bytes"}
    assert entry["inputs"] == {"capture": planned()["capture"].stage.fingerprint}
    assert entry["resources"]["gpus"] == 2 and entry["expected_bytes"] == 1000


def test_a_row_names_inputs_resources_and_size(planned):
    row = dict(zip(PLAN_HEADER, planned()["sweep"].as_row(StageResources(cpus=2, custom={"rack": 1}), 1_500_000), strict=True))
    assert (row["inputs"], row["resources"], row["writes"]) == ("train, quantize", "2 cpu, 1 rack", "1.5 MB")
    assert dict(zip(PLAN_HEADER, planned()["capture"].as_row(StageResources(), None), strict=True))["writes"] == "?"


def test_what_was_begun_and_is_not_there_is_told(planned, store):
    stages = {name: entry.stage for name, entry in planned().items()}
    with store.work_on(stages["capture"].key, {}) as work:
        assert planned()["capture"].why == f"{work.held.lease.owner} works on it: starting"
    assert planned()["capture"].why == "its artifact was deleted"
    with pytest.raises(KeyboardInterrupt), store.work_on(stages["train"].key, {}):
        raise KeyboardInterrupt
    assert planned()["train"].why.startswith("the last attempt was interrupted; ")
    with pytest.raises(StageError), store.work_on(stages["quantize"].key, {}):
        raise StageError(what="the loss is nan", where="train", fix="lower train.lr")
    assert planned()["quantize"].why.startswith("the last attempt failed: the loss is nan; ")


def test_a_store_that_refuses_is_no_damaged_artifact(planned, store, monkeypatch):
    def refuse(key: str) -> bytes:
        raise ArtifactError(what="the credentials have expired", where="s3", fix="renew them")

    monkeypatch.setattr(FolderHome, "get", lambda home, key: refuse(key))
    with pytest.raises(ArtifactError, match="expired"):
        planned()


def test_another_target_under_the_same_name_is_refused_and_settings_of_the_same_are_not(planned, store, tmp_path):
    first = [entry.stage for entry in planned().values()]
    assert check_same_target(first, store) is None
    resolve(first, store)
    stages = [entry.stage for entry in planned(target={"model": "./target", "max_model_len": 256, "dtype": "float32"}).values()]
    assert check_same_target(stages, store).stages == {stage.name: stage.fingerprint for stage in first}
    resolve(stages, store)
    assert store.resolved("tiny").stages == {stage.name: stage.fingerprint for stage in stages}
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    stages = [entry.stage for entry in planned().values()]
    before = store.home.get("tiny/experiment.json")
    for refused in (check_same_target, resolve):
        with pytest.raises(ExperimentError, match="stands for another target") as caught:
            refused(stages, store)
        assert caught.value.exit_code == 64 and "new name" in caught.value.fix and "model.safetensors" in caught.value.what
    assert store.home.get("tiny/experiment.json") == before
    blocked = block(list(planned().values()), "why")
    assert {entry.state for entry in blocked} == {"blocked"} and [entry.why for entry in blocked] == ["why", *["as capture"] * 4]


def test_records_tell_the_target_where_the_note_of_it_is_gone(planned, store, tmp_path):
    for entry in planned().values():
        publish_stage(store, entry.stage)
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    changed = planned()
    with pytest.raises(ExperimentError, match="stands for another target"):
        check_same_target([entry.stage for entry in changed.values()], store)


def test_the_name_is_taken_before_anything_is_there_and_whatever_is_damaged(planned, store, tmp_path):
    stages = {name: entry.stage for name, entry in planned().items()}
    resolve(list(stages.values()), store)
    store.home.put(stages["capture"].key.prefix + "record.json", b"{")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    with pytest.raises(ExperimentError, match="stands for another target"):
        check_same_target([entry.stage for entry in planned().values()], store)


def test_of_two_that_name_an_experiment_at_once_the_second_sees_the_firsts_target(planned, store, tmp_path, monkeypatch):
    first = [entry.stage for entry in planned().values()]
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    second = [entry.stage for entry in planned().values()]
    create = Store.first_resolved

    def late(self: Store, resolved: Resolved) -> bool:
        monkeypatch.setattr(Store, "first_resolved", create)
        resolve(first, store)
        return create(self, resolved)

    monkeypatch.setattr(Store, "first_resolved", late)
    with pytest.raises(ExperimentError, match="stands for another target"):
        resolve(second, store)


@pytest.mark.parametrize("content", [b"", b"{", b"[]"])
def test_a_damaged_mark_is_named_and_not_taken_for_none(planned, store, content: bytes):
    store.home.put("tiny/experiment.json", content)
    with pytest.raises(DamagedError) as caught:
        check_same_target([entry.stage for entry in planned().values()], store)
    assert caught.value.where == store.home.place("tiny/experiment.json") and "delete" in caught.value.fix
