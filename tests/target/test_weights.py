"""A target's tensors, wherever its checkpoint keeps them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysd.errors import ExperimentError, TargetError
from raysd.target.shape import read_shape
from raysd.target.weights import read_embedding_and_head
from tests.tiny_models import tiny_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def written(llama, tmp_path):
    """Writes the tiny Llama's tensors under other names or with other content, in one file or several."""
    def write(change, files: int = 1):
        tensors = change(load_file(llama / "model.safetensors"))
        (tmp_path / "config.json").write_text((llama / "config.json").read_text())
        names = sorted(tensors)
        weight_map = {name: f"model-{i % files:05d}.safetensors" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
        if files > 1:
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return tmp_path
    return write


def named(prefix: str, head: str):
    return lambda tensors: {head if name == "lm_head.weight" else name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(("prefix", "head"), [("model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight"),
                                              ("model.language_model.", "lm_head.weight")])
@pytest.mark.parametrize("files", [1, 3])
def test_prefixes_and_shards_make_no_difference(llama, written, prefix, head, files):
    tensors = load_file(llama / "model.safetensors")

    def with_predictor(original):  # DeepSeek-V3's multi-token predictor is one layer more, with copies of embedding and head
        return named(prefix, head)(original) | {f"{prefix}layers.4.embed_tokens.weight": torch.zeros(2, 2), f"{prefix}layers.4.shared_head.norm.weight": torch.zeros(2)}

    folder = written(with_predictor, files)
    embedding, norm, found_head = read_embedding_and_head(folder, read_shape(folder))
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"]) and torch.equal(norm, tensors["model.norm.weight"])
    assert torch.equal(found_head, tensors["lm_head.weight"])


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def test_a_tied_head_is_the_embedding_and_a_missing_one_is_an_error(llama, written):
    shape = read_shape(llama)
    assert shape.tie_word_embeddings is False
    folder = written(without_head)
    for tied in (True, None):
        embedding, _, head = read_embedding_and_head(folder, dataclasses.replace(shape, tie_word_embeddings=tied))
        assert torch.equal(embedding, head)
    with pytest.raises(ExperimentError, match="no tensors .*lm_head.weight"):
        read_embedding_and_head(folder, shape)
    untied = written(lambda tensors: tensors)
    assert not torch.equal(*read_embedding_and_head(untied, dataclasses.replace(shape, tie_word_embeddings=None))[::2])


def test_a_quantized_head_is_an_error(written):
    folder = written(lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)})
    with pytest.raises(ExperimentError, match="lm_head.weight.*stored as F8_E4M3"):
        read_embedding_and_head(folder, read_shape(folder))


def test_a_head_of_another_size_than_the_configs_is_an_error(written):
    folder = written(lambda tensors: tensors | {"lm_head.weight": tensors["lm_head.weight"][:100].clone()})
    with pytest.raises(ExperimentError, match=r"lm_head.weight is \[100, 64\], its config.json says \[512, 64\]"):
        read_embedding_and_head(folder, read_shape(folder))


def test_a_damaged_file_is_told(written):
    folder = written(lambda tensors: tensors)
    (folder / "model-00000.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(TargetError, match="cannot be read"):
        read_embedding_and_head(folder, read_shape(folder))
