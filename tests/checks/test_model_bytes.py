"""Bytes of weights and KV cache, against what is published and against real files."""

import json
from pathlib import Path

import pytest

from raysd.checks.kv_blocks import NotTold
from raysd.checks.model_bytes import draft_bytes, draft_parts, is_left, target_bytes, target_parts
from raysd.target.known import known_target, published
from tests.tiny_models import tiny_deepseek, tiny_llama, tiny_minimax, tiny_qwen

KIMI, MINIMAX = "amd/Kimi-K2.5-MXFP4", "MiniMaxAI/MiniMax-M2.5"


def published_draft(name: str) -> dict:
    """The config of a published MHA draft."""
    facts = published()[name]["draft_mha"]
    return {"hidden_size": facts["hidden"], "intermediate_size": facts["intermediate"], "num_attention_heads": facts["heads"], "num_key_value_heads": facts["kv_heads"],
            "head_dim": facts["head_dim"], "vocab_size": published()[name]["vocab"], "model_type": "llama"}


@pytest.mark.parametrize(("model", "name", "shards"), [(KIMI, "kimi-k2.5", 1), (MINIMAX, "minimax-m2.5", 8)])
def test_the_cache_of_a_token_is_as_large_as_published(model: str, name: str, shards: int):
    for kv_dtype, published_as in (("auto", "bf16"), ("bfloat16", "bf16"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")):
        found = target_bytes(known_target(model).config, "bfloat16", kv_dtype)
        assert (found.kv_per_token, found.kv_shards) == (published()[name]["kv_bytes_per_token"][published_as], shards)


def test_latent_caches_are_whole_on_every_rank_and_grouped_ones_are_shared_until_each_rank_has_one_head():
    latent, grouped = (target_bytes(known_target(model).config, "bfloat16", "auto") for model in (KIMI, MINIMAX))
    assert [latent.kv_of_rank(ranks) for ranks in (1, 4, 8)] == [70272] * 3
    assert [grouped.kv_of_rank(ranks) for ranks in (1, 4, 8, 16)] == [253952, 63488, 31744, 31744]


def test_weights_counted_from_the_config_are_those_of_the_checkpoint():
    known = known_target(KIMI)
    assert target_bytes(known.config, "bfloat16", "auto").weights == pytest.approx(known.weight_bytes, rel=0.03)
    assert sum(part.parameters for part in target_parts(known.config)) == pytest.approx(1.03e12, rel=0.02)  # a trillion
    minimax = known_target(MINIMAX).config
    assert sum(part.parameters for part in target_parts(minimax)) == pytest.approx(2.29e11, rel=0.01)
    assert target_bytes(minimax, "bfloat16", "auto").weights == pytest.approx(2.3e11, rel=0.01)


def test_a_published_drafts_parameters_and_cache_are_counted():
    config, target = published_draft("kimi-k2.5"), known_target(KIMI).config
    facts = published()["kimi-k2.5"]["draft_mha"]
    assert sum(part.parameters for part in draft_parts(config, target, own_embedding=True)) == pytest.approx(facts["parameters"], rel=0.001)
    found = draft_bytes(config, target, "bfloat16", "auto")
    assert (found.kv_per_token, found.kv_shards) == (facts["kv_bytes_per_token_bf16"], 64)
    assert found.kv_of_rank(4) == 8192
    quark = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}, "exclude": ["fc", "lm_head"]}
    smaller = draft_bytes(config | {"quantization_config": quark}, target, "bfloat16", "auto")
    assert 1 - smaller.weights / found.weights == pytest.approx(facts["fp8_shrinks_file_by"], abs=0.001)


@pytest.mark.parametrize("make", [tiny_llama, tiny_deepseek, tiny_minimax, tiny_qwen])
def test_weights_counted_from_a_config_are_those_in_the_file(make, tmp_path: Path):
    from safetensors import safe_open

    folder = make(tmp_path)
    with safe_open(folder / "model.safetensors", "numpy") as file:
        numbers = sum(__import__("math").prod(file.get_slice(name).get_shape()) for name in file.keys())
    config = json.loads((folder / "config.json").read_text())
    assert sum(part.parameters for part in target_parts(config)) == pytest.approx(numbers, rel=0.02)  # but for single norms and biases


@pytest.mark.parametrize(("module", "pattern", "left"), [
    ("self_attn.q_proj", "re:.*self_attn.*", True), ("mlp.experts.1.gate_proj", "re:.*self_attn.*", False),
    ("self_attn.q_proj", "self_attn", True), ("self_attn.q_proj", "q_proj", True), ("self_attn.q_proj", "model.layers.17.self_attn.q_proj", True),
    ("self_attn.q_proj", "language_model.model.layers.0.self_attn", True), ("self_attn.q_proj", "*self_attn*", True),
    ("mlp.gate_proj", "gate", False), ("mlp.experts.1.gate_proj", "mlp.gate", False), ("lm_head", "lm_head", True), ("fc", "fc", True),
    ("mlp.experts.1.up_proj", "re:.*mlp\\.(gate|up|down)_proj.*", False), ("mlp.up_proj", "re:.*mlp\\.(gate|up|down)_proj.*", True),
])
def test_what_stays_unquantized_is_known_by_name(module: str, pattern: str, left: bool):
    assert is_left(module, [pattern]) is left


@pytest.mark.parametrize(("change", "told"), [
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    ({"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int2"}}}}, "int2"),
    ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"num_hidden_layers": None}, "num_hidden_layers"),
    ({"num_key_value_heads": None}, "num_key_value_heads"),
    ({"hidden_size": "wide"}, "'wide'"),
    ({"kv_lora_rank": 512, "index_topk": 2048, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, "index"),
])
def test_what_the_config_does_not_tell_is_not_guessed(change: dict, told: str):
    with pytest.raises(NotTold, match=told):
        target_bytes(known_target(MINIMAX).config | change, "bfloat16", "auto")
    with pytest.raises(NotTold, match="nvfp4"):
        target_bytes(known_target(MINIMAX).config, "bfloat16", "nvfp4")


def test_the_size_of_the_files_counts_where_it_is_known():
    known = known_target(KIMI)
    with_files, without = (target_bytes(known.config, "bfloat16", "auto", stored) for stored in (known.weight_bytes, None))
    assert with_files.weights - without.weights == pytest.approx(557e9 - 547.2e9, abs=2e9)
    assert with_files.weights_of_rank(1) == with_files.weights and with_files.weights_of_rank(4) > with_files.weights / 4
