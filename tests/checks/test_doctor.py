"""Every check of `raysd doctor`: an experiment in which it finds something, and one that is right. The numbers are those of research/01, section 6."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raysd.checks.doctor import facts_of
from raysd.checks.findings import NOT_CHECKED
from raysd.checks.registry import all_checks, examine
from raysd.errors import ExperimentError
from tests.checks.doctor_facts import GROUPED, TRAINED, arguments, draft_arguments, env, experiment_with, facts_with, found
from tests.checks.finished_drafts import CONFIG, target_shape, write


def vllm(version: str) -> dict[str, Any]:
    return {"hardware.vllm": version}


def quark(**changes: Any) -> dict[str, Any]:
    """A Quark draft's config.json, with changes in its quantization_config."""
    own = {"quant_method": "quark", "exclude": [r"re:(?:.*\.)?fc$", r"re:(?:.*\.)?lm_head$"], "export": {"kv_cache_group": [], "pack_method": "reorder"}}
    return {"architectures": ["LlamaForCausalLMEagle3"], "quantization_config": {name: value for name, value in (own | changes).items() if value is not None}}


def machine(**variables: str) -> dict[str, Any]:
    """Changes: variables of all jobs; of an engine's own, an experiment may hold no mask."""
    return {"hardware.env": variables}


FP8_KV = arguments(kv_cache_dtype="fp8")
MI325X = {"hardware.name": "mi325x"}
M3 = {"target.model": "amd/MiniMax-M3-MXFP4"}
M2 = {"target.model": "MiniMaxAI/MiniMax-M2.5"}
SERVED = {"serve": {}}
PER_BATCH = {"serve": {"k": 3, "k_per_batch": [[1, 16, 3], [17, 64, 1]]}}
NO_DRAFT = {"sweep.arms": ["none"], "sweep.engine.draft_args": None}
SHUFFLE = env(VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT="1")
NO_AITER = env(VLLM_ROCM_USE_AITER="0")
V2 = env(VLLM_USE_V2_MODEL_RUNNER="1")
RAY = arguments(distributed_executor_backend="ray")
RANDOM = {"sweep.workloads": [{"name": "1k1k", "kind": "random", "isl": 1024, "osl": 1024}]}


COMPUTED = ("kv_cache", "gpu_memory", "tensor_parallel", "nodes")
"""Checks with tests of their own."""


ELSEWHERE = {1: "kv-block-clash", 2: "kv-block-clash", 3: "kv-block-clash", 17: "node-quark", 20: "node-aiter-lock", 23: "tp-width", 32: "node-packages", 33: "node-packages"}
"""Known failures whose cases are in test_computing_checks.py and test_nodes.py."""


