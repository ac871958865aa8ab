"""The Eagle3 draft in plain torch, computing what vLLM's llama_eagle3.py and deepseek_eagle3.py compute.

Axes: N rows of all conversations end to end, M of them that are asked for a proposal (a suffix of each conversation), H hidden size,
Q query heads, K key heads, D size of a query and a key, W of a value, A aux layers, V the draft's vocabulary.

Row t of a conversation reads the embedding of token t + 1 and the target's states at t, sits at RoPE position t, and proposes token t + 2.
Draft step j (j >= 1) of row t reads the embedding of token t + 1 + j and the draft's own output of step j - 1, sits at position t + j, proposes
token t + 2 + j, and attends to what vLLM's KV cache would hold then: the step-0 keys of rows up to t, and row t's own keys of steps 1 to j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from raysd.draft.attention import GroupedAttention, LatentAttention
from raysd.draft.layers import RMSNorm
from raysd.draft.shape import DraftShape

LENGTH_BUCKET = 32
"""Attention's lengths are rounded up to this, so that few shapes occur (see batch.py)."""
SHORTEST_BESIDE = 0.6
"""Of the longest conversation that one lies beside in attention, its own length: padding more would cost more than another product."""


@dataclass
class Rows:
    """The rows of some conversations, packed without padding."""

    features_NF: torch.Tensor
    """[N, A * H] aux states, concatenated in the order of the aux layers."""
    tokens_N: torch.Tensor
    """[N] token t + 1 of each row."""
    positions_N: torch.Tensor
    """[N] t, counted from each conversation's start."""
    counts: list[int]
    """Rows of each conversation; they sum to N."""
    asked: list[int]
    """Rows of each conversation, at its end, that are asked for proposals; they sum to M."""

    def asked_index(self) -> torch.Tensor:
        """[M] indices into N of the rows that are asked."""
        parts, start = [], 0
        for count, asked in zip(self.counts, self.asked, strict=True):
            parts.append(torch.arange(start + count - asked, start + count))
            start += count
        return torch.cat(parts).to(self.tokens_N.device)


@dataclass
class Beside:
    """Conversations of similar length, which lie side by side in attention."""

    conversations: list[int]
    hidden_BMN: torch.Tensor
    """[conversations, asked rows, rows] what a row must not see, as -inf to add to its scores."""


