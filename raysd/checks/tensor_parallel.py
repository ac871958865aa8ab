"""Tensor parallelism: whether the devices are there, and whether target and draft can be shared out among them."""

from __future__ import annotations

from collections.abc import Iterable

from raysd.checks.attention import text_part
from raysd.checks.facts import EngineFacts, Facts
from raysd.checks.findings import Finding, error, info, not_checked, warning
from raysd.checks.gpu_memory import draft_ranks
from raysd.checks.kv_blocks import NotTold
from raysd.checks.model_bytes import count
from raysd.checks.parallel import MLA_HEADS, experts_left_over, fitting_ranks, tabled_aiter_heads, uneven_heads, uneven_width
from raysd.checks.registry import check

FIELD = "target.tensor_parallel"
PARALLEL_DOCS = "https://docs.vllm.ai/en/latest/serving/parallelism_scaling/"
LARGEST = 8
"""GPUs of a node where the catalogue does not say how many there are: only for advice."""


@check("tp-node", "More devices than a node has", PARALLEL_DOCS)
def node(facts: Facts) -> Iterable[Finding]:
    ranks, gpus = facts.tensor_parallel, facts.machine.gpus_per_node
    if facts.machine.name == "cpu" or ranks == 1:
        return
    if gpus is None:
        yield not_checked(FIELD, f"whether a node of {facts.machine.name} has {ranks} GPUs: the catalogue does not say how many there are", "count them")
    elif ranks > gpus:
        yield error(FIELD, f"{ranks} devices for one engine, and a node of {facts.machine.name} has {gpus}: raysd keeps an engine inside a node", f"use at most {gpus}")


@check("tp-heads", "Attention heads of the target that its devices cannot share", PARALLEL_DOCS)
def heads(facts: Facts) -> Iterable[Finding]:
    yield from _uneven(facts, lambda config, ranks: uneven_heads(config, ranks))


@check("tp-width", "MLPs or experts of the target that its devices cannot share", "https://github.com/vllm-project/vllm/issues/43605")
def width(facts: Facts) -> Iterable[Finding]:
    yield from _uneven(facts, lambda config, ranks: uneven_width(config, ranks, expert_parallel=_whole_experts(facts)))


@check("tp-experts", "Experts that are not shared evenly", PARALLEL_DOCS)
def experts(facts: Facts) -> Iterable[Finding]:
    if facts.target is None or not _whole_experts(facts):
        return
    left = experts_left_over(facts.target, facts.tensor_parallel)
    if left:
        yield info(FIELD, f"{left} of {facts.tensor_parallel} devices hold one expert more than the others, and each step waits for them", "use a divisor of the number of experts")


@check("minimax-tp8-ep8", "MiniMax-M2.5 with experts on eight devices", "https://github.com/vllm-project/vllm/issues/43605")
def minimax(facts: Facts) -> Iterable[Finding]:
    if facts.machine.gfx == "gfx950" and facts.is_target("minimax-m2") and facts.tensor_parallel == 8 and _whole_experts(facts):
        yield warning(FIELD, "MiniMax-M2.5 was seen to end with a memory fault on gfx950 at tensor and expert parallel 8 with AITER", "use 2 or 4; a node then holds several engines")


@check("tp-draft-heads", "A draft that its devices cannot share", PARALLEL_DOCS)
def draft_heads(facts: Facts) -> Iterable[Finding]:
    if facts.draft_config is None:
        return
    for engine in facts.drafting:
        ranks = draft_ranks(facts, engine, facts.tensor_parallel)
        try:
            why = uneven_heads(facts.draft_config, ranks) or uneven_width(facts.draft_config, ranks, expert_parallel=False)
        except NotTold as err:
            yield not_checked(engine.draft_field("draft_tensor_parallel_size"), f"whether {ranks} devices can share the draft: {err}", "start the engine once by hand")
            continue
        if why is not None:
            yield error(engine.draft_field("draft_tensor_parallel_size"), f"{ranks} devices cannot share the draft: {why}",
                        f"use a draft whose heads and intermediate_size are multiples of {ranks}, or another {FIELD}")


@check("draft-tp", "A draft on another number of devices than 1 or the target's", "https://docs.vllm.ai/en/latest/features/speculative_decoding/")
def draft_size(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        named = engine.draft_argument("draft_tensor_parallel_size")
        if named is not None and named not in (1, facts.tensor_parallel):
            yield error(engine.draft_field("draft_tensor_parallel_size"), f"{named} devices for the draft: vLLM takes 1 or the target's, which is {facts.tensor_parallel} ({FIELD})",
                        f"use 1 or {facts.tensor_parallel}")


@check("aiter-mla-heads", "Query heads of a device that AITER's MLA does not take, or takes by other kernels", "https://github.com/vllm-project/vllm/pull/51647")
def aiter_heads(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm else ():
        if "ROCM_AITER_MLA" not in facts.target_backends(engine) or facts.vllm is None:
            continue
        try:
            heads = count(text_part(facts.target or {}), "num_attention_heads")
            own = heads // facts.tensor_parallel
            if heads % facts.tensor_parallel or not own:
                continue  # tp-heads says so
            taken = facts.probe.aiter_mla_takes_heads(own) if facts.probe is not None else tabled_aiter_heads(own, facts.vllm)
        except NotTold as err:
            yield not_checked(FIELD, str(err), "start the engine once by hand")
            continue
        if not taken:
            yield error(FIELD, f"{heads} query heads / {facts.tensor_parallel} devices = {own} on each, which AITER's MLA does not take in {facts.words}",
                        f"use a {FIELD} at which a device has a multiple of {MLA_HEADS}, or set VLLM_ROCM_USE_AITER_MLA: \"0\"")
        elif own % MLA_HEADS and engine.drafts:
            yield info(FIELD, f"{own} query heads on each device, fewer than the {MLA_HEADS} that AITER's MLA works on: drafts are verified by other kernels than with {MLA_HEADS} or more",
                       "look at acceptance by position and answers here too: what holds at half the devices need not hold here")


def _uneven(facts: Facts, why) -> Iterable[Finding]:
    if facts.target is None or facts.tensor_parallel == 1:
        return
    try:
        found = why(facts.target, facts.tensor_parallel)
        if found is not None:
            yield error(FIELD, f"{facts.tensor_parallel} devices cannot share the target: {found}", _advice(facts))
    except NotTold as err:
        yield not_checked(FIELD, f"whether {facts.tensor_parallel} devices can share the target: {err}", "start the engine once by hand")


def _advice(facts: Facts) -> str:
    largest = facts.machine.gpus_per_node or LARGEST
    fitting = fitting_ranks(facts.target, largest, expert_parallel=_whole_experts(facts))
    ways = [f"use {', '.join(map(str, fitting))}"] if fitting else []
    if not _whole_experts(facts) and facts.tensor_parallel in fitting_ranks(facts.target, largest, expert_parallel=True):
        ways.append("set enable-expert-parallel: true in the engine's extra_args, so that each device holds whole experts")
    return "; or ".join(ways) or "use another number of devices"


def _whole_experts(facts: Facts) -> bool:
    """Whether every engine gives whole experts to devices."""
    return all(_expert_parallel(engine) for engine in facts.engines)


def _expert_parallel(engine: EngineFacts) -> bool:
    return str(engine.argument("enable-expert-parallel")).lower() == "true"
