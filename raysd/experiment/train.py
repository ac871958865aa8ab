"""`train:` how the draft learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raysd.experiment.section import Placement, Section


class TrainSection(Section):
    steps: int = Field(1000, ge=1)
    """Optimiser steps."""
    time_budget_s: float | None = Field(None, gt=0)
    """Ends training early, with the schedule still that of `steps`; the steps reached are recorded."""
    conversations_per_step: int = Field(4, ge=1)
    """Conversations in one optimiser step."""
    ttt_steps: int = Field(3, ge=1, le=8)
    """Draft steps unrolled in training (training-time test, EAGLE-3)."""
    ttt_decay: float = Field(0.8, gt=0, le=1)
    """Weight of draft step i is `ttt_decay ** i`."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate of AdamW."""
    warmup_frac: float = Field(0.02, ge=0, le=1)
    """Share of the steps in which the learning rate rises linearly."""
    decay_frac: float = Field(0.5, ge=0, le=1)
    """Share of the steps, at the end, in which the learning rate falls linearly to zero."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of a step's gradient."""
    init: Literal["target", "random"] = "target"
    """`target` starts the draft's layer and head from the target's last layer and head."""
    autocast: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the matrix products; the weights and their moments stay in float32."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of conversations."""
    evaluations: int = Field(4, ge=1)
    """How often the choose split is replayed; the best checkpoint by replayed acceptance length is kept."""
    served_k: int = Field(3, ge=1, le=8)
    """Tokens drafted per verify step when the acceptance is measured in vLLM at the end."""
    served_tokens: int = Field(160, ge=2)
    """Longest answer, in tokens, while it is measured."""
    threads: int | None = Field(None, ge=1)
    """CPU threads; null: all that the process may use. Another number rounds sums differently, and the weights then differ in their last digits."""
    checkpoint_every_s: Placement[float] = Field(60.0, gt=0)
    """Time between two checkpoints, in seconds: about the most that a killed training repeats."""
