"""Replay of vLLM's greedy acceptance walk on captured conversations: what predicts served acceptance.

Teacher-forced accuracy does not: after a rejection the walk lands on harder positions (measured on SmolLM2: 0.54 teacher-forced at the first
position, 0.48 served, while the walk's acceptance length was within 0.3 % of vLLM's counters).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.batch import Batch, pack
from raysd.draft.model import Eagle3Draft
from raysd.hidden_states.shards import Conversation


@torch.no_grad()
def proposals(draft: Eagle3Draft, batch: Batch, k: int) -> torch.Tensor:
    """[k, M] target ids that the draft proposes from each asked row: its own greedy roll-out."""
    normed, unrolling = draft.first(batch.rows)
    found = []
    for step in range(k):
        if step:
            normed, unrolling = draft.next(batch.rows, unrolling, found[-1])
        found.append(draft.draft_to_target[draft.logits(normed).argmax(-1)])
    return torch.stack(found)


@torch.no_grad()
def replay(draft: Eagle3Draft, conversations: Iterable[Conversation], k: int, batch_size: int = 8) -> AcceptanceCounts:
    """Counts of the walk over greedily captured answers: from each landing point, k proposals, the leading right ones accepted, one bonus token."""
    total = AcceptanceCounts(0, 0, 0, (0,) * k)
    device = draft.embedding.device
    waiting: list[Conversation] = []
    for conversation in conversations:
        waiting.append(conversation)
        if len(waiting) == batch_size:
            total, waiting = total + _walk(draft, pack(waiting, k, device), k), []
    return total + _walk(draft, pack(waiting, k, device), k) if waiting else total


def _walk(draft: Eagle3Draft, batch: Batch, k: int) -> AcceptanceCounts:
    right_kM = (proposals(draft, batch, k) == batch.ahead_SM[1:]) & batch.known_SM[1:]
    leading_M = right_kM.to(torch.int64).cumprod(0).sum(0).tolist()
    drafts, accepted, per_position, start = 0, 0, [0] * k, 0
    for asked in batch.rows.asked:
        row = 0
        while row < asked:
            count = leading_M[start + row]
            drafts, accepted = drafts + 1, accepted + count
            for position in range(count):
                per_position[position] += 1
            row += count + 1
        start += asked
    return AcceptanceCounts(drafts, drafts * k, accepted, tuple(per_position))


@torch.no_grad()
def teacher_forced_accuracy(draft: Eagle3Draft, conversations: Iterable[Conversation], k: int) -> list[float]:
    """Share of asked rows whose proposal at each draft step is the captured token, given the captured tokens before it: comparable between trainers."""
    right, known = torch.zeros(k), torch.zeros(k)
    for conversation in conversations:
        batch = pack([conversation], k, draft.embedding.device)
        normed, unrolling = draft.first(batch.rows)
        for step in range(k):
            if step:
                normed, unrolling = draft.next(batch.rows, unrolling, batch.ahead_SM[step])
            guessed = draft.draft_to_target[draft.logits(normed).argmax(-1)]
            right[step] += float(((guessed == batch.ahead_SM[step + 1]) & batch.known_SM[step + 1]).sum())
            known[step] += float(batch.known_SM[step + 1].sum())
    return (right / known.clamp(min=1)).tolist()
