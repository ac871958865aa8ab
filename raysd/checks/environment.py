"""Environment variables of engines on AMD's GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from raysd.checks.attention import is_on
from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, not_checked, warning
from raysd.checks.registry import check
from raysd.checks.releases import first_without


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
        if not is_on(engine.env, "VLLM_ROCM_USE_AITER", False):
            yield warning(engine.env_field("VLLM_ROCM_USE_AITER"), "AITER's kernels are off, as they are by default, in AMD's images too: 1.7 to 3.7 times slower where it was measured",
                          'set VLLM_ROCM_USE_AITER: "1"')


