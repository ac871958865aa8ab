"""What is refused before a cluster is asked for anything."""

from __future__ import annotations

import http.server
import json
import os
import threading

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from raysd.artifacts import FolderHome, Store
from raysd.errors import ExperimentError, TargetError
from raysd.experiment import dump_experiment, load_experiment
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import chain_of, check_experiment, check_local_resources, check_prompts, stages_of

SHORT = {"target": {"model": "./target", "max_model_len": 160}, "capture": {"max_tokens": 16}, "train": {"served_tokens": 16}, "quantize": {"served_tokens": 16},
         "sweep": {"workloads": [{"osl": 16}]}}


@pytest.fixture
def check(write_experiment, tmp_path):
    def check(**changes) -> None:
        experiment = load_experiment(write_experiment(**{**SHORT, **changes}))
        check_prompts(experiment, plan(stages_of(experiment), Store(FolderHome(tmp_path / "runs"))))

    return check


def test_prompts_that_fit_pass(check):
    check()
    check(train=None, quantize=None, sweep={"arms": ["none"], "workloads": [{"osl": 16}]})


@pytest.mark.parametrize("split", ["train", "choose", "report"])
def test_a_prompt_longer_than_the_context_is_refused_in_every_split(check, tmp_path, split):
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    victim = next(row for row in rows if row["split"] == split)
    victim["prompt"] += " and again" * 100
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ExperimentError, match=f"`{victim['id']}` has .* tokens") as caught:
        check()
    assert "prompts.jsonl" in caught.value.where and "max_model_len" in caught.value.fix


def test_the_longest_answer_to_a_split_counts(check):
    with pytest.raises(ExperimentError, match="leave room"):
        check(quantize={"served_tokens": 150})


@pytest.mark.parametrize(("workload", "field"), [({"kind": "random", "isl": 8}, "isl"), ({"prompts": "mine.jsonl"}, "prompts")])
def test_a_workload_that_its_tokenizer_cannot_serve_is_refused(check, tmp_path, workload, field):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "and again " * 100}) + "\n")
    with pytest.raises(ExperimentError) as caught:
        check(sweep={"concurrency": [1], "workloads": [{"osl": 16}, {"name": "second", "osl": 16, **workload}]})
    assert f"sweep.workloads.second.{field}" in caught.value.where and caught.value.exit_code == 64


@pytest.fixture
def refused(write_experiment):
    """Looks at an experiment as `raysd plan` does, and returns what it is refused with."""

    def refused(kind=ExperimentError, **changes):
        with pytest.raises(kind) as caught:
            check_experiment(load_experiment(write_experiment(**changes)))
        return caught.value

    return refused


@pytest.fixture
def target(tmp_path):
    """Changes the target's folder: its tensors by name, or fields of its config.json."""

    def change(tensors=lambda tensors: tensors, **config):
        path, weights = tmp_path / "target" / "config.json", tmp_path / "target" / "model.safetensors"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        save_file(tensors(load_file(weights)), weights)

    return change


def test_an_experiment_that_fits_its_target_passes(write_experiment):
    for changes in ({}, {"draft": {"vocab_size": None}}, {"draft": {"vocab_size": 512}}, {"train": {"conversations_per_step": 4}},
                    {"draft": {"kv_heads": 4, "head_dim": 64}}, {"draft": {"attention_heads": 2}}, {"draft": {"intermediate_size": 8}}):
        check_experiment(load_experiment(write_experiment(**changes)))


@pytest.mark.parametrize(("workload", "where", "what"), [
    ({"kind": "random", "isl": 400}, "sweep.workloads.w.isl", "400 tokens of prompt and 128 of answer are more than target.max_model_len = 512"),
    ({"osl": 512}, "sweep.workloads.w.osl", "leave no room"),
    ({"prompts": "mine.jsonl"}, "sweep.concurrency", "the workload w has 2 prompts, and 8 are to be in flight at once"),
    ({"prompts": "absent.jsonl"}, "sweep.workloads.w.prompts", "no prompt file or folder"),
    ({"prompts": "empty.jsonl"}, "sweep.workloads.w.prompts", "not one prompt"),
])
def test_a_workload_that_cannot_be_asked_is_refused(refused, tmp_path, workload, where, what):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    err = refused(sweep={"workloads": [{"name": "report", "osl": 16}, {"name": "w", **workload}]})
    assert where in err.where and what in err.what and err.exit_code == 64


