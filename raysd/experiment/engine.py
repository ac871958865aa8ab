"""`sweep.engine:` vLLM's settings, and which of its arguments raysd keeps for itself."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from raysd.experiment.hardware import SECRET_NAME
from raysd.experiment.section import Placement, Section

ACCEPTANCE_SEQS = 16
"""Sequences that an engine decodes at once while a draft's acceptance is counted."""


def _by_name(reasons: dict[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


SERVER_FLAGS = _by_name({
    "is set by raysd from the experiment; use the experiment's own field":
        "model served-model-name dtype max-model-len max-num-seqs tensor-parallel-size kv-cache-memory-bytes gpu-memory-utilization device-memory-utilization "
        "enforce-eager chat-template trust-remote-code",
    "is set by raysd: whatever drafts is an arm, with k and a draft of its own": "speculative-config spec-method spec-model spec-tokens",
    "is set by raysd: no arm may answer from a cache of prefixes, and sampling is what each request says": "enable-prefix-caching generation-config",
    "is set by raysd, which reads what the server tells of its requests, and in its log, as it asked for it": "disable-uvicorn-access-log per-request-spec-decode-metrics",
    "would make it another target than `target` names": "tokenizer tokenizer-revision revision code-revision hf-overrides hf-config-path config-format model-class-overrides runner convert",
    "is a secret, and the experiment is stored beside every result": "api-key hf-token",
    "would put the server where raysd, which chose its address, does not reach it":
        "host port uds grpc grpc-port root-path ssl-keyfile ssl-certfile ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh headless tokens-only",
    "would take away, or change, what raysd reads from the server": "disable-log-stats api-server-count max-logprobs logprobs-mode",
    "would give an engine other devices than those that Ray reserved and the report divides by":
        "device-ids pipeline-parallel-size prefill-context-parallel-size nnodes node-rank master-addr master-port data-parallel-size data-parallel-size-local data-parallel-rank "
        "data-parallel-start-rank data-parallel-address data-parallel-rpc-port data-parallel-backend data-parallel-hybrid-lb data-parallel-external-lb "
        "data-parallel-multi-port-external-lb data-parallel-supervisor-port enable-elastic-ep",
    "names adapters, and no request of raysd asks for one": "lora-modules",
    "names a file of further arguments, which nobody would check; write them here": "config",
    "ends the server at once": "help",
})
"""Arguments of vLLM's server that an experiment must not give (vllm/entrypoints/launchers/cli_args.py of 0.32), and why."""
DRAFT_KEYS = _by_name({
    "is set by raysd from the experiment; use the experiment's own field": "method model num_speculative_tokens rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length",
    "would have cells of one k draft another number of tokens": "num_speculative_tokens_per_batch_size",
    "would make it another draft than the arm names": "quantization revision code_revision",
    "is vLLM's own to fill in; for the draft's devices there is draft_tensor_parallel_size":
        "tensor_parallel_size target_model_config target_parallel_config draft_model_config draft_parallel_config",
    "has no effect: it is for another method than eagle3":
        "prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob dspark_draft_topk",
})
"""The same of keys of vLLM's `speculative_config`."""
VARIABLES = _by_name({
    "decides which GPUs an engine sees, and Ray has handed them out already": "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES",
    "would override the size of the KV cache; use kv_cache_bytes": "VLLM_CPU_KVCACHE_SPACE",
})
"""The same of variables of the environment."""

Argument = str | int | float | bool


class EngineSettings(Section):
    """vLLM settings, the same for every arm."""

    max_num_seqs: int = Field(16, ge=1)
    """Sequences that an engine decodes at once."""
    enforce_eager: bool = False
    """Skips compilation: quick to start, slower to run."""
    kv_cache_bytes: int = Field(2**30, ge=2**26)
    """Memory of each engine's KV cache on CPU."""
    gpu_memory_frac: float = Field(0.9, gt=0, le=1)
    """Share of the GPU's memory that an engine takes, one of the capture too."""
    start_timeout_s: Placement[float] = Field(600, gt=0)
    """How long a start may take."""
    extra_args: dict[str, Argument] = {}
    """More arguments of vLLM's OpenAI server, without dashes, for instance `{attention-backend: TRITON_ATTN}`; a key within one that is JSON after a dot, as
    vLLM has it: `{compilation-config.cudagraph_mode: PIECEWISE}`."""
    draft_args: dict[str, Argument] = {}
    """More keys of vLLM's `speculative_config`, for instance `{attention_backend: TRITON_ATTN}`."""
    env: dict[str, str] = {}
    """Environment of the engine's processes, of the capture's too."""

    def for_acceptance(self) -> EngineSettings:
        """The same where acceptance is counted and not speed: eager, for a compiled engine takes a minute more to start, and with a number of sequences
        of its own, so that a sweep of more concurrency trains no draft anew."""
        return self.model_copy(update={"enforce_eager": True, "max_num_seqs": ACCEPTANCE_SEQS})

    @model_validator(mode="after")
    def _only_what_is_free_and_well_formed(self) -> EngineSettings:
        _check("extra_args", self.extra_args, r"[a-z][a-z0-9_-]*(\.[A-Za-z0-9_-]+)*\+?", "an argument of vLLM's server without its dashes, such as attention-backend")
        _check("draft_args", self.draft_args, r"[a-z][a-z0-9_]*", "a key of vLLM's speculative_config, such as attention_backend")
        _check("env", self.env, r"[A-Za-z_][A-Za-z0-9_]*", "a name of a variable: letters, digits and _")
        given: dict[str, str] = {}
        for name in self.extra_args:
            flag = server_flag(name).removeprefix("no-")
            if flag in given:
                raise ValueError(f"extra_args: {given[flag]} and {name} are the same argument; remove one of the two")
            given[flag] = name
            head = flag.partition(".")[0]
            # argparse takes the beginning of a name for the name: `--hos` is `--host`.
            if reason := SERVER_FLAGS.get(head) or next((reason for taken, reason in SERVER_FLAGS.items() if taken.startswith(head)), None):
                raise ValueError(f"extra_args: {name} {reason}; remove it")
        for field, values, reasons in (("draft_args", self.draft_args, DRAFT_KEYS), ("env", self.env, VARIABLES)):
            if refused := [name for name in values if name in reasons]:
                raise ValueError(f"{field}: {refused[0]} {reasons[refused[0]]}; remove it")
        if secret := [name for name in self.env if SECRET_NAME.search(name)]:
            raise ValueError(f"env: {secret[0]} is a secret, and the experiment is stored beside every result; set it in the nodes' own environment")
        return self


def server_flag(name: str) -> str:
    """A key of `extra_args` as vLLM spells the argument: dashes before the first dot, and what comes after as it is."""
    head, dot, rest = name.partition(".")
    return head.replace("_", "-") + dot + rest


def _check(field: str, values: dict[str, Argument], pattern: str, what: str) -> None:
    for name, value in values.items():
        if not re.fullmatch(pattern, name):
            raise ValueError(f"{field}: {name!r} is not {what}")
        if "\0" in str(value):
            raise ValueError(f"{field}: the value of {name} holds a NUL, which no process can be given")
