"""What is refused before a cluster is asked for anything."""

from __future__ import annotations

import http.server
import json
import os
import threading

import pytest

from raysd.artifacts import FolderHome, Store
from raysd.errors import ExperimentError
from raysd.experiment import dump_experiment, load_experiment
from raysd.pipeline.plan import plan
from raysd.pipeline.preflight import chain_of, check_local_resources, check_prompts, stages_of

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
