"""The train stage on captured conversations of a tiny target, without an engine: what it keeps, writes, refuses, and how it goes on after an interruption."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from raysd.draft import train as train_module
from raysd.draft.acceptance import AcceptanceCounts
from raysd.draft.gradient import StepGradient
from raysd.draft.unfinished import NAMES, Checkpoints, Training
from raysd.errors import StageError
from raysd.experiment import load_experiment
from raysd.hidden_states.shards import Conversation, write_index, write_shard
from raysd.signals import TERMINATING, Terminated, raise_when_terminated, whole
from tests.stage_runs import attempt, piece
from tests.tiny_drafts import small_draft
from tests.tiny_models import tiny_llama

SERVED = AcceptanceCounts(10, 20, 5, (4, 1))
STEP_S = 10.0
"""What a step takes on the scripted clock."""


def served(folder: Path, prompts, k: int) -> AcceptanceCounts:
    assert (folder / "config.json").is_file() and len(prompts) == 2 and k == 2
    return SERVED


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
            def __call__(self, conversations):
                if stage.steps[-1] == at:
                    strike()
                stage.steps[-1] += 1
                stage.clock_s += STEP_S
                return super().__call__(conversations)

        self.steps.append(0)
        self.clock_s = 1e6 / len(self.steps)  # each attempt's clock starts anywhere
        experiment = self.experiment.model_copy(update={"train": self.experiment.train.model_copy(update=changes)})
        with pytest.MonkeyPatch.context() as patch, attempt(self.stores / store, experiment, {"capture": self.captured}, whole=whole) as run:
            patch.setattr(train_module, "StepGradient", Struck)
            self.out = run.out
            return train_module.train(run, served, clock=lambda: self.clock_s)

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
               "checkpoint_every_s": 1e9}
    document = experiment_document | {"target": {"model": str(tmp_path / "tiny"), "max_model_len": 128}, "train": section,
                                      "draft": {"vocab_size": 64, "aux_layers": [1, 2, 3], "intermediate_size": 128}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(document))
    generator = torch.Generator().manual_seed(0)
    captured = tmp_path / "captured"
    captured.mkdir()
    write_shard(captured / "shard-00000.safetensors", [
        Conversation(f"{split}{i}", "topic", split, torch.randint(3, 512, (24,), generator=generator), 6, "length",
                     torch.randn(23, 4, 64, generator=generator).to(torch.bfloat16))
        for split in ("train", "choose") for i in range(6)])
    write_index(captured)
    return Stage(load_experiment(tmp_path / "train.yaml"), captured, tmp_path / "stores")


@pytest.fixture
def signals():
    """The handlers that a job has, during a test."""
    before = {number: signal.getsignal(number) for number in (*TERMINATING, signal.SIGINT)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def killed():
    raise Killed


def test_the_checkpoint_of_the_longest_replayed_acceptance_is_kept(stage, monkeypatch):
    lengths, weights = iter([3, 9, 5]), []

    def scripted_replay(draft, conversations, k):
        weights.append(draft.fc.weight.detach().clone())
        accepted = next(lengths)
        return AcceptanceCounts(10, 20, accepted, (accepted, 0))

    monkeypatch.setattr(train_module, "replay", scripted_replay)
    metrics = stage()
    assert metrics["steps"] == 6 and metrics["best_step"] == 4 and metrics["resumed_steps"] == []
    assert metrics["replay"]["acceptance_length"] == pytest.approx(1.9) and metrics["served"] == SERVED.as_metrics()
    saved = load_file(stage.out / "draft" / "model.safetensors")["fc.weight"]
    assert torch.equal(saved, weights[1].to(saved.dtype)) and not torch.equal(saved, weights[2].to(saved.dtype))
    assert pq.read_table(stage.out / "evaluations.parquet")["step"].to_pylist() == [2, 2, 4, 4, 6, 6]


def test_training_twice_gives_the_same_draft(stage):
    stage("one")
    first = stage.draft()
    stage("another")
    assert stage.draft() == first and stage.steps == [6, 6]


def test_a_loss_that_stops_being_a_number_ends_the_training_and_says_what_to_lower(stage):
    with pytest.raises(StageError, match="loss is nan|loss is inf") as caught:
        stage(lr=1e30, steps=40)
    assert "train.lr" in caught.value.fix and not (stage.out / "draft").exists()


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
    return {name: pytest.approx(value) if name in ("elapsed_s", "tokens_s") else value for name, value in row.items()}


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


def test_an_evaluation_that_finds_a_better_draft_leaves_a_checkpoint(stage):
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
    def dies(folder, prompts, k):
        raise Killed

    with pytest.raises(Killed):
        stage(served=dies)
    draft, tables = stage.draft(), stage.tables()
    metrics = stage()
    assert stage.steps == [6, 0] and metrics["resumed_steps"] == [6] and metrics["served"] == SERVED.as_metrics()
    assert stage.draft() == draft and stage.tables() == tables


def test_the_time_budget_counts_over_attempts(stage, signals):
    budget = {"steps": 20, "time_budget_s": 4.5 * STEP_S, "evaluations": 1}
    assert stage("uninterrupted", **budget)["steps"] == 5
    draft = stage.draft()
    raise_when_terminated()
    with pytest.raises(Terminated):
        stage(strike=functools.partial(signal.raise_signal, signal.SIGTERM), at=2, **budget)
    metrics = stage(**budget)
    assert metrics["steps"] == 5 and stage.steps == [5, 3, 2] and metrics["elapsed_s"] == pytest.approx(5 * STEP_S) and stage.draft() == draft


def test_random_numbers_go_on_where_the_checkpoint_was_kept(stage, tmp_path):
    draft = small_draft()
    optimiser = torch.optim.AdamW(draft.parameters())
    with attempt(tmp_path / "store", stage.experiment) as run:
        Checkpoints(run, draft, optimiser).keep(Training(steps=1))
        expected = torch.rand(3)
        torch.manual_seed(5)
        assert Checkpoints(run, draft, optimiser).resume() == Training(steps=1, resumed_steps=[1])
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_a_full_disk_is_named(stage, tmp_path):
    draft = small_draft()
    with attempt(tmp_path / "store", stage.experiment) as run:
        (run.work / "checkpoint.pt").symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left on device"):
            Checkpoints(run, draft, torch.optim.AdamW(draft.parameters())).keep(Training(steps=1))
