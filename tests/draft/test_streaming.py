"""Training on a stream with Hugging Face's own model as its engine: the order of conversations, what is dropped, and how it goes on after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random

import pytest
import torch

from raysd.draft import learn as learn_module
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.gradient import StepGradient
from raysd.draft.streaming import MostBytes, Place, learnable, most_bytes, prompt_groups, train_on_stream
from raysd.errors import ExperimentError, StageError
from raysd.experiment import Experiment
from raysd.hidden_states.capture import Answer, Questions
from raysd.hidden_states.shards import Conversation
from raysd.target.reference import entered_states
from tests.stage_runs import attempt
from tests.tiny_models import tiny_llama

SERVED = AcceptanceCounts(10, 20, 5, (4, 1))
TRAIN, CHOOSE = 7, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


class Engine:
    """Greedy answers and their states, each made once for all tests; a group's answers come in an order of its own. Remembers what was asked."""

    known: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = {}

    def __init__(self, folder, experiment, layer_ids, finish_reason, seed):
        from transformers import AutoModelForCausalLM

        self.experiment, self.layer_ids, self.finish_reason, self.order = experiment, layer_ids, finish_reason, random.Random(seed)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.asked = []
        self.seeds = []
        self.handed_out = 0

    def answers(self, groups):
        before = 0
        for group in groups:
            self.asked.append(len(group))
            self.seeds += [request.seed for request in group]
            for position in self.order.sample(range(len(group)), len(group)):
                self.handed_out += 1
                token_ids, states = self.known.get(tuple(group[position].token_ids)) or self.answer(group[position].token_ids)
                yield Answer(before + position, token_ids, self.finish_reason(token_ids), states)
            before += len(group)

    def answer(self, prompt):
        with torch.no_grad():
            out = self.model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                                      max_new_tokens=self.experiment.capture.max_tokens, do_sample=False, pad_token_id=0)[0].tolist()
        self.known[tuple(prompt)] = out, entered_states(self.model, out[:-1], self.layer_ids).to(torch.bfloat16)
        return self.known[tuple(prompt)]


class Killed(Exception):
    """Stands for a kill -9: nothing of the stage runs after it."""


class Stage:
    """The stage, attempted as often as a test asks, all attempts at the same store."""

    def __init__(self, target, experiment, store):
        self.target, self.experiment, self.store = target, experiment, store
        self.engines: list[Engine] = []
        self.steps: list[list[str]] = []
        """Prompt ids of each step of the last attempt."""
        self.handed_out: list[int] = []
        """How many answers the engine had handed out at each of them."""
        self.out = None

    def __call__(self, store=None, kill_at=None, finish_reason=lambda token_ids: "stop", **changes):
        stage = self

        class Watched(StepGradient):
            def __call__(self, conversations, *rest):
                if len(stage.steps) == kill_at:
                    raise Killed
                stage.steps.append([each.prompt_id for each in conversations])
                stage.handed_out.append(stage.engines[-1].handed_out)
                return super().__call__(conversations, *rest)

        @contextlib.contextmanager
        def factory(experiment, layer_ids, most):
            self.engines.append(Engine(self.target, experiment, layer_ids, finish_reason, len(self.engines)))
            yield self.engines[-1]

        self.steps, self.handed_out = [], []
        experiment = self.experiment.model_copy(update={"train": self.experiment.train.model_copy(update=changes)})
        with pytest.MonkeyPatch.context() as patch, attempt(store or self.store, experiment) as run:
            patch.setattr(learn_module, "StepGradient", Watched)
            self.out = run.out
            return train_on_stream(run, lambda folder, prompts, k: SERVED, factory)

    def draft(self):
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (self.out / "draft").iterdir()}


