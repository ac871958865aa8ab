"""One stage as its job runs it: published whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.artifacts.lease import lease_key
from raysd.artifacts.stage import StageRun
from raysd.backends.stores import open_store
from raysd.errors import ExperimentError, TryAgainError, from_dict
from raysd.experiment import load_experiment
from raysd.pipeline import job
from raysd.pipeline.events import ErrorEvent, ProgressEvent, read_event
from raysd.pipeline.preflight import resolve, stages_of
from raysd.pipeline.stages import VERSIONS

NONE_ONLY = {"capture": None, "train": None, "quantize": None, "sweep": {"arms": ["none"]}}


@pytest.fixture
def spec(write_experiment: Callable[..., Path]) -> Path:
    return write_experiment(**NONE_ONLY)


@pytest.fixture
def run(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(job, "raise_when_terminated", lambda: None)  # the handlers belong to a process of its own: see the last test

    def go(function: Callable[[StageRun], dict[str, Any]], stage: str = "sweep") -> int:
        for each in stages_of(load_experiment(spec)):
            with Store(FolderHome(tmp_path / "store")).log(each.key, 2):
                pass  # as the runner does
        return job.main(stage, lambda: job.Edges({stage: function}, open_store), ["--experiment", str(spec), "--store", str(tmp_path / "store"), "--attempt", "2"])

    return go


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(FolderHome(tmp_path / "store"))


def events(text: str) -> list[Any]:
    return [event for line in text.splitlines() if (event := read_event(line)) is not None]


def test_what_a_stage_writes_is_published_with_its_provenance(run, spec, store, capsys):
    def sweep(stage_run: StageRun) -> dict[str, Any]:
        stage_run.progress("measuring", 1, 4, "cells", output_tok_s=80.5)
        (stage_run.work / "cell-1.json").write_text("unfinished work")
        stage_run.pieces.keep("cell-1.json", stage_run.work / "cell-1.json")
        (stage_run.out / "cells.txt").write_text("4")
        return {"cells": 4}

    assert run(sweep) == 0
    stage = stages_of(load_experiment(spec))[0]
    record = store.record(stage.key)
    assert (store.open(stage.key) / "cells.txt").read_text() == "4" and not (store.folder(stage.key) / "work").exists()
    assert store.lease(stage.key).state() == "released"
    assert record.metrics == {"cells": 4} and record.attempt == 2 and list(record.files) == ["cells.txt"]
    assert record.identity == stage.identity and record.section["sweep"]["arms"] == ["none"]
    assert record.host["cpu_cores"] >= 1 and record.host["memory_bytes"] > 2**20 and record.packages["numpy"]
    told = events(capsys.readouterr().out)
    assert ProgressEvent("measuring", 1, 4, "cells", {"output_tok_s": 80.5}) in told


def test_a_stage_that_is_there_is_not_run_again(run, capsys):
    assert run(lambda stage_run: {}) == 0

    def never(stage_run: StageRun) -> dict[str, Any]:
        raise AssertionError("ran again")

    assert run(never) == 0
    assert "there already" in capsys.readouterr().out


def test_a_stage_gets_the_folders_of_its_inputs(run, store):
    def sweep(stage_run: StageRun) -> dict[str, Any]:
        (stage_run.out / "cells.txt").write_text("4")
        return {}

    def report(stage_run: StageRun) -> dict[str, Any]:
        return {"read": (stage_run.inputs["sweep"] / "cells.txt").read_text()}

    assert run(sweep) == 0 and run(report, "report") == 0
    assert store.newest_record("tiny", "report").metrics == {"read": "4"}


def test_a_missing_input_is_an_error_before_the_stage_starts(run, capsys):
    assert run(lambda stage_run: {}, "report") == 1
    error = next(event for event in events(capsys.readouterr().out) if isinstance(event, ErrorEvent))
    assert "no sweep artifact" in error.error["what"] and "run the stage sweep first" in error.error["fix"]


@pytest.mark.parametrize(
    ("error", "exit_code", "words"),
    [
        (ExperimentError(what="k is 9", where="sweep.k", fix="use 1 to 8"), 64, "k is 9"),
        (TryAgainError(what="the hub is down", where="target.model", fix="wait"), 75, "the hub is down"),
        (ValueError("seven"), 1, "ValueError: seven"),
        (OSError(28, "No space left on device", "/store/x"), 1, "disk is full"),
    ],
)
def test_a_failure_is_told_and_leaves_no_result(run, store, capsys, error: Exception, exit_code: int, words: str):
    def sweep(stage_run: StageRun) -> dict[str, Any]:
        (stage_run.work / "kept.txt").write_text("unfinished work")
        stage_run.pieces.keep("kept.txt", stage_run.work / "kept.txt")
        (stage_run.out / "half.txt").write_text("half")
        raise error

    assert run(sweep) == exit_code
    captured = capsys.readouterr()
    told = [event for event in events(captured.out) if isinstance(event, ErrorEvent)]
    assert len(told) == 1 and words in from_dict(told[0].error).what
    assert ("Traceback" in captured.err) == (exit_code == 1)
    assert store.newest_record("tiny", "sweep") is None

    def retried(stage_run: StageRun) -> dict[str, Any]:
        return {"out": [path.name for path in stage_run.out.iterdir()], "kept": stage_run.pieces.find("kept.txt").read_text()}

    assert run(retried) == 0
    assert store.newest_record("tiny", "sweep").metrics == {"out": [], "kept": "unfinished work"}


def test_a_stage_that_the_experiment_does_not_have_is_refused(run, capsys):
    assert run(lambda stage_run: {}, "train") == 64
    assert "no stage train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {}, "metadata": {}}'}, None),
        ({"OMP_NUM_THREADS": "1", "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}'}, "1"),
        ({"OMP_NUM_THREADS": "8", "RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {}}'}, "8"),
        ({"OMP_NUM_THREADS": "1"}, "1"),
    ],
    ids=["set by Ray", "asked for", "cores reserved", "no Ray job"],
)
def test_rays_own_thread_limit_is_lifted_and_no_other(environment: dict[str, str], left: str | None):
    job.lift_thread_limit(environment)
    assert environment.get("OMP_NUM_THREADS") == left


WAITING = """
import sys, time
from pathlib import Path
from raysd.backends.stores import open_store
from raysd.pipeline.job import Edges, main

