"""Environment variables of engines on AMD's GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, info, not_checked, warning
from raysd.checks.registry import check
from raysd.checks.releases import first_without

SHUFFLE, V2_RUNNER = "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_USE_V2_MODEL_RUNNER"
AFTER_RMSNORM = "0.24.1"
"""What is newer than the last image for which AMD's scripts switch AITER's RMSNorm off."""
READY_TIMEOUT_S, JIT_TIMEOUT_S = 600, 3600
"""How long vLLM waits for its engine by default, and how long InferenceX's scripts for MI355X let it."""


@check("env-gone", "An environment variable that this vLLM, or a later one, does not read", "https://github.com/SemiAnalysisAI/InferenceX/pull/1515")
def variables(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        unknown = []
        for name in (name for name in engine.env if name.startswith("VLLM_")):
            known, gone = facts.has_environment(name), None if facts.base is None else first_without(name, facts.base)
            if known is False:
                yield error(engine.env_field(name), f"{facts.words} does not read {name}: it has no effect, and nothing says so", "remove it, or correct its name")
            elif gone is not None:
                yield warning(engine.env_field(name), f"{name} is gone in vLLM {gone}: with a newer image it has no effect, and nothing says so", "measure without it before the image changes")
            elif known is None and facts.vllm is not None:
                unknown.append(name)
        if unknown:
            yield not_checked(engine.env_field(unknown[0]), f"whether {facts.words} reads {', '.join(unknown)}, raysd's table of releases does not say",
                              "run the doctor where this vLLM is installed")


@check("aiter-off", "AITER's master switch is off", "https://github.com/vllm-project/vllm/issues/56945")
def aiter(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm else ():
        if not engine.is_on("VLLM_ROCM_USE_AITER", False):
            yield warning(engine.env_field("VLLM_ROCM_USE_AITER"), "AITER's kernels are off, as they are by default, in AMD's images too: 1.7 to 3.7 times slower where it was measured",
                          'set VLLM_ROCM_USE_AITER: "1"')




@check("quick-reduce-unset", "All-reduce of tensor parallelism without AMD's quantized quick reduce", "https://github.com/SemiAnalysisAI/InferenceX/pull/1116")
def quick_reduce(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm and facts.tensor_parallel > 1 else ():
        if "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION" not in engine.env:
            yield info(engine.env_field("VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"), "AMD's measurements sum over GPUs in INT4, and this does not: its numbers are not comparable with theirs",
                       "set it to INT4 to reproduce them; leave it for sums that are not rounded")


@check("symmetric-memory", "All-reduce by symmetric memory, which hangs at start on MI350X and MI355X", "https://github.com/SemiAnalysisAI/InferenceX/pull/2286")
def symmetric_memory(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.machine.gfx == "gfx950" and facts.tensor_parallel > 1 else ():
        if engine.is_on("VLLM_ALLREDUCE_USE_SYMM_MEM", True):
            yield warning(engine.env_field("VLLM_ALLREDUCE_USE_SYMM_MEM"), "it is on by default, and engines were seen to hang in its rendezvous when they start", 'set VLLM_ALLREDUCE_USE_SYMM_MEM: "0"')


@check("aiter-rmsnorm", "AITER's RMSNorm below tensor parallel 8, where answers get worse", "https://github.com/SemiAnalysisAI/InferenceX/pull/1116")
def rmsnorm(facts: Facts) -> Iterable[Finding]:
    newer = facts.vllm is not None and not facts.before(AFTER_RMSNORM)
    for engine in facts.engines if facts.rocm and facts.tensor_parallel < 8 and not newer else ():
        if engine.is_on("VLLM_ROCM_USE_AITER", False) and engine.is_on("VLLM_ROCM_USE_AITER_RMSNORM", True):
            yield warning(engine.env_field("VLLM_ROCM_USE_AITER_RMSNORM"), f"AMD's scripts for images up to vLLM 0.24.0 switch AITER's RMSNorm off below 8 GPUs (here {facts.tensor_parallel}), for accuracy",
                          'set VLLM_ROCM_USE_AITER_RMSNORM: "0", or use a newer vLLM')


@check("ready-timeout", "A start that ends before AITER has compiled its kernels", "https://github.com/vllm-project/vllm/issues/48031")
def ready_timeout(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm else ():
        if not engine.is_on("VLLM_ROCM_USE_AITER", False):
            continue
        given = engine.env.get("VLLM_ENGINE_READY_TIMEOUT_S", str(READY_TIMEOUT_S))
        if not given.isdigit() or int(given) < JIT_TIMEOUT_S:
            yield warning(engine.env_field("VLLM_ENGINE_READY_TIMEOUT_S"), f"vLLM waits {given} s for its engine, and the first start on a node compiles AITER's kernels, which takes longer",
                          f'set VLLM_ENGINE_READY_TIMEOUT_S: "{JIT_TIMEOUT_S}"')
        if engine.settings.start_timeout_s < JIT_TIMEOUT_S:
            yield warning(f"{engine.place}.start_timeout_s", f"raysd waits {engine.settings.start_timeout_s:g} s for the engine, and the first start on a node compiles AITER's kernels, which takes longer",
                          f"set start_timeout_s: {JIT_TIMEOUT_S}")


@check("shuffle-block", "AITER's shuffled KV layout with blocks of 32 tokens", "https://github.com/vllm-project/recipes/pull/481")
def shuffle_block(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm else ():
        if engine.is_on(SHUFFLE, False) and engine.argument("block-size") == 32:
            yield error(engine.field("block-size"), f"with {SHUFFLE} AITER's assembler kernel has no entry for blocks of 32 tokens", "use block-size: 16")


@check("shuffle-speculation", "AITER's shuffled KV layout with a draft", "https://github.com/vllm-project/recipes/pull/601")
def shuffle_speculation(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm else ():
        if engine.is_on(SHUFFLE, False) and not (facts.is_target("MiniMax-M3") and facts.tensor_parallel == 4):
            yield error(engine.env_field(SHUFFLE), "the verify step stops with an assertion, or is wrong, in the shuffled KV layout unless each GPU has exactly one key head, as MiniMax-M3 has on 4",
                        f'set {SHUFFLE}: "0"')


@check("v2-runner", "The V2 model runner with a draft", "https://github.com/vllm-project/vllm/issues/40551")
def v2_runner(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        if engine.is_on(V2_RUNNER, False):
            yield warning(engine.env_field(V2_RUNNER), "fewer drafted tokens are accepted with the V2 model runner", f'set {V2_RUNNER}: "0", or measure both')


@check("draft-head-needs-v2", "A quantized head of the draft without the V2 model runner", "https://docs.vllm.ai/en/latest/features/speculative_decoding/")
def draft_head(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        if engine.draft_argument("draft_lm_head_quantization") is not None and not engine.is_on(V2_RUNNER, False):
            yield error(engine.draft_field("draft_lm_head_quantization"), "vLLM quantizes the draft's head in the V2 model runner only", f'set {V2_RUNNER}: "1", or remove it')


@check("aiter-expert-parallel", "AITER with expert parallelism on MiniMax-M3", "https://github.com/SemiAnalysisAI/InferenceX/blob/main/benchmarks/single_node/agentic/minimaxm3_fp4_mi355x_mtp.sh")
def aiter_expert_parallel(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm and facts.is_target("MiniMax-M3") else ():
        if engine.is_on("VLLM_ROCM_USE_AITER", False) and engine.argument("enable-expert-parallel") is True:
            yield warning(engine.field("enable-expert-parallel"), "with AITER and expert parallelism MiniMax-M3 was seen to write degenerate text", "remove one of the two, or read the answers first")


@check("scratch-reclaim", "RCCL stops on old firmware unless HSA_NO_SCRATCH_RECLAIM is set", "https://github.com/ROCm/ATOM/issues/913")
def scratch_reclaim(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.rocm and facts.tensor_parallel > 1 else ():
        if engine.env.get("HSA_NO_SCRATCH_RECLAIM") != "1":
            yield info(engine.env_field("HSA_NO_SCRATCH_RECLAIM"), "with MEC firmware below 177 RCCL stops and asks for HSA_NO_SCRATCH_RECLAIM=1",
                       "`raysd doctor --node` reads the firmware; set the variable where it is older")
