"""Speculative decoding: what `speculative_config` may hold, how long drafts may be, and which attention the draft gets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, info, not_checked, warning
from raysd.checks.registry import check
from raysd.checks.releases import first_with_speculative
from raysd.sweep.engine import engine_spec, speculative_config

AITER_KS = (1, 3, 7)
"""With these k + 1 is a power of two: the lengths of a verify step that AITER's kernels were seen to do right."""
NEW_VERIFY = "0.27.1"
"""The first release seen in which AITER MLA's verify step was written anew."""
FP8_KS = 3
"""With an FP8 KV cache AITER's assembler kernels end at four tokens of a request."""


@check("speculative-key", "A key of speculative_config that this vLLM does not have", "https://docs.vllm.ai/en/latest/features/speculative_decoding/")
def keys(facts: Facts) -> Iterable[Finding]:
    """Of all keys that the engine will be given: the experiment's and raysd's own."""
    for engine in facts.drafting:
        settings = None if engine.place == "sweep.engine" else engine.settings  # a sweep's engine may be asked for synthetic acceptance
        for name in speculative_config(engine_spec(facts.experiment, Path(), Path(), engine.ks[0], settings)):
            given = name in engine.settings.draft_args
            field, whose = (engine.draft_field(name), "") if given else ("hardware.vllm", ", which raysd sets")
            known, since = facts.has_speculative(name), first_with_speculative(name)
            if known is False:
                later = f" (it is there from {since} on)" if since is not None and facts.base is not None and since > facts.base else ""
                yield error(field, f"{facts.words} has no key {name}{whose} in its speculative_config{later}, and does not start with one that it does not know",
                            "remove it, or use a vLLM that has it" if given else "use a vLLM that has it")
            elif known is None and facts.vllm is not None:
                yield not_checked(field, f"whether the speculative_config of {facts.words} has {name}{whose}: raysd's table of releases does not say",
                                  "try it, or run the doctor where this vLLM is installed")


@check("draft-backend-unset", "A draft whose attention backend is left to vLLM, which takes a slow one on ROCm", "https://github.com/vllm-project/vllm/issues/46596")
def draft_backend(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm and not facts.latent_draft else ():
        if engine.draft_argument("attention_backend") is None:
            if facts.has_speculative("attention_backend") is False:
                yield warning(engine.draft_field("attention_backend"), f"the draft's attention runs on ROCM_ATTN, which is slow, and {facts.words} has no way to choose another for it",
                              "use vLLM 0.21.0 or later, and set attention_backend: ROCM_AITER_UNIFIED_ATTN or TRITON_ATTN")
            else:
                yield warning(engine.draft_field("attention_backend"), "the draft's attention backend is not set: on ROCm it then is ROCM_ATTN, which is slow, whatever the target has",
                              "set it to ROCM_AITER_UNIFIED_ATTN or TRITON_ATTN")


@check("draft-backend-flash", "FLASH_ATTN for a draft on ROCm", "https://github.com/vllm-project/recipes/pull/740")
def draft_flash(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm else ():
        if str(engine.draft_argument("attention_backend")).upper() == "FLASH_ATTN":
            yield error(engine.draft_field("attention_backend"), "FLASH_ATTN does not exist on ROCm: the draft fails with `FlashAttention version not detected`",
                        "use ROCM_AITER_UNIFIED_ATTN or TRITON_ATTN")


@check("k-not-verified", "A number of drafted tokens that AITER MLA was seen to verify wrongly", "https://github.com/ROCm/aiter/issues/2720")
def k_of_aiter(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm else ():
        for k in engine.ks:
            if k in AITER_KS or not facts.on_aiter_mla(engine):
                continue
            if facts.vllm is not None and not facts.before(NEW_VERIFY):
                yield info(engine.k_field, f"k = {k}: before vLLM {NEW_VERIFY} AITER MLA verified such drafts wrongly; the step has been written anew since, and k = 3 is what is published",
                           "look at the acceptance by position: a curve that does not fall is wrong")
            elif engine.settings.enforce_eager:
                yield warning(engine.k_field, f"k = {k}: under graphs {facts.words} verifies drafts of 4, 5 and 6 tokens wrongly with AITER MLA; without them, as here, nobody has looked",
                              f"use 3 or 7, or vLLM {NEW_VERIFY} or later")
            else:
                yield error(engine.k_field, f"k = {k}: with AITER MLA {facts.words} verifies k + 1 = {k + 1} tokens, and of those only powers of two are known to be right "
                            "(k = 1, 3, 7): with 4, 5 and 6 nearly all drafts are accepted, and the text is wrong", f"use 3 or 7, or vLLM {NEW_VERIFY} or later")


@check("k-fp8-kv", "More drafted tokens than AITER MLA verifies on an FP8 KV cache", "https://github.com/ROCm/aiter/issues/2760")
def k_on_fp8(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm else ():
        for k in engine.ks:
            if k <= FP8_KS or not engine.fp8_kv or not facts.on_aiter_mla(engine):
                continue
            if facts.vllm is not None and not facts.before(NEW_VERIFY):
                yield info(engine.k_field, f"k = {k} on an FP8 KV cache: AITER's own kernels end at k = {FP8_KS}, and longer steps run one row for each token", f"measure k = {FP8_KS} beside it")
            else:
                yield error(engine.k_field, f"k = {k} on an FP8 KV cache: AITER MLA stops with `only support fp8 mla decoding for qo_len <= 4`",
                            f"use at most {FP8_KS}, or a KV cache in the target's own type")



@check("k-per-batch", "Tokens drafted by batch size, in a vLLM that does not know it", "https://docs.vllm.ai/en/latest/features/speculative_decoding/")
def k_per_batch(facts: Facts) -> Iterable[Finding]:
    serve, name = facts.experiment.serve, "num_speculative_tokens_per_batch_size"
    if serve is None or serve.k_per_batch is None or facts.vllm is None:
        return
    known = facts.has_speculative(name)
    if known is False:
        yield error("serve.k_per_batch", f"{facts.words} has no {name} in its speculative_config", f"remove it, or use vLLM {first_with_speculative(name)} or later")
    elif known is None:
        yield not_checked("serve.k_per_batch", f"whether {facts.words} knows {name}, raysd's table of releases does not say", "try it, or run the doctor where this vLLM is installed")
