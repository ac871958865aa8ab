"""What vLLM is given of a finished draft: the folder itself, or a copy with what it would misread put right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

from raysd.checks.draft_fit import check_draft_fit, identify_draft
from raysd.checks.draft_served import served_draft, with_served_draft
from raysd.errors import ExperimentError
from raysd.experiment import Experiment
from tests.checks.finished_drafts import (
    CONFIG,
    ENTERING,
    HIDDEN,
    IDS,
    LATENT,
    LATENT_ATTENTION,
    LEAVING,
    SPECULATORS,
    TARGET,
    VOCAB,
    biases,
    cast,
    tensors,
    without,
    write,
    write_bin,
)
from tests.stage_runs import attempt

UNNAMED = without(CONFIG, IDS)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("config", "stated"),
    [(CONFIG, None), (UNNAMED | {"eagle_config": {IDS: ENTERING}}, None), (UNNAMED, None), (CONFIG | {IDS: [0, 3, 7]}, "entering"), (CONFIG | {"draft_vocab_size": 128}, None)],
)
def test_a_draft_that_vllm_reads_rightly_is_passed_on_as_it_is(tmp_path: Path, target, config, stated):
    draft = write(tmp_path / "draft", config)
    assert served_draft(draft, target, stated, tmp_path / "scratch") == draft
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize(
    ("config", "stated", "layers"),
    [(CONFIG | {IDS: LEAVING}, None, ENTERING), (UNNAMED | {"eagle_config": {IDS: LEAVING, "use_aux_hidden_state": True}}, None, ENTERING),
     (CONFIG | {IDS: [0, 4, 7]}, "leaving", [1, 5, 8])],
    ids=["at the top", "in eagle_config", "stated"],
)
def test_layer_ids_are_put_right_in_a_copy_and_the_draft_is_not_touched(tmp_path: Path, target, config, stated, layers):
    draft = write(tmp_path / "draft", config)
    (draft / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in draft.iterdir()}
    served = served_draft(draft, target, stated, tmp_path / "scratch")
    assert served == tmp_path / "scratch" and (served / "model.safetensors").samefile(draft / "model.safetensors") and (served / "tokenizer.json").exists()
    assert config_of(served)[IDS] == config_of(served)["eagle_config"][IDS] == layers
    assert without(config_of(served), IDS, "eagle_config") == without(config, IDS, "eagle_config")
    assert {path.name: path.read_bytes() for path in draft.iterdir()} == before
    assert served_draft(served, target, None, tmp_path / "again") == served  # it says itself how its ids are counted


def test_vllm_is_told_how_many_layers_there_are_where_it_would_take_three(tmp_path: Path, target):
    four = write(tmp_path / "draft", CONFIG | {IDS: [1, 2, 4, 5]}, tensors(aux=4))
    assert config_of(served_draft(four, target, "entering", tmp_path / "four"))["num_aux_hidden_states"] == 4
    inner = write(tmp_path / "inner", UNNAMED | {"eagle_config": {IDS: [1, 2, 4, 5]}}, tensors(aux=4))
    assert served_draft(inner, target, "entering", tmp_path / "kept") == inner
    wrong = write(tmp_path / "wrong", CONFIG | {"num_aux_hidden_states": 4, "num_aux_layers": 4})
    served = config_of(served_draft(wrong, target, None, tmp_path / "three"))
    assert served["num_aux_hidden_states"] == 3 and "num_aux_layers" not in served


def test_the_speculators_format_becomes_what_vllm_makes_of_it(tmp_path: Path, target):
    """Against vLLM's own translation."""
    speculators = pytest.importorskip("vllm.transformers_utils.configs.speculators").SpeculatorsConfig
    config = SPECULATORS | {"fc_norm": False, "norm_output": True, "target_hidden_size": HIDDEN, "norm_before_fc": False}
    draft = write(tmp_path / "draft", config, tensors(layer="layers.0"))
    served = config_of(served_draft(draft, target, None, tmp_path / "scratch"))
    assert served == speculators.extract_transformers_pre_trained_config(json.loads(json.dumps(config)))
    bare = config_of(served_draft(write(tmp_path / "bare", without(config, "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")), target, None, tmp_path / "other"))
    assert bare["norm_before_residual"] is True


