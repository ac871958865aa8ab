"""The draft's shape: everything that its weights' sizes and its config.json depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysd.experiment.draft import DraftSection
from raysd.target.shape import TargetShape


@dataclass(frozen=True)
class DraftShape:
    """Sizes and switches of an Eagle3 draft: one decoder layer whose attention reads the token's embedding beside the target's features."""

    hidden_size: int
    """The target's: vLLM shares the target's embedding with the draft."""
    aux_layers: tuple[int, ...]
    attention_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    target_vocab_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    norm_before_residual: bool
    fc_norm: bool
    """Eagle 3.1: a norm for each aux layer before `fc`."""
    norm_output: bool
    """Eagle 3.1: the normed output is fed back, not the pre-norm one."""

    def high_precision_parameters(self) -> int:
        """Weights of `fc` and of the head."""
        return self.hidden_size * (len(self.aux_layers) * self.hidden_size + self.vocab_size)

    def layer_parameters(self) -> int:
        """Weights of the decoder layer's matrices; its attention reads the token's embedding beside the features."""
        heads, width = (2 * self.attention_heads + 2 * 2 * self.kv_heads + self.attention_heads) * self.head_dim, self.hidden_size
        return width * (heads + 3 * self.intermediate_size)


def draft_shape(section: DraftSection, target: TargetShape) -> DraftShape:
    """The shape that an experiment asks for beside its target. Raises ExperimentError for aux layers that the target lacks."""
    newer = section.algorithm == "eagle3.1"
    return DraftShape(
        hidden_size=target.hidden_size, aux_layers=tuple(target.aux_layers(section.aux_layers)), attention_heads=target.attention_heads,
        kv_heads=target.kv_heads, head_dim=target.head_dim, intermediate_size=section.intermediate_size or target.intermediate_size,
        target_vocab_size=target.vocab_size, vocab_size=min(section.vocab_size or target.vocab_size, target.vocab_size),
        rms_norm_eps=target.rms_norm_eps, rope_parameters=target.rope_parameters, max_position_embeddings=target.max_position_embeddings,
        norm_before_residual=section.norm_before_residual, fc_norm=newer, norm_output=newer)
