"""The capture stage with Hugging Face's own model as its engine: small, and able to be wrong on purpose."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import pytest
import torch

from raysd.errors import ExperimentError, StageError
from raysd.experiment.experiment import Experiment
from raysd.hidden_states.capture import Answer, capture
from raysd.hidden_states.shards import Captured, check_shards
from raysd.target.reference import reference_states
from tests.stage_runs import attempt, piece
from tests.tiny_drafts import captured_from
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


class HuggingFaceEngine:
    """Greedy answers and their states; `shift` hands out the layer after the one asked for, `fail_after` dies after so many answers."""

    def __init__(self, experiment, folder, layer_ids, shift=0, fail_after=None):
        from transformers import AutoModelForCausalLM

        self.experiment, self.folder, self.shift, self.fail_after = experiment, folder, shift, fail_after
        self.layer_ids = [min(i + shift, 4) for i in layer_ids]
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.answered = 0
        self.asked = 0

    def answers(self, groups):
        prompts = [request.token_ids for group in groups for request in group]
        self.asked, self.seeds = len(prompts), [request.seed for group in groups for request in group]
        for index, prompt in reversed(list(enumerate(prompts))):  # engines finish in any order
            if self.answered == self.fail_after:
                raise RuntimeError("the engine died")
            self.answered += 1
            with torch.no_grad():
                out = self.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), max_new_tokens=self.experiment.capture.max_tokens,
                                          do_sample=False, pad_token_id=0)[0].tolist()
            states = reference_states(self.folder, self.experiment.target, out[:-1], self.layer_ids).to(torch.bfloat16)
            yield Answer(index, out, "length", states)


class Stage:
    """The stage, attempted as often as a test asks, all attempts at the same store."""

    def __init__(self, experiment, store):
        self.experiment, self.store = experiment, store
        self.answering = None
        """The folder of the model that answers, if it is another than the experiment's."""
        self.engines: list[HuggingFaceEngine] = []
        self.out = None

    def __call__(self, store=None, **engine_options):
        @contextlib.contextmanager
        def factory(experiment, folder, layer_ids, scratch):
            self.engines.append(HuggingFaceEngine(experiment, self.answering or folder, layer_ids, **engine_options))
            yield self.engines[-1]

        with attempt(store or self.store, self.experiment) as run:
            self.out = run.out
            return capture(run, factory)

    def files(self):
        """What the last attempt made: all shards and the index."""
        return {path.name: path.read_bytes() for path in self.out.iterdir()}


@pytest.fixture
def stage(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"id": f"p{i}", "topic": f"t{i}", "split": split, "prompt": f"bado {i}"})
                                 for i, split in enumerate(["train", "train", "train", "train", "choose", "report"])))
    return Stage(Experiment.model_validate({
        "name": "x", "target": {"model": str(target), "max_model_len": 128}, "prompts": {"path": str(prompts)}, "draft": {"aux_layers": [1, 2, 3]},
        "capture": {"max_tokens": 6, "shard_conversations": 2}, "train": {}, "quantize": {}}), tmp_path / "store")


def test_the_train_and_choose_splits_are_captured_and_the_report_split_is_not(stage):
    metrics = stage()
    learn, choose = Captured(stage.out, "train"), Captured(stage.out, "choose")
    assert [conversation.prompt_id for conversation in [*learn, *choose]] == ["p0", "p1", "p2", "p3", "p4"]
    assert metrics["head_agreement_frac"] > 0.9 and metrics["hf_skipped"] is None
    assert metrics["conversations"] == 5 and metrics["layer_ids"] == [1, 2, 3, 4] and max(metrics["hf_relative_error"].values()) < 0.01
    check_shards(stage.out, captured_from(stage.experiment.target, [1, 2, 3]), hidden_size=64, vocab_size=512)
    assert metrics["output_tokens"] == 5 * 6 and learn[0].states_TLH.shape == (len(learn[0].token_ids) - 1, 4, 64)


def test_a_layer_convention_that_is_off_by_one_stops_the_stage_at_the_first_prompt(stage):
    with pytest.raises(StageError, match="another convention"):
        stage(shift=1)
    assert stage.engines[0].answered == 1 and stage.files() == {}


def test_shards_that_attempts_finished_are_not_captured_again(stage, tmp_path):
    with pytest.raises(RuntimeError, match="died"):
        stage(fail_after=2)  # p4 alone in the last shard, then p3: one shard is whole
    with pytest.raises(RuntimeError, match="died"):
        stage(fail_after=3)  # p3 and p2, then p1: another
    metrics = stage()
    assert [(engine.asked, engine.answered) for engine in stage.engines] == [(5, 2), (4, 3), (2, 2)]
    assert len(set(stage.engines[0].seeds)) == 5 and stage.engines[1].seeds == stage.engines[0].seeds[:4]  # answers, sampled ones too, are those of an attempt that makes all
    assert metrics["conversations"] == 5 and metrics["output_tokens"] == 5 * 6 and metrics["output_tok_s"] == pytest.approx(2 * 6 / metrics["elapsed_s"])
    interrupted = stage.files()
    uninterrupted = stage(tmp_path / "another store")
    assert stage.files() == interrupted and len(interrupted) == 4
    once = ("elapsed_s", "output_tok_s")
    assert {name: value for name, value in metrics.items() if name not in once} == {name: value for name, value in uninterrupted.items() if name not in once}


def test_a_kill_before_the_artifact_is_published_repeats_nothing(stage):
    first = stage()  # the attempt ends without publishing, as if it were killed then
    files = stage.files()
    again = stage()
    assert len(stage.engines) == 1 and stage.files() == files
    assert again == first | {"elapsed_s": 0.0, "output_tok_s": None}


def test_a_truncated_shard_alone_is_captured_again(stage):
    stage()
    files = stage.files()
    os.truncate(piece(stage.store, "shard-00001.safetensors"), 1000)
    stage()
    assert [engine.asked for engine in stage.engines] == [5, 2] and stage.files() == files


def test_a_head_that_raysd_does_not_understand_stops_the_stage_at_the_first_prompt(stage, target, tmp_path):
    """As of a model whose norm adds one to its weight: the states are right, and lead to other tokens by what raysd reads."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    shutil.copytree(target, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    stage.answering = target
    stage.experiment = stage.experiment.model_copy(update={"target": stage.experiment.target.model_copy(update={"model": str(other)})})
    with pytest.raises(StageError, match="norm and head as raysd reads them"):
        stage()
    assert stage.engines[0].answered == 1 and stage.files() == {}


def test_a_target_that_changes_its_logits_is_refused_before_an_engine_starts(stage, target, tmp_path):
    capped = tmp_path / "capped"
    shutil.copytree(target, capped)
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    stage.experiment = stage.experiment.model_copy(update={"target": stage.experiment.target.model_copy(update={"model": str(capped)})})
    with pytest.raises(ExperimentError, match="final_logit_softcapping = 30.0"):
        stage()
    assert stage.engines == []


def test_without_a_reference_the_reason_is_recorded(stage, target, tmp_path):
    quantized = tmp_path / "quantized"
    shutil.copytree(target, quantized)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    stage.answering = target
    stage.experiment = stage.experiment.model_copy(update={"target": stage.experiment.target.model_copy(update={"model": str(quantized)})})
    metrics = stage()
    assert metrics["hf_relative_error"] is None and "quantized (fp8)" in metrics["hf_skipped"] and metrics["head_agreement_frac"] > 0.9
