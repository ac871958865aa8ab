"""The quantize stage with real Quark; the acceptance is scripted, so that it is known what was measured anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raysd.artifacts import ArtifactKey, FolderHome, Store
from raysd.backends.quark import quantize_checkpoint
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.checkpoint import save_draft
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.quantization.quantize import quantize
from tests.records import publish_files
from tests.stage_runs import attempt
from tests.tiny_drafts import small_draft, small_shape

TRAINED = AcceptanceCounts(100, 300, 90, (60, 20, 10))
MEASURED = AcceptanceCounts(100, 300, 60, (40, 15, 5))
ENGINE = {"max_num_seqs": 8}


@pytest.fixture
def stage(write_experiment, tmp_path):
    """Runs the stage for changes of the experiment, after a training that measured TRAINED; the drafts whose acceptance is measured all have MEASURED."""
    experiment = load_experiment(write_experiment(sweep={"concurrency": [1], "engine": ENGINE}))
    save_draft(small_draft(small_shape(hidden_size=64, head_dim=32, intermediate_size=128)), tmp_path / "bf16", torch.bfloat16)
    files = {f"draft/{path.name}": path.read_bytes() for path in (tmp_path / "bf16").iterdir()}
    store, key = Store(FolderHome(tmp_path / "runs")), ArtifactKey("tiny", "train", "0" * 32)
    publish_files(store, key, files, section=experiment.model_dump(mode="json"), metrics={"served_k": 3, "served_tokens": 160, "served": TRAINED.as_metrics()})

    def go(**changes):
        measured: list[str] = []

        def served_acceptance(draft: Path, prompts, k: int) -> AcceptanceCounts:
            measured.append("fp8" if draft.parent.name == "out" else "bf16")
            return MEASURED

        experiment = load_experiment(write_experiment(**{"sweep": {"concurrency": [1], "engine": ENGINE}, **changes}))
        with attempt(tmp_path / "store", experiment, {"train": store.open(key)}) as run:
            return quantize(run, quantize_checkpoint, served_acceptance), measured

    return go


@pytest.mark.parametrize("changes", [{}, {"sweep": {"concurrency": [1, 2], "engine": ENGINE | {"max_num_seqs": 32, "enforce_eager": True, "start_timeout_s": 60.0}}}])
def test_what_training_measured_under_the_same_conditions_is_not_measured_again(stage, changes):
    metrics, measured = stage(**changes)
    assert measured == ["fp8"] and metrics["bf16_served"] == TRAINED.as_metrics()
    assert metrics["acceptance_ratio"] == pytest.approx(1.6 / 1.9)


@pytest.mark.parametrize("changes", [{"quantize": {"served_k": 2}}, {"quantize": {"served_tokens": 32}}])
def test_both_drafts_are_measured_under_the_same_conditions(stage, changes):
    metrics, measured = stage(**changes)
    assert measured == ["fp8", "bf16"] and metrics["bf16_served"] == MEASURED.as_metrics() and metrics["acceptance_ratio"] == 1


def test_exclusions_that_vllm_cannot_follow_are_refused_before_quark_runs(stage):
    with pytest.raises(ExperimentError, match="makes one layer .gate_up_proj.") as caught:
        stage(quantize={"exclude": ["lm_head", "*up_proj"]})
    assert "quantize.exclude" in caught.value.where
