"""The entry scripts that `ray job submit` starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raysd.backends.stages import stage_functions
from raysd.pipeline.stages import VERSIONS

JOBS = Path(__file__).parents[2] / "jobs"


def call(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(JOBS / f"{script}.py"), *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_there_is_a_script_and_a_function_for_every_stage():
    assert {path.stem for path in JOBS.glob("*.py")} == {*VERSIONS, "pipeline"}
    assert list(stage_functions()) == list(VERSIONS)


@pytest.mark.parametrize("stage", VERSIONS)
def test_a_script_names_its_own_stage_and_refuses_a_bad_experiment(stage: str, write_experiment: Callable[..., Path], tmp_path: Path):
    spec = write_experiment(train={"learning_rate": 1})
    done = call(stage, "--experiment", spec, "--store", tmp_path / "store")
    assert done.returncode == 64 and "train.learning_rate" in done.stderr and "Traceback" not in done.stderr
    assert f"jobs/{stage}.py" in call(stage, "--help").stdout


def test_wrong_usage_of_a_script_exits_64():
    done = call("train")
    assert done.returncode == 64 and "--experiment" in done.stderr


@pytest.mark.parametrize("attempt", ["0", "-1", "x", "1.0", "1_0", "\u0662"])
def test_an_attempt_that_is_no_number_of_at_least_one_is_refused(attempt: str, write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("train", "--experiment", write_experiment(), "--store", tmp_path / "store", f"--attempt={attempt}")
    assert done.returncode == 64 and "--attempt" in done.stderr and "at least 1" in done.stderr and not (tmp_path / "store").exists()


def test_a_stage_without_its_inputs_says_which_one_to_run(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("report", "--experiment", write_experiment(), "--store", tmp_path / "store")
    assert done.returncode == 1 and "run the stage capture first" in done.stderr


def test_the_pipeline_script_needs_a_cluster_to_run_in(write_experiment: Callable[..., Path], tmp_path: Path):
    done = call("pipeline", "--experiment", write_experiment(train={"learning_rate": 1}), "--store", tmp_path / "store")
    assert done.returncode == 64 and "train.learning_rate" in done.stderr
