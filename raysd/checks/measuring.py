"""Settings that make a measurement, or a service, tell less than it seems to."""

from __future__ import annotations

from collections.abc import Iterable

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, info, warning
from raysd.checks.registry import check

BLOG = "https://rocm.blogs.amd.com/artificial-intelligence/eagle3-speculative-decoding/README.html"


@check("random-prompts", "Random prompts, and what acceptance means there", BLOG)
def random_prompts(facts: Facts) -> Iterable[Finding]:
    names = [workload.name for workload in facts.experiment.sweep.workloads if workload.kind == "random"]
    if not names or not facts.drafting:
        return
    if facts.has_chat_template is False:
        yield error("target.chat_template", "the target has no chat template: on raw random prompts nearly every draft is accepted, and the speed-up is not one", "set target.chat_template")
    elif facts.experiment.sweep.acceptance.rates is None and len(names) == len(facts.experiment.sweep.workloads):
        yield info("sweep.workloads", f"{', '.join(names)}: random prompts are comparable with published tables, and say little about the acceptance that your users will see", "add a workload of real prompts")


@check("sampling-temperature", "A sweep that samples", "https://github.com/MooreThreads/vllm-musa/pull/40")
def temperature(facts: Facts) -> Iterable[Finding]:
    if facts.drafting and facts.experiment.sweep.temperature > 0:
        yield warning("sweep.temperature", f"at temperature {facts.experiment.sweep.temperature:g} fewer drafted tokens are accepted: on one stack half of Eagle3's gain went; published figures are greedy",
                      "use 0 to compare with them")


@check("tool-parser", "Kimi's tool calls beside a draft", "https://sweetapi.com/biondizzle/vllm-kimi25-eagle")
def tool_parser(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting:
        if str(engine.argument("tool-call-parser")).startswith("kimi"):
            yield warning(engine.field("tool-call-parser"), "with several tokens in a step the parser was seen to lose tool calls of streamed answers", "try streamed tool calls first, or answer them unstreamed")


@check("async-scheduling", "Asynchronous scheduling beside a draft on ROCm", "https://github.com/vllm-project/vllm/issues/54039")
def async_scheduling(facts: Facts) -> Iterable[Finding]:
    for engine in facts.drafting if facts.rocm else ():
        if engine.argument("async-scheduling") is True:
            yield warning(engine.field("async-scheduling"), "engines were seen to hang with it", "set async-scheduling: false if one does")


@check("prefix-caching", "Prefix caching beside a draft, where acceptance was seen to fall over hours", "https://github.com/vllm-project/vllm/issues/41838")
def prefix_caching(facts: Facts) -> Iterable[Finding]:
    serve = facts.experiment.serve
    for engine in facts.drafting:
        if engine.prefix_caching and not (serve is not None and serve.recycle):
            yield warning("serve.prefix_caching", "an acceptance length fell from 4.47 to 3.49 within 12 hours: blocks were taken for cached before they were written",
                          "set it to false, or serve.acceptance_floor and serve.recycle: true")
