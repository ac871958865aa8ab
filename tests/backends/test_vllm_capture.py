from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

from raysd.backends.process_group import group_members
from raysd.backends.vllm_capture import capture_engine, engine_arguments
from raysd.errors import EngineError, ExperimentError
from raysd.experiment import Experiment, load_experiment
from raysd.hidden_states.capture import Request
from tests.tiny_models import tiny_llama


@pytest.fixture
def experiment(experiment_document, tmp_path) -> Experiment:
    capture = {"engines": 2, "concurrency": 3, "max_tokens": 4, "kv_cache_bytes": 2**28}
    document = experiment_document | {"capture": capture, "target": {"model": str(tiny_llama(tmp_path / "tiny")), "max_model_len": 128}}
    path = tmp_path / "capture.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_experiment(path)


def test_engines_share_the_memory_and_the_conversations(experiment):
    arguments = engine_arguments(experiment, Path("/t"), [1], Path("/f"))
    assert arguments["kv_cache_memory_bytes"] == 2**27 and arguments["max_num_seqs"] == 2
    assert arguments["enable_prefix_caching"] is False and arguments["enable_chunked_prefill"] is False


def test_two_engines_answer_every_prompt_once_and_one_that_dies_is_an_error(experiment, tmp_path):
    prompts, threads = [Request([5 + i, 6, 7], 0) for i in range(9)], torch.get_num_threads()
    experiment = experiment.model_copy(update={"capture": experiment.capture.model_copy(update={"temperature": 1.0})})
    with capture_engine(experiment, tmp_path / "tiny", [1, 2, 3, 4], tmp_path) as engine:
        assert torch.get_num_threads() == 1  # more would spin on the engines' cores
        answers = sorted(engine.answers([prompts]), key=lambda answer: answer.index)
        assert [answer.index for answer in answers] == list(range(9))
        for answer, prompt in zip(answers, prompts, strict=True):
            assert answer.token_ids[:3] == prompt.token_ids and len(answer.token_ids) <= 7
            assert answer.states_TLH.shape == (len(answer.token_ids) - 1, 4, 64)
        sampled = {answer.index: answer.token_ids for answer in engine.answers([[Request([5, 6, 7], seed) for seed in (1, 2, 3, 1)]])}
        assert sampled[0] == sampled[3] and len({tuple(token_ids) for token_ids in sampled.values()}) == 3  # each has random numbers of its own
        groups = [worker._process.pid for worker in engine._workers]
        assert all(map(group_members, groups))
        os.kill(groups[1], signal.SIGKILL)
        with pytest.raises(EngineError, match="ended with exit code -9, SIGKILL: as when memory runs out"):
            list(engine.answers([prompts]))
    assert not any(map(group_members, groups))
    assert not (tmp_path / "states").exists() and torch.get_num_threads() == threads


def test_an_answer_and_its_states_depend_on_their_group_alone(experiment, tmp_path):
    """So that a shard comes out the same whether or not others are captured before it in the same attempt."""
    section = experiment.capture.model_copy(update={"engines": 1, "concurrency": 8, "max_tokens": 48})
    experiment = experiment.model_copy(update={"capture": section})
    first, second = [Request([5 + i, *range(7, 9 + i)], 0) for i in range(7)], [Request([40 + i, 6, 7], 0) for i in range(2)]
    captured = []
    for groups in ([first, second], [second]):
        with capture_engine(experiment, tmp_path / "tiny", [1, 2, 3, 4], tmp_path) as engine:
            captured.append(sorted(engine.answers(groups), key=lambda answer: answer.index)[-len(second):])
    for together, alone in zip(*captured, strict=True):
        assert together.token_ids == alone.token_ids and torch.equal(together.states_TLH, alone.states_TLH)


def test_more_engines_than_cores_are_refused(experiment, tmp_path):
    crowd = experiment.model_copy(update={"capture": experiment.capture.model_copy(update={"engines": 10_000})})
    with pytest.raises(ExperimentError, match="cores"), capture_engine(crowd, tmp_path / "tiny", [1], tmp_path):
        pytest.fail("an engine started")


def test_an_engine_that_does_not_start_says_why_and_no_other_stays(experiment, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="(?s)did not start for capture.*empty"), capture_engine(experiment, tmp_path / "empty", [1], tmp_path):
        pytest.fail("an engine started without a model")
    assert not (tmp_path / "states").exists()
