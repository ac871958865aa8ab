"""The training loss over the steps that vLLM will draft, and what is right at each of them.

Axes as in model.py and batch.py; R rows of one draft step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from raysd.draft.batch import Batch, TargetHead
from raysd.draft.model import Eagle3Draft, Unrolling
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Conversation

ROWS_AT_ONCE = {"cpu": 64, "cuda": 2048}
"""Of a loss, by kind of device: what a core's cache holds, and what keeps a GPU busy."""
LK_ETA = 3.0
"""How fast the LK hybrid turns from KL to total variation; the best of arXiv 2602.23881."""


@dataclass
class Unrolled:
    """What a batch came to."""

    loss: torch.Tensor
    """To minimise: the sum over draft steps, weighted; this batch's share of it."""
    per_step: list[float]
    """Loss of each draft step, in nat: this batch's share of the mean over the rows that count."""
    hits: Hits | None
    """None unless asked for."""


@dataclass(frozen=True)
class Hits:
    """Counts by draft step, over rows whose tokens are known. They add up over batches and workers."""

    known: tuple[int, ...]
    """Rows whose token at this step is known."""
    right: tuple[int, ...]
    """Of those, rows whose most likely token is the captured one."""
    reached: tuple[int, ...]
    """Of those known, rows that are right at all steps before."""
    through: tuple[int, ...]
    """Of those reached, rows that are right here too: what a server would accept if it drafted from every row."""

    def __add__(self, other: Hits) -> Hits:
        return Hits(*(tuple(a + b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in zip(self.parts(), other.parts(), strict=True)))

    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The four tuples, in the order of the fields."""
        return self.known, self.right, self.reached, self.through

    def figures(self) -> dict[str, float]:
        """By position from 1: `accuracy_i` of each alone, `conditional_i` given those before, `cumulative_i` with those before; and
        `simulated_acceptance_length`, 1 + the sum of the cumulative ones."""
        rows = list(zip(*self.parts(), strict=True))
        figures = {}
        for position, (known, right, reached, through) in enumerate(rows, start=1):
            figures |= {f"accuracy_{position}": right / max(1, known), f"conditional_{position}": through / max(1, reached),
                        f"cumulative_{position}": through / max(1, known)}
        return figures | {"simulated_acceptance_length": 1 + sum(through / max(1, known) for known, _, _, through in rows)}


def soft_cross_entropy(log_guessed: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy of the draft's log-probabilities [R, V], which may be overwritten, against the target's probabilities, in nat, [R]; and its gradient
    by the draft's logits, [R, V]. All float32.
    """
    loss = -torch.linalg.vecdot(wanted, log_guessed)
    return loss, log_guessed.exp_().sub_(wanted)


def lk_hybrid(log_guessed: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """w KL + (1 - w) TV between the target's probabilities and the draft's, w = exp(-LK_ETA * overlap) of the row, held constant. As `soft_cross_entropy`.

    Probabilities of the target are those among its whole vocabulary, so a row sums to at most 1. The overlap sum_v min(p, q) is the probability of
    acceptance when tokens are sampled, and 1 - TV (arXiv 2602.23881). KL stands for the cross-entropy, which differs from it by a constant.
    """
    cross_entropy = -torch.linalg.vecdot(wanted, log_guessed)
    guessed = log_guessed.exp_()
    overlap = torch.minimum(guessed, wanted).sum(-1)
    blend = torch.exp(-LK_ETA * overlap)
    below = guessed * (guessed < wanted)  # where more probability would add to the overlap
    gradient = (blend[:, None] * (guessed * wanted.sum(-1, keepdim=True) - wanted)
                - (1 - blend)[:, None] * (below - guessed * below.sum(-1, keepdim=True)))
    return blend * cross_entropy + (1 - blend) * (1 - overlap), gradient


LOSSES = {"kl": soft_cross_entropy, "lk": lk_hybrid}


class RowsLoss(torch.autograd.Function):
    """Weighted sum over rows of one of the losses.

    By hand, because rows times vocabulary are the largest tensors of a step: the gradient is known while the forward pass holds the softmax, instead of
    being gone over four more times by autograd. And a few rows at a time.
    """

    @staticmethod
    def forward(ctx, loss_of: Callable[..., tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor, probabilities: torch.Tensor, ahead: int,
                weights: torch.Tensor) -> torch.Tensor:
        """logits [R, V]; row r is compared with probabilities[r + ahead], the target's, float32, and weighs weights[r]. The last `ahead` rows weigh nothing."""
        total, gradient = torch.zeros((), device=logits.device), torch.empty_like(logits)
        end, at_once = max(0, len(logits) - ahead), ROWS_AT_ONCE[logits.device.type]
        gradient[end:] = 0
        with torch.autocast(logits.device.type, enabled=False):  # which would round to bf16, and the loss to three digits
            for start in range(0, end, at_once):
                stop = min(start + at_once, end)
                log_guessed = torch.log_softmax(logits[start:stop], dim=-1, dtype=torch.float32)
                losses, to_logits = loss_of(log_guessed, probabilities[start + ahead:stop + ahead])
                total += losses @ weights[start:stop]
                gradient[start:stop] = to_logits.mul_(weights[start:stop, None])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, torch.Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return None, gradient.mul_(grad.to(gradient.dtype)), None, None, None  # in place: it is gone over once


def counted_rows(conversations: Sequence[Conversation], token_to_draft: torch.Tensor, ttt_steps: int) -> list[int]:
    """How many rows count at each draft step: those whose token t + 2 + j is known and in the draft's vocabulary. token_to_draft: on CPU, as conversations are."""
    tokens = [each.token_ids[each.prompt_tokens + 1:] for each in conversations]
    return [sum(int((token_to_draft[answer[step:]] >= 0).sum()) for answer in tokens) for step in range(ttt_steps)]


def unrolled_loss(draft: Eagle3Draft, batch: Batch, target: TargetHead, token_to_draft: torch.Tensor, section: TrainSection, counted: Sequence[int],
                  count_hits: bool = False) -> Unrolled:
    """Training-time test (EAGLE-3, arXiv 2503.01840): the draft runs on its own outputs with the captured tokens, and every step is scored.

    Step j weighs ttt_decay ** j. A row counts at step j if token t + 2 + j is known and in the draft's vocabulary: elsewhere the draft cannot be right
    (the mask of EAGLE-3's reference code). token_to_draft: int64 [target vocabulary], -1 outside. counted: the rows that the losses of each step are
    divided by (`counted_rows`), of all conversations whose losses are to be summed.
    """
    soft_MV = target.probabilities(batch.last_states_MH)

    def scored(step: int, unrolling: Unrolling | None) -> tuple[torch.Tensor, torch.Tensor | None, Unrolling]:
        normed, unrolling = draft.first(batch.rows) if unrolling is None else draft.next(batch.rows, unrolling, batch.ahead_SM[step])
        logits = draft.logits(normed)
        counts = batch.known_SM[step + 1] & (token_to_draft[batch.ahead_SM[step + 1]] >= 0)
        # The row `step` further on is of the same conversation: otherwise the token is not known, and the row does not count.
        loss = RowsLoss.apply(LOSSES[section.loss], logits, soft_MV, step, counts.float() / max(1, counted[step]))
        return loss, logits.detach().argmax(-1) if count_hits else None, unrolling

    total, per_step, guesses, unrolling = torch.zeros((), device=soft_MV.device), [], [], None
    for step in range(section.ttt_steps):
        if section.activation_checkpointing:
            loss, guess, unrolling = checkpoint(scored, step, unrolling, use_reentrant=False)
        else:
            loss, guess, unrolling = scored(step, unrolling)
        total = total + section.ttt_decay ** step * loss
        per_step.append(float(loss.detach()))
        guesses.append(guess)
    return Unrolled(total, per_step, _hits(draft, batch, guesses) if count_hits else None)


def _hits(draft: Eagle3Draft, batch: Batch, guesses: Sequence[torch.Tensor]) -> Hits:
    right = torch.stack([draft.draft_to_target[guess] for guess in guesses]) == batch.ahead_SM[1:len(guesses) + 1]
    known = batch.known_SM[1:len(guesses) + 1]
    right &= known
    through = right.to(torch.int64).cumprod(0).bool()
    reached = known & torch.cat([torch.ones_like(through[:1]), through[:-1]])
    return Hits(*(tuple(counts.sum(-1).tolist()) for counts in (known, right, reached, through)))
