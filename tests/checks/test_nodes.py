"""What the doctor says of machines: each check both ways, what this machine is like, and what a real Ray cluster's node is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysd.checks.findings import NOT_CHECKED
from raysd.checks.node_facts import STALE_S, NodeCase, NodeFacts, aiter_folders, look_at_this_node, mec_firmware_in, stale_locks
from raysd.checks.nodes import differences, examine_nodes
from raysd.checks.registry import OF_NODES, examine_node
from raysd.checks.requirements import clashes
from tests.checks.doctor_facts import arguments, env, facts_with

MI355X_BYTES = 288 * 2**30
PACKAGES = {"ray": "2.60.0", "vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.17.0", "amd-quark": "0.13", "amd-aiter": "0.1.21"}
NODE = NodeFacts(host="n1", shm_bytes=128 * 2**30, memlock_bytes=None, tmp_bytes=10**12, tmp_free_bytes=5 * 10**11, hub_free_bytes=10**12, tool="amd-smi",
                 gpus=tuple((str(number), 3e8, float(MI355X_BYTES)) for number in range(8)), rocm="7.2.1", driver="6.16.6", kfd=True, mec_firmware=182, packages=PACKAGES, ray_gpus=8.0)
OLD = {"mec_firmware": 140}
SILENT = env(HSA_NO_SCRATCH_RECLAIM=None)
CASES: list[tuple[str, str, tuple[dict[str, Any], dict], tuple[dict[str, Any], dict]]] = [
    # code, severity, (of the node, changes of the experiment) where it is found, the same where it is not
    ("node-gpus", "error", ({"tool": None, "gpus": ()}, {}), ({}, {})),
    ("node-gpus", "error", ({"gpus": NODE.gpus[:7]}, {}), ({"tool": None, "gpus": ()}, {"hardware": {"name": "cpu"}, "target.tensor_parallel": 1})),
    ("node-gpus", "error", ({"gpus": tuple((number, 0.0, 1.92e11) for number, _, _ in NODE.gpus)}, {}), ({"gpus": tuple((number, None, None) for number, _, _ in NODE.gpus)}, {})),
    ("node-gpu-busy", "warning", ({"gpus": (*NODE.gpus[:7], ("7", 9e10, float(MI355X_BYTES)))}, {}), ({}, {})),
    ("node-driver", "error", ({"kfd": None}, {}), ({}, {})),
    ("node-driver", "error", ({"kfd": False}, {}), ({"kfd": None, "tool": "nvidia-smi"}, {"hardware": {"name": "cpu"}, "target.tensor_parallel": 1})),
    ("node-mec-firmware", "error", (OLD, SILENT), ({}, SILENT)),
    ("node-mec-firmware", "error", (OLD, SILENT), (OLD, {})),
    ("node-mec-firmware", "error", (OLD, SILENT), (OLD | {"environment": {"HSA_NO_SCRATCH_RECLAIM": "1"}}, SILENT)),
    ("node-masks", "error", ({"environment": {"ROCR_VISIBLE_DEVICES": "0,1"}}, {}), ({"environment": {"HIP_VISIBLE_DEVICES": "0,1"}}, {})),
    ("node-masks", "error", ({"environment": {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0"}}, {}), ({}, {})),
    ("node-masks", "error", ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, {}), ({"environment": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": ""}}, {})),
    ("node-masks", "warning", ({"environment": {"RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1"}}, {}), ({}, {})),
    ("node-shm", "warning", ({"shm_bytes": 64 * 2**20}, {}), ({}, {})),
    ("node-shm", "warning", ({"shm_bytes": None}, {}), ({"shm_bytes": 2**30, "gpus": (), "tool": None}, {"hardware": {"name": "cpu"}, "target.tensor_parallel": 1})),
    ("node-memlock", "warning", ({"memlock_bytes": 2**23}, {}), ({}, {})),
    ("node-disk", "error", ({"tmp_free_bytes": 10**10}, {}), ({}, {})),
    ("node-disk", "warning", ({"tmp_bytes": 10**10, "tmp_free_bytes": 10**9}, {}), ({}, {})),
    ("node-disk", "error", ({"hub_free_bytes": 10**11}, {}), ({"hub_free_bytes": 10**11}, {"target.model": "somebody/unknown"})),
    ("node-packages", "error", ({"packages": {name: version for name, version in PACKAGES.items() if name != "ray"}}, {}), ({}, {})),
    ("node-packages", "error", ({"packages": {name: version for name, version in PACKAGES.items() if name != "vllm"}}, {}), ({"packages": PACKAGES | {"vllm": "0.24.0+rocm722"}}, {})),
    ("node-packages", "error", ({"packages": PACKAGES | {"vllm": "0.27.1"}}, {}), ({"packages": PACKAGES | {"vllm": "0.27.1"}}, {"hardware.vllm": None})),
    ("node-packages", "warning", ({"packages": PACKAGES | {"ray": "2.55.1"}}, {}), ({}, {})),
    ("node-clash", "error", ({"clashes": ("vllm 0.24.0 asks for torch==2.11.0, and 2.13.0 is installed",)}, {}), ({}, {})),
    ("node-aiter", "warning", ({"packages": {name: version for name, version in PACKAGES.items() if name != "amd-aiter"}}, {}), ({}, {})),
    ("node-quark", "error", ({"packages": {name: version for name, version in PACKAGES.items() if name != "amd-quark"}}, {}),
     ({"packages": {name: version for name, version in PACKAGES.items() if name != "amd-quark"}}, {"target.model": "MiniMaxAI/MiniMax-M2.5"})),
    ("node-load-format", "error", ({}, arguments(load_format="fastsafetensors")), ({"packages": PACKAGES | {"fastsafetensors": "0.1.15"}}, arguments(load_format="fastsafetensors"))),
    ("node-aiter-lock", "warning", ({"stale_locks": ("/root/.aiter/tuned_fmoe.csv.lock",)}, {}), ({}, {})),
]


def told(node: dict[str, Any], changes: dict) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in examine_node(NodeCase(replace(NODE, **node), facts_with(changes)))]


@pytest.mark.parametrize(("code", "severity", "where"), [case[:3] for case in CASES], ids=[f"{case[0]} {index}" for index, case in enumerate(CASES)])
def test_what_is_wrong_with_a_node_is_found(code: str, severity: str, where: tuple[dict, dict]):
    assert (code, severity) in told(*where)


@pytest.mark.parametrize(("code", "where"), [(code, where) for code, *_, where in CASES], ids=[f"{case[0]} {index}" for index, case in enumerate(CASES)])
def test_a_node_that_is_right_is_left_alone(code: str, where: tuple[dict, dict]):
    assert code not in {found for found, _ in told(*where)}


def test_every_check_of_nodes_has_a_case_and_a_right_node_has_no_finding():
    assert {known.code for known in OF_NODES.all()} == {case[0] for case in CASES}
    assert told({}, {}) == []


@pytest.mark.parametrize(("node", "changes"), [({"mec_firmware": None}, SILENT), ({"rocm": None}, {}), ({"tool_failed": "exit code 1", "gpus": ()}, {})])
def test_what_a_node_does_not_tell_is_not_checked(node: dict[str, Any], changes: dict):
    assert told(node, changes) == [(NOT_CHECKED, "warning")]


def test_nodes_of_a_cluster_must_be_alike_but_for_those_without_gpus():
    head = replace(NODE, host="head", gpus=(), tool=None, kfd=None, rocm=None, driver=None, ray_gpus=0.0, packages={"ray": "2.60.0", "torch": "2.13.0+cpu"})
    other = replace(NODE, host="n2")
    assert differences([head, NODE, other]) == []
    odd = replace(NODE, host="n3", rocm="7.0.0", packages=PACKAGES | {"vllm": "0.27.1", "ray": "2.59.0"})
    fields = {finding.field: finding.message for finding in differences([head, NODE, other, odd])}
    assert set(fields) == {"Ray", "vLLM", "ROCm"} and all("n3 has" in message for message in fields.values())
    asked = examine_nodes([head, NODE], facts_with())
    assert not [finding for finding in asked if finding.code == "node-gpus"], "the head has no GPUs for engines, and Ray knows"
    assert [finding.field for finding in examine_nodes([replace(NODE, gpus=(), tool=None)], facts_with()) if finding.code == "node-gpus"] == ["n1: GPUs"]


def test_this_machine_is_looked_at_for_real_and_travels_as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    node = look_at_this_node()
    assert NodeFacts.from_json(json.loads(json.dumps(node.as_json()))) == node
    assert node.tmp_free_bytes > 0 and node.packages["ray"] and node.environment["HIP_VISIBLE_DEVICES"] == "0"
    assert "secret" not in json.dumps(node.as_json())


def test_the_oldest_firmware_of_a_node_counts():
    text = "GPU[0]\t\t: MEC firmware version: \t\t177\nGPU[0]\t\t: MEC2 firmware version: \t\t12\nGPU[1]\t\t: MEC firmware version: \t\t140\n"
    assert mec_firmware_in(text) == 140 and mec_firmware_in("no GPU") is None


def test_only_locks_that_are_old_are_stale(tmp_path: Path):
    (tmp_path / "build").mkdir()
    for name in ("tuned_fmoe.csv.lock", "build/lock", "tuned_fmoe.csv"):
        (tmp_path / name).touch()
    touched_s = (tmp_path / "build" / "lock").stat().st_mtime
    assert stale_locks([tmp_path, tmp_path / "absent"], touched_s + STALE_S - 1) == []
    assert {Path(path).name for path in stale_locks([tmp_path], touched_s + STALE_S + 5)} == {"tuned_fmoe.csv.lock", "lock"}
    assert Path("/cache/aiter") in aiter_folders({"AITER_JIT_DIR": "/cache/aiter"})


@pytest.mark.parametrize(("line", "clash"), [
    ("transformers<5.20,>=5.16.1", True), ("transformers>=5.16.1", False), ("Transformers ==5.24.0", False), ("torch==2.13.0", False), ("absent>=1", False),
    ("transformers<5.17; extra == 'cli'", False), ("transformers<5.17; python_version < '3'", False), ("transformers<5.17; python_version > '3'", True), ("not a requirement !", False)])
def test_what_packages_ask_of_each_other(line: str, clash: bool):
    found = clashes({"vllm": "0.32.0", "transformers": "5.24.0", "torch": "2.13.0+cpu"}, {"vllm": [line]})
    assert bool(found) == clash
    assert all("vllm 0.32.0 asks for transformers" in words and "5.24.0 is installed" in words for words in found)
