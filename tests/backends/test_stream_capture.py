"""The engines of a stream on a real Ray, which outside of a job is one of their own: what the queue holds at most, that answers are a capture's, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import deque
from pathlib import Path

import psutil
import pytest
import torch
import yaml

from raysd.backends.memory_folder import MEMORY, check_memory, memory_folder
from raysd.backends.ray_driver import connected
from raysd.backends.stream_capture import CHECKPOINT_BYTES, actor_options, stream_engine
from raysd.backends.vllm_capture import capture_engine
from raysd.draft.streaming import Arrival
from raysd.errors import ExperimentError, StageError, TryAgainError
from raysd.experiment import Experiment, load_experiment
from raysd.experiment.hardware import StageResources
from raysd.hidden_states.capture import Request
from raysd.hidden_states.queue import MostBytes
from tests.tiny_engine import tiny_engine
from tests.tiny_models import tiny_llama

TOKENS, LAYERS, HIDDEN = 64, 4, 512
MOST = MostBytes((TOKENS + 3) * LAYERS * HIDDEN * 2, 6 * (TOKENS + 3) * LAYERS * HIDDEN * 2, 1)
QUEUE_BYTES = 2**20
GROUPS = [[Request([5 + 6 * g + i, 6, 7], i) for i in range(6)] for g in range(5)]
PATIENCE_S = 60


@pytest.fixture
def experiment(experiment_document, tmp_path) -> Experiment:
    capture = {"mode": "stream", "engines": 2, "concurrency": 6, "max_tokens": TOKENS, "kv_cache_bytes": 2**28, "queue_bytes": QUEUE_BYTES}
    target = {"model": str(tiny_llama(tmp_path / "tiny", hidden=HIDDEN)), "max_model_len": 128}
    path = tmp_path / "capture.yaml"
    path.write_text(yaml.safe_dump(experiment_document | {"capture": capture, "target": target}))
    return load_experiment(path)


def in_memory() -> dict[Path, int]:
    """The folders of streams and the bytes in each."""
    return {folder: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in MEMORY.glob("raysd-*")}


def engines() -> list[psutil.Process]:
    """The processes of this test's engines, which are the actor's descendants."""
    return [process for process in psutil.Process().children(recursive=True) if "capture_worker" in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # Ray's processes come and go
        return []


def until(true, what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up, what
        time.sleep(0.2)


def taken(arrival: Arrival) -> tuple[Arrival, torch.Tensor]:
    """An answer that holds no place in the queue, and its states."""
    return arrival._replace(states=None), arrival.states()


@pytest.mark.slow
def test_a_training_that_does_not_take_them_leaves_a_queue_and_a_group_and_answers_are_a_captures(experiment, tmp_path):
    import ray

    before = in_memory()
    with capture_engine(experiment, tmp_path / "tiny", [1, 2, 3, 4], tmp_path) as engine:
        expected = {answer.index: answer for answer in engine.answers(GROUPS)}
    with stream_engine(experiment, [1, 2, 3, 4], MOST) as stream:
        (folder,) = in_memory().keys() - before.keys()
        answers = map(taken, stream.answers(GROUPS))
        found = [next(answers)]
        time.sleep(10)  # the engines need less for all the groups
        used_bytes = ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]
        assert 0 < in_memory()[folder] <= MOST.group and 0 < used_bytes <= QUEUE_BYTES
        found += answers
        assert in_memory()[folder] == 0
        started = engines()
    assert [answer.index // 6 for answer, _ in found] == [g for g in range(5) for _ in range(6)] and {answer.index for answer, _ in found} == set(range(30))
    for answer, states in found:
        same = expected[answer.index]
        assert answer.token_ids == same.token_ids and torch.equal(states, same.states_TLH) and answer.finish_reason == same.finish_reason
    assert len(started) >= 2 and in_memory().keys() <= before.keys()
    until(lambda: not any(process.is_running() for process in started), "the engines have ended")


@pytest.mark.slow
def test_states_that_are_held_for_a_worker_keep_their_place_in_the_queue(experiment):
    import ray

    def used_bytes() -> float:
        return ray.cluster_resources()["object_store_memory"] - ray.available_resources()["object_store_memory"]

    with stream_engine(experiment, [1, 2, 3, 4], MOST, tiny_engine) as stream:
        answers = stream.answers(GROUPS)
        held = deque([next(answers), next(answers)])  # of three places
        for _ in range(len(GROUPS) * 6 - 2):
            held.append(next(answers))
            assert held.popleft().states().shape[1:] == (LAYERS, HIDDEN)
            assert len(stream._arrived) == 2
        until(lambda: used_bytes() <= 2 * MOST.conversation, "the others are gone")
        assert used_bytes() > 0 and next(answers, None) is None
        held.clear()
        until(lambda: used_bytes() == 0, "all are gone")


@pytest.mark.slow
@pytest.mark.parametrize("strike", ["kill -9", "ray.kill"])
def test_an_actor_that_is_killed_is_told_of_and_leaves_neither_processes_nor_memory(experiment, strike):
    import ray

    before = in_memory()
    experiment = experiment.model_copy(update={"capture": experiment.capture.model_copy(update={"engines": 1})})
    with pytest.raises(TryAgainError, match="the process of the capture was lost"), stream_engine(experiment, [1, 2, 3, 4], MOST) as stream:
        answers = stream.answers(GROUPS)
        next(answers)
        started = [(process, process.ppid()) for process in engines()]
        everything = [child for process, _ in started for child in [process, *process.children(recursive=True)]]
        if strike == "kill -9":
            os.kill(started[0][1], signal.SIGKILL)
        else:
            ray.kill(stream._actor)
        list(answers)
    until(lambda: in_memory().keys() <= before.keys(), "the states have been deleted")
    until(lambda: not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in everything), "the engines have ended")


def test_a_queue_that_is_too_large_for_the_object_store_is_refused(experiment):
    """Several workers also put pieces of their checkpoints, and conversations of the choose split, beside it."""
    largest = {}
    with connected("the test", "here"):  # one Ray for both, and so one store
        for workers in (1, 2):
            large = experiment.model_copy(update={"capture": experiment.capture.model_copy(update={"queue_bytes": 2**44}),
                                                  "train": experiment.train.model_copy(update={"workers": workers})})
            with pytest.raises(ExperimentError, match="too much of Ray's object store") as caught, stream_engine(large, [1], MOST):
                pytest.fail("an engine started")
            largest[workers] = int(re.search(r"use at most (\d+)", caught.value.fix)[1])
    assert largest[1] - largest[2] == CHECKPOINT_BYTES + MOST.conversation


def test_too_little_memory_for_a_group_is_refused(experiment):
    with pytest.raises(StageError, match="are free in /dev/shm") as caught, stream_engine(experiment, [1], MostBytes(1, 2**60, 1)):
        pytest.fail("an engine started")
    assert caught.value.where == "capture.shard_conversations"


def test_a_folder_on_a_disk_is_no_memory(tmp_path):
    with pytest.raises(StageError, match="not memory"):
        check_memory(tmp_path, 1, "x")


def test_a_folder_in_memory_is_gone_on_exit():
    with memory_folder(1, "x") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "states").write_bytes(b"1")
    assert not folder.exists()


def test_the_actor_reserves_what_the_capture_stage_would_and_else_stays_here():
    assert actor_options(StageResources(), "ab" * 28)["scheduling_strategy"].node_id == "ab" * 28
    asked = actor_options(StageResources(gpus=8, custom={"node_b": 1}), "ab" * 28)
    assert asked["num_gpus"] == 8 and asked["resources"] == {"node_b": 1} and "scheduling_strategy" not in asked
