from __future__ import annotations

import pytest
import torch

from raysd.errors import ArtifactError
from raysd.hidden_states.shards import Captured, Conversation, read_rows, write_index, write_shard
from tests.tiny_drafts import conversation


def with_split(c: Conversation, split: str) -> Conversation:
    return Conversation(c.prompt_id, c.topic, split, c.token_ids, c.prompt_tokens, c.finish_reason, c.states_TLH.to(torch.bfloat16))


def test_conversations_come_back_as_they_were_written_over_several_shards(tmp_path):
    written = [with_split(conversation(10 + i, 3, seed=i), "choose" if i == 2 else "train") for i in range(5)]
    write_shard(tmp_path / "shard-00000.safetensors", written[:3])
    write_shard(tmp_path / "shard-00001.safetensors", written[3:])
    write_index(tmp_path)
    learn, choose = Captured(tmp_path, "train"), Captured(tmp_path, "choose")
    assert [len(learn), len(choose)] == [4, 1]
    for got, put in zip([learn[0], learn[1], choose[0], learn[2], learn[3]], written, strict=True):
        assert (got.prompt_id, got.topic, got.split, got.prompt_tokens, got.finish_reason) == (put.prompt_id, put.topic, put.split, put.prompt_tokens, put.finish_reason)
        assert torch.equal(got.token_ids, put.token_ids) and torch.equal(got.states_TLH, put.states_TLH)
    assert [len(tokens) for tokens, _ in learn.token_ids()] == [10, 11, 13, 14]


def test_a_truncated_shard_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    write_shard(path, [conversation(12, 3)])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="shard-00000"):
        read_rows(path)


def test_the_loss_mask_marks_the_answer(tmp_path):
    from safetensors.torch import load_file

    write_shard(tmp_path / "shard-00000.safetensors", [conversation(6, 4), conversation(5, 2)])
    assert load_file(tmp_path / "shard-00000.safetensors")["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
