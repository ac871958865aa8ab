"""`capture:` which prompts the target answers while its hidden states are kept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raysd.experiment.section import Placement, Section


class CaptureSection(Section):
    """All but `queue_bytes` changes the result: how answers are batched decides the last bits of their states, and with them a choice between two near tokens."""

    mode: Literal["disk", "stream"] = "disk"
    """`disk`: a stage of its own writes all states, and training reads them as often as it likes. `stream`: the train stage answers the prompts while it
    learns from them, anew in every epoch, and no state touches a disk: for more states than a disk holds."""
    max_tokens: int = Field(256, ge=4)
    """Longest answer, in tokens."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the answers; 0 is greedy."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the sampling, used when temperature is above 0."""
    train_prompts: int | None = Field(None, ge=1)
    """How many prompts of the train split to answer; null: all."""
    choose_prompts: int | None = Field(None, ge=1)
    """How many prompts of the choose split to answer; null: all."""
    engines: int = Field(1, ge=1)
    """vLLM engines that answer side by side, on CPU: they share the prompts, the cores, `concurrency` and `kv_cache_bytes`."""
    concurrency: int = Field(256, ge=1)
    """Conversations that the engines hold at once, all together."""
    shard_conversations: int = Field(256, ge=1)
    """Conversations in one shard file; no batch holds conversations of two. In a stream, which has no files, as many are answered together."""
    kv_cache_bytes: int = Field(4 * 2**30, ge=2**26)
    """Memory of the KV caches on CPU, hidden states included; what does not fit at once waits."""
    queue_bytes: Placement[int] = Field(100 * 2**20, ge=2**20)
    """In a stream: the most that states which wait for training take of Ray's object store; the engines wait when it is reached. With several `train.workers`
    it must hold `shard_conversations` and two steps of conversations at their longest. The local Ray's store has 150 MiB, a cluster's by default a third of each
    node's memory."""

    @model_validator(mode="after")
    def _fields_with_an_effect(self) -> CaptureSection:
        if self.seed and self.temperature == 0:
            raise ValueError(f"seed: {self.seed} has no effect at temperature 0; remove it, or raise the temperature")
        if self.mode == "disk" and self.queue_bytes != type(self).model_fields["queue_bytes"].default:
            raise ValueError("queue_bytes: has no effect without mode: stream; remove it")
        if self.engines > self.concurrency:
            raise ValueError(f"engines: {self.engines} are more than concurrency = {self.concurrency}: some would have nothing to do")
        return self