def test_every_architecture_is_one_that_vllm_knows():
    from raysd.checks.draft_config import ARCHITECTURES

    known = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry.get_supported_archs()
    modules = {"llama": "llama_eagle3", "qwen3": "qwen3_eagle3", "mla": "deepseek_eagle3"}
    registry = pytest.importorskip("vllm.model_executor.models.registry")._SPECULATIVE_DECODING_MODELS
    for name, family in ARCHITECTURES.items():
        loaded = name if "Eagle3" in name else f"Eagle3{name}"
        assert loaded in known and registry[loaded][0] == modules[family]


def test_a_model_type_that_vllm_takes_for_a_predictor_is_put_right(tmp_path: Path, target):
    config = CONFIG | LATENT | {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV3ForCausalLM"], "target_hidden_size": None}
    served = config_of(served_draft(write(tmp_path / "draft", config, tensors(LATENT_ATTENTION)), target, None, tmp_path / "scratch"))
    assert served["model_type"] == "kimi_k2" and "target_hidden_size" not in served


def test_names_with_model_in_front_lose_it_and_nothing_else(tmp_path: Path, target):
    made = {f"model.{name}": value for name, value in tensors(layer="layers.0").items()}
    draft = write(tmp_path / "draft", CONFIG, made)
    identity = identify_draft(draft)
    served = served_draft(draft, target, None, tmp_path / "scratch")
    written = load_file(served / "model.safetensors")
    assert written.keys() == tensors(layer="layers.0").keys()
    assert all(np.array_equal(written[name], made[f"model.{name}"]) for name in written)
    assert identify_draft(draft) == identity and check_draft_fit(served, target).layers == ENTERING


def test_the_d2t_of_a_whole_vocabulary_is_hidden_from_vllm(tmp_path: Path, target):
    made = tensors() | {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool), "lm_head.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    served = served_draft(write(tmp_path / "draft", CONFIG | {"draft_vocab_size": VOCAB}, made), target, None, tmp_path / "scratch")
    names = set(load_file(served / "model.safetensors"))
    assert not [name for name in names if "d2t" in name and "t2d" not in name] and len(names) == len(made)


def test_shards_stay_shards_and_strays_stay_away(tmp_path: Path, target):
    draft, made = write(tmp_path / "draft", CONFIG | {IDS: LEAVING}), {f"model.{name}": value for name, value in tensors().items()}
    (draft / "model.safetensors").rename(draft / "stray.safetensors")
    parts = {"a.safetensors": list(made)[:5], "b.safetensors": list(made)[5:]}
    for name, part in parts.items():
        save_file({tensor: made[tensor] for tensor in part}, draft / name)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}))
    served = served_draft(draft, target, None, tmp_path / "scratch")
    assert sorted(path.name for path in served.iterdir()) == ["a.safetensors", "b.safetensors", "config.json"]
    assert check_draft_fit(served, target).layers == ENTERING


def test_pytorchs_own_format_becomes_safetensors(tmp_path: Path, target):
    made = {f"model.{name}": value for name, value in cast(tensors(), "bfloat16", "fc.weight").items()}
    draft = write_bin(tmp_path / "draft", CONFIG, dict(list(made.items())[:5]), "pytorch_model-00001-of-00002.bin")
    write_bin(draft, CONFIG, dict(list(made.items())[5:]), "pytorch_model-00002-of-00002.bin")
    (draft / "optimizer.bin").write_bytes(b"no weights")
    served = served_draft(draft, target, None, tmp_path / "scratch")
    assert sorted(path.name for path in served.iterdir()) == ["config.json", *(f"pytorch_model-0000{part}-of-00002.safetensors" for part in (1, 2))]
    written = {name: value for path in served.glob("*.safetensors") for name, value in load_torch(path).items()}
    assert written.keys() == tensors().keys() and all(torch.equal(value, made[f"model.{name}"]) for name, value in written.items())
    assert check_draft_fit(served, target).layers == ENTERING and served_draft(served, target, None, tmp_path / "again") == served


