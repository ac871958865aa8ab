"""Which GPUs a process sees: the one place that knows the masks of ROCm and CUDA.

Ray tells a process its GPUs by HIP_VISIBLE_DEVICES where it finds AMD's, by CUDA_VISIBLE_DEVICES where it finds NVIDIA's. ROCm heeds both names, each
as a choice among the devices that the other has left, so two different lists show a device too few or none. ROCR_VISIBLE_DEVICES renumbers devices below
both, and Ray refuses it: it is neither set nor read here.

What is said here of ROCm was read in the code of Ray 2.60 and vLLM 0.32, which the tests run, and was not tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"

TRAIN_WORKER_ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"}
"""For the workers of Ray Train. It lets all workers of a node see each other's GPUs by one CUDA_VISIBLE_DEVICES, and picks a worker's own by its place in
that list (ray/train/v2/_internal/callbacks/accelerators.py); with HIP_VISIBLE_DEVICES beside it, naming one GPU, every worker but the first would ask for
a device that is not there. Without effect where there is no AMD GPU."""


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine that may use the GPUs which `environment` shows, with both masks alike, as vLLM wants them on ROCm.

    Where both are there, HIP's is Ray's word. An empty mask goes: it would hide all GPUs, and Ray sets none for a job that reserves no GPU.
    """
    mask = environment.get(HIP) or environment.get(CUDA)
    rest = {name: value for name, value in environment.items() if name not in (HIP, CUDA)}
    return rest | ({HIP: mask, CUDA: mask} if mask else {})
