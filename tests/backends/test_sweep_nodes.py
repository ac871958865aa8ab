"""Nodes of a sweep: what Ray is asked for, which nodes are alike, and how they are called."""

import json
import platform
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest
import yaml

from raysd.artifacts import FolderHome, Store
from raysd.backends.ray_jobs import job_resources
from raysd.backends.sweep_nodes import bundle, check_alike, different
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.experiment.hardware import StageResources
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import check_local_resources, stages_of
from raysd.sweep import tables
from tests.backends.sweep_driver import TRAIN
from tests.ray_nodes import Job, three_nodes
from tests.records import publish_files
from tests.tiny_chain import UNHURRIED
from tests.tiny_models import tiny_llama

MACHINE = {"host": "a", "cpu_model": "EPYC", "cpu_cores": 128, "memory_bytes": 10**12, "gpus": ["accelerator_type:AMD-Instinct-MI355X-OAM"]}


def test_each_node_reserves_what_the_stage_asks_for_and_a_core_if_nothing():
    assert bundle(StageResources(cpus=8, gpus=4, custom={"mi355x": 0.001})) == {"CPU": 8, "GPU": 4, "mi355x": 0.001}
    assert bundle(StageResources()) == {"CPU": 1}


def test_several_nodes_on_one_host_can_be_told_apart():
    assert different(["a", "b", "a", "c"]) == ["a.1", "b", "a.2", "c"]


@pytest.mark.parametrize(("other", "says"), [({"cpu_model": "Xeon"}, "EPYC and Xeon"), ({"cpu_cores": 64}, "128 and 64"), ({"memory_bytes": 8 * 10**11}, "memory_bytes"),
                                             ({"gpus": ["accelerator_type:H200"]}, "H200")])
def test_nodes_that_are_not_alike_are_refused_by_name(other, says):
    check_alike([MACHINE, MACHINE | {"host": "b", "memory_bytes": 10**12 + 10**9}])
    with pytest.raises(ExperimentError, match=says) as refused:
        check_alike([MACHINE, MACHINE, MACHINE | {"host": "c"} | other])
    assert "a and c" in refused.value.what and refused.value.exit_code == 64


def test_a_sweep_on_several_nodes_needs_a_cluster_and_its_job_reserves_nothing(write_experiment, tmp_path):
    document = {"sweep": {"nodes": 3}, "hardware": {"resources": {"sweep": {"cpus": 1}}}}
    experiment = load_experiment(write_experiment(**document))
    assert job_resources(experiment, "sweep") == StageResources() and job_resources(experiment, "report") == experiment.hardware.of_stage("report")
    with pytest.raises(ExperimentError, match="cannot run on this machine alone"):
        check_local_resources(experiment, plan(stages_of(experiment), Store(FolderHome(tmp_path / "nowhere"))))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with three_nodes(tmp_path_factory.mktemp("nodes") / "ray.log") as nodes:
        yield nodes


@pytest.fixture
def folder(experiment_document, tmp_path) -> Path:
    """A driver's folder: a sweep of three arms' worth of cells on three nodes, that takes a while."""
    tiny_llama(tmp_path / "tiny")
    rows = [{"id": f"q{index}", "topic": "t", "split": "report", "prompt": f"bado {index} kela"} for index in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = experiment_document | {
        "target": {"model": str(tmp_path / "tiny"), "max_model_len": 256}, "prompts": {"path": str(tmp_path / "prompts.jsonl")},
        "sweep": UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1, 2], "k": [2], "blocks": 6, "requests_per_slot": 2, "workloads": [{"osl": 24, "ignore_eos": True}], "nodes": 3,
                  "answer_tokens": 12, "engine": {"kv_cache_bytes": 2**26}}}
    document.pop("quantize", None)
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(document))
    publish_files(Store(FolderHome(tmp_path / "drafts")), TRAIN, {"draft/config.json": b"{}"})
    return tmp_path


def cells_of(folder: Path) -> list[dict]:
    return tables.read_rows(folder / "out" / "cells", list(tables.CELLS))


def mock_engines() -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if "tests.mock_engines" in (process.info["cmdline"] or [])]


@pytest.mark.slow
def test_blocks_are_spread_over_three_nodes_and_become_one_data_set(nodes, folder):
    with Job(nodes, "tests.backends.sweep_driver", folder) as job:
        result = job.result()
    assert result.get("valid_cells") == result.get("cells") == 24, (result, job.log()[-4000:])
    cells, host = cells_of(folder), platform.node()
    assert {cell["node"] for cell in cells} == {f"{host}.{number}" for number in (1, 2, 3)}
    on = Counter((cell["block"], cell["node"]) for cell in cells)
    assert len(on) == 6 and set(on.values()) == {4}, "all arms of a block run on one node"
    facts = json.loads((folder / "out" / "provenance.json").read_text())["nodes"]
    assert set(facts) == {cell["node"] for cell in cells} and all(set(each["engines"]) == {"none", "bf16-k2"} for each in facts.values())
    assert len(list((folder / "out" / "logs").glob("*.log"))) == 6
    assert not mock_engines()


@pytest.mark.slow
def test_a_node_that_dies_takes_only_its_unfinished_cells_with_it(nodes, folder):
    document = yaml.safe_load((folder / "sweep.yaml").read_text())
    document["sweep"] |= {"blocks": 9, "workloads": [{"osl": 48, "ignore_eos": True}]}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(document))
    try:
        with Job(nodes, "tests.backends.sweep_driver", folder) as job:
            job.wait(lambda: job.log().count("kept cells/") >= 8)
            raylet = psutil.Process(nodes.raylets["c"])
            for process in (raylet, *raylet.children(recursive=True)):  # as when a machine loses its power
                process.kill()
            result = job.result()
    finally:
        nodes.add("c")
    assert result.get("valid_cells") == result.get("cells") == 36, (result, job.log()[-4000:])
    assert "given up: the node" in job.log()
    kept = Counter(line for line in job.log().splitlines() if line.startswith("kept cells/"))
    assert sum(kept.values()) - len(kept) <= 1, "no valid cell is repeated, but where its comparison was not finished on the node that died"
    groups = {}
    for cell in cells_of(folder):
        groups.setdefault((cell["block"], cell["concurrency"]), set()).add(cell["node"])
    assert all(len(names) == 1 for names in groups.values())
    assert not mock_engines()


@pytest.mark.slow
def test_the_client_may_be_on_another_node_than_the_engines_which_then_ask_for_a_key(nodes, folder):
    document = yaml.safe_load((folder / "sweep.yaml").read_text())
    document["sweep"] |= {"nodes": 1, "client": "other_node", "blocks": 3}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(document))
    with Job(nodes, "tests.backends.sweep_driver", folder) as job:
        job.wait(lambda: "kept cells/" in job.log())
        [port] = {process.info["cmdline"][process.info["cmdline"].index("tests.mock_engines") + 1] for process in mock_engines() if "0" in process.info["cmdline"]}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", b"{}"), timeout=30)
        loads = [process.ppid() for process in job.processes("ShardActor")], [process.ppid() for process in job.processes("NodeActor")]
        result = job.result()
    assert result.get("valid_cells") == result.get("cells") == 12, (result, job.log()[-4000:])
    assert loads[0] and loads[1] and not set(loads[0]) & set(loads[1]), "below different raylets"
