"""Experiments on MI355X nodes whose models are published and not on disk, for checks that compute from figures."""

from __future__ import annotations

from typing import Any

from raysd.checks.doctor import facts_of
from raysd.checks.facts import Facts, VllmProbe
from raysd.experiment import Experiment

KIMI: dict[str, Any] = {
    "name": "kimi", "target": {"model": "amd/Kimi-K2.5-MXFP4", "tensor_parallel": 4, "max_model_len": 9472, "trust_remote_code": True},
    "hardware": {"name": "mi355x", "vllm": "0.27.1"}, "prompts": {"path": "prompts.jsonl"}, "draft": {"checkpoint": "/models/kimi-k2.5-eagle3"},
    "sweep": {"arms": ["none", "bf16"], "k": [3], "engine": {"env": {"VLLM_ROCM_USE_AITER": "1"}, "draft_args": {"attention_backend": "ROCM_AITER_UNIFIED_ATTN"}}}}
MINIMAX: dict[str, Any] = {
    "name": "minimax", "target": {"model": "MiniMaxAI/MiniMax-M2.5", "tensor_parallel": 4, "max_model_len": 9472}, "hardware": {"name": "mi355x", "vllm": "0.27.1"},
    "prompts": {"path": "prompts.jsonl"}, "draft": {"checkpoint": "/models/MiniMax-M2.5-Eagle3"},
    "sweep": {"arms": ["none", "bf16"], "k": [3], "engine": {"env": {"VLLM_ROCM_USE_AITER": "1"}, "draft_args": {"attention_backend": "ROCM_AITER_FA"},
                                                             "extra_args": {"attention-backend": "ROCM_AITER_FA"}}}}


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A document with fields changed by dotted name, in a copy; None removes one."""
    document = {key: changed(value, {}) if isinstance(value, dict) else value for key, value in document.items()}
    for name, value in changes.items():
        *parents, last = name.split(".")
        place = document
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value
    return document


def stack(document: dict[str, Any], changes: dict[str, Any] | None = None, installed: str | None = None, probe: VllmProbe | None = None) -> Facts:
    """The facts of an experiment with fields changed."""
    return facts_of(Experiment.model_validate(changed(document, changes or {})), None, installed, probe)
