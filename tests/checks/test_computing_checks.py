"""Checks that compute: the KV cache that two attentions share, memory, tensor parallelism. Each with what it finds and what it does not."""

from dataclasses import replace
from typing import Any

import pytest

from raysd.checks.findings import NOT_CHECKED, Finding
from raysd.checks.registry import all_checks, examine
from tests.checks.stacks import KIMI, MINIMAX, stack

OWN = {known.code for known in all_checks() if known.find.__module__.rpartition(".")[2] in ("kv_cache", "gpu_memory", "tensor_parallel")}
ENGINE = "sweep.engine"
AITER, EXTRA, DRAFT = f"{ENGINE}.env", f"{ENGINE}.extra_args", f"{ENGINE}.draft_args"
ALONE = {"sweep.arms": ["none"], DRAFT: None}
MLA_DRAFT = {"draft.checkpoint": "/models/kimi-k2.5-eagle3-mla", f"{DRAFT}.attention_backend": None}


def found(document: dict[str, Any], changes: dict[str, Any]) -> list[Finding]:
    return [finding for finding in examine(stack(document, changes)) if finding.code in OWN]


def only(document: dict[str, Any], changes: dict[str, Any], code: str) -> Finding:
    findings = [finding for finding in found(document, changes) if finding.code == code]
    assert len(findings) == 1, findings
    return findings[0]


