"""The training loss: soft cross-entropy at every draft step, over the steps that vLLM will draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysd.draft.batch import Batch, TargetHead, shifted
from raysd.draft.model import Eagle3Draft
from raysd.hidden_states.shards import Conversation


@dataclass
class StepLosses:
    """The loss to minimise, and per draft step what it is made of."""

    loss: torch.Tensor
    per_step: list[float]
    """Soft cross-entropy of each draft step, in nat: the mean over the rows that count, or this batch's share of it."""


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted sum over rows of the cross-entropy of logits [R, V] against probabilities [R, V], in nat; weights [R].

    By hand, because rows times vocabulary is the largest tensor of a step: softmax - wanted is the whole gradient, computed in place while the
    forward pass still holds the softmax, instead of kept and gone over four more times by autograd.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        log_guessed = torch.log_softmax(logits.float(), dim=-1)
        with torch.autocast(logits.device.type, enabled=False):  # which would round to bf16, and the loss to three digits
            loss = -(torch.linalg.vecdot(wanted, log_guessed) * weights).sum()
        ctx.save_for_backward(log_guessed.exp_().sub_(wanted).mul_(weights[:, None]).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None


def counted_rows(conversations: Sequence[Conversation], token_to_draft: torch.Tensor, ttt_steps: int) -> list[int]:
    """How many rows count at each draft step: those whose token t + 2 + j is known and in the draft's vocabulary. token_to_draft: on CPU, as conversations are."""
    tokens = [each.token_ids[each.prompt_tokens + 1:] for each in conversations]
    return [sum(int((token_to_draft[answer[step:]] >= 0).sum()) for answer in tokens) for step in range(ttt_steps)]


def unrolled_loss(draft: Eagle3Draft, batch: Batch, target: TargetHead, token_to_draft: torch.Tensor, ttt_steps: int, ttt_decay: float,
                  counted: Sequence[int]) -> StepLosses:
    """Training-time test (EAGLE-3, arXiv 2503.01840): the draft runs on its own outputs with the captured tokens, and every step is scored.

    Step j weighs ttt_decay ** j. A row counts at step j if token t + 2 + j is known and in the draft's vocabulary: elsewhere the draft cannot be right
    (the mask of EAGLE-3's reference code). token_to_draft: int64 [target vocabulary], -1 outside. counted: the rows that the losses of each step are
    divided by (`counted_rows`), of all conversations whose losses are to be summed.
    """
    with torch.no_grad():
        soft_MV = target.log_probabilities(batch.last_states_MH).exp()
    normed, unrolling = draft.first(batch.rows)
    total, per_step = torch.zeros((), device=normed.device), []
    for step in range(ttt_steps):
        if step:
            normed, unrolling = draft.next(batch.rows, unrolling, batch.ahead_SM[step])
        counts = batch.known_SM[step + 1] & (token_to_draft[batch.ahead_SM[step + 1]] >= 0)
        weights = counts / max(1, counted[step])
        loss = SoftCrossEntropy.apply(draft.logits(normed), shifted(batch.rows, soft_MV, step), weights)
        total = total + ttt_decay ** step * loss
        per_step.append(float(loss.detach()))
    return StepLosses(total, per_step)
