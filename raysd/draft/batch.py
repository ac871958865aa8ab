"""Captured conversations packed into rows for the draft, with the target's own distribution to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from raysd.draft.model import Rows
from raysd.hidden_states.shards import Conversation


@dataclass
class Batch:
    """Rows, and what follows each asked row. Axes as in model.py; S steps look ahead."""

    rows: Rows
    ahead_SM: torch.Tensor
    """[S + 1, M] token t + 1 + s of each asked row; the last one known is repeated past a conversation's end."""
    known_SM: torch.Tensor
    """[S + 1, M] whether that token is known."""
    last_states_MH: torch.Tensor
    """[M, H] the target's last hidden state at t + 1, un-normed: it decides token t + 2."""


ROWS_AT_ONCE = 512
ROW_BUCKET = 64
"""Training rounds the rows of a batch up to this: oneDNN builds a kernel for each shape it meets, and thousands of shapes halve the speed on CPU."""


def pack(conversations: Sequence[Conversation], steps: int, device: torch.device | str = "cpu", row_bucket: int = 1) -> Batch:
    """Rows t = 0 .. T - 2 of each conversation; asked are those that vLLM would draft from: t >= prompt_tokens - 1, where the token after t is an answer's.

    With a row_bucket, rows without a known token follow as one more conversation, so that N and M are multiples of it.
    """
    features, tokens, positions, counts, asked, ahead, known, last = [], [], [], [], [], [], [], []
    for c in conversations:
        count = len(c.token_ids) - 2
        first = c.prompt_tokens - 1
        features.append(c.states_TLH[:count, :-1].flatten(1))
        tokens.append(c.token_ids[1:count + 1])
        positions.append(torch.arange(count))
        counts.append(count)
        asked.append(count - first)
        index = torch.arange(first, count)[None] + 1 + torch.arange(steps + 1)[:, None]
        known.append(index < len(c.token_ids))
        ahead.append(c.token_ids[index.clamp(max=len(c.token_ids) - 1)])
        last.append(c.states_TLH[first + 1:count + 1, -1])
    idle_asked = -sum(asked) % row_bucket
    idle = idle_asked + (-(sum(counts) + idle_asked) % row_bucket)
    if idle:
        features.append(features[0].new_zeros(idle, features[0].shape[1]))
        tokens.append(tokens[0].new_zeros(idle))
        positions.append(torch.arange(idle))
        counts.append(idle)
        asked.append(idle_asked)
        ahead.append(ahead[0].new_zeros(steps + 1, idle_asked))
        known.append(known[0].new_zeros(steps + 1, idle_asked))
        last.append(last[0].new_zeros(idle_asked, last[0].shape[1]))
    rows = Rows(torch.cat(features).to(device), torch.cat(tokens).to(device), torch.cat(positions).to(device), counts, asked)
    return Batch(rows, torch.cat(ahead, dim=1).to(device), torch.cat(known, dim=1).to(device), torch.cat(last).to(device))


class TargetHead:
    """The target's own next-token distribution over the draft's vocabulary: the soft targets."""

    def __init__(self, norm_H: torch.Tensor, head_VH: torch.Tensor, eps: float, vocabulary: torch.Tensor | None = None) -> None:
        """norm: the target's final norm; head: its rows for the draft's vocabulary. With a vocabulary (target ids of the draft's tokens), head is the whole
        one, and a token's probability is that among all tokens: a row then sums to less than 1.
        """
        self.norm_H, self.head_VH, self.eps, self.vocabulary = norm_H, head_VH, eps, vocabulary

    @torch.no_grad()
    def probabilities(self, states_MH: torch.Tensor) -> torch.Tensor:
        """[M, V] float32."""
        found = []
        for part in states_MH.split(ROWS_AT_ONCE):  # the whole vocabulary's logits of all rows would be the largest tensor of a step
            normed = F.rms_norm(part.float(), self.norm_H.shape, self.norm_H.float(), self.eps).to(self.head_VH.dtype)
            among_all = torch.softmax(normed @ self.head_VH.T, dim=-1, dtype=torch.float32)
            found.append(among_all if self.vocabulary is None else among_all[:, self.vocabulary])
        return found[0] if len(found) == 1 else torch.cat(found)
