"""Small drafts and conversations with random numbers, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from raysd.draft.batch import TargetHead
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import DraftShape
from raysd.experiment.target import TargetSection
from raysd.hidden_states.shards import Conversation, Origin
from raysd.target import read_shape, target_fingerprint
from raysd.target.shape import LatentSizes

TARGET_VOCAB, VOCAB = 96, 40
ORIGIN = Origin("0123456789abcdef0123456789abcdef", (1, 2, 3, 6))
"""Of shards with the states of a `conversation`, for readers that do not ask whose they are."""
LATENT = {"latent": LatentSizes(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12), "kv_heads": 4, "head_dim": 24,
          "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 256}}
"""Changes that make a `small_shape` one of latent attention."""


def small_shape(**changes) -> DraftShape:
    values = dict(hidden_size=32, aux_layers=(1, 2, 3), attention_heads=4, kv_heads=2, head_dim=16, intermediate_size=48, target_vocab_size=TARGET_VOCAB,
                  vocab_size=VOCAB, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=256,
                  norm_before_residual=False, fc_norm=False, norm_output=False)
    return DraftShape(**(values | changes))


def small_draft(shape: DraftShape | None = None, seed: int = 0) -> Eagle3Draft:
    shape = shape or small_shape()
    torch.manual_seed(seed)
    vocabulary = torch.randperm(shape.target_vocab_size)[:shape.vocab_size].sort().values
    draft = Eagle3Draft(shape, torch.randn(shape.target_vocab_size, shape.hidden_size), vocabulary)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return draft


def lively(draft: Eagle3Draft, seed: int = 0) -> Eagle3Draft:
    """Random weights for a draft of any size, in place, such that every part of it decides: heads attend to few rows, and few proposals are ties.

    They are what bf16 can hold, so that a checkpoint in bf16 keeps them.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # A tiny target's states are some tens wide: without a small `fc` they would drown what the layer adds to them.
            scale = next((scale for part, scale in (("fc.", 0.05), ("q_proj", 3.0), ("q_b_proj", 3.0), ("lm_head", 3.0)) if part in name), 1.0)
            value = 1 + 0.2 * noise if parameter.ndim == 1 else scale * noise * parameter.shape[1] ** -0.5
            parameter.copy_(value.to(torch.bfloat16))
    return draft


def draft_and_target() -> tuple[Eagle3Draft, TargetHead, torch.Tensor]:
    """A small draft, a target's head for its vocabulary, and the map from target tokens to its rows (-1 outside)."""
    draft = small_draft()
    torch.manual_seed(7)
    head = TargetHead(torch.ones(32), torch.randn(draft.shape.vocab_size, 32), 1e-5)
    token_to_draft = torch.full((TARGET_VOCAB,), -1)
    token_to_draft[draft.draft_to_target] = torch.arange(draft.shape.vocab_size)
    return draft, head, token_to_draft


def conversation(tokens: int, prompt_tokens: int, seed: int = 0, hidden: int = 32, slots: int = 4) -> Conversation:
    generator = torch.Generator().manual_seed(seed)
    return Conversation(f"p{seed}", "topic", "train", torch.randint(TARGET_VOCAB, (tokens,), generator=generator), prompt_tokens, "length",
                        torch.randn(tokens - 1, slots, hidden, generator=generator))


def captured_from(target: TargetSection, aux_layers: list[int]) -> Origin:
    """Of shards as the capture stage writes them for a target in a folder."""
    return Origin(target_fingerprint(target), (*aux_layers, read_shape(Path(target.model)).layers))