def test_a_vocabulary_larger_than_the_targets_is_refused(refused):
    err = refused(draft={"vocab_size": 5000})
    assert err.where == "draft.vocab_size" and "5000 tokens are more than the target has, 512" in err.what


def test_fewer_prompts_than_a_step_takes_are_refused(refused):
    for capture, answered in (({}, 4), ({"train_prompts": 3}, 3), ({"mode": "stream"}, 4)):
        err = refused(capture=capture, train={"conversations_per_step": 100})
        assert err.where == "train.conversations_per_step" and f"100 conversations, and {answered} prompts" in err.what


def fused(tensors):  # Phi-3
    parts = [tensors.pop(f"model.layers.3.self_attn.{name}_proj.weight") for name in "qkv"]
    return tensors | {"model.layers.3.self_attn.qkv_proj.weight": np.concatenate(parts)}


def normed_after(tensors):  # OLMo-2
    return tensors | {"model.layers.3.post_feedforward_layernorm.weight": tensors.pop("model.layers.3.input_layernorm.weight")}


def quantized(tensors):
    return tensors | {"model.layers.3.self_attn.o_proj.weight": np.zeros((64, 64), np.int8)}


@pytest.mark.parametrize("change", [fused, normed_after, quantized])
def test_the_targets_layers_may_be_of_any_make(target, write_experiment, change):
    target(change)
    check_experiment(load_experiment(write_experiment()))


def test_weights_that_cannot_be_shared_or_read_are_refused(refused, target, tmp_path):
    target(lambda tensors: tensors | {"lm_head.weight": np.zeros((100, 64), np.float16)}, tie_word_embeddings=False)
    assert "lm_head.weight is [100, 64], its config.json says [512, 64]" in refused().what
    target(lambda tensors: tensors | {"lm_head.weight": np.zeros((512, 64), np.int8)})
    err = refused()
    assert "lm_head.weight'] are stored as I8" in err.what and err.where.startswith("target.model")
    weights = tmp_path / "target" / "model.safetensors"
    for damaged in (weights.read_bytes()[:-1], b"weights", b""):
        weights.write_bytes(damaged)
        assert refused(TargetError).where == str(weights)
    (tmp_path / "target" / "model.safetensors.index.json").write_text("[]")
    assert "index.json" in refused(TargetError).where


def test_a_target_that_changes_its_logits_is_refused(refused, target):
    target(final_logit_softcapping=30.0)
    assert "final_logit_softcapping = 30.0" in refused().what


@pytest.mark.parametrize(("rope", "draft", "field"), [
    ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [1.0] * 16}, {"head_dim": 64}, "draft.head_dim"),
    ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 3, "long_factor": [1.0] * 8}, {}, "target.model"),
    ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": "x", "mscale_all_dim": 1}, {}, "target.model")])
def test_a_rotation_that_cannot_be_computed_is_refused(refused, target, rope, draft, field):
    target(rope_parameters=rope)
    assert refused(draft=draft).where.startswith(field)