@dataclass
class Unrolling:
    """What later draft steps need of the earlier ones."""

    step: int
    beside: list[Beside]
    fed_back_MH: torch.Tensor
    keys_NKD: torch.Tensor
    values_NKW: torch.Tensor
    own_MK: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Keys and values of steps 1, 2, ... of the asked rows."""


class Eagle3Draft(nn.Module):
    """`LlamaForCausalLMEagle3`, or with latent attention `Eagle3DeepseekV2ForCausalLM`: fc, one decoder layer, norm, head.

    The embedding is the target's, frozen, and no parameter of this module.
    Parameter names are those of the checkpoint that vLLM loads (`midlayer.` is vLLM's `layers.0.`).
    """

    def __init__(self, shape: DraftShape, embedding_VH: torch.Tensor, draft_to_target_V: torch.Tensor) -> None:
        """embedding: the target's [target vocabulary, H]; draft_to_target: int64 [V], the target token of each draft token, ascending."""
        super().__init__()
        self.shape = shape
        h = shape.hidden_size
        self.register_buffer("embedding", embedding_VH, persistent=False)
        self.register_buffer("draft_to_target", draft_to_target_V, persistent=False)
        self.fc = nn.Linear(len(shape.aux_layers) * h, h, bias=False)
        self.fc_norm = nn.ModuleList(RMSNorm(h, shape.rms_norm_eps) for _ in shape.aux_layers) if shape.fc_norm else None
        self.midlayer = nn.ModuleDict({
            "input_layernorm": RMSNorm(h, shape.rms_norm_eps),
            "hidden_norm": RMSNorm(h, shape.rms_norm_eps),
            "self_attn": GroupedAttention(shape) if shape.latent is None else LatentAttention(shape),
            "post_attention_layernorm": RMSNorm(h, shape.rms_norm_eps),
            "mlp": nn.ModuleDict({
                "gate_proj": nn.Linear(h, shape.intermediate_size, bias=False),
                "up_proj": nn.Linear(h, shape.intermediate_size, bias=False),
                "down_proj": nn.Linear(shape.intermediate_size, h, bias=False)})})
        self.norm = RMSNorm(h, shape.rms_norm_eps)
        self.lm_head = nn.Linear(h, shape.vocab_size, bias=False)

    def first(self, rows: Rows) -> tuple[torch.Tensor, Unrolling]:
        """Draft step 0: normed hidden [M, H] for the head, and the state of the unrolling."""
        features = rows.features_NF
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        joined = self.fc(features.to(self._dtype()))
        asked = rows.asked_index()
        inputs_N2H, residual = self._inputs(rows.tokens_N, joined)
        attention = self.midlayer["self_attn"]
        keys, values = attention.keys_values(inputs_N2H, rows.positions_N)
        queries = attention.queries(inputs_N2H[asked], rows.positions_N[asked])
        beside = _beside(rows, queries.dtype)
        normed, fed_back = self._finish(_attend(queries, attention.scale, keys, values, rows, beside, []), residual[asked])
        return normed, Unrolling(0, beside, fed_back, keys, values)

    def next(self, rows: Rows, unrolling: Unrolling, tokens_M: torch.Tensor) -> tuple[torch.Tensor, Unrolling]:
        """One more draft step: tokens_M are token t + 1 + j of the asked rows, the captured ones in training, the draft's own when it drafts."""
        step = unrolling.step + 1
        positions = rows.positions_N[rows.asked_index()] + step
        inputs, residual = self._inputs(tokens_M, unrolling.fed_back_MH)
        attention = self.midlayer["self_attn"]
        own = unrolling.own_MK + [attention.keys_values(inputs, positions)]
        queries = attention.queries(inputs, positions)
        attended = _attend(queries, attention.scale, unrolling.keys_NKD, unrolling.values_NKW, rows, unrolling.beside, own)
        normed, fed_back = self._finish(attended, residual)
        return normed, Unrolling(step, unrolling.beside, fed_back, unrolling.keys_NKD, unrolling.values_NKW, own)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] over the draft's vocabulary."""
        return self.lm_head(normed)

    def _dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def _inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        embedded = layer["input_layernorm"](F.embedding(tokens, self.embedding).to(hidden.dtype))
        normed = layer["hidden_norm"](hidden)
        residual = normed if self.shape.norm_before_residual else hidden
        return torch.cat([embedded, normed], dim=-1), residual

    def _finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.midlayer
        residual = residual + layer["self_attn"].o_proj(attended)
        hidden = layer["post_attention_layernorm"](residual)
        mlp = layer["mlp"]
        prenorm = residual + mlp["down_proj"](F.silu(mlp["gate_proj"](hidden)) * mlp["up_proj"](hidden))
        normed = self.norm(prenorm)
        return normed, normed if self.shape.norm_output else prenorm


