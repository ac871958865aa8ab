"""The real chain, end to end, on a tiny budget: `raysd run` as a user types it, with real Ray jobs, real vLLM and real Quark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from raysd.errors import StageError
from raysd.quantization.audit import audit_draft
from tests.tiny_models import chained_llama

TOPICS = ["rain", "bread", "chess", "trains", "maps", "tea", "clocks", "rivers", "music", "stars", "glass", "sheep"]
FORMS = ["Explain {} simply.", "List three facts about {}.", "Why do people like {}?", "Write two lines about {}."]


def write_experiment(folder: Path, **changes) -> Path:
    chained_llama(folder / "target")
    rows = []
    for i, topic in enumerate(TOPICS):
        split = {0: "choose", 1: "report"}.get(i, "train")
        rows += [{"id": f"{topic}.{j}", "topic": topic, "split": split, "prompt": form.format(topic)} for j, form in enumerate(FORMS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    experiment = {
        "name": "tiny", "store": "runs", "target": {"model": "./target", "max_model_len": 256}, "prompts": {"path": "prompts.jsonl"},
        "draft": {"vocab_size": 256, "aux_layers": [1, 2, 3]},
        "capture": {"engines": 2, "max_tokens": 48, "concurrency": 16, "shard_conversations": 16, "kv_cache_bytes": 268435456},
        "train": {"steps": 150, "ttt_steps": 2, "lr": 2e-3, "evaluations": 2, "served_k": 2, "served_tokens": 48},
        "quantize": {"served_k": 2, "served_tokens": 48},
        "sweep": {"concurrency": [1, 2], "arm_concurrency": {"fp8": [1]}, "k": [2], "blocks": 3, "requests_per_slot": 1,
                  "workloads": [{"name": "report", "osl": 32}],
                  "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}}} | changes
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


def raysd(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "raysd", *arguments], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chain")
    path = write_experiment(folder)
    done = raysd("run", str(path), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    return path, json.loads(done.stdout)


def artifact(run: dict, stage: str) -> Path:
    return Path(next(entry["artifact"] for entry in run["stages"] if entry["stage"] == stage))


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
    draft = artifact(run, "quantize") / "draft"
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
    metrics = json.loads((artifact(run, "train") / "record.json").read_text())["metrics"]
    assert metrics["served"]["acceptance_length"] == pytest.approx(metrics["replay"]["acceptance_length"], rel=0.1)


def test_cells_and_the_report_are_there(first_run):
    _, run = first_run
    cells = pq.read_table(artifact(run, "sweep") / "cells.parquet").to_pylist()
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
                            sweep={"arms": ["none", "bf16"], "concurrency": [1], "k": [2], "blocks": 3, "requests_per_slot": 1,
                                   "workloads": [{"name": "report", "osl": 32}],
                                   "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}})
    done = raysd("run", str(path), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads(done.stdout)
    metrics = json.loads((artifact(run, "train") / "record.json").read_text())["metrics"]
    assert run["acceptance_length"]["bf16"] > 1.05 and run["lossless"]["bf16"]["broken"] == 0
    assert metrics["served"]["acceptance_length"] == pytest.approx(metrics["replay"]["acceptance_length"], rel=0.1)