CASES = [
    # the KV cache
    (KIMI, {"hardware.vllm": "0.19.1"}, "kv-block-clash", "error"),
    (KIMI, {"hardware.vllm": "0.20.0"}, "kv-block-clash", None),
    (KIMI, {"hardware.vllm": "0.19.1", f"{AITER}.VLLM_ROCM_USE_AITER_MLA": "0"}, "kv-block-clash", None),
    (KIMI, {"hardware.vllm": "0.19.1", f"{AITER}.VLLM_ROCM_USE_AITER": None}, "kv-block-clash", None),
    (KIMI, {"hardware.vllm": "0.19.1", **MLA_DRAFT}, "kv-block-clash", None),
    (KIMI, {"hardware.vllm": "0.19.1", **ALONE}, "kv-block-clash", None),
    (KIMI, {f"{EXTRA}.block-size": 1}, "kv-block-clash", "error"),
    (KIMI, {f"{EXTRA}.block_size": "1"}, "kv-block-clash", "error"),
    (KIMI, {f"{EXTRA}.block-size": 64}, "kv-block-clash", None),
    (KIMI, {f"{EXTRA}.block-size": 1, **MLA_DRAFT}, "kv-block-clash", None),
    (KIMI, {f"{EXTRA}.block-size": 1, **ALONE}, "kv-block-clash", None),
    (KIMI, {f"{DRAFT}.attention_backend": "ROCM_AITER_FA", f"{EXTRA}.block-size": 128}, "kv-block-clash", None),  # kernels of both take parts of 32
    (KIMI, {f"{DRAFT}.attention_backend": "ROCM_AITER_FA"}, "kv-block-clash", None),
    (MINIMAX, {f"{EXTRA}.block-size": 32}, "kv-block-clash", None),
    (MINIMAX, {f"{EXTRA}.block-size": 24}, "kv-block-clash", "error"),  # alone, too
    (MINIMAX, {f"{EXTRA}.block-size": 24, **ALONE}, "kv-block-clash", "error"),
    (KIMI, {f"{DRAFT}.attention_backend": "ROCM_AITER_MLA"}, "attention-backend-kind", "error"),
    (KIMI, {f"{EXTRA}.attention-backend": "TRITON_ATTN"}, "attention-backend-kind", "error"),
    (KIMI, {f"{EXTRA}.attention-backend": "TRITON_MLA"}, "attention-backend-kind", None),
    (MINIMAX, {f"{EXTRA}.attention-backend": "TRITON_MLA"}, "attention-backend-kind", "error"),
    (KIMI, {}, "attention-backend-kind", None),
    # memory
    (KIMI, {"target.tensor_parallel": 2}, "memory-weights", "error"),
    (KIMI, {"target.tensor_parallel": 4}, "memory-weights", None),
    (KIMI, {f"{ENGINE}.gpu_memory_frac": 0.5}, "memory-weights", "error"),
    (KIMI, {"hardware.name": "mi325x"}, "memory-weights", None),
    (MINIMAX, {"target.tensor_parallel": 1}, "memory-weights", None),
    (MINIMAX, {"target.tensor_parallel": 1, f"{ENGINE}.gpu_memory_frac": 0.85, "target.max_model_len": 196608}, "memory-sequence", "error"),
    (MINIMAX, {"target.tensor_parallel": 2, "target.max_model_len": 196608}, "memory-sequence", None),
    (MINIMAX, {"target.tensor_parallel": 1, f"{ENGINE}.max_num_seqs": 512, "sweep.concurrency": [64]}, "memory-requests", "warning"),
    (MINIMAX, {"target.tensor_parallel": 1, f"{ENGINE}.max_num_seqs": 512, "sweep.concurrency": [4]}, "memory-requests", "info"),
    (MINIMAX, {"target.tensor_parallel": 4, f"{ENGINE}.max_num_seqs": 64}, "memory-requests", None),
    (KIMI, {f"{EXTRA}.kv-cache-dtype": "fp8", f"{DRAFT}.draft_tensor_parallel_size": 1}, "memory-draft-kv", "info"),
    (KIMI, {f"{EXTRA}.kv-cache-dtype": "fp8"}, "memory-draft-kv", None),
    (KIMI, {f"{EXTRA}.kv-cache-dtype": "fp8", f"{DRAFT}.draft_tensor_parallel_size": 1, **MLA_DRAFT}, "memory-draft-kv", None),
    (KIMI, {"hardware.vllm": "0.32.0", f"{EXTRA}.kv-cache-dtype": "fp8", f"{DRAFT}.draft_tensor_parallel_size": 1}, "memory-draft-kv", None),  # shared out all the same
    # tensor parallelism
    (KIMI, {"target.tensor_parallel": 16}, "tp-node", "error"),
    (KIMI, {"target.tensor_parallel": 8}, "tp-node", None),
    (KIMI, {"target.tensor_parallel": 6}, "tp-heads", "error"),
    (KIMI, {"target.tensor_parallel": 8}, "tp-heads", None),
    (MINIMAX, {"target.tensor_parallel": 5}, "tp-heads", "error"),
    (MINIMAX, {"target.tensor_parallel": 8}, "tp-width", "error"),
    (MINIMAX, {"target.tensor_parallel": 8, f"{EXTRA}.enable-expert-parallel": True}, "tp-width", None),
    (MINIMAX, {"target.tensor_parallel": 4}, "tp-width", None),
    (MINIMAX, {"target.tensor_parallel": 8, f"{EXTRA}.enable-expert-parallel": True}, "minimax-tp8-ep8", "warning"),
    (MINIMAX, {"target.tensor_parallel": 4, f"{EXTRA}.enable-expert-parallel": True}, "minimax-tp8-ep8", None),
    (MINIMAX, {"target.tensor_parallel": 3, f"{EXTRA}.enable-expert-parallel": True}, "tp-experts", "info"),
    (MINIMAX, {"target.tensor_parallel": 4, f"{EXTRA}.enable-expert-parallel": True}, "tp-experts", None),
    (MINIMAX, {"target.tensor_parallel": 5}, "tp-draft-heads", "error"),
    (MINIMAX, {"target.tensor_parallel": 5, f"{DRAFT}.draft_tensor_parallel_size": 1}, "tp-draft-heads", None),
    (KIMI, {f"{DRAFT}.draft_tensor_parallel_size": 2}, "draft-tp", "error"),
    (KIMI, {f"{DRAFT}.draft_tensor_parallel_size": 1}, "draft-tp", None),
    (KIMI, {f"{DRAFT}.draft_tensor_parallel_size": 4}, "draft-tp", None),
    (KIMI, {"target.tensor_parallel": 8}, "aiter-mla-heads", "info"),
    (KIMI, {"target.tensor_parallel": 4}, "aiter-mla-heads", None),
    (KIMI, {"target.tensor_parallel": 8, f"{AITER}.VLLM_ROCM_USE_AITER": None}, "aiter-mla-heads", None),
]


@pytest.mark.parametrize(("document", "changes", "code", "severity"), CASES, ids=[f"{code}-{severity}-{position}" for position, (_, _, code, severity) in enumerate(CASES)])
def test_a_known_failure_is_found_where_it_is_and_nowhere_else(document: dict, changes: dict, code: str, severity: str | None):
    severities = {finding.severity for finding in found(document, changes) if finding.code == code}
    assert severities == (set() if severity is None else {severity})


def test_every_check_here_has_a_case_that_finds_and_one_that_does_not():
    assert {code for _, _, code, severity in CASES if severity is not None} == {code for _, _, code, severity in CASES if severity is None} == OWN


@pytest.mark.parametrize("document", [KIMI, MINIMAX])
def test_an_experiment_as_amd_runs_it_has_no_error_and_nothing_that_could_not_be_checked(document: dict):
    facts = stack(document)
    assert [finding for known in all_checks() if known.code in OWN for finding in known.find(facts) if finding.severity != "info"] == []


