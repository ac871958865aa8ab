"""`raysd run` on a store in S3: jobs fetch their inputs from the bucket and bring their artifacts to it."""

from __future__ import annotations

import json
from pathlib import Path

from raysd.artifacts import FolderHome, Store
from raysd.backends.stores import open_store
from tests.tiny_chain import raysd


def test_a_stage_is_made_from_and_into_a_bucket(first_run, s3_place, tmp_path, monkeypatch):
    spec, run = first_run
    monkeypatch.setenv("RAYSD_CACHE", str(tmp_path / "cache"))
    local, store = Store(FolderHome(spec.parent / "runs")), open_store(s3_place.section)
    for entry in local.home.list(""):
        if not entry.key.startswith("tiny/report/"):
            store.home.put(entry.key, local.home.get(entry.key))
    uri = store.uri

    done = raysd("run", str(spec), "--store", uri, "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    assert [stage["state"] for stage in document["stages"]] == ["cached"] * 4 + ["done"]
    assert [stage["fingerprint"] for stage in document["stages"]] == [stage["fingerprint"] for stage in run["stages"]]
    assert document["report"].startswith("s3://") and document["acceptance_length"] == run["acceptance_length"]

    again = json.loads(raysd("run", str(spec), "--store", uri, "--json").stdout)
    assert {stage["state"] for stage in again["stages"]} == {"cached"}
    assert Path(raysd("report", str(spec), "--store", uri).stdout.strip()).stat().st_size > 10_000
    states = json.loads(raysd("status", "--store", uri, "--json").stdout)
    assert [(each["stage"], each["state"]) for each in states] == [(stage["stage"], "done") for stage in run["stages"]]
    assert "report is done: s3://" in raysd("logs", str(spec), "report", "--store", uri).stdout
