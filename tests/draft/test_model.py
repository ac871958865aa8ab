from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raysd.draft.batch import pack
from raysd.draft.replay import proposals
from tests.tiny_drafts import conversation, small_draft, small_shape


def slow_proposals(draft, c, row: int, k: int) -> list[int]:
    """What a server does for one landing point: a KV cache filled from the target's states up to `row`, then one query at a time."""
    shape, layer = draft.shape, draft.midlayer
    groups = shape.attention_heads // shape.kv_heads

    def rotate(x, position):  # x [heads, D]
        half = shape.head_dim // 2
        angles = position / shape.rope_parameters["rope_theta"] ** (torch.arange(half) / half)
        cos, sin = torch.cat([angles.cos()] * 2), torch.cat([angles.sin()] * 2)
        return x * cos + torch.cat([-x[:, half:], x[:, :half]], dim=-1) * sin

    def norm(module, x):
        return x / (x.pow(2).mean() + shape.rms_norm_eps).sqrt() * module.weight

    def feature(t):
        states = c.states_TLH[t, :-1]
        if draft.fc_norm is not None:
            states = torch.stack([norm(module, state) for module, state in zip(draft.fc_norm, states, strict=True)])
        return draft.fc(states.flatten())

    cache_k, cache_v, found = [], [], []
    token, hidden = None, None
    for position in range(row + k):
        if position <= row:
            token, hidden = int(c.token_ids[position + 1]), feature(position)
        inputs = torch.cat([norm(layer["input_layernorm"], draft.embedding[token]), norm(layer["hidden_norm"], hidden)])
        residual = norm(layer["hidden_norm"], hidden) if shape.norm_before_residual else hidden
        attention = layer["self_attn"]
        cache_k.append(rotate(attention["k_proj"](inputs).view(shape.kv_heads, -1), position).repeat_interleave(groups, 0))
        cache_v.append(attention["v_proj"](inputs).view(shape.kv_heads, -1).repeat_interleave(groups, 0))
        if position < row:
            continue
        query = rotate(attention["q_proj"](inputs).view(shape.attention_heads, -1), position)
        scores = torch.einsum("hd,phd->hp", query, torch.stack(cache_k)) * shape.head_dim ** -0.5
        out = torch.einsum("hp,phd->hd", scores.softmax(-1), torch.stack(cache_v)).flatten()
        residual = residual + attention["o_proj"](out)
        x = norm(layer["post_attention_layernorm"], residual)
        prenorm = residual + layer["mlp"]["down_proj"](F.silu(layer["mlp"]["gate_proj"](x)) * layer["mlp"]["up_proj"](x))
        normed = norm(draft.norm, prenorm)
        token = int(draft.draft_to_target[draft.lm_head(normed).argmax()])
        hidden = normed if shape.norm_output else prenorm
        found.append(token)
    return found


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}, {"kv_heads": 4}], ids=["eagle3", "eagle3.1", "norm_before_residual", "mha"])
def test_packed_unrolling_proposes_what_one_query_at_a_time_proposes(changes):
    draft = small_draft(small_shape(**changes))
    conversations = [conversation(23, 5, seed=1), conversation(9, 3, seed=2), conversation(17, 12, seed=3)]
    with torch.no_grad():
        packed = proposals(draft, pack(conversations, 3), 3)
        column = 0
        for c in conversations:
            for row in range(c.prompt_tokens - 1, len(c.token_ids) - 2):
                assert packed[:, column].tolist() == slow_proposals(draft, c, row, 3)
                column += 1
    assert column == packed.shape[1]


def test_a_conversation_is_not_touched_by_the_ones_packed_beside_it():
    draft, c = small_draft(), conversation(20, 6, seed=4)
    alone = draft.first(pack([c], 1).rows)[0]
    beside = draft.first(pack([conversation(30, 2, seed=5), c], 1).rows)[0]
    torch.testing.assert_close(beside[-len(alone):], alone)
