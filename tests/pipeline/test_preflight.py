"""What is refused before a cluster is asked for anything."""

from __future__ import annotations

import json

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.errors import ExperimentError
from raysd.experiment import load_experiment
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import check_local_resources, check_prompts, stages_of

SHORT = {"target": {"model": "./target", "max_model_len": 160}, "capture": {"max_tokens": 16}, "train": {"served_tokens": 16}, "quantize": {"served_tokens": 16},
         "sweep": {"workloads": [{"osl": 16}]}}


@pytest.fixture
def check(write_experiment, tmp_path):
    def check(**changes) -> None:
        experiment = load_experiment(write_experiment(**{**SHORT, **changes}))
        check_prompts(experiment, plan(stages_of(experiment), Store(FolderHome(tmp_path / "runs"))))

    return check


def test_prompts_that_fit_pass(check):
    check()
    check(train=None, quantize=None, sweep={"arms": ["none"], "workloads": [{"osl": 16}]})


@pytest.mark.parametrize("split", ["train", "choose", "report"])
def test_a_prompt_longer_than_the_context_is_refused_in_every_split(check, tmp_path, split):
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    victim = next(row for row in rows if row["split"] == split)
    victim["prompt"] += " and again" * 100
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ExperimentError, match=f"`{victim['id']}` has .* tokens") as caught:
        check()
    assert "prompts.jsonl" in caught.value.where and "max_model_len" in caught.value.fix


def test_the_longest_answer_to_a_split_counts(check):
    with pytest.raises(ExperimentError, match="leave room"):
        check(quantize={"served_tokens": 150})


@pytest.mark.parametrize(("asked", "words"), [({"cpus": 10_000}, "10000 CPU cores"), ({"custom": {"rack-7": 1}}, "rack-7")])
def test_what_a_local_ray_cannot_give_is_refused(write_experiment, tmp_path, asked, words):
    experiment = load_experiment(write_experiment(**SHORT, hardware={"resources": {"train": asked}}))
    with pytest.raises(ExperimentError, match=words) as caught:
        check_local_resources(experiment, plan(stages_of(experiment), Store(FolderHome(tmp_path / "runs"))))
    assert caught.value.where == "hardware.resources.train" and "--address" in caught.value.fix


def test_a_target_without_a_chat_template_or_a_tokenizer_is_refused(check, tmp_path):
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "target" / name
        if path.exists():
            values = "" if path.suffix == ".jinja" else json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "chat_template"})
            path.write_text(values) if values else path.unlink()
    with pytest.raises(ExperimentError, match="no chat template") as caught:
        check()
    assert caught.value.where == "target.chat_template"
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    with pytest.raises(ExperimentError, match="tokenizer cannot be loaded") as caught:
        check()
    assert "target.model" in caught.value.where
