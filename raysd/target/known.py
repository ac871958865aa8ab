"""What is published of some targets, for checks of an experiment whose target is not on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

MODELS = Path(__file__).parent / "models.yaml"

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class KnownTarget:
    """A published checkpoint."""

    config: dict[str, Any]
    """Its config.json, as far as it is published."""
    weight_bytes: int | None
    """Of all its weights; None: not published."""


def known_target(model: str) -> KnownTarget | None:
    """What is published of a Hugging Face id; None: nothing that is listed here. Letters may be large or small, as on the hub."""
    return _checkpoints().get(model.lower())


def known_draft(name: str) -> dict[str, Any] | None:
    """Of a published Eagle3 draft the fields of its config.json that are published; None: it is not listed here. name: the last part of its id."""
    for architecture in published().values():
        kind = architecture["drafts"].get(name.lower())
        if kind is not None:
            facts, target = architecture[kind], known_config(architecture)
            sizes = {"num_key_value_heads": facts["kv_heads"], "head_dim": facts["head_dim"]} if "kv_heads" in facts else {name: target[name] for name in LATENT}
            return {"architectures": [facts["architecture"]], "model_type": "llama" if "kv_heads" in facts else "kimi_k2", "hidden_size": facts["hidden"],
                    "intermediate_size": facts["intermediate"], "num_attention_heads": facts["heads"], "vocab_size": facts["vocab"], "num_hidden_layers": 1, **sizes}
    return None


def known_config(architecture: dict[str, Any]) -> dict[str, Any]:
    """The fields of config.json that an entry of models.yaml tells."""
    attention, experts = architecture["attention"], architecture["experts"]
    config = {"num_hidden_layers": architecture["layers"], "hidden_size": architecture["hidden"], "vocab_size": architecture["vocab"],
              "intermediate_size": architecture["intermediate"], "max_position_embeddings": architecture["context"], "num_attention_heads": attention["heads"],
              "num_experts_per_tok": experts["top_k"], "tie_word_embeddings": False}
    if attention["kind"] == "mla":
        return config | {"model_type": "kimi_k2", "q_lora_rank": attention["q_lora"], "kv_lora_rank": attention["kv_lora"], "qk_nope_head_dim": attention["qk_nope"],
                         "qk_rope_head_dim": attention["qk_rope"], "v_head_dim": attention["v"], "n_routed_experts": experts["routed"],
                         "n_shared_experts": experts["shared"], "moe_intermediate_size": experts["intermediate"], "first_k_dense_replace": architecture["dense_layers"]}
    return config | {"model_type": "minimax_m2", "num_key_value_heads": attention["kv_heads"], "head_dim": attention["head_dim"],
                     "num_local_experts": experts["routed"]}


@cache
def published() -> dict[str, dict[str, Any]]:
    """models.yaml, by the target's short name."""
    import yaml

    return yaml.safe_load(MODELS.read_text(encoding="utf-8"))


@cache
def _checkpoints() -> dict[str, KnownTarget]:
    found = {}
    for architecture in published().values():
        for name, facts in architecture["checkpoints"].items():
            weight_bytes = facts.get("weight_bytes")
            found[name.lower()] = KnownTarget(known_config(architecture) | {"quantization_config": facts["quantization_config"]}, weight_bytes and int(weight_bytes))
    return found
