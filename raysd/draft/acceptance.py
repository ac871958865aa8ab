"""Counts of drafted and accepted tokens: kept raw, divided only when shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysd.errors import MeasurementError
from raysd.prompts.prompt_set import Prompt


@dataclass(frozen=True)
class AcceptanceCounts:
    """What vLLM's `spec_decode` counters counted over some requests. Counts add up over requests, windows and replicas."""

    drafts: int
    """Verify steps that had a draft."""
    draft_tokens: int
    """Tokens proposed."""
    accepted: int
    """Proposed tokens that the target accepted."""
    per_position: tuple[int, ...]
    """Accepted tokens by position in the draft, first to k-th."""

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per verify step, bonus token included: 1 + accepted / drafts, in [1, k + 1]. Raises MeasurementError if no draft was counted."""
        if self.drafts == 0:
            raise MeasurementError(what="no draft was counted, so there is no acceptance length", where="vLLM's spec_decode counters",
                                   fix="check in the engine's log that the draft was loaded")
        return 1 + self.accepted / self.drafts

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return self._with(other, 1)

    def __sub__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        return self._with(other, -1)

    def _with(self, other: AcceptanceCounts, sign: int) -> AcceptanceCounts:
        width = max(len(self.per_position), len(other.per_position))
        mine, theirs = (counts + (0,) * (width - len(counts)) for counts in (self.per_position, other.per_position))
        return AcceptanceCounts(self.drafts + sign * other.drafts, self.draft_tokens + sign * other.draft_tokens, self.accepted + sign * other.accepted,
                                tuple(a + sign * b for a, b in zip(mine, theirs, strict=True)))

    def as_metrics(self) -> dict[str, Any]:
        """The raw counts and the acceptance length, JSON-ready."""
        return {"drafts": self.drafts, "draft_tokens": self.draft_tokens, "accepted": self.accepted, "per_position": list(self.per_position),
                "acceptance_length": self.acceptance_length}


def add_positions(rows: Iterable[Mapping[str, Any]]) -> tuple[int, list[int]]:
    """Drafts, and accepted tokens by position, summed over rows with `drafts` and `per_position`; a row that counted fewer positions adds none to the rest."""
    drafts, total = 0, []
    for row in rows:
        drafts += row["drafts"] or 0
        for index, accepted in enumerate(row["per_position"] or ()):
            if index == len(total):
                total.append(0)
            total[index] += accepted
    return drafts, total


ServedAcceptance = Callable[[Path, Sequence[Prompt], int], AcceptanceCounts]
"""`served_acceptance(draft, prompts, k)`: what vLLM counts while it answers the prompts with that draft (a checkpoint folder), drafting k tokens a step."""
