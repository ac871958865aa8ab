"""A finished draft is compared with the target before an engine loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.errors import ExperimentError
from raysd.target.shape import read_shape

TARGET = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
DRAFT = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "vocab_size": 256, "draft_vocab_size": 128}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": np.zeros((config.get("hidden_size"), 3 * 64), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def target(tmp_path: Path):
    return read_shape(write(tmp_path / "target", TARGET))


@pytest.mark.parametrize(
    "change",
    [{}, {"draft_vocab_size": None}, {"hidden_size": 32, "target_hidden_size": 64}],
    ids=["as trained", "whole vocabulary", "narrower than its target"],
)
def test_a_draft_of_this_target_fits(tmp_path: Path, target, change: dict[str, Any]):
    check_draft_fit(write(tmp_path / "draft", {**DRAFT, **change}), target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 128}, "width 128"),
        ({"architectures": 5}, "architectures = 5"),
        ({"architectures": "LlamaForCausalLMEagle3"}, "not a list"),
        ({"draft_vocab_size": "256"}, "draft_vocab_size is '256'"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, r"layers \[2, 15, 27\] of a target that has 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "reads 2 layers"),
        ({"vocab_size": 300}, "vocab_size is 300"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM, not one of"),
        ({"architectures": None}, "not named"),
        ({"draft_vocab_size": 512}, "draft_vocab_size is 512"),
    ],
)
def test_a_draft_of_another_target_is_refused(tmp_path: Path, target, change: dict[str, Any], words: str):
    draft = write(tmp_path / "draft", {**DRAFT, **change})
    with pytest.raises(ExperimentError, match=words) as caught:
        check_draft_fit(draft, target)
    assert str(draft) in caught.value.what and caught.value.where == "draft.checkpoint"


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"fc.weight": (64, 100)}, r"fc is \[64, 100\]"),
        ({"fc.weight": (32, 192)}, r"fc is \[32, 192\]"),
        ({"other.weight": (64, 192)}, "hold no fc"),
        ({"fc.weight": (64, 192), "lm_head.weight": (256, 64)}, r"lm_head is \[256, 64\], not \[128, 64\]"),
        ({"fc.weight": (64, 192), "d2t": (64,)}, r"d2t is \[64\], not \[128\]"),
    ],
)
def test_weights_of_another_shape_than_the_config_says_are_refused(tmp_path: Path, target, tensors: dict[str, tuple[int, ...]], words: str):
    draft = write(tmp_path / "draft", DRAFT)
    save_file({name: np.zeros(shape, np.float32) for name, shape in tensors.items()}, draft / "model.safetensors")
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(draft, target)
    (draft / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ExperimentError, match="cannot be read"):
        check_draft_fit(draft, target)


def test_a_folder_that_is_no_draft_is_refused(tmp_path: Path):
    with pytest.raises(ExperimentError, match="cannot be read"):
        identify_draft(tmp_path / "absent")
    draft = write(tmp_path / "draft", DRAFT)
    (draft / "model.safetensors").unlink()
    with pytest.raises(ExperimentError, match="no safetensors"):
        identify_draft(draft)


def test_the_identity_follows_the_content_and_not_the_path(tmp_path: Path):
    first, second = write(tmp_path / "one", DRAFT), write(tmp_path / "two", DRAFT)
    assert identify_draft(first) == identify_draft(second)
    (second / "model.safetensors").write_bytes(b"weightz")
    assert identify_draft(first) != identify_draft(second)
