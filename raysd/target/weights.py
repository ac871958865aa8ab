"""The target's tensors that a draft starts from, read from safetensors without loading the model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from raysd.errors import TargetError
from raysd.target.checkpoint import Checkpoint, check_shared, unreadable
from raysd.target.shape import TargetShape


def read_embedding_and_head(folder: Path, shape: TargetShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedding [V, H], final norm's weight [H] and head [V, H], wherever the checkpoint keeps them; tied weights give the embedding twice.

    Raises TargetError if one is absent, quantized, or of another shape than the config says.
    """
    names = check_shared(folder, shape)
    tensors = _read(Checkpoint(folder), list(dict.fromkeys(names)))
    embedding, norm, head = (tensors[name] for name in names)
    return embedding, norm, head


LAYER_TENSORS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
                 "input_layernorm", "post_attention_layernorm")


def read_layer(folder: Path, layer: int, names: tuple[str, ...] = LAYER_TENSORS) -> dict[str, torch.Tensor]:
    """Weights of one decoder layer by their names inside it, in the dtype on disk. Raises TargetError if one is absent, as in another kind of layer, or quantized."""
    checkpoint = Checkpoint(folder)
    full = {name: f"{checkpoint.prefix()}layers.{layer}.{name}.weight" for name in names}
    reason = checkpoint.unfit(list(full.values()))
    if reason is not None:
        raise TargetError(what=reason, where=folder, fix="set train.init: random; a draft can start only from a layer of its own kind that is not quantized")
    tensors = _read(checkpoint, list(full.values()))
    return {name: tensors[full[name]] for name in names}


def _read(checkpoint: Checkpoint, names: list[str]) -> dict[str, torch.Tensor]:
    """Tensors by name, in the dtype on disk."""
    found: dict[str, torch.Tensor] = {}
    for path, inside in checkpoint.files(names).items():
        try:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in inside}
        except Exception as err:  # safetensors has an error of its own
            raise unreadable(path, err) from err
    return found
