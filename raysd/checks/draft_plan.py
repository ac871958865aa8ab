"""The sizes of a draft that is yet to be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raysd.checks.attention import text_part
from raysd.experiment.draft import DraftSection

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def planned_draft(section: DraftSection, target: Mapping[str, Any]) -> dict[str, Any]:
    """What its config.json will say of sizes (raysd/draft/shape.py), as far as the target's tells: what that leaves out is absent here."""
    text = text_part(target)
    latent = text.get("kv_lora_rank") is not None
    heads = section.attention_heads or text.get("num_attention_heads")
    width = text.get("intermediate_size")
    if width is not None and text.get("moe_intermediate_size") is None and text.get("num_experts_per_tok"):
        width *= text["num_experts_per_tok"]  # the experts of one token together
    sizes = {"model_type": "llama", "hidden_size": text.get("hidden_size"), "num_attention_heads": heads, "intermediate_size": section.intermediate_size or width,
             "num_hidden_layers": 1, "vocab_size": text.get("vocab_size"), "num_aux_hidden_states": None if section.aux_layers is None else len(section.aux_layers),
             "draft_vocab_size": min(filter(None, (section.vocab_size, text.get("vocab_size"))), default=None)}
    if latent and section.attention != "grouped":
        sizes |= {name: text.get(name) for name in LATENT}
    else:
        of_target = {} if latent else text
        sizes |= {"num_key_value_heads": section.kv_heads or of_target.get("num_key_value_heads"), "head_dim": section.head_dim or of_target.get("head_dim")}
    return {name: value for name, value in sizes.items() if value is not None}
