"""Training on a stream with Hugging Face's own model as its engine: the order of conversations, what is dropped, and how it goes on after a kill."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import weakref

import pytest
import torch
from safetensors.torch import load_file

from raysd.draft import learn as learn_module
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.gradient import StepGradient
from raysd.draft.learn import learn, new_learner
from raysd.draft.streaming import Arrival, Held, Place, Streamed, learnable, prompt_groups, train_on_stream
from raysd.draft.workers import Alone
from raysd.errors import ExperimentError, StageError
from raysd.experiment import Experiment
from raysd.hidden_states.shards import Conversation
from tests.stage_runs import attempt
from tests.tiny_engine import TinyEngine, some_are_cut_off
from tests.tiny_models import tiny_llama

SERVED = AcceptanceCounts(10, 20, 5, (4, 1))
TRAIN, CHOOSE = 7, 2


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


class Lying(Held):
    """States that hold a place in the stream, by identity."""

    __hash__, __eq__ = object.__hash__, object.__eq__


class Engine(TinyEngine):
    """As a StreamEngine. Remembers what was asked, and the most states that somebody held at a time."""

    def __init__(self, folder, experiment, layer_ids, finish_reason, seed):
        super().__init__(folder, experiment, layer_ids, seed)
        self.finish_reason = finish_reason
        self.asked = []
        self.seeds = []
        self.handed_out = 0
        self.most_held = 0
        self._held = weakref.WeakSet()

    def answers(self, groups):
        before = 0
        for group in groups:
            self.asked.append(len(group))
            self.seeds += [request.seed for request in group]
            for answer in super().answers([group]):
                self.handed_out += 1
                yield Arrival(before + answer.index, answer.token_ids, self.finish_reason(answer.token_ids), self.put(answer.states_TLH))
            before += len(group)

    def put(self, states):
        lying = Lying(states)
        self._held.add(lying)
        self.most_held = max(self.most_held, len(self._held))
        return lying


class Merged:
    """Several workers in one process (a Source): what is dealt to any of them, checked as each does it."""

    def __init__(self, deals):
        self.shares = deals.shares
        self.choose = [self.take() for _ in range(deals.choose)]

    def take(self):
        shares = next(self.shares)
        if len({id(share) for share in shares}) == 1:
            return shares[0][0].whole()
        assert all(shares)
        return [each.whole() for share in shares for each in share]

    def step(self, number):
        return self.take()


def in_turn(run, target, vocabulary, desk, deals):
    """`learn_on_workers` in this process."""
    workers, section = Alone(torch.device("cpu")), run.experiment.train
    source = Merged(deals)
    return learn(section.model_copy(update={"workers": 1}), new_learner(run.experiment, target, vocabulary, workers), source, source.choose, workers, desk)


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
            return train_on_stream(run, lambda folder, prompts, k: SERVED, factory, in_turn)

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


def test_several_workers_learn_from_the_prompts_that_one_does_and_go_on_after_a_kill(stage, tmp_path):
    one, steps = stage(tmp_path / "one", finish_reason=some_are_cut_off), stage.steps
    mine = load_file(stage.out / "draft" / "model.safetensors")
    several = stage(tmp_path / "several", finish_reason=some_are_cut_off, workers=2)
    assert [sorted(step) for step in stage.steps] == [sorted(step) for step in steps]
    for name in ("conversations", "dropped", "tokens", "steps", "vocab_coverage_frac"):
        assert one[name] == several[name], name
    assert several["dropped"] > 0
    theirs = load_file(stage.out / "draft" / "model.safetensors")
    for name in mine:
        torch.testing.assert_close(mine[name].float(), theirs[name].float(), rtol=2e-2, atol=2e-2)
    draft = stage.draft()
    with pytest.raises(Killed):
        stage(finish_reason=some_are_cut_off, kill_at=3, workers=2)
    again = stage(finish_reason=some_are_cut_off, workers=2)
    assert again["resumed_steps"] == [3] and stage.draft() == draft and again["dropped"] == several["dropped"]


def test_states_that_lie_in_the_stream_for_several_workers_are_those_of_a_group_and_two_steps_at_most(stage):
    stage(workers=2)
    assert 3 <= stage.engines[0].most_held <= 3 + 2 * 2
    stage(stage.store.with_name("one"))
    assert stage.engines[1].most_held == 1


def test_states_that_a_worker_finds_wrong_end_the_training(stage, monkeypatch):
    def spoil(self, prompt):
        token_ids, states = answer(self, prompt)
        return token_ids, states if len(self.seeds) <= CHOOSE else states * torch.nan

    answer = Engine.answer
    monkeypatch.setattr(Engine, "known", {})
    monkeypatch.setattr(Engine, "answer", spoil)
    for workers in (1, 2):
        Engine.known.clear()
        with pytest.raises(StageError, match="NaN or infinity"):
            stage(stage.store.with_name(f"spoiled {workers}"), workers=workers)
        assert stage.steps == []


def test_answers_that_were_cut_off_are_passed_over_and_the_next_ones_taken(stage, tmp_path):
    metrics = stage(tmp_path / "uninterrupted", finish_reason=some_are_cut_off)
    draft, steps = stage.draft(), stage.steps
    learned = {prompt_id for step in steps for prompt_id in step}
    assert 2 <= len(learned) < TRAIN and all(len(step) == 2 for step in steps) and metrics["dropped"] > 0
    with pytest.raises(Killed):
        stage(kill_at=4, finish_reason=some_are_cut_off)
    again = stage(finish_reason=some_are_cut_off)
    assert stage.draft() == draft and stage.steps == steps[4:] and again["dropped"] == metrics["dropped"]
    kept = stage(tmp_path / "kept", finish_reason=some_are_cut_off, truncated="keep")
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


def streamed(name, answer, finish_reason="stop"):
    return Streamed(Conversation(name, "topic", "train", torch.zeros(3 + answer, dtype=torch.int64), 3, finish_reason, torch.zeros(0, 4, 8)), Held(torch.ones(2 + answer, 4, 8)))


def test_a_place_in_the_stream_holds_what_a_later_attempt_needs():
    groups = [[streamed("a", 2), streamed("short", 1), streamed("b", 2)], [streamed("cut", 2, "length"), streamed("c", 2)]] * 2
    epochs = []
    whole = [(each.stateless.prompt_id, place) for each, place in learnable(groups, Place(), 2, False, lambda *counts: epochs.append(counts))]
    assert [name for name, _ in whole] == ["a", "b", "c"] * 2 and epochs == [(3, 2)] * 2
    for number, (_, place) in enumerate(whole):
        later = [(each.stateless.prompt_id, place) for each, place in learnable(groups[place.group:], place, 2, False, lambda *counts: None)]
        assert later == whole[number + 1:]
