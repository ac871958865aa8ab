"""The real chain, end to end, on a tiny budget: `raysd run` as a user types it, with real Ray jobs, real vLLM and real Quark."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raysd.errors import StageError
from raysd.quantization.audit import audit_draft
from tests.tiny_chain import FORMS, UNHURRIED, raysd, write_experiment


def record(run: dict, stage: str) -> dict:
    artifact = Path(next(entry["artifact"] for entry in run["stages"] if entry["stage"] == stage))
    return json.loads((artifact / "record.json").read_text()) | {"artifact": artifact}


def files(run: dict, stage: str) -> Path:
    made = record(run, stage)
    return made["artifact"] / made["folder"]


def test_every_stage_is_done_and_the_draft_is_accepted(first_run):
    _, run = first_run
    assert [(entry["stage"], entry["state"]) for entry in run["stages"]] == [(s, "done") for s in ("capture", "train", "quantize", "sweep", "report")]
    assert run["acceptance_length"]["bf16"] > 1.05 and run["acceptance_length"]["fp8"] > 1.05
    assert set(run["speedup"]) == {"bf16", "fp8"} and set(run["speedup"]["bf16"]) == {"1", "2"} and set(run["speedup"]["fp8"]) == {"1"}
    assert all(low <= run["speedup"]["bf16"][c] <= high for c, (low, high) in run["speedup_ci"]["bf16"].items())


def test_answers_are_the_targets_own(first_run):
    _, run = first_run
    assert set(run["lossless"]) == {"bf16", "fp8"}
    for counts in run["lossless"].values():
        assert counts["broken"] == 0 and sum(counts.values()) == len(FORMS)


def test_an_exclusion_that_was_not_rewritten_would_have_been_caught(first_run):
    _, run = first_run
    draft = files(run, "quantize") / "draft"
    audit_draft(draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").chmod(0o644)
    spoiled = config | {"quantization_config": config["quantization_config"] | {"exclude": ["fc", "lm_head"]}}  # as Quark writes them
    try:
        (draft / "config.json").write_text(json.dumps(spoiled))
        with pytest.raises(StageError, match="no exclusion that vLLM matches"):
            audit_draft(draft)
    finally:
        (draft / "config.json").write_text(json.dumps(config, indent=1))


def test_the_replayed_acceptance_is_near_what_vllm_counts(first_run):
    """The draft in raysd and the draft in vLLM are the same model: the walk over captured answers predicts vLLM's counters."""
    _, run = first_run
    metrics = record(run, "train")["metrics"]
    assert metrics["served"]["acceptance_length"] == pytest.approx(metrics["replay"]["acceptance_length"], rel=0.03)


def test_cells_and_the_report_are_there(first_run):
    _, run = first_run
    cells = pq.read_table(files(run, "sweep") / "cells").to_pylist()
    assert len(cells) == 3 * (2 + 2 + 1) and all(cell["valid"] for cell in cells)
    assert all(cell["drafts"] > 0 for cell in cells if cell["arm"] != "none")
    report = Path(run["report"])
    assert report.name == "report.html" and report.stat().st_size > 10_000


def test_the_second_run_finds_everything(first_run):
    path, run = first_run
    again = raysd("run", str(path), "--json")
    assert again.returncode == 0, again.stderr
    second = json.loads(again.stdout)
    assert {entry["state"] for entry in second["stages"]} == {"cached"}
    assert {key: second[key] for key in ("acceptance_length", "speedup", "speedup_ci", "lossless", "report")} == \
           {key: run[key] for key in ("acceptance_length", "speedup", "speedup_ci", "lossless", "report")}


@pytest.mark.slow
def test_an_eagle31_draft_with_the_whole_vocabulary_is_served_as_it_was_trained(tmp_path):
    """The other switches of the draft, through vLLM: a norm for each aux layer, the normed output fed back, no token map."""
    path = write_experiment(tmp_path, draft={"algorithm": "eagle3.1", "vocab_size": None, "aux_layers": [1, 2, 3]}, quantize=None,
                            sweep=UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1], "k": [2], "blocks": 3, "requests_per_slot": 1,
                                   "workloads": [{"name": "report", "osl": 32}],
                                   "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}})
    done = raysd("run", str(path), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads(done.stdout)
    metrics = record(run, "train")["metrics"]
    assert run["acceptance_length"]["bf16"] > 1.05 and run["lossless"]["bf16"]["broken"] == 0
    assert metrics["served"]["acceptance_length"] == pytest.approx(metrics["replay"]["acceptance_length"], rel=0.03)
