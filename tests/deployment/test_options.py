"""What Ray Serve and vLLM are told, as plain data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raysd.backends.vllm_server import server_command
from raysd.deployment.config_file import config_text, serve_config
from raysd.deployment.options import application_arguments, llm_config
from raysd.errors import ExperimentError
from raysd.experiment import dump_experiment, load_experiment
from raysd.sweep.engine import engine_spec

DRAFT = Path("/store/draft")
CORES = 8
MI355X = {"name": "mi355x", "resources": {"sweep": {"gpus": 4}}}


@pytest.fixture
def loaded(write_experiment):
    def load(**changes: Any):
        return load_experiment(write_experiment(**changes))
    return load


def spec_of(experiment, draft: Path | None = DRAFT):
    return engine_spec(experiment, Path("/models/target"), draft, experiment.sweep.k[0], (experiment.serve and experiment.serve.engine) or experiment.sweep.engine)


def config_of(experiment, draft: Path | None = DRAFT) -> dict[str, Any]:
    return llm_config(experiment, spec_of(experiment, draft), CORES)


def test_the_engine_that_is_served_is_the_one_that_was_measured(loaded):
    engine = {"max_num_seqs": 64, "enforce_eager": True, "extra_args": {"attention-backend": "TRITON_ATTN", "kv-cache-dtype": "fp8"},
              "draft_args": {"attention_backend": "TRITON_ATTN", "draft_tensor_parallel_size": 1}}
    experiment = loaded(hardware=MI355X, target={"model": "./target", "max_model_len": 512, "tensor_parallel": 4}, sweep={"engine": engine})
    told, command = application_arguments(experiment, spec_of(experiment), CORES), server_command(spec_of(experiment), 1)
    measured: dict[str, Any] = {}
    for word, after in zip(command, [*command[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            measured[name.replace("-", "_")] = value or (after if not after.startswith("--") else True)
    kwargs = told["llm_config"]["engine_kwargs"]
    speculation = kwargs.pop("speculative_config")
    assert json.loads(measured.pop("speculative_config")) == speculation
    assert speculation == {"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": 3, "use_local_argmax_reduction": True,
                           "attention_backend": "TRITON_ATTN", "draft_tensor_parallel_size": 1}
    assert kwargs.pop("enable_prefix_caching") is False and measured.pop("no_enable_prefix_caching")
    assert told["engine_flags"] == ["--attention-backend=TRITON_ATTN", "--kv-cache-dtype=fp8"]
    for name in ("model", "served_model_name", "host", "port", "disable_uvicorn_access_log", "per_request_spec_decode_metrics"):
        measured.pop(name, None)
    assert {name: str(value) for name, value in kwargs.items()} | {"attention_backend": "TRITON_ATTN", "kv_cache_dtype": "fp8"} == {name: str(value) for name, value in measured.items()}


def test_ranks_share_a_node_and_each_has_an_accelerator_of_the_kind(loaded):
    told = config_of(loaded(hardware=MI355X, target={"model": "./target", "max_model_len": 512, "tensor_parallel": 4}, serve={"cpus": 6}))
    assert told["placement_group_config"] == {"bundle_per_worker": {"GPU": 1, "CPU": 6}, "strategy": "STRICT_PACK"}
    assert told["accelerator_type"] == "AMD-Instinct-MI355X-OAM" and told["accelerator_config"] == {"kind": "gpu"}
    assert told["engine_kwargs"]["tensor_parallel_size"] == 4


def test_a_cpu_has_no_accelerator(loaded):
    told = config_of(loaded())
    assert told["accelerator_config"] == {"kind": "cpu"} and "accelerator_type" not in told
    assert told["placement_group_config"]["bundle_per_worker"] == {"CPU": 8}


@pytest.mark.parametrize(("replicas", "ranks", "asked", "cpus"), [(1, 1, None, 8), (2, 1, None, 4), (1, 2, None, 4), (3, 2, None, 1), (9, 1, None, 1), (2, 1, 3, 3)])
def test_the_cores_of_a_cpu_are_shared_by_the_ranks_of_all_replicas(loaded, replicas, ranks, asked, cpus):
    experiment = loaded(target={"model": "./target", "max_model_len": 512, "tensor_parallel": ranks}, serve={"cpus": asked, "autoscaling": {"max_replicas": replicas}})
    told = application_arguments(experiment, spec_of(experiment), CORES)
    assert told["llm_config"]["placement_group_config"]["bundle_per_worker"] == {"CPU": cpus} and told["replica"]["cpus"] == cpus * ranks


def test_a_target_of_the_hub_is_fetched_by_the_replicas_at_its_commit(loaded):
    experiment = loaded()
    hub = experiment.model_copy(update={"target": experiment.target.model_copy(update={"model": "org/model", "revision": "0" * 40})})
    told = llm_config(hub, engine_spec(hub, Path("org/model"), DRAFT, 3), CORES)
    assert told["model_loading_config"]["model_source"] == "org/model" and told["engine_kwargs"]["revision"] == "0" * 40
    assert "HF_HUB_OFFLINE" not in told["runtime_env"]["env_vars"]
    assert "revision" not in config_of(experiment)["engine_kwargs"]


def test_switches_of_the_engine_and_of_the_machines_are_variables_of_the_replica(loaded):
    told = config_of(loaded(hardware={**MI355X, "env": {"NCCL_SOCKET_IFNAME": "eth0", "VLLM_ROCM_USE_AITER": "0"}},
                            sweep={"engine": {"env": {"VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MLA": "1"}}}))
    assert told["runtime_env"]["env_vars"] == {"NCCL_SOCKET_IFNAME": "eth0", "VLLM_ROCM_USE_AITER": "1", "VLLM_ROCM_USE_AITER_MLA": "1",
                                               "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "RAYLLM_ENGINE_START_TIMEOUT_S": "600"}


def test_settings_of_the_serve_section_replace_those_of_the_sweep(loaded):
    told = config_of(loaded(serve={"engine": {"max_num_seqs": 128, "env": {"A": "1"}}, "prefix_caching": True}))
    assert told["engine_kwargs"]["max_num_seqs"] == 128 and told["engine_kwargs"]["enable_prefix_caching"] is True
    assert told["deployment_config"]["max_ongoing_requests"] == 128 and told["runtime_env"]["env_vars"]["A"] == "1"


@pytest.mark.parametrize(("update", "surge"), [(None, 1), ("start_first", 1), ("stop_first", 0)])
def test_another_draft_takes_over_replica_by_replica(loaded, update, surge):
    assert config_of(loaded(serve={} if update is None else {"update": update}))["deployment_config"]["max_surge_percent"] == surge


def test_replicas_scale_with_the_load(loaded):
    told = config_of(loaded(serve={"longest_answer_s": 900, "start_attempts": 2, "autoscaling": {
        "min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 12, "max_ongoing_requests": 14, "look_back_period_s": 5, "upscale_delay_s": 3, "downscale_delay_s": 60}}))
    options = told["deployment_config"]
    assert options["autoscaling_config"] == {"min_replicas": 2, "max_replicas": 6, "target_ongoing_requests": 12, "metrics_interval_s": 1, "look_back_period_s": 5, "upscale_delay_s": 3,
                                             "downscale_delay_s": 60}
    assert (options["max_ongoing_requests"], options["graceful_shutdown_timeout_s"], options["max_constructor_retry_count"]) == (14, 900, 2)
    assert told["experimental_configs"] == {"stream_batching_interval_ms": 0}


@pytest.mark.parametrize(("sequences", "target"), [(1, 1), (2, 1), (16, 10), (64, 42)])
def test_without_a_word_a_replica_is_to_have_two_thirds_of_what_it_decodes_at_once(loaded, sequences, target):
    options = config_of(loaded(sweep={"engine": {"max_num_seqs": sequences}, "concurrency": [1]}))["deployment_config"]
    assert (options["max_ongoing_requests"], options["autoscaling_config"]["target_ongoing_requests"]) == (sequences, target)


def test_an_arm_without_a_draft_speculates_on_nothing(loaded):
    assert "speculative_config" not in config_of(loaded(), None)["engine_kwargs"]


def test_ray_takes_the_arguments(loaded):
    from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

    experiment = loaded(hardware=MI355X, target={"model": "./target", "max_model_len": 512, "tensor_parallel": 4})
    for told in (config_of(experiment), config_of(loaded())):
        assert LLMConfig(**json.loads(json.dumps(told))).model_id == "tiny"


def test_serve_and_kuberay_take_the_file(loaded):
    from ray.serve.schema import ServeDeploySchema

    experiment = loaded(serve={"host": "0.0.0.0", "port": 8123, "api_keys_env": "RAYSD_API_KEYS", "route": "/llm", "longest_answer_s": 300})
    text = config_text(experiment, serve_config(experiment, spec_of(experiment), CORES))
    document = yaml.safe_load(text)
    assert "#     RAY_SERVE_ENABLE_HA_PROXY=1\n" in text and "#     RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=300\n" in text
    schema = ServeDeploySchema.model_validate(document)
    assert (schema.http_options.host, schema.http_options.port, schema.http_options.request_timeout_s) == ("0.0.0.0", 8123, 300)
    (application,) = schema.applications
    assert (application.name, application.route_prefix, application.import_path) == ("tiny", "/llm", "raysd.backends.serve_app:build")
    assert application.args == application_arguments(experiment, spec_of(experiment), CORES)
    assert document["proxy_location"] == "EveryNode"
    assert application.args["replica"]["api_keys_env"] == "RAYSD_API_KEYS"


def test_what_is_asked_for_by_no_one_is_on_loopback(loaded):
    experiment = loaded()
    document = serve_config(experiment, spec_of(experiment), CORES)
    assert document["http_options"]["host"] == "127.0.0.1" and document["proxy_location"] == "HeadOnly"


@pytest.mark.parametrize(("serve", "field", "words"), [
    ({"host": "0.0.0.0"}, "serve.host", "no keys are asked for"),
    ({"host": "10.0.0.4"}, "serve.host", "no keys are asked for"),
    ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, "serve.autoscaling.max_replicas", "below min_replicas"),
    ({"autoscaling": {"max_ongoing_requests": 8, "target_ongoing_requests": 9}}, "serve.autoscaling.target_ongoing_requests", "above max_ongoing_requests"),
    ({"autoscaling": {"target_ongoing_requests": 17}}, "serve.autoscaling.target_ongoing_requests", "above the 16"),
    ({"arm": "none", "k": 2}, "serve.k", "drafts nothing"),
    ({"arm": "none", "acceptance_floor": 1.5}, "serve.acceptance_floor", "drafts nothing"),
    ({"recycle": True}, "serve.recycle", "acceptance_floor"),
    ({"acceptance_floor_minutes": 3}, "serve.acceptance_floor_minutes", "acceptance_floor"),
    ({"arm": "int4"}, "serve.arm", "int4"),
    ({"api_keys_env": "MY KEY"}, "serve.api_keys_env", "pattern"),
    ({"api_keys_env": "sk-123"}, "serve.api_keys_env", "pattern"),
    ({"route": "llm"}, "serve.route", "pattern"),
    ({"route": "/llm/"}, "serve.route", "pattern"),
    ({"port": 0}, "serve.port", "greater"),
    ({"engine": {"gpu_memory_frac": 0.5}}, "serve.engine.gpu_memory_frac", "no effect with hardware.name: cpu"),
    ({"replicas": 2}, "serve.replicas", "unknown key"),
])
def test_what_cannot_be_served_is_refused(write_experiment, serve, field, words):
    with pytest.raises(ExperimentError, match=words) as caught:
        load_experiment(write_experiment(serve=serve))
    assert caught.value.where.endswith(f": {field}")


@pytest.mark.parametrize(("changes", "arm"), [({}, "fp8"), ({"quantize": None}, "bf16"), ({"quantize": None, "train": None, "capture": None}, "none")])
def test_the_best_arm_that_is_known_is_served(loaded, changes, arm):
    arms = {"fp8": ["none", "bf16", "fp8"], "bf16": ["none", "bf16"], "none": ["none"]}[arm]
    assert loaded(**changes, sweep={"arms": arms}).served_arm() == arm


@pytest.mark.parametrize(("arm", "changes"), [("fp8", {"quantize": None}), ("bf16", {"quantize": None, "train": None, "capture": None})])
def test_an_arm_that_nothing_drafts_for_is_refused(write_experiment, arm, changes):
    with pytest.raises(ExperimentError, match="no draft") as caught:
        load_experiment(write_experiment(**changes, sweep={"arms": ["none"]}, serve={"arm": arm}))
    assert caught.value.where.endswith(": serve.arm")


def test_the_resolved_experiment_loads_back_equal(loaded, tmp_path):
    experiment = loaded(serve={"acceptance_floor": 1.5, "engine": {"max_num_seqs": 64}, "autoscaling": {"max_replicas": 4}})
    (tmp_path / "again.yaml").write_text(dump_experiment(experiment))
    assert load_experiment(tmp_path / "again.yaml") == experiment


def test_how_it_is_served_changes_no_result(loaded):
    assert loaded(serve={"cpus": 3, "longest_answer_s": 77}).serve.result_values() == {}
