"""The train stage on captured conversations of a tiny target, without an engine: what it keeps, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from raysd.artifacts.stage import StageRun
from raysd.draft import train as train_module
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import StageError
from raysd.experiment import load_experiment
from raysd.hidden_states.shards import Conversation, write_index, write_shard
from tests.tiny_models import tiny_llama

SERVED = AcceptanceCounts(10, 20, 5, (4, 1))


@pytest.fixture
def stage(experiment_document, tmp_path) -> StageRun:
    tiny_llama(tmp_path / "tiny")
    section = {"steps": 6, "ttt_steps": 2, "conversations_per_step": 2, "evaluations": 3, "served_k": 2, "lr": 1e-2, "warmup_frac": 0.0}
    document = experiment_document | {"target": {"model": str(tmp_path / "tiny"), "max_model_len": 128}, "draft": {"vocab_size": 64, "aux_layers": [1, 2, 3]},
                                      "train": section}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(document))
    generator = torch.Generator().manual_seed(0)
    captured = tmp_path / "captured"
    captured.mkdir()
    write_shard(captured / "shard-00000.safetensors", [
        Conversation(f"{split}{i}", "topic", split, torch.randint(3, 512, (24,), generator=generator), 6, "length",
                     torch.randn(23, 4, 64, generator=generator).to(torch.bfloat16))
        for split in ("train", "choose") for i in range(6)])
    write_index(captured)
    for folder in ("work", "out"):
        (tmp_path / folder).mkdir()
    return StageRun(load_experiment(tmp_path / "train.yaml"), {"capture": captured}, tmp_path / "work", tmp_path / "out", lambda *a, **k: None)


def served(folder: Path, prompts, k: int) -> AcceptanceCounts:
    assert (folder / "config.json").is_file() and len(prompts) == 2 and k == 2
    return SERVED


def test_the_checkpoint_of_the_longest_replayed_acceptance_is_kept(stage, monkeypatch):
    lengths, weights = iter([3, 9, 5]), []

    def scripted_replay(draft, conversations, k):
        weights.append(draft.fc.weight.detach().clone())
        accepted = next(lengths)
        return AcceptanceCounts(10, 20, accepted, (accepted, 0))

    monkeypatch.setattr(train_module, "replay", scripted_replay)
    metrics = train_module.train(stage, served)
    assert metrics["steps"] == 6 and metrics["best_step"] == 4
    assert metrics["replay"]["acceptance_length"] == pytest.approx(1.9) and metrics["served"] == SERVED.as_metrics()
    saved = load_file(stage.out / "draft" / "model.safetensors")["fc.weight"]
    assert torch.equal(saved, weights[1].to(saved.dtype)) and not torch.equal(saved, weights[2].to(saved.dtype))
    assert pq.read_table(stage.out / "evaluations.parquet")["step"].to_pylist() == [2, 2, 4, 4, 6, 6]


def test_training_twice_gives_the_same_draft(stage, tmp_path):
    train_module.train(stage, served)
    first = (stage.out / "draft" / "model.safetensors").read_bytes()
    train_module.train(stage, served)
    assert (stage.out / "draft" / "model.safetensors").read_bytes() == first


def test_a_loss_that_stops_being_a_number_ends_the_training_and_says_what_to_lower(stage):
    wild = stage.experiment.model_copy(update={"train": stage.experiment.train.model_copy(update={"lr": 1e30, "steps": 40})})
    with pytest.raises(StageError, match="loss is nan|loss is inf") as caught:
        train_module.train(StageRun(wild, stage.inputs, stage.work, stage.out, stage.progress), served)
    assert "train.lr" in caught.value.fix and not (stage.out / "draft").exists()
