"""The draft on disk: config.json and safetensors as vLLM loads them (llama_eagle3.py; for latent attention deepseek_eagle3.py)."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysd.draft.shape import DraftShape

if TYPE_CHECKING:
    import torch

    from raysd.draft.model import Eagle3Draft

WEIGHTS = "model.safetensors"


def draft_config(shape: DraftShape, dtype: str = "bfloat16") -> Any:
    """A transformers config with the keys that vLLM reads from a draft."""
    from transformers import DeepseekV2Config, LlamaConfig

    common: dict[str, Any] = dict(
        hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size, num_attention_heads=shape.attention_heads,
        num_key_value_heads=shape.kv_heads, num_hidden_layers=1, rms_norm_eps=shape.rms_norm_eps, rope_parameters=dict(shape.rope_parameters),
        max_position_embeddings=shape.max_position_embeddings, vocab_size=shape.target_vocab_size, draft_vocab_size=shape.vocab_size,
        target_hidden_size=shape.hidden_size, tie_word_embeddings=False, norm_before_residual=shape.norm_before_residual, fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        # Without these two the draft loads, and then dies on the first step or reads the wrong layers.
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers), "layer_ids": "entering"},
        eagle_aux_hidden_state_layer_ids=list(shape.aux_layers), num_aux_hidden_states=len(shape.aux_layers), dtype=dtype)
    if shape.latent is None:
        return LlamaConfig(architectures=["LlamaForCausalLMEagle3"], head_dim=shape.head_dim, **common)
    # Not `deepseek_v3`, which vLLM 0.32 takes for a multi-token predictor and refuses. The layer's MLP is always dense.
    return DeepseekV2Config(architectures=["Eagle3DeepseekV2ForCausalLM"], **asdict(shape.latent), first_k_dense_replace=1, **common)


def save_draft(draft: Eagle3Draft, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json and model.safetensors: weights in the served dtype, `d2t` offsets and `t2d` mask for a reduced vocabulary; no embedding, which vLLM takes from the target."""
    import torch
    from safetensors.torch import save_file

    from raysd.draft.vocabulary import offsets

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in draft.state_dict().items()}
    if draft.shape.vocab_size < draft.shape.target_vocab_size:  # vLLM 0.32 refuses a `d2t` beside the whole vocabulary
        vocabulary = draft.draft_to_target.cpu()
        tensors["d2t"] = offsets(vocabulary)
        tensors["t2d"] = torch.zeros(draft.shape.target_vocab_size, dtype=torch.bool).index_fill(0, vocabulary, True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = draft_config(draft.shape, str(dtype).removeprefix("torch."))
    (folder / "config.json").write_text(json.dumps(json.loads(config.to_json_string(use_diff=False)), indent=1), encoding="utf-8")
