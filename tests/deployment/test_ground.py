"""`raysd recommend` on a sweep's folder, and what it reads there beside the cells."""

import json
from pathlib import Path

import pytest

from raysd.cli import main
from raysd.deployment.ground import engine_start_s, fitting_replicas
from raysd.errors import ArtifactError
from raysd.experiment import Experiment
from raysd.sweep.tables import CELLS, REQUESTS, write_partitioned
from tests.deployment.test_recommend import cells, constant


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep's Parquet files, as a folder of them is named on the command line."""
    rows = [dict.fromkeys(CELLS) | {"invalid_reasons": [], "schema_version": 2} | row for row in cells({3: constant(1.5)})]
    write_partitioned(tmp_path / "cells", CELLS, rows)
    write_partitioned(tmp_path / "requests", REQUESTS, [dict.fromkeys(REQUESTS) | {"arm": "none", "workload": "report", "concurrency": 1, "block": 0}])
    (tmp_path / "provenance.json").write_text(json.dumps({"nodes": {"a": {"packages": {}, "engines": {"none": {"start_s": 90.0}, "bf16-k3": {"start_s": 120.0}}}}}))
    return tmp_path


def test_the_command_prints_what_goes_into_the_experiment_and_why(sweep, capsys):
    assert main(["recommend", str(sweep), "--peak", "100"]) == 0
    shown = capsys.readouterr().out
    assert "target_ongoing_requests: 16.0" in shown and "max_replicas: 7" in shown and "upscale_delay_s: 12.0" in shown and "concurrency 16" in shown
    assert main(["recommend", str(sweep), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["serve"]["arm"] == "bf16" and {reason["field"] for reason in told["reasons"]} >= {"target_ongoing_requests", "max_ongoing_requests", "max_replicas", "downscale_delay_s"}


@pytest.mark.parametrize("arguments", [["--arm", "fp8"], ["--workload", "other"], ["--tpot-ms", "0"], ["--tpot-ms", "0.001"], ["--peak", "1", "--trough", "2"]])
def test_what_cannot_be_recommended_is_a_mistake_of_the_user(sweep, arguments, capsys):
    assert main(["recommend", str(sweep), *arguments]) == 64
    assert "Traceback" not in capsys.readouterr().err


def test_how_long_engines_take_to_start_is_read_where_it_is_told(sweep, tmp_path):
    assert engine_start_s(sweep / "provenance.json") == 120.0
    assert engine_start_s(tmp_path / "absent.json") is None
    (tmp_path / "old.json").write_text(json.dumps({"nodes": {"a": {"packages": {}}}}))
    assert engine_start_s(tmp_path / "old.json") is None
    (tmp_path / "damaged.json").write_text("{")
    with pytest.raises(ArtifactError, match="does not parse"):
        engine_start_s(tmp_path / "damaged.json")


@pytest.mark.parametrize(("hardware", "ranks", "nodes", "replicas"), [("cpu", 1, 1, 1), ("mi355x", 4, 2, 4), ("mi355x", 8, 1, 1)])
def test_the_machines_hold_so_many_engines(hardware: str, ranks: int, nodes: int, replicas: int):
    experiment = Experiment.model_validate({"name": "x", "target": {"model": "/m", "tensor_parallel": ranks}, "hardware": {"name": hardware}, "prompts": {"path": "p.jsonl"},
                                            "sweep": {"arms": ["none"], "nodes": nodes}})
    assert fitting_replicas(experiment) == replicas
