"""Shapes read from configs as the models' makers write them, cut down to what is read."""

from __future__ import annotations

import json

import pytest

from raysd.errors import ExperimentError
from raysd.target.shape import DEFAULTS, LatentSizes, check_plain_logits, read_shape

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 1024}
KIMI = {"model_type": "kimi_k2", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 384, "num_experts_per_tok": 8,
        "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "max_position_embeddings": 262144, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "tie_word_embeddings": False,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
MINIMAX = {"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 62,
           "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "rope_theta": 5000000, "vocab_size": 200064, "max_position_embeddings": 196608,
           "rms_norm_eps": 1e-6, "tie_word_embeddings": False}


@pytest.fixture
def shape_of(tmp_path):
    def read(config, **changes):
        (tmp_path / "config.json").write_text(json.dumps({name: value for name, value in (config | changes).items() if value != "absent"}))
        return read_shape(tmp_path)
    return read


def test_kimi_k25_is_read_from_its_text_part(shape_of):
    shape = shape_of({"model_type": "kimi_k25", "text_config": KIMI, "vision_config": {"hidden_size": 1152}})
    assert shape.latent == LatentSizes(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert (shape.layers, shape.hidden_size, shape.vocab_size, shape.intermediate_size, shape.tie_word_embeddings) == (61, 7168, 163840, 18432, False)
    assert shape.rope_parameters == {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
                                     "mscale": 1.0, "mscale_all_dim": 1.0}


def test_queries_may_have_no_bottleneck(shape_of):
    assert shape_of(KIMI, q_lora_rank=None).latent.q_lora_rank is None


@pytest.mark.parametrize("field", ["qk_rope_head_dim", "v_head_dim"])
def test_a_latent_size_that_is_absent_is_named(shape_of, field):
    with pytest.raises(ExperimentError, match=f"has no {field}"):
        shape_of(KIMI, **{field: "absent"})


def test_minimax_rotates_a_part_of_each_head_and_its_mlp_is_as_wide_as_a_tokens_experts(shape_of):
    shape = shape_of(MINIMAX)
    assert (shape.attention_heads, shape.kv_heads, shape.head_dim, shape.latent) == (48, 8, 128, None)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5}
    assert shape.intermediate_size == 8 * 1536


def test_the_dense_width_is_taken_where_a_mixture_has_one(shape_of):
    assert shape_of(LLAMA, model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8, moe_intermediate_size=32).intermediate_size == 128


@pytest.mark.parametrize("written", [
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 256}], ids=["transformers 5", "type", "outside"])
def test_a_rope_comes_out_the_same_however_it_is_written(shape_of, written):
    assert shape_of(LLAMA, **written).rope_parameters == {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize("written", [
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"partial_rotary_factor": 0.5}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {}])
def test_a_rope_is_what_transformers_makes_of_the_same_config(shape_of, written):
    from transformers import LlamaConfig

    theirs = LlamaConfig(**LLAMA, **written).rope_parameters
    theirs.pop("type", None)
    assert shape_of(LLAMA, **written).rope_parameters == theirs


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(shape_of, model_type):
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[model_type]
    values = {name: getattr(theirs, name, None) for name in ("rms_norm_eps", "num_key_value_heads", "head_dim")} | {"rope_theta": theirs.default_theta}
    assert DEFAULTS[model_type] == {name: value for name, value in values.items() if value is not None}
    shape = shape_of(LLAMA, model_type=model_type)
    assert shape.rope_parameters["rope_theta"] == theirs.default_theta and shape.rms_norm_eps == theirs.rms_norm_eps


@pytest.mark.parametrize(("changes", "message"), [
    ({"model_type": "novel"}, "has no rms_norm_eps"), ({"model_type": "novel", "rms_norm_eps": 1e-6}, "has no rope_theta"), ({"rope_scaling": {"type": "yarn"}}, "has no factor"),
    ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "rope_type = 'spiral'"), ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor = '2'"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}, "another rope for each kind of layer"),
    ({"rotary_dim": 64}, "partial_rotary_factor = 4"), ({"rope_theta": -1}, "rope_theta = -1"), ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
    ({"num_local_experts": 8}, "has no num_experts_per_tok"), ({"vocab_size": "absent"}, "has no vocab_size")])
