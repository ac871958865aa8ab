"""The audit, on what real Quark writes for a small real draft."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from raysd.backends.quark import quantize_checkpoint
from raysd.draft.checkpoint import save_draft
from raysd.errors import StageError
from raysd.quantization.audit import audit_draft
from raysd.quantization.quantize import rewrite_exclusions
from raysd.target.shape import LatentSizes
from tests.tiny_drafts import small_draft, small_shape

LINEARS = {f"midlayer.self_attn.{x}_proj" for x in "qkvo"} | {f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def written_by_quark(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    save_draft(small_draft(small_shape(hidden_size=64, head_dim=32, intermediate_size=128)), folder / "bf16", torch.bfloat16)
    quantize_checkpoint(folder / "bf16", folder / "fp8", "ptpc_fp8", ["fc", "lm_head"])
    return folder / "fp8"


@pytest.fixture
def quantized(written_by_quark, tmp_path):
    shutil.copytree(written_by_quark, tmp_path / "fp8")
    rewrite_exclusions(tmp_path / "fp8")
    return tmp_path / "fp8"


def edit(folder, change):
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_what_quark_writes_fails_the_audit_until_its_exclusions_are_rewritten(written_by_quark, quantized):
    with pytest.raises(StageError, match="no exclusion that vLLM matches"):
        audit_draft(written_by_quark)
    audit = audit_draft(quantized)
    assert set(audit.quantized) == LINEARS and set(audit.high_precision) == {"fc", "lm_head"}


def test_a_draft_quantized_again_from_and_to_other_folders_has_the_same_bytes(written_by_quark, tmp_path):
    shutil.copytree(written_by_quark.parent / "bf16", tmp_path / "elsewhere" / "draft")
    quantize_checkpoint(tmp_path / "elsewhere" / "draft", tmp_path / "again", "ptpc_fp8", ["fc", "lm_head"])
    first, again = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (written_by_quark, tmp_path / "again"))
    assert again == first and "model.safetensors" in first


def test_the_draft_vocabulary_survives_quantization(written_by_quark, quantized):
    (path,) = quantized.glob("*.safetensors")
    tensors = load_file(path)
    assert tensors["d2t"].dtype == torch.int64 and len(tensors["d2t"]) == 40


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("midlayer.mlp.up_proj.weight_scale"), "without its scale"),
    (lambda t: t.update({"fc.weight_scale": torch.ones(64)}), "excluded, yet the file holds it with a scale"),
    (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.float8_e4m3fn)}), "excluded, yet the file holds it in FP8"),
    (lambda t: t.update({"midlayer.mlp.up_proj.weight_scale": torch.ones(3)}), "3 values for 128 output channels"),
    (lambda t: t["midlayer.mlp.up_proj.weight_scale"].zero_(), "not a positive number")],
    ids=["scale missing", "excluded with scale", "excluded in FP8", "scale too short", "scale zero"])
def test_a_file_that_vllm_would_misread_is_refused(quantized, change, message):
    edit(quantized, change)
    with pytest.raises(StageError, match=message):
        audit_draft(quantized)


def test_a_config_without_exclusions_is_refused(quantized):
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]["exclude"]
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageError, match="has no 'exclude'"):
        audit_draft(quantized)


LATENT = LatentSizes(q_lora_rank=32, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 256}
MLP = {f"midlayer.mlp.{x}_proj" for x in ("gate", "up", "down")}
MLA = {f"midlayer.self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")}


@pytest.mark.parametrize(("exclude", "kept"), [(["fc", "lm_head"], {"fc", "lm_head"}), (["lm_head", "*.self_attn.*"], {"lm_head", *MLA}),
                                               (["fc", "lm_head", "*_a_proj*"], {"fc", "lm_head", "midlayer.self_attn.q_a_proj", "midlayer.self_attn.kv_a_proj_with_mqa"})])
def test_a_latent_draft_is_quantized_but_for_what_is_excluded(tmp_path, exclude, kept):
    draft = small_draft(small_shape(hidden_size=64, head_dim=48, kv_heads=4, intermediate_size=128, latent=LATENT, rope_parameters=YARN))
    save_draft(draft, tmp_path / "bf16", torch.bfloat16)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "ptpc_fp8", exclude)
    with pytest.raises(StageError, match="no exclusion that vLLM matches"):
        audit_draft(tmp_path / "fp8")
    rewrite_exclusions(tmp_path / "fp8")
    audit = audit_draft(tmp_path / "fp8")
    assert set(audit.high_precision) == kept and set(audit.quantized) == {"fc", "lm_head", *MLP, *MLA} - kept


def test_a_head_in_fp8_is_refused(tmp_path):
    save_draft(small_draft(small_shape(hidden_size=64, head_dim=32, intermediate_size=128)), tmp_path / "bf16", torch.bfloat16)
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "ptpc_fp8", ["fc"])
    rewrite_exclusions(tmp_path / "fp8")
    with pytest.raises(StageError, match="lm_head is in FP8"):
        audit_draft(tmp_path / "fp8")


@pytest.mark.parametrize("exclude", [["fc", "lm_head"], ["fc", "lm_head", "embed_tokens"]])
def test_an_embedding_stays_in_high_precision_excluded_or_not(tmp_path, exclude):
    save_draft(small_draft(small_shape(hidden_size=64, head_dim=32, intermediate_size=128)), tmp_path / "bf16", torch.bfloat16)
    edit(tmp_path / "bf16", lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(96, 64, dtype=torch.bfloat16)}))
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "ptpc_fp8", exclude)
    rewrite_exclusions(tmp_path / "fp8")
    audit = audit_draft(tmp_path / "fp8")
    assert set(audit.quantized) == LINEARS and set(audit.high_precision) == {"embed_tokens", "fc", "lm_head"}
    edit(tmp_path / "fp8", lambda tensors: tensors.update({"embed_tokens.weight": tensors["embed_tokens.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(StageError, match="embed_tokens is in FP8"):
        audit_draft(tmp_path / "fp8")


def test_files_that_are_no_part_of_the_draft_are_not_audited(quantized):
    save_file({"midlayer.mlp.up_proj.weight": torch.ones(3, 3)}, quantized / "stray.safetensors")
    with pytest.raises(StageError, match="up_proj is in torch.float32"):
        audit_draft(quantized)
    assert set(audit_draft(quantized, [quantized / "model.safetensors"]).quantized) == LINEARS


def test_an_mlp_in_two_precisions_is_refused(quantized):
    """vLLM makes one layer of gate and up."""
    name = "midlayer.mlp.up_proj.weight"
    edit(quantized, lambda tensors: (tensors.update({name: tensors[name].to(torch.bfloat16)}), tensors.pop(name + "_scale")))
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["exclude"].append(r"re:.*gate_up_proj$")
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(StageError, match="gate_proj is excluded, yet the file holds it in FP8 .*gate_up_proj, of which it is a part"):
        audit_draft(quantized)
