"""The train stage on captured conversations of a tiny target, without an engine: what it keeps, writes, refuses, and how it goes on after an interruption."""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raysd.draft import learn as learn_module
from raysd.draft import train as train_module
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.gradient import StepGradient
from raysd.draft.unfinished import NAMES, StageDesk, Training, save
from raysd.errors import ArtifactError, ExperimentError, StageError
from raysd.experiment import load_experiment
from raysd.experiment.train import TrainSection
from raysd.hidden_states.shards import Captured, Conversation, write_index, write_shard
from raysd.signals import Terminated, raise_when_terminated, whole
from tests.stage_runs import attempt, piece
from tests.tiny_drafts import captured_from, small_draft
from tests.tiny_models import tiny_llama

SERVED = AcceptanceCounts(10, 20, 5, (4, 1))
STEP_S = 10.0
"""What a step takes on the scripted clock."""


def served(folder: Path, prompts, k: int) -> AcceptanceCounts:
    assert (folder / "config.json").is_file() and len(prompts) == 2 and k == 2
    return SERVED


def no_workers(*arguments):
    pytest.fail("one worker is the stage's own process")


class Killed(Exception):
    """Stands for a kill -9: nothing of the stage runs after it."""


class Stage:
    """The stage, attempted as often as a test asks; every attempt counts its steps."""

    def __init__(self, experiment, captured: Path, stores: Path) -> None:
        self.experiment, self.captured, self.stores = experiment, captured, stores
        self.clock_s, self.steps, self.out = 0.0, [], None

    def __call__(self, store="store", served=served, strike=None, at=None, **changes):
        """One attempt. strike: called within the attempt's step that comes after `at` others; changes: of the section."""
        stage = self

        class Struck(StepGradient):
            def __call__(self, *arguments):
                if stage.steps[-1] == at:
                    strike()
                stage.steps[-1] += 1
                stage.clock_s += STEP_S
                share = super().__call__(*arguments)
                if spoil:
                    next(iter(self._draft.parameters())).grad[0] = float("nan")
                return share

        self.steps.append(0)
        spoil = changes.pop("spoil", [])
        self.clock_s = 1e6 / len(self.steps)  # each attempt's clock starts anywhere
        experiment = self.experiment.model_copy(update={"train": self.experiment.train.model_copy(update=changes)})
        with pytest.MonkeyPatch.context() as patch, attempt(self.stores / store, experiment, {"capture": self.captured}, whole=whole) as run:
            patch.setattr(learn_module, "StepGradient", Struck)
            self.out = run.out
            return train_module.train(run, served, no_workers, clock=lambda: self.clock_s)

    def draft(self) -> dict[str, str]:
        """SHA-256 of the draft's files, as the last attempt wrote them."""
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (self.out / "draft").iterdir()}

    def tables(self) -> list[list[dict]]:
        return [pq.read_table(self.out / f"{name}.parquet").to_pylist() for name in ("curve", "evaluations")]

    def pieces(self, store="store") -> list[Path]:
        """Checkpoints, the newest last."""
        return sorted((path for path in (piece(self.stores / store, name) for name in NAMES) if path.exists()), key=lambda path: path.stat().st_mtime_ns)


@pytest.fixture
def stage(experiment_document, tmp_path) -> Stage:
    tiny_llama(tmp_path / "tiny")
    section = {"steps": 6, "ttt_steps": 2, "conversations_per_step": 2, "evaluations": 3, "served_k": 2, "lr": 1e-2, "warmup_frac": 0.0,
               "checkpoint_every_s": 1e9, "truncated": "keep", "served_checkpoints": 1}
    document = experiment_document | {"target": {"model": str(tmp_path / "tiny"), "max_model_len": 128}, "train": section,
                                      "draft": {"vocab_size": 64, "aux_layers": [1, 2, 3], "intermediate_size": 128}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(document))
    experiment, generator = load_experiment(tmp_path / "train.yaml"), torch.Generator().manual_seed(0)
    captured = tmp_path / "captured"
    captured.mkdir()
    write_shard(captured / "shard-00000.safetensors", [
        Conversation(f"{split}{i}", "topic", split, torch.randint(3, 512, (24,), generator=generator), 6, "length",
                     torch.randn(23, 4, 64, generator=generator).to(torch.bfloat16))
        for split in ("train", "choose") for i in range(6)], captured_from(experiment.target, [1, 2, 3]))
    write_index(captured)
    return Stage(experiment, captured, tmp_path / "stores")


