"""Several vLLM servers side by side, for tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from raysd.backends.vllm_server import POLL_S, VllmServer, launch
from raysd.sweep.engine import EngineSpec


@contextlib.contextmanager
def start_servers(engines: Sequence[tuple[EngineSpec, Path]]) -> Iterator[list[VllmServer]]:
    """All ready on entry, every process of them ended on exit."""
    with contextlib.ExitStack() as stops:
        servers = []
        for spec, log_path in engines:
            servers.append(launch(spec, log_path))
            stops.callback(servers[-1].stop)
        starting = servers
        while starting := [server for server in starting if not server.is_ready()]:
            time.sleep(POLL_S)
        yield servers


class Shared:
    """A server that is up already and outlives whoever asks for it (a Server)."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def __getattr__(self, name: str):
        return getattr(self._server, name)

    def is_ready(self) -> bool:
        return True

    def stop(self) -> None:
        pass
