"""The pipeline on a cluster of three nodes, each with a raylet of its own; every stage runs where the experiment asks for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raysd.artifacts import ArtifactKey, FolderHome, Store
from tests.ray_nodes import NAMES, Nodes, three_nodes
from tests.tiny_chain import UNHURRIED, write_experiment

ROOT = Path(__file__).parents[2]
RUN_S = 900
NO_FP8 = UNHURRIED | {"arms": ["none", "bf16"], "concurrency": [1], "k": [2], "blocks": 3, "requests_per_slot": 2, "workloads": [{"name": "report", "osl": 24}],
          "engine": {"enforce_eager": True, "max_num_seqs": 4, "kv_cache_bytes": 268435456}}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory):
    with three_nodes(tmp_path_factory.mktemp("nodes") / "ray.log") as nodes:
        yield nodes


def run_on(nodes: Nodes, spec: Path, places: dict[str, str], store: Path) -> list[dict]:
    """Runs an experiment with its stages placed by the resource of a node; what `raysd run --json` tells of them."""
    document = yaml.safe_load(spec.read_text())
    document["hardware"] = {"resources": {stage: {"custom": {f"node_{node}": 0.01}} for stage, node in places.items()}}
    placed = spec.with_name("placed.yaml")
    placed.write_text(yaml.safe_dump(document))
    done = subprocess.run([sys.executable, "-m", "raysd", "run", str(placed), "--store", str(store), "--address", nodes.address, "--json"],
                          capture_output=True, text=True, timeout=RUN_S, env={**os.environ, **nodes.environment})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)["stages"]


def ran_on(nodes: Nodes, store: Store, made: dict) -> str:
    """The node that a stage ran on, by its lease and Ray's job table."""
    names = {node_id: name for name, node_id in nodes.ids.items()}
    job_id = store.lease(ArtifactKey("tiny", made["stage"], made["fingerprint"])).lease.job
    return next(names[job["driver_node_id"]] for job in nodes.jobs() if job["submission_id"] == job_id)


def test_a_stage_runs_on_each_node_that_it_is_placed_on(nodes, first_run, tmp_path):
    spec, run = first_run
    for node in NAMES:
        shutil.copytree(spec.parent / "runs", tmp_path / node)
        shutil.rmtree(tmp_path / node / "tiny" / "report")
        report = run_on(nodes, spec, {"report": node}, tmp_path / node)[-1]
        assert report["state"] == "done" and report["fingerprint"] == run["stages"][-1]["fingerprint"]
        store, key = Store(FolderHome(tmp_path / node)), ArtifactKey("tiny", "report", report["fingerprint"])
        assert store.open(key).joinpath("report.html").stat().st_size > 10_000
        assert ran_on(nodes, store, report) == node


def test_a_script_that_is_submitted_by_hand_gives_the_same_artifact(nodes, first_run, tmp_path):
    spec, run = first_run
    shutil.copytree(spec.parent / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs" / "tiny" / "report")
    done = subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", nodes.address, "--working-dir", ".", "--",
                           sys.executable, "jobs/report.py", "--experiment", str(spec), "--store", str(tmp_path / "runs")],
                          capture_output=True, text=True, timeout=RUN_S, cwd=ROOT, env={**os.environ, **nodes.environment})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    store, key = Store(FolderHome(tmp_path / "runs")), ArtifactKey("tiny", "report", run["stages"][-1]["fingerprint"])
    assert store.open(key).joinpath("report.html").stat().st_size > 10_000
    assert store.lease(key).lease.job and store.record(key).identity == Store(FolderHome(spec.parent / "runs")).record(key).identity


@pytest.mark.slow
def test_the_chain_runs_over_all_three_nodes(nodes, tmp_path):
    spec = write_experiment(tmp_path, quantize=None, sweep=NO_FP8)
    places = {"capture": "b", "train": "c", "sweep": "b", "report": "a"}
    stages = run_on(nodes, spec, places, tmp_path / "runs")
    assert {stage["stage"]: stage["state"] for stage in stages} == dict.fromkeys(places, "done")
    store = Store(FolderHome(tmp_path / "runs"))
    assert {stage["stage"]: ran_on(nodes, store, stage) for stage in stages} == places
