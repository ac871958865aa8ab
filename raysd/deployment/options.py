"""From an experiment and an arm to what Ray Serve is told, as one plain dict; `backends/` makes an application of it."""

from __future__ import annotations

import math
from typing import Any

from raysd.experiment import Experiment
from raysd.experiment.serve import AutoscalingSection, ServeSection
from raysd.hardware.catalogue import CPU, find_machine
from raysd.sweep.engine import EngineSpec, engine_arguments, extra_flags, speculative_config

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 10.0


def serve_section(experiment: Experiment) -> ServeSection:
    """How the experiment is served; all defaults if it does not say."""
    return experiment.serve or ServeSection()


def served_model(experiment: Experiment) -> str:
    """What clients call the model."""
    return serve_section(experiment).model or experiment.name


def cpus_of_rank(experiment: Experiment, spec: EngineSpec, cores: int) -> int:
    """CPU cores that a rank reserves. cores: of this machine."""
    section = serve_section(experiment)
    if section.cpus is not None or spec.hardware != CPU:
        return section.cpus or 1
    return max(1, cores // (section.autoscaling.max_replicas * spec.tensor_parallel))


def patience_s(experiment: Experiment) -> float:
    """How long it may take until it is served: all the attempts of a replica to start."""
    section = serve_section(experiment)
    return section.start_attempts * (section.engine or experiment.sweep.engine).start_timeout_s


def application_arguments(experiment: Experiment, spec: EngineSpec, cores: int) -> dict[str, Any]:
    """All that the application is built from, JSON-ready: `llm_config`, the arguments of Ray's LLMConfig; `engine_flags`, words of vLLM's command line that add to
    its `engine_kwargs` what the experiment's `extra_args` say; and `replica`, what raysd's own replica is told."""
    section = serve_section(experiment)
    return {"llm_config": llm_config(experiment, spec, cores), "engine_flags": extra_flags(spec.settings),
            "replica": {"api_keys_env": section.api_keys_env, "max_body_bytes": section.max_body_bytes, "stuck_after_s": section.stuck_after_s,
                        "acceptance_floor": section.acceptance_floor, "acceptance_floor_s": 60 * section.acceptance_floor_minutes, "recycle": section.recycle,
                        "cpus": cpus_of_rank(experiment, spec, cores) * spec.tensor_parallel if spec.hardware == CPU else None}}


def llm_config(experiment: Experiment, spec: EngineSpec, cores: int) -> dict[str, Any]:
    """The arguments of `ray.serve.llm.LLMConfig`.

    The engine's are those of the sweep's engines. Ranks share a node (STRICT_PACK): over the network, tensor parallelism would cost more than it gives.
    """
    section = serve_section(experiment)
    bundle = {"CPU": cpus_of_rank(experiment, spec, cores)} | ({} if spec.hardware == CPU else {"GPU": 1})
    return {"model_loading_config": {"model_id": served_model(experiment), "model_source": str(spec.target)},
            "engine_kwargs": engine_arguments(spec) | {"enable_prefix_caching": section.prefix_caching}
            | ({} if spec.target.is_absolute() or experiment.target.revision is None else {"revision": experiment.target.revision})
            | ({} if spec.draft is None else {"speculative_config": speculative_config(spec) | _k_per_batch(section)}),
            **_accelerator(spec.hardware),
            "placement_group_config": {"bundle_per_worker": bundle, "strategy": "STRICT_PACK"},
            "runtime_env": {"env_vars": environment(experiment, spec)},
            # Ray would hold each chunk back for 50 ms, to send several as one.
            "experimental_configs": {"stream_batching_interval_ms": 0},
            "deployment_config": deployment_options(section, spec)}


def _k_per_batch(section: ServeSection) -> dict[str, Any]:
    return {} if section.k_per_batch is None else {"num_speculative_tokens_per_batch_size": [list(each) for each in section.k_per_batch]}


def _accelerator(hardware: str) -> dict[str, Any]:
    if hardware == CPU:
        return {"accelerator_config": {"kind": "cpu"}}
    accelerator = find_machine(hardware).accelerator_type
    return {"accelerator_config": {"kind": "gpu"}} | ({} if accelerator is None else {"accelerator_type": accelerator})


def environment(experiment: Experiment, spec: EngineSpec) -> dict[str, str]:
    """Variables of a replica and of its ranks: what the machines need, and what the engine is told by them, such as AITER's switches."""
    # Ray would wait an hour for an engine that does not start.
    start = {"RAYLLM_ENGINE_START_TIMEOUT_S": str(math.ceil(spec.settings.start_timeout_s))}
    return {**experiment.hardware.env, **start, "VLLM_NO_USAGE_STATS": "1", **({"HF_HUB_OFFLINE": "1"} if spec.target.is_absolute() else {}), **spec.settings.env}


def _policy(scaling: AutoscalingSection) -> dict[str, Any]:
    """Serve's own, which counts replicas as equals, unless one is asked for that looks at acceptance."""
    if scaling.acceptance_length is None:
        return {}
    return {"policy": {"policy_function": "raysd.deployment.policy:ByAcceptance", "policy_kwargs": {"acceptance_length": scaling.acceptance_length}}}


def deployment_options(section: ServeSection, spec: EngineSpec) -> dict[str, Any]:
    """Options of Serve's deployment. Ray's LLM defaults of target and most ongoing requests are 1e9, with which nothing would ever scale."""
    scaling = section.autoscaling
    # Serve counts the load in its config's interval, 10 s if it is not told, however short the look-back is.
    interval_s = min(10.0, scaling.look_back_period_s / 5)
    return {"autoscaling_config": {"min_replicas": scaling.min_replicas, "max_replicas": scaling.max_replicas,
                                   "target_ongoing_requests": scaling.target_of(spec.settings), "metrics_interval_s": interval_s,
                                   "look_back_period_s": scaling.look_back_period_s, "upscale_delay_s": scaling.upscale_delay_s, "downscale_delay_s": scaling.downscale_delay_s,
                                   **_policy(scaling)},
            "max_ongoing_requests": scaling.most_of(spec.settings),
            "graceful_shutdown_timeout_s": section.longest_answer_s,
            "max_constructor_retry_count": section.start_attempts,
            "max_surge_percent": 1 if section.update == "start_first" else 0,  # of the replicas, rounded up
            "health_check_period_s": HEALTH_PERIOD_S, "health_check_timeout_s": HEALTH_TIMEOUT_S,
            # The bundles of the ranks reserve all that a replica takes.
            "ray_actor_options": {"num_cpus": 0}}
