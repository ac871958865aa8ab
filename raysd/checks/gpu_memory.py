"""Whether an engine's weights and KV cache fit the memory that it may take."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from raysd.checks.attention import text_part
from raysd.checks.facts import EngineFacts, Facts
from raysd.checks.findings import Finding, error, info, not_checked, warning
from raysd.checks.kv_blocks import NotTold
from raysd.checks.memory import BATCHED_TOKENS, Sizing, size_gpu
from raysd.checks.model_bytes import ModelBytes, count, draft_bytes, target_bytes
from raysd.checks.registry import check

SHARES_DRAFTS = Version("0.32.0")
"""The first release seen to share an Eagle3 draft out with the target whatever draft_tensor_parallel_size says (its cache on two ranks, measured). What earlier ones do is
not known, and the larger size is taken: at 1, all of the draft on each GPU."""
SOURCE = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"
LARGE_DRAFT_KV = 0.25
"""Of a token's KV cache, the share of the draft from which on it is worth a word."""
GB = 1e9


@check("memory-weights", "Weights that do not fit into the memory of a GPU", SOURCE)
def weights(facts: Facts) -> Iterable[Finding]:
    if facts.machine.name == "cpu":
        return
    for engine in facts.engines:
        try:
            found = sizing_of(facts, engine, facts.tensor_parallel)
        except NotTold as err:
            yield not_checked(f"{engine.place}.gpu_memory_frac", f"whether weights and KV cache fit the GPUs: {err}", "start the engine once by hand and read its log")
            continue
        if found.kv_bytes <= 0:
            yield error(f"{engine.place}.gpu_memory_frac", f"{_held(facts, engine, found)}: that leaves nothing for a KV cache", _more_room(facts, engine))


@check("memory-sequence", "A KV cache that is too small for one sequence", SOURCE)
def sequence(facts: Facts) -> Iterable[Finding]:
    for engine, tokens, place, held in _caches(facts):
        longest = facts.experiment.target.max_model_len
        if 0 < tokens < longest:
            fix = f"raise {place}, or lower target.max_model_len to {tokens}" if facts.machine.name == "cpu" else f"lower target.max_model_len to {tokens}; or {_more_room(facts, engine)}"
            yield error(place, f"the KV cache holds {tokens} tokens, and one sequence may have {longest} (target.max_model_len): vLLM does not start{held}", fix)


@check("memory-requests", "A KV cache that is too small for the sequences that are asked for at once", SOURCE)
def requests(facts: Facts) -> Iterable[Finding]:
    longest = facts.experiment.target.max_model_len
    for engine, tokens, place, held in _caches(facts):
        at_once, largest = tokens // longest, max(facts.experiment.sweep.concurrency)
        if not 0 < at_once < engine.settings.max_num_seqs:
            continue
        words = (f"the KV cache holds {tokens} tokens: {at_once} sequences of {longest} tokens (target.max_model_len), of max_num_seqs = {engine.settings.max_num_seqs}{held}; "
                 "if more are that long, vLLM throws some out and computes them again")
        fix = f"lower target.max_model_len to what requests need, or {_cache_room(facts, place)}"
        yield warning(place, words, fix) if at_once < min(largest, engine.settings.max_num_seqs) else info(place, words, fix)


