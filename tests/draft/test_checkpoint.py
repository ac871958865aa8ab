from __future__ import annotations

import json

import torch
from safetensors.torch import load_file

from raysd.draft.checkpoint import save_draft
from tests.tiny_drafts import TARGET_VOCAB, small_draft, small_shape


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
