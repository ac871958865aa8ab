"""`quantize:` the draft in FP8."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raysd.experiment.section import Section


class QuantizeSection(Section):
    scheme: Literal["ptpc_fp8"] = "ptpc_fp8"
    """Quark's name: weights FP8 e4m3 with one scale per output channel, activations FP8 with one scale per token."""
    exclude: list[str] = ["fc", "lm_head"]
    """Layers that stay in the draft's own precision."""
    served_k: int = Field(3, ge=1, le=8)
    """Tokens drafted per verify step when the acceptance is measured in vLLM."""
    served_tokens: int = Field(160, ge=2)
    """Longest answer, in tokens, while it is measured."""
