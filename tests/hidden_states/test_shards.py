from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raysd.errors import ArtifactError
from raysd.hidden_states.shards import Captured, Conversation, Origin, check_shards, read_rows, write_index, write_shard
from tests.tiny_drafts import ORIGIN, TARGET_VOCAB, conversation


def with_split(c: Conversation, split: str) -> Conversation:
    return Conversation(c.prompt_id, c.topic, split, c.token_ids, c.prompt_tokens, c.finish_reason, c.states_TLH.to(torch.bfloat16))


def test_conversations_come_back_as_they_were_written_over_several_shards(tmp_path):
    written = [with_split(conversation(10 + i, 3, seed=i), "choose" if i == 2 else "train") for i in range(5)]
    write_shard(tmp_path / "shard-00000.safetensors", written[:3], ORIGIN)
    write_shard(tmp_path / "shard-00001.safetensors", written[3:], ORIGIN)
    write_index(tmp_path)
    learn, choose = Captured(tmp_path, "train"), Captured(tmp_path, "choose")
    assert [len(learn), len(choose)] == [4, 1]
    for got, put in zip([learn[0], learn[1], choose[0], learn[2], learn[3]], written, strict=True):
        assert (got.prompt_id, got.topic, got.split, got.prompt_tokens, got.finish_reason) == (put.prompt_id, put.topic, put.split, put.prompt_tokens, put.finish_reason)
        assert torch.equal(got.token_ids, put.token_ids) and torch.equal(got.states_TLH, put.states_TLH)
    assert [len(tokens) for tokens, _ in learn.token_ids()] == [10, 11, 13, 14]


def test_a_truncated_shard_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "shard-00000.safetensors"
    write_shard(path, [conversation(12, 3)], ORIGIN)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match="shard-00000"):
        read_rows(path)


def test_the_loss_mask_marks_the_answer(tmp_path):
    from safetensors.torch import load_file

    write_shard(tmp_path / "shard-00000.safetensors", [conversation(6, 4), conversation(5, 2)], ORIGIN)
    assert load_file(tmp_path / "shard-00000.safetensors")["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]


def written(folder, origin=ORIGIN, **changes):
    """Two shards of three conversations each; the second has the changes."""
    for number in (0, 1):
        write_shard(folder / f"shard-0000{number}.safetensors", [conversation(10 + i, 3, seed=3 * number + i, **(changes if number else {})) for i in range(3)],
                    origin if number else ORIGIN)
    write_index(folder)


def check(folder):
    check_shards(folder, ORIGIN, hidden_size=32, vocab_size=TARGET_VOCAB)


def test_shards_of_the_target_pass(tmp_path):
    written(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda folder: written(folder, hidden=16), r"states are F32 \[30, 4, 16\], not .*\[30, 4, 32\]"),
    (lambda folder: written(folder, slots=3), r"states are F32 \[30, 3, 32\], not .*\[30, 4, 32\]"),
    (lambda folder: written(folder, Origin(ORIGIN.target, (1, 2, 4, 6))), r"layers \[1, 2, 4, 6\], the draft reads \[1, 2, 3, 6\]"),
    (lambda folder: written(folder, Origin("f" * 32, ORIGIN.layer_ids)), "another target")], ids=["width", "layers", "layer ids", "target"])
def test_a_shard_of_something_else_is_named(tmp_path, spoil, words):
    spoil(tmp_path)
    with pytest.raises(ArtifactError, match=words) as caught:
        check(tmp_path)
    assert caught.value.where == str(tmp_path / "shard-00001.safetensors") and "capture anew" in caught.value.fix


def rewritten(path, change):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    metadata = safe_open(path, "pt").metadata()
    save_file(change(load_file(path)), path, metadata=metadata)


@pytest.mark.parametrize(("damage", "words"), [
    (lambda path: rewritten(path, lambda tensors: tensors | {"token_ids": tensors["token_ids"] + TARGET_VOCAB}), "token ids are from 9.*, the target's vocabulary has 96"),
    (lambda path: rewritten(path, lambda tensors: tensors | {"token_ids": tensors["token_ids"] - TARGET_VOCAB}), "token ids are from -"),
    (lambda path: rewritten(path, lambda tensors: tensors | {"token_ids": tensors["token_ids"].float()}), "token_ids are F32"),
    (lambda path: rewritten(path, lambda tensors: tensors | {"states": tensors["states"].to(torch.int8)}), "states are I8"),
    (lambda path: rewritten(path, lambda tensors: {"token_ids": tensors["token_ids"]}), "cannot be read"),
    (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read"),
    (lambda path: path.write_bytes((path.parent / "shard-00000.safetensors").read_bytes()), "does not hold the conversations that index.parquet lists"),
    (lambda path: path.unlink(), "cannot be read")], ids=["large ids", "small ids", "float ids", "int states", "no states", "cut off", "another", "absent"])
def test_a_damaged_shard_is_named(tmp_path, damage, words):
    written(tmp_path)
    damage(tmp_path / "shard-00001.safetensors")
    with pytest.raises(ArtifactError, match=words) as caught:
        check(tmp_path)
    assert caught.value.where == str(tmp_path / "shard-00001.safetensors")


def test_a_shard_that_is_damaged_later_is_named_when_it_is_read(tmp_path):
    written(tmp_path)
    captured, path = Captured(tmp_path, "train"), tmp_path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (lambda: captured[5], lambda: list(captured.token_ids())):
        with pytest.raises(ArtifactError) as caught:
            read()
        assert caught.value.where == str(path)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"PAR1"), lambda path: path.unlink(),
                                    lambda path: pq.write_table(pa.table({"shard": ["shard-00000.safetensors"]}), path)], ids=["damaged", "absent", "foreign"])
def test_an_index_that_is_none_is_named(tmp_path, damage):
    written(tmp_path)
    damage(tmp_path / "index.parquet")
    for read in (lambda: check(tmp_path), lambda: Captured(tmp_path, "train")):
        with pytest.raises(ArtifactError) as caught:
            read()
        assert caught.value.where == str(tmp_path / "index.parquet")
