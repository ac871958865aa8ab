"""The capture stage with Hugging Face's own model as its engine: small, and able to be wrong on purpose."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from raysd.artifacts.stage import StageRun
from raysd.errors import StageError
from raysd.experiment.experiment import Experiment
from raysd.hidden_states.capture import Answer, capture
from raysd.hidden_states.shards import Captured
from raysd.target.reference import reference_states
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


class HuggingFaceEngine:
    """Greedy answers and their states; `shift` hands out the layer after the one asked for, `fail_after` dies."""

    def __init__(self, experiment, folder, layer_ids, shift=0, fail_after=None):
        from transformers import AutoModelForCausalLM

        self.experiment, self.folder, self.shift, self.fail_after = experiment, folder, shift, fail_after
        self.layer_ids = [min(i + shift, 4) for i in layer_ids]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.asked = 0

    def answers(self, prompts):
        for index, prompt in reversed(list(enumerate(prompts))):  # engines finish in any order
            if self.fail_after is not None and self.asked == self.fail_after:
                raise RuntimeError("the engine died")
            self.asked += 1
            with torch.no_grad():
                out = self.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=self.experiment.capture.max_tokens,
                                          do_sample=False, pad_token_id=0)[0].tolist()
            states = reference_states(self.folder, self.experiment.target, out[:-1], self.layer_ids).to(torch.bfloat16)
            yield Answer(index, out, "length", states)


@pytest.fixture
def stage(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "topic": f"t{i}", "split": split, "prompt": f"bado {i}"})
                                 for i, split in enumerate(["train", "train", "train", "train", "choose", "report"])))
    experiment = Experiment.model_validate({
        "name": "x", "target": {"model": str(target), "max_model_len": 128}, "prompts": {"path": str(prompts)}, "draft": {"aux_layers": [1, 2, 3]},
        "capture": {"max_tokens": 6, "shard_conversations": 2}, "train": {}, "quantize": {}})
    for name in ("work", "out"):
        (tmp_path / name).mkdir()
    run = StageRun(experiment, {}, tmp_path / "work", tmp_path / "out", lambda *args, **figures: None)
    engines = []

    def go(**engine_options):
        @contextlib.contextmanager
        def factory(experiment, folder, layer_ids, scratch):
            engines.append(HuggingFaceEngine(experiment, folder, layer_ids, **engine_options))
            yield engines[-1]
        return capture(run, factory)
    return go, run, engines


def test_the_train_and_choose_splits_are_captured_and_the_report_split_is_not(stage):
    go, run, _ = stage
    metrics = go()
    learn, choose = Captured(run.out, "train"), Captured(run.out, "choose")
    assert [row["prompt_id"] for row in learn.rows + choose.rows] == ["p0", "p1", "p2", "p3", "p4"]
    assert metrics["conversations"] == 5 and metrics["layer_ids"] == [1, 2, 3, 4] and max(metrics["hf_relative_error"].values()) < 0.01
    assert metrics["output_tokens"] == 5 * 6 and learn[0].states_TLH.shape == (len(learn[0].token_ids) - 1, 4, 64)


def test_a_layer_convention_that_is_off_by_one_stops_the_stage_at_the_first_prompt(stage):
    go, run, engines = stage
    with pytest.raises(StageError, match="another convention"):
        go(shift=1)
    assert engines[0].asked == 1 and list(run.out.iterdir()) == []


def test_shards_that_an_attempt_finished_are_not_captured_again(stage):
    go, run, engines = stage
    with pytest.raises(RuntimeError, match="died"):
        go(fail_after=3)  # p4 alone in the last shard, then p3 and p2: two shards are whole
    go()
    assert [engine.asked for engine in engines] == [3, 2]
    assert len(Captured(run.out, "train")) == 4
