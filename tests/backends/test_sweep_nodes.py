"""Nodes of a sweep: what Ray is asked for, which nodes are alike, and how they are called."""

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.backends.ray_jobs import job_resources
from raysd.backends.sweep_nodes import bundle, check_alike, different
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.experiment.hardware import StageResources
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import check_local_resources, stages_of

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
