"""Checks on captured states: what is silently wrong here trains a draft that nothing accepts."""

from __future__ import annotations

import torch

from raysd.errors import StageError
from raysd.hidden_states.shards import Conversation

LARGEST_RELATIVE_ERROR = 0.05
"""bf16 against bf16 in two implementations came out at 0.005 to 0.03 in 30 layers; a state of a neighbouring layer at 0.4 and more."""


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
    if not bool(torch.isfinite(states).all()):
        raise StageError(what="the captured states hold NaN or infinity", where=where, fix="use dtype bfloat16 (float16 overflows in some models)")
    zero = [layer for layer in range(layers) if not bool(states[:, layer].any())]
    if zero:
        raise StageError(what=f"the captured states of slots {zero} are all zero", where=where,
                         fix="this vLLM does not hand out hidden states for this target; use a version that does")


def compare_with_reference(captured_TLH: torch.Tensor, reference_TLH: torch.Tensor, layer_ids: list[int], where: str) -> dict[str, float]:
    """Relative error (Frobenius norm of the difference over that of the reference) by layer id.

    The first token is left out: it is an attention sink whose norm dwarfs the rest. Raises StageError if a layer is off by more than
    LARGEST_RELATIVE_ERROR: then the ids mean something else to the engine than to raysd (vLLM counts the stream entering layer i).
    """
    captured, reference = captured_TLH[1:].float(), reference_TLH[1:].float()
    errors = {str(layer): float((captured[:, i] - reference[:, i]).norm() / reference[:, i].norm()) for i, layer in enumerate(layer_ids)}
    if len(captured) == 0 or not all(error <= LARGEST_RELATIVE_ERROR for error in errors.values()):  # NaN is no agreement either
        shown = ", ".join(f"layer {layer}: {error:.3f}" for layer, error in errors.items())
        raise StageError(what=f"the captured states differ from Hugging Face's own by a relative error of {shown} (at most {LARGEST_RELATIVE_ERROR})", where=where,
                         fix="the layer ids follow another convention in this vLLM, or its model differs from the checkpoint; do not train on these states")
    return errors
