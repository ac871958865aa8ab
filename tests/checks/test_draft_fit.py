"""A finished draft is compared with the target before an engine loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.errors import ExperimentError
from tests.checks.finished_drafts import (
    CONFIG,
    HIDDEN,
    IDS,
    LATENT,
    LATENT_ATTENTION,
    SPECULATORS,
    VOCAB,
    cast,
    tensors,
    without,
    write,
    write_bin,
)
from tests.tiny_drafts import small_draft, small_shape


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3MiniMaxM2ForCausalLM"]
)
def test_every_name_by_which_vllm_knows_the_architecture_fits(tmp_path: Path, target, name: str):
    check_draft_fit(write(tmp_path / "draft", CONFIG | {"architectures": [name]}), target)


def test_the_speculators_format_fits(tmp_path: Path, target):
    assert check_draft_fit(write(tmp_path / "draft", SPECULATORS, tensors(layer="layers.0")), target).layers == [2, 4, 5]


def test_a_draft_narrower_than_its_target_has_its_own_embedding(tmp_path: Path, target):
    wide = {"fc.weight": (32, 192), "norm.weight": (32,), "lm_head.weight": (128, 32), "embed_tokens.weight": (VOCAB, 32), "layers.0.self_attn.q_proj.weight": (64, 64),
            "layers.0.self_attn.k_proj.weight": (32, 64), "layers.0.self_attn.v_proj.weight": (32, 64), "layers.0.self_attn.o_proj.weight": (32, 64),
            "layers.0.mlp.gate_proj.weight": (96, 32), "layers.0.mlp.up_proj.weight": (96, 32), "layers.0.mlp.down_proj.weight": (32, 96),
            **{f"layers.0.{name}.weight": (32,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}}
    made = {name: np.ones(shape, np.float32) for name, shape in wide.items()} | {name: tensors()[name] for name in ("d2t", "t2d")}
    config = CONFIG | {"hidden_size": 32, "target_hidden_size": HIDDEN}
    check_draft_fit(write(tmp_path / "draft", config, made), target)
    with pytest.raises(ExperimentError, match=r"hold no embed_tokens"):
        check_draft_fit(write(tmp_path / "draft", config, without(made, "embed_tokens.weight")), target)


def test_a_draft_that_reads_only_the_last_layer_has_no_fc(tmp_path: Path, target):
    config = without(CONFIG, IDS) | {"eagle_config": {"use_aux_hidden_state": False}}
    draft = write(tmp_path / "draft", config, without(tensors(), "fc.weight"))
    assert check_draft_fit(draft, target).layers == [] and check_draft_fit(write(tmp_path / "idle", config), target).layers == []
    with pytest.raises(ExperimentError, match="no effect"):
        check_draft_fit(draft, target, "leaving")


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True, "norm_output": True}, {"vocab_size": 96}], ids=["Eagle 3", "Eagle 3.1", "whole vocabulary"])
def test_what_raysd_trains_fits(tmp_path: Path, changes: dict[str, Any]):
    from raysd.draft.checkpoint import save_draft
    from tests.checks.finished_drafts import target_shape

    target = target_shape(tmp_path / "target", hidden_size=32, vocab_size=96)
    save_draft(small_draft(small_shape(aux_layers=(2, 4, 5), **changes)), tmp_path / "draft", torch.bfloat16)
    fit = check_draft_fit(tmp_path / "draft", target)
    assert fit.layers == [2, 4, 5] and not fit.needless_d2t


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CONFIG | {"hidden_size": 128}, "width 128"),
        (CONFIG | {"hidden_size": None}, "None, not a count"),
        (CONFIG | {"target_hidden_size": 32}, "width 32"),
        (CONFIG | {"architectures": 5}, "architectures = 5"),
        (CONFIG | {"architectures": "LlamaForCausalLMEagle3"}, "not a list"),
        (CONFIG | {"architectures": ["EagleLlamaForCausalLM"]}, "EagleLlamaForCausalLM, not one of"),
        (CONFIG | {"architectures": None}, "not named"),
        (CONFIG | {"draft_vocab_size": "256"}, "draft_vocab_size is '256'"),
        (CONFIG | {"draft_vocab_size": 512}, "draft_vocab_size is 512"),
        (CONFIG | {"vocab_size": 300}, "vocab_size is 300"),
        (CONFIG | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (without(CONFIG, "num_attention_heads"), "num_attention_heads is None"),
        (CONFIG | {"eagle_config": [1]}, r"eagle_config = \[1\]"),
        (CONFIG | {"eagle_config": {"use_aux_hidden_state": "false"}}, "use_aux_hidden_state is 'false'"),
        (CONFIG | {"norm_before_residual": "false"}, "norm_before_residual is 'false'"),
        (CONFIG | {"attention_bias": "false"}, "attention_bias = 'false'"),
        (without(CONFIG, "model_type"), "model_type = None"),
        (SPECULATORS | {"speculators_model_type": "peagle"}, "'peagle', not eagle3"),
        (SPECULATORS | {"transformer_layer_config": None}, "transformer_layer_config = None"),
        (SPECULATORS | {"transformer_layer_config": {"model_type": "gemma"}}, "'gemma'.* llama, qwen3"),
        (SPECULATORS | {"draft_vocab_size": 64}, r"lm_head is \[128, 64\]"),
        (CONFIG | {"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
        (CONFIG | {"quantization_config": 5}, "quantized by None"),
        (CONFIG | {"quantization_config": {"quant_method": "quark"}}, "has no 'exclude'"),
        (CONFIG | {"quantization_config": {"quant_method": "quark", "exclude": ["fc", "lm_head"]}}, "no exclusion that vLLM matches"),
        (CONFIG | {"quantization_config": {"quant_method": "quark", "exclude": None}}, "exclude = None, not a list"),
        (CONFIG | {"quantization_config": {"quant_method": "quark", "exclude": [1]}}, r"exclude = \[1\], not a list"),
        (CONFIG | {"quantization_config": {"quant_method": "quark", "exclude": ["re:(fc"]}}, r"exclude = \['re:\(fc'\], not a list of names and patterns"),
        (SPECULATORS | {"transformer_layer_config": {"model_type": ["llama"]}}, "llama'.*of a Speculators draft vLLM loads"),
    ],
)
def test_a_draft_of_another_target_or_kind_is_refused(tmp_path: Path, target, config: dict[str, Any], words: str):
    draft = write(tmp_path / "draft", config)
    with pytest.raises(ExperimentError, match=words) as caught:
        check_draft_fit(draft, target)
    assert str(draft) in caught.value.what and caught.value.where == f"draft.checkpoint: {draft}"


@pytest.mark.parametrize(("config", "made"), [(SPECULATORS, tensors(layer="layers.0")), (CONFIG | LATENT, tensors(LATENT_ATTENTION))], ids=["Speculators", "MLA"])
def test_a_draft_that_quark_has_quantized_fits_and_is_not_quantized_again(tmp_path: Path, target, config: dict[str, Any], made: dict[str, np.ndarray]):
    from raysd.backends.quark import quantize_checkpoint
    from raysd.checks.draft_served import served_draft
    from raysd.quantization.quantize import rewrite_exclusions

    fp8 = tmp_path / "fp8"
    quantize_checkpoint(served_draft(write(tmp_path / "draft", config, made), target, None, tmp_path / "scratch"), fp8, "ptpc_fp8", ["fc", "lm_head"])
    with pytest.raises(ExperimentError, match="no exclusion that vLLM matches"):
        check_draft_fit(fp8, target)
    rewrite_exclusions(fp8)
    assert served_draft(fp8, target, None, tmp_path / "unused") == fp8
    with pytest.raises(ExperimentError, match="quantized already, by 'quark'") as caught:
        check_draft_fit(fp8, target, quantizes=True)
    assert "remove `quantize:`" in caught.value.fix


def test_an_mla_draft_always_reads_several_layers(tmp_path: Path, target):
    config = CONFIG | LATENT | {"eagle_config": {"use_aux_hidden_state": False}}
    with pytest.raises(ExperimentError, match="always reads several layers"):
        check_draft_fit(write(tmp_path / "draft", config, tensors(LATENT_ATTENTION)), target)


def test_a_folder_that_is_no_draft_is_refused(tmp_path: Path):
    with pytest.raises(ExperimentError, match="there is no folder"):
        identify_draft(tmp_path / "absent")
    draft = write(tmp_path / "draft", CONFIG)
    (draft / "model.safetensors").unlink()
    with pytest.raises(ExperimentError, match="no weights beside it"):
        identify_draft(draft)
    (draft / "model.safetensors").mkdir()
    with pytest.raises(ExperimentError, match="no weights beside it"):
        identify_draft(draft)
    for text, words in (("[1]", "no object"), ("{", "cannot be read")):
        (draft / "config.json").write_text(text)
        with pytest.raises(ExperimentError, match=words):
            identify_draft(draft)


def test_the_identity_follows_the_content_and_not_the_path(tmp_path: Path):
    first, second = write(tmp_path / "one", CONFIG), write(tmp_path / "two", CONFIG)
    assert identify_draft(first) == identify_draft(second)
    (second / "model.safetensors").write_bytes(b"weightz")
    assert identify_draft(first) != identify_draft(second)


def test_the_identity_is_of_the_files_that_the_index_chooses(tmp_path: Path):
    draft = write(tmp_path / "draft", CONFIG)
    (draft / "model.safetensors").rename(draft / "a.safetensors")
    save_file(tensors(aux=4), draft / "b.safetensors")
    identities = []
    for name in ("a.safetensors", "b.safetensors"):
        (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), name)}))
        identities.append(identify_draft(draft))
    (draft / "b.safetensors").write_bytes(b"is no part of the first")
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "a.safetensors")}))
    assert identify_draft(draft) == identities[0] != identities[1]


def test_a_draft_in_pytorchs_own_format_fits(tmp_path: Path, target):
    """As EAGLE's authors publish theirs: no layer ids, and the name of the target's architecture."""
    draft = write_bin(tmp_path / "draft", without(CONFIG, IDS) | {"architectures": ["LlamaForCausalLM"]})
    torch.save({"lr": 1e-4}, draft / "training_args.bin")
    assert check_draft_fit(draft, target).layers == [2, 4, 5]
    before = identify_draft(draft)
    assert before.keys() == {"config.json", "pytorch_model.bin"}
    changed = cast(tensors(), "float32", "fc.weight")
    changed["fc.weight"][0, 0] += 1
    assert identify_draft(write_bin(draft, without(CONFIG, IDS) | {"architectures": ["LlamaForCausalLM"]}, changed)) != before


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: {"state_dict": cast(tensors(), "bfloat16", "fc.weight")}, "pytorch_model.bin cannot be read: it holds no tensors by name"),
        (lambda: [1, 2], "holds no tensors by name"),
        (lambda: Path("code that a pickle would run"), "cannot be read: it is damaged, or holds more than tensors"),
        (lambda: cast(without(tensors(), "norm.weight"), "bfloat16", "fc.weight"), "hold no norm.weight"),
        (lambda: cast(tensors(), "bfloat16"), "d2t is of BF16"),
    ],
    ids=["a training's state", "a list", "an object", "a tensor less", "cast as a whole"],
)
def test_a_draft_in_pytorchs_own_format_is_looked_at_as_any(tmp_path: Path, target, made, words: str):
    with pytest.raises(ExperimentError, match=words):
        check_draft_fit(write_bin(tmp_path / "draft", CONFIG, made()), target)


def test_a_cut_off_file_of_pytorch_is_refused(tmp_path: Path, target):
    path = write_bin(tmp_path / "draft", CONFIG) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ExperimentError, match="pytorch_model.bin cannot be read"):
        check_draft_fit(path.parent, target)


def test_a_quantized_draft_has_an_embedding_in_high_precision(tmp_path: Path, target):
    from raysd.backends.quark import quantize_checkpoint
    from raysd.quantization.audit import audit_draft
    from raysd.quantization.quantize import rewrite_exclusions

    made = tensors() | {"embed_tokens.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    fp8 = tmp_path / "fp8"
    quantize_checkpoint(write(tmp_path / "draft", CONFIG, made), fp8, "ptpc_fp8", ["fc", "lm_head"])
    rewrite_exclusions(fp8)
    assert audit_draft(fp8).high_precision == ["embed_tokens", "fc", "lm_head"]
    check_draft_fit(fp8, target)


def test_a_quantized_draft_is_held_to_its_tensors_as_any(tmp_path: Path, target):
    from raysd.backends.quark import quantize_checkpoint
    from raysd.quantization.quantize import rewrite_exclusions

    fp8 = tmp_path / "fp8"
    quantize_checkpoint(write(tmp_path / "draft", CONFIG), fp8, "ptpc_fp8", ["fc", "lm_head"])
    rewrite_exclusions(fp8)
    config, quantized = json.loads((fp8 / "config.json").read_text()), load_file(fp8 / "model.safetensors")
    for changes, words in (({"norm.bias": torch.ones(HIDDEN)}, "norm.bias, for which vLLM has no place"), ({"norm.weight_scale": torch.ones(HIDDEN)}, "norm.weight_scale"),
                           ({"midlayer.self_attn.q_proj.bias": torch.ones(64)}, "q_proj.bias"),
                           ({"norm.weight": torch.ones(HIDDEN).to(torch.float8_e4m3fn)}, "norm is of F8_E4M3"), ({"fc.weight": quantized["fc.weight"] * torch.nan}, "fc holds NaN")):
        with pytest.raises(ExperimentError, match=words):
            check_draft_fit(write(tmp_path / "changed", config, quantized | changes), target)
