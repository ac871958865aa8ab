"""The fields of a draft's config.json that say no shape: what vLLM or transformers would refuse once the engine starts is refused before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import ATTENTION, CONFIG, LATENT, LATENT_ATTENTION, SPECULATORS, tensors, write

QWEN3 = CONFIG | {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
MLA = CONFIG | LATENT
TENSORS = {"llama": tensors(), "qwen3": tensors(ATTENTION | {"q_norm": (16,), "k_norm": (16,)}), "mla": tensors(LATENT_ATTENTION), "speculators": tensors(layer="layers.0")}
AS_WRITTEN: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "torch_dtype": "bfloat16", "logit_scale": 0.5, "is_causal": True, "tie_word_embeddings": False,
    "use_cache": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": [2, 3], "initializer_range": 0.02, "attention_dropout": 0.0, "pretraining_tp": 1,
    "layer_types": ["full_attention"], "sliding_window": None, "model_max_length": None}
"""As trainers write them."""
NAN = float("nan")


@pytest.mark.parametrize(("config", "kind"), [(CONFIG, "llama"), (QWEN3, "qwen3"), (MLA, "mla"), (MLA | {"model_type": "kimi_k2"}, "mla"), (MLA | {"model_type": "deepseek_v3"}, "mla"), (CONFIG | {"model_type": "kimi_k2"}, "llama"), (CONFIG | {"model_type": "qwen2"}, "llama"),
                                              (CONFIG | {"model_type": "minimax_m2", "architectures": ["Eagle3MiniMaxM2ForCausalLM"]}, "llama")])
def test_what_trainers_write_fits(tmp_path: Path, target, config: dict[str, Any], kind: str):
    for changes in ({}, AS_WRITTEN, {"dtype": "float32", "torch_dtype": 7}, {"dtype": None, "pad_token_id": None, "eos_token_id": None}, {"layer_types": None},
                    {"layer_types": ["sliding_attention"], "sliding_window": 512}):
        check_draft_fit(write(tmp_path / "draft", config | changes, TENSORS[kind]), target)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *(("hidden_act", value, "not silu") for value in ("gelu", "swish", "SiLU", None, 5)),
        *(("rms_norm_eps", value, "not a positive number") for value in (None, "1e-5", -1, -1e-5, 0, 0.0, 1, NAN, float("inf"), True)),
        *(("max_position_embeddings", value, "not a count") for value in ("x", 0, -5, None, 2048.0, True)),
        *((field, "x", "not a count") for field in ("model_max_length", "max_seq_len", "n_positions", "seq_length", "sliding_window")),
        ("seq_len", 0, "not a count"),
        *((field, value, "not one of bfloat16") for field in ("dtype", "torch_dtype") for value in (7, "nonsense", "int8", ["bfloat16"], "torch.bfloat16")),
        *(("layer_types", value, "not one of full_attention") for value in ("x", [], ["full_attention"] * 2, [5], ["linear_attention"], 5, {"0": "full_attention"})),
        *(("logit_scale", value, "not a positive number") for value in (-1, 0, 0.0, None, "1", NAN, float("inf"), True)),
        *(("is_causal", value, "not true") for value in (False, None, "true")),
        *((field, value, "not true or false") for field in ("tie_word_embeddings", "use_cache", "attention_bias", "mlp_bias") for value in ("false", None, 0)),
        ("pad_token_id", "0", "not a token id"),
        ("bos_token_id", 1.0, "not a token id"),
        ("eos_token_id", ["2"], "not a token id or a list"),
        ("initializer_range", "0.02", "not a number from 0.0"),
        ("attention_dropout", "0", "not a number"),
        ("pretraining_tp", "1", "not a whole number"),
    ],
)
@pytest.mark.parametrize("kind", ["llama", "mla", "speculators"])
def test_a_value_that_no_engine_takes_is_refused_with_its_field(tmp_path: Path, target, kind: str, field: str, value: Any, words: str):
    config = {"llama": CONFIG, "mla": MLA}.get(kind, {})
    changed = SPECULATORS | {"transformer_layer_config": SPECULATORS["transformer_layer_config"] | {field: value}} if kind == "speculators" else config | {field: value}
    draft = write(tmp_path / "draft", changed, TENSORS[kind])
    with pytest.raises(ExperimentError, match=f"config.json has {field} = .*{words}") as caught:
        check_draft_fit(draft, target)
    assert str(draft) in caught.value.what and caught.value.where == f"draft.checkpoint: {draft}" and caught.value.exit_code == 64


@pytest.mark.parametrize(
    ("config", "words"),
    [
        *((CONFIG | {"model_type": name}, f"model_type = '{name}', not one by which vLLM makes a draft of this architecture, as llama is")
          for name in ("nonsense", "eagle", "speculators", "bert", "gpt2", "gemma2", "qwen2_vl", "qwen3_next", "mimo_mtp", "deepseek_v2", "deepseek_v32")),
        (QWEN3 | {"model_type": "qwen3_5"}, "as qwen3 is"),
        (MLA | {"model_type": "nonsense"}, "as deepseek_v2 is"),
        (MLA | {"q_lora_rank": None}, "q_lora_rank = None, not a count, and vLLM 0.32 loads no MLA draft without"),
        (CONFIG | {"compression_config": {"quant_method": "fp8"}}, "compression_config = .* for a quantized one"),
        (MLA | {"model_type": 5}, "by which vLLM knows how to read it"),
        (CONFIG | {"layer_types": ["sliding_attention"]}, "sliding_window is None, not a count"),
        (CONFIG | {"num_key_value_heads": 3}, "num_attention_heads is 4, not a multiple of num_key_value_heads = 3"),
        (CONFIG | {"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size is 64, .* multiple of its 5"),
    ],
)
def test_a_model_type_or_heads_of_which_vllm_makes_something_else_are_refused(tmp_path: Path, target, config: dict[str, Any], words: str):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write(tmp_path / "draft", config), target)


@pytest.mark.parametrize(("folder", "words"), [("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "hf download yuhuili/EAGLE3-LLaMA3.1-Instruct-8B --local-dir DIR"),
                                               ("absent", "hf download ORG/NAME --local-dir DIR")])
def test_an_id_of_hugging_face_is_told_from_a_folder(tmp_path: Path, folder: str, words: str):
    with pytest.raises(ExperimentError) as caught:
        identify_draft(tmp_path / folder)
    assert "there is no folder" in caught.value.what and folder in caught.value.where
    assert "A Hugging Face id is not taken here" in caught.value.fix and words in caught.value.fix


def test_a_folder_without_a_config_is_no_absent_folder(tmp_path: Path):
    with pytest.raises(ExperimentError, match="config.json cannot be read"):
        identify_draft(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ExperimentError, match="holds no object"):
        identify_draft(tmp_path)
