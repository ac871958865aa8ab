"""What a vLLM engine is asked to be, as data; `backends/` makes it run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raysd.draft.acceptance import AcceptanceCounts
from raysd.experiment import Experiment
from raysd.experiment.engine import Argument, EngineSettings, server_flag
from raysd.load.address import Address


@dataclass(frozen=True)
class EngineSpec:
    """One vLLM OpenAI server."""

    target: Path
    """Folder of the target's checkpoint."""
    draft: Path | None
    """Folder of the draft's checkpoint; None: no speculation."""
    k: int | None
    """Tokens drafted per verify step; None without a draft."""
    dtype: str
    tensor_parallel: int
    max_model_len: int
    chat_template: Path | None
    trust_remote_code: bool
    hardware: str
    """`cpu`, or a name of the hardware catalogue."""
    settings: EngineSettings
    acceptance_rates: tuple[float, ...] | None = None
    """Of synthetic acceptance, one for each of the k tokens; None: what the target accepts."""


@dataclass(frozen=True)
class EngineCounters:
    """What an engine says of itself at one moment. All but `running` and `started_s` only grow while it lives."""

    acceptance: AcceptanceCounts
    """All zero without a draft."""
    running: int
    """Requests that it works on or has queued."""
    prefix_hit_tokens: int
    """Prompt tokens that it took from its prefix cache instead of computing them."""
    preemptions: int
    """Requests that it threw out of its KV cache, to compute them again."""
    started_s: float
    """When its server's process started, in seconds since 1970."""


class Server(Protocol):
    """A vLLM server that was started."""

    address: Address
    model: str
    """The model name to put into requests."""
    log_path: Path
    command: list[str]
    """The command line that started it."""
    start_s: float | None
    """From the start of its process until it was ready; None until then."""

    def is_ready(self) -> bool:
        """Whether it answers. Raises EngineError, with the telling lines of the log, if it has ended or takes too long."""

    def counters(self) -> EngineCounters:
        """What it counted since it started. Raises EngineError if that cannot be read."""

    def check_alive(self) -> None:
        """Raises EngineError, with the telling lines of the log, if the server's process has ended."""

    def stop(self) -> None:
        """Ends every process of the server. Returns when none is left."""


Launch = Callable[[EngineSpec, Path], Server]
"""`launch(spec, log_path)`: a server whose process has been started and is not ready yet. Whoever launches it stops it. Raises EngineError if the
machine starts no process."""

StartServer = Callable[[EngineSpec, Path], AbstractContextManager[Server]]
"""`with start_server(spec, log_path) as server:` is ready on entry; on exit every process of it has ended."""


def engine_spec(experiment: Experiment, target: Path, draft: Path | None, k: int | None, settings: EngineSettings | None = None) -> EngineSpec:
    """The engine of one arm of an experiment; settings and acceptance are the sweep's unless other settings are given: then what the target accepts is asked for."""
    section, rates = experiment.target, experiment.sweep.acceptance.rates
    return EngineSpec(target=target, draft=draft, k=k if draft else None, dtype=section.dtype, tensor_parallel=section.tensor_parallel,
                      max_model_len=section.max_model_len, chat_template=section.chat_template, trust_remote_code=section.trust_remote_code,
                      hardware=experiment.hardware.name, settings=settings or experiment.sweep.engine,
                      acceptance_rates=tuple(rates[:k]) if rates is not None and draft is not None and settings is None else None)


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's engine arguments that raysd sets, speculation apart, under the names that its Python classes have; the same for what is measured and what is served."""
    settings = spec.settings
    arguments = {"dtype": spec.dtype, "max_model_len": spec.max_model_len, "max_num_seqs": settings.max_num_seqs, "tensor_parallel_size": spec.tensor_parallel,
                 "enable_prefix_caching": False,
                 # The sampling defaults of the target's generation_config.json (repetition penalties, say) stay out; its end tokens are kept.
                 "generation_config": "vllm"}
    if spec.hardware == "cpu":
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    else:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_frac
    if settings.enforce_eager:
        arguments["enforce_eager"] = True
    if spec.chat_template is not None:
        arguments["chat_template"] = str(spec.chat_template)
    if spec.trust_remote_code:
        arguments["trust_remote_code"] = True
    return arguments


def extra_flags(settings: EngineSettings) -> list[str]:
    """The settings' `extra_args` as words of vLLM's command line."""
    return [_flag(name, value) for name, value in settings.extra_args.items()]


def _flag(name: str, value: Argument) -> str:
    flag = server_flag(name)
    if isinstance(value, bool):
        if "." in flag:
            return f"--{flag}={json.dumps(value)}"  # vLLM reads it as JSON
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"  # one word: argparse would take a value that begins with a dash for an argument


def speculative_config(spec: EngineSpec) -> dict[str, Any]:
    """vLLM's `speculative_config` of an engine with a draft; the settings' `draft_args` win over ours."""
    synthetic = {} if spec.acceptance_rates is None else {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(spec.acceptance_rates)}
    return {"method": "eagle3", "model": str(spec.draft), "num_speculative_tokens": spec.k, "use_local_argmax_reduction": True, **synthetic,
            **spec.settings.draft_args}
