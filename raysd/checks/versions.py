"""Versions that a target or a draft needs, and versions that do not go together."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, not_checked, warning
from raysd.checks.registry import check
from raysd.checks.releases import bounds

SERVES = ("0.29.0", "0.33.0")
"""vLLM that ray.serve.llm of Ray 2.60 was made for, and the first whose modules have moved from where it looks for them."""
SEEN_EAGLE31 = SEEN_M3 = "0.32.0"
"""The oldest release in which Eagle 3.1's norms, and an Eagle3 draft beside MiniMax-M3 on AMD's GPUs, were seen."""


@check("vllm-unknown", "A vLLM that raysd knows nothing about", "https://github.com/vllm-project/vllm/releases")
def known(facts: Facts) -> Iterable[Finding]:
    oldest, newest = bounds()
    if facts.vllm is None:
        yield not_checked("hardware.vllm", "which vLLM runs this: none is named, and none is installed here", "set hardware.vllm to the version on the cluster")
    elif facts.probe is None and facts.base is not None and not oldest <= facts.base <= newest:
        yield not_checked("hardware.vllm", f"what changed in {facts.words}: raysd's tables are of {oldest} to {newest}", "run the doctor where this vLLM is installed")


@check("vllm-too-old", "A vLLM without Eagle3 for this target", "https://github.com/vllm-project/recipes")
def too_old(facts: Facts) -> Iterable[Finding]:
    if not facts.drafting:
        return
    if facts.is_target("Kimi-K2") and facts.before("0.18.0"):
        yield error("hardware.vllm", f"{facts.words} has no Eagle3 for Kimi-K2.5", "use 0.20.0 or later; 0.27.1 for lengths other than 1, 3 and 7")
    if facts.latent_draft and facts.before("0.18.0"):
        yield error("hardware.vllm", f"{facts.words} has no draft with MLA (Eagle3DeepseekV2ForCausalLM)", "use 0.20.0 or later")
    newer_norms = facts.experiment.draft.algorithm == "eagle3.1" if facts.draft is None else any(facts.draft.get(name) for name in ("fc_norm", "norm_output"))
    if newer_norms and facts.before(SEEN_EAGLE31):
        yield not_checked("draft.algorithm", f"whether {facts.words} reads the norms of Eagle 3.1: they were seen in {SEEN_EAGLE31} and later", "measure the acceptance first, or use a newer vLLM")


@check("mla-speculation", "Drafts of several tokens beside MLA on ROCm before vLLM 0.20.0", "https://github.com/vllm-project/vllm/issues/28222")
def mla_speculation(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm and facts.target_kind in ("latent", "latent_sparse") else ():
        if facts.before("0.20.0") and max(engine.ks) > 1:
            yield error(engine.k_field, f"{facts.words} stops with `Unsupported attention metadata type` at num_speculative_tokens > 1", "use vLLM 0.20.0 or later")


@check("no-eagle3", "A target that hands no hidden states to a draft", "https://github.com/vllm-project/vllm/pull/45546")
def no_eagle3(facts: Facts) -> Iterable[Finding]:
    if not facts.drafting:
        return
    names = (facts.target or {}).get("architectures") or []
    told = [facts.probe.takes_eagle3(name) for name in names if isinstance(name, str)] if facts.probe is not None else []
    if told and not any(told) and False in told:
        yield error("target.model", f"{facts.words} stops with `Model does not support EAGLE3 interface`: its {', '.join(names)} hands no hidden states to a draft", "use a newer vLLM, or another target")
    elif facts.is_target("MiniMax-M3") and facts.rocm and facts.before(SEEN_M3) and facts.probe is None:
        yield not_checked("hardware.vllm", f"whether MiniMax-M3 takes an Eagle3 draft in {facts.words} on AMD's GPUs: early images' did not, and {SEEN_M3} does", f"use {SEEN_M3} or later")


@check("vllm-0.26.0", "The release image 0.26.0 for ROCm, whose sparse MLA is broken", "https://github.com/vllm-project/vllm/issues/50064")
def broken_release(facts: Facts) -> Iterable[Finding]:
    if not facts.rocm or facts.base != Version("0.26.0"):
        return
    words = "the image of 0.26.0 stops with `ROCMAiterMLASparseMetadata has no attribute num_decode_tokens`"
    if facts.target_kind == "latent_sparse":
        yield error("hardware.vllm", words, "use another release: it is put right in https://github.com/vllm-project/vllm/pull/48886")
    elif facts.target is None:
        yield warning("hardware.vllm", f"{words} where the target has sparse MLA, and the target's config.json is not at hand", "use another release")


@check("serve-vllm", "Ray's LLM serving with a vLLM that it was not made for", "https://github.com/ray-project/ray/issues/64006")
def serves(facts: Facts) -> Iterable[Finding]:
    if facts.experiment.serve is None or facts.base is None:
        return
    if facts.base >= Version(SERVES[1]):
        yield error("hardware.vllm", f"ray.serve.llm of Ray 2.60 does not start with {facts.words}: modules that it imports have moved", f"use vLLM {SERVES[0]} to 0.32.0 to serve")
    elif facts.base < Version(SERVES[0]):
        yield not_checked("hardware.vllm", f"whether ray.serve.llm of Ray 2.60 goes with {facts.words}: it is made for {SERVES[0]}, and its imports were looked at with 0.32.0", f"use vLLM {SERVES[0]} to 0.32.0 to serve")


@check("versions-clash", "Installed packages that do not go together", "https://packaging.python.org/en/latest/specifications/core-metadata/#requires-dist-multiple-use")
def clashes(facts: Facts) -> Iterable[Finding]:
    for words in facts.clashes if facts.probe is not None else ():
        yield error("packages of this machine", words, "install what is asked for")


@check("fastsafetensors", "A load format whose package is not installed", "https://github.com/ROCm/aiter/issues/3441")
def fastsafetensors(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        if engine.argument("load-format") != "fastsafetensors":
            continue
        if facts.probe is None:
            yield not_checked(engine.field("load-format"), "whether fastsafetensors is in the image; workers do not start without it", "run `raysd doctor --cluster SPEC`")
        elif "fastsafetensors" not in facts.packages:
            yield error(engine.field("load-format"), "fastsafetensors is not installed, and workers do not start without it", "install it, or remove load-format")
