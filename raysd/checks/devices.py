"""Which GPUs a process sees, and who starts an engine's processes."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from raysd.checks.facts import Facts
from raysd.checks.findings import Finding, error, warning
from raysd.checks.masks import CUDA, HIP, ROCR, conflict
from raysd.checks.registry import check

NOSET = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"


@check("masks-differ", "Two masks of devices that do not say the same", "https://github.com/vllm-project/vllm/issues/21522")
def masks(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        if (wrong := conflict(engine.env)) is not None:
            yield error(engine.env_field(CUDA), wrong, "remove the masks: Ray says which GPUs an engine has, and raysd sets both alike")


@check("rocr-mask", "ROCR_VISIBLE_DEVICES below Ray", "https://github.com/ray-project/ray/issues/46895")
def rocr(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        if ROCR in engine.env:
            yield error(engine.env_field(ROCR), "Ray refuses to start where it is set, and RCCL fails to reach other GPUs below such a mask", f"remove it; on the nodes, use {HIP} in its place")


@check("mask-in-experiment", "A mask of devices in the experiment, which overrules Ray", "https://github.com/ray-project/ray/issues/46895")
def own_mask(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines:
        for name in (HIP, CUDA):
            if engine.env.get(name):
                yield warning(engine.env_field(name), f"{name} = {engine.env[name]} overrules what Ray gives an engine: two engines of a node would share their GPUs", "remove it, and set it on the node before `ray start`")


@check("noset-masks", "Ray told not to say which GPUs a process has", "https://github.com/vllm-project/vllm/issues/21522")
def noset(facts: Facts) -> Iterable[Finding]:
    for engine in facts.engines if facts.machine.name != "cpu" else ():
        if engine.env.get(NOSET) in ("1", "true"):
            yield warning(engine.env_field(NOSET), "Ray then sets no mask, and every engine of a node takes its first GPUs", "remove it: raysd sets it for the workers of a training, who need it, by itself")


@check("ray-executor", "vLLM's ray executor for an engine that fits into a node", "https://github.com/vllm-project/vllm/issues/29688")
def ray_executor(facts: Facts) -> Iterable[Finding]:
    within = facts.machine.gpus_per_node is None or facts.tensor_parallel <= facts.machine.gpus_per_node
    for engine in facts.engines:
        if engine.argument("distributed-executor-backend") == "ray" and (within or facts.machine.name == "cpu"):
            yield error(engine.field("distributed-executor-backend"), "the engine is a process of its own beside Ray's placement group, and stops with `No current placement group found`",
                        "remove it: within a node vLLM's own processes (mp) do")


@check("cupy", "An engine over several nodes without CuPy for ROCm", "https://github.com/ROCm/vllm/issues/591")
def cupy(facts: Facts) -> Iterable[Finding]:
    gpus = facts.machine.gpus_per_node
    for engine in facts.engines if facts.rocm and gpus is not None and facts.tensor_parallel > gpus else ():
        if engine.argument("distributed-executor-backend") in (None, "ray"):
            yield warning(engine.field("distributed-executor-backend"), f"{facts.tensor_parallel} GPUs are more than the {gpus} of a node: vLLM then goes by Ray, which needs CuPy, and pip brings the one for CUDA",
                          "install cupy-rocm-7-0 in the image, or keep an engine inside a node")


@check("gluon-gfx942", "AITER MLA of vLLM 0.27 on gfx942", "https://github.com/vllm-project/vllm/issues/50682")
def gluon(facts: Facts) -> Iterable[Finding]:
    if facts.machine.gfx != "gfx942" or facts.base is None or not Version("0.27.0") <= facts.base < Version("0.28.0"):
        return
    for engine in facts.engines:
        if facts.on_aiter_mla(engine):
            yield error(engine.env_field("VLLM_ROCM_USE_AITER_MLA"), f"{facts.words} stops with `mla_gluon requires gfx950 (CDNA4), got gfx942` on {facts.machine.name}",
                        'set VLLM_ROCM_USE_AITER_MLA: "0", or use another release')
