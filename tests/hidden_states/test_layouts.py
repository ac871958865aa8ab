"""The capture stage with real vLLM on targets of other layouts than Llama's: one pass yields answers, and states that are Hugging Face's."""

from __future__ import annotations

import json

import pytest

from raysd.backends.vllm_capture import capture_engine
from raysd.experiment import Experiment
from raysd.hidden_states.capture import capture
from raysd.hidden_states.shards import Captured
from tests.stage_runs import attempt
from tests.tiny_models import tiny_deepseek, tiny_minimax, tiny_qwen


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_deepseek, tiny_minimax, tiny_qwen])
def test_a_target_of_another_layout_is_captured(make, tmp_path):
    target = make(tmp_path / "target")
    rows = [{"id": f"p{i}", "topic": f"t{i}", "split": split, "prompt": "bado kelu " * (i + 1)} for i, split in enumerate(["train", "train", "choose", "report"])]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    experiment = Experiment.model_validate({
        "name": "x", "target": {"model": str(target), "max_model_len": 128}, "prompts": {"path": str(tmp_path / "prompts.jsonl")}, "draft": {"aux_layers": [1, 2, 3]},
        "capture": {"max_tokens": 24, "concurrency": 4, "kv_cache_bytes": 2**28}, "train": {}, "quantize": {}})
    with attempt(tmp_path / "store", experiment) as run:
        metrics = capture(run, capture_engine)
        conversation = Captured(run.out, "train")[0]
    assert metrics["conversations"] == 3 and conversation.states_TLH.shape == (len(conversation.token_ids) - 1, 4, 64)
    assert metrics["hf_skipped"] is None and max(metrics["hf_relative_error"].values()) < 0.03 and metrics["head_agreement_frac"] >= 0.95
