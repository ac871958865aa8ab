"""`sweep:` what is compared, under which load, and how often."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from raysd.experiment.engine import EngineSettings
from raysd.experiment.section import Placement, Section

Arm = Literal["none", "bf16", "fp8"]

LARGEST_LAG_MS, SMALLEST_CONCURRENCY_FRAC, LARGEST_REPEATING_FRAC = 20.0, 0.95, 0.5
"""What makes a cell invalid unless an experiment says otherwise, and a bench, which has no experiment."""
REQUEST_LIMIT_S, SILENCE_LIMIT_S = 900.0, 300.0
"""When a request is given up, likewise: as a whole, and if no byte of its answer comes."""
PILOT_BLOCKS = 5
"""Fewest blocks whose spread decides how many more there are: three would have a t quantile of 4.3, and need 2.4 times the blocks that five do."""
RANDOM_REQUESTS_PER_SLOT = 10
"""InferenceX's `prompts per user`."""
WORKLOAD_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._+/:,()-]*[A-Za-z0-9)])?")
"""Cells lie in folders `workload=NAME`, where what a file system does not take is percent-encoded: 64 of these make at most 192 bytes of 255."""


class Workload(Section):
    """Prompts and answer lengths of one column of the sweep."""

    name: str = Field("report", min_length=1, max_length=64)
    """Its name in tables, pictures and names of files: letters and digits of ASCII, and between them also blanks and `. _ - + / : , ( )`."""
    kind: Literal["prompts", "random"] = "prompts"
    """`prompts`: real ones. `random`: InferenceX's, of `isl` tokens without a meaning: comparable with published tables, but no guide to what a draft is worth,
    since what a target says to them is nothing that it says to anybody."""
    prompts: Placement[Path | None] = None
    """Real prompts of its own, as `prompts.path` takes them, all but those that name another split than report; null: the report split of `prompts`. The content
    enters fingerprints, the path does not."""
    isl: int | None = Field(None, ge=1)
    """Longest random prompt, in tokens, chat template included. Real prompts are as long as they are."""
    osl: int = Field(128, ge=2)
    """Longest answer, in tokens; the answer may end earlier on its own."""
    range_ratio: float = Field(0.8, ge=0, le=1)
    """With random prompts, as InferenceX means it (vLLM's own benchmark means another thing by the word): lengths are uniform between `range_ratio` times the
    longest and the longest, of prompts (the template apart) and of answers."""
    ignore_eos: bool | None = None
    """Whether every answer runs to its longest; null: those to real prompts do not, and those to random ones always do."""
    requests_per_slot: int | None = Field(None, ge=1)
    """Requests of a cell, per unit of concurrency; null: `sweep.requests_per_slot`, and for random prompts 10, as InferenceX has it."""

    def place(self, field: str) -> str:
        """Where a field of it stands, for messages."""
        return f"sweep.workloads.{self.name}.{field}"

    @model_validator(mode="after")
    def _fields_with_an_effect(self) -> Workload:
        if not WORKLOAD_NAME.fullmatch(self.name):
            raise ValueError(f"name: {self.name!r} must begin and end with an ASCII letter or digit, and hold nothing else but blanks and `. _ - + / : , ( )`: it is in names of "
                             "folders and files; rename the workload")
        if self.kind == "random":
            if self.isl is None:
                raise ValueError("isl: is missing, and says how long random prompts are")
            if self.prompts is not None:
                raise ValueError("prompts: has no effect with kind: random; remove one of the two")
            if self.ignore_eos is not None:
                raise ValueError("ignore_eos: has no effect with kind: random, whose answers always run to their longest; remove it")
        else:
            for name in ("isl", "range_ratio"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: has no effect on real prompts, which are as long as they are; remove it, or use kind: random")
        return self


class Acceptance(Section):
    """Whose tokens are accepted: `real`, or a mapping with `rates`."""

    rates: list[float] | None = Field(None, min_length=1)
    """null (`acceptance: real`): what the target accepts. Otherwise how often the first token of a draft is accepted, how often the first two, and so on, up to
    the largest k, whatever the draft proposes: measured cells tell how fast an arm would be with a draft of that quality (vLLM's synthetic rejection sampling),
    and its answers are nonsense."""

    @property
    def words(self) -> str:
        """`real` or `synthetic`."""
        return "real" if self.rates is None else "synthetic"

    @model_validator(mode="before")
    @classmethod
    def _real(cls, given: Any) -> Any:
        if given == "real":
            return {}
        if isinstance(given, (dict, cls)):
            return given
        raise ValueError(f"{given!r} is neither `real` nor a mapping with `rates`")

    @model_validator(mode="after")
    def _rates(self) -> Acceptance:
        rates = self.rates or []
        if not all(0 <= rate <= 1 for rate in rates) or sorted(rates, reverse=True) != rates:
            raise ValueError(f"rates: {rates} must each be from 0 to 1, and none above the one before: more tokens are accepted less often")
        return self


class SweepSection(Section):
    arms: list[Arm] = Field(["none", "bf16", "fp8"], min_length=1)
    """What is compared; `none` is the target alone and must be there."""
    workloads: list[Workload] = Field([Workload()], min_length=1)
    """Every arm runs every workload."""
    concurrency: list[int] = Field([1, 2, 4, 8], min_length=1)
    """Requests that the client holds in flight."""
    arm_concurrency: dict[Arm, list[int]] = {}
    """Fewer concurrencies for an arm that is slow on this hardware."""
    k: list[int] = Field([3], min_length=1)
    """Tokens drafted per verify step, 1 to 8 each; every drafting arm runs at each of them."""
    blocks: int = Field(3, ge=3)
    """Rounds of all arms; statistics need at least 3."""
    until_ci: float | None = Field(None, gt=0, lt=1)
    """Half of the width that the 95 % interval of every speed-up, by itself, is to have at most, as a share of the speed-up: 0.05 is 5 %. After `blocks`, at least five, the
    spread that they had decides how many more are run (Stein's two stages); null: none."""
    max_blocks: int = Field(30, ge=3)
    """Of them all, at most."""
    until_ci_limit_s: float = Field(14400, gt=0)
    """After so long, by the clock of an attempt, no block is added."""
    requests_per_slot: int = Field(4, ge=1)
    """Requests of a cell, per unit of concurrency, for workloads that do not say their own."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Decides the order in which real prompts are asked, and random ones."""
    report_prompts: int | None = Field(None, ge=1)
    """How many prompts of the report split to use; null: all."""
    answer_tokens: int = Field(64, ge=1)
    """Longest answer, in tokens, of those to the report split that are compared with the baseline's, and over which acceptance is counted; greedy."""
    residency: Literal["auto", "together", "alone"] = "auto"
    """Whether the engines of all arms are up at once, so that arms take turns without a restart (`together`), or one at a time (`alone`); auto: together
    where they fit into the node's memory, on GPUs if their gpu_memory_frac do beside each other."""
    nodes: Placement[int] = Field(1, ge=1)
    """Nodes that blocks are spread over, all alike; each reserves what hardware.resources.sweep says. All arms of a block run on one node."""
    client: Placement[Literal["same_node", "other_node"]] = "same_node"
    """Where the load generator runs: on the node of the engines, or on another one of the cluster for each of them, where it takes none of their cores and the
    network is in its numbers."""
    acceptance: Acceptance = Acceptance()
    """`real`, or `{rates: [0.8, 0.6, 0.4]}`: synthetic acceptance, which vLLM's CPU build does not know."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of the measured cells; the answers that are compared are always greedy."""
    largest_lag_ms: float = Field(LARGEST_LAG_MS, gt=0)
    """By how much the client's event loop may be late (99th percentile) before a cell is invalid: chunks are stamped by so much too late."""
    smallest_concurrency_frac: float = Field(SMALLEST_CONCURRENCY_FRAC, gt=0, le=1)
    """Of the asked concurrency, how much must have been in flight on average over the steady window; a cell with less is invalid."""
    largest_repeating_frac: float = Field(LARGEST_REPEATING_FRAC, ge=0, le=1)
    """Of a cell's answers, how many may end in a loop (32 tokens of a period of at most 16) before it is invalid: drafts guess loops easily."""
    request_limit_s: float = Field(REQUEST_LIMIT_S, gt=0)
    """The longest that one request may take; one that takes longer has failed, which makes its cell invalid."""
    silence_limit_s: float | None = Field(None, gt=0)
    """The longest that an engine may send no byte of an answer, likewise: a long prompt behind others takes time. null: 300, or request_limit_s where that is less."""
    near_tie_nat: float = Field(0.25, gt=0)
    """Largest gap, in nat, between the target's log-probabilities of two tokens that still counts as a tie of rounding."""
    engine: EngineSettings = EngineSettings()
    """vLLM settings, the same for every arm."""

    @model_validator(mode="after")
    def _consistent(self) -> SweepSection:
        if "none" not in self.arms:
            raise ValueError("arms: must hold `none`, the baseline that every speed-up is measured against")
        for name, values in (("arms", self.arms), ("concurrency", self.concurrency), ("k", self.k)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name}: {values} names something twice")
        if any(not 1 <= k <= 8 for k in self.k):
            raise ValueError(f"k: {self.k} must each be from 1 to 8")
        if self.acceptance.rates is not None and len(self.acceptance.rates) != max(self.k):
            raise ValueError(f"acceptance.rates: {len(self.acceptance.rates)} are given, and the largest k is {max(self.k)}; give one for each place")
        if any(c < 1 for c in self.concurrency):
            raise ValueError(f"concurrency: {self.concurrency} must each be at least 1")
        if max(self.concurrency) > self.engine.max_num_seqs:
            raise ValueError(
                f"concurrency: {max(self.concurrency)} is above engine.max_num_seqs = {self.engine.max_num_seqs}: requests would queue"
            )
        for arm, values in self.arm_concurrency.items():
            if arm not in self.arms:
                raise ValueError(f"arm_concurrency: names the arm {arm}, which is not in arms {self.arms}")
            if not values or not set(values) <= set(self.concurrency) or len(set(values)) != len(values):
                raise ValueError(f"arm_concurrency.{arm}: {values} must be some of concurrency {self.concurrency}, each once")
        for arm in self.arms:
            if alone := sorted(set(self.concurrency_of(arm)) - set(self.concurrency_of("none"))):
                raise ValueError(f"arm_concurrency: {arm} runs at {alone}, where there is no baseline to compare it with")
        if lacking := sorted(set(self.concurrency) - set(self.concurrency_of("none"))):
            raise ValueError(f"arm_concurrency.none: leaves no arm at concurrency {lacking}; take it out of concurrency")
        if self.until_ci is not None and self.max_blocks < max(self.blocks, PILOT_BLOCKS):
            raise ValueError(f"max_blocks: {self.max_blocks} are fewer than the {max(self.blocks, PILOT_BLOCKS)} that until_ci begins with")
        if self.silence_limit_s is not None and self.silence_limit_s > self.request_limit_s:
            raise ValueError(f"silence_limit_s: {self.silence_limit_s:g} has no effect above request_limit_s = {self.request_limit_s:g}; lower it, or raise the other")
        names = [workload.name for workload in self.workloads]
        if len({name.lower() for name in names}) != len(names):
            raise ValueError(f"workloads: {names} names something twice, or apart from capitals only, which not every file system tells apart")
        return self

    @model_validator(mode="after")
    def _fields_with_an_effect(self) -> SweepSection:
        # The resolved experiment has every default written out, so what has its default counts as not given.
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        refused: dict[str, str] = {}
        if self.arms == ["none"]:
            refused |= dict.fromkeys(("k", "until_ci", "acceptance", "near_tie_nat", "residency"), "without an arm that drafts; remove it, or add one to arms")
        if self.until_ci is None:
            refused |= dict.fromkeys(("max_blocks", "until_ci_limit_s"), "without until_ci; remove it, or say how narrow the intervals are to be")
        elif self.blocks < PILOT_BLOCKS:
            refused["blocks"] = f"beside until_ci, which begins with {PILOT_BLOCKS}; remove it, or raise it above that"
        if all(workload.kind == "random" or workload.requests_per_slot is not None for workload in self.workloads):
            refused["requests_per_slot"] = f"where each workload has its own, which for random prompts is {RANDOM_REQUESTS_PER_SLOT} unless it says another; remove it"
        if self.acceptance.rates is not None:
            refused["near_tie_nat"] = "with synthetic acceptance, whose answers are not compared; remove it"
        for name, why in refused.items():
            if name in given:
                raise ValueError(f"{name}: has no effect {why}")
        return self

    def concurrency_of(self, arm: str) -> list[int]:
        """The concurrencies at which an arm runs."""
        return self.arm_concurrency.get(arm, self.concurrency)

    def requests_per_slot_of(self, workload: Workload) -> int:
        """Requests of a cell of this workload, per unit of concurrency."""
        return workload.requests_per_slot or (RANDOM_REQUESTS_PER_SLOT if workload.kind == "random" else self.requests_per_slot)
