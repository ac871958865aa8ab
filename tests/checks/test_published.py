"""The doctor on what others published: InferenceX's three Eagle3 scripts for MI355X as they were, and raysd's ready experiments for the same models."""

from __future__ import annotations

from pathlib import Path

import pytest

from raysd.checks.doctor import facts_of
from raysd.checks.findings import NOT_CHECKED
from raysd.checks.registry import examine
from raysd.experiment import load_experiment

HERE, JOBS = Path(__file__).parent / "published", Path(__file__).parents[2] / "jobs"
AS_IT_STARTS = {"symmetric-memory", "ready-timeout"}
FOUND = {
    "inferencex-1116": ({"k-not-verified"}, {"draft-backend-unset"} | AS_IT_STARTS),
    "inferencex-1515": ({"k-not-verified"}, {"draft-backend-unset", "env-gone"} | AS_IT_STARTS),
    "inferencex-1234": (set(), {"draft-backend-unset", "fp8-kv-scales", "draft-kv-dtype", "aiter-rmsnorm"} | AS_IT_STARTS),
    "inferencex-1234-tp8": ({"tp-width"}, {"draft-backend-unset", "fp8-kv-scales", "draft-kv-dtype"} | AS_IT_STARTS),
}


def told(path: Path, vllm: str | None = None, installed: str | None = None) -> dict[str, set[str]]:
    findings = examine(facts_of(load_experiment(path), vllm, installed))
    return {severity: {finding.code for finding in findings if finding.severity == severity and finding.code != NOT_CHECKED} for severity in ("error", "warning", "info")}


@pytest.mark.parametrize("name", sorted(path.stem for path in HERE.glob("*.yaml")))
def test_what_is_wrong_with_a_published_script_is_found(name: str):
    found = told(HERE / f"{name}.yaml")
    assert (found["error"], found["warning"]) == FOUND[name]


def test_what_a_newer_image_makes_of_a_published_script():
    newer = told(HERE / "inferencex-1515.yaml", "0.33.0")
    assert newer["error"] == {"env-gone"} and {"k-not-verified"} <= newer["info"]
    older = told(HERE / "inferencex-1116.yaml", "0.19.1")
    assert {"kv-block-clash", "mla-speculation", "k-not-verified"} <= older["error"]


def test_minimax_on_eight_gpus_by_experts_is_a_risk_and_by_tensors_an_error():
    experiment = load_experiment(HERE / "inferencex-1234.yaml")
    eight = experiment.model_copy(update={"target": experiment.target.model_copy(update={"tensor_parallel": 8})})
    assert ("minimax-tp8-ep8", "warning") in {(finding.code, finding.severity) for finding in examine(facts_of(eight))}


READY = sorted(path for path in JOBS.glob("*.yaml"))


@pytest.mark.parametrize("path", READY, ids=[path.stem for path in READY])
def test_a_ready_experiment_has_no_error(path: Path):
    found = told(path, installed="0.32.0")
    assert not found["error"]
    assert found["warning"] <= {"fp8-kv-scales"}, "what AMD chose and nobody has scales for"


def test_the_models_that_amd_published_have_a_ready_experiment():
    assert {path.stem for path in READY} >= {"smollm2-cpu", "kimi-k2.5-mi355x", "minimax-m2.5-mi355x", "minimax-m3-mi355x"}
