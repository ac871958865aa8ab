"""A draft's tensors against its config and the target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raysd.checks.draft_fit import check_draft_fit
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import ATTENTION, CONFIG, HIDDEN, LATENT, LATENT_ATTENTION, ROWS, TOKENS, VOCAB, tensors, without, write

WHOLE = CONFIG | {"draft_vocab_size": VOCAB}


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def with_a_second_layer() -> dict[str, np.ndarray]:
    second = tensors({"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}, "layers.1")
    return tensors(layer="layers.0") | {name: value for name, value in second.items() if name.startswith("layers.1.") and "hidden_norm" not in name}


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (CONFIG, tensors()),
        (CONFIG, tensors(layer="layers.0")),
        (CONFIG, {f"model.{name}": value for name, value in tensors().items()}),
        (CONFIG, tensors() | {"embed_tokens.weight": zeros(VOCAB, HIDDEN), "midlayer.self_attn.rotary_emb.inv_freq": zeros(8), "midlayer.self_attn.q_proj.bias": zeros(64)}),
        (CONFIG, without(tensors(), "t2d")),
        (WHOLE, without(tensors(), "t2d", "d2t", "lm_head.weight")),
        (WHOLE, without(tensors(), "t2d") | {"d2t": np.zeros(VOCAB, np.int64), "lm_head.weight": zeros(VOCAB, HIDDEN)}),
        (CONFIG | {"fc_norm": True}, tensors() | {f"fc_norm.{index}.weight": zeros(HIDDEN) for index in range(3)}),
        (CONFIG | {"eagle_config": {"norm_before_fc": True}}, tensors() | {"input_norm.weight": zeros(3 * HIDDEN)}),
        (CONFIG | {"num_hidden_layers": 2}, with_a_second_layer()),
        (CONFIG | {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}, tensors(ATTENTION | {"q_norm": (16,), "k_norm": (16,)})),
        (CONFIG | LATENT, tensors(LATENT_ATTENTION)),
        (CONFIG | LATENT | {"q_lora_rank": None}, tensors({name: shape for name, shape in LATENT_ATTENTION.items() if "q_" not in name or "kv" in name} | {"q_proj": (48, 128)})),
    ],
    ids=["midlayer", "layers.0", "model. in front", "with its embedding", "without t2d", "the target's head", "a whole vocabulary with d2t", "Eagle 3.1", "a norm before fc",
         "two layers", "Qwen3", "MLA", "MLA without a query bottleneck"],
)
def test_what_trainers_leave_fits(tmp_path: Path, target, config, made):
    check_draft_fit(write(tmp_path / "draft", config, made), target)


@pytest.mark.parametrize(
    ("config", "made", "words"),
    [
        (CONFIG, tensors() | {"fc.weight": zeros(64, 100)}, r"fc is \[64, 100\], not \[64, 192\]"),
        (CONFIG, without(tensors(), "fc.weight"), "hold no fc.weight"),
        (CONFIG, tensors() | {"lm_head.weight": zeros(VOCAB, HIDDEN)}, r"lm_head is \[256, 64\], not \[128, 64\]"),
        (CONFIG, without(tensors(), "lm_head.weight"), "hold no lm_head.weight"),
        (CONFIG, without(tensors(), "d2t"), "hold no d2t"),
        (CONFIG, tensors() | {"d2t": np.zeros(64, np.int64)}, r"d2t is \[64\], not \[128\]"),
        (CONFIG, tensors() | {"t2d": np.zeros(300, bool)}, r"t2d is \[300\], not \[256\]"),
        (CONFIG, tensors() | {"embed_tokens.weight": zeros(300, HIDDEN)}, r"embed_tokens is \[300, 64\], not \[256, 64\]"),
        (CONFIG | {"head_dim": 32}, tensors(), r"layers.0.self_attn.q_proj is \[64, 128\], not \[128, 128\]"),
        (CONFIG | {"num_key_value_heads": 4}, tensors(), r"k_proj is \[32, 128\], not \[64, 128\]"),
        (CONFIG, tensors(ATTENTION | {"v_proj": (64, 128)}), r"v_proj is \[64, 128\], not \[32, 128\]"),
        (CONFIG, tensors(ATTENTION | {"q_proj": (64, 64)}), r"q_proj is \[64, 64\], not \[64, 128\]"),
        (CONFIG | {"intermediate_size": 100}, tensors(), r"gate_proj is \[96, 64\], not \[100, 64\]"),
        (CONFIG | {"num_hidden_layers": 2}, tensors(), "hold no layers.1"),
        (CONFIG, with_a_second_layer(), r"layers.1.*no place.*num_hidden_layers = 1"),
        (CONFIG, without(tensors(), "midlayer.hidden_norm.weight"), "hold no layers.0.hidden_norm"),
        (CONFIG | {"fc_norm": True}, tensors(), "hold no fc_norm.0"),
        (CONFIG, tensors() | {"fc_norm.0.weight": zeros(HIDDEN)}, "fc_norm.0.weight, for which vLLM has no place"),
        (CONFIG | {"hidden_size": 32, "target_hidden_size": 64}, tensors(), "not"),
        (CONFIG | LATENT, tensors(), "hold no layers.0.self_attn.kv_a_proj"),
        (CONFIG | LATENT | {"kv_lora_rank": 32}, tensors(LATENT_ATTENTION), r"kv_a_proj_with_mqa is \[20, 128\], not \[36, 128\]"),
        (CONFIG, tensors() | {"model.norm.weight": zeros(HIDDEN)}, "norm.weight twice"),
    ],
)
def test_other_tensors_than_the_config_says_are_refused(tmp_path: Path, target, config, made, words):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", config, made), target)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d2t": TOKENS}, "ids, where vLLM expects offsets"),
        ({"d2t": np.arange(ROWS), "t2d": np.arange(VOCAB) < ROWS}, "ids, where vLLM expects offsets"),
        ({"d2t": TOKENS[::-1] - np.arange(ROWS)}, "do not ascend"),
        ({"d2t": np.full(ROWS, VOCAB - ROWS + 1)}, "do not ascend within the target's 256"),
        ({"d2t": np.full(ROWS, -1)}, "do not ascend"),
        ({"t2d": np.arange(VOCAB) < ROWS}, "t2d marks other tokens"),
        ({"t2d": np.zeros(VOCAB, bool)}, "t2d marks other tokens"),
        ({"d2t": zeros(ROWS)}, "float32"),
    ],
    ids=["absolute ids that leave the vocabulary", "absolute ids that t2d tells", "descending", "beyond the vocabulary", "negative", "another t2d", "an empty t2d", "fractions"],
)
def test_a_vocabulary_that_is_not_the_targets_is_refused(tmp_path: Path, target, changes, words):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", CONFIG, tensors() | changes), target)


def test_a_damaged_or_incomplete_file_is_refused(tmp_path: Path, target):
    draft = write(tmp_path / "draft", CONFIG)
    (draft / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ExperimentError, match="cannot be read"):
        check_draft_fit(draft, target)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "gone.safetensors"}}))
    with pytest.raises(ExperimentError, match="not beside it"):
        check_draft_fit(draft, target)


def test_files_that_the_index_leaves_out_are_no_part_of_it(tmp_path: Path, target):
    draft = write(tmp_path / "draft", CONFIG)
    save_file({"fc.weight": zeros(1, 1)}, draft / "consolidated.safetensors")
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "model.safetensors")}))
    check_draft_fit(draft, target)
