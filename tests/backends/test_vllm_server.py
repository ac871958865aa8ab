import json
import os
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from raysd.backends.engine_log import telling_lines
from raysd.backends.process_group import group_members
from raysd.backends.vllm_server import free_port, launch, parse_counters, server_command, server_environment, start_server
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError
from raysd.experiment.engine import DRAFT_KEYS, SERVER_FLAGS, EngineSettings
from raysd.sweep.engine import EngineCounters, EngineSpec
from tests.tiny_models import tiny_llama

SETTINGS = EngineSettings(max_num_seqs=4, enforce_eager=True, kv_cache_bytes=2**26, start_timeout_s=180)


def spec(target: Path = Path("/models/t"), **changes) -> EngineSpec:
    return replace(EngineSpec(target=target, draft=None, k=None, dtype="bfloat16", tensor_parallel=1, max_model_len=256, chat_template=None,
                              trust_remote_code=False, hardware="cpu", settings=SETTINGS), **changes)


def value_of(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_arms_differ_in_nothing_but_what_speculation_needs():
    none, drafting = server_command(spec(), 1), server_command(spec(draft=Path("/models/d"), k=3), 1)
    assert drafting[:len(none)] == none
    name, config, *of_requests = drafting[len(none):]
    assert name == "--speculative-config" and of_requests == ["--per-request-spec-decode-metrics", "summary"]
    assert json.loads(config) == {"method": "eagle3", "model": "/models/d", "num_speculative_tokens": 3, "use_local_argmax_reduction": True}


def test_synthetic_acceptance_is_asked_of_the_engines_that_draft():
    settings = replace(spec(hardware="mi355x", draft=Path("/d"), k=2), acceptance_rates=(0.8, 0.5))
    config = json.loads(value_of(server_command(settings, 1), "--speculative-config"))
    assert config["rejection_sample_method"] == "synthetic" and config["synthetic_acceptance_rates"] == [0.8, 0.5]


def test_vllm_takes_the_rates_as_they_are_given():
    from vllm.config.speculative import SpeculativeConfig

    assert SpeculativeConfig._resolve_synthetic_acceptance_rates(3, [0.8, 0.5, 0.5], None) == [0.8, 0.5, 0.5]
    with pytest.raises(ValueError, match="length 2"):
        SpeculativeConfig._resolve_synthetic_acceptance_rates(2, [0.8, 0.5, 0.5], None)


def test_no_arm_answers_from_a_cache_of_prefixes():
    assert "--no-enable-prefix-caching" in server_command(spec(), 1)


def test_code_of_the_model_runs_only_when_the_experiment_says_so():
    assert "--trust-remote-code" not in server_command(spec(), 1)
    assert "--trust-remote-code" in server_command(spec(trust_remote_code=True), 1)


def test_extra_arguments_reach_vllm_in_its_own_spelling():
    settings = EngineSettings(extra_args={"attention_backend": "TRITON_ATTN", "async-scheduling": False, "enable-dbo": True},
                              draft_args={"use_local_argmax_reduction": False})
    command = server_command(spec(settings=settings, draft=Path("/d"), k=1), 1)
    assert "--attention-backend=TRITON_ATTN" in command
    assert "--no-async-scheduling" in command and "--enable-dbo" in command and "--enforce-eager" not in command
    assert json.loads(value_of(command, "--speculative-config"))["use_local_argmax_reduction"] is False


@pytest.fixture(scope="module")
def parser():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser(exit_on_error=False))


def test_vllm_reads_extra_arguments_as_they_are_meant(parser):
    given = {"compilation_config.cudagraph_mode": "NONE", "compilation-config.compile_cache_save_format": "binary", "compilation-config.use_inductor_graph_partition": True,
             "uvicorn_log_level": "debug", "async-scheduling": False, "fingerprint-value": "--dashes first", "seed": -1}
    read = parser.parse_args(server_command(spec(settings=EngineSettings(extra_args=given)), 1)[3:])
    config = read.compilation_config
    assert (config.cudagraph_mode.name, config.compile_cache_save_format, config.use_inductor_graph_partition) == ("NONE", "binary", True)
    assert (read.uvicorn_log_level, read.async_scheduling, read.fingerprint_value, read.seed) == ("debug", False, "--dashes first", -1)


def test_what_raysd_passes_is_not_for_extra_arguments_and_all_that_is_refused_is_an_argument_of_vllm(parser):
    passed = {word for hardware in ("cpu", "mi355x") for word in server_command(spec(
        hardware=hardware, draft=Path("/d"), k=1, chat_template=Path("/t"), trust_remote_code=True), 1) if word.startswith("--")}
    assert len(passed) > 15 and {word.removeprefix("--").removeprefix("no-") for word in passed} <= set(SERVER_FLAGS)
    known = {option.removeprefix("--") for action in parser._actions for option in action.option_strings if option.startswith("--")}
    assert set(SERVER_FLAGS) <= known
    for name in known - {f"no-{taken}" for taken in SERVER_FLAGS} - set(SERVER_FLAGS):
        EngineSettings(extra_args={name: "x"})  # none is refused for being the beginning of another


def test_all_keys_that_are_refused_of_a_draft_are_vllms():
    from vllm.config.speculative import SpeculativeConfig

    assert set(DRAFT_KEYS) <= set(SpeculativeConfig.__dataclass_fields__)


