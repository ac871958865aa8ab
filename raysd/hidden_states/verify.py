"""Checks on captured states: what is silently wrong here trains a draft that nothing accepts."""

from __future__ import annotations

import torch

from raysd.errors import StageError
from raysd.hidden_states.shards import Conversation

LARGEST_RELATIVE_ERROR = 0.05
"""bf16 against bf16 in two implementations came out at 0.005 to 0.03 in 30 layers; a state of a neighbouring layer at 0.4 and more."""
USUAL_FRAC = 0.75
"""Share of the tokens whose states must agree."""
SMALLEST_HEAD_AGREEMENT = 0.9
"""Share of an answer's tokens; a head or norm that is not understood leaves few."""
NEAR_TIE = 2.0**-6
"""Two logits closer than this share of the larger are equal in bf16: a rounding step of 2**-8 in each, and of the sums before them."""
CHECKED_TOKENS = 256
"""Of an answer, from its start: the logits of a large vocabulary take memory."""
HEAD_ROWS = 8192
"""Of the head, taken at once, for the same reason."""


def check_conversation(conversation: Conversation, layers: int, hidden_size: int) -> None:
    """Raises StageError for a wrong shape, a wrong count of tokens, NaN or infinity, or a layer whose states are all zero.

    All-zero states have trained drafts to zero acceptance unnoticed: speculators issue 613, vLLM pull request 46301.
    """
    states, where = conversation.states_TLH, f"capture: prompt {conversation.prompt_id}"
    tokens = len(conversation.token_ids)
    if tuple(states.shape) != (tokens - 1, layers, hidden_size):
        raise StageError(what=f"the engine gave states of shape {list(states.shape)} for {tokens} tokens, not [{tokens - 1}, {layers}, {hidden_size}]", where=where,
                         fix="check the capture engine's log: prefix caching and chunked prefill must be off, and the target must be the one in the experiment")
    if not 0 < conversation.prompt_tokens < tokens:
        raise StageError(what=f"{tokens} tokens with a prompt of {conversation.prompt_tokens} leave no answer", where=where, fix="raise capture.max_tokens")
    largest_L = states.abs().amax(dim=(0, 2))  # one pass for both checks
    if not bool(torch.isfinite(largest_L).all()):
        raise StageError(what="the captured states hold NaN or infinity", where=where, fix="use dtype bfloat16 (float16 overflows in some models)")
    zero = torch.nonzero(largest_L == 0).flatten().tolist()
    if zero:
        raise StageError(what=f"the captured states of slots {zero} are all zero", where=where,
                         fix="this vLLM does not hand out hidden states for this target; use a version that does")


def compare_with_reference(captured_TLH: torch.Tensor, reference_TLH: torch.Tensor, layer_ids: list[int], where: str) -> dict[str, float]:
    """Relative error by layer id: the norm of the difference over that of the reference, of each token, and of those the one that USUAL_FRAC of the tokens keep to.

    The other tokens may be anywhere: where two experts are nearly as good, rounding decides between them. Raises StageError if a layer is off by more than
    LARGEST_RELATIVE_ERROR: then the ids mean something else to the engine than to raysd (vLLM counts the stream entering layer i), or it computes another model.
    """
    captured, reference = captured_TLH.float(), reference_TLH.float()
    error_TL = (captured - reference).norm(dim=-1) / reference.norm(dim=-1)
    errors = {str(layer): float(error_TL[:, i].quantile(USUAL_FRAC)) for i, layer in enumerate(layer_ids)}
    if not all(error <= LARGEST_RELATIVE_ERROR for error in errors.values()):  # NaN is no agreement either
        shown = ", ".join(f"layer {layer}: {error:.3f}" for layer, error in errors.items())
        raise StageError(what=f"the captured states differ from Hugging Face's own by a relative error of {shown} (at most {LARGEST_RELATIVE_ERROR})", where=where,
                         fix="the layer ids follow another convention in this vLLM, or its model differs from the checkpoint; do not train on these states")
    return errors


def check_head(conversation: Conversation, norm_H: torch.Tensor, head_VH: torch.Tensor, rms_norm_eps: float) -> float:
    """Share of a greedy answer's tokens that the target's RMS norm and head make the most likely, near ties included, of the last captured state alone.

    Raises StageError below SMALLEST_HEAD_AGREEMENT: training's targets are those logits, and would be another model's.
    """
    first = conversation.prompt_tokens
    emitted_T = conversation.token_ids[first:first + CHECKED_TOKENS].to(torch.int64)
    last_TH = conversation.states_TLH[first - 1:first - 1 + len(emitted_T), -1].float()
    normed_TH = last_TH * torch.rsqrt(last_TH.pow(2).mean(-1, keepdim=True) + rms_norm_eps) * norm_H.float()
    largest_T = torch.stack([(normed_TH @ rows.float().T).amax(-1) for rows in head_VH.split(HEAD_ROWS)]).amax(0)
    emitted_logit_T = (normed_TH * head_VH[emitted_T].float()).sum(-1)
    share = float((largest_T - emitted_logit_T <= NEAR_TIE * largest_T.abs()).float().mean())
    if not share >= SMALLEST_HEAD_AGREEMENT:
        raise StageError(what=f"by the target's norm and head as raysd reads them, {share:.0%} of the tokens of a greedy answer are the most likely ones, not nearly all",
                         where=f"capture: prompt {conversation.prompt_id}",
                         fix="this target has another final norm or head than an RMS norm and one matrix; use one that has these")
    return share
