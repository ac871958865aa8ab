"""The chain that an experiment needs, and what a change to it makes anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raysd
from raysd.experiment import dump_experiment, load_experiment
from raysd.experiment.section import PlacementMark, Section
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.stages import Stage, build_stages
from raysd.prompts.prompt_set import load_prompts
from raysd.target.locate import identify_target

DEMO = Path(__file__).parents[2] / "jobs" / "smollm2-cpu.yaml"

ALL = {"capture", "train", "quantize", "sweep", "report"}
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
        (
            {"capture": {"mode": "stream"}},
            {"train": (), "quantize": ("train",), "sweep": ("train", "quantize"), "report": ("train", "quantize", "sweep")},
        ),
        (DRAFT, {"quantize": (), "sweep": ("quantize",), "report": ("quantize", "sweep")}),
        ({**DRAFT, "quantize": None, "sweep": {"arms": ["none", "bf16"]}}, {"sweep": (), "report": ("sweep",)}),
    ],
    ids=["all arms", "bf16 only", "fp8 only", "none only", "a stream", "finished draft", "finished draft, bf16 only"],
)
def test_only_the_stages_that_are_needed_are_there(stages, changes: dict[str, Any], expected: dict[str, tuple[str, ...]]):
    assert {name: stage.inputs for name, stage in stages(**changes).items()} == expected


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"capture": {"max_tokens": 99}}, ALL),
        ({"draft": {"aux_layers": [1, 2]}}, ALL),
        ({"target": {"model": "./target", "max_model_len": 512, "dtype": "float32"}}, ALL),
        ({"train": {"lr": 0.0005}}, {"train", "quantize", "sweep", "report"}),
        ({"draft": {"vocab_size": 64}}, {"train", "quantize", "sweep", "report"}),
        ({"quantize": {"exclude": ["lm_head"]}}, {"quantize", "sweep", "report"}),
        ({"sweep": {"k": [2]}}, {"sweep", "report"}),
        ({"hardware": {"name": "mi355x"}}, ALL),
        ({"target": {"model": "./target", "max_model_len": 512, "tensor_parallel": 2}}, ALL),
        *(({"capture": {field: value}}, ALL) for field, value in (("engines", 2), ("concurrency", 3), ("shard_conversations", 3), ("kv_cache_bytes", 2**28))),
        ({"train": {"threads": 1}}, {"train", "quantize", "sweep", "report"}),
        ({"store": "elsewhere"}, set()),
        ({"train": {"checkpoint_every_s": 1.0}, "hardware": {"resources": {"train": {"cpus": 1}}, "env": {"HF_HOME": "/models"}}}, set()),
        ({"sweep": {"engine": {"start_timeout_s": 60.0}}}, set()),
        ({"sweep": {"request_limit_s": 3600.0, "silence_limit_s": 1800.0}}, {"sweep", "report"}),
        ({"sweep": {"engine": {"enforce_eager": True}}}, {"sweep", "report"}),
        ({"sweep": {"engine": {"max_num_seqs": 64}}}, {"sweep", "report"}),
        ({"sweep": {"engine": {"kv_cache_bytes": 2**28}}}, {"train", "quantize", "sweep", "report"}),
        ({"sweep": {"engine": {"draft_args": {"attention_backend": "TRITON_ATTN"}}}}, {"train", "quantize", "sweep", "report"}),
        ({"sweep": {"engine": {"env": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}}}}, ALL),
    ],
)
def test_a_change_makes_anew_what_it_changes_and_no_more(stages, changes: dict[str, Any], anew: set[str]):
    before, after = stages(), stages(**changes)
    assert {name for name in before if before[name].fingerprint != after[name].fingerprint} == anew


@pytest.mark.parametrize(
    ("changes", "anew"),
    [
        ({"capture": {"mode": "stream", "max_tokens": 99}}, True),
        ({"capture": {"mode": "stream", "shard_conversations": 3}}, True),
        ({"draft": {"aux_layers": [1, 2]}}, True),
        ({"train": {"lr": 0.0005}}, True),
        ({"target": {"model": "./target", "max_model_len": 512, "dtype": "float32"}}, True),
        ({"hardware": {"name": "mi355x", "resources": {"capture": {"gpus": 1}}}}, True),
        ({"sweep": {"engine": {"env": {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}}}}, True),
        ({"capture": {"mode": "stream", "queue_bytes": 2**22}}, False),
        ({"quantize": {"exclude": ["lm_head"]}}, False),
    ],
)
def test_a_training_on_a_stream_is_made_anew_by_what_changes_either_part(stages, changes: dict[str, Any], anew: bool):
    stream = {"capture": {"mode": "stream"}}
    assert (stages(**stream)["train"].fingerprint != stages(**{**stream, **changes})["train"].fingerprint) is anew


def test_a_prompt_that_a_stream_answers_makes_its_training_anew(stages, tmp_path: Path):
    stream = {"capture": {"mode": "stream"}}
    before = stages(**stream)["train"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(prompts.read_text().replace("rain, short.", "rain, briefly."))
    assert before.fingerprint != stages(**stream)["train"].fingerprint


def test_the_engines_of_a_capture_on_gpus_take_the_memory_that_is_in_its_fingerprint(stages):
    gpus = {"hardware": {"name": "mi355x"}}
    assert stages(**gpus)["capture"].fingerprint != stages(**gpus, sweep={"engine": {"gpu_memory_frac": 0.5}})["capture"].fingerprint


@pytest.mark.parametrize("changes", [{"hardware": {"name": "mi355x"}}, {"target": {"model": "./target", "max_model_len": 512, "tensor_parallel": 2}}])
def test_the_devices_count_in_every_stage_that_runs_an_engine_for_a_finished_draft(stages, changes: dict[str, Any]):
    before, after = stages(**DRAFT), stages(**DRAFT, **changes)
    assert all(before[name].fingerprint != after[name].fingerprint for name in ("quantize", "sweep", "report"))


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


def test_how_a_finished_draft_counts_its_layers_counts(stages):
    before, after = stages(**DRAFT), stages(**DRAFT | {"draft": {"checkpoint": "./draft", "layer_ids": "leaving"}})
    assert all(before[name].fingerprint != after[name].fingerprint for name in ("quantize", "sweep", "report"))


def test_the_content_of_a_finished_draft_counts(stages, tmp_path: Path):
    before = stages(**DRAFT)
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"other weights")
    after = stages(**DRAFT)
    assert all(before[name].fingerprint != after[name].fingerprint for name in ("quantize", "sweep", "report"))


GOLDEN = {
    "capture": "86b3f508f8c24595c4c0367a82834da6",
    "train": "4318017cd3355486bf59c1912520f761",
    "quantize": "b6ceac6acb3c01aa17680f61cbf2936f",
    "sweep": "336a2cd233237d6ea6b915d6cc721f7a",
    "report": "77bb4743433cea7e9e9aed800416f2f3",
}
"""Of the demo. A value that changes here makes everybody's artifacts anew: that must be meant (VERSIONS, or a default that changes the result)."""


