"""The chain that an experiment needs, and what a change to it makes anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysd.experiment import load_experiment
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.stages import Stage

DRAFT = {"capture": None, "train": None, "draft": {"checkpoint": "./draft"}}


@pytest.fixture
def stages(tmp_path: Path, write_experiment: Callable[..., Path]) -> Callable[..., dict[str, Stage]]:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    (draft / "model.safetensors").write_bytes(b"weights")
    return lambda **changes: {stage.name: stage for stage in stages_of(load_experiment(write_experiment(**changes)))}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {},
            {
                "capture": (),
                "train": ("capture",),
                "quantize": ("train",),
                "sweep": ("train", "quantize"),
                "report": ("capture", "train", "quantize", "sweep"),
            },
        ),
        (
            {"sweep": {"arms": ["none", "bf16"]}, "quantize": None},
            {"capture": (), "train": ("capture",), "sweep": ("train",), "report": ("capture", "train", "sweep")},
        ),
        (
            {"sweep": {"arms": ["none", "fp8"]}},
            {
                "capture": (),
                "train": ("capture",),
                "quantize": ("train",),
                "sweep": ("quantize",),
                "report": ("capture", "train", "quantize", "sweep"),
            },
        ),
        ({"sweep": {"arms": ["none"]}, "capture": None, "train": None, "quantize": None}, {"sweep": (), "report": ("sweep",)}),
        (DRAFT, {"quantize": (), "sweep": ("quantize",), "report": ("quantize", "sweep")}),
        ({**DRAFT, "quantize": None, "sweep": {"arms": ["none", "bf16"]}}, {"sweep": (), "report": ("sweep",)}),
    ],
    ids=["all arms", "bf16 only", "fp8 only", "none only", "finished draft", "finished draft, bf16 only"],
)
def test_only_the_stages_that_are_needed_are_there(stages, changes: dict[str, Any], expected: dict[str, tuple[str, ...]]):
    assert {name: stage.inputs for name, stage in stages(**changes).items()} == expected


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"capture": {"max_tokens": 99}}, {"capture", "train", "quantize", "sweep", "report"}),
        ({"draft": {"aux_layers": [1, 2]}}, {"capture", "train", "quantize", "sweep", "report"}),
        ({"target": {"model": "./target", "max_model_len": 512, "dtype": "float32"}}, {"capture", "train", "quantize", "sweep", "report"}),
        ({"train": {"lr": 0.0005}}, {"train", "quantize", "sweep", "report"}),
        ({"draft": {"vocab_size": 64}}, {"train", "quantize", "sweep", "report"}),
        ({"quantize": {"exclude": ["lm_head"]}}, {"quantize", "sweep", "report"}),
        ({"sweep": {"k": [2]}}, {"sweep", "report"}),
        ({"hardware": {"name": "mi355x"}}, {"sweep", "report"}),
        ({"store": "elsewhere"}, set()),
        ({"capture": {"concurrency": 3}, "train": {"threads": 1}, "hardware": {"resources": {"train": {"cpus": 1}}}}, set()),
        ({"sweep": {"engine": {"kv_cache_bytes": 2**28}}}, {"sweep", "report"}),
    ],
)
def test_a_change_makes_anew_what_it_changes_and_no_more(stages, changes: dict[str, Any], anew: set[str]):
    before, after = stages(), stages(**changes)
    assert {name for name in before if before[name].fingerprint != after[name].fingerprint} == anew


def test_a_prompt_changes_the_stages_that_use_its_split(stages, tmp_path: Path):
    before = stages()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("ferries, short.", "ferries, briefly."))
    report_changed = stages()
    prompts.write_text(prompts.read_text().replace("chess, short.", "chess, briefly."))
    choose_changed = stages()
    assert {name for name in before if before[name].fingerprint != report_changed[name].fingerprint} == {"sweep", "report"}
    assert report_changed["capture"].fingerprint != choose_changed["capture"].fingerprint


def test_moving_the_experiment_changes_nothing(stages, tmp_path: Path, write_experiment: Callable[..., Path]):
    before = stages()
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("experiment.yaml", "prompts.jsonl", "target"):
        (tmp_path / name).rename(moved / name)
    after = {stage.name: stage for stage in stages_of(load_experiment(moved / "experiment.yaml"))}
    assert {name: stage.fingerprint for name, stage in after.items()} == {name: stage.fingerprint for name, stage in before.items()}


def test_the_content_of_a_finished_draft_counts(stages, tmp_path: Path):
    before = stages(**DRAFT)
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"other weights")
    after = stages(**DRAFT)
    assert all(before[name].fingerprint != after[name].fingerprint for name in ("quantize", "sweep", "report"))