def _attend(queries_MQD: torch.Tensor, scale: float, keys_NKD: torch.Tensor, values_NKW: torch.Tensor, rows: Rows, beside: list[Beside],
            own_MK: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[M, Q * W]: one softmax over the step-0 keys that a row sees and its own key of each later step. Only here conversations are padded."""
    queries, keys, values = queries_MQD.split(rows.asked), keys_NKD.split(rows.counts), values_NKW.split(rows.counts)
    own = [(k.split(rows.asked), v.split(rows.asked)) for k, v in own_MK]
    found: dict[int, torch.Tensor] = {}
    for each in beside:
        queries_, keys_, values_ = ([packed[i] for i in each.conversations] for packed in (queries, keys, values))
        own_ = [tuple([packed[i] for i in each.conversations] for packed in pair) for pair in own]
        found |= zip(each.conversations, _attend_beside(queries_, scale, keys_, values_, each.hidden_BMN, own_), strict=True)
    return torch.cat([found[i] for i in sorted(found)])


def _attend_beside(queries_MQD: list[torch.Tensor], scale: float, keys_NKD: list[torch.Tensor], values_NKW: list[torch.Tensor], hidden_BMN: torch.Tensor,
                   own_MK: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> Iterator[torch.Tensor]:
    """`_attend` for conversations side by side, each an entry of the lists.

    The G = Q / K query heads of a key head become G times the rows beside it, so that keys and values are not copied for each query head.
    """
    heads = keys_NKD[0].shape[1]
    groups = queries_MQD[0].shape[1] // heads
    _, asked, count = hidden_BMN.shape
    # [B, K, G, asked, D]: query head k * G + g reads key head k.
    queries = _side_by_side(queries_MQD, asked).unflatten(2, (heads, groups)).permute(0, 2, 3, 1, 4)
    keys, values = (_side_by_side(x, count).transpose(1, 2).flatten(0, 1) for x in (keys_NKD, values_NKW))
    hidden = hidden_BMN[:, None, None].expand(-1, heads, groups, -1, -1).flatten(0, 1).flatten(1, 2)
    scores = torch.baddbmm(hidden, queries.flatten(0, 1).flatten(1, 2), keys.transpose(1, 2), alpha=scale)
    own = [tuple(_side_by_side(x, asked).transpose(1, 2)[:, :, None] for x in pair) for pair in own_MK]
    if own:
        diagonal = torch.stack([(queries * k).sum(-1) * scale for k, _ in own], dim=-1)
        scores = torch.cat([scores, diagonal.flatten(0, 1).flatten(1, 2)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    out = (weights[..., :count] @ values).view(*queries.shape[:-1], -1)
    for i, (_, v) in enumerate(own):
        out = out + weights[..., count + i].view(queries.shape[:-1])[..., None] * v
    out = out.permute(0, 3, 1, 2, 4).flatten(2)
    return (each[:len(asking)] for each, asking in zip(out, queries_MQD, strict=True))


def _beside(rows: Rows, dtype: torch.dtype) -> list[Beside]:
    """Which conversations lie beside which, the longest first, and what their rows must not see. One that is asked nothing lies nowhere.

    Asked row i is row count - asked + i of its conversation and sees the rows up to itself. Lengths are rounded up to LENGTH_BUCKET. What a padding row sees
    does not matter; no row sees a padding key.
    """
    device, groups, longest = rows.tokens_N.device, [], 0
    asking = [i for i, asked in enumerate(rows.asked) if asked]
    for i in sorted(asking, key=lambda i: (-rows.counts[i], i)):
        if rows.counts[i] < SHORTEST_BESIDE * longest or not groups:
            groups.append([])
            longest = rows.counts[i]
        groups[-1].append(i)
    found = []
    for group in groups:
        counts, asked = (torch.tensor([lengths[i] for i in group], device=device) for lengths in (rows.counts, rows.asked))
        longest_asked, longest = (-(-max(lengths[i] for i in group) // LENGTH_BUCKET) * LENGTH_BUCKET for lengths in (rows.asked, rows.counts))
        own_row = (counts - asked)[:, None] + torch.arange(longest_asked, device=device)
        unseen = torch.arange(longest, device=device) > own_row[..., None]
        found.append(Beside(group, torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))))
    return found


def _side_by_side(conversations: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """[B, width, ...]: each conversation padded with zeros."""
    padded = nn.utils.rnn.pad_sequence(conversations, batch_first=True)
    return F.pad(padded, (0, 0) * (padded.ndim - 2) + (0, width - padded.shape[1]))