def sweep(run):
    try:
        run.progress("waiting")
        time.sleep(600)
    finally:
        Path(sys.argv[-1]).with_name("cleared").touch()

raise SystemExit(main("sweep", lambda: Edges({"sweep": sweep}, open_store), sys.argv[1:-1]))
"""


def test_sigterm_lets_the_stage_clear_up(spec: Path, tmp_path: Path, store: Store):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "--experiment", str(spec), "--store", str(tmp_path / "store"), str(tmp_path / "x")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        while '"waiting"' not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1 and (tmp_path / "cleared").exists()
    assert "stopped by SIGTERM" in next(event for event in events(out) if isinstance(event, ErrorEvent)).error["what"]
    assert store.newest_record("tiny", "sweep") is None
    seen = store.lease(stages_of(load_experiment(spec))[0].key)
    assert seen.state() == "failed" and "SIGTERM" in seen.lease.error["what"]


def test_a_stage_that_somebody_else_works_on_is_told_and_left_alone(run, spec, store, capsys):
    stage = stages_of(load_experiment(spec))[0]

    def never(stage_run: StageRun) -> dict[str, Any]:
        raise AssertionError("two at once")

    with store.work_on(stage.key, {}) as work:
        assert run(never) == 75
        error = next(event for event in events(capsys.readouterr().out) if isinstance(event, ErrorEvent)).error
        assert work.held.lease.owner in error["what"] and error["kind"] == "LeaseHeldError"
    assert run(lambda stage_run: {}) == 0


def test_a_stage_that_lost_its_lease_ends_at_its_next_word_and_publishes_nothing(run, spec, store, capsys):
    stage = stages_of(load_experiment(spec))[0]

    def overtaken(stage_run: StageRun) -> dict[str, Any]:
        store.home.create(lease_key(stage.key.prefix, 2), store.home.get(lease_key(stage.key.prefix, 1)))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            stage_run.progress("working on")
            time.sleep(0.2)
        return {}

    assert run(overtaken) == 75 and store.record(stage.key) is None
    assert "another run took the stage sweep over" in capsys.readouterr().err


def test_prompts_that_change_while_a_stage_runs_are_not_in_its_result(run, spec, store, tmp_path):
    def sweep(stage_run: StageRun) -> dict[str, Any]:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(prompts.read_text().replace("ferries", "rivers"))
        return {"asked": [prompt.messages[0]["content"] for prompt in stage_run.prompts.split("report", 2)]}

    stage = stages_of(load_experiment(spec))[0]
    assert run(sweep) == 0
    assert store.record(stage.key).metrics == {"asked": ["Tell me about ferries, short.", "Tell me about ferries, long."]}
    assert stages_of(load_experiment(spec))[0].fingerprint != stage.fingerprint


FINISHED = {"capture": None, "train": None, "quantize": None, "draft": {"checkpoint": "./draft"}, "sweep": {"arms": ["none", "bf16"]}}


@pytest.fixture
def changeable(spec: Path, tmp_path: Path, write_experiment) -> dict[str, Path]:
    """Makes the experiment one of which a stage reads all that it can read where it lies; gives a file of each, by what messages call it."""
    (tmp_path / "draft").mkdir()
    files = {"target.folder.weights.model.safetensors": tmp_path / "target" / "model.safetensors", "target.chat_template": tmp_path / "template.jinja",
             "checkpoint.model.safetensors": tmp_path / "draft" / "model.safetensors", "target.folder.files.config.json": tmp_path / "target" / "config.json"}
    for path in (files["target.chat_template"], files["checkpoint.model.safetensors"], tmp_path / "draft" / "config.json"):
        path.write_text("{}")
    write_experiment(**FINISHED, target={"model": "./target", "max_model_len": 512, "chat_template": "template.jinja"})
    return files


CHANGED = ["target.folder.weights.model.safetensors", "target.folder.files.config.json", "target.chat_template", "checkpoint.model.safetensors"]


@pytest.mark.parametrize("goes", [False, True], ids=["changes", "goes"])
@pytest.mark.parametrize("changed", CHANGED)
def test_a_stage_whose_target_or_draft_changes_while_it_runs_publishes_nothing(changeable, run, store, capsys, changed: str, goes: bool):
    path, kept = changeable[changed], []
    before = path.read_bytes()

    def sweep(stage_run: StageRun) -> dict[str, Any]:
        def keep(name: str) -> None:
            (stage_run.work / name).write_text(name)
            stage_run.pieces.keep(name, stage_run.work / name)
            kept.append(name)

        if stage_run.pieces.find("before") is None:
            keep("before")
            path.unlink() if goes else path.write_bytes(before + b" ")
            with contextlib.suppress(ExperimentError):
                keep("after")
        return {}

    assert run(sweep) == 64
    error = next(event for event in events(capsys.readouterr().out) if isinstance(event, ErrorEvent)).error
    assert ("since the stage began" if goes else f"{changed} changed: ") in error["what"] and error["where"].startswith(("target.", "draft.checkpoint"))
    assert store.newest_record("tiny", "sweep") is None and kept == ["before"]
    path.write_bytes(before)  # brought back: what was kept of it is worth as much as before, and nothing else was kept
    found = {}
    assert run(lambda stage_run: found.update({name: stage_run.pieces.find(name) is not None for name in ("before", "after")}) or {}) == 0
    assert found == {"before": True, "after": False}


def test_a_target_that_changed_under_the_name_ends_a_script_by_hand_before_it_leaves_anything(spec, store, tmp_path, write_experiment, capsys, monkeypatch):
    monkeypatch.setattr(job, "raise_when_terminated", lambda: None)
    resolve(stages_of(load_experiment(write_experiment())), store)

    def never(stage_run: StageRun) -> dict[str, Any]:
        raise AssertionError("ran")

    before = [entry.key for entry in store.home.list("")]
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    for stage in VERSIONS:
        assert job.main(stage, lambda: job.Edges(dict.fromkeys(VERSIONS, never), open_store), ["--experiment", str(spec), "--store", str(store.uri)]) == 64
        assert "take a new name" in capsys.readouterr().err
    assert [entry.key for entry in store.home.list("")] == before


def test_a_node_that_does_not_share_the_runners_folder_is_told_so(spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job, "raise_when_terminated", lambda: None)
    arguments = ["--experiment", str(spec), "--store", str(tmp_path / "elsewhere"), "--attempt", "2"]
    assert job.main("sweep", lambda: job.Edges({}, open_store), arguments) == 64
    told = capsys.readouterr().err
    assert "all nodes share" in told and "by hand, leave --attempt out" in told and not list(tmp_path.glob("elsewhere/**/record.json"))


def test_ctrl_c_on_a_script_is_one_message_and_130(run, capsys):
    def interrupted(stage_run: StageRun) -> dict[str, Any]:
        raise KeyboardInterrupt

    assert run(interrupted) == 130
    told = capsys.readouterr().err
    assert told == "interrupted; run again to go on from its unfinished work\n"


def test_a_store_that_ray_would_delete_after_the_job_is_refused(spec, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(job, "raise_when_terminated", lambda: None)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": {"job_submission_id": "by-hand"}}))
    monkeypatch.chdir(tmp_path)
    assert job.main("sweep", lambda: job.Edges({"sweep": lambda stage_run: {}}, open_store), ["--experiment", str(spec), "--store", "runs"]) == 64
    assert "which Ray deletes after the job" in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_another_target_under_the_name_is_refused_by_a_job_too(run, spec, store, tmp_path, capsys):
    resolve(stages_of(load_experiment(spec)), store)  # as the runner does
    assert run(lambda stage_run: {}) == 0
    (tmp_path / "target" / "model.safetensors").write_bytes(b"\1" * 64)
    assert run(lambda stage_run: {}) == 64
    assert "take a new name" in capsys.readouterr().err
