"""The masks of GPUs, held against the code of vLLM and Ray that reads them, on a machine without a GPU."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path

import pytest
import ray
import torch
from ray._private.accelerators.amd_gpu import AMDGPUAcceleratorManager
from ray.air._internal.device_manager.nvidia_gpu import CUDATorchDeviceManager
from ray.train.v2._internal.callbacks.accelerators import _get_visible_accelerator_ids_per_worker
from ray.train.v2._internal.execution.worker_group import ActorMetadata

from raysd.backends.devices import CUDA, HIP, TRAIN_WORKER_ENVIRONMENT, engine_environment
from raysd.backends.vllm_server import server_environment
from raysd.experiment.engine import EngineSettings
from raysd.sweep.engine import EngineSpec


@pytest.fixture(autouse=True)
def no_mask_stays(monkeypatch):
    """What Ray's and vLLM's own code sets here, past monkeypatch, is gone after each test."""
    for name in (HIP, CUDA):
        monkeypatch.setenv(name, "none")
        monkeypatch.delenv(name)


def vllm_accepts(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The masks after vLLM's check of them on ROCm, whose module cannot be imported without ROCm. Raises ValueError as it does."""
    source = Path(importlib.util.find_spec("vllm").origin).parent / "platforms" / "rocm.py"
    (check,) = (node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == "_sync_hip_cuda_env_vars")
    names = {"os": os}
    exec(compile(ast.Module([check], []), source, "exec"), names)
    for name in (HIP, CUDA):
        monkeypatch.delenv(name, raising=False)
        if name in environment:
            monkeypatch.setenv(name, environment[name])
    names["_sync_hip_cuda_env_vars"]()
    return {name: os.environ[name] for name in (HIP, CUDA) if name in os.environ}


@pytest.mark.parametrize(("given", "seen"), [
    ({}, {}),
    ({HIP: "2,3"}, {HIP: "2,3", CUDA: "2,3"}),  # Ray, for a job that reserves GPUs on ROCm
    ({CUDA: "1"}, {HIP: "1", CUDA: "1"}),
    ({HIP: "2", CUDA: "0,1,2,3"}, {HIP: "2", CUDA: "2"}),  # the node's own mask beside Ray's word
    ({HIP: "2", CUDA: ""}, {HIP: "2", CUDA: "2"}),
    ({CUDA: ""}, {}),
    ({HIP: "", CUDA: ""}, {}),
])
def test_an_engine_gets_one_list_under_both_names_and_no_empty_one(given, seen, monkeypatch):
    found = engine_environment({"PATH": "/bin", **given})
    assert found == {"PATH": "/bin", **seen}
    assert vllm_accepts(found, monkeypatch) == seen


def test_vllm_refuses_what_an_engine_must_not_get(monkeypatch):
    with pytest.raises(ValueError, match="Inconsistent GPU visibility"):
        vllm_accepts({HIP: "2", CUDA: "0,1,2,3"}, monkeypatch)


def test_the_server_of_a_machine_with_gpus_gets_them():
    spec = EngineSpec(target=Path("/models/t"), draft=None, k=None, dtype="bfloat16", tensor_parallel=1, max_model_len=256, chat_template=None, trust_remote_code=False,
                      hardware="mi355x", settings=EngineSettings())
    assert {name: server_environment(spec, {HIP: "5", CUDA: ""})[name] for name in (HIP, CUDA)} == {HIP: "5", CUDA: "5"}


def test_a_mask_below_both_is_left_alone():
    assert engine_environment({"ROCR_VISIBLE_DEVICES": "1"}) == {"ROCR_VISIBLE_DEVICES": "1"}


def worker_devices(assigned: list[str], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, torch.device]]:
    """What Ray's code makes of the workers of one ROCm node with a GPU each: HIP's mask, and the device that a worker takes among those of CUDA's."""
    workers = [ActorMetadata("host", "node", "127.0.0.1", 1, {"GPU": [own]}) for own in assigned]
    shared, found = _get_visible_accelerator_ids_per_worker(workers, "GPU"), []
    for own, mask in zip(assigned, shared, strict=True):
        monkeypatch.delenv(HIP, raising=False)
        AMDGPUAcceleratorManager.set_current_process_visible_accelerator_ids([own])
        monkeypatch.setenv(CUDA, mask)
        monkeypatch.setattr(ray, "get_gpu_ids", lambda own=own: [own])
        found.append((os.environ.get(HIP), *CUDATorchDeviceManager().get_devices()))
    return found


def test_workers_of_ray_train_on_rocm_each_find_their_own_gpu(monkeypatch):
    for name, value in TRAIN_WORKER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    assert worker_devices(["4", "6"], monkeypatch) == [(None, torch.device("cuda:0")), (None, torch.device("cuda:1"))]


def test_without_our_environment_the_second_worker_would_ask_for_a_gpu_that_hip_hides(monkeypatch):
    for name in TRAIN_WORKER_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert worker_devices(["4", "6"], monkeypatch)[1] == ("6", torch.device("cuda:1"))  # HIP shows one device, number 0