def killed():
    raise Killed


def test_of_the_last_checkpoints_the_one_that_vllm_accepts_most_of_is_the_draft(stage, monkeypatch):
    replayed, weights, lengths = iter([9, 3, 5]), [], {4: 7, 6: 6}

    def scripted_replay(draft, conversations, k, beside):
        weights.append(draft.fc.weight.detach().clone())
        accepted = next(replayed)
        return AcceptanceCounts(10, 20, accepted, (accepted, 0))

    def scripted_serving(folder, prompts, k):
        step = 4 if torch.equal(load_file(folder / "model.safetensors")["fc.weight"], weights[1].to(torch.bfloat16)) else 6
        return AcceptanceCounts(10, 20, lengths[step], (lengths[step], 0))

    monkeypatch.setattr(learn_module, "replay", scripted_replay)
    metrics = stage(served=scripted_serving, served_checkpoints=2)
    assert metrics["steps"] == 6 and metrics["best_step"] == 4 and metrics["resumed_steps"] == []  # not 2, whose replay is the longest, nor 6, the last
    assert metrics["replay"]["acceptance_length"] == pytest.approx(1.3) and metrics["served"]["acceptance_length"] == pytest.approx(1.7)
    saved = load_file(stage.out / "draft" / "model.safetensors")["fc.weight"]
    assert torch.equal(saved, weights[1].to(saved.dtype)) and not torch.equal(saved, weights[2].to(saved.dtype))
    assert pq.read_table(stage.out / "evaluations.parquet")["step"].to_pylist() == [2, 2, 4, 4, 6, 6]
    table = pq.read_table(stage.out / "served.parquet").to_pylist()
    assert [(row["step"], row["chosen"], round(row["acceptance_length"], 6)) for row in table] == [(4, True, 1.7), (6, False, 1.6)]


def test_what_was_served_before_a_kill_is_not_served_again(stage):
    calls = []

    def serves_once(folder, prompts, k):
        calls.append(folder.name)
        if len(calls) == 2:
            raise Killed
        return SERVED

    with pytest.raises(Killed):
        stage(served=serves_once, served_checkpoints=2)
    stage(served=serves_once, served_checkpoints=2)
    assert calls == ["candidate-4", "candidate-6", "candidate-6"]


def test_answers_that_were_cut_off_are_dropped_and_too_few_of_the_rest_are_refused(stage):
    with pytest.raises(StageError, match="0 answers of the train split can be learned from, and 6 that were cut off are dropped: a step takes 2") as caught:
        stage(truncated="drop")
    assert "train.truncated: keep" in caught.value.fix
    assert caught.value.where == f"train.conversations_per_step ({stage.captured})"
    with pytest.raises(ExperimentError, match="6 answers of the train split can be learned from: a step takes 7") as caught:
        stage(conversations_per_step=7)
    assert caught.value.where == f"train.conversations_per_step ({stage.captured})"


@pytest.mark.parametrize(("target", "aux_layers", "hidden", "words"), [
    ({"seed": 1}, [1, 2, 3], 64, "another target"), ({"layers": 5}, [1, 2, 3], 64, "another target"), ({}, [0, 2, 3], 64, r"layers \[0, 2, 3, 4\], the draft reads \[1, 2, 3, 4\]"),
    ({}, [1, 2, 3], 32, r"states are BF16 \[92, 4, 32\], not .*\[92, 4, 64\]")])
