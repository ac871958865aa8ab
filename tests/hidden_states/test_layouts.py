"""The capture stage with real vLLM on targets of other layouts than Llama's: one pass yields answers, and states that are Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from raysd.backends.vllm_capture import capture_engine
from raysd.experiment import Experiment
from raysd.hidden_states import verify
from raysd.hidden_states.capture import capture
from raysd.hidden_states.shards import Captured
from raysd.target.reference import entered_states
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
    rounding = what_bf16_changes(target, conversation.token_ids[:-1].tolist())
    assert metrics["conversations"] == 3 and conversation.states_TLH.shape == (len(conversation.token_ids) - 1, 4, 64)
    assert metrics["hf_skipped"] is None and metrics["head_agreement_frac"] >= 0.95
    assert all(error < 1.5 * rounding[layer] for layer, error in metrics["hf_relative_error"].items()), (metrics["hf_relative_error"], rounding)


def what_bf16_changes(target: Path, token_ids: list[int]) -> dict[str, float]:
    """By layer, how far Hugging Face's own model in bf16 is from itself in float32, as `compare_with_reference` has it: what two right implementations may differ by."""
    layers = [1, 2, 3, 4]
    exact, rounded = (entered_states(AutoModelForCausalLM.from_pretrained(target, dtype=dtype).eval(), token_ids, layers) for dtype in (torch.float32, torch.bfloat16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "LARGEST_RELATIVE_ERROR", 1.0)
        return verify.compare_with_reference(rounded, exact, layers, "")