def test_what_is_not_known_is_refused_by_name(shape_of, tmp_path, changes, message):
    with pytest.raises(ExperimentError, match=message) as caught:
        shape_of(LLAMA, **changes)
    assert str(tmp_path) in caught.value.where


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(("rope", "key"), [
    *((YARN | {name: "x"}, f"{name} = 'x'") for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")), (YARN | {"beta_fast": [32]}, "beta_fast"),
    (YARN | {"rope_theta": 1}, "rope_theta = 1"), (YARN | {"original_max_position_embeddings": 1}, "original_max_position_embeddings"), (YARN | {"mscale": -1}, "mscale = -1"),
    (DYNAMIC | {"alpha": "x"}, "alpha = 'x'"), (DYNAMIC | {"max_trained_positions": "x"}, "max_trained_positions = 'x'"),
    (DYNAMIC | {"max_trained_positions": 4096}, "max_trained_positions = 4096"), (DYNAMIC | {"rope_type": "linear", "factor": [2.0]}, "factor = .2.0."),
    (LONG | {"long_factor": [2.0] * 7}, "long_factor = .*not a list of 8 numbers"), (LONG | {"short_factor": 2.0}, "short_factor = 2.0"),
    (LONG | {"long_factor": [2.0] * 7 + ["x"]}, "long_factor.7. = 'x'"), (LONG | {"partial_rotary_factor": 0.5}, "short_factor = .*not a list of 4 numbers"),
    (LONG | {"original_max_position_embeddings": True}, "original_max_position_embeddings = True"), (YARN | {"rope_type": ["yarn"]}, "rope_type")])
def test_a_rotation_that_cannot_be_computed_is_refused_by_its_key(shape_of, tmp_path, rope, key):
    with pytest.raises(ExperimentError, match=f"config.json has {key}") as caught:
        shape_of(LLAMA, rope_parameters=rope)
    assert str(tmp_path) in caught.value.where


def test_a_rotation_may_leave_out_or_switch_off_what_it_does_not_need(shape_of):
    assert shape_of(LLAMA, rope_parameters=YARN | {"mscale": 0, "mscale_all_dim": 0.0, "truncate": False, "attention_factor": None}).rope_parameters == \
        YARN | {"mscale": 0, "mscale_all_dim": 0.0, "truncate": False, "original_max_position_embeddings": 1024}
    assert shape_of(LLAMA, rope_parameters=LONG).rope_parameters == LONG
    assert shape_of(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": None}).rope_parameters == {"rope_type": "default", "rope_theta": 1e4}


def test_logits_that_a_head_does_not_give_are_refused_in_the_text_part_too(tmp_path):
    for config, refused in ((LLAMA, False), (LLAMA | {"logits_scaling": 1.0}, False), (LLAMA | {"logits_scaling": 8.0}, True), ({"text_config": LLAMA | {"final_logit_softcapping": 30.0}}, True),
                            (LLAMA | {"output_multiplier": 0.5}, True), (LLAMA | {"output_multiplier": 1}, False), (LLAMA | {"output_multiplier_scale": 0.577}, True),
                            (LLAMA | {"dim_model_base": 32}, True), (LLAMA | {"dim_model_base": 64}, False), (LLAMA | {"dim_model_base": 1}, True), (LLAMA | {"dim_model_base": None}, False),
                            ({"text_config": LLAMA | {"dim_model_base": 64}}, False), (LLAMA | {"output_mult": 2.0, "mup_scale_factor": 8.0}, True),
                            (LLAMA | {"output_mult": 8.0, "mup_scale_factor": 8.0}, False), (LLAMA | {"model_type": "cohere2"}, True),
                            (LLAMA | {"model_type": "cohere2", "logit_scale": 1.0}, False), (LLAMA | {"model_type": "minicpm"}, True),
                            (LLAMA | {"model_type": "gemma2", "final_logit_softcapping": None}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        if refused:
            with pytest.raises(ExperimentError, match="changes the logits"):
                check_plain_logits(tmp_path)
        else:
            check_plain_logits(tmp_path)
