"""The capture engine: vLLM in this process's charge, generating with hidden states handed out by our connector."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raysd.backends.cpu_engine import cpu_environment
from raysd.errors import EngineError
from raysd.experiment import Experiment
from raysd.hidden_states.capture import Answer

STATES_TIMEOUT_S = 120
"""Longest wait for the file of a request that has ended; it is written in the engine's next step."""


@contextlib.contextmanager
def capture_engine(experiment: Experiment, target: Path, layer_ids: list[int], scratch: Path) -> Iterator[VllmCaptureEngine]:
    """A running vLLM engine for the capture stage (an EngineFactory). Raises EngineError if it does not start."""
    folder = scratch / "states"
    shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that was killed
    folder.mkdir(parents=True)
    # vLLM reads its settings from this process's environment and hands it on to the engine's.
    if experiment.hardware.name == "cpu":
        os.environ.update(cpu_environment(os.environ))
        for name in ("OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"):  # Ray sets the one to 1; the other would override kv_cache_bytes
            os.environ.pop(name, None)
    os.environ.update({"VLLM_NO_USAGE_STATS": "1", **experiment.sweep.engine.env})
    from vllm import LLM

    try:
        llm = LLM(**engine_arguments(experiment, target, layer_ids, folder))
    except Exception as err:  # vLLM raises whatever its engine process died of
        raise EngineError(what=f"vLLM did not start for capture: {err}", where=f"target.model: {target}", fix="read the engine's lines above in the job's log") from err
    try:
        yield VllmCaptureEngine(llm, experiment)
    finally:
        llm.llm_engine.engine_core.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def engine_arguments(experiment: Experiment, target: Path, layer_ids: list[int], folder: Path) -> dict[str, Any]:
    """vLLM's arguments, as plain data. Prefix caching and chunked prefill are off: both leave tokens without a state."""
    section, capture = experiment.target, experiment.capture
    arguments: dict[str, Any] = {
        "model": str(target), "dtype": section.dtype, "tensor_parallel_size": section.tensor_parallel, "max_model_len": section.max_model_len,
        "trust_remote_code": section.trust_remote_code, "max_num_seqs": capture.concurrency,
        "max_num_batched_tokens": max(section.max_model_len, 4096), "enable_prefix_caching": False, "enable_chunked_prefill": False,
        "enforce_eager": True,  # one pass over the prompts does not earn back a compilation
        "disable_log_stats": True, "generation_config": "vllm",
        "speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                               "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}},
        "kv_transfer_config": {"kv_connector": "RaysdHiddenStatesConnector", "kv_connector_module_path": "raysd.backends.hidden_states_connector",
                               "kv_role": "kv_producer", "kv_connector_extra_config": {"folder": str(folder)}},
    }
    if experiment.hardware.name == "cpu":
        arguments["kv_cache_memory_bytes"] = capture.kv_cache_bytes
    else:
        arguments["gpu_memory_utilization"] = experiment.sweep.engine.gpu_memory_frac
    return arguments


class VllmCaptureEngine:
    """Answers token prompts and reads the states that the connector wrote (a CaptureEngine)."""

    def __init__(self, llm: Any, experiment: Experiment) -> None:
        self._engine = llm.llm_engine
        self._capture = experiment.capture

    def answers(self, prompts: Sequence[list[int]]) -> Iterator[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=self._capture.max_tokens, temperature=self._capture.temperature, seed=self._capture.seed, detokenize=False,
                                extra_args={"kv_transfer_params": {"include_output_tokens": True}})
        queue = iter(enumerate(prompts))
        in_flight = 0
        finished: list[tuple[int, Any]] = []
        while True:
            # Requests go in as others leave, so that the order of work follows the order of prompts and shards complete early.
            while in_flight < self._capture.concurrency and (entry := next(queue, None)) is not None:
                index, token_ids = entry
                self._engine.add_request(str(index), {"prompt_token_ids": token_ids}, params)
                in_flight += 1
            if not in_flight:
                break
            for output in self._engine.step():
                if output.finished:
                    in_flight -= 1
                    finished.append((int(output.request_id), output))
            while finished and (in_flight == 0 or _is_written(finished[0][1])):
                yield self._answer(*finished.pop(0))
        for index, output in finished:
            yield self._answer(index, output)

    def _answer(self, index: int, output: Any) -> Answer:
        from safetensors.torch import load_file

        path = Path(output.kv_transfer_params["hidden_states_path"])
        deadline = time.monotonic() + STATES_TIMEOUT_S
        while not path.is_file():
            if time.monotonic() > deadline:
                raise EngineError(what=f"no hidden states of request {index} within {STATES_TIMEOUT_S} s", where=path, fix="read the engine's lines in the job's log")
            time.sleep(0.01)
        states = load_file(path)["states"]
        path.unlink()
        completion = output.outputs[0]
        return Answer(index, list(output.prompt_token_ids) + list(completion.token_ids), completion.finish_reason, states)


def _is_written(output: Any) -> bool:
    return os.path.exists(output.kv_transfer_params["hidden_states_path"])