@pytest.fixture
def stage(target, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [("train", i) for i in range(TRAIN)] + [("choose", i) for i in range(CHOOSE)] + [("report", 0)]
    prompts.write_text("\n".join(json.dumps({"id": f"{split}{i}", "topic": f"{split}{i}", "split": split, "prompt": f"bado {split} {i}"}) for split, i in rows))
    train = {"steps": 8, "ttt_steps": 2, "conversations_per_step": 2, "evaluations": 1, "served_checkpoints": 1, "served_k": 2, "lr": 1e-2, "checkpoint_every_s": 1e-9, "threads": 1}
    return Stage(target, Experiment.model_validate({
        "name": "x", "target": {"model": str(target), "max_model_len": 128}, "prompts": {"path": str(prompts)},
        "draft": {"aux_layers": [1, 2, 3], "vocab_size": 64, "intermediate_size": 128}, "capture": {"mode": "stream", "max_tokens": 6, "shard_conversations": 3},
        "train": train, "quantize": {}}), tmp_path / "store")


def test_steps_take_the_prompts_in_their_order_whatever_finishes_first(stage):
    metrics = stage()
    ends = list(itertools.accumulate([3, 3, 1] * 3))
    for step, handed_out in enumerate(stage.handed_out):  # the next step is fetched meanwhile, and no more
        assert handed_out <= CHOOSE + next(end for end in ends if end >= 2 * (step + 2))
    order = [i for group in itertools.islice(prompt_groups(TRAIN, 3, 0, 0), 9) for i in group.indices]
    assert stage.steps == [[f"train{i}" for i in order[start:start + 2]] for start in range(0, 16, 2)]
    assert sorted(order[:TRAIN]) == list(range(TRAIN)) == sorted(order[TRAIN:2 * TRAIN]) and order[:TRAIN] != order[TRAIN:2 * TRAIN]
    assert stage.engines[0].asked[:4] == [2, 3, 3, 1]  # the choose split, then an epoch
    seeds = stage.engines[0].seeds
    assert len(seeds) > CHOOSE + 2 * TRAIN and len(set(seeds)) == len(seeds)  # sampled answers to the same prompts are others in every epoch
    assert metrics["steps"] == 8 and metrics["conversations"] == 16 and metrics["dropped"] == 0 and metrics["served"] == SERVED.as_metrics()
    capture = metrics["capture"]
    assert 18 <= capture["conversations"] == stage.engines[0].handed_out and capture["output_tokens"] == 6 * capture["conversations"]
    assert max(capture["hf_relative_error"].values()) < 0.01 and capture["layer_ids"] == [1, 2, 3, 4] and capture["head_agreement_frac"] > 0.9
    assert {path.name for path in stage.out.iterdir()} - {"tensorboard"} == {"curve.parquet", "draft", "evaluations.parquet", "served.parquet"}


@pytest.mark.parametrize("kill_at", [1, 3, 5])
def test_a_killed_training_ends_as_if_it_had_not_been_and_asks_only_from_the_group_of_its_next_step(stage, tmp_path, kill_at):
    expected = stage(tmp_path / "uninterrupted")
    draft, steps = stage.draft(), stage.steps
    with pytest.raises(Killed):
        stage(kill_at=kill_at)
    assert stage.steps == steps[:kill_at]
    metrics = stage()
    assert stage.draft() == draft and stage.steps == steps[kill_at:] and metrics["resumed_steps"] == [kill_at]
    assert {name: metrics[name] for name in ("conversations", "dropped", "tokens")} == {name: expected[name] for name in ("conversations", "dropped", "tokens")}
    groups = [3, 3, 1] * 2
    skipped = next(i for i in range(6) if sum(groups[:i + 1]) >= 2 * kill_at)
    assert stage.engines[-1].asked[:3] == [2, *groups[skipped:][:2]]
    whole, again = stage.engines[0].seeds, stage.engines[-1].seeds
    start = CHOOSE + sum(groups[:skipped])
    assert again[CHOOSE:CHOOSE + groups[skipped]] == whole[start:start + groups[skipped]]


def test_answers_that_were_cut_off_are_passed_over_and_the_next_ones_taken(stage, tmp_path):
    def odd_ones_are_cut_off(token_ids):
        return "length" if sum(token_ids) % 2 else "stop"

    metrics = stage(tmp_path / "uninterrupted", finish_reason=odd_ones_are_cut_off)
    draft, steps = stage.draft(), stage.steps
    learned = {prompt_id for step in steps for prompt_id in step}
    assert 2 <= len(learned) < TRAIN and all(len(step) == 2 for step in steps) and metrics["dropped"] > 0
    with pytest.raises(Killed):
        stage(kill_at=4, finish_reason=odd_ones_are_cut_off)
    again = stage(finish_reason=odd_ones_are_cut_off)
    assert stage.draft() == draft and stage.steps == steps[4:] and again["dropped"] == metrics["dropped"]
    kept = stage(tmp_path / "kept", finish_reason=odd_ones_are_cut_off, truncated="keep")
    assert kept["dropped"] == 0 and {prompt_id for step in stage.steps for prompt_id in step} == {f"train{i}" for i in range(TRAIN)}


def test_a_training_that_was_killed_while_it_was_served_repeats_no_step(stage):
    stage()
    draft = stage.draft()
    metrics = stage()
    assert stage.steps == [] and metrics["resumed_steps"] == [8] and metrics["conversations"] == 16 and stage.draft() == draft


def test_a_target_whose_answers_are_all_cut_off_ends_the_training_after_one_epoch(stage):
    with pytest.raises(StageError, match="0 answers of the train split can be learned from, and 7 that were cut off are dropped"):
        stage(finish_reason=lambda token_ids: "length")
    assert stage.steps == [] and stage.engines[0].asked[:4] == [2, 3, 3, 1]


def test_fewer_prompts_than_a_step_takes_are_refused_before_an_engine_starts(stage):
    with pytest.raises(ExperimentError, match="7 answers of the train split"):
        stage(conversations_per_step=8)
    assert stage.engines == []


def test_the_vocabulary_is_counted_from_the_first_group_and_a_poor_one_is_warned_of(stage, capsys):
    metrics = stage()
    assert metrics["vocab_coverage_frac"] < 0.9 and "counted from 3 answers, covers" in capsys.readouterr().out


def test_groups_go_on_where_they_are_asked_to():
    def some(first):
        return list(itertools.islice(prompt_groups(7, 3, 5, first), 12 - first))

    assert all(some(first) == some(0)[first:] for first in range(12)) and [(group.epoch, len(group.indices)) for group in some(0)] == [(epoch, size) for epoch in range(4) for size in (3, 3, 1)]


def test_states_take_at_most_what_the_longest_prompts_come_to(stage, tmp_path):
    with attempt(tmp_path / "store", stage.experiment) as run:
        questions = Questions(run)
        longest = max(map(len, questions.rendered))
        assert most_bytes(stage.experiment, questions).conversation == (longest + 6) * 4 * 64 * 2
        assert MostBytes(0, 2 * 3 * 4 * 64 * longest).group <= most_bytes(stage.experiment, questions).group <= MostBytes(0, 2 * 3 * 4 * 64 * (longest + 6)).group


def conversation(name, answer, finish_reason="stop"):
    return Conversation(name, "topic", "train", torch.zeros(3 + answer, dtype=torch.int64), 3, finish_reason, torch.zeros(2 + answer, 4, 8))


def test_a_place_in_the_stream_holds_what_a_later_attempt_needs():
    groups = [[conversation("a", 2), conversation("short", 1), conversation("b", 2)], [conversation("cut", 2, "length"), conversation("c", 2)]] * 2
    epochs = []
    whole = [(each.prompt_id, place) for each, place in learnable(groups, Place(), 2, False, lambda *counts: epochs.append(counts))]
    assert [name for name, _ in whole] == ["a", "b", "c"] * 2 and epochs == [(3, 2)] * 2
    for number, (_, place) in enumerate(whole):
        later = [(each.prompt_id, place) for each, place in learnable(groups[place.group:], place, 2, False, lambda *counts: None)]
        assert later == whole[number + 1:]