def test_a_gpu_engine_takes_a_share_of_the_gpu_and_no_cpu_settings():
    command = server_command(spec(hardware="mi355x"), 1)
    assert value_of(command, "--gpu-memory-utilization") == "0.9" and "--kv-cache-memory-bytes" not in command
    assert "VLLM_CPU_OMP_THREADS_BIND" not in server_environment(spec(hardware="mi355x"), {})


def test_a_cpu_engine_gets_exactly_its_kv_cache_and_all_cores_of_this_process():
    assert value_of(server_command(spec(), 1), "--kv-cache-memory-bytes") == str(2**26)
    environment = server_environment(spec(), {"VLLM_CPU_KVCACHE_SPACE": "40", "OMP_NUM_THREADS": "1", "HOME": "/home/a"})
    assert environment["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment
    assert environment["HOME"] == "/home/a"


def test_ranks_of_one_engine_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {4, 5, 6, 7, 8})
    assert server_environment(spec(tensor_parallel=2), {})["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7,8"
    assert server_environment(spec(tensor_parallel=6), {})["VLLM_CPU_OMP_THREADS_BIND"].count("|") == 5


def test_an_engine_of_one_rank_computes_in_its_own_process_and_ranks_in_theirs(monkeypatch):
    assert server_environment(spec(), {})["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    ranks = server_environment(spec(tensor_parallel=2), {"OMP_NUM_THREADS": "1"})
    assert not {"VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "KMP_AFFINITY"} & set(ranks)


def test_the_environment_of_the_experiment_wins_and_preloads_are_kept():
    environment = server_environment(spec(settings=EngineSettings(env={"OMP_NUM_THREADS": "7"})), {"LD_PRELOAD": "/lib/own.so"})
    assert environment["OMP_NUM_THREADS"] == "7"
    assert "/lib/own.so" in environment["LD_PRELOAD"].split(":")


def test_counters_of_several_engines_add_up():
    text = "\n".join(f'vllm:spec_decode_{name}_total{{engine="{engine}"{more}}} {value}' for engine in "01" for name, more, value in [
        ("num_drafts", "", 10.0), ("num_draft_tokens", "", 30.0), ("num_accepted_tokens", "", 12.0),
        ("num_accepted_tokens_per_pos", ',position="0"', 8.0), ("num_accepted_tokens_per_pos", ',position="1"', 4.0),
        ("num_accepted_tokens_per_pos", ',position="2"', 0.0)]) + "\n"
    text += "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 1.0\nvllm:prefix_cache_hits_total 48.0\nvllm:num_preemptions_total 5.0\nprocess_start_time_seconds 1.7e9\n"
    counted = EngineCounters(AcceptanceCounts(20, 60, 24, (16, 8, 0)), 3, 48, 5, 1.7e9)
    assert parse_counters(text) == counted
    by_ray = text.replace("vllm:", "ray_vllm_")
    assert parse_counters(by_ray) == counted, "as Ray exports them"
    as_gauges = "".join(line.replace("_total{", "{") + "\n" for line in by_ray.splitlines() if "_total{" in line)
    assert parse_counters(by_ray + as_gauges) == counted, "Ray exports each counter twice, once as a gauge"
    assert parse_counters("vllm:num_requests_running 0.0\n") == EngineCounters(AcceptanceCounts(0, 0, 0, ()), 0, 0, 0, 0)
    assert parse_counters("process_start_time_seconds 1.7e9\n") is None


def test_the_log_is_boiled_down_to_what_went_wrong():
    log = "\n".join(["(APIServer pid=1) INFO 11-29 21:30:38 [a.py:1] non-default args", *["(Worker pid=7) ERROR 11-29 21:30:39 [w.py:9] ValueError: no key t"] * 2,
                     "(EngineCore pid=2) ERROR 11-29 21:30:39 [c.py:2] ValueError: no key t", "Traceback (most recent call last):",
                     "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"])
    assert telling_lines(log) == ["ValueError: no key t"]
    assert telling_lines("one\n\ntwo\n") == ["one", "two"]


def test_no_port_is_given_twice_though_nobody_listens_on_it_yet():
    assert len({free_port() for _ in range(200)}) == 200


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "target")


def ask(base_url: str, body: dict) -> dict:
    request = urllib.request.Request(f"{base_url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_a_server_answers_counts_and_leaves_nothing_behind(target, tmp_path):
    with pytest.raises(RuntimeError, match="the block fails"), start_server(spec(target), tmp_path / "logs" / "none.log") as server:
        body = {"model": server.model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        first, second = (ask(server.address.url, body)["choices"][0]["token_ids"] for _ in range(2))
        assert first == second and len(first) >= 1
        counters = server.counters()
        assert counters.acceptance == AcceptanceCounts(0, 0, 0, ()) and counters.running == counters.prefix_hit_tokens == counters.preemptions == 0
        assert abs(counters.started_s + server.start_s - time.time()) < 60
        assert 0 < server.start_s < 180
        group = server._process.pid
        assert len(group_members(group)) >= 2
        raise RuntimeError("the block fails")
    assert group_members(group) == []
    with pytest.raises(EngineError, match="ended"):
        server.check_alive()


def test_a_folder_without_a_model_is_an_error_that_names_the_log(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match="(?s)before it was ready.*exit code 1.*Invalid repository ID or local directory") as caught, start_server(spec(tmp_path / "empty"), tmp_path / "e.log"):
        pytest.fail("the engine started without a model")
    assert caught.value.where == str(tmp_path / "e.log")


def test_a_machine_that_starts_no_process_is_an_error_of_the_engine(tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(EngineError, match="process cannot be started"):
        launch(spec(), tmp_path / "logs" / "none.log")
