"""Quantized targets and drafts: what Quark writes and vLLM reads, MXFP4, and FP8 KV caches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, not_checked, warning
from raysd.checks.registry import check
from raysd.quantization.exclusions import check_exclusions, excluded_modules, is_excluded, vllm_module_names

MLP = tuple(f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down"))
GROUPED = ("fc", "lm_head", *(f"midlayer.self_attn.{name}_proj" for name in "qkvo"), *MLP)
LATENT = ("fc", "lm_head", *(f"midlayer.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")), *MLP)
"""The layers of an Eagle3 draft, as trainers name them."""


@check("quark-exclude", "Exclusions of a Quark draft that vLLM does not match", "https://huggingface.co/amd/Kimi-K2.5-Eagle3-FP8")
def exclusions(facts: Facts) -> Iterable[Finding]:
    patterns = _quark_of_draft(facts).get("exclude")
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        return
    modules = LATENT if facts.latent_draft else GROUPED
    mounted = vllm_module_names(modules)
    lost = [module for module in excluded_modules(modules, patterns) if not is_excluded(mounted[module], patterns)]
    if lost:
        yield error("draft.checkpoint", f"its quantization_config excludes {', '.join(lost)} in Quark's words, and vLLM looks for {', '.join(dict.fromkeys(mounted[module] for module in lost))}: it loads "
                    "them as if they were FP8, without a scale and without an error, and hardly a token is accepted", r'in a copy of the draft, write exclude: ["re:(?:.*\\.)?fc$", "re:(?:.*\\.)?lm_head$"]')


@check("quark-export", "A Quark draft whose config has no export key", "https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/quantization/quark/quark.py")
def export_key(facts: Facts) -> Iterable[Finding]:
    quark = _quark_of_draft(facts)
    if not quark:
        return
    export = quark.get("export")
    lacking = [name for name in ("kv_cache_group", "pack_method") if not isinstance(export, dict) or name not in export]
    if lacking:
        yield error("draft.checkpoint", f"its quantization_config has no export.{', export.'.join(lacking)}: vLLM stops with `The export key should be included`",
                    "name the folder that Quark wrote, or quantize the draft with `quantize: {}`")


@check("quantize-exclude", "Layers left in high precision by name that vLLM makes one of", "https://huggingface.co/amd/Kimi-K2.5-Eagle3-FP8")
def own_exclusions(facts: Facts) -> Iterable[Finding]:
    section = facts.experiment.quantize
    if section is None or facts.latent_draft:
        return
    if (wrong := check_exclusions(list(GROUPED), section.exclude)) is not None:
        yield error("quantize.exclude", wrong, "exclude fc and lm_head, and of q_proj, k_proj, v_proj and of gate_proj, up_proj all or none")


@check("rotated-target", "A finished draft beside a target that was rotated before it was quantized", "https://github.com/vllm-project/vllm-ascend/pull/6914")
def rotated(facts: Facts) -> Iterable[Finding]:
    said = json.dumps(facts.quantization.get("algo_config")).lower()
    if facts.experiment.draft.checkpoint is not None and ("rotat" in said or "quarot" in said):
        yield warning("draft.checkpoint", "the target's algo_config names a rotation: a draft that was trained on states which were not rotated had an acceptance length of 1.07",
                      "train a draft on this target's own states, or use a target without it")


@check("mxfp4-gfx942", "An MXFP4 target on GPUs without FP4", "https://github.com/vllm-project/vllm/issues/48015")
def mxfp4(facts: Facts) -> Iterable[Finding]:
    if facts.mxfp4 and facts.machine.gfx == "gfx942":
        yield error("target.model", f"{facts.machine.name} has no FP4 unit: MXFP4 is emulated, and very slow", "use an FP8 or INT4 checkpoint, or MI350X or MI355X")


@check("mxfp4-moe-backend", "Expert parallelism of an MXFP4 target with moe-backend left to vLLM", "https://github.com/SemiAnalysisAI/InferenceX/pull/1964")
def moe_backend(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm and facts.mxfp4 else ():
        if engine.argument("enable-expert-parallel") is True and engine.argument("moe-backend") in (None, "auto"):
            yield warning(engine.field("moe-backend"), "ranks were seen to hang while all of them compile Quark's emulation of MXFP4", "set moe-backend: aiter")


@check("fp8-kv-scales", "An FP8 KV cache without scales", "https://github.com/vllm-project/recipes/issues/579")
def kv_scales(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        if not engine.fp8_kv or engine.argument("calculate-kv-scales") is True:
            continue
        if facts.target is None:
            yield not_checked(engine.field("kv-cache-dtype"), "whether the target has scales for an FP8 KV cache: its config.json is not on this machine", "run the doctor where the target is")
        elif not facts.quantization.get("kv_cache_quant_config") and not facts.quantization.get("kv_cache_scheme"):
            worse = ", the more so on gfx942, whose FP8 has another range" if facts.machine.gfx == "gfx942" else ""
            yield warning(engine.field("kv-cache-dtype"), f"the target has no scales for its KV cache, and vLLM takes 1.0: answers may get worse{worse}", "compare answers with a KV cache in the target's own type")


@check("draft-kv-dtype", "A draft whose KV cache has another type than its target's", "https://github.com/vllm-project/vllm/issues/32165")
def draft_kv(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        given, asked = engine.argument("kv-cache-dtype"), engine.draft_argument("kv_cache_dtype")
        if given is None and asked is None or given == asked:
            continue
        field = engine.draft_field("kv_cache_dtype")
        if asked is not None:
            yield warning(field, f"the draft's KV cache is {asked}, the target's {given or 'auto'}: mixed types were refused or read wrongly", "use one for both")
        elif str(given) != "auto":
            later = "" if facts.has_speculative("kv_cache_dtype") else "use vLLM 0.27.1 or later, which has it, and "
            yield warning(field, f"the target's KV cache is {given}, and nothing says what the draft's is", f"{later}set kv_cache_dtype: {given}")


@check("draft-misfit", "A finished draft that was not made for this target", "https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/models/llama_eagle3.py")
def misfit(facts: Facts) -> Iterable[Finding]:
    if facts.draft_misfit is not None:
        yield error("draft.checkpoint", facts.draft_misfit.what, facts.draft_misfit.fix)
    elif facts.experiment.draft.checkpoint is not None and (facts.draft_folder is None or facts.target_folder is None):
        absent = "draft" if facts.draft_folder is None else "target"
        yield not_checked("draft.checkpoint", f"whether the draft fits the target (vocabulary, widths, layers that it reads, rope, numbers): the {absent}'s files are not on this machine",
                          "run the doctor where both are; `raysd run` looks before it starts an engine")


def _quark_of_draft(facts: Facts) -> Mapping[str, Any]:
    """The quantization_config of a finished draft that Quark quantized; empty otherwise."""
    config = (facts.draft or {}).get("quantization_config")
    return config if isinstance(config, dict) and config.get("quant_method") == "quark" else {}
