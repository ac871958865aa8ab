"""A draft's tensors against its config and the target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from raysd.checks.draft_fit import check_draft_fit
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import (
    ATTENTION,
    CONFIG,
    HIDDEN,
    LATENT,
    LATENT_ATTENTION,
    ROWS,
    TOKENS,
    VOCAB,
    biases,
    cast,
    tensors,
    without,
    write,
)

QWEN3, QWEN3_TENSORS = CONFIG | {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}, tensors(ATTENTION | {"q_norm": (16,), "k_norm": (16,)})
WHOLE = CONFIG | {"draft_vocab_size": VOCAB}


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def with_a_second_layer() -> dict[str, np.ndarray]:
    second = tensors({"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}, "layers.1")
    return tensors(layer="layers.0") | {name: value for name, value in second.items() if name.startswith("layers.1.") and "hidden_norm" not in name}


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (CONFIG, tensors()),
        (CONFIG, tensors(layer="layers.0")),
        (CONFIG, {f"model.{name}": value for name, value in tensors().items()}),
        (CONFIG, tensors() | {"embed_tokens.weight": ones(VOCAB, HIDDEN), "midlayer.self_attn.rotary_emb.inv_freq": ones(8)}),
        (CONFIG, without(tensors(), "t2d")),
        (WHOLE, without(tensors(), "t2d", "d2t", "lm_head.weight")),
        (WHOLE, without(tensors(), "t2d") | {"d2t": np.zeros(VOCAB, np.int64), "lm_head.weight": ones(VOCAB, HIDDEN)}),
        (CONFIG | {"fc_norm": True}, tensors() | {f"fc_norm.{index}.weight": ones(HIDDEN) for index in range(3)}),
        (CONFIG | {"eagle_config": {"norm_before_fc": True}}, tensors() | {"input_norm.weight": ones(3 * HIDDEN)}),
        (CONFIG | {"num_hidden_layers": 2}, with_a_second_layer()),
        (QWEN3, QWEN3_TENSORS),
        (CONFIG | {"attention_bias": True}, tensors() | biases()),
        (CONFIG | {"attention_bias": True, "mlp_bias": True}, tensors() | biases(mlp=True)),
        (CONFIG | {"bias": True}, tensors() | {"midlayer.self_attn.o_proj.bias": ones(HIDDEN)}),
        (QWEN3 | {"attention_bias": True}, QWEN3_TENSORS | without(biases(), "midlayer.self_attn.o_proj.bias")),
        (CONFIG | LATENT, tensors(LATENT_ATTENTION)),
        (CONFIG | LATENT | {"attention_bias": True}, tensors(LATENT_ATTENTION)),
    ],
    ids=["midlayer", "layers.0", "model. in front", "with its embedding", "without t2d", "the target's head", "a whole vocabulary with d2t", "Eagle 3.1", "a norm before fc",
         "two layers", "Qwen3", "attention biases", "biases everywhere", "a bias of the output alone", "Qwen3 with biases", "MLA", "MLA, for whose biases vLLM has no place and which has none"],
)
def test_what_trainers_leave_fits(tmp_path: Path, target, config, made):
    check_draft_fit(write(tmp_path / "draft", config, made), target)


@pytest.mark.parametrize(
    ("config", "made", "words"),
    [
        (CONFIG, tensors() | {"fc.weight": ones(64, 100)}, r"fc is \[64, 100\], not \[64, 192\]"),
        (CONFIG, without(tensors(), "fc.weight"), "hold no fc.weight"),
        (CONFIG, tensors() | {"lm_head.weight": ones(VOCAB, HIDDEN)}, r"lm_head is \[256, 64\], not \[128, 64\]"),
        (CONFIG, without(tensors(), "lm_head.weight"), "hold no lm_head.weight"),
        (CONFIG, without(tensors(), "d2t"), "hold no d2t"),
        (CONFIG, tensors() | {"d2t": np.zeros(64, np.int64)}, r"d2t is \[64\], not \[128\]"),
        (CONFIG, tensors() | {"t2d": np.zeros(300, bool)}, r"t2d is \[300\], not \[256\]"),
        (CONFIG, tensors() | {"embed_tokens.weight": ones(300, HIDDEN)}, r"embed_tokens is \[300, 64\], not \[256, 64\]"),
        (CONFIG | {"head_dim": 32}, tensors(), r"layers.0.self_attn.q_proj is \[64, 128\], not \[128, 128\]"),
        (CONFIG | {"num_key_value_heads": 4}, tensors(), r"k_proj is \[32, 128\], not \[64, 128\]"),
        (CONFIG, tensors(ATTENTION | {"v_proj": (64, 128)}), r"v_proj is \[64, 128\], not \[32, 128\]"),
        (CONFIG, tensors(ATTENTION | {"q_proj": (64, 64)}), r"q_proj is \[64, 64\], not \[64, 128\]"),
        (CONFIG | {"intermediate_size": 100}, tensors(), r"gate_proj is \[96, 64\], not \[100, 64\]"),
        (CONFIG | {"num_hidden_layers": 2}, tensors(), "hold no layers.1"),
        (CONFIG | {"num_hidden_layers": 10**30}, tensors(), "hold no layers.9999"),
        (CONFIG, with_a_second_layer(), r"layers.1.*no place.*num_hidden_layers = 1"),
        (CONFIG, without(tensors(), "midlayer.hidden_norm.weight"), "hold no layers.0.hidden_norm"),
        (CONFIG | {"fc_norm": True}, tensors(), "hold no fc_norm.0"),
        (CONFIG, tensors() | {"fc_norm.0.weight": ones(HIDDEN)}, "fc_norm.0.weight, for which vLLM has no place"),
        (CONFIG | {"hidden_size": 32, "target_hidden_size": 64}, tensors(), "not"),
        (CONFIG | LATENT, tensors(), "hold no layers.0.self_attn.kv_a_proj"),
        (CONFIG | LATENT | {"kv_lora_rank": 32}, tensors(LATENT_ATTENTION), r"kv_a_proj_with_mqa is \[20, 128\], not \[36, 128\]"),
        (CONFIG, tensors() | {"model.norm.weight": ones(HIDDEN)}, "norm.weight twice"),
        (CONFIG, tensors() | biases(), "k_proj.bias, .* for which vLLM has no place .*attention_bias = None"),
        (CONFIG | {"attention_bias": False}, tensors() | {"midlayer.self_attn.q_proj.bias": ones(64)}, "q_proj.bias, for which"),
        (CONFIG | {"attention_bias": True}, tensors(), "hold no layers.0.self_attn.q_proj.bias"),
        (CONFIG | {"model_type": "gpt_oss"}, tensors(), "hold no layers.0.self_attn.q_proj.bias"),
        (CONFIG | {"attention_bias": True}, tensors() | without(biases(), "midlayer.self_attn.o_proj.bias"), "hold no layers.0.self_attn.o_proj.bias"),
        (CONFIG | {"attention_bias": True}, tensors() | biases(ATTENTION | {"k_proj": (64, 128)}), r"k_proj.bias is \[64\], not \[32\]"),
        (CONFIG | {"mlp_bias": True}, tensors(), "hold no layers.0.mlp.gate_proj.bias"),
        (CONFIG, tensors() | {"norm.bias": ones(HIDDEN)}, "norm.bias, for which vLLM has no place"),
        (CONFIG, tensors() | {"fc.bias": ones(HIDDEN)}, "fc.bias, for which vLLM has no place"),
        (CONFIG, tensors() | {"lm_head.bias": ones(ROWS)}, "lm_head.bias, for which vLLM has no place"),
        (CONFIG, tensors() | {"fc.weight_scale": ones(HIDDEN)}, "fc.weight_scale, for which vLLM has no place"),
        (CONFIG, tensors() | {"input_norm.weight": ones(3 * HIDDEN)}, "input_norm.weight, for which vLLM has no place"),
        (QWEN3 | {"mlp_bias": True, "attention_bias": True}, QWEN3_TENSORS | biases(), "o_proj.bias, for which vLLM has no place"),
        (CONFIG | LATENT | {"attention_bias": True}, tensors(LATENT_ATTENTION) | {"midlayer.self_attn.o_proj.bias": ones(HIDDEN)}, "o_proj.bias, for which vLLM has no place"),
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
        ({"d2t": ones(ROWS)}, "d2t is of F32, not of whole numbers"),
    ],
    ids=["absolute ids that leave the vocabulary", "absolute ids that t2d tells", "descending", "beyond the vocabulary", "negative", "another t2d", "an empty t2d", "fractions"],
)
def test_a_vocabulary_that_is_not_the_targets_is_refused(tmp_path: Path, target, changes, words):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", CONFIG, tensors() | changes), target)


@pytest.mark.parametrize("dtype", ["int32", "int16"])
def test_a_vocabulary_in_other_integers_fits(tmp_path: Path, target, dtype: str):
    made = tensors()
    assert not check_draft_fit(write(tmp_path / "draft", CONFIG, made | {"d2t": made["d2t"].astype(dtype), "t2d": made["t2d"].astype(np.int64)}), target).needless_d2t


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_t2d_of_any_dtype_is_read(tmp_path: Path, target, dtype: str):
    check_draft_fit(write(tmp_path / "draft", CONFIG, cast(tensors(), dtype, "t2d")), target)
    with pytest.raises(ExperimentError, match="t2d marks other tokens"):
        check_draft_fit(write(tmp_path / "other", CONFIG, cast(tensors() | {"t2d": np.arange(VOCAB) < ROWS}, dtype, "t2d")), target)


@pytest.mark.parametrize(
    ("dtype", "names", "words"),
    [
        ("bfloat16", (), "d2t is of BF16, not of whole numbers"),
        ("float8_e4m3fn", ("d2t",), "d2t is of F8_E4M3"),
        ("int8", ("fc.weight",), "fc is of I8, not of F16, BF16"),
        ("float8_e4m3fn", ("lm_head.weight",), "lm_head is of F8_E4M3"),
        ("complex64", ("norm.weight",), "norm is of C64"),
        ("bool", ("midlayer.hidden_norm.weight",), "hidden_norm is of BOOL"),
    ],
)
def test_a_draft_cast_to_what_vllm_would_take_for_other_numbers_is_refused(tmp_path: Path, target, dtype: str, names: tuple[str, ...], words: str):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", CONFIG, cast(tensors(), dtype, *names)), target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_none_are_refused(tmp_path: Path, target, dtype: str, number: float):
    weights = [name for name in tensors() if name.endswith(".weight")]
    made = cast(tensors(), dtype, *weights)
    check_draft_fit(write(tmp_path / "draft", CONFIG, made), target)
    made["midlayer.mlp.up_proj.weight"][95, 63] = number
    with pytest.raises(ExperimentError, match="up_proj holds NaN or infinite numbers"):
        check_draft_fit(write(tmp_path / "draft", CONFIG, made), target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["fc", "lm_head", "norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "embed_tokens", "fc_norm.1"])
def test_a_tensor_of_zeros_through_which_every_proposal_passes_is_refused(tmp_path: Path, target, dtype: str, name: str):
    made = tensors() | {"embed_tokens.weight": ones(VOCAB, HIDDEN)} | {f"fc_norm.{index}.weight": ones(HIDDEN) for index in range(3)}
    made = cast(made, dtype, *(each for each in made if each.endswith(".weight")))
    made[f"{name}.weight"][:] = -0.0
    with pytest.raises(ExperimentError, match=f"{name.replace('midlayer', 'layers.0')} holds nothing but zeros"):
        check_draft_fit(write(tmp_path / "draft", CONFIG | {"fc_norm": True}, made), target)
    made[f"{name}.weight"].view(-1)[-1] = 1e-4
    check_draft_fit(write(tmp_path / "draft", CONFIG | {"fc_norm": True}, made), target)


def test_zeros_are_allowed_where_a_draft_proposes_without(tmp_path: Path, target):
    made = tensors() | biases()
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.self_attn.k_proj.bias"):
        made[name][:] = 0
    check_draft_fit(write(tmp_path / "draft", CONFIG | {"attention_bias": True}, made), target)


def test_a_large_tensor_is_looked_at_to_its_end(tmp_path: Path, target, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raysd.checks.draft_files.PART", 100)
    made = tensors()
    check_draft_fit(write(tmp_path / "draft", CONFIG, made), target)
    made["fc.weight"][-1, -1] = np.nan
    with pytest.raises(ExperimentError, match="fc holds NaN"):
        check_draft_fit(write(tmp_path / "draft", CONFIG, made), target)


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
    save_file({"fc.weight": ones(1, 1)}, draft / "consolidated.safetensors")
    with pytest.raises(ExperimentError, match="vLLM would load those alone that are called consolidated"):
        check_draft_fit(draft, target)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "model.safetensors")}))
    check_draft_fit(draft, target)
