"""The draft's vocabulary: the target tokens that it can propose."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def choose_vocabulary(answers: Iterable[torch.Tensor], special_ids: Iterable[int], size: int, target_size: int) -> torch.Tensor:
    """Target ids, int64 [size], ascending: all special tokens, then those that most answers hold.

    How often one answer repeats a token says little about other prompts: of the demo's held-out answers, 4,096 tokens chosen so cover 0.5 % more than those that
    are said most often. Ties, and places that the answers leave empty, go to the lower id: byte-pair merges are numbered by frequency.
    """
    if size >= target_size:
        return torch.arange(target_size)
    counts = torch.zeros(target_size, dtype=torch.int64)
    for answer in answers:
        counts[answer.unique()] += 1
    counts[[i for i in special_ids if i < target_size]] = torch.iinfo(torch.int64).max
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size]
    return chosen.sort().values


def coverage(answers: Iterable[torch.Tensor], vocabulary: torch.Tensor) -> float:
    """Share of the answers' tokens that the draft can propose: a cap on what can be accepted."""
    inside = total = 0
    for answer in answers:
        inside += int(torch.isin(answer, vocabulary).sum())
        total += len(answer)
    return inside / total


def offsets(vocabulary: torch.Tensor) -> torch.Tensor:
    """`d2t` as vLLM reads it: target id = row + d2t[row]. Storing the ids themselves is a known bug (vLLM adds the row number)."""
    return vocabulary - torch.arange(len(vocabulary))
