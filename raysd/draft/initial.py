"""Where the draft's weights start."""

from __future__ import annotations

from pathlib import Path

import torch

from raysd.draft.model import Eagle3Draft
from raysd.target.weights import read_layer

RANDOM_FC = 0.1
"""Scale of the noise that breaks the symmetry between aux layers in `fc`, relative to a usual initialisation."""
EMBEDDING_HALF = 0.5
"""Scale of the random columns that read the token's embedding, relative to the target's columns beside them."""


def initialise(draft: Eagle3Draft, method: str, target: Path, last_layer: int, norm_H: torch.Tensor, head_VH: torch.Tensor) -> None:
    """Sets the weights in place. Seed torch before.

    method `target`: the decoder layer starts as the target's last, which already turns late features into next-token features: q, k and v read the
    hidden half with the target's weights; `fc` passes the last aux layer through; norm and head are the target's (head rows of the draft's vocabulary).
    method `random`: torch's own initialisation, with the target's norm and head. head: the target's whole head.
    Raises TargetError if the target's layer has other tensors than a Llama's.
    """
    with torch.no_grad():
        draft.norm.weight.copy_(norm_H)
        draft.lm_head.weight.copy_(head_VH[draft.draft_to_target.to(head_VH.device)])
        if method == "random":
            return
        h, layer = draft.shape.hidden_size, read_layer(target, last_layer)
        draft.fc.weight.normal_(std=RANDOM_FC * draft.fc.in_features ** -0.5)
        draft.fc.weight[:, -h:] += torch.eye(h)
        attention, mlp = draft.midlayer["self_attn"], draft.midlayer["mlp"]
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = layer[f"self_attn.{name}"].float()
            attention[name].weight[:, :h].normal_(std=EMBEDDING_HALF * float(weight.std()))
            attention[name].weight[:, h:].copy_(weight)
        attention["o_proj"].weight.copy_(layer["self_attn.o_proj"])
        if draft.shape.intermediate_size == layer["mlp.gate_proj"].shape[0]:
            for name in ("gate_proj", "up_proj", "down_proj"):
                mlp[name].weight.copy_(layer[f"mlp.{name}"])
        draft.midlayer["hidden_norm"].weight.copy_(layer["input_layernorm"])
        draft.midlayer["post_attention_layernorm"].weight.copy_(layer["post_attention_layernorm"])
