"""A real experiment of the whole chain on a tiny budget, and the command that runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.tiny_models import chained_llama

TOPICS = ["rain", "bread", "chess", "trains", "maps", "tea", "clocks", "rivers", "music", "stars", "glass", "sheep"]
FORMS = ["Explain {} simply.", "List three facts about {}.", "Why do people like {}?", "Write two lines about {}."]

UNHURRIED = {"largest_lag_ms": 60_000, "smallest_concurrency_frac": 0.01, "largest_repeating_frac": 1}
"""Of a sweep's section: a machine that runs tests is late now and then, and a random model repeats itself."""


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
        "capture": {"engines": 2, "max_tokens": 48, "concurrency": 16, "shard_conversations": 6, "kv_cache_bytes": 268435456},
        "train": {"steps": 150, "ttt_steps": 2, "lr": 2e-3, "evaluations": 2, "served_checkpoints": 1, "served_k": 2, "served_tokens": 48, "truncated": "keep"},
        "quantize": {"served_k": 2, "served_tokens": 48},
        "sweep": UNHURRIED | {"concurrency": [1, 2], "arm_concurrency": {"fp8": [1]}, "k": [2], "blocks": 3, "requests_per_slot": 1,
                  "workloads": [{"name": "report", "osl": 32}],
                  "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}}} | changes
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(experiment))
    return path


def raysd(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "raysd", *arguments], capture_output=True, text=True, timeout=900)
