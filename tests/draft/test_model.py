from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raysd.draft.batch import pack
from raysd.draft.model import LENGTH_BUCKET, _beside
from raysd.draft.replay import proposals
from tests.tiny_drafts import LATENT, conversation, small_draft, small_shape


def turned(x, position, theta, interleaved):
    """x [heads, D] rotated as complex numbers, whose real and imaginary parts are halves of D or neighbours."""
    pairs = x.shape[1] // 2
    parts = x.view(len(x), pairs, 2) if interleaved else x.view(len(x), 2, pairs).transpose(1, 2)
    angles = position / theta ** (torch.arange(pairs) / pairs)
    result = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * torch.polar(torch.ones(pairs), angles))
    return (result if interleaved else result.transpose(1, 2)).reshape(x.shape)


class GroupedCache:
    """Keys and values of one conversation, one head of them for each query head."""

    def __init__(self, draft, norm):
        self.shape, self.attention, self.keys, self.values = draft.shape, draft.midlayer["self_attn"], [], []

    def add(self, inputs, position):
        groups = self.shape.attention_heads // self.shape.kv_heads
        key = self.attention.k_proj(inputs).view(self.shape.kv_heads, -1)
        self.keys.append(turned(key, position, self.shape.rope_parameters["rope_theta"], False).repeat_interleave(groups, 0))
        self.values.append(self.attention.v_proj(inputs).view(self.shape.kv_heads, -1).repeat_interleave(groups, 0))

    def ask(self, inputs, position):
        query = turned(self.attention.q_proj(inputs).view(self.shape.attention_heads, -1), position, self.shape.rope_parameters["rope_theta"], False)
        scores = torch.einsum("hd,phd->hp", query, torch.stack(self.keys)) * self.shape.head_dim ** -0.5
        return torch.einsum("hp,phd->hd", scores.softmax(-1), torch.stack(self.values)).flatten()


class LatentCache:
    """Latent vectors and rotated parts alone, as vLLM keeps them: queries go to the latent space, and what they find there comes back."""

    def __init__(self, draft, norm):
        self.shape, self.sizes, self.attention, self.norm = draft.shape, draft.shape.latent, draft.midlayer["self_attn"], norm
        self.latents, self.turned = [], []
        up = self.attention.kv_b_proj.weight.view(self.shape.attention_heads, -1, self.sizes.kv_lora_rank)
        self.to_key, self.to_value = up.split([self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim=1)

    def add(self, inputs, position):
        latent, key = self.attention.kv_a_proj_with_mqa(inputs).split([self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim])
        self.latents.append(self.norm(self.attention.kv_a_layernorm, latent))
        self.turned.append(turned(key[None], position, self.shape.rope_parameters["rope_theta"], True)[0])

    def ask(self, inputs, position):
        attention, sizes = self.attention, self.sizes
        flat = attention.q_b_proj(self.norm(attention.q_a_layernorm, attention.q_a_proj(inputs)))
        plain, query = flat.view(self.shape.attention_heads, -1).split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=1)
        query = turned(query, position, self.shape.rope_parameters["rope_theta"], True)
        latents = torch.stack(self.latents)
        scores = torch.einsum("hd,hdr,pr->hp", plain, self.to_key, latents) + query @ torch.stack(self.turned).T
        weights = (scores * (sizes.qk_nope_head_dim + sizes.qk_rope_head_dim) ** -0.5).softmax(-1)
        return torch.einsum("hp,pr,hdr->hd", weights, latents, self.to_value).flatten()


