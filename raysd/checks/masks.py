"""The masks of devices that ROCm, CUDA and Ray know, held against each other."""

from __future__ import annotations

from collections.abc import Mapping

HIP, CUDA, ROCR = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def conflict(environment: Mapping[str, str]) -> str | None:
    """What is wrong with the masks of ROCm and CUDA, in words; None if nothing is. (On ROCm vLLM heeds both: vllm/platforms/rocm.py.)"""
    hip, cuda = environment.get(HIP), environment.get(CUDA)
    if hip is not None and cuda is not None and _devices(hip) != _devices(cuda):
        return f"{HIP} = {hip!r} and {CUDA} = {cuda!r} differ, and vLLM stops"
    empty = [name for name, value in ((HIP, hip), (CUDA, cuda)) if value is not None and not value.strip()]
    return f"{empty[0]} is empty, which hides all GPUs" if empty else None


def _devices(mask: str) -> list[str]:
    return [part.strip() for part in mask.split(",") if part.strip()]
