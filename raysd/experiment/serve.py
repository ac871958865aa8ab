"""`serve:` which arm goes to production, how it is reached, and how it grows with the load."""

from __future__ import annotations

import ipaddress
import math
from typing import Literal

from pydantic import Field, model_validator

from raysd.experiment.engine import EngineSettings
from raysd.experiment.section import Placement, Section
from raysd.experiment.sweep import Arm

TARGET_FRAC = 2 / 3
"""Of the requests that a replica takes at once, how many it is to have: what comes while another replica starts still finds room."""


class AutoscalingSection(Section):
    """Replicas by concurrency: as many as it takes for each to have `target_ongoing_requests`. `raysd recommend` writes it from a sweep."""

    min_replicas: Placement[int] = Field(1, ge=1)
    """Replicas that are there without any load."""
    max_replicas: Placement[int] = Field(1, ge=1)
    """Most replicas, however high the load."""
    max_ongoing_requests: Placement[int | None] = Field(None, ge=1)
    """Requests that a replica works on at once; more wait before it. null: as many as its engine decodes at once (`max_num_seqs`)."""
    target_ongoing_requests: Placement[float | None] = Field(None, gt=0)
    """Requests that a replica is to have, those that wait included, on average over the look-back; null: two thirds of max_ongoing_requests."""
    look_back_period_s: Placement[float] = Field(10, gt=0)
    """The span whose mean decides."""
    upscale_delay_s: Placement[float] = Field(10, ge=0)
    """How long more replicas must have been wanted before they start."""
    downscale_delay_s: Placement[float] = Field(300, ge=0)
    """How long fewer replicas must have been enough before some end."""
    acceptance_length: Placement[float | None] = Field(None, gt=1)
    """Acceptance length at which a replica carries target_ongoing_requests, as the sweep measured it; replicas whose drafts are accepted less then count as fewer. null:
    every replica counts as one."""

    @model_validator(mode="after")
    def _bounds(self) -> AutoscalingSection:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: {self.max_replicas} is below min_replicas = {self.min_replicas}")
        target, most = self.target_ongoing_requests, self.max_ongoing_requests
        if target is not None and most is not None and target > most:
            raise ValueError(f"target_ongoing_requests: {target:g} is above max_ongoing_requests = {most}: requests would wait before a replica is added")
        return self

    def most_of(self, engine: EngineSettings) -> int:
        """Requests that a replica with such an engine works on at once."""
        return self.max_ongoing_requests or engine.max_num_seqs

    def target_of(self, engine: EngineSettings) -> float:
        """Requests that a replica with such an engine is to have."""
        return self.target_ongoing_requests or max(1.0, float(math.floor(TARGET_FRAC * self.most_of(engine))))


class ServeSection(Section):
    arm: Placement[Arm | None] = None
    """What is served; null: fp8 if the sweep has that arm, else bf16, else none."""
    k: Placement[int | None] = Field(None, ge=1, le=8)
    """Tokens drafted per verify step; null: the first of sweep.k."""
    k_per_batch: Placement[list[tuple[int, int, int]] | None] = Field(None, min_length=1)
    """Fewer where more sequences are decoded at once: [first, last, tokens] of ascending ranges of sequences, the first from 1, of at most k tokens; 0 drafts nothing.
    Between ranges, and after the last, what came before holds. `raysd recommend` writes it. null: k throughout."""
    engine: Placement[EngineSettings | None] = None
    """vLLM settings; null: those of the sweep, so that what is served is what was measured."""
    prefix_caching: Placement[bool] = False
    """Whether prompts that begin alike share their KV cache. A sweep measures without."""
    model: Placement[str | None] = Field(None, min_length=1, pattern=r"^[A-Za-z0-9._/-]+$")
    """What clients call the model; null: the experiment's name."""
    host: Placement[str] = "127.0.0.1"
    """Interface that is listened on; any but loopback needs api_keys_env. `0.0.0.0` is all of them, as Kubernetes asks for."""
    port: Placement[int] = Field(8000, ge=1, le=65535)
    """Port that is listened on."""
    route: Placement[str] = Field("/", pattern=r"^/([A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*)?$")
    """What stands before `/v1` in the paths."""
    api_keys_env: Placement[str | None] = Field(None, pattern="^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the API keys, comma-separated, on the nodes of the replicas; null: no keys. The keys are in no file."""
    max_body_bytes: Placement[int] = Field(4 * 2**20, ge=1024)
    """Longest body of a request; a longer one is refused (413)."""
    longest_answer_s: Placement[float] = Field(600, gt=0)
    """How long a request may take, and so how long a replica that is to end waits for those on it."""
    cpus: Placement[int | None] = Field(None, ge=1)
    """CPU cores that each rank of an engine reserves; on hardware.name: cpu it computes on so many. null: one beside a GPU; on a CPU as many as the machine where
    `raysd serve` runs has for each rank of max_replicas."""
    start_attempts: Placement[int] = Field(3, ge=1)
    """How often a replica that does not start is tried in all."""
    update: Placement[Literal["start_first", "stop_first"]] = "start_first"
    """How replicas are replaced when something else is deployed under the name. `start_first`: one of the new starts before one of the old ends, for which there must be
    room; without, the old ones go on. `stop_first`: the other way round, and where there is one replica nobody answers meanwhile."""
    stuck_after_s: Placement[float] = Field(120, gt=0)
    """How long an engine may have requests and finish no step before it counts as dead, and its replica is replaced."""
    autoscaling: Placement[AutoscalingSection] = AutoscalingSection()
    """How many replicas there are."""
    acceptance_floor: Placement[float | None] = Field(None, gt=1)
    """Acceptance length below which a replica's is reported; null: none."""
    acceptance_floor_minutes: Placement[float] = Field(10, gt=0)
    """For how long it must have been below."""
    recycle: Placement[bool] = False
    """Whether a replica below the floor for so long is replaced."""

    @model_validator(mode="after")
    def _consistent(self) -> ServeSection:
        if self.arm == "none":
            for name in ("k", "k_per_batch", "acceptance_floor"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: has no effect with arm: none, which drafts nothing; remove it")
        if self.k_per_batch is not None:
            _check_ranges(self.k_per_batch, self.k)
        if self.acceptance_floor is None:
            for name in ("acceptance_floor_minutes", "recycle"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: has no effect without acceptance_floor; remove it, or say how long answers are to be accepted")
        if self.api_keys_env is None and not is_loopback(self.host):
            raise ValueError(f"host: {self.host} can be reached from other machines, and no keys are asked for; name the variable that holds them in api_keys_env, or use 127.0.0.1")
        return self


def _check_ranges(ranges: list[tuple[int, int, int]], k: int | None) -> None:
    """As vLLM takes them (vllm/v1/spec_decode/dynamic/utils.py)."""
    if k is None:
        raise ValueError("k_per_batch: needs k, the most tokens of them all; add it")
    if ranges[0][0] != 1:
        raise ValueError(f"k_per_batch: the first range begins at {ranges[0][0]} sequences, not at 1")
    before = 0
    for first, last, tokens in ranges:
        if not before < first <= last:
            raise ValueError(f"k_per_batch: the range {first} to {last} does not come after {before}; ranges are ascending and share no number of sequences")
        if not 0 <= tokens <= k:
            raise ValueError(f"k_per_batch: {tokens} tokens from {first} to {last} are not from 0 to k = {k}")
        before = last
    if not any(tokens for _, _, tokens in ranges):
        raise ValueError("k_per_batch: drafts nothing anywhere; serve the arm none")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
