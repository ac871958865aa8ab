"""The capture engines: vLLM processes that generate with hidden states handed out by our connector, and what raysd reads of them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from raysd.backends.cpu_engine import cpu_environment, share
from raysd.backends.devices import engine_environment
from raysd.backends.process_group import end_group, exit_words
from raysd.errors import EngineError, ExperimentError
from raysd.experiment import Experiment
from raysd.hidden_states.capture import Answer, Request


@contextlib.contextmanager
def capture_engine(experiment: Experiment, target: Path, layer_ids: list[int], scratch: Path) -> Iterator[VllmCaptureEngine]:
    """The running vLLM engines of the capture stage (an EngineFactory); every process of them has ended on exit. On CPU this process computes with one
    thread meanwhile. Raises EngineError if one does not start, ExperimentError if there are more of them than cores.
    """
    folder = scratch / "states"
    cores = len(os.sched_getaffinity(0))
    if experiment.capture.engines > cores:
        raise ExperimentError(what=f"{experiment.capture.engines} engines cannot share {cores} cores", where="capture.engines", fix=f"use at most {cores}")
    workers: list[Worker] = []
    with contextlib.ExitStack() as ends:
        if experiment.hardware.name == "cpu":
            ends.enter_context(one_thread())
        ends.callback(shutil.rmtree, folder, ignore_errors=True)
        for number in range(experiment.capture.engines):
            (folder / str(number)).mkdir(parents=True)
            workers.append(Worker(experiment, engine_arguments(experiment, target, layer_ids, folder / str(number)), number))
            ends.callback(workers[-1].stop)  # one that does not end keeps no other from being ended
        for worker in workers:
            worker.receive()  # it is ready
        yield VllmCaptureEngine(workers, experiment)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes in this process with one thread: more would spin beside the engines, on their cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def engine_arguments(experiment: Experiment, target: Path, layer_ids: list[int], folder: Path) -> dict[str, Any]:
    """vLLM's arguments of one engine, as plain data. Prefix caching and chunked prefill are off: both leave tokens without a state."""
    section, capture = experiment.target, experiment.capture
    arguments: dict[str, Any] = {
        "model": str(target), "dtype": section.dtype, "tensor_parallel_size": section.tensor_parallel, "max_model_len": section.max_model_len,
        "trust_remote_code": section.trust_remote_code, "max_num_seqs": _concurrency(experiment),
        "max_num_batched_tokens": max(section.max_model_len, 4096), "enable_prefix_caching": False, "enable_chunked_prefill": False,
        "enforce_eager": True,  # one pass over the prompts does not earn back a compilation
        "disable_log_stats": True, "generation_config": "vllm",
        "scheduler_cls": "raysd.backends.capture_steps.CaptureScheduler", "async_scheduling": False,
        "worker_extension_cls": "raysd.backends.capture_steps.CaptureWorker",
        "speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1,
                               "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}}},
        "kv_transfer_config": {"kv_connector": "RaysdHiddenStatesConnector", "kv_connector_module_path": "raysd.backends.hidden_states_connector",
                               "kv_role": "kv_producer", "kv_connector_extra_config": {"folder": str(folder)}},
    }
    if experiment.hardware.name == "cpu":
        arguments["kv_cache_memory_bytes"] = capture.kv_cache_bytes // capture.engines
    else:
        arguments["gpu_memory_utilization"] = experiment.sweep.engine.gpu_memory_frac
    return arguments


def _concurrency(experiment: Experiment) -> int:
    return -(-experiment.capture.concurrency // experiment.capture.engines)


class Worker:
    """A process with one engine (capture_worker.py), leader of its process group."""

    def __init__(self, experiment: Experiment, arguments: dict[str, Any], number: int) -> None:
        """Starts it; number: which of the engines it is. Its lines go where this process's go."""
        environment, cores = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}, sorted(os.sched_getaffinity(0))
        if experiment.hardware.name == "cpu":
            cores = share(cores, experiment.capture.engines)[number]
            environment = cpu_environment(environment, cores, experiment.target.tensor_parallel)
        else:
            environment = engine_environment(environment)
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-m", "raysd.backends.capture_worker", str(theirs.fileno())], stdin=subprocess.PIPE,
                                             pass_fds=[theirs.fileno()], start_new_session=True, env={**environment, **experiment.sweep.engine.env})
        self._where = f"target.model: {arguments['model']}"
        self.send({"engine": arguments, "cores": cores})

    def send(self, message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended: `receive` says why
            self.connection.send(message)

    def receive(self) -> Any:
        """What the worker says next. Raises EngineError if it says that it failed, or has ended."""
        fix = "read the engine's lines in the job's log"
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionError) as err:
            raise EngineError(what=f"the vLLM engine for capture ended with {exit_words(self._process.wait())}", where=self._where, fix=fix) from err
        if isinstance(message, str):
            raise EngineError(what=message, where=self._where, fix=fix)
        return message

    def stop(self) -> None:
        end_group(self._process, self._where)
        self.connection.close()


class VllmCaptureEngine:
    """Shares requests out to the engines and reads the states that the connector wrote (a CaptureEngine)."""

    def __init__(self, workers: Sequence[Worker], experiment: Experiment) -> None:
        self._workers, self._experiment = workers, experiment

    def answers(self, groups: Sequence[Sequence[Request]]) -> Iterator[Answer]:
        capture = self._experiment.capture
        sampling = {"max_tokens": capture.max_tokens, "temperature": capture.temperature}
        index = itertools.count()
        numbered = [[(next(index), *request) for request in group] for group in groups]
        by_connection = {}
        for number, worker in enumerate(self._workers):
            own = [group[number::len(self._workers)] for group in numbered]
            worker.send({"groups": own, "concurrency": _concurrency(self._experiment), "sampling": sampling})
            by_connection[worker.connection] = [worker, sum(map(len, own))]
        while open_connections := [connection for connection, (_, left) in by_connection.items() if left]:
            for connection in wait(open_connections):
                by_connection[connection][1] -= 1
                yield _answer(*by_connection[connection][0].receive())


def _answer(index: int, token_ids: list[int], finish_reason: str, path: str) -> Answer:
    from safetensors.torch import load_file

    states = load_file(path)["states"]
    os.unlink(path)
    return Answer(index, token_ids, finish_reason, states)
