"""Which attention backend vLLM gives a model: named in the experiment, or the platform's default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["grouped", "latent", "latent_sparse", "block_sparse"]
"""`grouped`: each key head serves some query heads (MHA, GQA). `latent`: MLA. `latent_sparse`: MLA with an indexer (DeepSeek-V3.2). `block_sparse`: MiniMax-M3's,
some of whose layers are grouped."""
Platform = Literal["cpu", "rocm"]

ROCM_GROUPED = ("ROCM_AITER_UNIFIED_ATTN", "TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_FA")
"""What an experiment can name for grouped attention on ROCm, what AMD's scripts name first; unnamed, vLLM takes ROCM_ATTN (vllm/platforms/rocm.py)."""
CPU_LATENT = ("CPU_MLA", "AMX_MLA")
TRUE = ("1", "true")
"""How vLLM reads a switch (vllm/envs.py)."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a multimodal model the language model's part of config.json."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def kind_of(config: Mapping[str, Any]) -> Kind:
    """The kind of attention that a config.json describes."""
    text = text_part(config)
    if text.get("kv_lora_rank") is not None:
        return "latent" if text.get("index_topk") is None else "latent_sparse"
    return "block_sparse" if str(text.get("model_type", config.get("model_type"))).startswith("minimax_m3") else "grouped"


def platform_of(hardware: str, gfx: str | None) -> Platform | None:
    """vLLM's platform on a machine of the catalogue; None: not known."""
    return "cpu" if hardware == "cpu" else "rocm" if gfx is not None else None


def is_on(environment: Mapping[str, str], name: str, default: bool) -> bool:
    """A switch of vLLM's environment."""
    value = environment.get(name)
    return default if value is None else value.strip().lower() in TRUE


def uses_aiter_mla(environment: Mapping[str, str]) -> bool:
    """Whether MLA gets AITER's kernels on ROCm: under the master switch, which is off by default, unless switched off itself."""
    return is_on(environment, "VLLM_ROCM_USE_AITER", False) and is_on(environment, "VLLM_ROCM_USE_AITER_MLA", True)


def backends_of(kind: Kind, platform: Platform, named: str | None, environment: Mapping[str, str], cpu_latent: str = "CPU_MLA") -> tuple[str, ...]:
    """The backends of a model's layers. A draft never inherits its target's: vLLM chooses anew unless the speculative config names one.

    named: by the experiment, for this model. cpu_latent: what MLA gets on the CPU at hand; on CPU, vLLM passes over every other name (vllm/platforms/cpu.py).
    """
    if platform == "cpu":
        return ((named if named in CPU_LATENT else cpu_latent) if kind == "latent" else "CPU_ATTN",)
    if kind == "latent":
        return (named or ("ROCM_AITER_MLA" if uses_aiter_mla(environment) else "TRITON_MLA"),)
    if kind == "latent_sparse":
        return (named or "ROCM_AITER_MLA_SPARSE",)
    return (named or "ROCM_ATTN", *(("MINIMAX_M3_SPARSE",) if kind == "block_sparse" else ()))
