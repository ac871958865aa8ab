"""Facts for checks: an experiment that is right, with changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raysd.checks.doctor import facts_of
from raysd.checks.facts import Facts
from raysd.checks.findings import Finding
from raysd.checks.registry import examine
from raysd.experiment import Experiment
from tests.checks.stacks import changed

ENGINE = {"max_num_seqs": 64, "start_timeout_s": 3600.0, "draft_args": {"attention_backend": "ROCM_AITER_UNIFIED_ATTN", "draft_tensor_parallel_size": 1},
          "env": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_RMSNORM": "0", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
                  "VLLM_ENGINE_READY_TIMEOUT_S": "3600", "HSA_NO_SCRATCH_RECLAIM": "1"}}
RIGHT = {"name": "right", "store": "/nowhere/runs", "target": {"model": "amd/Kimi-K2.5-MXFP4", "tensor_parallel": 4, "max_model_len": 2304}, "hardware": {"name": "mi355x", "vllm": "0.24.0"},
         "prompts": {"path": "/nowhere/prompts.jsonl"}, "draft": {"checkpoint": "/nowhere/draft"}, "sweep": {"arms": ["none", "bf16"], "k": [3], "engine": ENGINE}}
TRAINED = {"draft.checkpoint": None, "capture": {}, "train": {}}
"""Changes: the draft is trained."""
GROUPED = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 151936, "intermediate_size": 12288,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
"""A target's config.json, with grouped attention."""


def experiment_with(changes: Mapping[str, Any]) -> Experiment:
    return Experiment.model_validate_json(json.dumps(changed(RIGHT, changes)), strict=True)


def facts_with(changes: Mapping[str, Any] | None = None, **facts: Any) -> Facts:
    """changes: of the experiment, by dotted place; facts: other values of Facts."""
    return replace(facts_of(experiment_with(changes or {}), installed="0.32.0"), **facts)


def found(changes: Mapping[str, Any] | None = None, **facts: Any) -> list[Finding]:
    return examine(facts_with(changes, **facts))


def env(**variables: str) -> dict[str, str]:
    """Changes: variables of the engines."""
    return {f"sweep.engine.env.{name}": value for name, value in variables.items()}


def arguments(**given: Any) -> dict[str, Any]:
    """Changes: arguments of vLLM's server."""
    return {f"sweep.engine.extra_args.{name.replace('_', '-')}": value for name, value in given.items()}


def draft_arguments(**given: Any) -> dict[str, Any]:
    """Changes: keys of speculative_config."""
    return {f"sweep.engine.draft_args.{name}": value for name, value in given.items()}
