"""Small drafts and conversations with random numbers, for tests."""

from __future__ import annotations

import torch

from raysd.draft.batch import TargetHead
from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import DraftShape
from raysd.hidden_states.shards import Conversation

TARGET_VOCAB, VOCAB = 96, 40


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
