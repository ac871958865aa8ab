"""The command as a user calls it: a process of its own, its exit code, and what it prints where."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raysd

HEAVY = ("torch", "ray", "vllm", "transformers", "quark", "pydantic", "numpy", "pyarrow", "rich")


def call(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "raysd", *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=120)


def loaded_after(statement: str, *arguments: object) -> set[str]:
    """Libraries that a process has imported after a statement."""
    code = f"import sys\ntry:\n    {statement}\nexcept SystemExit:\n    pass\nprint('LOADED', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    return {name.split(".")[0] for name in line.split()[1:]}


def test_help_and_version_load_nothing_heavy():
    loaded = loaded_after("from raysd.cli import main; main(['--help'])")
    assert "raysd" in loaded and loaded.isdisjoint(HEAVY)
    assert call("--help").returncode == 0
    assert call("--version").stdout == f"raysd {raysd.__version__}\n"


def test_plan_loads_neither_torch_nor_ray_nor_vllm(write_experiment: Callable[..., Path]):
    loaded = loaded_after("from raysd.cli import main; main(['plan', sys.argv[1]])", write_experiment())
    assert "pydantic" in loaded and loaded.isdisjoint({"torch", "ray", "vllm", "transformers", "quark", "numpy", "pyarrow"})


def test_plan_prints_a_table_or_json_and_writes_nothing(write_experiment: Callable[..., Path], tmp_path: Path):
    spec = write_experiment()
    shown = call("plan", spec)
    assert shown.returncode == 0 and shown.stderr == ""
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["capture", "train", "quantize", "sweep", "report"]
    document = json.loads(call("plan", spec, "--json").stdout)
    assert document["experiment"] == "tiny"
    assert [(entry["stage"], entry["state"]) for entry in document["stages"]] == [
        (name, "run") for name in ("capture", "train", "quantize", "sweep", "report")
    ]
    assert all(entry.keys() == {"stage", "fingerprint", "state", "why", "inputs"} for entry in document["stages"])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [[], ["serve"], ["run"], ["plan", "a.yaml", "b.yaml"], ["run", "a.yaml", "--fast"]])
def test_wrong_usage_exits_64_with_one_message(arguments: list[str]):
    done = call(*arguments)
    assert done.returncode == 64 and done.stdout == ""
    assert done.stderr.startswith("usage: raysd") and "error: " in done.stderr and "Traceback" not in done.stderr


BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("unknown key", {"train": {"learning_rate": 1}}, "train.learning_rate", "unknown key"),
    ("unknown arm", {"sweep": {"arms": ["none", "int4"]}}, "sweep.arms", "int4"),
    ("absent prompts", {"prompts": {"path": "absent.jsonl"}}, "prompts", "absent.jsonl"),
    ("empty prompts", {"prompts": {"path": "empty.jsonl"}}, "prompts", "empty.jsonl"),
    ("absent target", {"target": {"model": "./absent"}}, "target.model", "absent"),
    ("absent draft", {"capture": None, "train": None, "draft": {"checkpoint": "./absent"}}, "draft.checkpoint", "absent"),
]
BAD_FOR_RUN = [
    ("a context that the target has no positions for", {"target": {"model": "./target", "max_model_len": 4096}}, "target.max_model_len", "512"),
    ("devices that cannot share the heads", {"target": {"model": "./target", "tensor_parallel": 3, "max_model_len": 512}}, "target.tensor_parallel", "4 attention heads"),
    ("unknown hardware", {"hardware": {"name": "mi999x"}}, "hardware.name", "mi355x"),
    ("a layer that does not exist", {"draft": {"aux_layers": [1, 99]}}, "draft.aux_layers", "99"),
    ("too many GPUs", {"hardware": {"name": "mi355x", "resources": {"train": {"gpus": 16}}}}, "hardware.resources.train.gpus", "16 GPUs"),
    ("a draft of another target", {"capture": None, "train": None, "draft": {"checkpoint": "./draft"}}, "draft.checkpoint", "width 128"),
]


@pytest.mark.parametrize(
    ("verb", "changes", "field", "words"),
    [(verb, *case[1:]) for case in BAD for verb in ("plan", "run")] + [("run", *case[1:]) for case in BAD_FOR_RUN],
    ids=[f"{verb} {case[0]}" for case in BAD for verb in ("plan", "run")] + [f"run {case[0]}" for case in BAD_FOR_RUN],
)
def test_bad_input_exits_64_and_names_file_and_field(
    write_experiment: Callable[..., Path], tmp_path: Path, verb: str, changes: dict[str, Any], field: str, words: str
):
    (tmp_path / "empty.jsonl").touch()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 128, "vocab_size": 256}))
    (draft / "model.safetensors").write_bytes(b"weights")
    spec = write_experiment(**changes)
    done = call(verb, spec)
    assert done.returncode == 64, done.stderr
    assert str(spec) in done.stderr and field in done.stderr and words in done.stderr and "fix:" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_missing_file_exits_64():
    done = call("run", "absent.yaml")
    assert done.returncode == 64 and "absent.yaml" in done.stderr and "Traceback" not in done.stderr


def test_debug_shows_the_traceback(write_experiment: Callable[..., Path]):
    done = call("plan", write_experiment(target={"model": "./absent"}), "--debug")
    assert done.returncode == 64 and "Traceback" in done.stderr and "fix:" in done.stderr


def test_an_address_where_nothing_answers_exits_1_within_seconds(write_experiment: Callable[..., Path], tmp_path: Path):
    started = time.monotonic()
    done = call("run", write_experiment(), "--address", "http://127.0.0.1:9", "--json")
    assert done.returncode == 1 and "127.0.0.1:9" in done.stderr and "--address" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and time.monotonic() - started < 20
    assert not list((tmp_path / "runs").rglob("record.json"))


def test_a_disk_that_is_too_small_exits_1_before_anything_starts(write_experiment: Callable[..., Path], tmp_path: Path):
    config = tmp_path / "target" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 10**13}))
    done = call("run", write_experiment(capture={"max_tokens": 10**12}, target={"model": "./target", "max_model_len": 10**13}))
    assert done.returncode == 1 and "GB are free" in done.stderr and "store" in done.stderr and "Traceback" not in done.stderr


def test_a_store_that_cannot_be_written_exits_1(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("run", write_experiment(store="prompts.jsonl/below"))
    assert done.returncode == 1 and str(tmp_path / "prompts.jsonl") in done.stderr and "Traceback" not in done.stderr


def test_a_report_that_is_not_there_yet_says_how_to_get_it(write_experiment: Callable[..., Path]):
    spec = write_experiment()
    done = call("report", spec)
    assert done.returncode == 1 and f"raysd run {spec}" in done.stderr and done.stdout == ""