@dataclass(frozen=True)
class Probe:
    """An installed vLLM that knows some names, and one target."""

    version: str = "0.32.0"
    speculative_fields: frozenset[str] = frozenset({"method", "model", "num_speculative_tokens", "use_local_argmax_reduction", "attention_backend", "draft_tensor_parallel_size"})
    environment_names: frozenset[str] = frozenset({"VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_RMSNORM", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ENGINE_READY_TIMEOUT_S"})

    def takes_eagle3(self, architecture: str) -> bool | None:
        return {"Qwen3ForCausalLM": True, "GPT2LMHeadModel": False}.get(architecture)


PROBE = {"probe": Probe()}
INSTALLED = vllm("0.32.0") | {"target.model": "/nowhere/target"}
MISFIT = ExperimentError(what="its vocab_size is 32000, the target's is 163840", where="draft.checkpoint", fix="name another")

CASES: list[tuple[str, tuple[int, ...], str, tuple[dict, dict], tuple[dict, dict]]] = [
    # code, numbers of known failures, severity, (changes, facts) where it is found, (changes, facts) where it is not
    ("speculative-key", (), "error", (vllm("0.20.0"), {}), (vllm("0.21.0"), {})),
    ("k-per-batch", (), "error", (PER_BATCH | vllm("0.22.0"), {}), (PER_BATCH, {})),
    ("speculative-key", (), "error", (draft_arguments(kv_cache_dtype="fp8"), {}), (draft_arguments(kv_cache_dtype="fp8") | vllm("0.27.1"), {})),
    ("speculative-key", (), "error", (draft_arguments(draft_lm_head_quantization="fp8") | vllm("0.32.0"), {}), (draft_arguments(draft_lm_head_quantization="fp8") | V2 | vllm("0.33.0"), {})),
    ("speculative-key", (), "error", (INSTALLED, {"probe": Probe(speculative_fields=PROBE["probe"].speculative_fields - {"use_local_argmax_reduction"})}), (INSTALLED, PROBE)),
    ("speculative-key", (), "error", (draft_arguments(attention_backnd="TRITON_ATTN") | INSTALLED, PROBE), (INSTALLED, PROBE)),
    ("draft-backend-unset", (4,), "warning", (draft_arguments(attention_backend=None), {}), ({}, {})),
    ("draft-backend-unset", (4,), "warning", (draft_arguments(attention_backend=None) | vllm("0.20.0"), {}),
     (draft_arguments(attention_backend=None), {"draft": {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512}})),
    ("draft-backend-flash", (5,), "error", (draft_arguments(attention_backend="FLASH_ATTN"), {}), (draft_arguments(attention_backend="TRITON_ATTN"), {})),
    ("k-not-verified", (7,), "error", ({"sweep.k": [4]}, {}), ({"sweep.k": [7]}, {})),
    ("k-not-verified", (7,), "error", ({"sweep.k": [3, 6]} | vllm("0.22.0"), {}), ({"sweep.k": [6]} | M2, {})),
    ("k-not-verified", (7,), "error", ({"sweep.k": [2]}, {}), ({"sweep.k": [1]}, {})),
    ("k-not-verified", (7,), "warning", ({"sweep.k": [5], "sweep.engine.enforce_eager": True}, {}), ({"sweep.k": [5]} | env(VLLM_ROCM_USE_AITER_MLA="0"), {})),
    ("k-not-verified", (7,), "info", ({"sweep.k": [4]} | vllm("0.27.1"), {}), (vllm("0.27.1"), {})),
    ("k-fp8-kv", (8, 9), "error", ({"sweep.k": [7]} | FP8_KV, {}), ({"sweep.k": [3]} | FP8_KV, {})),
    ("k-fp8-kv", (8, 9), "info", ({"sweep.k": [7]} | FP8_KV | vllm("0.30.0"), {}), ({"sweep.k": [7]}, {})),
    ("quark-exclude", (14,), "error", ({}, {"draft": quark(exclude=["fc", "lm_head"])}), ({}, {"draft": quark()})),
    ("quark-exclude", (14,), "error", ({}, {"draft": quark(exclude=["*fc", "lm_head"])}), ({}, {"draft": quark(exclude=["re:.*fc", "re:.*lm_head"])})),
    ("quark-exclude", (14,), "error", ({}, {"draft": quark(exclude=["re:(?:.*\\.)?fc$", "lm_head", "midlayer.self_attn.q_proj"])}), ({}, {"draft": quark(exclude=["model.fc", "lm_head"])})),
    ("quark-export", (15,), "error", ({}, {"draft": quark(export=None)}), ({}, {"draft": quark()})),
    ("quark-export", (15,), "error", ({}, {"draft": quark(export={"kv_cache_group": []})}), ({}, {"draft": {"architectures": ["LlamaForCausalLMEagle3"]}})),
    ("quantize-exclude", (), "error", ({"quantize": {"exclude": ["fc", "lm_head", "*.q_proj"]}}, {}), ({"quantize": {}}, {})),
    ("quantize-exclude", (), "error", ({"quantize": {"exclude": ["fc"]}}, {}), ({"quantize": {"exclude": ["fc", "lm_head", "*.mlp.*"]}}, {})),
    ("rotated-target", (16,), "warning", ({}, {"target": GROUPED | {"quantization_config": {"quant_method": "quark", "algo_config": [{"name": "quarot", "r1": True}]}}}),
     ({}, {"target": GROUPED | {"quantization_config": {"quant_method": "quark", "algo_config": None}}})),
    ("mxfp4-gfx942", (40,), "error", (MI325X, {}), (MI325X | M2, {})),
    ("mxfp4-gfx942", (40,), "error", (MI325X | M3, {}), (M3, {})),
    ("mxfp4-moe-backend", (21,), "warning", (arguments(enable_expert_parallel=True), {}), (arguments(enable_expert_parallel=True, moe_backend="aiter"), {})),
    ("mxfp4-moe-backend", (21,), "warning", (arguments(enable_expert_parallel=True, moe_backend="auto"), {}), (arguments(enable_expert_parallel=True) | M2, {})),
    ("fp8-kv-scales", (36,), "warning", (FP8_KV, {}), (FP8_KV, {"target": GROUPED | {"quantization_config": {"kv_cache_quant_config": {"*k_proj": {}}}}})),
    ("fp8-kv-scales", (36,), "warning", (FP8_KV | MI325X, {}), ({}, {})),
    ("draft-kv-dtype", (37,), "warning", (FP8_KV | vllm("0.27.1"), {}), (FP8_KV | draft_arguments(kv_cache_dtype="fp8") | vllm("0.27.1"), {})),
    ("draft-kv-dtype", (37,), "warning", (draft_arguments(kv_cache_dtype="fp8") | vllm("0.27.1"), {}), (arguments(kv_cache_dtype="auto"), {})),
    ("draft-misfit", (), "error", ({}, {"draft_misfit": MISFIT}), ({}, {})),
    ("env-gone", (48,), "error", (env(VLLM_ROCM_USE_AITER_FP4_ASM_GEMM="1") | vllm("0.30.0"), {}), (vllm("0.30.0"), {})),
    ("env-gone", (48,), "warning", (env(VLLM_ROCM_USE_AITER_FP4_ASM_GEMM="1"), {}), ({}, {})),
    ("env-gone", (48,), "error", (env(VLLM_ROCM_USE_AITER_PAGED_ATTN="1") | vllm("0.27.1"), {}), (env(VLLM_ROCM_USE_AITER_FP8BMM="1") | vllm("0.27.1"), {})),
    ("env-gone", (48,), "error", (env(VLLM_ROCM_AITER_MLA_ASM_PADDING="asm"), {}), (env(VLLM_ROCM_AITER_MLA_ASM_PADDING="asm") | vllm("0.33.0"), {})),
    ("env-gone", (48,), "error", (env(VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB="256") | vllm("0.21.0"), {}), (env(VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB="256"), {})),
    ("env-gone", (48,), "error", (env(VLLM_ROCM_USE_AITR="1") | INSTALLED, PROBE), (INSTALLED, PROBE)),
    ("env-gone", (48,), "error", ({"hardware.env": {"VLLM_ROCM_USE_AITER_PAGED_ATTN": "1"}} | vllm("0.27.1"), {}), ({"hardware.env": {"HF_HOME": "/data"}}, {})),
    ("aiter-off", (), "warning", (env(VLLM_ROCM_USE_AITER=None), {}), ({}, {})),
    ("aiter-off", (), "warning", (NO_AITER, {}), ({"hardware": {"name": "cpu"}, "target.tensor_parallel": 1, "sweep.engine.env": {}}, {})),
    ("quick-reduce-unset", (), "info", (env(VLLM_ROCM_QUICK_REDUCE_QUANTIZATION=None), {}), ({}, {})),
    ("symmetric-memory", (35,), "warning", (env(VLLM_ALLREDUCE_USE_SYMM_MEM=None), {}), ({}, {})),
    ("symmetric-memory", (35,), "warning", (env(VLLM_ALLREDUCE_USE_SYMM_MEM="1"), {}), (env(VLLM_ALLREDUCE_USE_SYMM_MEM=None) | MI325X, {})),
    ("aiter-rmsnorm", (18,), "warning", (env(VLLM_ROCM_USE_AITER_RMSNORM=None), {}), ({}, {})),
    ("aiter-rmsnorm", (18,), "warning", (env(VLLM_ROCM_USE_AITER_RMSNORM="1"), {}), (env(VLLM_ROCM_USE_AITER_RMSNORM=None) | {"target.tensor_parallel": 8}, {})),
    ("aiter-rmsnorm", (18,), "warning", (env(VLLM_ROCM_USE_AITER_RMSNORM=None) | vllm("0.20.0"), {}), (env(VLLM_ROCM_USE_AITER_RMSNORM=None) | vllm("0.30.0"), {})),
    ("ready-timeout", (22,), "warning", (env(VLLM_ENGINE_READY_TIMEOUT_S=None), {}), ({}, {})),
    ("ready-timeout", (22,), "warning", ({"sweep.engine.start_timeout_s": 600.0}, {}), ({"sweep.engine.start_timeout_s": 600.0} | NO_AITER, {})),
    ("shuffle-block", (24,), "error", (SHUFFLE | arguments(block_size=32), {}), (SHUFFLE | arguments(block_size=16), {})),
    ("shuffle-speculation", (25,), "error", (SHUFFLE, {}), (SHUFFLE | NO_DRAFT, {})),
    ("shuffle-speculation", (25,), "error", (SHUFFLE | M3 | {"target.tensor_parallel": 8}, {}), (SHUFFLE | M3, {})),
    ("v2-runner", (28,), "warning", (V2, {}), (env(VLLM_USE_V2_MODEL_RUNNER="0"), {})),
    ("draft-head-needs-v2", (), "error", (draft_arguments(draft_lm_head_quantization="fp8") | vllm("0.33.0"), {}), (draft_arguments(draft_lm_head_quantization="fp8") | V2 | vllm("0.33.0"), {})),
    ("aiter-expert-parallel", (42,), "warning", (M3 | arguments(enable_expert_parallel=True), {}), (M3 | arguments(enable_expert_parallel=True) | NO_AITER, {})),
    ("scratch-reclaim", (19,), "info", (env(HSA_NO_SCRATCH_RECLAIM=None), {}), ({}, {})),
    ("masks-differ", (29, 30), "error", (machine(HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="2,3"), {}), (machine(HIP_VISIBLE_DEVICES="0,1", CUDA_VISIBLE_DEVICES="0, 1"), {})),
    ("masks-differ", (29, 30), "error", (machine(CUDA_VISIBLE_DEVICES=""), {}), (machine(CUDA_VISIBLE_DEVICES="0,1,2,3"), {})),
    ("rocr-mask", (30,), "error", (machine(ROCR_VISIBLE_DEVICES="0,1,2,3"), {}), (machine(HIP_VISIBLE_DEVICES="0,1,2,3"), {})),
    ("mask-in-experiment", (29,), "warning", (machine(HIP_VISIBLE_DEVICES="0,1,2,3"), {}), ({}, {})),
    ("noset-masks", (29,), "warning", ({"hardware.env": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"}}, {}), ({"hardware.env": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": ""}}, {})),
    ("ray-executor", (31,), "error", (RAY, {}), (arguments(distributed_executor_backend="mp"), {})),
    ("ray-executor", (31,), "error", (RAY, {}), (RAY | {"target.tensor_parallel": 16}, {})),
    ("cupy", (34,), "warning", (RAY | {"target.tensor_parallel": 16}, {}), ({"target.tensor_parallel": 8}, {})),
    ("cupy", (34,), "warning", ({"target.tensor_parallel": 16}, {}), (arguments(distributed_executor_backend="mp") | {"target.tensor_parallel": 16}, {})),
    ("gluon-gfx942", (12,), "error", (MI325X | vllm("0.27.1"), {}), (vllm("0.27.1"), {})),
    ("gluon-gfx942", (12,), "error", (MI325X | vllm("0.27.1"), {}), (MI325X | vllm("0.30.0"), {})),
    ("vllm-too-old", (), "error", (vllm("0.17.0"), {}), (vllm("0.20.0"), {})),
    ("mla-speculation", (11,), "error", (vllm("0.19.1"), {}), (vllm("0.19.1") | {"sweep.k": [1]}, {})),
    ("mla-speculation", (11,), "error", (vllm("0.19.1") | NO_AITER, {}), (vllm("0.19.1") | M2, {})),
    ("no-eagle3", (6,), "error", (INSTALLED, PROBE | {"target": {"architectures": ["GPT2LMHeadModel"]}}), (INSTALLED, PROBE | {"target": GROUPED})),
    ("vllm-0.26.0", (39,), "error", (vllm("0.26.0"), {"target": GROUPED | {"kv_lora_rank": 512, "index_topk": 2048}}), (vllm("0.27.1"), {"target": GROUPED | {"kv_lora_rank": 512, "index_topk": 2048}})),
    ("vllm-0.26.0", (39,), "warning", (vllm("0.26.0") | M3, {"target": None}), (vllm("0.26.0"), {})),
    ("serve-vllm", (), "error", (SERVED | vllm("0.33.0"), {}), (SERVED | vllm("0.32.0"), {})),
    ("versions-clash", (), "error", (INSTALLED, PROBE | {"clashes": ("vllm 0.32.0 asks for transformers<5.20, and 5.24 is installed",)}), (INSTALLED, PROBE)),
    ("fastsafetensors", (38,), "error", (arguments(load_format="fastsafetensors") | INSTALLED, PROBE), (arguments(load_format="fastsafetensors") | INSTALLED, PROBE | {"packages": {"fastsafetensors": "0.1"}})),
    ("random-prompts", (44,), "error", (RANDOM, {"has_chat_template": False}), ({}, {"has_chat_template": False})),
    ("random-prompts", (44,), "info", (RANDOM, {"has_chat_template": True}), (RANDOM | {"sweep.acceptance": {"rates": [0.8, 0.6, 0.4]}}, {"has_chat_template": True})),
    ("random-prompts", (44,), "info", (RANDOM, {}), ({"sweep.workloads": [*RANDOM["sweep.workloads"], {"name": "report"}]}, {})),
    ("sampling-temperature", (45,), "warning", ({"sweep.temperature": 0.7}, {}), ({"sweep.temperature": 0.7} | NO_DRAFT, {})),
    ("tool-parser", (43,), "warning", (arguments(tool_call_parser="kimi_k2"), {}), (arguments(tool_call_parser="hermes"), {})),
    ("async-scheduling", (27,), "warning", (arguments(async_scheduling=True), {}), (arguments(no_async_scheduling=True), {})),
    ("prefix-caching", (26,), "warning", ({"serve": {"prefix_caching": True}}, {}), ({"serve": {"prefix_caching": True, "acceptance_floor": 1.5, "recycle": True}}, {})),
    ("prefix-caching", (26,), "warning", ({"serve": {"prefix_caching": True}}, {}), ({"serve": {"prefix_caching": True, "arm": "none"}}, {})),
]
NOT_TOLD: list[tuple[str, dict, dict, dict]] = [
    # part of the message, changes and facts where something cannot be told, changes where it can
    ("the speculative_config of vLLM 0.24.0 has parallel_drafting", draft_arguments(parallel_drafting=True), {}, draft_arguments(parallel_drafting=True) | vllm("0.33.0")),
    ("reads VLLM_SOMETHING", env(VLLM_SOMETHING="1"), {}, {}),
    ("reads VLLM_ROCM_USE_AITER_CUSTOM_AR", env(VLLM_ROCM_USE_AITER_CUSTOM_AR="1"), {}, env(VLLM_ROCM_USE_AITER_CUSTOM_AR="1") | vllm("0.33.0")),
    ("which vLLM runs this", {}, {"vllm": None}, {}),
    ("what changed in vLLM 0.40.0", vllm("0.40.0"), {}, {}),
    ("whether the target has scales", FP8_KV | M3, {}, FP8_KV),
    ("norms of Eagle 3.1", TRAINED | {"draft.algorithm": "eagle3.1"}, {}, TRAINED | {"draft.algorithm": "eagle3.1"} | vllm("0.32.0")),
    ("whether MiniMax-M3 takes", M3, {}, M3 | vllm("0.32.0")),
    ("whether ray.serve.llm", SERVED, {}, SERVED | vllm("0.29.0")),
    ("whether fastsafetensors", arguments(load_format="fastsafetensors"), {}, {}),
    ("whether the draft fits", {}, {}, TRAINED),
]


@pytest.mark.parametrize(("code", "severity", "where"), [(code, severity, where) for code, _, severity, where, _ in CASES], ids=[f"{case[0]} {index}" for index, case in enumerate(CASES)])
def test_a_failure_is_found(code: str, severity: str, where: tuple[dict, dict]):
    told = [finding for finding in found(where[0], **where[1]) if finding.code == code]
    assert [finding.severity for finding in told][:1] == [severity], found(where[0], **where[1])
    assert all(finding.source.startswith("https://") and finding.message and finding.fix and finding.field for finding in told)


@pytest.mark.parametrize(("code", "where"), [(code, where) for code, *_, where in CASES], ids=[f"{case[0]} {index}" for index, case in enumerate(CASES)])
def test_what_is_right_is_left_alone(code: str, where: tuple[dict, dict]):
    assert code not in [finding.code for finding in found(where[0], **where[1])]


def test_every_check_has_a_case_both_ways_but_those_that_only_say_what_is_not_known():
    mine = {known.code for known in all_checks() if known.find.__module__.rpartition(".")[2] not in COMPUTED}
    assert mine - {case[0] for case in CASES} <= {"vllm-unknown"}


def test_which_of_the_48_known_failures_are_found():
    """Not found: 10 (builds of early 2026), 13 (no figure for how long is too long), 41 and 46 (only a log tells), 47 (SGLang's)."""
    assert set(ELSEWHERE.values()) <= {known.code for known in all_checks()}
    assert {number for case in CASES for number in case[1]} | set(ELSEWHERE) == set(range(1, 49)) - {10, 13, 41, 46, 47}


@pytest.mark.parametrize(("words", "changes", "facts", "told"), NOT_TOLD, ids=[case[0] for case in NOT_TOLD])
def test_what_is_not_known_is_a_warning_and_no_guess(words: str, changes: dict, facts: dict, told: dict):
    messages = [finding.message for finding in found(changes, **facts) if (finding.code, finding.severity) == (NOT_CHECKED, "warning")]
    assert any(words in message for message in messages), messages
    assert not any(words in finding.message for finding in found(told))


def test_an_experiment_that_is_right_has_nothing_but_what_cannot_be_checked():
    assert {finding.code for finding in found()} <= {NOT_CHECKED}


def test_errors_come_first_and_each_thing_is_told_once():
    findings = examine(facts_with({"sweep.k": [4], "serve": {}} | env(VLLM_ROCM_USE_AITER_RMSNORM=None, HSA_NO_SCRATCH_RECLAIM=None)))
    severities = [finding.severity for finding in findings]
    assert severities == sorted(severities, key=("error", "warning", "info").index) and set(severities) == {"error", "warning", "info"}
    assert len(findings) == len(set(findings))


def test_the_engine_that_is_served_is_looked_at_by_itself():
    served = {"serve": {"k": 4, "engine": {"env": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_PAGED_ATTN": "1"}, "max_num_seqs": 64}}}
    fields = {finding.code: finding.field for finding in found(served)}
    assert fields["k-not-verified"] == "serve.k" and fields["env-gone"] == "serve.engine.env.VLLM_ROCM_USE_AITER_PAGED_ATTN"


def test_codes_and_sources_of_all_checks():
    checks = all_checks()
    assert len({known.code for known in checks}) == len(checks) >= 30
    assert all(known.source.startswith("https://") and known.title and " " not in known.code for known in checks)


@pytest.mark.parametrize(("changes", "fits"), [({}, True), ({"vocab_size": 512}, False), ({"hidden_size": 32}, False)])
def test_a_draft_and_a_target_on_disk_are_held_against_each_other(tmp_path: Path, changes: dict[str, Any], fits: bool):
    target_shape(tmp_path / "target")
    on_disk = {"target": {"model": str(tmp_path / "target"), "max_model_len": 512}, "draft.checkpoint": str(write(tmp_path / "draft", CONFIG | changes)), "hardware.vllm": "0.32.0"}
    told = {finding.code: finding for finding in found(on_disk) if finding.field == "draft.checkpoint"}
    assert set(told) == (set() if fits else {"draft-misfit"})
    assert fits or str(next(iter(changes.values()))) in told["draft-misfit"].message


def test_what_quark_wrote_is_found_by_the_file_and_by_its_config(tmp_path: Path):
    target_shape(tmp_path / "target")
    folder = write(tmp_path / "draft", CONFIG | {"quantization_config": quark(exclude=["fc", "lm_head"])["quantization_config"]})
    on_disk = {"target": {"model": str(tmp_path / "target"), "max_model_len": 512}, "draft.checkpoint": str(folder)}
    assert {"quark-exclude", "draft-misfit"} <= {finding.code for finding in found(on_disk)}


@pytest.mark.parametrize(("named", "installed", "asked"), [("0.32.0", "0.32.0", True), ("0.32.0", "0.32.0+rocm722", True), (None, "0.32.0+rocm722", True), ("0.24.0", "0.32.0", False),
                                                          ("0.32.0rc1", "0.32.0", False), ("0.32.0", None, False)])
def test_the_installed_vllm_is_asked_if_it_is_the_one_that_the_experiment_names(named: str | None, installed: str | None, asked: bool):
    facts = facts_of(experiment_with({"hardware.vllm": named}), None, installed, Probe())
    assert (facts.probe is not None) == asked
