"""What `raysd serve` finds to serve, and what it prints without deploying."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raysd.artifacts.stage import no_progress
from raysd.backends.stores import open_store
from raysd.errors import ArtifactError, ExperimentError
from raysd.experiment import load_experiment
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import stages_of
from raysd.pipeline.served import what_to_serve
from tests.records import publish_files


def draft_files(folder: Path, **changes) -> dict[str, bytes]:
    """Files of a trained draft that fits the experiment's target, or not."""
    import torch

    from raysd.draft.checkpoint import save_draft
    from tests.tiny_drafts import small_draft, small_shape

    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128, "target_vocab_size": 512, "vocab_size": 256, "aux_layers": (1, 2, 3)} | changes
    save_draft(small_draft(small_shape(**shape)), folder, torch.bfloat16)
    return {f"draft/{path.name}": path.read_bytes() for path in folder.iterdir()}


ALONE = {"capture": None, "train": None, "quantize": None, "sweep": {"arms": ["none"]}}
"""Changes that leave a target without a draft."""


def served(spec: Path, arm: str | None = None):
    experiment = load_experiment(spec)
    store = open_store(experiment.store)
    return what_to_serve(experiment, plan(stages_of(experiment), store), store, arm, False, no_progress)


@pytest.fixture
def trained(write_experiment, tmp_path: Path):
    """Publishes a draft as the train stage does."""
    def publish(**changes) -> Path:
        spec = write_experiment(quantize=None, sweep={"arms": ["none", "bf16"]})
        stage = next(stage for stage in stages_of(load_experiment(spec)) if stage.name == "train")
        publish_files(open_store(load_experiment(spec).store), stage.key, draft_files(tmp_path / "made", **changes), identity=stage.identity)
        return spec
    return publish


def test_the_draft_of_a_finished_training_is_served(trained):
    found = served(trained())
    assert (found.arm, found.spec.k, found.unchecked) == ("bf16", 3, [])
    assert (found.spec.draft / "config.json").is_file() and found.spec.draft.name == "draft" and (found.spec.target / "config.json").is_file()


def test_the_arm_asked_for_wins_over_the_experiments(trained):
    found = served(trained(), "none")
    assert found.arm == "none" and found.spec.draft is None and found.spec.k is None


def test_a_draft_that_does_not_fit_is_refused(trained):
    with pytest.raises(ExperimentError, match="width 32, the target's are 64") as caught:
        served(trained(hidden_size=32))
    assert caught.value.exit_code == 64


def test_a_stage_that_was_not_run_is_named(write_experiment):
    with pytest.raises(ArtifactError, match="there is no draft of the arm fp8 yet") as caught:
        served(write_experiment())
    assert "/quantize/" in caught.value.where and "raysd run" in caught.value.fix


@pytest.mark.parametrize(("arm", "changes"), [("fp8", {"quantize": None}), ("bf16", {"quantize": None, "train": None, "capture": None})])
def test_an_arm_that_the_experiment_cannot_make_is_refused(write_experiment, arm, changes):
    with pytest.raises(ExperimentError, match=f"{arm} has no draft") as caught:
        served(write_experiment(**changes, sweep={"arms": ["none"]}), arm)
    assert caught.value.where == "serve.arm"


def test_a_finished_draft_is_served_as_it_is_and_one_that_must_be_put_right_as_a_copy_made_once(write_experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSD_CACHE", str(tmp_path / "cache"))
    draft_files(tmp_path / "draft")
    spec = write_experiment(draft={"checkpoint": "draft"}, capture=None, train=None, quantize=None, sweep={"arms": ["none", "bf16"]})
    assert served(spec).spec.draft == tmp_path / "draft" and not (tmp_path / "cache").exists()

    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"target_hidden_size": None}))
    copies = [served(spec).spec.draft for _ in range(2)]
    assert copies[0] == copies[1] and copies[0].is_relative_to(tmp_path / "cache")
    assert "target_hidden_size" not in json.loads((copies[0] / "config.json").read_text()) and (copies[0] / "model.safetensors").is_file()


def test_a_target_of_the_hub_that_is_not_here_is_named_by_its_id(trained, monkeypatch):
    from raysd.pipeline import served as module

    spec = trained()
    experiment = load_experiment(spec)
    store = open_store(experiment.store)
    planned = plan(stages_of(experiment), store)
    hub = experiment.model_copy(update={"target": experiment.target.model_copy(update={"model": "org/model", "revision": "0" * 40})})
    found = module.what_to_serve(hub, planned, store, None, False, no_progress)
    assert found.spec.target == Path("org/model") and "org/model is not on this machine" in found.unchecked[0]


def serve(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "raysd", "serve", *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_a_dry_run_prints_the_config_file_and_nothing_else(trained):
    from ray.serve.schema import ServeDeploySchema

    spec = trained()
    done = serve(spec, "--dry-run")
    assert done.returncode == 0 and not done.stderr, done.stderr
    document = yaml.safe_load(done.stdout)
    ServeDeploySchema.model_validate(document)
    kwargs = document["applications"][0]["args"]["llm_config"]["engine_kwargs"]
    assert kwargs["speculative_config"]["num_speculative_tokens"] == 3
    none = yaml.safe_load(serve(spec, "--arm", "none", "--dry-run").stdout)
    assert "speculative_config" not in none["applications"][0]["args"]["llm_config"]["engine_kwargs"]


@pytest.mark.parametrize(("arguments", "code", "words"), [(("--arm", "int4"), 64, "int4"), (("--dry-run", "--address", "http://h:8265"), 64, "--address has no effect"),
                                                         (("--arm", "fp8", "--dry-run"), 64, "fp8 has no draft")])
def test_what_cannot_be_served_is_one_message(trained, arguments, code, words):
    done = serve(trained(), *arguments)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_keys_that_are_not_there_are_missed_before_anything_starts(write_experiment, monkeypatch):
    monkeypatch.delenv("RAYSD_NO_SUCH_KEYS", raising=False)
    done = serve(write_experiment(**ALONE, serve={"arm": "none", "api_keys_env": "RAYSD_NO_SUCH_KEYS"}))
    assert done.returncode == 64 and "no variable RAYSD_NO_SUCH_KEYS" in done.stderr and "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_before_anything_starts(write_experiment):
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        done = serve(write_experiment(**ALONE, serve={"arm": "none", "port": held.getsockname()[1]}))
    assert done.returncode == 64 and "cannot be listened on" in done.stderr and "serve.port" in done.stderr


def test_more_replicas_than_there_are_cores_for_are_refused(write_experiment):
    done = serve(write_experiment(**ALONE, serve={"arm": "none", "autoscaling": {"max_replicas": 1000}}))
    assert done.returncode == 64 and "1000 replicas ask for 1000 CPU cores" in done.stderr and "serve.autoscaling.max_replicas" in done.stderr


def test_an_address_where_nothing_answers_exits_soon(write_experiment):
    done = serve(write_experiment(**ALONE, serve={"arm": "none"}), "--address", "http://127.0.0.1:9")
    assert done.returncode == 1 and "no Ray job server answers" in done.stderr and "Traceback" not in done.stderr, done.stderr
