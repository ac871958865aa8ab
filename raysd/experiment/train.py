"""`train:` how the draft learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raysd.experiment.section import Placement, Section


class TrainSection(Section):
    steps: int = Field(1000, ge=1)
    """Optimiser steps."""
    time_budget_s: float | None = Field(None, gt=0)
    """Ends training early, with the schedule still that of `steps`; the steps reached are recorded."""
    conversations_per_step: int = Field(4, ge=1)
    """Conversations in one optimiser step, of all workers together."""
    truncated: Literal["drop", "keep"] = "drop"
    """What becomes of captured answers that `capture.max_tokens` cut off: such an answer ends where nothing ends. `keep` suits a target whose served
    answers are cut off as well."""
    ttt_steps: int = Field(3, ge=1, le=8)
    """Draft steps unrolled in training (training-time test, EAGLE-3)."""
    ttt_decay: float = Field(0.8, gt=0, le=1)
    """Weight of draft step i is `ttt_decay ** i`."""
    loss: Literal["kl", "lk"] = "kl"
    """`kl`: cross-entropy against the target's distribution. `lk`: blended with the total variation distance, which is one minus the probability of
    acceptance, the more the nearer the draft is (LK hybrid, arXiv 2602.23881); helps small drafts served at temperature 1."""
    optimiser: Literal["adamw", "muon"] = "adamw"
    """`muon` takes orthogonalised steps for the matrices between the embedding and the head (torch.optim.Muon); AdamW has the head and the norms."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate: of AdamW, or of Muon for its matrices."""
    adamw_lr: float | None = Field(None, gt=0)
    """Peak learning rate of what AdamW has beside Muon; null: `lr`."""
    warmup_frac: float = Field(0.02, ge=0, le=1)
    """Share of the steps in which the learning rate rises linearly."""
    decay_frac: float = Field(0.5, ge=0, le=1)
    """Share of the steps, at the end, in which the learning rate falls linearly to zero."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of the matrices."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of a step's gradient."""
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the matrix products and their gradients; the weights and their moments are in float32."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of conversations."""
    evaluations: int = Field(4, ge=1)
    """How often the choose split is replayed, at even distances, the last time at the end."""
    served_checkpoints: int = Field(2, ge=1)
    """How many of the last evaluated checkpoints are served on the choose split; the one with the longest served acceptance length is the draft."""
    served_k: int = Field(3, ge=1, le=8)
    """Tokens drafted per verify step when the acceptance is measured in vLLM at the end."""
    served_tokens: int = Field(160, ge=2)
    """Longest answer, in tokens, while it is measured."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of a worker; null: all that the process may use. Another number rounds sums differently, and the weights then differ in their last digits."""
    gradient_accumulation: int = Field(1, ge=1)
    """Parts of its share of a step that a worker computes one after the other, to hold less in memory."""
    activation_checkpointing: bool = False
    """Computes every draft step a second time on the way back instead of keeping what it made, which takes about half as long again. Less memory from some
    five draft steps on; with fewer it takes more (at the demo's sizes 310 MB for 200 with two steps, 322 for 422 with six)."""
    workers: int = Field(1, ge=1)
    """Processes that share every step. One is the stage's own process; more are Ray Train workers, each of which reserves what `hardware.resources.train`
    says, at least a GPU where `hardware.name` has GPUs, or a core. With `parallel: ddp` they are as many as there is room for, up to this number: a step is
    the same for any. On a stream (`capture.mode`) they are exactly as many."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How workers share the training: `ddp` gives each all of the draft, `fsdp` a share of its weights and moments (FSDP2)."""
    max_failures: Placement[int] = Field(3, ge=0)
    """How often the workers are started again from the last checkpoint when one of them or its node dies. Not on a stream, which does not come again: there
    the attempt ends, and the next one goes on from the last checkpoint; a run makes three attempts at most."""
    checkpoint_every_s: Placement[float] = Field(60.0, gt=0)
    """Time between two checkpoints, in seconds: about the most that a killed training repeats."""

    @model_validator(mode="after")
    def _fields_with_an_effect(self) -> TrainSection:
        if self.adamw_lr is not None and self.optimiser != "muon":
            raise ValueError("adamw_lr: has no effect without optimiser: muon; remove it")
        if self.ttt_steps == 1 and self.ttt_decay != type(self).model_fields["ttt_decay"].default:
            raise ValueError("ttt_decay: has no effect with ttt_steps: 1, whose only step has the weight 1; remove it, or raise ttt_steps")
        if self.workers == 1 and self.max_failures != type(self).model_fields["max_failures"].default:
            raise ValueError("max_failures: has no effect with one worker, which is the stage's own process; remove it, or raise workers")
        if self.served_checkpoints > self.evaluations:
            raise ValueError(f"served_checkpoints: {self.served_checkpoints} are more than the {self.evaluations} evaluations; raise evaluations, or lower it")
        if self.workers == 1 and self.parallel != "ddp":
            raise ValueError("parallel: has no effect with one worker; raise workers, or remove it")
        if self.workers > 1 and self.parallel == "fsdp" and self.optimiser == "muon":
            raise ValueError("parallel: fsdp shares out matrices, which muon needs whole; use ddp, or optimiser: adamw")
        if self.workers * self.gradient_accumulation > self.conversations_per_step:
            raise ValueError(f"conversations_per_step: {self.conversations_per_step} cannot be shared by {self.workers} workers in "
                             f"{self.gradient_accumulation} parts each; raise it")
        return self
