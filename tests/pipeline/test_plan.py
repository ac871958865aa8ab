"""What a plan says of each stage, and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.artifacts import LocalStore, Record
from raysd.experiment import load_experiment
from raysd.pipeline.plan import PlannedStage, plan
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.stages import Stage


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def planned(write_experiment: Callable[..., Path], store: LocalStore) -> Callable[..., dict[str, PlannedStage]]:
    return lambda **changes: {entry.stage.name: entry for entry in plan(stages_of(load_experiment(write_experiment(**changes))), store)}


def publish(store: LocalStore, stage: Stage, ended: str = "2026-01-01T00:00:00+00:00") -> None:
    out = store.work(stage.key) / "out"
    out.mkdir()
    store.publish(
        stage.key,
        out,
        Record(
            experiment=stage.experiment,
            stage=stage.name,
            fingerprint=stage.fingerprint,
            identity=stage.identity,
            section={},
            code_version="0",
            packages={},
            host={},
            metrics={},
            started=ended,
            ended=ended,
            elapsed_s=1.0,
            attempt=1,
            files={},
        ),
    )


def test_an_empty_store_means_that_all_has_to_run(planned, store):
    entries = planned()
    assert {entry.state for entry in entries.values()} == {"run"}
    assert entries["capture"].why == "never run"
    assert entries["train"].why == "input capture runs"
    assert entries["sweep"].why == "input train runs; input quantize runs"
    assert not store.root.exists()


def test_what_has_a_record_is_cached(planned, store):
    for entry in planned().values():
        publish(store, entry.stage)
    assert {entry.state for entry in planned().values()} == {"cached"}


def test_a_changed_value_is_named_with_before_and_after(planned, store):
    for entry in planned(train={"lr": 0.001}).values():
        publish(store, entry.stage)
    entries = planned(train={"lr": 0.0005})
    assert entries["capture"].state == "cached"
    assert (entries["train"].state, entries["train"].why) == ("run", "train.lr changed: 0.001 -> 0.0005")
    assert entries["quantize"].why == "input train runs"


def test_the_newest_record_is_compared(planned, store):
    publish(store, planned(capture={"max_tokens": 64})["capture"].stage, ended="2026-01-02T00:00:00+00:00")
    publish(store, planned(capture={"max_tokens": 32})["capture"].stage, ended="2026-01-01T00:00:00+00:00")
    assert planned(capture={"max_tokens": 128})["capture"].why == "capture.max_tokens changed: 64 -> 128"


def test_an_input_that_was_swapped_for_another_found_one_is_named(planned, store):
    for entry in planned(capture={"max_tokens": 64}).values():
        publish(store, entry.stage)
    other = planned(capture={"max_tokens": 32})["capture"].stage
    publish(store, other)
    assert planned(capture={"max_tokens": 32})["train"].why.startswith("input capture changed: ")


def test_a_corrupt_record_blocks_its_stage_and_what_needs_it(planned, store):
    for name, entry in planned().items():
        if name in ("capture", "train"):
            publish(store, entry.stage)
    path = store.folder(planned()["train"].stage.key) / "record.json"
    path.write_text("{")
    entries = planned()
    assert [entry.state for entry in entries.values()] == ["cached", "blocked", "blocked", "blocked", "blocked"]
    assert str(path) in entries["train"].why and "delete" in entries["train"].why
    assert entries["quantize"].why == "input train is blocked"


def test_a_corrupt_record_of_another_fingerprint_stops_nothing(planned, store):
    stage = planned(capture={"max_tokens": 64})["capture"].stage
    publish(store, stage)
    (store.folder(stage.key) / "record.json").write_text("{")
    entry = planned(capture={"max_tokens": 32})["capture"]
    assert entry.state == "run" and "cannot be compared" in entry.why


def test_json_holds_what_programs_were_promised(planned):
    entry = planned()["train"].as_json()
    assert entry.keys() == {"stage", "fingerprint", "state", "why", "inputs"}
    assert entry["inputs"] == {"capture": planned()["capture"].stage.fingerprint}
