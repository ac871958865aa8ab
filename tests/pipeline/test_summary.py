"""What a run prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysd.artifacts import FolderHome, Store
from raysd.experiment import load_experiment
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.runner import RunOutcome, StageResult
from raysd.pipeline.summary import render, summarize
from tests.records import publish_stage

METRICS: dict[str, dict[str, Any]] = {
    "sweep": {
        "acceptance": {"bf16": {"acceptance_length": 1.8312}, "fp8": {"acceptance_length": 1.8290}},
        "lossless": {"bf16": {"equal": 28, "near_tie": 20, "broken": 0}},
    },
    "report": {"speedup": {"bf16": {"1": 1.321, "2": None}}, "speedup_ci": {"bf16": {"1": [1.25, 1.39], "2": None}},
               "speedup_ci_alone": {"bf16": {"1": [1.27, 1.37], "2": None}}, "verdict": {"bf16": {"1": "faster", "2": None}}},
}


def outcome_of(spec: Path, store: Store, done: int) -> RunOutcome:
    results = []
    for number, stage in enumerate(stages_of(load_experiment(spec))):
        if number < done:
            record = publish_stage(store, stage, metrics=METRICS.get(stage.name, {}))
            results.append(StageResult(stage, "done", 61.04, store.place(stage.key), record))
        else:
            results.append(StageResult(stage, "blocked", 0, None))
    return RunOutcome(results, None)


def test_a_finished_run_gives_all_figures(tmp_path: Path, write_experiment: Callable[..., Path]):
    store = Store(FolderHome(tmp_path / "store"))
    outcome = outcome_of(write_experiment(), store, 5)
    summary = summarize("tiny", outcome, 300.26)
    assert summary["acceptance_length"] == {"bf16": 1.8312, "fp8": 1.8290}
    assert summary["speedup"]["bf16"]["1"] == 1.321 and summary["speedup_ci"]["bf16"]["1"] == [1.25, 1.39]
    assert summary["speedup_ci_alone"]["bf16"]["1"] == [1.27, 1.37] and summary["verdict"]["bf16"] == {"1": "faster", "2": None}
    assert summary["lossless"] == {"bf16": {"equal": 28, "near_tie": 20, "broken": 0}}
    assert summary["elapsed_s"] == 300.3 and summary["report"] == str(store.open(outcome.stages[-1].stage.key) / "report.html")
    assert [entry["stage"] for entry in summary["stages"]] == ["capture", "train", "quantize", "sweep", "report"]
    text = render(summary)
    assert all(words in text for words in ("1.831", "1.32x", "faster", "1.25 to 1.39", "1.27 to 1.37", "not measured", "not tested", "report.html", "1:01", "near-tie"))


def test_a_run_that_ended_early_says_so_and_gives_no_figures(tmp_path: Path, write_experiment: Callable[..., Path]):
    store = Store(FolderHome(tmp_path / "store"))
    summary = summarize("tiny", outcome_of(write_experiment(), store, 1), 10)
    assert summary["acceptance_length"] == summary["speedup"] == summary["lossless"] == {} and summary["report"] is None
    assert [entry["state"] for entry in summary["stages"]] == ["done", "blocked", "blocked", "blocked", "blocked"]
    assert "report:" not in render(summary)