def test_states_of_another_target_or_of_other_layers_are_refused_before_a_step(stage, tmp_path, target, aux_layers, hidden, words):
    tiny_llama(tmp_path / "another", **target)
    section = stage.experiment.target.model_copy(update={"model": str(tmp_path / "another")})
    captured = [Conversation(f"{split}{i}", "topic", split, torch.arange(3, 27), 6, "stop", torch.ones(23, 4, hidden, dtype=torch.bfloat16))
                for split in ("train", "choose") for i in range(2)]
    write_shard(stage.captured / "shard-00000.safetensors", captured, captured_from(section, aux_layers))
    write_index(stage.captured)
    with pytest.raises(ArtifactError, match=words) as caught:
        stage()
    assert caught.value.where == str(stage.captured / "shard-00000.safetensors") and stage.steps == [0]


def test_the_vocabulary_holds_every_token_that_is_marked_as_special_and_is_refused_if_it_cannot(stage, tmp_path):
    path = tmp_path / "tiny" / "tokenizer.json"
    document = json.loads(path.read_text())
    words = {token_id: word for word, token_id in document["model"]["vocab"].items()}
    document["added_tokens"] += [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in range(480, 500)]
    path.write_text(json.dumps(document))
    answers = [torch.randint(3, 400, (2000,), generator=torch.Generator().manual_seed(0))]

    def chosen(size):
        experiment = stage.experiment.model_copy(update={"draft": stage.experiment.draft.model_copy(update={"vocab_size": size})})
        return train_module.draft_vocabulary(experiment, tmp_path / "tiny", answers).tolist()

    assert {0, 1, 2, *range(480, 500)} <= set(chosen(64)) and chosen(23) == [0, 1, 2, *range(480, 500)]
    with pytest.raises(ExperimentError, match="22 tokens cannot hold the 23 special tokens") as caught:
        chosen(22)
    assert caught.value.where == "draft.vocab_size"
    with pytest.raises(ExperimentError, match="5000 tokens are more than the target has, 512"):
        chosen(5000)


def test_the_curve_tells_of_every_position(stage):
    metrics = stage(steps=20, evaluations=1)
    curve, _ = stage.tables()
    assert [row["step"] for row in curve] == [1, 10, 20] and metrics["conversations"] == 6 and metrics["dropped"] == 0
    for row in curve:
        assert row["loss_1"] > 0 and row["loss_2"] > 0 and row["grad_norm"] > 0 and row["memory_bytes"] > 2**20 and row["data_wait_s"] >= 0
        assert row["cumulative_1"] == row["accuracy_1"] == row["conditional_1"]
        assert row["simulated_acceptance_length"] == pytest.approx(1 + row["cumulative_1"] + row["cumulative_2"])
        assert row["cumulative_2"] <= row["cumulative_1"]


