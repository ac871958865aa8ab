from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from raysd.draft.checkpoint import save_draft
from tests.tiny_drafts import LATENT, TARGET_VOCAB, small_draft, small_shape


def test_the_file_holds_what_vllm_loads(tmp_path):
    draft = small_draft()
    save_draft(draft, tmp_path, torch.bfloat16)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama" and config["draft_vocab_size"] == 40
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert (torch.arange(40) + tensors["d2t"]).tolist() == draft.draft_to_target.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == draft.draft_to_target.tolist()
    assert tensors["fc.weight"].dtype == torch.bfloat16 and tensors["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert not any("embed" in name or "rotary" in name for name in tensors)


def test_a_whole_vocabulary_needs_no_map_and_vllm_would_refuse_one(tmp_path):
    save_draft(small_draft(small_shape(vocab_size=TARGET_VOCAB)), tmp_path, torch.bfloat16)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))


def test_latent_attention_is_named_as_vllm_names_it(tmp_path):
    save_draft(small_draft(small_shape(**LATENT)), tmp_path, torch.bfloat16)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    # `deepseek_v3` would be taken for a multi-token predictor.
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["model_type"] == "deepseek_v2"
    assert (config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]) == (24, 20, 8, 12)
    assert config["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "layer_ids": "entering"}
    shapes = {name.removeprefix("midlayer.self_attn."): list(tensor.shape) for name, tensor in tensors.items() if "self_attn" in name}
    assert shapes == {"q_a_proj.weight": [24, 64], "q_a_layernorm.weight": [24], "q_b_proj.weight": [96, 24], "kv_a_proj_with_mqa.weight": [28, 64],
                      "kv_a_layernorm.weight": [20], "kv_b_proj.weight": [112, 20], "o_proj.weight": [32, 48]}
