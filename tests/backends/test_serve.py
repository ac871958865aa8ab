"""A tiny target with a draft behind Ray Serve, for real."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from raysd.artifacts.stage import no_progress
from raysd.backends.ray_jobs import job_submission_client
from raysd.backends.serve_cluster import ServeCluster, check_same_address, served_here, without_traceback
from raysd.backends.vllm_server import free_port, start_server
from raysd.cli import _planned
from raysd.deployment.config_file import serve_config
from raysd.errors import ExperimentError
from raysd.pipeline.served import what_to_serve
from tests.sweep.test_sweep import tiny_draft
from tests.tiny_models import tiny_llama

KEY = "sk-test-1"
START_S = 240


def write_spec(folder: Path, **changes: Any) -> Path:
    """A target of two heads with a finished draft, and how it is served."""
    tiny_draft(folder / "draft", tiny_llama(folder / "target"))
    rows = [{"id": f"q{index}", "topic": "t", "split": "report", "prompt": f"bado {index} kela"} for index in range(5)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {"name": "tiny", "store": "runs", "target": {"model": "./target", "max_model_len": 512}, "prompts": {"path": "prompts.jsonl"}, "draft": {"checkpoint": "draft"},
                "sweep": {"arms": ["none", "bf16"], "concurrency": [1, 2], "workloads": [{"name": "report", "osl": 32}], "answer_tokens": 32,
                          "engine": {"enforce_eager": True, "max_num_seqs": 8, "kv_cache_bytes": 2**28}},
                "serve": {"port": free_port(), "longest_answer_s": 60, "max_body_bytes": 100_000, "api_keys_env": "RAYSD_TEST_KEYS"}}
    for name, value in changes.items():
        document[name] = document.get(name, {}) | value
    (folder / "tiny.yaml").write_text(yaml.safe_dump(document))
    return folder / "tiny.yaml"


def ask(port: int, path: str = "/v1/completions", body: Any = None, method: str = "POST", key: str | None = KEY, timeout_s: float = 60) -> tuple[int, Any]:
    """Status, and the answer as JSON if it is that."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    content = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
    connection.request(method, path, content, {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"}))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith("{") else text


def streamed(port: int, prompt: str, max_tokens: int, begun: threading.Event | None = None) -> tuple[str, str, int, bool]:
    """Text, how it ended, in how many chunks, and whether the end of the stream was told."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    chunks, done = [], False
    for line in answer:
        if line.startswith(b"data: [DONE]"):
            done = True
        elif line.startswith(b"data: "):
            chunks.append(json.loads(line[6:])["choices"][0])
            if begun is not None:
                begun.set()
    connection.close()
    return "".join(chunk["text"] for chunk in chunks), chunks[-1]["finish_reason"], len(chunks), done


@contextlib.contextmanager
def raysd_serve(spec: Path, keys: str = f"other,{KEY}") -> Iterator[subprocess.Popen]:
    """`raysd serve`, which has told its URL."""
    with (spec.parent / "serve.log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "raysd", "serve", str(spec)], stdout=subprocess.PIPE, stderr=log, text=True,
                                   env={**os.environ, "RAYSD_TEST_KEYS": keys}, cwd=Path(__file__).parents[2])
    try:
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:"), (spec.parent / "serve.log").read_text()[-4000:]
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
        process.stdout.close()


def test_an_arm_is_served_with_keys_limits_and_openai_s_errors_and_ends_with_every_answer_given(tmp_path):
    spec = write_spec(tmp_path)
    port = yaml.safe_load(spec.read_text())["serve"]["port"]
    with raysd_serve(spec) as process:
        log = tmp_path / "serve.log"
        assert "RAY_SERVE_ENABLE_HA_PROXY" not in log.read_text()  # it has HAProxy, and nothing to say of being without
        ours = [child for child in psutil.Process(process.pid).children(recursive=True)]
        assert not any(KEY in " ".join(child.cmdline()) for child in ours if child.is_running())

        text, end, chunks, done = streamed(port, "bado kela", 40)
        assert (end, done) == ("length", True) and 10 <= chunks <= 40 and text
        status, whole = ask(port, body={"model": "tiny", "prompt": "bado kela", "max_tokens": 40, "temperature": 0, "ignore_eos": True})
        assert status == 200 and whole["choices"][0]["text"] == text and whole["usage"]["completion_tokens"] == 40
        status, chat = ask(port, "/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "bado"}], "max_tokens": 4})
        assert status == 200 and chat["usage"]["completion_tokens"] <= 4

        good = {"model": "tiny", "prompt": "bado", "max_tokens": 4}
        for name, expected, given in (
                ("no key", 401, {"body": good, "key": None}), ("another key", 401, {"body": good, "key": "sk-test-2"}), ("no key for models", 401, {"path": "/v1/models", "method": "GET", "key": None}),
                ("no key for metrics", 401, {"path": "/metrics", "method": "GET", "key": None}), ("unknown model", 404, {"body": good | {"model": "nope"}}),
                ("malformed", 400, {"body": '{"model": "tiny", "prompt":'}), ("no JSON", 400, {"body": b"\xff\xfe"}), ("empty", 400, {"body": b""}),
                ("a list", 400, {"body": "[]"}), ("long prompt", 400, {"body": good | {"prompt": "bado kela " * 2000}}), ("too many tokens", 400, {"body": good | {"max_tokens": 9999}}),
                ("wrong type", 400, {"body": good | {"max_tokens": "many"}}), ("long body", 413, {"body": b"x" * 100_001}), ("50 MB", 413, {"body": b"x" * 50_000_000}),
                ("unknown path", 404, {"path": "/v1/nothing", "body": good}), ("wrong method", 405, {"path": "/v1/models", "method": "DELETE"})):
            status, answer = ask(port, **given)
            assert status == expected, (name, status, answer)
            assert {"message", "type", "code"} <= set(answer["error"]), (name, answer)
        assert ask(port, "/health", method="GET", key=None)[0] == 200
        assert ask(port, "/v1/models", method="GET")[1]["data"][0]["id"] == "tiny"

        begun = [threading.Event() for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(streamed, port, f"bado {number}", 450, each) for number, each in enumerate(begun)]
            assert all(each.wait(60) for each in begun)
            process.send_signal(signal.SIGTERM)
            assert [answer.result()[1:4:2] for answer in answers] == [("length", True)] * 6
        assert process.wait(90) == 128 + signal.SIGTERM
        assert KEY not in log.read_text()
    for child in ours:
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, child


def to_serve(spec: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The experiment, its engine, and its Serve config."""
    import argparse

    experiment, store, planned = _planned(argparse.Namespace(spec=spec, store=None))
    served = what_to_serve(experiment, planned, store, None, False, no_progress)
    return experiment, served.spec, serve_config(experiment, served.spec, len(os.sched_getaffinity(0)))


def stats_of(cluster: ServeCluster, folder: Path) -> dict[str, float]:
    """What the replica publishes, asked as Serve asks."""
    (folder / "ask.py").write_text("""
import asyncio, json, ray
from ray import serve

async def ask():
    return await serve.get_deployment_handle("Replica:tiny", "tiny").record_autoscaling_stats.remote()

ray.init(configure_logging=False, log_to_driver=False)
print("told", json.dumps(asyncio.run(ask())))
""")
    client = job_submission_client(cluster._address)
    job = client.submit_job(entrypoint=f"{sys.executable} {folder / 'ask.py'}")
    give_up = time.monotonic() + 120
    while not client.get_job_status(job).is_terminal():
        assert time.monotonic() < give_up
        time.sleep(0.5)
    log = client.get_job_logs(job)
    told = [line for line in log.splitlines() if line.startswith("told ")]
    assert told, log
    return json.loads(told[0][5:])


@pytest.mark.slow
def test_two_ranks_draft_as_one_server_does_and_a_dead_engine_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSD_TEST_KEYS", KEY)
    spec = write_spec(tmp_path, target={"tensor_parallel": 2}, serve={"start_attempts": 2, "stuck_after_s": 5})
    experiment, engine, config = to_serve(spec)
    port = experiment.serve.port
    with start_server(engine, tmp_path / "vllm.log") as plain:
        plain_text = ask(plain.address.port, body={"model": plain.model, "prompt": "bado kela", "max_tokens": 60, "temperature": 0, "ignore_eos": True})[1]["choices"][0]["text"]
    with served_here(experiment, config, print) as (url, cluster):
        assert url == f"http://127.0.0.1:{port}"
        assert streamed(port, "bado kela", 60)[0] == plain_text
        with ThreadPoolExecutor(8) as pool:
            assert all(answer[3] for answer in pool.map(lambda number: streamed(port, f"bado {number}", 200), range(8)))
        told = stats_of(cluster, tmp_path)
        assert 1 <= told["acceptance_length"] <= 4 and told["running"] == told["waiting"] == 0

        for end in (psutil.Process.kill, psutil.Process.suspend):  # it dies; it is stuck
            (core,) = engines()
            end(core)
            with ThreadPoolExecutor(1) as pool:  # what is asked meanwhile comes to an end, and not to a hang
                asked = pool.submit(outcome, port)
                answered_again(port, core, plain_text)
                assert asked.result() in (500, 200, "broken")
    assert not engines()


def engines() -> list[psutil.Process]:
    """vLLM's engine processes below this one."""
    return [process for process in psutil.process_iter(["cmdline"]) if "VLLM::EngineCore" in " ".join(process.info["cmdline"] or []) and _below(process, os.getpid())]


def outcome(port: int) -> int | str:
    """The status of a request, or that its connection broke."""
    try:
        return ask(port, body={"model": "tiny", "prompt": "bado", "max_tokens": 4}, timeout_s=START_S)[0]
    except (OSError, http.client.HTTPException):
        return "broken"


def answered_again(port: int, before: psutil.Process, expected: str) -> None:
    """Waits until another engine than the one before gives the answer."""
    psutil.wait_procs([before], timeout=60)
    give_up = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, answer = ask(port, body={"model": "tiny", "prompt": "bado kela", "max_tokens": 60, "temperature": 0, "ignore_eos": True}, timeout_s=START_S)
            if status == 200:
                assert answer["choices"][0]["text"] == expected
                return
        assert time.monotonic() < give_up
        time.sleep(0.5)


@pytest.mark.slow
def test_another_draft_takes_over_without_a_request_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSD_TEST_KEYS", KEY)
    spec = write_spec(tmp_path, serve={"cpus": 1})  # of two cores: room for one more
    experiment, engine, config = to_serve(spec)
    other = serve_config(experiment, replace(engine, draft=None, k=None), 1)
    port, results, over = experiment.serve.port, [], threading.Event()

    def keep_asking(number: int) -> None:
        while not over.is_set():
            results.append(outcome(port))

    with served_here(experiment, config, print) as (_, cluster):
        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(keep_asking, number) for number in range(2)]
            try:
                before = cluster.details()["applications"]["tiny"]["deployments"]["Replica:tiny"]["replicas"]
                cluster.deploy(other)
                cluster.wait_until_running("tiny", START_S, print)
                after = cluster.details()["applications"]["tiny"]["deployments"]["Replica:tiny"]["replicas"]
                time.sleep(2)
            finally:
                over.set()
            for each in asking:
                each.result()
    assert {each["replica_id"] for each in before}.isdisjoint(each["replica_id"] for each in after if each["state"] == "RUNNING")
    assert len(results) > 100 and set(results) == {200}, [each for each in results if each != 200]


@pytest.mark.slow
def test_without_haproxy_it_is_served_all_the_same_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSD_TEST_KEYS", KEY)
    experiment, _, config = to_serve(write_spec(tmp_path))
    lines: list[str] = []
    with served_here(experiment, config, lines.append, {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}):
        port, good = experiment.serve.port, {"model": "tiny", "prompt": "bado", "max_tokens": 4}
        assert any("RAY_SERVE_ENABLE_HA_PROXY=1" in line for line in lines)
        assert streamed(port, "bado kela", 40)[1:4:2] == ("length", True)
        assert ask(port, body=good, key=None)[0] == 401 and ask(port, body=b"x" * 100_001)[0] == 413
        assert ask(port, body=good | {"model": "nope"})[0] == 404 and ask(port, body="{")[0] == 400


@pytest.mark.slow
def test_what_keeps_a_replica_from_starting_is_told_without_a_traceback(tmp_path):
    spec = write_spec(tmp_path, sweep={"engine": {"max_num_seqs": 8, "enforce_eager": True, "kv_cache_bytes": 2**28, "extra_args": {"attention-backend": "NOT_A_BACKEND"}}})
    done = subprocess.run([sys.executable, "-m", "raysd", "serve", str(spec)], capture_output=True, text=True, timeout=400, env={**os.environ, "RAYSD_TEST_KEYS": KEY},
                          cwd=Path(__file__).parents[2])
    assert done.returncode == 1 and "NOT_A_BACKEND" in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]


def _below(process: psutil.Process, pid: int) -> bool:
    return any(parent.pid == pid for parent in process.parents())


def test_serve_that_listens_elsewhere_is_not_made_to_serve_this():
    asked = {"host": "127.0.0.1", "port": 8000, "request_timeout_s": 60}
    check_same_address(None, asked, "here")
    check_same_address({**asked, "request_timeout_s": None}, asked, "here")
    for running in ({"host": "0.0.0.0", "port": 8000}, {"host": "127.0.0.1", "port": 8001}):
        with pytest.raises(ExperimentError, match=f"listens on {running['host']}:{running['port']}"):
            check_same_address(running, asked, "here")


def test_of_a_traceback_the_error_is_told():
    message = ("Deploying app 'tiny' failed with exception:\nTraceback (most recent call last):\n  File \"a.py\", line 3, in f\n    g()\nray.exceptions.RayTaskError(ValueError): x\n"
               "  File \"b.py\", line 1, in g\nraysd.errors.ExperimentError: the environment has no variable K\n  where: serve.api_keys_env\n  fix:   set it\n")
    assert without_traceback(message) == "raysd.errors.ExperimentError: the environment has no variable K\n  where: serve.api_keys_env\n  fix:   set it"
    assert without_traceback(" A plain word.\n") == "A plain word."