def test_a_vocabulary_that_cannot_hold_the_special_tokens_is_refused(refused, check, tmp_path):
    path = tmp_path / "target" / "tokenizer.json"
    document = json.loads(path.read_text())
    words = {token_id: word for word, token_id in document["model"]["vocab"].items()}
    document["added_tokens"] += [{"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True} for i in range(400, 417)]
    path.write_text(json.dumps(document))
    err = refused(draft={"vocab_size": 19})
    assert err.where == "draft.vocab_size" and "19 tokens cannot hold the 20 special tokens" in err.what
    with pytest.raises(ExperimentError, match="19 tokens cannot hold the 20 special tokens"):
        check(draft={"vocab_size": 19})
    check(draft={"vocab_size": 20})


@pytest.mark.parametrize(("asked", "words"), [({"cpus": 10_000}, "10000 CPU cores"), ({"custom": {"rack-7": 1}}, "rack-7")])
def test_what_a_local_ray_cannot_give_is_refused(write_experiment, tmp_path, asked, words):
    experiment = load_experiment(write_experiment(**SHORT, hardware={"resources": {"train": asked}}))
    with pytest.raises(ExperimentError, match=words) as caught:
        check_local_resources(experiment, plan(stages_of(experiment), Store(FolderHome(tmp_path / "runs"))))
    assert caught.value.where == "hardware.resources.train" and "--address" in caught.value.fix


def test_the_job_of_a_stream_needs_what_both_its_parts_ask_for_at_once(write_experiment, tmp_path):
    cores = len(os.sched_getaffinity(0))
    changes = SHORT | {"hardware": {"resources": {"train": {"cpus": cores}, "capture": {"cpus": 1}}}}
    store = Store(FolderHome(tmp_path / "runs"))
    one_after_the_other = load_experiment(write_experiment(**changes))
    check_local_resources(one_after_the_other, plan(stages_of(one_after_the_other), store))
    stream = load_experiment(write_experiment(**changes | {"capture": {"mode": "stream", "max_tokens": 16}}))
    with pytest.raises(ExperimentError, match=f"{cores + 1} CPU cores") as caught:
        check_local_resources(stream, plan(stages_of(stream), store))
    assert caught.value.where == "hardware.resources.train and hardware.resources.capture"
    shared = changes | {"capture": {"mode": "stream", "max_tokens": 16}, "train": {"workers": cores}, "hardware": {"resources": {"train": {"cpus": 1}, "capture": {"cpus": 1}}}}
    stream = load_experiment(write_experiment(**shared))
    with pytest.raises(ExperimentError, match=f"{cores + 1} CPU cores"):
        check_local_resources(stream, plan(stages_of(stream), store))


class Hub:
    """A Hugging Face hub on this machine, of one model whose branch moves each time that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked += [self.path] if self.path.startswith("/api/models/") else []  # its client has questions of its own, too
                body = json.dumps({"id": "org/model", "sha": f"{len(hub.asked):040x}"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    thread = threading.Thread(target=hub.server.serve_forever)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{hub.server.server_port}")  # HF_ENDPOINT, which is read on import
    yield hub
    hub.server.shutdown()
    thread.join()
    hub.server.server_close()


def test_a_branch_that_moves_is_asked_for_once_and_its_commit_is_what_runs(hub, write_experiment, tmp_path):
    experiment = load_experiment(write_experiment(target={"model": "org/model", "revision": "main", "max_model_len": 512}))
    chain = chain_of(experiment)
    assert hub.asked == ["/api/models/org/model/revision/main"]
    pinned = chain.experiment.target
    assert pinned.revision == f"{1:040x}" == chain.stages[0].identity["target"]["commit"]
    chain.check_unchanged()
    assert chain_of(chain.experiment).stages == chain.stages and len(hub.asked) == 1  # as a job does that gets it from its runner
    (tmp_path / "pinned.yaml").write_text(dump_experiment(chain.experiment))
    assert load_experiment(tmp_path / "pinned.yaml") == chain.experiment
    assert stages_of(experiment)[0].fingerprint != chain.stages[0].fingerprint  # it has moved


def test_the_name_of_a_commit_is_in_no_fingerprint(hub, write_experiment):
    target = {"model": "org/model", "max_model_len": 512}
    by_branch = stages_of(load_experiment(write_experiment(target=target)))
    by_commit = stages_of(load_experiment(write_experiment(target=target | {"revision": by_branch[0].identity["target"]["commit"]})))
    assert by_commit == by_branch and len(hub.asked) == 1


def test_a_target_without_a_chat_template_or_a_tokenizer_is_refused(check, tmp_path):
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        path = tmp_path / "target" / name
        if path.exists():
            values = "" if path.suffix == ".jinja" else json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "chat_template"})
            path.write_text(values) if values else path.unlink()
    with pytest.raises(ExperimentError, match="no chat template") as caught:
        check()
    assert caught.value.where == "target.chat_template"
    (tmp_path / "target" / "tokenizer.json").write_text("{")
    with pytest.raises(ExperimentError, match="tokenizer cannot be loaded") as caught:
        check()
    assert "target.model" in caught.value.where
