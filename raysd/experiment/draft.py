"""`draft:` the small model that proposes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from raysd.experiment.section import Placement, Section


class DraftSection(Section):
    algorithm: Literal["eagle3", "eagle3.1"] = "eagle3"
    """`eagle3.1` adds one norm per aux layer before `fc` and feeds the normed output back (arXiv 2605.09992)."""
    vocab_size: int | None = Field(32_000, ge=16)
    """Tokens that the draft can propose: the target's special tokens, and those that most captured answers hold. null: all of the target's. More than
    the target has is refused; the default means all of a target that has fewer."""
    aux_layers: list[int] | None = Field(None, min_length=1)
    """Layers whose entering residual stream the draft reads, in vLLM's numbering; null: 2, n // 2, n - 3 of n layers, as in the Eagle3
    reference code."""
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the draft's MLP; null: the target's."""
    attention: Literal["grouped", "latent"] | None = None
    """`grouped`: each key head serves some query heads (MHA, GQA); `latent`: MLA with the target's sizes, beside a target that has it; null: the target's own
    kind. vLLM serves a draft only where its attention's cache blocks fit the target's."""
    attention_heads: int | None = Field(None, ge=1)
    """Query heads of the draft; null: the target's."""
    kv_heads: int | None = Field(None, ge=1)
    """Key heads of grouped attention; null: the target's, and beside a target with MLA one for each query head."""
    head_dim: int | None = Field(None, ge=8, multiple_of=2)
    """Size of a head of grouped attention; null: the target's, and beside a target with MLA its hidden size divided by the draft's query heads."""
    norm_before_residual: bool = False
    """Whether the residual carries the normed `fc` output (vLLM: `norm_before_residual`)."""
    checkpoint: Placement[Path | None] = None
    """A finished draft to use instead of training one: a folder with an Eagle3 draft that vLLM loads, in safetensors or `pytorch_model.bin`, of any trainer (also the Speculators
    format). It is checked against the target, and never written to: what vLLM would misread in it is put right in a copy. Its files' content enters
    fingerprints. One that Quark has quantized to FP8 is served as it is, under the arm's name `bf16`, and cannot be quantized again."""
    layer_ids: Literal["entering", "leaving"] | None = None
    """What the layer ids in the checkpoint's config.json name: the residual stream `entering` a layer (vLLM, Speculators, EAGLE's authors, raysd), or the
    one `leaving` it (SpecForge, TorchSpec, Lumen-RL), which vLLM counts one higher. null: as the Speculators format or the usual three layers tell; if
    neither does, the draft is refused."""

    @model_validator(mode="after")
    def _layer_ids_of_a_checkpoint(self) -> DraftSection:
        if self.layer_ids is not None and self.checkpoint is None:
            raise ValueError("layer_ids: has no effect, since `checkpoint` names no finished draft; remove it")
        return self
