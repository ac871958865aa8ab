"""The chain on targets in other layouts than Llama's. Kimi-K2's, with experts and MLA, has a draft with MLA: vLLM serves no other kind of draft beside MLA on
CPU, as the two attentions share no block size. MiniMax-M2's, with experts alone, has one with grouped attention.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.tiny_chain import FORMS, raysd, write_experiment
from tests.tiny_models import chained, tiny_deepseek, tiny_minimax


def artifact(run: dict, stage: str) -> tuple[dict, Path]:
    """The stage's record and the folder of its files."""
    folder = Path(next(entry["artifact"] for entry in run["stages"] if entry["stage"] == stage))
    record = json.loads((folder / "record.json").read_text())
    return record, folder / record["folder"]


def small_target(folder: Path, make: Callable[[Path], Path], attention: str) -> Path:
    """The tiny chain's experiment with another target and draft. Each prompt ends with another word, and nothing follows it, so that answers start at different
    places of the target's cycle; they never end of themselves, and those that are cut off are kept.
    """
    chained(make(folder / "small"))
    (folder / "content.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    path = write_experiment(folder, target={"model": "./small", "max_model_len": 256, "chat_template": "content.jinja"},
                            draft={"aux_layers": [1, 2, 3], "vocab_size": 384, "attention": attention},
                            train={"steps": 300, "ttt_steps": 2, "lr": 2e-3, "evaluations": 2, "served_k": 2, "served_tokens": 48, "truncated": "keep"})
    words = ("".join(pair) for pair in itertools.product("bcdfghjklmnp", "aeiou"))
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps(row | {"prompt": f"{row['prompt']} {next(words)}"}) for row in rows))
    return path


@dataclass(frozen=True)
class Case:
    make: Callable[[Path], Path]
    attention: str
    architecture: str
    quantized: set[str]
    """Weights of the draft that must have become FP8."""


CASES = {
    "kimi": Case(tiny_deepseek, "latent", "Eagle3DeepseekV2ForCausalLM",
                 {"midlayer.self_attn.q_a_proj", "midlayer.self_attn.kv_a_proj_with_mqa", "midlayer.self_attn.kv_b_proj"}),
    "minimax": Case(tiny_minimax, "grouped", "LlamaForCausalLMEagle3", {"midlayer.self_attn.q_proj", "midlayer.self_attn.k_proj", "midlayer.self_attn.v_proj"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_small_target_is_captured_and_its_draft_trained_quantized_and_served(case, tmp_path):
    path = small_target(tmp_path, case.make, case.attention)
    done = raysd("run", str(path), "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads(done.stdout)
    assert [(entry["stage"], entry["state"]) for entry in run["stages"]] == [(s, "done") for s in ("capture", "train", "quantize", "sweep", "report")]

    captured, _ = artifact(run, "capture")
    assert max(captured["metrics"]["hf_relative_error"].values()) < 0.05 and captured["metrics"]["head_agreement_frac"] > 0.9
    trained, folder = artifact(run, "train")
    assert json.loads((folder / "draft" / "config.json").read_text())["architectures"] == [case.architecture]
    served, replayed = (trained["metrics"][name]["acceptance_length"] for name in ("served", "replay"))
    assert served == pytest.approx(replayed, rel=0.03) and 1.2 < served < 2.9  # of at most 3: at the ends any replay would do
    quantized, _ = artifact(run, "quantize")
    assert case.quantized <= set(quantized["metrics"]["quantized_weights"])
    assert quantized["metrics"]["acceptance_ratio"] == pytest.approx(1, abs=0.1)

    cells = pq.read_table(artifact(run, "sweep")[1] / "cells").to_pylist()
    assert {cell["arm"] for cell in cells} == {"none", "bf16", "fp8"} and all(cell["valid"] for cell in cells)
    assert run["acceptance_length"]["bf16"] > 1.2 and run["acceptance_length"]["fp8"] > 1.2
    for counts in run["lossless"].values():
        assert counts["broken"] == 0 and sum(counts.values()) == len(FORMS)