def test_a_clash_says_why_and_what_works():
    clash = only(KIMI, {"hardware.vllm": "0.19.1"}, "kv-block-clash")
    assert "No common block size for 1 (ROCM_AITER_MLA: [1]; ROCM_AITER_UNIFIED_ATTN: [MultipleOf(16)])" in clash.message and "vLLM 0.19.1" in clash.message
    assert "vLLM 0.20.0 or later" in clash.fix and "VLLM_ROCM_USE_AITER_MLA" in clash.fix and "a draft with MLA" in clash.fix
    of_block = only(KIMI, {f"{EXTRA}.block-size": 1}, "kv-block-clash")
    assert of_block.field == f"{EXTRA}.block-size" and "remove block-size" in of_block.fix


def test_a_sparse_target_leaves_a_draft_fewer_backends():
    """MiniMax-M3, whose sizes are not published here: https://github.com/vllm-project/vllm/pull/54180"""
    m3 = {"model_type": "minimax_m3", "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 4}
    changes = {"hardware.vllm": "0.30.0", f"{EXTRA}.attention-backend": "TRITON_ATTN", f"{EXTRA}.block-size": 128}
    facts = replace(stack(MINIMAX, changes | {f"{DRAFT}.attention_backend": "ROCM_AITER_FA"}), target=m3)
    [clash] = [finding for finding in examine(facts) if finding.code == "kv-block-clash"]
    assert "No common block size for 128" in clash.message and "ROCM_AITER_FA: [16, 32]" in clash.message
    assert clash.field == f"{EXTRA}.block-size" and "ROCM_AITER_UNIFIED_ATTN or TRITON_ATTN" in clash.fix
    facts = replace(stack(MINIMAX, changes | {f"{DRAFT}.attention_backend": "TRITON_ATTN"}), target=m3)
    assert "kv-block-clash" not in {finding.code for finding in examine(facts)}


def test_what_does_not_fit_says_how_many_gpus_would():
    weights = only(KIMI, {"target.tensor_parallel": 2}, "memory-weights")
    assert "target.tensor_parallel: 4" in weights.fix and "279.4 GB of the target's weights" in weights.message and "assumed" in weights.message
    width = only(MINIMAX, {"target.tensor_parallel": 8}, "tp-width")
    assert "1536 / 8 = 192 is no multiple of 128" in width.message and "use 1, 2, 4" in width.fix and "enable-expert-parallel" in width.fix


@pytest.mark.parametrize(("document", "changes", "words"), [
    (KIMI, {"target.model": "somebody/else"}, "not published"),
    (KIMI, {"draft.checkpoint": "/models/another"}, "the draft's config.json"),
    (KIMI, {f"{DRAFT}.attention_backend": "ROCM_AITER_FA", "hardware.vllm": "0.19.1"}, "ROCM_AITER_FA"),
    (KIMI, {f"{EXTRA}.kv-cache-dtype": "nvfp4"}, "nvfp4"),
    (KIMI, {f"{EXTRA}.attention-backend": "MY_MLA"}, "MY_MLA"),
])
def test_what_is_not_known_is_said_and_not_guessed(document: dict, changes: dict, words: str):
    findings = [finding for finding in examine(stack(document, changes)) if finding.code == NOT_CHECKED]
    assert any(words in finding.message for finding in findings), findings
    assert all(finding.severity == "warning" for finding in findings)


def test_the_served_engine_is_looked_at_too():
    serve = {"serve.engine": {"extra_args": {"block-size": 1}, "env": {"VLLM_ROCM_USE_AITER": "1"}}}
    assert only(KIMI, serve, "kv-block-clash").field == "serve.engine.extra_args.block-size"


def test_the_installed_vllm_decides_where_it_is_the_one_that_is_to_run():
    from raysd.checks.kv_blocks import SharedBlock

    class Vllm:
        """A release that is to run and says other things than the table."""

        version, speculative_fields, environment_names = "0.27.1", frozenset({"attention_backend"}), frozenset({"VLLM_ROCM_USE_AITER"})

        def kernel_block_sizes(self, backend):
            return (16,)

        def shared_block(self, manager_block, backends):
            return SharedBlock(None, f"No common block size for {manager_block} (as this vLLM says).")

        def aiter_mla_takes_heads(self, heads):
            return False

        def cpu_latent_backend(self):
            return "CPU_MLA"

        def takes_eagle3(self, architecture):
            return True

    codes = {finding.code: finding for finding in examine(stack(KIMI, {}, "0.27.1", Vllm()))}
    assert "as this vLLM says" in codes["kv-block-clash"].message and codes["aiter-mla-heads"].severity == "error"
    assert "kv-block-clash" not in {finding.code for finding in examine(stack(KIMI, {}, "0.30.0", Vllm()))}, "another release is installed"
