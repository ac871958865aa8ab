"""The two attentions of a draft: each turns its inputs into queries, keys and values per head, with one `scale` for their products.

Axes: n rows, Q query heads, K key heads, D their size, I = 2 * hidden size, the width of what the attention reads. How rows attend to each other is not
decided here (model.py). Parameter names are those of the checkpoint that vLLM loads.
"""

from __future__ import annotations

import torch
from torch import nn

from raysd.draft.layers import RMSNorm, Rotary, rotary_frequencies, yarn_mscale
from raysd.draft.shape import DraftShape


class GroupedAttention(nn.Module):
    """As vLLM's LlamaAttention: each key head serves Q / K query heads. K = Q is multi-head attention."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        inputs, width = 2 * shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(inputs, shape.attention_heads * width, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.attention_heads * width, shape.hidden_size, bias=False)
        self.rotary = Rotary(*rotary_frequencies(shape.rope_parameters, width, shape.max_position_embeddings), interleaved=False)
        self.scale = width ** -0.5
        self._width = width

    def queries(self, inputs_nI: torch.Tensor, positions_n: torch.Tensor) -> torch.Tensor:
        """[n, Q, D], rotated."""
        return self.rotary(self.q_proj(inputs_nI).unflatten(-1, (-1, self._width)), positions_n)

    def keys_values(self, inputs_nI: torch.Tensor, positions_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, K, D] twice, the keys rotated."""
        keys, values = (projection(inputs_nI).unflatten(-1, (-1, self._width)) for projection in (self.k_proj, self.v_proj))
        return self.rotary(keys, positions_n), values


class LatentAttention(nn.Module):
    """As vLLM's DeepseekV2MLAAttention (MLA, arXiv 2405.04434), expanded to a key and a value for each query head: K = Q.

    vLLM's kernels multiply the latent vectors instead, which is the same sum in another order. Values may be narrower than queries and keys.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        sizes, inputs, heads = shape.latent, 2 * shape.hidden_size, shape.attention_heads
        self._sizes = sizes
        queries = heads * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim)
        self.q_a_proj = nn.Linear(inputs, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, shape.rms_norm_eps)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, shape.rms_norm_eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, shape.hidden_size, bias=False)
        rope = shape.rope_parameters
        # DeepSeek's rule for YaRN, which vLLM takes whatever a config says: `mscale_all_dim` belongs to the whole of a head, not to the rotated part alone.
        whole = yarn_mscale(rope["factor"], rope.get("mscale_all_dim", 0.0))
        frequencies, _ = rotary_frequencies(rope, sizes.qk_rope_head_dim, shape.max_position_embeddings)
        self.rotary = Rotary(frequencies, yarn_mscale(rope["factor"], rope.get("mscale", 1.0)) / whole, interleaved=True)
        self.scale = (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) ** -0.5 * whole ** 2

    def queries(self, inputs_nI: torch.Tensor, positions_n: torch.Tensor) -> torch.Tensor:
        """[n, Q, D]: of each head the part without a position, then the rotated one."""
        sizes = self._sizes
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(inputs_nI))).unflatten(-1, (-1, sizes.qk_nope_head_dim + sizes.qk_rope_head_dim))
        plain, turning = heads.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        return torch.cat([plain, self.rotary(turning, positions_n)], dim=-1)

    def keys_values(self, inputs_nI: torch.Tensor, positions_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, Q, D] and [n, Q, v_head_dim]; the rotated part of the key is the same for all heads."""
        sizes = self._sizes
        latent, turning = self.kv_a_proj_with_mqa(inputs_nI).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (-1, sizes.qk_nope_head_dim + sizes.v_head_dim))
        plain, values = expanded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        turned = self.rotary(turning[:, None], positions_n).expand(-1, plain.shape[1], -1)
        return torch.cat([plain, turned], dim=-1), values
