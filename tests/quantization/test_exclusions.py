from __future__ import annotations

import pytest

from raysd.quantization.exclusions import is_excluded, vllm_module_name, vllm_patterns

CHECKPOINT_TO_VLLM = {"fc": "model.fc", "lm_head": "lm_head", "midlayer.self_attn.q_proj": "model.layers.0.self_attn.q_proj", "norm": "model.norm"}


def test_plain_names_do_not_match_where_vllm_mounts_the_layer_and_patterns_do():
    assert not is_excluded("model.fc", ["fc", "lm_head"])
    assert is_excluded("model.fc", vllm_patterns(["fc", "lm_head"])) and is_excluded("lm_head", vllm_patterns(["fc", "lm_head"]))


@pytest.mark.parametrize("module", ["model.layers.0.mlp.gate_proj", "model.fc_norm", "model.xfc", "model.fc.inner"])
def test_a_pattern_matches_the_whole_last_name_only(module):
    assert not is_excluded(module, vllm_patterns(["fc", "lm_head"]))


def test_rewriting_twice_changes_nothing_more():
    assert vllm_patterns(vllm_patterns(["fc"])) == vllm_patterns(["fc"])


@pytest.mark.parametrize("module", ["model.fc", "lm_head", "model.layers.0.mlp.gate_proj", "fc"])
@pytest.mark.parametrize("patterns", [["fc", "lm_head"], vllm_patterns(["fc", "lm_head"]), []], ids=["plain", "patterns", "none"])
def test_our_reading_of_exclusions_is_vllms_own(module, patterns):
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    assert is_excluded(module, patterns) == should_ignore_layer(module, ignore=patterns)


def test_module_names_are_where_vllm_mounts_them():
    assert {name: vllm_module_name(name) for name in CHECKPOINT_TO_VLLM} == CHECKPOINT_TO_VLLM