@check("memory-draft-kv", "A draft whose KV cache takes a large part of the memory", "https://github.com/vllm-project/vllm/pull/39616")
def draft_kv(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        try:
            target, draft = _models(facts, engine)
        except NotTold:
            continue  # memory-weights says so
        if draft is None:
            continue
        ranks = facts.tensor_parallel
        own, whole = draft.kv_of_rank(draft_ranks(facts, engine, ranks)), target.kv_of_rank(ranks)
        if own / (own + whole) >= LARGE_DRAFT_KV:
            shared = draft.kv_of_rank(ranks)
            ways = [f"set draft_tensor_parallel_size: {ranks}, at which it is {shared / 1024:.1f} KiB"] if shared < own else []
            if facts.target_kind == "latent" and draft.kv_shards > 1:
                ways.append("use a draft with MLA, whose layer takes what one of the target's does")
            yield info(engine.draft_field("draft_tensor_parallel_size"), f"the draft's one layer takes {own / 1024:.1f} KiB of KV cache for each token, the target {whole / 1024:.1f}: "
                       f"{own / (own + whole):.0%} of the cache is the draft's", "; or ".join(ways) or "use a draft with fewer key heads")


def sizing_of(facts: Facts, engine: EngineFacts, ranks: int) -> Sizing:
    """What each of so many GPUs holds of an engine. Raises NotTold."""
    if facts.machine.memory_bytes is None:
        raise NotTold(f"how much memory a GPU of {facts.machine.name} has, the catalogue does not say")
    target, draft = _models(facts, engine)
    batched = engine.argument("max-num-batched-tokens")
    return size_gpu(facts.machine.memory_bytes, engine.settings.gpu_memory_frac, ranks, target, draft, draft_ranks(facts, engine, ranks),
                    count(text_part(facts.target or {}), "hidden_size"), int(batched) if str(batched).isdecimal() else BATCHED_TOKENS)


def draft_ranks(facts: Facts, engine: EngineFacts, ranks: int) -> int:
    """How many devices share the draft."""
    named = engine.draft_argument("draft_tensor_parallel_size")
    return 1 if named == 1 and facts.before(str(SHARES_DRAFTS)) else ranks


def _models(facts: Facts, engine: EngineFacts) -> tuple[ModelBytes, ModelBytes | None]:
    if facts.target is None:
        raise NotTold("the target's config.json is not on this machine, and not published in raysd/target/models.yaml")
    dtype, kv_dtype = facts.experiment.target.dtype, str(engine.argument("kv-cache-dtype") or "auto")
    target = target_bytes(facts.target, dtype, kv_dtype, facts.target_weights)
    if not engine.drafts:
        return target, None
    if facts.draft_config is None:
        raise NotTold("the draft's config.json is not on this machine")
    own_kv = engine.draft_argument("kv_cache_dtype")
    return target, draft_bytes(facts.draft_config, facts.target, dtype, kv_dtype if own_kv is None else str(own_kv), facts.draft_weights,
                               own_embedding=facts.experiment.draft.checkpoint is not None)


def _caches(facts: Facts) -> Iterable[tuple[EngineFacts, int, str, str]]:
    """Of each engine how many tokens its KV cache holds, the field that says how large it is, and in words what it stands beside."""
    for engine in facts.engines:
        try:
            if facts.machine.name == "cpu":
                target, draft = _models(facts, engine)
                ranks = facts.tensor_parallel
                per_token = target.kv_of_rank(ranks) + (0 if draft is None else draft.kv_of_rank(draft_ranks(facts, engine, ranks)))
                yield engine, engine.settings.kv_cache_bytes // per_token, f"{engine.place}.kv_cache_bytes", ""
            else:
                found = sizing_of(facts, engine, facts.tensor_parallel)
                yield engine, found.kv_tokens, f"{engine.place}.gpu_memory_frac", f" ({_held(facts, engine, found)})"
        except NotTold:
            continue  # on GPUs memory-weights says so; on CPUs the cache is as large as the experiment says


def _held(facts: Facts, engine: EngineFacts, found: Sizing) -> str:
    draft = f", {found.draft_weights / GB:.1f} GB of the draft's" if found.draft_weights else ""
    return (f"of each GPU's {facts.machine.memory_bytes / GB:.0f} GB an engine may take {found.budget / GB:.0f} GB (gpu_memory_frac = {engine.settings.gpu_memory_frac:g}), and at "
            f"target.tensor_parallel = {facts.tensor_parallel} holds {found.target_weights / GB:.1f} GB of the target's weights{draft}, "
            f"with {found.allowance / GB:.1f} GB assumed for activations and graphs")


def _more_room(facts: Facts, engine: EngineFacts) -> str:
    """More devices, if so many are in a node and suffice."""
    longest, ranks = facts.experiment.target.max_model_len, facts.tensor_parallel * 2
    while ranks <= (facts.machine.gpus_per_node or 0):
        if sizing_of(facts, engine, ranks).kv_tokens >= longest:
            return f"use target.tensor_parallel: {ranks}"
        ranks *= 2
    return "raise gpu_memory_frac, or use a target whose weights are quantized"


def _cache_room(facts: Facts, place: str) -> str:
    return f"raise {place}" + ("" if facts.machine.name == "cpu" else ", set kv-cache-dtype: fp8, or spread the target over more GPUs")