def test_tensorboard_has_the_curve_whatever_struck_the_training(stage):
    with pytest.raises(Killed):
        stage(strike=killed, at=12, checkpoint_every_s=STEP_S, steps=20, evaluations=1)
    stage(steps=20, evaluations=1)
    events = EventAccumulator(str(stage.out / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 10, 20] and "train/simulated_acceptance_length" in events.Tags()["scalars"]


def test_training_twice_gives_the_same_draft(stage):
    stage("one")
    first = stage.draft()
    stage("another")
    assert stage.draft() == first and stage.steps == [6, 6]


def test_a_loss_that_stops_being_a_number_ends_the_training_and_says_what_to_lower(stage):
    with pytest.raises(StageError, match="(loss|norm of the gradient) is (nan|inf) at step .*, in the batch of the prompts train.*is kept") as caught:
        stage(lr=1e30, steps=40)
    assert "train.lr" in caught.value.fix and not (stage.out / "draft").exists()


def test_a_batch_that_makes_no_number_leaves_a_checkpoint_of_the_last_good_step(stage):
    spoiled = []
    with pytest.raises(StageError, match="is nan at step 4, .*; the checkpoint of step 3 is kept"):
        stage(strike=lambda: spoiled.append(True), at=3, spoil=spoiled)
    assert stage()["resumed_steps"] == [3] and stage.steps == [4, 3]


def test_weights_that_stop_being_numbers_are_neither_a_draft_nor_a_checkpoint(stage):
    """A step whose loss and gradient were numbers can go too far; nothing of the next one would tell where it is the last."""
    for evaluations in (1, 3):
        with pytest.raises(StageError, match="weights have become NaN or infinite"):
            stage(lr=1e38, steps=evaluations, evaluations=evaluations, decay_frac=0.0)
        assert not (stage.out / "draft").exists() and not stage.pieces()


def test_a_target_in_float16_trains_a_draft(stage):
    target = stage.experiment.target.model_copy(update={"dtype": "float16"})
    stage.experiment = stage.experiment.model_copy(update={"target": target})
    conversations = [replace(each, states_TLH=each.states_TLH.to(torch.float16)) for split in ("train", "choose") for each in Captured(stage.captured, split)]
    write_shard(stage.captured / "shard-00000.safetensors", conversations, captured_from(target, [1, 2, 3]))
    for precision in ("bfloat16", "float32"):
        stage(precision, precision=precision)
        weights = load_file(stage.out / "draft" / "model.safetensors")
        assert weights["fc.weight"].dtype == torch.float16 and all(bool(torch.isfinite(each).all()) for each in weights.values() if each.is_floating_point())


@pytest.mark.parametrize("seed", range(4))
def test_a_training_that_is_struck_at_any_steps_ends_as_if_it_had_not_been(stage, signals, seed):
    faults = random.Random(seed)
    section = {"steps": 30, "evaluations": 1 + 2 * (seed % 2)}  # with a single one the draft's weights are those of the last step
    expected = stage("uninterrupted", **section)
    draft, tables = stage.draft(), stage.tables()
    for fault in faults.sample([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, "killed", "killed and its checkpoint damaged"], 4):
        raise_when_terminated()
        strike = functools.partial(signal.raise_signal, fault) if isinstance(fault, signal.Signals) else killed
        with pytest.raises((KeyboardInterrupt, Killed)):
            stage(strike=strike, at=faults.randint(0, 6), checkpoint_every_s=faults.choice([STEP_S, 3 * STEP_S]), **section)
        if fault == "killed and its checkpoint damaged" and stage.pieces():
            os.truncate(stage.pieces()[-1], 10_000)
    metrics = stage(**section)
    assert stage.draft() == draft and metrics["resumed_steps"]
    # The time is the same as well: by the scripted clock a step takes the same in every attempt.
    assert stage.tables() == [[timed(row) for row in rows] for rows in tables] and metrics == timed(expected) | {"resumed_steps": metrics["resumed_steps"]}


def timed(row: dict) -> dict:
    """The row, with times that are equal up to rounding."""
    return {name: pytest.approx(value) if name in ("elapsed_s", "tokens_s", "data_wait_s") else pytest.approx(value, rel=2, abs=1) if name in ("memory_bytes", "serving_s") else value for name, value in row.items()}


def test_an_interrupted_training_repeats_no_step(stage, signals):
    for number, at in ((signal.SIGTERM, 1), (signal.SIGINT, 0)):
        raise_when_terminated()
        with pytest.raises(KeyboardInterrupt):
            stage(strike=functools.partial(signal.raise_signal, number), at=at)
    assert stage()["resumed_steps"] == [2, 3] and stage.steps == [2, 1, 3]


def test_a_killed_training_repeats_what_came_after_its_last_checkpoint(stage):
    for at, every_s in ((5, 3 * STEP_S), (2, 1.5 * STEP_S)):
        with pytest.raises(Killed):
            stage(strike=killed, at=at, checkpoint_every_s=every_s, steps=12, evaluations=1)
    assert stage(steps=12, evaluations=1)["resumed_steps"] == [3, 5] and stage.steps == [5, 2, 7]


def test_an_evaluation_leaves_a_checkpoint(stage):
    with pytest.raises(Killed):
        stage(strike=killed, at=3)
    assert stage()["resumed_steps"] == [2] and stage.steps == [3, 4]


def test_a_damaged_checkpoint_leaves_the_one_before(stage):
    with pytest.raises(Killed):
        stage(strike=killed, at=5, checkpoint_every_s=STEP_S, evaluations=1)
    older, newer = stage.pieces()
    newer.write_bytes(newer.read_bytes()[:-1] + b"?")
    assert stage(evaluations=1)["resumed_steps"] == [4] and stage.steps == [5, 2]


def test_a_kill_while_the_acceptance_is_measured_repeats_no_step(stage):
    stage("uninterrupted")
    draft, tables = stage.draft(), stage.tables()

    def dies(folder, prompts, k):
        raise Killed

    with pytest.raises(Killed):
        stage(served=dies)
    metrics = stage()
    assert stage.steps == [6, 6, 0] and metrics["resumed_steps"] == [6] and metrics["served"] == SERVED.as_metrics()
    assert stage.draft() == draft and stage.tables() == [[timed(row) for row in rows] for rows in tables]


def test_a_time_budget_that_ends_at_the_first_step_leaves_a_curve_of_it(stage):
    metrics = stage(steps=1000, time_budget_s=1e-9)
    (row,) = stage.tables()[0]
    assert metrics["steps"] == row["step"] == 1 and row["loss_2"] > 0 and 0 <= row["accuracy_1"] <= 1


def test_a_time_budget_leaves_as_many_candidates_as_the_steps_would(stage):
    metrics = stage(steps=1000, time_budget_s=7.5 * STEP_S, evaluations=4, served_checkpoints=3)
    assert metrics["steps"] == 8 and [each["step"] for each in metrics["candidates"]] == [4, 6, 8]
    assert {row["step"] for row in stage.tables()[1]} == {2, 4, 6, 8}


def test_the_end_of_a_time_budget_is_told_in_steps():
    section = TrainSection(steps=100, time_budget_s=10.0)
    assert [Training(steps=steps, elapsed_s=elapsed_s).expected_steps(section) for steps, elapsed_s in ((0, 0.0), (10, 5.0), (30, 1.0), (7, 11.0))] == [100, 20, 100, 7]
    assert Training(steps=10, elapsed_s=5.0).expected_steps(TrainSection(steps=100)) == 100


def test_a_vocabulary_that_covers_little_is_warned_of(stage, capsys):
    metrics = stage()
    assert metrics["vocab_coverage_frac"] < 0.9 and "counted from 6 answers, covers" in capsys.readouterr().out


def test_the_time_budget_counts_over_attempts(stage, signals):
    budget = {"steps": 20, "time_budget_s": 4.5 * STEP_S, "evaluations": 1}
    assert stage("uninterrupted", **budget)["steps"] == 5
    draft = stage.draft()
    raise_when_terminated()
    with pytest.raises(Terminated):
        stage(strike=functools.partial(signal.raise_signal, signal.SIGTERM), at=2, **budget)
    metrics = stage(**budget)
    assert metrics["steps"] == 5 and stage.steps == [5, 3, 2] and metrics["elapsed_s"] == pytest.approx(5 * STEP_S) and stage.draft() == draft


@pytest.mark.parametrize("room_bytes", [0, 100, 10_000, 40_000])
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_is_named(room_bytes):
    class Filling(io.BytesIO):
        def write(self, content) -> int:
            if self.tell() + len(content) > room_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(content)

    with pytest.raises(OSError, match="No space left on device"):
        save({"written": 1, "weights": small_draft().state_dict()}, Filling())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_a_full_disk_is_named(stage, tmp_path):
    with attempt(tmp_path / "store", stage.experiment) as run:
        (run.work / "checkpoint.pt").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            StageDesk(run).keep({"written": 1, "weights": small_draft().state_dict()})
