"""`draft:` the small model that proposes tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from raysd.experiment.section import Placement, Section


class DraftSection(Section):
    algorithm: Literal["eagle3", "eagle3.1"] = "eagle3"
    """`eagle3.1` adds one norm per aux layer before `fc` and feeds the normed output back (arXiv 2605.09992)."""
    vocab_size: int | None = Field(32_000, ge=16)
    """Tokens that the draft can propose, the most frequent in the captured answers; null: all of the target's."""
    aux_layers: list[int] | None = Field(None, min_length=1)
    """Layers whose entering residual stream the draft reads, in vLLM's numbering; null: 2, n // 2, n - 3 of n layers, as in the Eagle3
    reference code."""
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the draft's MLP; null: the target's."""
    norm_before_residual: bool = False
    """Whether the residual carries the normed `fc` output (vLLM: `norm_before_residual`)."""
    checkpoint: Placement[Path | None] = None
    """A finished draft to use instead of training one: a folder that vLLM loads. Its files' content enters fingerprints."""