def test_quark_quantizes_what_was_pytorchs_own_format(tmp_path: Path, target):
    from raysd.backends.quark import quantize_checkpoint
    from raysd.quantization.audit import audit_draft
    from raysd.quantization.quantize import rewrite_exclusions

    draft = write_bin(tmp_path / "draft", CONFIG | {"attention_bias": True}, cast(tensors() | biases(), "bfloat16", *tensors().keys() - {"d2t", "t2d"}))
    quantize_checkpoint(served_draft(draft, target, None, tmp_path / "scratch", quantizes=True), tmp_path / "fp8", "ptpc_fp8", ["fc", "lm_head"])
    rewrite_exclusions(tmp_path / "fp8")
    assert len(audit_draft(tmp_path / "fp8").quantized) == 7
    assert check_draft_fit(tmp_path / "fp8", target).layers == ENTERING


@pytest.mark.parametrize("name", ["consolidated.safetensors", "original/consolidated-00001.safetensors"])
def test_what_vllm_would_take_for_the_draft_stays_away(tmp_path: Path, target, name: str):
    draft = write(tmp_path / "draft", CONFIG)
    (draft / name).parent.mkdir(exist_ok=True)
    save_file({"fc.weight": np.zeros((1, 1), np.float32)}, draft / name)
    (draft / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "model.safetensors")}))
    served = served_draft(draft, target, None, tmp_path / "scratch")
    assert sorted(path.name for path in served.iterdir()) == ["config.json", "model.safetensors"]


def experiment(folder: Path, checkpoint: Path, **changes: Any) -> Experiment:
    return Experiment.model_validate({"name": "tiny", "target": {"model": str(folder / "target"), "max_model_len": 256}, "prompts": {"path": str(folder / "absent.jsonl")},
                                      "draft": {"checkpoint": str(checkpoint)}, "sweep": {"arms": ["none", "bf16"]}} | changes)


def test_a_stage_gets_its_draft_as_vllm_must_find_it(tmp_path: Path):
    write(tmp_path / "target", TARGET)
    draft = write(tmp_path / "draft", CONFIG | {IDS: LEAVING})
    with attempt(tmp_path / "store", experiment(tmp_path, draft)) as run:
        given = with_served_draft(run)
        assert given.experiment.draft.checkpoint.is_relative_to(run.work) and config_of(given.experiment.draft.checkpoint)[IDS] == ENTERING
        assert run.experiment.draft.checkpoint == draft and (given.work, given.out, given.pieces) == (run.work, run.out, run.pieces)
    stated = experiment(tmp_path, draft, draft={"checkpoint": str(draft), "layer_ids": "entering"})
    with attempt(tmp_path / "store", stated) as run:
        assert with_served_draft(run).experiment == stated


def test_a_stage_refuses_a_draft_of_another_target(tmp_path: Path):
    write(tmp_path / "target", TARGET | {"hidden_size": 128})
    with attempt(tmp_path / "store", experiment(tmp_path, write(tmp_path / "draft", CONFIG))) as run, pytest.raises(ExperimentError, match="width 64"):
        with_served_draft(run)


def test_layer_ids_without_a_checkpoint_have_no_effect(tmp_path: Path):
    with pytest.raises(ValueError, match="layer_ids: has no effect"):
        experiment(tmp_path, tmp_path, draft={"layer_ids": "leaving"})


# In vLLM: a target whose answers follow from their last token, and a draft that knows them from what one layer adds to the stream.


def legible_target(folder: Path) -> Path:
    """A target of 4 layers in which layer 1 adds a vector that tells its token, the others nothing; every token has one successor."""
    from safetensors.torch import load_file, save_file

    from tests.tiny_models import chained_llama

    weights = chained_llama(folder) / "model.safetensors"
    made = load_file(weights)
    made["model.layers.1.mlp.down_proj.weight"] *= 3  # with 10, the answers follow no more from their last token
    save_file(made, weights, metadata={"format": "pt"})
    return folder


