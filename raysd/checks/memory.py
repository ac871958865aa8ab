"""Whether weights and KV cache fit a GPU: the sizing of one rank of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from raysd.checks.model_bytes import ModelBytes

GRAPHS_BYTES = 4 * 2**30
"""An allowance, not a measurement, for what vLLM holds beside weights and cache on each GPU: captured graphs, collectives' buffers, kernels' workspaces."""
ACTIVATION_VECTORS = 24
"""An allowance as well: 16-bit vectors of the hidden size that a token of the largest step has alive at once, those of its experts among them."""
BATCHED_TOKENS = 8192
"""Of the largest step of vLLM's server, unless `max-num-batched-tokens` says otherwise (vllm/engine/arg_utils.py)."""


@dataclass(frozen=True)
class Sizing:
    """What one GPU of an engine holds, in bytes."""

    budget: int
    """What the engine may take of the GPU's memory."""
    target_weights: int
    draft_weights: int
    allowance: int
    """For activations and graphs: assumed, not measured."""
    target_kv_per_token: int
    draft_kv_per_token: int

    @property
    def kv_bytes(self) -> int:
        """What is left for the KV cache; below zero, the weights do not fit."""
        return self.budget - self.target_weights - self.draft_weights - self.allowance

    @property
    def kv_tokens(self) -> int:
        """How many tokens, of all sequences together, the cache holds."""
        return max(self.kv_bytes, 0) // (self.target_kv_per_token + self.draft_kv_per_token)

    def sequences(self, tokens: int) -> int:
        """How many sequences of so many tokens the cache holds at once."""
        return self.kv_tokens // tokens


def size_gpu(memory_bytes: int, memory_frac: float, ranks: int, target: ModelBytes, draft: ModelBytes | None, draft_ranks: int, hidden_size: int,
             batched_tokens: int = BATCHED_TOKENS) -> Sizing:
    """What one of an engine's `ranks` GPUs holds. draft_ranks: how many share the draft; 1: each holds all of it, weights and cache."""
    allowance = GRAPHS_BYTES + batched_tokens * hidden_size * 2 * ACTIVATION_VECTORS
    return Sizing(int(memory_bytes * memory_frac), target.weights_of_rank(ranks), 0 if draft is None else draft.weights_of_rank(draft_ranks), allowance,
                  target.kv_of_rank(ranks), 0 if draft is None else draft.kv_of_rank(draft_ranks))
