from __future__ import annotations

import pytest

from raysd.quantization.exclusions import check_exclusions, excluded_modules, is_excluded, vllm_module_names, vllm_patterns

MLP = [f"midlayer.mlp.{name}_proj" for name in ("gate", "up", "down")]
GROUPED = ["fc", "lm_head", *MLP, *(f"midlayer.self_attn.{name}_proj" for name in "qkvo")]
LATENT = ["fc", "lm_head", *MLP, *(f"midlayer.self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))]
LATENT_WITHOUT_Q_LORA = ["fc", "lm_head", *MLP, *(f"midlayer.self_attn.{name}" for name in ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))]


def patterns(modules, excluded):
    return vllm_patterns(modules, excluded_modules(modules, excluded))


def test_modules_are_where_vllm_mounts_them():
    assert vllm_module_names(GROUPED) == {
        "fc": "model.fc", "lm_head": "lm_head", "midlayer.mlp.gate_proj": "model.layers.0.mlp.gate_up_proj", "midlayer.mlp.up_proj": "model.layers.0.mlp.gate_up_proj",
        "midlayer.mlp.down_proj": "model.layers.0.mlp.down_proj", **{f"midlayer.self_attn.{x}_proj": "model.layers.0.self_attn.qkv_proj" for x in "qkv"},
        "midlayer.self_attn.o_proj": "model.layers.0.self_attn.o_proj"}
    latent = vllm_module_names(LATENT)
    assert latent["midlayer.self_attn.q_a_proj"] == latent["midlayer.self_attn.kv_a_proj_with_mqa"] == "model.layers.0.self_attn.fused_qkv_a_proj"
    assert latent["midlayer.self_attn.kv_b_proj"] == "model.layers.0.self_attn.kv_b_proj"
    apart = vllm_module_names(LATENT_WITHOUT_Q_LORA)
    assert apart["midlayer.self_attn.q_proj"].endswith(".q_proj") and apart["midlayer.self_attn.kv_a_proj_with_mqa"].endswith(".kv_a_proj_with_mqa")


def test_plain_names_do_not_match_where_vllm_mounts_the_layer_and_patterns_do():
    assert not is_excluded("model.fc", ["fc", "lm_head"])
    rewritten = patterns(GROUPED, ["fc", "lm_head"])
    assert is_excluded("model.fc", rewritten) and is_excluded("lm_head", rewritten)


@pytest.mark.parametrize("module", ["model.layers.7.mlp.gate_up_proj", "model.fc_norm", "model.xfc", "model.fc.inner"])
def test_a_pattern_matches_the_whole_last_name_only(module):
    assert not is_excluded(module, patterns(GROUPED, ["fc", "lm_head"]))


@pytest.mark.parametrize("modules", [GROUPED, LATENT, LATENT_WITHOUT_Q_LORA], ids=["grouped", "latent", "latent without q_lora"])
@pytest.mark.parametrize("excluded", [["fc", "lm_head"], ["lm_head", "*.mlp.*"], ["lm_head", "*self_attn*"], ["lm_head", "midlayer.self_attn.o_proj"]])
def test_vllms_own_reading_of_the_patterns_is_what_was_meant(modules, excluded):
    """Its layers are mounted by the target's count of layers, and its quantization config knows nothing of fused layers."""
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    assert check_exclusions(modules, excluded) is None
    meant, rewritten = excluded_modules(modules, excluded), patterns(modules, excluded)
    for module, place in vllm_module_names(modules).items():
        assert should_ignore_layer(place.replace("layers.0.", "layers.61."), ignore=rewritten) == is_excluded(place, rewritten) == (module in meant)


@pytest.mark.parametrize(("modules", "excluded", "message"), [
    (GROUPED, ["fc"], "lm_head is not excluded"), (GROUPED, ["lm_head", "midlayer.mlp.up_proj"], "makes one layer .gate_up_proj."),
    (LATENT, ["lm_head", "*q_a_proj"], "fused_qkv_a_proj.*only midlayer.self_attn.q_a_proj is excluded"), (LATENT, ["lm_head", "fc2"], "fc2 match no layer"),
    (GROUPED, ["lm_head", "re:.*fc$"], "match no layer"), (GROUPED, ["*"], "every layer")],
    ids=["head", "half an MLP", "half an attention", "no layer", "not Quark's kind of pattern", "all"])
def test_exclusions_that_cannot_be_followed_are_told_before_the_work(modules, excluded, message):
    import re

    assert re.search(message, check_exclusions(modules, excluded))