def test_a_job_computes_the_fingerprints_that_its_runner_did(tmp_path):
    """The experiment reaches a job as it was resolved: a default that is written as 14400 and read as 14400.0 would be another."""
    experiment = load_experiment(DEMO)
    (tmp_path / "experiment.yaml").write_text(dump_experiment(experiment))
    assert [stage.fingerprint for stage in stages_of(load_experiment(tmp_path / "experiment.yaml"))] == [stage.fingerprint for stage in stages_of(experiment)]


def test_golden_fingerprints_of_the_demo():
    assert {stage.name: stage.fingerprint for stage in stages_of(load_experiment(DEMO))} == GOLDEN


def test_fingerprints_do_not_depend_on_the_hash_seed_or_the_folder(tmp_path: Path):
    code = "import sys; from raysd.experiment import dump_experiment, load_experiment; from raysd.pipeline.preflight import stages_of\n" \
           "print(*[stage.fingerprint for stage in stages_of(load_experiment(sys.argv[1]))])"
    told = {subprocess.run([sys.executable, "-c", code, str(DEMO)], capture_output=True, text=True, cwd=folder, check=True,
                           env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed, folder in (("1", tmp_path), ("2", "/"))}
    assert told == {" ".join(GOLDEN.values()) + "\n"}


def other_value(value: Any) -> Any:
    """Another value of the same kind; no validation asks whether it makes sense."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, *value] or [1]
    return {"x": 1} if isinstance(value, dict) else 1


ELSEWHERE = {
    "name": "part of the key, beside the fingerprint",
    "serve": "says how what is there is served, and makes nothing (tests/deployment/test_options.py)",
    "target.model": "its identity counts, not its text",
    "target.chat_template": "its content counts",
    "draft.checkpoint": "its content counts",
    "prompts.path": "the content counts",
    "prompts.seed": "decides only the splits of rows that name none",
    "prompts.choose_frac": "decides only the splits of rows that name none",
    "prompts.report_frac": "decides only the splits of rows that name none",
    "target.revision": "the commit that it names counts",
    "target.tensor_parallel": "part of the identity of the stages that run engines, and no value of the target's",
}
"""Fields that count in another way than by their value, each tested by itself in this folder or in tests/target."""


def fields(section: Section, path: str = "") -> list[tuple[str, bool]]:
    """Dotted path, and whether it says where it runs, of every field that is no section."""
    found = []
    for name, field in type(section).model_fields.items():
        value, where = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            found += fields(value, f"{where}.")
        else:
            found.append((where, any(isinstance(mark, PlacementMark) for mark in field.metadata)))
    return found


def changed(section: Section, path: str) -> Section:
    """The section with another value in one field."""
    name, _, rest = path.partition(".")
    value = getattr(section, name)
    return section.model_copy(update={name: changed(value, rest) if rest else other_value(value)})


FIELDS = fields(load_experiment(DEMO))


@pytest.mark.parametrize(("path", "placement"), FIELDS, ids=[path for path, _ in FIELDS])
def test_a_field_is_in_the_fingerprint_exactly_if_it_changes_the_result(path: str, placement: bool):
    if path in ELSEWHERE:
        return
    before = load_experiment(DEMO)
    after = changed(before, path)
    prompts = load_prompts(before.prompts)
    anew = [old.fingerprint != new.fingerprint for old, new in zip(build_stages(before, identify_target(before.target), prompts),
                                                                   build_stages(after, identify_target(after.target), prompts), strict=True)]
    assert any(anew) != placement


def test_prompts_of_a_workload_count_by_their_content(write_experiment, tmp_path):
    def fingerprints(path: str, text: str, workload: dict) -> list[str]:
        (tmp_path / path).write_text(json.dumps({"prompt": text}) + "\n")
        workloads = [{"name": "report"}, workload]
        return [stage.fingerprint for stage in stages_of(load_experiment(write_experiment(sweep={"concurrency": [1], "workloads": workloads}))) if stage.name in ("train", "sweep")]

    train, sweep = fingerprints("mine.jsonl", "Hi.", {"name": "mine", "prompts": "mine.jsonl"})
    (tmp_path / "elsewhere").mkdir()
    assert fingerprints("elsewhere/mine.jsonl", "Hi.", {"name": "mine", "prompts": "elsewhere/mine.jsonl"}) == [train, sweep]
    same_train, other = fingerprints("mine.jsonl", "Hello.", {"name": "mine", "prompts": "mine.jsonl"})
    assert same_train == train and other != sweep


def test_a_price_makes_the_report_anew_and_nothing_else(write_experiment):
    def fingerprints(**hardware) -> dict[str, str]:
        return {stage.name: stage.fingerprint for stage in stages_of(load_experiment(write_experiment(hardware=hardware)))}

    without, cheap, dear = fingerprints(), fingerprints(usd_per_hour=1.5), fingerprints(usd_per_hour=2)
    assert len({each["report"] for each in (without, cheap, dear)}) == 3
    assert {**without, "report": ""} == {**cheap, "report": ""} == {**dear, "report": ""}


def test_the_work_of_a_stage_is_not_done_with_prompts_that_it_reads_itself():
    """They may have changed since its fingerprint was computed: it gets those that the fingerprint is of."""
    package = Path(raysd.__file__).parent
    readers = {path.relative_to(package).parts[0] for path in package.rglob("*.py") if re.search(r"\bload_(measured_)?prompts", path.read_text(encoding="utf-8"))}
    assert readers == {"prompts", "pipeline"}
