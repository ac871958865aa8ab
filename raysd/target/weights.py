"""The target's tensors that a draft starts from, read from safetensors without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open

from raysd.errors import TargetError
from raysd.target.shape import TargetShape


def read_tensors(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint folder by name, in the dtype on disk. Raises TargetError, listing what is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    else:
        with safe_open(folder / "model.safetensors", "pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    missing = [name for name in names if name not in where]
    if missing:
        raise TargetError(what=f"the target's checkpoint has no tensors {missing}", where=folder,
                          fix="set train.init: random if only layer tensors are missing; otherwise this target's layout is not supported")
    found = {}
    for file_name in sorted({where[name] for name in names}):
        with safe_open(folder / file_name, "pt") as file:
            found |= {name: file.get_tensor(name) for name in names if where[name] == file_name}
    return found


def read_embedding_and_head(folder: Path, shape: TargetShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedding [V, H], final norm's weight [H] and head [V, H] of a Llama-like target; tied weights give the embedding twice."""
    names = ["model.embed_tokens.weight", "model.norm.weight"] + ([] if shape.tie_word_embeddings else ["lm_head.weight"])
    tensors = read_tensors(folder, names)
    embedding = tensors["model.embed_tokens.weight"]
    return embedding, tensors["model.norm.weight"], tensors.get("lm_head.weight", embedding)


LAYER_TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "input_layernorm", "post_attention_layernorm")


def read_layer(folder: Path, layer: int) -> dict[str, torch.Tensor]:
    """The tensors of one decoder layer, by the names in LAYER_TENSORS."""
    prefix = f"model.layers.{layer}."
    tensors = read_tensors(folder, [f"{prefix}{name}.weight" for name in LAYER_TENSORS])
    return {name: tensors[f"{prefix}{name}.weight"] for name in LAYER_TENSORS}