def reading_draft(folder: Path, target: Path) -> Path:
    """A draft without training: `fc` subtracts the stream entering layer 1 from that entering layer 2, and a token's row of the head is what is left
    of the token two before it. So it proposes the right token if it reads these two layers, and none that is right if it reads any others."""
    from transformers import AutoModelForCausalLM

    from raysd.draft.checkpoint import save_draft
    from raysd.draft.model import Eagle3Draft
    from raysd.draft.shape import draft_shape
    from raysd.experiment.draft import DraftSection
    from raysd.target import read_shape

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.arange(model.config.vocab_size)[:, None], output_hidden_states=True)
    added, successor = (states.hidden_states[2] - states.hidden_states[1])[:, 0], states.logits[:, 0].argmax(-1)
    shape = draft_shape(DraftSection(vocab_size=384), read_shape(target))
    draft = Eagle3Draft(shape, torch.zeros(shape.target_vocab_size, shape.hidden_size), torch.arange(3, 3 + 384))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
        width = shape.hidden_size
        draft.fc.weight.copy_(16 * torch.cat([-torch.eye(width), torch.eye(width)], dim=1))
        for token in range(3, shape.target_vocab_size):
            row = successor[successor[token]] - 3
            if 0 <= row < 384:
                draft.lm_head.weight[row] = added[token] / added[token].norm()
    save_draft(draft, folder, torch.bfloat16)
    return folder


def rewritten(folder: Path, source: Path, config: dict[str, Any], rename) -> Path:
    """The same draft as another trainer would have left it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    save_file({rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_vllm_serves_the_same_draft_whoever_wrote_it(tmp_path: Path):
    from raysd.experiment.engine import EngineSettings
    from raysd.load.arrivals import Load
    from raysd.load.requests import Request
    from raysd.load.run import run_load
    from raysd.sweep.engine import EngineSpec
    from raysd.target import read_shape
    from tests.servers import start_servers

    folder = legible_target(tmp_path / "target")
    target, ours = read_shape(folder), reading_draft(tmp_path / "ours", folder)
    flat = without(config_of(ours), IDS, "eagle_config", "num_aux_hidden_states", "target_hidden_size")
    others = {
        "leaving": write_bin(tmp_path / "leaving", flat | {"architectures": ["LlamaForCausalLM"], "eagle_config": {IDS: [0, 1]}},
                             {f"model.{name.replace('midlayer.', 'layers.0.')}": tensor for name, tensor in load_torch(ours / "model.safetensors").items()}),
        "speculators": rewritten(tmp_path / "speculators", ours, {"speculators_model_type": "eagle3", "speculators_config": {}, "draft_vocab_size": 384, "norm_before_residual": False,
                                                                  IDS: [1, 2], "transformer_layer_config": without(flat, "architectures", "draft_vocab_size")},
                                 lambda name: name.replace("midlayer.", "layers.0."))}
    drafts = {"ours": served_draft(ours, target, None, tmp_path / "unused")} | {name: served_draft(draft, target, None, tmp_path / f"served-{name}")
                                                                                for name, draft in others.items()}
    assert drafts["ours"] == ours and not set(drafts.values()) & set(others.values())
    untold = rewritten(tmp_path / "untold", ours, flat | {IDS: [1, 2]}, str)
    drafts["misread"] = served_draft(untold, target, "leaving", tmp_path / "served-misread")
    settings = EngineSettings(max_num_seqs=4, enforce_eager=True, kv_cache_bytes=2**26, start_timeout_s=400)
    specs = {name: EngineSpec(target=folder, draft=draft, k=2, dtype="bfloat16", tensor_parallel=1, max_model_len=256, chat_template=None, trust_remote_code=False,
                              hardware="cpu", settings=settings) for name, draft in drafts.items()}
    counted, answers = {}, {}
    with start_servers([(spec, tmp_path / f"{name}.log") for name, spec in specs.items()]) as servers:
        for name, server in zip(specs, servers, strict=True):
            asked = [Request(f"q{start}", (start, start + 7), 40, 0.0, True) for start in (20, 60, 100, 140)]
            results = run_load(server.address, server.model, asked, Load(concurrency=1)).results
            answers[name], counted[name] = [result.token_ids for result in results], server.counters().acceptance
    assert counted["ours"] == counted["leaving"] == counted["speculators"] and answers["ours"] == answers["leaving"] == answers["speculators"]
    assert counted["ours"].per_position[0] > 0.5 * counted["ours"].drafts and counted["misread"].per_position[0] < 0.1 * counted["misread"].drafts
