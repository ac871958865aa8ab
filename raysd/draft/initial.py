"""Where the draft's weights start."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from raysd.draft.layers import RMSNorm
from raysd.draft.model import Eagle3Draft
from raysd.errors import TargetError
from raysd.target.checkpoint import check_start
from raysd.target.weights import read_layer

RANDOM_FC = 0.1
"""Scale of the noise that breaks the symmetry between aux layers in `fc`, relative to a usual initialisation."""
EMBEDDING_HALF = 0.5
"""Scale of the random columns that read the token's embedding, relative to the target's columns beside them."""
NORM = 0.3
"""Scale of the target's norm before the head. Nothing has been learned yet, and at the target's own scale the draft is sure of what is wrong: on the demo 23 nat a
token, where guessing is 8, and learning that takes the first tenth of the steps."""
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NORMS = {"input_layernorm": "hidden_norm", "post_attention_layernorm": "post_attention_layernorm"}
"""The target's norms by the draft's that start as them."""


def initialise(draft: Eagle3Draft, method: str, target: Path, last_layer: int, norm_H: torch.Tensor, head_VH: torch.Tensor) -> None:
    """Sets the weights in place. Seed torch before.

    method `target`: the decoder layer starts as the target's last, which already turns late features into next-token features: what reads the features starts
    with the target's weights; `fc` passes the last aux layer through; norm (smaller by NORM) and head are the target's (head rows of the draft's vocabulary). The
    MLP is left random where the target's is of another width or made of experts.
    method `random`: torch's own initialisation, with the target's norm and head. head: the target's whole head.
    Raises ExperimentError if the target's attention is quantized, or of another kind or of other sizes than the draft's; TargetError if a file cannot be read.
    """
    with torch.no_grad():
        draft.norm.weight.copy_(norm_H).mul_(NORM)
        draft.lm_head.weight.copy_(head_VH[draft.draft_to_target.to(head_VH.device)])
        if method == "random":
            return
        h, attention = draft.shape.hidden_size, draft.midlayer["self_attn"]
        parts = {f"self_attn.{name}": module for name, module in attention.named_children() if isinstance(module, (nn.Linear, RMSNorm))}
        check_start(target, last_layer, draft.shape.start_shapes())
        layer = read_layer(target, last_layer, (*parts, *NORMS))
        draft.fc.weight.normal_(std=RANDOM_FC * draft.fc.in_features ** -0.5)
        draft.fc.weight[:, -h:] += torch.eye(h)
        for name, module in parts.items():
            weight = layer[name].float()
            reads_both = weight.ndim == 2 and (weight.shape[1], module.weight.shape[1]) == (h, 2 * h)
            if reads_both:
                module.weight[:, :h].normal_(std=EMBEDDING_HALF * float(weight.std()))
                module.weight[:, h:].copy_(weight)
            else:
                module.weight.copy_(weight)
        for theirs, ours in NORMS.items():
            draft.midlayer[ours].weight.copy_(layer[theirs])
        _take_mlp(draft, target, last_layer)


def _take_mlp(draft: Eagle3Draft, target: Path, last_layer: int) -> None:
    try:
        mlp = read_layer(target, last_layer, MLP)
    except TargetError:
        return  # experts, or quantized: the rest of the layer is a start as it is
    if mlp["mlp.gate_proj"].shape[0] == draft.shape.intermediate_size:
        for name, weight in mlp.items():
            draft.midlayer["mlp"][name.removeprefix("mlp.")].weight.copy_(weight)
