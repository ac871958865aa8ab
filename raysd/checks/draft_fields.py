"""The fields of a finished draft's config.json that say no shape: whether vLLM, and transformers' class of its model type, take each, and for what was trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raysd.checks.draft_config import NAME_A_DRAFT, Family, count, refuse

CORRECT = "correct it in a copy of the draft, or remove it there"
MODEL_TYPES = ("llama", "qwen3", "afmoe", "aria_text", "axk1", "axk2", "bamba", "cohere2_moe", "cwm", "deepseek_v3", "diffllama", "doge", "dots1",
               "emu3_text_model", "ernie4_5", "ernie4_5_vl_moe_text", "exaone4", "falcon_h1", "flex_olmo", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
               "glm4v_moe_text", "glm4v_text", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
               "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "hyperclovax", "inkling_text", "jamba",
               "kimi_k2", "kimi_linear", "llama4_text", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
               "mistral", "mistral4", "mixtral", "mllama_text_model", "moshi", "olmo2", "olmoe", "phi3", "phi4_multimodal", "phimoe", "qwen2",
               "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text",
               "qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "youtu")
"""The model types by which vLLM 0.32 makes a draft of a plain config.json: of the others transformers knows nothing, or reads the sizes, the activation or the norms
elsewhere, or vLLM makes a multi-token predictor (SpeculativeConfig.hf_config_override). Of `deepseek_v3` too, which `served_config` puts right."""
LATENT_TYPES = (*MODEL_TYPES, "deepseek_v2")
"""The last overwrites `head_dim`, which an MLA draft does not have."""
LAYER_TYPES = ("full_attention", "attention", "sliding_attention")
"""The second is an old name of the first. vLLM's drafts take every other type for full attention, too."""
DTYPES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")
LENGTHS = ("n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len")
"""What vLLM reads beside max_position_embeddings, and takes the least of (derive_max_model_len_and_key)."""


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_whole(value: Any) -> bool:
    return value is None or type(value) is int


def _is_small(value: Any) -> bool:
    return type(value) is float and 0 < value < math.inf  # transformers takes no 1 for 1.0


def _is_scale(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


FIELDS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "hidden_act": (lambda value: value == "silu", "silu, the only activation of vLLM's Eagle3 drafts", NAME_A_DRAFT),
    "rms_norm_eps": (_is_small, "a positive number written with a point or an exponent, as 1e-05 is", CORRECT),
    "max_position_embeddings": (_is_count, "a count", CORRECT),
    **dict.fromkeys(LENGTHS, (lambda value: value is None or _is_count(value), "a count", CORRECT)),
    "sliding_window": (_is_whole, "a count", CORRECT),
    "logit_scale": (_is_scale, "a positive number: vLLM multiplies the draft's logits by it, and proposes the largest", CORRECT),
    "is_causal": (lambda value: value is True, "true: vLLM would let each token see those after it", CORRECT),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_cache"), (lambda value: type(value) is bool, "true or false", CORRECT)),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), (_is_whole, "a token id", CORRECT)),
    "compression_config": (lambda value: value is None, "null: vLLM would take the draft for a quantized one", CORRECT),
    "initializer_range": (lambda value: type(value) is float and 0 <= value <= 1, "a number from 0.0 to 1.0", CORRECT),
    "attention_dropout": (lambda value: value is None or type(value) in (int, float), "a number", CORRECT),
    "pretraining_tp": (_is_whole, "a whole number", CORRECT),
    "eos_token_id": (lambda value: all(map(_is_whole, value)) if isinstance(value, list) else _is_whole(value), "a token id or a list of them", CORRECT)}
"""By field: whether a value will do, what will, and what to do. A field that is absent has its class's default, which does."""


def check_fields(folder: Path, config: dict[str, Any], family: Family) -> None:
    """Raises ExperimentError for a value that vLLM or transformers refuses as the engine starts, or with which no proposal is as it was trained.

    config: what `flat_config` gives.
    """
    _check_model_type(folder, config.get("model_type"), family)
    for name, (will_do, words, fix) in FIELDS.items():
        if name in config and not will_do(config[name]):
            _refuse(folder, name, config[name], words, fix)
    dtype = "torch_dtype" if config.get("dtype") is None else "dtype"  # transformers' order
    if config.get(dtype) is not None and config[dtype] not in DTYPES:
        _refuse(folder, dtype, config[dtype], f"one of {', '.join(DTYPES)}", CORRECT)
    if family == "mla" and config.get("q_lora_rank") is None:
        _refuse(folder, "q_lora_rank", None, "a count, and vLLM 0.32 loads no MLA draft without a bottleneck for queries (deepseek_eagle3.py)", NAME_A_DRAFT)
    _check_layer_types(folder, config, family)
    _check_heads(folder, config, family)


def _check_model_type(folder: Path, model_type: Any, family: Family) -> None:
    usual = {"mla": "deepseek_v2"}.get(family, family)
    known = LATENT_TYPES if family == "mla" else MODEL_TYPES
    if type(model_type) is not str:
        refuse(folder, f"its config.json has model_type = {model_type!r:.60}, by which vLLM knows how to read it", f"add it, `{usual}` say, to a copy of the draft")
    if model_type not in known:
        _refuse(folder, "model_type", model_type, f"one by which vLLM makes a draft of this architecture, as {usual} is",
                f"say `{usual}` in a copy of the draft, if its layers are of that kind")


def _check_layer_types(folder: Path, config: dict[str, Any], family: Family) -> None:
    types = config.get("layer_types")
    if types is None:
        return
    layers = count(folder, config, "num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers or any(each not in LAYER_TYPES for each in types):
        _refuse(folder, "layer_types", types, f"one of {', '.join(LAYER_TYPES)} for each of the {layers} layers", CORRECT)
    if family == "llama" and "sliding_attention" in types:
        count(folder, config, "sliding_window")


def _check_heads(folder: Path, config: dict[str, Any], family: Family) -> None:
    heads = count(folder, config, "num_attention_heads")
    if family != "qwen3" and count(folder, config, "hidden_size") % heads:
        refuse(folder, f"its hidden_size is {config['hidden_size']}, which vLLM asks to be a multiple of its {heads} attention heads")
    if family != "mla" and heads % count(folder, config, "num_key_value_heads", 32 if family == "qwen3" else heads):
        refuse(folder, f"its num_attention_heads is {heads}, not a multiple of num_key_value_heads = {config.get('num_key_value_heads')}")


def _refuse(folder: Path, name: str, value: Any, words: str, fix: str) -> None:
    refuse(folder, f"its config.json has {name} = {value!r:.60}, not {words}", fix)