def slow_proposals(draft, c, row: int, k: int) -> list[int]:
    """What a server does for one landing point: a KV cache filled from the target's states up to `row`, then one query at a time."""
    shape, layer = draft.shape, draft.midlayer

    def norm(module, x):
        return x / (x.pow(2).mean() + shape.rms_norm_eps).sqrt() * module.weight

    def feature(t):
        states = c.states_TLH[t, :-1]
        if draft.fc_norm is not None:
            states = torch.stack([norm(module, state) for module, state in zip(draft.fc_norm, states, strict=True)])
        return draft.fc(states.flatten())

    cache, found = (GroupedCache if shape.latent is None else LatentCache)(draft, norm), []
    token, hidden = None, None
    for position in range(row + k):
        if position <= row:
            token, hidden = int(c.token_ids[position + 1]), feature(position)
        inputs = torch.cat([norm(layer["input_layernorm"], draft.embedding[token]), norm(layer["hidden_norm"], hidden)])
        residual = norm(layer["hidden_norm"], hidden) if shape.norm_before_residual else hidden
        cache.add(inputs, position)
        if position < row:
            continue
        residual = residual + layer["self_attn"].o_proj(cache.ask(inputs, position))
        x = norm(layer["post_attention_layernorm"], residual)
        prenorm = residual + layer["mlp"]["down_proj"](F.silu(layer["mlp"]["gate_proj"](x)) * layer["mlp"]["up_proj"](x))
        normed = norm(draft.norm, prenorm)
        token = int(draft.draft_to_target[draft.lm_head(normed).argmax()])
        hidden = normed if shape.norm_output else prenorm
        found.append(token)
    return found


SHAPES = {"eagle3": {}, "eagle3.1": {"fc_norm": True, "norm_output": True}, "norm_before_residual": {"norm_before_residual": True}, "mha": {"kv_heads": 4},
          "latent": LATENT, "latent eagle3.1": LATENT | {"fc_norm": True, "norm_output": True}}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_packed_unrolling_proposes_what_one_query_at_a_time_proposes(changes):
    draft = small_draft(small_shape(**changes))
    # The second and the fourth are too short to lie beside the others.
    conversations = [conversation(23, 5, seed=1), conversation(9, 3, seed=2), conversation(17, 12, seed=3), conversation(8, 4, seed=4)]
    with torch.no_grad():
        packed = proposals(draft, pack(conversations, 3), 3)
        column = 0
        for c in conversations:
            for row in range(c.prompt_tokens - 1, len(c.token_ids) - 2):
                assert packed[:, column].tolist() == slow_proposals(draft, c, row, 3)
                column += 1
    assert column == packed.shape[1]


def test_a_draft_cast_to_bf16_still_turns_distant_positions_exactly():
    rotary = small_draft().to(torch.bfloat16).midlayer["self_attn"].rotary
    heads = torch.randn(1, 4, 16)
    torch.testing.assert_close(rotary(heads, torch.tensor([3001])), turned(heads[0], 3001, 10000.0, False)[None], atol=1e-3, rtol=0)


def test_a_conversation_is_not_touched_by_the_ones_packed_beside_it():
    draft, c = small_draft(), conversation(20, 6, seed=4)
    alone = draft.first(pack([c], 1).rows)[0]
    beside = draft.first(pack([conversation(30, 2, seed=5), c], 1).rows)[0]
    torch.testing.assert_close(beside[-len(alone):], alone)


@pytest.mark.parametrize("lengths", [[1000, 30, 28, 30, 25, 30, 29], [40] * 8, [512, 400, 300, 200, 100, 50, 25, 12]])
def test_little_of_attention_is_padding(lengths):
    rows = pack([conversation(length + 2, 4, seed=i) for i, length in enumerate(lengths)], 1).rows
    beside = _beside(rows, torch.float32)
    assert sorted(i for each in beside for i in each.conversations) == list(range(len(lengths)))
    rounded = [-(-count // LENGTH_BUCKET) * LENGTH_BUCKET for count in rows.counts]
    padded = sum(len(each.conversations) * each.hidden_BMN[0].numel() for each in beside)
    assert padded <= 1.7 * sum(length * -(-asked // LENGTH_BUCKET) * LENGTH_BUCKET for length, asked in zip(rounded, rows.asked, strict=True))


def test_idle_rows_change_nothing_whether_or_not_they_are_asked():
    draft, c = small_draft(), conversation(23, 5, seed=1)
    alone = draft.first(pack([c], 1).rows)[0]
    for bucket, idle_asked in ((17, 0), (16, 15)):
        rows = pack([c], 1, row_bucket=bucket).rows
        assert len(rows.counts) == 2 and rows.asked[1] == idle_asked
        torch.testing.assert_close(draft.first(rows)[0][:len(alone)], alone)
